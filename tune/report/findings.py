"""The findings that a report shows: the runs by method, level and seed, with their measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...engine.records.metrics import on_validation
from .. import units
from ..by_client import ByClient
from ..run_files import column, data_in_part, privacy_spent, read_columns, read_table, same, versions_of
from ..study.cells import Cell, grids_of, group_of, in_groups, levels, mean_scores, planned, trial_of, trials
from ..study.folder import FINISHED, MISSING, Points, StudyFolder, points_in
from ..study.spec import Published, Report, Study
from .served import Row, Served, served
from .statistics import Spread, spread

Place = tuple[str, ...]
"""A level: one label for each axis."""
T = TypeVar("T")


class MeasuredRun(NamedTuple):
    """What a report knows of a run. `chosen`: tuned settings as text; `final`: mean of the last evaluations, nan unless
    finished; `up`, `down`: MB; `seconds`: of the rounds; `privacy`: what they cost, in one line, "" for a run without
    it; `served`: what its clients get, where the metric of a study is about that."""

    method: str
    place: Place
    seed: int
    status: str
    reason: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})
    chosen: str = ""
    points: Points | None = None
    final: float = math.nan
    up: float = math.nan
    down: float = math.nan
    seconds: float = math.nan
    privacy: str = ""
    served: Served | None = None

    @property
    def clock(self) -> float:
        """Virtual seconds until the last evaluation; nan without a virtual clock."""
        return math.nan if self.points is None or self.points.clock is None else float(self.points.clock[-1])


class Undecided(NamedTuple):
    """Why no point of its grids is chosen for a cell. `over`: whether all trials have ended, and no point has a value
    in all of its trials."""

    why: str
    over: bool


@dataclass(frozen=True)
class Findings:
    """What a report shows. `axes`: name -> labels in order; `places`: the levels; `trials`: the runs of tuning;
    `deciding`: method -> what its trials are measured by, where that is not `report`; `notes`: reductions of the
    study; `facts`: sizes and versions; `tuned`: the setting `tune.each`; `chosen_by`: what decided, as the end of a
    sentence; `unfinished`: a sentence on what has not been run, or "";
    `columns`: further columns of the results, name -> method -> text; `shared`: settings of all runs; `by_client`: what
    clients' own models reach, of the runs that have a table of it; `others`: the same runs by the further metrics;
    `rows`: those on which the workload is evaluated, see `units.in_words`."""

    title: str
    report: Report
    methods: list[str]
    places: list[Place]
    runs: list[MeasuredRun]
    axes: dict[str, list[str]] = field(default_factory=dict)
    trials: list[MeasuredRun] = field(default_factory=list)
    paper: str = ""
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    published: Published = Published()
    tuned: str = "none"
    chosen_by: str = "by the reported metric"
    unfinished: str = ""
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    by_client: tuple[ByClient, ...] = ()
    others: tuple[Findings, ...] = ()
    rows: str = "test"
    deciding: Mapping[str, Report] = field(default_factory=dict)

    def at(self, method: str, place: Place) -> list[MeasuredRun]:
        """The runs of a method at a level, one for each seed."""
        return [run for run in self.runs if run.method == method and run.place == place]

    def finals(self, method: str, place: Place) -> dict[int, float]:
        """Seed -> final value, for the runs that finished."""
        return {run.seed: run.final for run in self.at(method, place) if not math.isnan(run.final)}

    @property
    def rows_of_clients(self) -> list[Row]:
        """What clients get, of the methods and levels with a metric about that, level by level."""
        found = [
            Row(name_of(place), method, {run.seed: run.served for run in self.at(method, place) if run.served})
            for place in self.places
            for method in self.methods
        ]
        return [row for row in found if row.runs]

    def spread(self, method: str, place: Place) -> Spread:
        """Of the final values of a method at a level."""
        return spread(list(self.finals(method, place).values()))

    def mean_and_std(self, method: str, place: Place) -> str:
        """The same as text, such as "91.2 ± 0.4", with the number of seeds if some are missing."""
        mean, std, n = self.spread(method, place)
        seeds = len(self.at(method, place))
        sd = "" if math.isnan(std) else f" ± {self.number(std)}"
        return f"{self.number(mean)}{sd}{f' ({n} of {seeds})' if 0 < n < seeds else ''}"

    def leader(self, place: Place) -> str | None:
        """The method with the best mean at a level; None if nothing finished there."""
        return self.first_best({method: self.spread(method, place).mean for method in self.methods})

    def first_best(self, values: Mapping[T, float]) -> T | None:
        """The first of those whose values are the `same` as the best one; None if all values are nan."""
        known = {one: value for one, value in values.items() if not math.isnan(value)}
        best = self.best_of(known.values(), default=math.nan)
        return next((one for one, value in known.items() if same(value, best)), None)

    @property
    def best_of(self) -> Any:
        """Python's max or min, whichever finds the best value of the metric."""
        return max if self.report.best == "max" else min

    @property
    def virtual(self) -> bool:
        """Whether any run has a virtual clock."""
        return any(not math.isnan(run.clock) for run in self.runs)

    @property
    def factor(self) -> float:
        """Factor from the metric to the unit of tables and charts."""
        return units.factor(self.report.metric)

    @property
    def what(self) -> str:
        """The metric in words."""
        return units.in_words(self.report.metric, self.rows)

    @property
    def unit(self) -> str:
        """The metric in words with its unit, for an axis."""
        return units.with_unit(self.report.metric, self.rows)

    @property
    def head(self) -> str:
        """The same with a capital letter, for the beginning of a sentence."""
        return self.unit[:1].upper() + self.unit[1:]

    def number(self, value: float) -> str:
        """A value of the metric as text, without a unit; – for nan."""
        return units.number(self.report.metric, value)

    def better(self, a: float, b: float) -> bool:
        """Whether a is better than b, and not the `same`."""
        return not same(a, b) and (a > b if self.report.best == "max" else a < b)


def name_of(place: Place) -> str:
    """A level as text, "" for the only level of runs without axes."""
    return ", ".join(place)


def key_of(place: Place) -> str:
    """The key of a level in the section `published` of a study; a study without axes has the level "all"."""
    return name_of(place) or "all"


def findings(folder: StudyFolder) -> Findings:
    """The findings in a study's folder."""
    study = folder.study
    cells = folder.cells()
    places = [place for place, _ in levels(study)]
    axes = {name: list(dict.fromkeys(p[i] for p in places)) for i, name in enumerate(study.axes)}
    open_choices = undecided(folder, study)

    def by(report_of: Callable[[str], Report]) -> list[MeasuredRun]:
        runs = [run_of(folder, cell, report_of(cell.method)) for cell in cells]
        return [without_choice(run, open_choices.get((run.method, run.place, run.seed))) for run in runs]

    runs = by(study.report_of)
    tried = [run_of(folder, cell, study.decided_by(cell.method)) for cell in trials(study)]
    found = Findings(
        title=study.title or study.name,
        report=study.report,
        methods=list(study.methods),
        places=places,
        runs=runs,
        axes=axes,
        trials=tried,
        deciding={method: study.decided_by(method) for method in study.methods},
        paper=study.paper,
        notes=study.notes,
        facts=tuple(facts(folder, cells)),
        published=study.published,
        tuned=study.tune.each,
        chosen_by=chosen_by(study),
        unfinished=unfinished(runs, tried),
        rows=units.evaluated_rows(cell.data.get("workload") for cell in cells),
    )
    others = (replace(found, report=one, runs=by(lambda _, one=one: one)) for one in study.report.others)
    return replace(found, others=tuple(others))


def undecided(folder: StudyFolder, study: Study) -> dict[tuple[str, Place, int], Undecided]:
    """(method, level, seed) -> what is said of the cells for which no point of their grids has been chosen."""
    found: dict[tuple[str, Place, int], Undecided] = {}
    for method in study.methods if study.tune.each != "none" else ():
        tried = grids_of(study, method, study.tune.seeds or study.seeds)
        of_group = {group: why_undecided(runs, folder, study) for group, runs in in_groups(study, tried).items()}
        for place, _ in levels(study):
            for seed in study.seeds:
                if why := of_group[group_of(study, place, seed)]:
                    found[method, place, seed] = why
    return found


def why_undecided(runs: list[list[Cell]], folder: StudyFolder, study: Study) -> Undecided | None:
    """Why no point is chosen, None if one is. runs: the points of each level and seed that decide."""
    if len(runs[0]) == 1:
        return None
    wanted = {trial.key: trial for trial in (trial_of(cell, study) for run in runs for cell in run)}
    ended = sum(folder.status(trial) != MISSING for trial in wanted.values())
    if ended < len(wanted):
        return Undecided(f"{ended} of {len(wanted)} trials", over=False)
    if not any(map(math.isfinite, mean_scores(runs, study, lambda trial: folder.score(trial, study)))):
        return Undecided("the first point, since none has a value in all its trials", over=True)
    return None


def without_choice(run: MeasuredRun, undecided: Undecided | None) -> MeasuredRun:
    """The run without a choice that its trials have not made."""
    if undecided is None:
        return run
    if undecided.over:
        return run._replace(chosen=f"{run.chosen} ({undecided.why})")
    trials = undecided.why
    return MeasuredRun(run.method, run.place, run.seed, MISSING, f"{trials} have ended", chosen=f"– ({trials})")


def unfinished(runs: list[MeasuredRun], trials: list[MeasuredRun]) -> str:
    """A sentence on what is left of a study that is not finished, or ""."""
    ended = [sum(run.status != MISSING for run in some) for some in (runs, trials)]
    if ended == [len(runs), len(trials)]:
        return ""
    tried = f" and {ended[1]} of {len(trials)} trials" if trials else ""
    return f"This study is not finished: {ended[0]} of {len(runs)} cells{tried} have ended."


def chosen_by(study: Study) -> str:
    """What the best points were chosen by, as the end of a sentence."""
    tune, own = study.tune, study.deciding == study.report.metric
    text = "by the reported metric" if own else f"by {study.deciding}"
    if on_validation(study.deciding) and not study.deciding.startswith("eval/clients/"):
        text += f" on the {rows}" if (rows := decided_on(study)) else ""
    elif on_validation(study.report.metric) == study.deciding:
        text = f"by {units.in_words(study.deciding)}{by_others(study)}"
        text += f", on {100 * study.validation:.3g}% of each client's rows"
        text += ", which only the trials held out" if tune.validation else ""
    if tune.last > 1:
        text += f", as the mean of the last {tune.last} evaluations"
    if tune.seeds is not None and set(tune.seeds) != set(study.seeds):
        text += f", in trials with {'seeds' if len(tune.seeds) > 1 else 'seed'} {', '.join(map(str, tune.seeds))}"
    if (rounds := study.trial_rounds) is not None:
        text += f", in trials of {rounds} round{'s' * (rounds > 1)}"
    return text


def decided_on(study: Study) -> str:
    """The rows on which trials without rows for validation are evaluated; "" for an objective, which has no rows."""
    workloads = [
        planned(study, method, at, study.seeds[0]).get("workload")
        for method in study.methods
        for _, at in levels(study)
    ]
    return {"test": "test set", "training": "training rows"}.get(units.evaluated_rows(workloads), "")


def by_others(study: Study) -> str:
    """The methods whose points were chosen by other columns than `deciding`, in brackets; "" without any."""
    found: dict[str, list[str]] = {}
    for method in study.methods:
        found.setdefault(study.deciding_of(method), []).append(method)
    others = (f"{', '.join(found[name])} by {units.in_words(name)}" for name in found if name != study.deciding)
    told = "; ".join(others)
    return f" ({told})" if told else ""


def run_of(folder: StudyFolder, cell: Cell, report: Report) -> MeasuredRun:
    status = folder.status(cell)
    reason = folder.failure(cell).get("reason", "") if status != FINISHED else ""
    run = MeasuredRun(cell.method, cell.place, cell.seed, status, reason, cell.settings, cell.chosen)
    place = folder.of(cell)
    if status == FINISHED:
        run = run._replace(served=served(place, read_columns(place), report.metric))
    return measured(run, place, report)


def measured(run: MeasuredRun, folder: Path, report: Report) -> MeasuredRun:
    """The run with what its folder holds of it."""
    table = read_table(folder)
    points = points_in(table, report.metric)
    final = report.final(points.values) if points is not None and run.status == FINISHED else math.nan
    run = run._replace(points=points, final=final, privacy=privacy_spent(folder))
    if table is None:
        return run
    up, down, seconds = (float(column(table, n).sum()) for n in ("comm/bytes_up", "comm/bytes_down", "time/seconds"))
    return run._replace(up=up / 1e6, down=down / 1e6, seconds=seconds)


def facts(folder: StudyFolder, cells: list[Cell]) -> Iterator[str]:
    """Texts on sizes of the federations and versions of the packages, from the cells that were run."""
    sizes = [cell.data["federation"] for cell in cells]
    for key, what in (("clients", "clients"), ("cohort", "of them in each round"), ("rounds", "rounds")):
        found = sorted({size[key] for size in sizes})
        yield f"{found[0]} {what}" if len(found) == 1 else f"{found[0]} to {found[-1]} {what}"
    seeds = len({cell.seed for cell in cells})
    yield f"{seeds} seed{'s' if seeds > 1 else ''}"
    yield from dict.fromkeys(filter(None, (data_in_part(folder.of(cell)) for cell in cells)))
    yield from dict.fromkeys(filter(None, (versions_of(folder.of(cell)) for cell in cells)))


def mean_curve(runs: list[MeasuredRun]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(rounds, mean, standard deviation over seeds), each (E,); None without evaluations.

    Only rounds in which most seeds were evaluated are included. The standard deviation of one seed is 0.
    """
    values: dict[int, list[float]] = {}
    for run in runs:
        if run.points is not None:
            for number, value in zip(run.points.rounds, run.points.values, strict=True):
                values.setdefault(int(number), []).append(float(value))
    if not values:
        return None
    most = max(map(len, values.values()))
    rounds = np.array(sorted(number for number, found in values.items() if len(found) == most))
    mean = np.array([np.mean(values[number]) for number in rounds])
    return rounds, mean, np.array([np.std(values[n], ddof=1) if most > 1 else 0.0 for n in rounds])


def at_rounds(run: MeasuredRun, name: str, rounds: np.ndarray) -> np.ndarray:
    """(E,): a column of the run's evaluations after these rounds, (E,); nan where it was not evaluated."""
    assert run.points is not None
    known = dict(zip(run.points.rounds.tolist(), getattr(run.points, name).tolist(), strict=True))
    return np.array([known.get(number, math.nan) for number in rounds.tolist()])


def mean_at_rounds(runs: list[MeasuredRun], name: str, rounds: np.ndarray) -> np.ndarray | None:
    """(E,): the same, averaged over seeds; None if no run has the column."""
    columns = [at_rounds(run, name, rounds) for run in runs if getattr(run.points, name, None) is not None]
    return np.nanmean(columns, axis=0) if columns else None
