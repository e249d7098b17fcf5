"""The measured table of docs/methods.md: benchmarks/fashion_table.json, made by benchmarks/fashion_table.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks/fashion_table.json"
SHORT, LONG = 25, 300
LAST = {SHORT: 3, LONG: 5}
"""Rounds of a run: evaluations at its end whose mean counts."""

HEAD = """\
## On FashionMNIST

LeNet, 16 clients of which 8 a round, 5 steps of 64, 300 rounds, seed 0, by `python -m benchmarks.fashion_table` on one
thread. Data are split by a Dirichlet law, 10 (nearly alike) and 0.1 (most classes on few clients). Test accuracy in per
cent at the end, and in brackets the mean of the last five evaluations, 20 rounds apart. Each method's step size is the
best of a small grid (`benchmarks/fashion_table.yaml`) after 25 rounds at Dirichlet 10, by test accuracy; one that did
not train gave way to the next best. CPU seconds, evaluations included, are from a shared machine and tell methods of
one gradient from those of two, not more; megabytes are all clients' over the run. 10.0 is
chance: no point of that grid trains there. The table does not say which method is best: that takes more seeds, finer
grids and longer runs.
"""

COLUMNS = ("method", "Dirichlet 10", "chosen", "Dirichlet 0.1", "chosen", "CPU s", "MB down", "MB up")


def score(run: Mapping[str, Any]) -> float:
    """The mean of a run's last accuracies; 0 where it diverged."""
    last = run.get("accuracy", [0.0])[-LAST[run["rounds"]] :]
    return sum(last) / len(last)


def reached(run: Mapping[str, Any]) -> float:
    """What it still had at the end: its score, or its last accuracy where that is lower."""
    return min(score(run), run.get("accuracy", [0.0])[-1])


def section(methods: Iterable[str]) -> str:
    """The table's rows in the order of the methods, and which of them have none."""
    runs = json.loads(RESULTS.read_text("utf-8"))["runs"]
    rows, missing = [], []
    for name in methods:
        best = [run for level in (10.0, 0.1) if (run := _best(runs, name, level))]
        if best:
            rows.append(_row(name, best, _varied(runs, name)))
        else:
            missing.append(f"`{name}`")
    lines = [HEAD, _line(COLUMNS), _line(["---"] * len(COLUMNS)), *rows, ""]
    return "\n".join([*lines, *wrap(f"Not measured: {', '.join(missing)}.", 120), ""] if missing else lines)


def _best(runs: list[dict[str, Any]], name: str, level: float) -> dict[str, Any] | None:
    """The long run that ended highest."""
    mine = [r for r in runs if r["method"]["name"] == name and r["beta"] == level and r["rounds"] == LONG]
    return max((r for r in mine if "accuracy" in r), key=reached, default=None)


def _row(name: str, best: list[dict[str, Any]], varied: set[str]) -> str:
    cells = [f"`{name}`"]
    for level in (10.0, 0.1):
        run = next((run for run in best if run["beta"] == level), None)
        cells += _cells(run, varied) if run else ["", ""]
    seconds = sum(run["cpu_seconds"] for run in best) / len(best)
    sizes = [f"{best[0][key] / 1e6:.0f}" for key in ("bytes_down", "bytes_up")]
    return _line([*cells, f"{seconds:.0f}", *sizes])


def _cells(run: dict[str, Any], varied: set[str]) -> list[str]:
    """Its accuracies; the step sizes it had."""
    chosen = ", ".join(f"{key} {value:g}" for key, value in flat(run["method"]) if key in varied)
    return [f"{100 * run['accuracy'][-1]:.1f} ({100 * score(run):.1f})", chosen]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _varied(runs: list[dict[str, Any]], name: str) -> set[str]:
    """Arguments of which more than one value was tried."""
    tried: dict[str, set[Any]] = {}
    for run in runs:
        if run["method"]["name"] == name:
            for key, value in flat(run["method"]):
                tried.setdefault(key, set()).add(value)
    return {key for key, values in tried.items() if len(values) > 1}


def flat(method: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(rule.lr, 0.1) and so on, of all arguments that are neither mappings nor lists."""
    for key, value in method.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield prefix + key, value
