"""What was measured on FashionMNIST for the pages of methods: benchmarks/fashion_table.json, made by
benchmarks/fashion_table.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/fashion_table.json"
SHORT, LONG = 25, 300
DOCS = Path(__file__).parents[2] / "docs"
CHARTS = {
    "Methods of the study": ("key-curves.svg", "key-1.svg"),
    "Learning curves of the methods of the study": ("curves-1.svg",),
}
"""What a chart shows -> its names in reports, of which earlier ones had others."""
STUDIES = {
    ("results/fedmud.md", "results/fedmud-fmnist/charts"): {
        "fedmud": "FedMUD",
        "fedmud_bkd": "FedMUD+BKD",
        "fedmud_aad": "FedMUD+AAD",
        "fedmud_bkd_aad": "FedMUD+BKD+AAD",
        "fedhm": "FedHM",
        "fedlmt": "FedLMT",
        "fedpara": "FedPara",
        "ef21_p": "EF21-P",
        "fedbat": "FedBAT",
    },
    ("results/minimax.md", "results/minimax-iid/charts"): {
        "local_sgdam": "LocalSGDAM",
        "fed_sgda_m": "FedSGDA-M",
        "sagda": "F-SAGDA",
        "fess_gda": "FESS-GDA",
        "fed_nsgda_m": "Fed-NSGDA-M",
        "fedmuon_da": "FedMuon-DA",
        "fed_sgda_clip": "FedSGDA-Clip",
    },
}
"""(page of results, folder of charts) -> method -> its label there, for methods that are not in the table."""
LEVELS = (10.0, 0.1)
"""The parameters of the Dirichlet distributions."""
LAST = {SHORT: 3, LONG: 5}
"""Rounds of a run -> how many of its last evaluations are averaged."""

SETTING = """\
LeNet on FashionMNIST, 16 clients of which 8 take part in a round, 5 steps of 64 examples, 300 rounds, seed 0,
measured by `python -m benchmarks.fashion_table` on one thread. The data are divided by Dirichlet(10), where clients are
nearly alike, and by Dirichlet(0.1), where most classes are on few clients.
"""

HEAD = f"""\
## Measured on FashionMNIST

{SETTING}
The table has the test accuracy in per cent at the end and, in brackets, the mean of the last five evaluations, which
are 20 rounds apart. Each method has the step size of a small grid (`benchmarks/fashion_table.yaml`) that was best
after 25 rounds at Dirichlet(10), by test accuracy; where the model did not train with it, the next best was taken. CPU
seconds include evaluations. They are from a shared machine, and show no more than which methods take one gradient per
step and which take two. Megabytes are those of all clients over the run. An accuracy of 10.0 is chance: no point of
that grid trains there. The table does not say which method is best: that would take more seeds, finer grids and longer
runs.
"""

COLUMNS = ("method", "Dirichlet 10", "chosen", "Dirichlet 0.1", "chosen", "CPU s", "MB down", "MB up")


def score(run: Mapping[str, Any]) -> float:
    """The mean of a run's last accuracies; 0 where it diverged."""
    last = run.get("accuracy", [0.0])[-LAST[run["rounds"]] :]
    return sum(last) / len(last)


def reached(run: Mapping[str, Any]) -> float:
    """The accuracy at the end of a run: its score, or its last accuracy where that is lower."""
    return min(score(run), run.get("accuracy", [0.0])[-1])


def section(methods: Iterable[str]) -> str:
    """The table's rows in the order of the methods, and which of them have none."""
    runs = json.loads(RESULTS.read_text("utf-8"))["runs"]
    rows, missing = [], []
    for name in methods:
        best = [run for level in LEVELS if (run := _best(runs, name, level))]
        if best:
            rows.append(_row(name, best, _varied(runs, name)))
        else:
            missing.append(f"`{name}`")
    lines = [HEAD, _line(COLUMNS), _line(["---"] * len(COLUMNS)), *rows, ""]
    return "\n".join([*lines, *wrap(f"Not measured: {', '.join(missing)}.", 120), ""] if missing else lines)


def of_one_method(name: str) -> str:
    """The section of a method's page: its rows of the table, and its learning curves; or those of the study that it was
    in. Empty if it was not measured."""
    runs = json.loads(RESULTS.read_text("utf-8"))["runs"]
    if not any(run["method"]["name"] == name for run in runs):
        return next((of_a_study(labels[name], *of) for of, labels in STUDIES.items() if name in labels), "")
    best = [run for level in LEVELS if (run := _best(runs, name, level))]
    table = "\n".join([_line(COLUMNS), _line(["---"] * len(COLUMNS)), _row(name, best, _varied(runs, name))])
    chart = f"![Test accuracy of {name} over the rounds](../../assets/methods/{name}.svg){{ .chart }}"
    return f"## Measured\n\n{SETTING}\n{table}\n\n{chart}\n\nFor comparison, thin lines are FedAvg.\n"


def of_a_study(label: str, page: str, charts: str) -> str:
    """The row of a method in the first table of a page of results that has it, and the learning curves of the study."""
    lines = (DOCS / page).read_text("utf-8").splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith(f"| {label} |"))
    head = next(number for number in range(row, 0, -1) if lines[number].startswith("| ---"))
    table = "\n".join([lines[head - 1], lines[head], lines[row]])
    files = {what: next(name for name in names if (DOCS / charts / name).is_file()) for what, names in CHARTS.items()}
    drawn = "\n".join(f"![{what}](../../{charts}/{file}){{ .chart }}" for what, file in files.items())
    return f"## Measured\n\n[This study](../../{page}) has the setting and the other methods.\n\n{table}\n\n{drawn}\n"


def measured_methods() -> list[str]:
    """The methods with at least one run of full length."""
    runs = json.loads(RESULTS.read_text("utf-8"))["runs"]
    return list(dict.fromkeys(run["method"]["name"] for run in runs if run["rounds"] == LONG and "accuracy" in run))


def curves(name: str) -> dict[float, list[float]]:
    """Level -> test accuracies every 20 rounds, of the best run of a method."""
    runs = json.loads(RESULTS.read_text("utf-8"))["runs"]
    return {level: run["accuracy"] for level in LEVELS if (run := _best(runs, name, level))}


def _best(runs: list[dict[str, Any]], name: str, level: float) -> dict[str, Any] | None:
    """The run of full length with the highest accuracy at its end."""
    mine = [r for r in runs if r["method"]["name"] == name and r["beta"] == level and r["rounds"] == LONG]
    return max((r for r in mine if "accuracy" in r), key=reached, default=None)


def _row(name: str, best: list[dict[str, Any]], varied: set[str]) -> str:
    cells = [f"`{name}`"]
    for level in LEVELS:
        run = next((run for run in best if run["beta"] == level), None)
        cells += _cells(run, varied) if run else ["", ""]
    seconds = sum(run["cpu_seconds"] for run in best) / len(best)
    sizes = [f"{best[0][key] / 1e6:.0f}" for key in ("bytes_down", "bytes_up")]
    return _line([*cells, f"{seconds:.0f}", *sizes])


def _cells(run: dict[str, Any], varied: set[str]) -> list[str]:
    """The accuracies of a run, and its step sizes."""
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
