"""The tables of pages whose sentences are written by hand: docs/results/tables.yaml says what their cells show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fedfleet.engine.config.schema import Section, validated
from fedfleet.tune.files import read_yaml
from fedfleet.tune.report.statistics import Reached, reached
from fedfleet.tune.units import is_share

from .claims import signed, slopes
from .inputs import RESULTS, papers
from .measured import Measured, Run, measured
from .page import mean_and_std, settings, table

FILE = RESULTS / "tables.yaml"
MARK = "<!-- The table {} is made by `python -m tools.reproductions`; changes are lost. -->\n\n"
TABLE = re.compile(MARK.format("([a-z-]+)") + r"((?:\|.*\n)*)")
"""Matches the mark of a table on a page, and the table below it."""


class Published(Section):
    """Where a paper prints a number."""

    paper: str
    table: int
    column: str
    row: str = ""
    """The method of the study, if it is empty."""


class Shown(Section):
    """What a cell of a table shows: the keys of its table, row and column together.

    value: the value that the study's report has, mean over seeds; spread: the last evaluation, mean ± standard
    deviation over seeds; trial: the value of the trial with the settings `chosen`; chosen: the settings that tuning
    chose. lowest: the lowest value at the levels `over`, where a run that diverged counts as `diverged`.
    rounds, visits, clock: rounds, client visits and virtual seconds until the first evaluation at or beyond `target`,
    mean over the seeds that reached it. pace: the virtual time for `slots` visits, in units of `unit` virtual seconds.
    average: the mean of all evaluations, each to the power `power`, mean over seeds; slope: that of the logarithm of
    this mean in the logarithm of the levels `over`, mean over seeds and half of its 95 % confidence interval.
    megabytes: what all clients sent; noise: the multiplier of the noise. published: a number of a paper. text: `text`
    of the row at `word`.
    A run that diverged has the round in which it did.
    """

    show: Literal["value", "spread", "trial", "chosen", "lowest", "rounds", "visits", "clock", "pace", "average",
                  "slope", "megabytes", "noise", "published", "text"] = "value"  # fmt: skip
    folder: str = ""
    method: str = ""
    level: str = "all"
    """"{}" in it stands for each of `over`."""
    over: tuple[str, ...] = ()
    chosen: str = ""
    diverged: float = math.nan
    target: float = math.nan
    slots: int = 1
    unit: float = 1.0
    power: float = 1.0
    base: dict[str, Any] = Field(default_factory=dict)
    """Keys by which another cell differs, of which this one is a multiple."""
    published: Published | None = None
    text: dict[str, str] = Field(default_factory=dict)
    word: str = ""
    """Which of the words of `text`."""
    form: str = ""
    """The format of a number: by default one digit of a share in per cent, and three digits of others."""


class Made(Section):
    """A table. cells: keys that all of them have; rows: label -> keys of its cells; columns: the same, and `head`."""

    head: str
    cells: dict[str, Any] = Field(default_factory=dict)
    rows: dict[str, dict[str, Any]]
    columns: tuple[dict[str, Any], ...]


def made_tables() -> dict[str, dict[str, Made]]:
    """File of a page in docs/results -> name of a table -> table."""
    return {
        page: {name: validated(Made, one, f"{FILE.name}: {page}, {name}: ") for name, one in some.items()}
        for page, some in read_yaml(FILE, str(FILE)).items()
    }


def hand_written_pages() -> list[Path]:
    return [RESULTS / page for page in made_tables()]


def with_tables(place: Path) -> str:
    """The text of a page with the tables that its cells give. Raises KeyError for a mark without a table."""
    tables, studies = made_tables()[place.name], dict[str, Measured]()

    def study(folder: str) -> Measured:
        if folder not in studies:
            studies[folder] = measured(RESULTS / folder, of_trials=True)
        return studies[folder]

    def replaced(match: re.Match[str]) -> str:
        return f"{MARK.format(match[1])}{text_of(tables[match[1]], study)}\n"

    return TABLE.sub(replaced, place.read_text("utf-8"))


def text_of(made: Made, study: Callable[[str], Measured]) -> str:
    """The table in Markdown. study: folder -> its cells."""
    rows = [
        (label, *(shown(cell(made, row, column), study) for column in made.columns)) for label, row in made.rows.items()
    ]
    return table((made.head, *(column["head"] for column in made.columns)), rows)


def cell(made: Made, row: Mapping[str, Any], column: Mapping[str, Any]) -> Shown:
    keys = {**made.cells, **row, **column}
    return validated(Shown, {key: value for key, value in keys.items() if key != "head"}, f"{FILE.name}: ")


def shown(one: Shown, study: Callable[[str], Measured]) -> str:
    """The text of a cell."""
    if one.show == "text":
        return one.text[one.word]
    if one.published is not None and one.show == "published":
        where = one.published
        return f"{papers()[where.paper].published(where.table, where.column, where.row or one.method)[0]:.1f}"
    made = study(one.folder)
    if one.show == "slope":
        levels = {one.level.format(level): float(level) for level in one.over}
        mean, low, high = slopes(made, one.method, levels, one.power)
        return f"{signed(mean, '.3f')} ± {(high - low) / 2:.3f}"
    if one.show in ("spread", "chosen", "noise"):
        return WORDS[one.show](runs_of(one, made), form_of(one, made))
    if one.base:
        other = one.model_copy(update={"base": {}, **one.base})
        return f"{number(one, made) / number(other, study(other.folder)):{one.form or '.1f'}}"
    return in_text(one, made)


def in_text(one: Shown, made: Measured) -> str:
    """A number as text; of a run that diverged the round in which it did, and how many seeds have the number."""
    runs = runs_of(one, made)
    found = NUMBERS[one.show](one, made)
    there = [value for value in found if not math.isnan(value)]
    if not there:
        rounds = dict.fromkeys(match[1] for run in runs if (match := re.search(r"in (round \d+)", run.reason)))
        return " / ".join(rounds) or "–"
    of = f" ({len(there)} of {len(found)})" if len(there) < len(found) else ""
    return f"{float(np.mean(there)):{form_of(one, made)}}{of}"


def number(one: Shown, made: Measured) -> float:
    return float(np.mean(NUMBERS[one.show](one, made)))


def form_of(one: Shown, made: Measured) -> str:
    return one.form or (".1f" if is_share(made.study.report.metric) else ".3g")


def runs_of(one: Shown, made: Measured) -> list[Run]:
    """The runs of a cell, one for each seed."""
    if one.show == "trial":
        return [run for run in made.tried[one.method, one.level] if run.chosen == one.chosen]
    places = [one.level.format(level) for level in one.over] or [one.level]
    return [run for place in places for run in made.rows[one.method, place]]


# --- numbers by seed --------------------------------------------------------------------------------------------------
def values(one: Shown, made: Measured) -> list[float]:
    return [run.reported for run in runs_of(one, made)]


def lowest(one: Shown, made: Measured) -> list[float]:
    """A number for all seeds together."""
    return [min(one.diverged if math.isnan(value) else value for value in values(one, made))]


def until(of: Callable[[Reached], float], one: Shown, made: Measured) -> list[float]:
    """The cost of reaching the target for each seed; nan where it was not reached."""
    better = float.__gt__ if made.study.report.best == "max" else float.__lt__
    took = [reached(run.points, one.target, better) for run in runs_of(one, made)]
    return [math.nan if each is None else of(each) for each in took]


def paces(one: Shown, made: Measured) -> list[float]:
    found = []
    for run in runs_of(one, made):
        assert run.points is not None
        assert run.points.clock is not None
        assert run.points.visits is not None
        found.append(float(run.points.clock[-1] / run.points.visits[-1]) * one.slots / one.unit)
    return found


def averages(one: Shown, made: Measured) -> list[float]:
    return [float(np.mean(np.power(run.evaluations, one.power))) for run in runs_of(one, made)]


def megabytes(one: Shown, made: Measured) -> list[float]:
    return [run.megabytes for run in runs_of(one, made)]


NUMBERS: dict[str, Callable[[Shown, Measured], list[float]]] = {
    "value": values,
    "trial": values,
    "lowest": lowest,
    "rounds": partial(until, lambda took: took.rounds),
    "visits": partial(until, lambda took: took.visits),
    "clock": partial(until, lambda took: took.clock),
    "pace": paces,
    "average": averages,
    "megabytes": megabytes,
}


# --- words ------------------------------------------------------------------------------------------------------------
def spread(runs: list[Run], form: str) -> str:
    return mean_and_std([run.values["last"] for run in runs if run.values], form)


def noise(runs: Iterable[Run], _: str) -> str:
    """z in the line on what a run costs of privacy."""
    return " / ".join(dict.fromkeys(match[1] for run in runs if (match := re.search(r" z = ([^;]+);", run.privacy))))


WORDS: dict[str, Callable[[list[Run], str], str]] = {
    "spread": spread,
    "chosen": lambda runs, _: settings(runs),
    "noise": noise,
}
