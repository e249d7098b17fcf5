"""Measures the engine on a GPU: six works by the default plan and by others, with several workers on the card, beside a
plain loop, torch.func.vmap and JAX's vmap in the same run.

    python benchmarks/gpu.py --out build/gpu
    python benchmarks/gpu.py --goal all --out build/gpu

It runs in this process, without Ray, and needs torch, numpy, pyarrow, pydantic, PyYAML, safetensors, xxhash, click and
rich only; JAX where it is. The package need not be installed. It writes gpu.json and gpu.md: clients per second (the
median over rounds), their ratio to the plain loop, the plan, the peak of the memory of tensors and, with `--profile`,
the share of a round in which a kernel runs. Each measurement is written as soon as it is made, with a line on standard
error, and begins no further round after `--seconds`. `--device cpu --tiny` runs all of it on a processor, for a test of
the script; such figures mean nothing.

k workers on the card are k processes with a federation each, of which each may take a k-th of the card's memory. Their
clients per second are added up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
WORKS = ("w1", "w2", "w3", "resnet18", "vit", "lstm")
SGD = {"name": "sgd", "lr": 0.05}
METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"name": "scaffold", "rule": SGD},
    "fedmuon_bc": {"name": "fedmuon_bc"},
    "fedmud": {"name": "fedmud", "nearest": True},
}
"""Methods of further works, as in "w1-scaffold", which are measured by the default plan."""
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "one at a time": {"block": 1, "kernels": "torch"},
    "one at a time, graph": {"block": 1, "kernels": "streams"},
    "streams": {"block": 4, "kernels": "streams"},
    "vectorised": {"block": "cohort", "kernels": "torch"},
    "graphs": {"block": "cohort", "kernels": "graph"},
    "products": {"block": "cohort", "kernels": "products"},
    "default, tf32": {"precision": "tf32"},
    "default, bfloat16": {"precision": "bfloat16"},
}
"""Engine settings; "cohort" stands for the number of clients of a round."""
ON_A_PROCESSOR = ("one at a time", "vectorised")
SHARED = "graphs"
"""The mode in which several processes share a card."""
WARM_UP = 3
"""Rounds that are not timed: libraries are loaded, and recorded steps are proven."""
PROFILED = 3
"""Rounds whose kernels are summed up."""
SECONDS = 20.0
"""The time after which a measurement begins no further round, from its first timed round on."""
WARMING_UP = 4.0
"""Rounds that are not timed may take so many times as long."""
LATE = 1.25
"""A goal is left after so many times its target: it has missed it, and how far it came is told."""
TINY = {"clients": 4, "cohort": 2, "local": {"steps": 1, "batch": 2}}

CIFAR_CNN: dict[str, Any] = {
    "what": "1,000 clients of 50 images, cohort 50, 1,500 rounds of one epoch, batch 10, CNN of 1.6 M parameters",
    "workload": {"name": "gpu_cnn", "examples": 50_000},
    "method": {"name": "fedavg", "rule": SGD},
    "federation": {"clients": 1000, "cohort": 50, "rounds": 1500, "local": {"epochs": 1, "batch": 10}},
    "seconds": 60.0,
}
GOALS: dict[str, dict[str, Any]] = {
    "cifar-cnn": CIFAR_CNN,
    "cifar-cnn-scaffold": {
        **CIFAR_CNN,
        "what": f"the same by SCAFFOLD: {CIFAR_CNN['what']}",
        "method": {"name": "scaffold", "rule": SGD},
    },
    "feddua-cifar": {
        "what": "100 clients, cohort 20, 500 rounds of 20 steps, batch 50, ResNet-18",
        "workload": {"name": "gpu_resnet18", "examples": 50_000},
        "method": {"name": "feddu_adam"},
        "federation": {"clients": 100, "cohort": 20, "rounds": 500, "local": {"steps": 20, "batch": 50}},
        "seconds": 1200.0,
    },
}
"""Runs and the seconds in which they should end."""


def make_importable() -> None:
    """Have this process and its children find the package where it is not installed."""
    try:
        import fedfleet  # noqa: F401
    except ImportError:
        source = str(ROOT / "src")
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])


def setup(work: str, mode: str, device: str, rounds: int, share: float, tiny: bool) -> Any:
    """The experiment of one measurement. share: of the card's memory."""
    from benchmarks.gpu_works import FEDERATIONS, workload_of
    from fedfleet.engine.config.schema import experiment

    work, _, method = work.partition("-")
    federation = {**(TINY if tiny else FEDERATIONS[work]), "rounds": rounds}
    settings = dict(MODES[mode])
    if settings.get("block") == "cohort":
        settings["block"] = federation["cohort"]
    return experiment(
        {
            "plugins": ["benchmarks.gpu_works"],
            "workload": workload_of(work, examples(federation)),
            "method": METHODS[method] if method else {"name": "fedavg", "rule": SGD},
            "federation": federation,
            "engine": {
                "backend": "local",
                "device": device,
                "gpus": share if share < 1 and device != "cpu" else 0,
                **settings,
            },
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


def examples(federation: dict[str, Any]) -> int:
    """Training rows: as many for each client as a round needs."""
    local = federation["local"]
    return federation["clients"] * local["batch"] * local.get("steps", 5)


def measure(
    work: str,
    mode: str,
    device: str,
    rounds: int,
    share: float = 1.0,
    tiny: bool = False,
    seconds: float = SECONDS,
    profiled: bool = False,
) -> dict[str, Any]:
    """Clients per second, the plan, and the peak of the device's memory. seconds: after which no further round begins.
    profiled: whether the share of time in kernels is found, too."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    told: list[str] = []
    began = time.perf_counter()
    rows, last = run_for(setup(work, mode, device, WARM_UP + rounds + 1, share, tiny), seconds, told, WARM_UP)
    took = time.perf_counter() - began
    timed = rows[WARM_UP : -1 if last else None]  # the last round evaluates
    warm = bool(timed)
    timed = timed or rows[-1:]
    speed = median(row["client/count"] / row["time/seconds"] for row in timed)
    found: dict[str, Any] = {"clients_per_s": speed, "rounds": len(timed), "seconds": took, "plan": told[0]}
    if not warm:
        found["plan"] += ", warming up"
    if last:
        found["model_sha256"] = last.model_sha256
    else:
        found["stopped_after_s"] = seconds
    if device != "cpu":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        if last and profiled:
            found["kernel_share"] = kernel_share(work, mode, device, share, tiny)
    return found


def run_for(
    experiment: Any, seconds: float, told: list[str] | None = None, warm_up: int = 0
) -> tuple[list[dict[str, float]], Any]:
    """(the records of the rounds that ended, the result or None): the run is left after the first round that ends when
    so many seconds have passed since the first `warm_up` rounds, which may take WARMING_UP times as long, not counting
    round 1 and what comes before it. told: a list that gets the lines of the log, of which the first one is the
    plan."""
    from fedfleet.engine.api import rounds
    from fedfleet.engine.runs.observer import Observer

    class Log(Observer):
        def event(self, text: str) -> None:
            (told if told is not None else []).append(text)

    rows, began = [], time.perf_counter()
    running = rounds(experiment, observers=[Log()])
    for row in running:
        rows.append(row)
        now, limit = time.perf_counter(), seconds if len(rows) > warm_up else seconds * WARMING_UP
        if warm_up and len(rows) in (1, warm_up):
            began = now
        if now - began > limit and len(rows) < experiment.federation.rounds:
            running.close()
            return rows, None
    return rows, running.result


def kernel_share(work: str, mode: str, device: str, share: float, tiny: bool) -> float:
    """The share of some rounds' time in which the device runs a kernel."""
    from torch.profiler import ProfilerActivity, profile

    from fedfleet.engine.api import rounds

    total, seconds = 0.0, 0.0
    running = rounds(setup(work, mode, device, WARM_UP + PROFILED + 1, share, tiny))
    for _ in range(WARM_UP):
        next(running)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        began = time.perf_counter()
        for _ in range(PROFILED):
            next(running)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    for _ in running:
        pass
    total = sum(event.self_device_time_total for event in profiled.key_averages()) * 1e-6
    return total / seconds


def workers(
    work: str, mode: str, device: str, rounds: int, count: int, tiny: bool, seconds: float = SECONDS
) -> dict[str, Any]:
    """The sum of the clients per second of `count` processes that share the card, and their model_sha256."""
    given = [work, mode, device, rounds, 1 / count, tiny, seconds]
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(given)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    found = []
    for process in processes:
        out, _ = process.communicate()
        if process.returncode:
            raise click.ClickException(f"a worker of {work} ended with status {process.returncode}, see above")
        found.append(json.loads(out.splitlines()[-1]))
    return {
        "clients_per_s": sum(each["clients_per_s"] for each in found),
        "model_sha256": sorted({each["model_sha256"] for each in found if "model_sha256" in each}),
    }


def child(given: str) -> None:
    print(json.dumps(measure(*json.loads(given))))


# --- goals --------------------------------------------------------------------------------------------------------
def goal(name: str, device: str, tiny: bool) -> dict[str, Any]:
    """Run what a goal asks for: what it took, and whether that is within its target."""
    from fedfleet.engine.config.schema import experiment

    target = GOALS[name]
    federation = {**TINY, "rounds": 2} if tiny else target["federation"]
    workload = {**target["workload"], "examples": examples(federation)} if tiny else target["workload"]
    kernels = {"block": "auto", "kernels": "auto"} if device != "cpu" else {"block": 2, "kernels": "torch"}
    made = experiment(
        {
            "plugins": ["benchmarks.gpu_works"],
            "workload": workload,
            "method": target["method"],
            "federation": federation,
            "engine": {"backend": "local", "device": device, **kernels},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    began = time.perf_counter()
    rows, result = run_for(made, LATE * target["seconds"])
    took = time.perf_counter() - began
    return {
        "what": target["what"],
        "seconds": took,
        "target": target["seconds"],
        "met": result is not None and took <= target["seconds"] and not tiny,
        "rounds": f"{len(rows)} of {federation['rounds']}",
        "seconds_in_rounds": sum(row["time/seconds"] for row in rows),
        "model_sha256": result.model_sha256 if result is not None else None,
    }


# --- the report -------------------------------------------------------------------------------------------------------
def machine(device: str) -> dict[str, Any]:
    name = "processor" if device == "cpu" else torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "date": time.strftime("%Y-%m-%d")}


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["machine"]
    lines = [f"# {about['device']}, torch {about['torch']}, CUDA {about['cuda']}, {about['date']}", ""]
    if report["tiny"]:
        lines += ["A test of the script with tiny federations: these figures mean nothing.", ""]
    lines += ["| work | mode | clients/s | x plain loop | x best vmap | plan | time in kernels | peak memory, MiB |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |"]
    for line in report["lines"]:
        kernels = f"{line['kernel_share']:.0%}" if "kernel_share" in line else ""
        peak = f"{line['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in line else ""
        speed = f"{line['clients_per_s']:,.1f}" if "error" not in line else f"none: {line['error']}"
        ratios = " | ".join(ratio(report, line, yardsticks) for yardsticks in (("plain loop",), VMAPS))
        lines.append(f"| {line['work']} | {line['mode']} | {speed} | {ratios} | {plan_of(line)} | {kernels} | {peak} |")
    if report["goals"]:
        lines += ["", "| goal | found | target | met |", "| --- | ---: | ---: | --- |"]
    for name, found in report["goals"].items():
        value = f"{found['seconds']:.1f} s, {found['rounds']} rounds"
        row = f"| {name}: {found['what']} | {value} | {found['target']:g} s | {'yes' if found['met'] else 'no'} |"
        lines.append(row)
    return "\n".join([*lines, ""])


VMAPS = ("torch.func.vmap", "JAX vmap")


def ratio(report: dict[str, Any], line: dict[str, Any], yardsticks: tuple[str, ...]) -> str:
    """How many times as fast a line is as the quickest of some yardsticks, "" if there is none."""
    work = line["work"].partition("-")[0]
    lines = [each for each in report["lines"] if each["work"] == work and each["mode"] in yardsticks]
    speeds = [each["clients_per_s"] for each in lines if "error" not in each]
    return f"{line['clients_per_s'] / max(speeds):,.2f}" if speeds and "error" not in line else ""


def plan_of(line: dict[str, Any]) -> str:
    """The block and the kernels of a line."""
    return line.get("plan", "").removeprefix("plan: ").partition(" (")[0]


@click.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:0 or cpu.")
@click.option("--works", default=",".join(WORKS), show_default=True, help="The works, with commas; none for no work.")
@click.option("--workers", "counts", default="", help="Numbers of processes on the card, as in 1,2,4.")
@click.option("--modes", default="all", show_default=True, help="The modes, with semicolons, and yardsticks.")
@click.option("--rounds", default=20, show_default=True, help="Timed rounds of each measurement.")
@click.option("--seconds", default=SECONDS, show_default=True, help="After which a measurement begins no round.")
@click.option("--goal", "asked_goals", default="", help="cifar-cnn, cifar-cnn-scaffold, feddua-cifar, or all.")
@click.option("--profile", "profiled", is_flag=True, help="Find the share of time in kernels, too.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/gpu"), show_default=True)
@click.option("--tiny", is_flag=True, help="Tiny federations, for a test of this script.")
@click.option("--child", "given", hidden=True)
def main(
    device: str,
    works: str,
    counts: str,
    modes: str,
    rounds: int,
    seconds: float,
    asked_goals: str,
    profiled: bool,
    out: Path,
    tiny: bool,
    given: str | None,
) -> None:
    """Measure the engine on a GPU."""
    sys.path.insert(0, str(ROOT))
    make_importable()
    if given is not None:
        return child(given)
    if device != "cpu" and not torch.cuda.is_available():
        raise click.UsageError("no CUDA device is here; --device cpu --tiny tests this script on the processor")
    wanted = sorted(GOALS) if asked_goals == "all" else [name for name in asked_goals.split(",") if name]
    chosen = [] if works == "none" else works.split(",")
    valid = [*WORKS, *(f"w1-{method}" for method in METHODS), *GOALS]
    if unknown := [name for name in (*chosen, *wanted) if name not in valid]:
        raise click.UsageError(f"unknown: {', '.join(unknown)}; valid: {', '.join(valid)}")
    report: dict[str, Any] = {"machine": machine(device), "tiny": tiny, "lines": [], "goals": {}}
    out.mkdir(parents=True, exist_ok=True)
    for work in chosen:
        for mode in modes_of(work, device, modes):
            add_line(out, report, work, mode, lambda: found_of(work, mode, device, rounds, tiny, seconds, profiled))  # noqa: B023
        for count in map(int, filter(None, counts.split(","))):
            shared = SHARED if device != "cpu" else ON_A_PROCESSOR[-1]
            name = f"{shared}, {count} processes"
            add_line(out, report, work, name, lambda: workers(work, shared, device, rounds, count, tiny, seconds))  # noqa: B023
    for name in wanted:
        report["goals"][name] = found = goal(name, device, tiny)
        save(out, report)
        click.echo(f"{name}: {json.dumps(found)}", err=True)
    click.echo(markdown(report))


def modes_of(work: str, device: str, asked: str) -> list[str]:
    """The modes and yardsticks of a work, the yardsticks first."""
    from benchmarks.gpu_yardsticks import yardsticks

    if "-" in work:
        return ["default"]
    found = [*yardsticks(work), *(mode for mode in MODES if device != "cpu" or mode in ON_A_PROCESSOR)]
    return [mode for mode in found if asked == "all" or mode in asked.split(";")]


def found_of(
    work: str, mode: str, device: str, rounds: int, tiny: bool, seconds: float, profiled: bool
) -> dict[str, Any]:
    """What is found of a work in a mode, or by a yardstick."""
    from benchmarks import gpu_yardsticks
    from benchmarks.gpu_works import FEDERATIONS

    if mode in MODES:
        return measure(work, mode, device, rounds, 1.0, tiny, seconds, profiled)
    return gpu_yardsticks.measure(work, mode, TINY if tiny else FEDERATIONS[work], device, rounds, seconds)


def add_line(out: Path, report: dict[str, Any], work: str, mode: str, find: Callable[[], dict[str, Any]]) -> None:
    """Make a measurement, keep it, and tell of it: a machine may be taken away at any time. One that fails is told of,
    and the next ones go on."""
    began = time.perf_counter()
    try:
        line = {"work": work, "mode": mode, **find()}
        text = f"{line['clients_per_s']:,.1f} clients/s"
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        line = {"work": work, "mode": mode, "error": text}
    report["lines"].append(line)
    save(out, report)
    click.echo(f"{work}, {mode}: {text} ({time.perf_counter() - began:.1f} s)", err=True)


def save(out: Path, report: dict[str, Any]) -> None:
    """Write what was measured so far."""
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(markdown(report), encoding="utf-8")


if __name__ == "__main__":
    main()
