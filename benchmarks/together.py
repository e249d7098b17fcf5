"""Compares `fedfleet search`, whose trials share processes, with a plain loop of Optuna over `fedfleet.run`.

    python benchmarks/together.py [digits | w1] [--trials 20] [--rounds 100] [--ways plain,together,alone] [--where]

The trials are FedAvg with momentum; Optuna chooses step size and momentum at random, the same ones every way.

    plain     one process asks Optuna, calls `fedfleet.run` for each trial, and tells Optuna
    together  the command `fedfleet search`, from its start to the report
    alone     the same with search.together=false: each trial has a process of Ray

Times are seconds of the clock and seconds of the processors, with those of all processes that were started. Nothing is
tracked in MLflow. The share that is not compute is that of all processors from the beginning of the command to its end:
compute are local steps, evaluations, sums of messages and the server's steps. `--where` prints all parts:

    training    local steps
    evaluation  of the model
    sums        of messages, and the server's steps
    batches     drawn and gathered
    states      of clients, read and written
    rounds      the rest of the rounds: drawing cohorts, planning tasks, commits, records
    outside     processors that no round used: imports, loading and dividing the data, checks, planning, files, the
                report, and waiting
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANGES = {
    "method.rule.lr": {"search": "loguniform", "low": 0.01, "high": 1.0},
    "method.rule.mu": {"search": "uniform", "low": 0.0, "high": 0.9},
}
W1 = {
    "plugins": ["fedfleet.tune.bench.works"],
    "workload": "w1",
    "federation": {"clients": 1000, "cohort": 100, "local": {"steps": 5, "batch": 10}},
}


def experiment(work: str, rounds: int, values: dict[str, Any]) -> dict[str, Any]:
    """Plain data of a trial's experiment. values: of the ranges, or the ranges themselves."""
    if work == "digits":
        from fedfleet.tune.files import load_data

        made = load_data("digits", ())
    else:
        made = {**W1, "federation": dict(W1["federation"])}
    rule = {"name": "momentum", "lr": values["method.rule.lr"], "mu": values["method.rule.mu"]}
    made["method"] = {"name": "fedavg", "rule": rule}
    made["federation"] = {**made["federation"], "rounds": rounds}
    made["evaluate"] = {"every": max(1, rounds // 20)}
    return {**made, "engine": {"backend": "local"}, "tracking": {"uri": "none"}}


def plain(work: str, rounds: int, trials: int, folder: Path) -> float:
    """The best value that a plain loop finds."""
    import optuna

    import fedfleet
    from fedfleet.engine.config.schema import experiment as validated
    from fedfleet.engine.errors import Diverged

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 0.01, 1.0, log=True)
        values = {"method.rule.lr": lr, "method.rule.mu": trial.suggest_float("mu", 0.0, 0.9)}
        try:
            result = fedfleet.run(validated(experiment(work, rounds, values)), folder / f"{trial.number:04d}")
        except Diverged as error:
            raise optuna.TrialPruned from error
        return result.metrics["eval/accuracy"]

    study.optimize(objective, n_trials=trials)
    return study.best_value


def command(way: str, work: str, rounds: int, trials: int, folder: Path) -> list[str]:
    """The command line that searches in one of the ways."""
    if way == "plain":
        return [
            sys.executable,
            __file__,
            work,
            "--inside",
            str(folder),
            "--rounds",
            str(rounds),
            "--trials",
            str(trials),
        ]
    import yaml

    file = folder / "search.yaml"
    together = "auto" if way == "together" else False
    data = experiment(work, rounds, RANGES)
    data["search"] = {"sampler": "random", "trials": trials, "together": together}
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    start = "from fedfleet.tune.main import main; main()"
    return [sys.executable, "-c", start, "search", str(file), "--out", str(folder / "search")]


def measure(way: str, work: str, rounds: int, trials: int) -> dict[str, Any]:
    """The seconds that one way takes."""
    with tempfile.TemporaryDirectory() as folder:
        line = command(way, work, rounds, trials, Path(folder))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(line, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        where = shares(Path(folder), took * (1 if way == "plain" else len(os.sched_getaffinity(0))))
        not_compute = 1 - sum(where[name] for name in ("training", "evaluation", "sums"))
        return {"way": way, "seconds": took, "processor": used, "not_compute": not_compute, "where": where}


COLUMNS = {
    "training": ("time/compute",),
    "evaluation": ("time/evaluate",),
    "sums": ("time/reduce", "time/sum", "time/server"),
    "batches": ("time/data",),
    "states": ("time/state",),
}
"""Part of the time -> columns of a record that it is the sum of."""


def shares(folder: Path, available: float) -> dict[str, float]:
    """The parts of the processors' time, see above. available: seconds of all processors, or of one for the plain loop,
    which has one process."""
    import pyarrow.parquet as pq

    seconds = dict.fromkeys((*COLUMNS, "rounds"), 0.0)
    for file in folder.rglob("rounds.parquet"):
        for row in pq.read_table(file).to_pylist():
            parts = {name: sum(row.get(each) or 0.0 for each in columns) for name, columns in COLUMNS.items()}
            parts["rounds"] = row["time/seconds"] - sum(parts.values())
            seconds = {name: seconds[name] + part for name, part in parts.items()}
    found = {name: part / available for name, part in seconds.items()}
    return {**found, "outside": 1 - sum(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", nargs="?", default="digits", choices=["digits", "w1"])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ways", default="plain,together,alone")
    parser.add_argument("--where", action="store_true", help="print what the processors' time was used for")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        plain(asked.work, asked.rounds, asked.trials, Path(asked.inside))
        return
    found = [measure(way, asked.work, asked.rounds, asked.trials) for way in asked.ways.split(",")]
    for one in found:
        ratio = found[0]["seconds"] / one["seconds"]
        print(
            f"{one['way']:10} {one['seconds']:7.1f} s, {one['processor']:7.1f} s of processors, "
            f"{one['not_compute']:.1%} not compute, {ratio:.2f} x"
        )
        if asked.where:
            print("    " + ", ".join(f"{name} {share:.1%}" for name, share in one["where"].items()))
    print(json.dumps({"work": asked.work, "trials": asked.trials, "rounds": asked.rounds, "ways": found}))


if __name__ == "__main__":
    main()
