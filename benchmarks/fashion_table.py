"""Measures the accuracy, time and bytes of every method on FashionMNIST. The pages of the methods show the table.

    python -m benchmarks.fashion_table              all runs that are missing in fashion_table.json
    python -m benchmarks.fashion_table fedavg stem  only these methods
    python -m benchmarks.fashion_table --short      only the short runs, which choose the step sizes

LeNet, 16 clients of which 8 take part in a round, 5 steps of 64, Dirichlet 10 and 0.1, seed 0, in this process on one
thread. Short runs of 25 rounds at Dirichlet 10, for every point of a method's grid in fashion_table.yaml, rank the
points by accuracy, the mean of rounds 15, 20 and 25. Then the best point runs for 300 rounds at both levels. If such a
run diverges, or ends (at the last evaluation, or in the mean of the last five) below 0.7 at Dirichlet 10 or below 0.5
at Dirichlet 0.1, the next point runs as well. The accuracy is that of the test set, as when the papers tune, which
favours all methods alike. FEDFLEET_DATA must be the folder of the data set.
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
from fedfleet.engine.config.yaml_text import own
from fedfleet.engine.errors import Diverged
from fedfleet.tune.files import load
from tools.site.measured import LONG, RESULTS, SHORT, reached, score

GRIDS = Path(__file__).parent / "fashion_table.yaml"
TRAINS = {10.0: 0.7, 0.1: 0.5}
"""Dirichlet level -> the accuracy from which no further step sizes of a method are tried."""
EVERY = {SHORT: 5, LONG: 20}
"""Rounds of a run -> rounds between its evaluations."""


def points(name: str, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configurations {name: …, arguments} of a method for all combinations of its grid."""
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
    """The file fashion_table.json: one line per run, identified by method, level and rounds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["runs"] if path.is_file() else []

    def of(self, method: dict[str, Any], beta: float, rounds: int) -> dict[str, Any]:
        """The stored run, or else a new run, which is stored."""
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
    """The results of a run: `accuracy` at every evaluation; `cpu_seconds` of this process, with evaluations;
    `bytes_down` and `bytes_up` of all rounds. If the run diverged only `diverged`, the round."""
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
    """The configurations of a method for all combinations of its grid, in the order of their short runs."""
    tried = [results.of(method, max(TRAINS), SHORT) for method in points(name, entry)]
    for made in tried:
        show(made)
    return [made["method"] for made in sorted(tried, key=score, reverse=True)]


def trained(results: Results, methods: list[dict[str, Any]], beta: float) -> None:
    """Long runs of the methods, one after the other, until one reaches the accuracy in TRAINS."""
    for method in methods:
        made = results.of(method, beta, LONG)
        show(made)
        if reached(made) >= TRAINS[beta]:
            break


def show(made: dict[str, Any]) -> None:
    """Print one line on a run."""
    arguments = {key: value for key, value in made["method"].items() if key != "name"}
    outcome = f"diverged in round {made['diverged']}" if "diverged" in made else f"{score(made):.4f}"
    print(f"{made['method']['name']:15} {made['beta']:<5} {made['rounds']:<4} {outcome}  {arguments}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("methods", nargs="*", help="names of methods; by default all")
    parser.add_argument("--short", action="store_true", help="only the short runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results; default fashion_table.json")
    asked = parser.parse_args()
    grids = yaml.safe_load(GRIDS.read_text("utf-8"))
    if unknown := set(asked.methods) - set(grids):
        parser.error(f"methods must be in {GRIDS.name}, got {', '.join(sorted(unknown))}; choose of {', '.join(grids)}")
    torch.set_num_threads(1)
    results = Results(asked.results)
    for beta in TRAINS:
        for name in asked.methods or grids:
            methods = ranked(results, name, grids[name])
            if not asked.short:
                trained(results, methods, beta)


if __name__ == "__main__":
    main()
