"""The study file: a base experiment, methods by label, axes of levels, seeds, tuning and report.

docs/howto/studies.md explains the file. Overrides on the command line change a study as they change an experiment, for
example `seeds=[0] experiment.federation.cohort=4`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from ...engine.config.differences import flatten
from ...engine.config.schema import LARGEST_COUNT, Direction, Section, Trackers, validated
from ...engine.config.yaml_text import own
from ...engine.errors import ConfigError, nearest
from ...engine.records.metrics import on_validation
from ...engine.runs.saved_files import FILE_OF_KIND
from ...engine.storage.expanded import expanded
from ..files import listed, load_data, located, override, read_yaml
from ..validation import fraction

CLIENTS, COHORT, ROUNDS = 100, 20, 50
"""The defaults of an experiment."""

QUIET = (
    *("tracking.", "experiment.engine.", "experiment.checkpoint.", "reduced.", "name"),
    *("notes", "files", "directions"),
)
"""Beginnings of keys whose changes are not listed as differences in the report."""


def each_once(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds. Raises ValueError if one of them is negative, or there twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError("must not repeat a seed; drop what is repeated")
    if any(seed < 0 for seed in seeds):
        raise ValueError("must not be negative; choose others")
    return seeds


class Tune(Section):
    """The section `tune`."""

    each: Literal["none", "cell", "level", "once"] = "none"
    """For what the best point of the grids is chosen: `cell`, for every method, level and seed, as most papers do;
    `level`, for all seeds of a level together; `once`, for all levels and seeds together; or `none` (default), the
    first value of every grid, without trials."""
    metric: str | None = None
    """The column of rounds.parquet that decides (default: that of the report; with rows for validation, the same on
    these)."""
    best: Direction = "auto"
    """Whether larger (`max`) or smaller (`min`) values of it are better. `auto` (default) is `report.best` if that is
    given, and otherwise follows from the metric in the same way."""
    last: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """The number of last evaluations whose mean decides, at least 1."""
    rounds: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of rounds of a trial (default: that of its cell, which is also the largest). `reduced` makes it
    smaller, too."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The fraction of each client's rows that the trials hold out and decide by, as `evaluate.validation` of an
    experiment does; the runs themselves then train on all rows."""
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    """The seeds of the trials, so that settings can be chosen by other seeds than the reported ones (default: those of
    the study)."""
    trials: int = Field(default=20, ge=1, le=LARGEST_COUNT)
    """The number of trials for methods with ranges instead of grids, at least 1."""
    together: Literal["auto"] | bool = "auto"
    """Whether cells and trials share processes of this machine, and with them the data, and train their clients
    together: true, false or `auto` (default), which is true without GPUs and a cluster."""

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return seeds and each_once(seeds)

    def final(self, values: NDArray[np.float64]) -> float:
        """The value of a trial with these evaluations, at least one."""
        return float(values[-self.last :].mean())


class Report(Section):
    """The section `report`."""

    metric: str = "eval/accuracy"
    """A column of rounds.parquet."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """The column of each method that is reported by another one, as in {FedAvg+FT: eval/adapted/test_accuracy} beside
    the metric eval/own/test_accuracy. Such columns have the unit and the direction of `metric`."""
    also: tuple[str, ...] = ()
    """Further columns, such as `train/loss`. The report has a table and learning curves of each; `metric` decides."""
    best: Direction = "auto"
    """Whether larger (`max`) or smaller (`min`) values are better. `auto` (default) is `min` for the metrics that the
    workload names in `lower` and for those whose name ends in loss, else `max`."""
    last: int = Field(default=1, ge=1, le=LARGEST_COUNT)
    """The number of last evaluations whose mean is the final value, at least 1."""
    best_round: bool = False
    """Whether the final value is that of the run's best evaluation, as in papers that report the best round, in place
    of the mean of the last ones. It is higher the more evaluations there are."""
    against: tuple[str, ...] = ()
    """Methods, such as [Local, FedAvg], with which the others are compared client by client, where the metric is of
    clients' own models: the report has the shares of clients that are better, equal and worse off."""
    best_of_test: bool = False
    """Whether the report also has a table with the best evaluation of each run on test rows, as many papers report it,
    labelled "as published, optimistic"."""
    targets: tuple[float, ...] = ()
    """Values of the metric for which the report has the rounds, bytes and seconds to reach them."""
    level_axis: str | None = None
    """The axis that is drawn from left to right (default: the last one)."""
    log: bool = False
    """Whether the metric is drawn on a logarithmic scale."""

    @model_validator(mode="after")
    def _one_value(self) -> Report:
        if self.best_round and self.last > 1:
            raise ValueError(f"has last: {self.last} and best_round: true, which contradict each other; drop one")
        if twice := [name for i, name in enumerate(self.also) if name in (self.metric, *self.also[:i])]:
            raise ValueError(f"also names {twice[0]} a second time; drop it")
        return self

    @property
    def others(self) -> list[Report]:
        """The reports of the further columns, whose values are those of the last evaluations."""
        plain = {"metrics": {}, "also": (), "targets": (), "best_round": False, "log": False}
        return [self.model_copy(update={**plain, "metric": name}) for name in self.also]

    def final(self, values: NDArray[np.float64]) -> float:
        """The final value of a run with these evaluations, at least one."""
        if self.best_round:
            return float(values.max() if self.best == "max" else values.min())
        return float(values[-self.last :].mean())


class Published(Section):
    """The section `published`: the paper's numbers."""

    source: str = ""
    """The source of the numbers."""
    values: dict[str, dict[str, float]] = Field(default_factory=dict)
    """The numbers, method -> level -> number, in the unit of the report's tables (per cent for accuracies)."""
    settings: dict[str, dict[str, str]] = Field(default_factory=dict)
    """The best settings as text, method -> level -> text."""
    claims: tuple[str, ...] = ()
    """Sentences on figures that have no numbers."""


class Reduced(Section):
    """The section `reduced`, which makes a study smaller."""

    scale: float = Field(default=1.0, gt=0, le=LARGEST_COUNT)
    """The factor of the rounds, of those of trials and of the rounds between evaluations, as `--scale` sets it."""
    rounds: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of rounds, as `--rounds` sets it. Those of trials shrink in proportion."""
    clients: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """The number of clients, as `--clients` sets it. The cohort shrinks in proportion."""


class StudyTracking(Trackers):
    """The section `tracking`, whose `name` and `uri` are those of an experiment."""

    experiment: str | None = None
    """The name of the experiment in MLflow, and of the project in W&B (default: the name of the study)."""
    system: bool = False
    """Whether the load of this machine is recorded in the run of the study in MLflow."""


class Study(Section):
    """A study: every combination of a method, a level and a seed is a cell, which is one run."""

    name: str
    """A name for folders and trackers (default: the name of the file)."""
    title: str = ""
    """The title of the report."""
    paper: str = ""
    """The paper that the study is from."""
    plugins: tuple[str, ...] = ()
    """Plug-ins, as in an experiment."""
    experiment: dict[str, Any]
    """The base of all cells, keys of an experiment or the name of a shipped one. The study sets its `seed`, `method`,
    `tracking` and backend."""
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    """The methods of the study, label -> a mapping or a bare name, in the order of the report."""
    axes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """The axes, whose levels are combined: name -> {key, values}, or label -> overrides. One of them may have `fork:
    ROUND`: its levels are then forks, after that round, of the cells of its level without overrides."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    """The seeds; each determines the partition of the data, the initial model and all draws."""
    tune: Tune = Tune()
    report: Report = Report()
    published: Published = Published()
    tracking: StudyTracking = StudyTracking()
    reduced: Reduced = Reduced()
    notes: tuple[str, ...] = ()
    """Differences from the file, which the report lists; the command line fills them in."""
    directions: dict[str, Literal["max", "min"]] = Field(default_factory=dict)
    """Which values of the columns that report and decide are better, where that followed from them; `fedfleet study`
    fills them in."""
    files: dict[str, str] = Field(default_factory=dict)
    """The SHA-256 of files that settings of the workload name, such as word vectors, by their paths there. `fedfleet
    study` fills them in; they stand for the files in the identity of a cell."""

    @property
    def deciding(self) -> str:
        """The column by which the best point of the grids is chosen: by default the reported one, on the rows for
        validation if there are any."""
        return self._deciding(self.report.metric)

    def deciding_of(self, method: str) -> str:
        """The same of one method, which may be reported by a column of its own."""
        return self._deciding(self.report_of(method).metric)

    def _deciding(self, reported: str) -> str:
        if self.tune.metric is None and self.validation:
            return on_validation(reported) or reported
        return self.tune.metric or reported

    def report_of(self, method: str) -> Report:
        """The section `report` with the column that a method is reported by as its metric."""
        own = self.report.metrics.get(method)
        return self.report if own is None else self.report.model_copy(update={"metric": own})

    def decided_by(self, method: str) -> Report:
        """The section `report` by which the trials of a method are compared: with the column, the direction and the
        evaluations that decide."""
        own = self.report_of(method)
        log = own.log and self.deciding_of(method) == own.metric
        of_trials = {"metric": self.deciding_of(method), "best": self.deciding_best, "last": self.tune.last, "log": log}
        return own.model_copy(update={**of_trials, "best_round": False})

    @property
    def columns(self) -> set[str]:
        """All columns by which methods are reported or settings chosen."""
        reported = (self.report.metric, *self.report.metrics.values())
        return {column for name in reported for column in (name, self._deciding(name))} | {*self.report.also}

    @property
    def columns_of_trials(self) -> set[str]:
        """Those of these columns that trials alone need, since they alone hold rows out; none without
        `tune.validation`."""
        reported = {self.report.metric, *self.report.metrics.values(), *self.report.also}
        return self.columns - reported if self.tune.validation else set()

    @property
    def validation(self) -> Any:
        """The fraction of each client's rows by which settings are chosen, 0 for none."""
        return fraction(self.experiment) or self.tune.validation

    @property
    def full_rounds(self) -> Any:
        """The rounds of the experiment before any reduction, as the file has them."""
        federation = self.experiment.get("federation")
        return federation.get("rounds", ROUNDS) if isinstance(federation, dict) else ROUNDS

    @property
    def trial_rounds(self) -> int | None:
        """The rounds of a trial, reduced as those of the cells are; None if trials have the rounds of their cells."""
        if self.tune.rounds is None:
            return None
        fraction, rounds, full = self.reduced.scale, self.reduced.rounds, self.full_rounds
        if rounds is not None:  # what is no number of rounds is refused later, see `cells.check_sizes`
            fraction = rounds / full if type(full) is int and full > 0 else 1.0
        return max(1, round(self.tune.rounds * fraction))

    @property
    def deciding_best(self) -> str:
        """Whether larger (max) or smaller values (min) of that column are better."""
        return self.directions.get(self.deciding, self.report.best) if self.tune.best == "auto" else self.tune.best

    def plain(self) -> dict[str, Any]:
        """The study as study.yaml has it, with its secrets. What follows from the metrics is in `directions` alone: the
        study may go on with other ones."""
        data = self.model_dump(mode="json")
        if self.directions:
            data["report"]["best"] = "auto"
        return data

    @property
    def directed(self) -> Study | None:
        """The study with the `report.best` that is given or known; None if it is still to be found out."""
        known, metric = self.directions, self.report.metric
        if self.report.best != "auto":
            return self
        if metric not in known or self.deciding not in known:
            return None
        return self.model_copy(update={"report": self.report.model_copy(update={"best": known[metric]})})

    @field_validator("methods", mode="before")
    @classmethod
    def _mappings(cls, methods: Any) -> Any:
        """A bare name stands for the method with its defaults; labels become text."""
        if not isinstance(methods, dict):
            return methods
        if any(not str(label).strip() for label in methods):
            raise ValueError("has a method whose label is empty; give it one")
        return {str(k): {"name": v} if isinstance(v, str) else v for k, v in methods.items()}

    @field_validator("name")
    @classmethod
    def _folder(cls, name: str) -> str:
        """The name is a folder in runs/studies."""
        if not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError("must be the name of a folder, without .. and not empty")
        return name

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return each_once(seeds)

    @model_validator(mode="after")
    def _known_methods(self) -> Study:
        for key, names in (("metrics", self.report.metrics), ("against", self.report.against)):
            for name in names:
                if name not in self.methods:
                    raise ValueError(f"report.{key}: the study has no method {name}; {nearest(name, self.methods)}")
        return self

    @model_validator(mode="after")
    def _known_axis(self) -> Study:
        wanted = self.report.level_axis
        if wanted is not None and wanted not in self.axes:
            raise ValueError(
                f"report.level_axis must be an axis of the study, got {wanted}; {nearest(wanted, self.axes)}"
            )
        return self


def shipped() -> dict[str, Path]:
    """The studies that come with the package: name -> path. fedmuon-bc/fmnist is studies/fedmuon-bc/fmnist.yaml."""
    root = Path(str(resources.files("fedfleet.tune"))) / "studies"
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def load(source: str, overrides: Iterable[str] = (), reduced: dict[str, Any] | None = None) -> Study:
    """The study in a file, or of a shipped name, with overrides and reductions; `notes` lists the differences."""
    data = contents(source)
    full = study(own(data))  # a copy, since `override` below changes data in place
    if reduced:
        data["reduced"] = {**data.get("reduced", {}), **reduced}
    changed = study(with_plugins(override(data, overrides), Path()))
    directions = changed.directions if changed.report.best == "auto" else {}
    return changed.model_copy(update={"notes": (*changed.notes, *differences(full, changed)), "directions": directions})


def contents(source: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The plain data of a study file, merged with those of its `base`. above: the studies that build on this one."""
    path = shipped().get(source) or expanded(source)
    if (own_file := path / FILE_OF_KIND["study"]).is_file():
        raise ConfigError(
            f"{source} is the folder of a study, and no file; to go on with it: fedfleet study {own_file} --out "
            f"{source}"
        )
    if not path.is_file():
        raise ConfigError(f"there is no study {source}; {nearest(source, shipped())}, or the path of a YAML file")
    data = read_yaml(path, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of keys such as experiment and methods, got {data!r}")
    if "method" in data and not {"methods", "base"} & data.keys():
        raise ConfigError(
            f"{source} holds an experiment, and no study; start it by `fedfleet run {source}`, or name it in a study "
            f"as experiment: {source}"
        )
    data.setdefault("name", source if source in shipped() else path.stem)
    data["plugins"] = [located(name, path) for name in listed(data.get("plugins"))]
    if "experiment" in data:
        data["experiment"] = resolved(data["experiment"], path)
        data = with_plugins(data, path)
    below = data.pop("base", None)
    if below is None:
        return data
    names = (*above, source)
    if not isinstance(below, str) or (found := beside(below, path)) in names:
        raise ConfigError(f"base must name another study than {source}, got {below!r}; name one, or leave base out")
    return on_top(contents(found, names), data)


def beside(base: str, file: Path) -> str:
    """The name of a shipped study, or the path of a study that lies beside the file, else in the current folder."""
    path = file.parent / base
    return str(path.resolve()) if base not in shipped() and path.is_file() else base


def with_plugins(data: dict[str, Any], file: Path) -> dict[str, Any]:
    """The study in which the plug-ins of the experiment, which lie beside `file`, are also those of the study."""
    experiment = data.get("experiment")
    if not isinstance(experiment, dict) or "plugins" not in experiment:
        return data
    own = [located(name, file) for name in listed(experiment["plugins"])]
    kept = {key: value for key, value in experiment.items() if key != "plugins"}
    return {**data, "experiment": kept, "plugins": together(data.get("plugins"), own)}


def together(*plugins: Any) -> list[Any]:
    """All plug-ins of several lists, each once."""
    found = [name for each in plugins for name in listed(each)]
    return [name for number, name in enumerate(found) if name not in found[:number]]


def on_top(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The base with the keys of `data`. Keys of `experiment` are replaced one by one, plug-ins are added; `methods` may
    be a list of labels of the base."""
    made = {**base, **data, "experiment": {**base.get("experiment", {}), **data.get("experiment", {})}}
    made["plugins"] = together(base["plugins"], data["plugins"])
    if isinstance(data.get("methods"), list):
        known = base.get("methods")
        if not isinstance(known, dict):
            raise ConfigError(
                f"methods must be a mapping of labels over a base without methods, got {data['methods']!r}; write "
                "label: method"
            )
        for name in data["methods"]:
            if not isinstance(name, str) or name not in known:
                raise ConfigError(f"methods: the base has no method {name}; {nearest(str(name), known)}")
        made["methods"] = {name: known[name] for name in data["methods"]}
    return made


def resolved(experiment: Any, file: Path) -> dict[str, Any]:
    """The base experiment: a mapping, or the content of the experiment file that is named, whose plug-ins are located.
    Raises ConfigError for anything else."""
    if isinstance(experiment, str):
        try:
            return load_data(experiment, folder=file.parent)
        except ConfigError as error:
            raise ConfigError(f"experiment: {error}") from None
    if not isinstance(experiment, dict):
        raise ConfigError(
            f"experiment must be a mapping of keys such as workload and federation, got {experiment!r}; write one"
        )
    return experiment


def differences(full: Study, changed: Study) -> list[str]:
    """Sentences on the differences, such as ["rounds × 0.1", "seeds is [0], in the file [0, 1]"]."""
    old, new = (flatten(s.model_dump(mode="json")) for s in (full, changed))
    made = smaller(changed) if changed.reduced != full.reduced else []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(QUIET):
            made.append(f"{key} is {shown(new, key)}, in the file {shown(old, key)}")
    return made


def smaller(study: Study) -> list[str]:
    """Sentences on the section `reduced`."""
    reduced, federation = study.reduced, study.experiment.get("federation")
    federation = federation if isinstance(federation, dict) else {}
    made = [f"rounds × {reduced.scale:g}"] if reduced.scale != 1 and reduced.rounds is None else []
    if reduced.rounds is not None:
        made.append(f"{reduced.rounds} round{'s' * (reduced.rounds != 1)}, in full {study.full_rounds}")
    if study.trial_rounds != study.tune.rounds:
        made.append(
            f"trials of {study.trial_rounds} round{'s' * (study.trial_rounds != 1)}, in full {study.tune.rounds}"
        )
    if reduced.clients is not None:
        made.append(
            f"{reduced.clients} client{'s' * (reduced.clients != 1)}, in full {federation.get('clients', CLIENTS)}, "
            "the cohort in proportion"
        )
    return made


def shown(values: dict[str, Any], key: str) -> str:
    return "not set" if values.get(key) is None else str(values[key])


def study(data: dict[str, Any]) -> Study:
    """Validate a study; ConfigError with one sentence per error."""
    return validated(Study, data)
