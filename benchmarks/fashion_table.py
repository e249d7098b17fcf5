"""Every method of the table on FashionMNIST: what it reaches, in which time, with how many bytes.

    python benchmarks/fashion_table.py              what is missing in fashion_table.json; stopped, it goes on there
    python benchmarks/fashion_table.py fedavg stem  these methods
    python benchmarks/fashion_table.py --short      the short runs only, which step sizes are chosen by

LeNet, 16 clients of which 8 a round, 5 steps of 64, Dirichlet 10 and 0.1, seed 0, in this process on one thread. For
each method and Dirichlet level: 25 rounds of every point of its grid in fashion_table.yaml; then 300 rounds of the one
with the highest accuracy, the mean of rounds 15, 20 and 25. Where these diverge, or end (mean of the last five
evaluations) below what the short run had, the next point is run. Accuracy is the test set's, as in the papers' tuning,
which flatters all methods alike. The data set is found by FEDFLEET_DATA. docs/methods.md shows the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from fedfleet.engine import run
from fedfleet.engine.errors import Diverged
from fedfleet.tune.files import load, own

HERE = Path(__file__).parent
GRIDS, RESULTS = HERE / "fashion_table.yaml", HERE / "fashion_table.json"
LEVELS = (10.0, 0.1)
SHORT, LONG = 25, 300
EVERY = {SHORT: 5, LONG: 20}
LAST = {SHORT: 3, LONG: 5}
"""Evaluations at the end whose mean counts."""


def points(name: str, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The method with every combination of its grid, {name: …, arguments}."""
    fixed = {key: value for key, value in entry.items() if key != "grid"}
    for values in itertools.product(*entry["grid"].values()):
        method: dict[str, Any] = own({"name": name, **fixed})
        for path, value in zip(entry["grid"], values, strict=True):
            *outer, last = path.split(".")
            place = method
            for key in outer:
                place = place[key]
            place[last] = value
        yield method


class Results:
    """fashion_table.json: one line a run, found again by method, level and rounds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["runs"] if path.is_file() else []

    def of(self, method: dict[str, Any], beta: float, rounds: int) -> dict[str, Any]:
        """The stored run, else a new one, stored."""
        wanted = {"method": method, "beta": beta, "rounds": rounds}
        for made in self.runs:
            if wanted.items() <= made.items():
                return made
        made = {**wanted, **measured(method, beta, rounds)}
        self.runs.append(made)
        self.write()
        return made

    def write(self) -> None:
        lines = ",\n".join(json.dumps(made) for made in self.runs)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(f'{{"torch": "{torch.__version__}", "runs": [\n{lines}\n]}}\n', "utf-8")
        os.replace(fresh, self.path)


def measured(method: dict[str, Any], beta: float, rounds: int) -> dict[str, Any]:
    """Run it. accuracy: at every evaluation; cpu_seconds: of this process, evaluations too; bytes: of all rounds."""
    overrides = (
        *(
            "engine.backend=local",
            "tracking.uri=none",
            f"federation.rounds={rounds}",
            f"workload.partition.beta={beta}",
        ),
        *(f"evaluate.every={EVERY[rounds]}", "evaluate.batch=1000"),
    )
    experiment = load("fashion_mnist", overrides).model_copy(update={"method": method})
    began = time.process_time()
    try:
        result = run(experiment)
    except Diverged as error:
        return {"diverged": error.round}
    seconds, summary = time.process_time() - began, result.summary()
    accuracy = [round(row["eval/accuracy"], 4) for row in result.rows if "eval/accuracy" in row]
    sizes = {key: summary[key] for key in ("bytes_down", "bytes_up")}
    return {"accuracy": accuracy, "cpu_seconds": round(seconds, 1), **sizes}


def score(made: dict[str, Any]) -> float:
    """Mean of the last accuracies; 0 where it diverged."""
    last = made.get("accuracy", [0.0])[-LAST[made["rounds"]] :]
    return sum(last) / len(last)


def long_run(results: Results, tried: list[dict[str, Any]]) -> dict[str, Any]:
    """300 rounds of the best of the short runs; of the next best where these end below their short run."""
    ranked = sorted(tried, key=score, reverse=True)
    made = {}
    for short in ranked:
        made = results.of(short["method"], short["beta"], LONG)
        told(made)
        if score(made) >= score(short):
            break
    return made


def told(made: dict[str, Any]) -> None:
    arguments = {key: value for key, value in made["method"].items() if key != "name"}
    outcome = f"diverged in round {made['diverged']}" if "diverged" in made else f"{score(made):.4f}"
    print(f"{made['method']['name']:15} {made['beta']:<5} {made['rounds']:<4} {outcome}  {arguments}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", help="by name; all unless given")
    parser.add_argument("--short", action="store_true", help="the short runs only")
    asked = parser.parse_args()
    grids = yaml.safe_load(GRIDS.read_text("utf-8"))
    if unknown := set(asked.methods) - set(grids):
        parser.error(f"{', '.join(sorted(unknown))}: not in {GRIDS.name}, which has {', '.join(grids)}")
    torch.set_num_threads(1)
    results = Results(RESULTS)
    for name, beta in itertools.product(asked.methods or grids, LEVELS):
        tried = [results.of(method, beta, SHORT) for method in points(name, grids[name])]
        for made in tried:
            told(made)
        if not asked.short:
            long_run(results, tried)


if __name__ == "__main__":
    main()
