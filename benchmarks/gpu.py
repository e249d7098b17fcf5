"""Measures the engine on a GPU: six works, one client at a time, vectorised, replayed from CUDA graphs, and with
several workers on the card.

    python benchmarks/gpu.py --out build/gpu
    python benchmarks/gpu.py --goal all --out build/gpu

It runs in this process, without Ray, and needs torch, numpy, pyarrow, pydantic, PyYAML, safetensors, xxhash, click and
rich only. The package need not be installed. It writes gpu.json and gpu.md: clients per second (the median over
rounds), the share of a round in which a kernel runs, and the peak of the memory of tensors. Each measurement is written
as soon as it is made, with a line on standard error, and begins no further round after `--seconds`. `--device cpu
--tiny` runs all of it on a processor, for a test of the script; such figures mean nothing.

k workers on the card are k processes with a federation each, of which each may take a k-th of the card's memory. Their
clients per second are added up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
WORKS = ("w1", "w2", "w3", "resnet18", "vit", "lstm")
MODES: dict[str, dict[str, Any]] = {
    "one at a time": {"block": 1, "kernels": "torch"},
    "vectorised": {"block": "cohort", "kernels": "torch"},
    "graphs": {"block": "cohort", "kernels": "graph"},
}
"""Engine settings; "cohort" stands for the number of clients of a round, at most LARGEST_BLOCK."""
LARGEST_BLOCK = 50
WARM_UP = 3
"""Rounds that are not timed: libraries are loaded, and recorded steps are proven."""
PROFILED = 3
"""Rounds whose kernels are summed up."""
SECONDS = 60.0
"""The time after which a measurement begins no further round."""
LATE = 1.25
"""A goal is left after so many times its target: it has missed it, and how far it came is told."""
TINY = {"clients": 4, "cohort": 2, "local": {"steps": 1, "batch": 2}}

MOONSHOTS: dict[str, dict[str, Any]] = {
    "cifar-cnn": {
        "what": "1,000 clients of 50 images, cohort 50, 1,500 rounds of one epoch, batch 10, CNN of 1.6 M parameters",
        "workload": {"name": "gpu_cnn", "examples": 50_000},
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.05}},
        "federation": {"clients": 1000, "cohort": 50, "rounds": 1500, "local": {"epochs": 1, "batch": 10}},
        "seconds": 60.0,
    },
    "feddua-cifar": {
        "what": "100 clients, cohort 20, 500 rounds of 20 steps, batch 50, ResNet-18",
        "workload": {"name": "gpu_resnet18", "examples": 50_000},
        "method": {"name": "feddu_adam"},
        "federation": {"clients": 100, "cohort": 20, "rounds": 500, "local": {"steps": 20, "batch": 50}},
        "seconds": 1200.0,
    },
}
"""Runs and the seconds in which they should end. "w1-ratio" compares two modes instead: see `ratio`."""
RATIO = 50.0
"""How many times as fast as one client at a time W1 should be on the same card."""


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
    from benchmarks.gpu_works import FEDERATIONS
    from fedfleet.engine.config.schema import experiment

    federation = {**(TINY if tiny else FEDERATIONS[work]), "rounds": rounds}
    block = MODES[mode]["block"]
    block = min(federation["cohort"], LARGEST_BLOCK) if block == "cohort" else block
    workload = (
        f"gpu_{work}" if work in ("w1", "w2", "w3") else {"name": f"gpu_{work}", "examples": examples(federation)}
    )
    return experiment(
        {
            "plugins": ["benchmarks.gpu_works"],
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.05}},
            "federation": federation,
            "engine": {
                "backend": "local",
                "device": device,
                "gpus": share if share < 1 and device != "cpu" else 0,
                "block": block,
                "kernels": MODES[mode]["kernels"],
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
    work: str, mode: str, device: str, rounds: int, share: float = 1.0, tiny: bool = False, seconds: float = SECONDS
) -> dict[str, Any]:
    """Clients per second, the share of time in kernels, and the peak of the device's memory. seconds: after which no
    further round begins."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    rows, last = run_for(setup(work, mode, device, WARM_UP + rounds + 1, share, tiny), seconds)
    timed = rows[WARM_UP : -1 if last else None] or rows[-1:]  # the last round evaluates
    speed = median(row["client/count"] / row["time/seconds"] for row in timed)
    found: dict[str, Any] = {"clients_per_s": speed, "rounds": len(timed)}
    if last:
        found["model_sha256"] = last.model_sha256
    else:
        found["stopped_after_s"] = seconds
    if device != "cpu":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        if last:
            found["kernel_share"] = kernel_share(work, mode, device, share, tiny)
    return found


def run_for(experiment: Any, seconds: float) -> tuple[list[dict[str, float]], Any]:
    """(the records of the rounds that ended, the result or None): the run is left after the first round that ends when
    so many seconds have passed."""
    from fedfleet.engine.api import rounds

    rows, began = [], time.perf_counter()
    running = rounds(experiment)
    for row in running:
        rows.append(row)
        if time.perf_counter() - began > seconds and len(rows) < experiment.federation.rounds:
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
def goal(name: str, device: str, tiny: bool, seconds: float = SECONDS) -> dict[str, Any]:
    """Run what a goal asks for: what it took, and whether that is within its target.

    seconds: of each measurement of a ratio.
    """
    from fedfleet.engine.config.schema import experiment

    if name == "w1-ratio":
        return ratio(device, tiny, seconds)
    target = MOONSHOTS[name]
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


def ratio(device: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """W1 with the quicker of "vectorised" and "graphs" against one client at a time."""
    modes = [mode for mode in MODES if device != "cpu" or mode != "graphs"]
    rounds = 1 if tiny else 30
    speeds = {mode: measure("w1", mode, device, rounds, 1.0, tiny, seconds)["clients_per_s"] for mode in modes}
    found = max(speeds[mode] for mode in modes[1:]) / speeds["one at a time"]
    what = "W1, times the clients per second of one client at a time on the same card"
    return {"what": what, "ratio": found, "target": RATIO, "met": found >= RATIO and not tiny, "speeds": speeds}


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
    lines += ["| work | mode | clients/s | time in kernels | peak memory, MiB |", "| --- | --- | ---: | ---: | ---: |"]
    for line in report["lines"]:
        kernels = f"{line['kernel_share']:.0%}" if "kernel_share" in line else ""
        peak = f"{line['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in line else ""
        lines.append(f"| {line['work']} | {line['mode']} | {line['clients_per_s']:,.1f} | {kernels} | {peak} |")
    if report["goals"]:
        lines += ["", "| goal | found | target | met |", "| --- | ---: | ---: | --- |"]
    for name, found in report["goals"].items():
        value = f"{found['ratio']:.1f} x" if "ratio" in found else f"{found['seconds']:.1f} s, {found['rounds']} rounds"
        unit = "x" if "ratio" in found else "s"
        row = f"| {name}: {found['what']} | {value} | {found['target']:g} {unit} | {'yes' if found['met'] else 'no'} |"
        lines.append(row)
    return "\n".join([*lines, ""])


@click.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:0 or cpu.")
@click.option("--works", default=",".join(WORKS), show_default=True, help="The works, with commas; none for no work.")
@click.option("--workers", "counts", default="1,2,4", show_default=True, help="Numbers of processes on the card.")
@click.option("--rounds", default=20, show_default=True, help="Timed rounds of each measurement.")
@click.option("--seconds", default=SECONDS, show_default=True, help="After which a measurement begins no round.")
@click.option("--goal", "asked_goals", default="", help="w1-ratio, cifar-cnn, feddua-cifar, or all; with commas.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/gpu"), show_default=True)
@click.option("--tiny", is_flag=True, help="Tiny federations, for a test of this script.")
@click.option("--child", "given", hidden=True)
def main(
    device: str,
    works: str,
    counts: str,
    rounds: int,
    seconds: float,
    asked_goals: str,
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
    names = {"w1-ratio", *MOONSHOTS}
    wanted = sorted(names) if asked_goals == "all" else [name for name in asked_goals.split(",") if name]
    chosen = [] if works == "none" else works.split(",")
    if unknown := [name for name in (*chosen, *wanted) if name not in names and name not in WORKS]:
        raise click.UsageError(f"unknown: {', '.join(unknown)}; valid: {', '.join([*WORKS, *sorted(names)])}")
    report: dict[str, Any] = {"machine": machine(device), "tiny": tiny, "lines": [], "goals": {}}
    out.mkdir(parents=True, exist_ok=True)
    modes = [mode for mode in MODES if device != "cpu" or mode != "graphs"]
    for work in chosen:
        for mode in modes:
            found = measure(work, mode, device, rounds, 1.0, tiny, seconds)
            add_line(out, report, {"work": work, "mode": mode, **found})
        for count in map(int, filter(None, counts.split(","))):
            found = workers(work, modes[-1], device, rounds, count, tiny, seconds)
            add_line(out, report, {"work": work, "mode": f"{modes[-1]}, {count} processes", **found})
    for name in wanted:
        report["goals"][name] = found = goal(name, device, tiny, seconds)
        save(out, report)
        click.echo(f"{name}: {json.dumps(found)}", err=True)
    click.echo(markdown(report))


def add_line(out: Path, report: dict[str, Any], line: dict[str, Any]) -> None:
    """Keep a measurement, and tell of it: a machine may be taken away at any time."""
    report["lines"].append(line)
    save(out, report)
    click.echo(f"{line['work']}, {line['mode']}: {line['clients_per_s']:,.1f} clients/s", err=True)


def save(out: Path, report: dict[str, Any]) -> None:
    """Write what was measured so far."""
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(markdown(report), encoding="utf-8")


if __name__ == "__main__":
    main()
