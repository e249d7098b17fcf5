"""What the page is made from beside cells: the papers' numbers and claims, and the list of studies."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from fedfleet.engine.config.schema import Section, validated
from fedfleet.tune.files import read_yaml

RESULTS = Path(__file__).parents[2] / "docs/results"


# --- a paper ----------------------------------------------------------------------------------------------------------
class Table(Section):
    """A table of accuracies in a paper."""

    table: int
    what: str
    columns: tuple[str, ...]
    rounds: tuple[int, ...]
    """The rounds of the paper's runs, for each column."""
    rows: dict[str, tuple[float, ...]]

    @model_validator(mode="after")
    def _full(self) -> Table:
        for name, values in {"rounds": self.rounds, **self.rows}.items():
            if len(values) != len(self.columns):
                raise ValueError(f"table {self.table}: {name} must have {len(self.columns)} numbers, got {len(values)}")
        return self


class Order(Section):
    """Each method is above those of the next entry: `methods` has methods, and lists of methods of any order."""

    methods: tuple[str | tuple[str, ...], ...] = Field(min_length=2)
    margin: float = Field(gt=0)
    """The smallest difference that counts, in the unit of the tables."""
    of: Literal["value", "loss on unseen clients"] = "value"
    """What is compared: the value of a method, or by how much its mean over the clients that are trained with is above
    that over unseen clients."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(the better one, the worse one) of all pairs of neighbours."""
        groups = [(entry,) if isinstance(entry, str) else entry for entry in self.methods]
        return [(a, b) for above, below in pairwise(groups) for a in above for b in below]


class Near(Section):
    """Two methods differ by at most `within`."""

    methods: tuple[str, str]
    within: float = Field(gt=0)


class NearBest(Section):
    """A method is at most `within` below the best one of `among`."""

    method: str
    among: tuple[str, ...] = Field(min_length=1)
    within: float = Field(ge=0)


class Interval(Section):
    """The 95 % interval of the difference of two methods lies above 0."""

    methods: tuple[str, str]
    of: Literal["value", "worst tenth", "each client"] = "value"
    """What is compared: the value of a method, or its mean over the tenth of the clients that it serves worst, paired
    by seed, with Student's t; or the value of each client, a mean over seeds, with a bootstrap over clients."""


class Least(Section):
    """Every method has at least `value`."""

    methods: tuple[str, ...]
    value: float


class Chosen(Section):
    """Tuning chooses the published settings for every seed. `settings`: level -> the settings as text."""

    method: str
    settings: dict[str, str]


class Sooner(Section):
    """The first method reaches each of `values`, of a metric of which lower is better, before all others, for every
    seed. It reaches a value in the round of its first evaluation at or below it."""

    methods: tuple[str, ...] = Field(min_length=2)
    values: tuple[float, ...] = Field(min_length=1)


class Rises(Section):
    """From each level of a line to the next one, the value of the last evaluation of a method is larger by the
    margin."""

    method: str
    margin: float = Field(gt=0)
    lines: tuple[tuple[str, ...], ...] = Field(min_length=1)


class Points(Section):
    """Every method is at most `within` from its published number, by the summary that its study reports."""

    within: float = Field(gt=0)


class Line(Section):
    """A line in logarithmic scales. `bound`: the slope of a theorem; `levels`: level of the study -> x."""

    bound: float
    levels: dict[str, float] = Field(min_length=2)


class Rate(Section):
    """A metric falls at least as fast as theorems say: its logarithm is fitted as a line in log x for each seed. The
    metric of a run is the mean of all its evaluations, each to the power `power`."""

    method: str
    lines: tuple[Line, ...] = Field(min_length=1)
    power: float = 1.0
    within: float = Field(gt=0)
    """How far a slope may be above its bound."""


class Claim(Section):
    """A claim of a paper, and the criterion by which it counts as reproduced."""

    says: str
    folder: str | None = None
    """The study by which it was tried; None if it was not."""
    also: str | None = None
    """A second study, which has the methods that the first one lacks."""
    level: str | None = None
    """The level of the study; None for its only one."""
    order: Order | None = None
    near: Near | None = None
    near_best: NearBest | None = None
    interval: Interval | None = None
    least: Least | None = None
    chosen: Chosen | None = None
    sooner: Sooner | None = None
    rises: Rises | None = None
    points: Points | None = None
    rate: Rate | None = None
    remark: str = ""

    @model_validator(mode="after")
    def _one_criterion(self) -> Claim:
        if len(self.criteria) != (self.folder is not None):
            raise ValueError(f"the claim {self.says!r} must have a folder and one criterion, or neither")
        return self

    @property
    def criteria(self) -> list[Section]:
        """Its criterion in a list; [] for a claim that was not tried."""
        found = (self.order, self.near, self.interval, self.least, self.chosen, self.sooner, self.points)
        found += (self.rate, self.near_best, self.rises)
        return [criterion for criterion in found if criterion is not None]


class Paper(Section):
    """A file in docs/results/papers/."""

    paper: str
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()

    def published(self, table: int, column: str, row: str) -> tuple[float, int]:
        """(the number at a row and column of a table, the rounds that the paper's run had)."""
        found = next(one for one in self.tables if one.table == table)
        place = found.columns.index(column)
        return found.rows[row][place], found.rounds[place]


def papers() -> dict[str, Paper]:
    """Name of the file -> paper."""
    files = sorted((RESULTS / "papers").glob("*.yaml"))
    return {file.stem: validated(Paper, read_yaml(file, str(file)), f"{file.name}: ") for file in files}


# --- the studies ------------------------------------------------------------------------------------------------------
class Compared(Section):
    """Where the published numbers of a study are."""

    table: int
    columns: dict[str, str]
    """Level of the study -> column of the table."""
    rows: dict[str, str] = Field(default_factory=dict)
    """Method of the study -> row of the table, where the names differ."""


class Listed(Section):
    """A folder of docs/results."""

    folder: str
    title: str
    paper: str | None = None
    """A file in docs/results/papers, without .yaml; None for a study that repeats no paper."""
    command: str
    what: str = ""
    """What was run, where it is not the paper's, in a sentence without results."""
    compared: Compared | None = None
    charts: dict[str, str] = Field(default_factory=dict)
    """File of a chart in the folder -> what it shows."""
    notes: tuple[str, ...] = ()
    """What a reader has to know of the table, in sentences without results."""


class NotRun(Section):
    """Figures and tables that were not run."""

    paper: str
    what: str
    studies: tuple[str, ...] = ()


class Studies(Section):
    """docs/results/reproductions.yaml."""

    studies: tuple[Listed, ...]
    not_run: tuple[NotRun, ...]


class Elsewhere(Section):
    """Figures that others have published, in a setting of their own."""

    source: str
    setting: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    """Method -> its figures, None for those that it does not have."""

    @model_validator(mode="after")
    def _full(self) -> Elsewhere:
        for name, values in self.rows.items():
            if len(values) != len(self.columns):
                raise ValueError(f"{self.source}: {name} must have {len(self.columns)} numbers, got {len(values)}")
        return self


class Topic(Section):
    """docs/results/NAME.yaml: what a page about several studies has beside cells."""

    title: str
    intro: str
    folders: tuple[str, ...]
    """The studies, in their order on the page."""
    claims: tuple[Claim, ...] = ()
    """Claims that several papers make, each in its own setting."""
    reading: tuple[str, ...] = ()
    """What follows from the tables, in sentences."""
    about_published: str
    """A sentence on how published figures compare with those of the page."""
    published: tuple[Elsewhere, ...] = ()


def topic(name: str) -> Topic:
    file = RESULTS / f"{name}.yaml"
    return validated(Topic, read_yaml(file, str(file)), f"{file.name}: ")


def studies() -> Studies:
    file = RESULTS / "reproductions.yaml"
    return validated(Studies, read_yaml(file, str(file)), f"{file.name}: ")
