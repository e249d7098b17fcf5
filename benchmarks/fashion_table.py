"""Every method of the table on FashionMNIST: what it reaches, in which time, with how many bytes.

    python benchmarks/fashion_table.py              what is missing in fashion_table.json; stopped, it goes on there
    python benchmarks/fashion_table.py fedavg stem  these methods
    python benchmarks/fashion_table.py --short      the short runs only, which step sizes are chosen by

LeNet, 16 clients of which 8 a round, 5 steps of 64, Dirichlet 10 and 0.1, seed 0, in this process on one thread. 25
rounds at Dirichlet 10 of every point of a method's grid in fashion_table.yaml rank them by accuracy, the mean of rounds
15, 20 and 25. Then 300 rounds of the first, at both levels; where these diverge, or end (the last evaluation, or the
mean of the last five) below 0.7, at Dirichlet 0.1 below 0.5, of the next one too. Accuracy is the test set's, as in the
papers' tuning, which flatters all methods alike. The data set is found by FEDFLEET_DATA. docs/methods.md shows the
table.
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
from fedfleet.tune.measured import LONG, RESULTS, SHORT, reached, score

GRIDS = Path(__file__).parent / "fashion_table.yaml"
TRAINS = {10.0: 0.7, 0.1: 0.5}
"""By Dirichlet level: what a method must reach before its other step sizes are left alone."""
EVERY = {SHORT: 5, LONG: 20}
"""Rounds between evaluations."""


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


def ranked(results: Results, name: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The method with every combination of its grid, the best after a short run first."""
    tried = [results.of(method, max(TRAINS), SHORT) for method in points(name, entry)]
    for made in tried:
        told(made)
    return [made["method"] for made in sorted(tried, key=score, reverse=True)]


def trained(results: Results, methods: list[dict[str, Any]], beta: float) -> None:
    """300 rounds of one after the other, until one trains."""
    for method in methods:
        made = results.of(method, beta, LONG)
        told(made)
        if reached(made) >= TRAINS[beta]:
            break


def told(made: dict[str, Any]) -> None:
    arguments = {key: value for key, value in made["method"].items() if key != "name"}
    outcome = f"diverged in round {made['diverged']}" if "diverged" in made else f"{score(made):.4f}"
    print(f"{made['method']['name']:15} {made['beta']:<5} {made['rounds']:<4} {outcome}  {arguments}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("methods", nargs="*", help="by name; all unless given")
    parser.add_argument("--short", action="store_true", help="the short runs only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file than fashion_table.json")
    asked = parser.parse_args()
    grids = yaml.safe_load(GRIDS.read_text("utf-8"))
    if unknown := set(asked.methods) - set(grids):
        parser.error(f"{', '.join(sorted(unknown))}: not in {GRIDS.name}, which has {', '.join(grids)}")
    torch.set_num_threads(1)
    results = Results(asked.results)
    for beta in TRAINS:
        for name in asked.methods or grids:
            methods = ranked(results, name, grids[name])
            if not asked.short:
                trained(results, methods, beta)


if __name__ == "__main__":
    main()
