"""What the cells of a study say: values of each method and level by seed, and where they come from."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from fedfleet.tune.report.findings import chosen_by, findings, key_of
from fedfleet.tune.report.served import Row, both, differences
from fedfleet.tune.run_files import privacy_spent, read_json
from fedfleet.tune.study.cells import Cell, trials
from fedfleet.tune.study.check import with_direction
from fedfleet.tune.study.folder import FINISHED, Points, StudyFolder
from fedfleet.tune.study.kept_results import NAME, Line, read_lines, restore
from fedfleet.tune.study.spec import Study, load
from fedfleet.tune.units import base_workload, evaluated_rows, factor

SUMMARIES = ("last", "last 5", "best")
"""The ways in which a run's evaluations become one value: the last one, the mean of the last five, the best one."""


class Run(NamedTuple):
    """One cell. values: summary -> value in the unit of the tables, {} for a run without a result; reported: the value
    that the study's report has; best_round: the round of the best evaluation; megabytes: that all clients sent;
    evaluations: the metric after each of them, as it was recorded; commit: of the sources;
    points: the evaluations with their costs; reason: why there is no result; privacy: what the run cost."""

    seed: int
    rounds: int
    chosen: str
    values: dict[str, float]
    reported: float
    best_round: int
    megabytes: float
    seconds: float
    evaluations: tuple[float, ...] = ()
    commit: str = ""
    points: Points | None = None
    reason: str = ""
    privacy: str = ""


@dataclass(frozen=True)
class Measured:
    """A study's cells. rows: (method, level) -> its runs, one for each seed; lines: of cells.jsonl; clients: what the
    clients of each method and level get, where the study is about their own models; evaluated: the rows on which the
    workload is evaluated, see `units.in_words`; tried: (method, level) -> the trials of tuning, where they were asked
    for."""

    study: Study
    rows: dict[tuple[str, str], list[Run]]
    trials: int
    lines: list[Line]
    clients: list[Row] = field(default_factory=list)
    evaluated: str = "test"
    tried: dict[tuple[str, str], list[Run]] = field(default_factory=dict)

    def losses(self, level: str) -> dict[str, float]:
        """Method -> mean over the clients that are trained with minus that over unseen ones, in the unit of tables."""
        scale = factor(self.study.report.metric)
        return {
            row.method: scale * float(np.mean([run.mean - run.unseen for run in row.runs.values()]))
            for row in self.clients
            if row.level == level
        }

    def worst(self, method: str, level: str) -> dict[int, float]:
        """Seed -> mean over the worst tenth of the clients that are trained with, in the unit of tables."""
        scale = factor(self.study.report.metric)
        return {seed: scale * run.worst for seed, run in self.row(method, level).runs.items()}

    def differences(self, base: str, method: str, level: str) -> NDArray[np.float64]:
        """(clients,): for each client its value with the method minus that with the base, in the unit of tables."""
        runs = both(self.row(base, level), self.row(method, level))
        return factor(self.study.report.metric) * differences(*runs)

    def row(self, method: str, level: str) -> Row:
        """What the clients of a method get at a level."""
        return next(row for row in self.clients if (row.method, row.level) == (method, level))

    @property
    def levels(self) -> list[str]:
        return list(dict.fromkeys(level for _, level in self.rows))

    def has(self, method: str) -> bool:
        return method in self.study.methods

    def values(self, method: str, level: str, summary: str) -> dict[int, float]:
        """Seed -> value of the runs that finished."""
        return {run.seed: run.values[summary] for run in self.rows[method, level] if run.values}

    @property
    def reported(self) -> str:
        """The summary that the study's report has, in words."""
        report = self.study.report
        if report.best_round:
            return "best evaluation"
        return f"mean of the last {report.last} evaluations" if report.last > 1 else "last evaluation"

    @property
    def tuning(self) -> str:
        """How the settings were chosen, as the end of a sentence."""
        return chosen_by(self.study)


def measured(folder: Path, of_clients: bool = False, of_trials: bool = False) -> Measured:
    """What the cells in a folder of results say. of_clients: also what clients get, which takes some seconds;
    of_trials: also the trials of tuning."""
    with TemporaryDirectory() as place:
        shutil.copy(folder / NAME, place)
        restore(Path(place))
        there = StudyFolder(Path(place))
        there.keep(with_direction(load(str(folder / "study.yaml"))))  # which may name plug-ins beside it
        study, cells, offered = there.study, there.cells(), trials(there.study)
        rows = by_place(there, study, cells)
        tried = by_place(there, study, offered) if of_trials else {}
        clients = findings(there).rows_of_clients if of_clients else []
        evaluated = evaluated_rows(cell.data["workload"] for cell in cells)
        return Measured(study, rows, len(offered), read_lines(folder / NAME), clients, evaluated, tried)


def by_place(folder: StudyFolder, study: Study, cells: list[Cell]) -> dict[tuple[str, str], list[Run]]:
    """(method, level) -> runs of the cells."""
    found = dict[tuple[str, str], list[Run]]()
    for cell in cells:
        found.setdefault((cell.method, key_of(cell.place)), []).append(run_of(folder, study, cell))
    return found


def run_of(folder: StudyFolder, study: Study, cell: Cell) -> Run:
    result, rounds = folder.result(cell), cell.data["federation"]["rounds"]
    report = study.report_of(cell.method)
    points = folder.points(cell, report.metric)
    commit = read_json(folder.of(cell) / "environment.json")["commit"]
    if folder.status(cell) != FINISHED or points is None:
        reason = folder.failure(cell).get("reason", "")
        return Run(cell.seed, rounds, cell.chosen, {}, math.nan, 0, math.nan, math.nan, commit=commit, reason=reason)
    scale, values = factor(report.metric), points.values
    best = int(np.argmax(values) if report.best == "max" else np.argmin(values))
    found = dict(zip(SUMMARIES, (values[-1], values[-5:].mean(), values[best]), strict=True))
    return Run(
        cell.seed,
        rounds,
        cell.chosen,
        {name: scale * float(value) for name, value in found.items()},
        scale * report.final(values),
        int(points.rounds[best]),
        result["bytes_up"] / 1e6,
        result["seconds"],
        tuple(map(float, values)),
        commit,
        points,
        privacy=privacy_spent(folder.of(cell)),
    )


# --- provenance -------------------------------------------------------------------------------------------------------
def provenance(lines: list[Line]) -> Iterator[tuple[str, str]]:
    """(what, text) of what a reader needs to judge or repeat the runs: the different texts of all cells."""
    cells = [line for line in lines if "key" in line]
    parts: dict[str, Callable[[Line], Any]] = {
        "commit": lambda line: line["environment"]["commit"],
        "processor": lambda line: line["environment"]["processor"],
        "card": lambda line: ", ".join(line["environment"]["cards"]) or "none",
        "threads": lambda line: yaml.safe_load(line["config"])["engine"]["threads"],
        "versions": versions,
        "data (SHA-256)": digests,
    }
    for what, of in parts.items():
        yield what, " / ".join(dict.fromkeys(str(of(line)) for line in cells))


def versions(line: Line) -> str:
    environment = line["environment"]
    packages = {"Python": environment["python"], **environment["packages"]}
    return ", ".join(f"{name} {version}" for name, version in packages.items() if version)


def digests(line: Line) -> str:
    """Name and digest of each data file. The file of scikit-learn's digits is recorded since a later version."""
    files = line["environment"]["data"]
    if not files:
        of_digits = base_workload(yaml.safe_load(line["config"])["workload"]) == "digits"
        return "not recorded" if of_digits else "no files of data"
    return ", ".join(f"`{name}` `{digest}`" for name, digest in files.items())
