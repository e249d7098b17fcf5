"""The parts of a page: sections with tables, charts and maps of colours. They know nothing of runs and studies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

MOST_POINTS = 400
"""Points of a curve in a page. Longer curves are thinned evenly; their first and last points stay."""

NO_STYLE = -1
"""Style of a series that belongs to no method, such as the line of a Pareto front: grey."""


class TableCell(NamedTuple):
    """A cell of a table or a map. `best`: whether it stands out. Of a map, `share`: 0 … 1, its place between the worst
    and the best value, None for an empty cell; `more`: text for the reader who points at it."""

    text: str
    best: bool = False
    share: float | None = None
    more: str = ""


def row_of(*texts: str) -> list[TableCell]:
    """A row of a table in which nothing stands out."""
    return [TableCell(text) for text in texts]


class Axis(NamedTuple):
    """An axis of a chart. `labels`: names of the positions 0, 1, …, or () for numbers; `log`: whether its scale is
    logarithmic at first; `whole`: whether its numbers are whole; `zero`: whether it begins at 0, and so is never
    logarithmic."""

    title: str
    log: bool = False
    labels: tuple[str, ...] = ()
    whole: bool = False
    zero: bool = False


@dataclass(frozen=True)
class Curve:
    """A series of a chart of kind "curves".

    `x`: title of the axis -> (E,), one entry for each choice of the reader. `mean`: (E,). `std`: (E,), the half width
    of the band, or () for none. `seeds`: label -> (E,), the single runs. `style`: number of the colour, marker and
    line.
    """

    name: str
    style: int
    x: Mapping[str, Sequence[Any]]
    mean: Sequence[Any]
    std: Sequence[Any] = ()
    seeds: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Marks:
    """A series of a chart of kind "marks": points (n,), with error bars `dx` and `dy` (n,) and a text (n,) for each
    point where they are not (). `line`: whether the points are joined. `markers`: whether they are drawn. `symbol`: of
    the points, "" for that of the style. `legend`: whether the name belongs to the section's legend."""

    name: str
    style: int
    x: Sequence[Any]
    y: Sequence[Any]
    dx: Sequence[Any] = ()
    dy: Sequence[Any] = ()
    texts: Sequence[str] = ()
    line: bool = False
    markers: bool = True
    symbol: str = ""
    legend: bool = True


class Chart(NamedTuple):
    """A chart. The series of "curves" are Curves, all others are Marks: the points of "marks", the lengths of
    horizontal "bars", and the areas of a "stack"."""

    kind: Literal["curves", "marks", "bars", "stack"]
    title: str
    x: Axis
    y: Axis
    series: Sequence[Curve] | Sequence[Marks]

    @property
    def alt(self) -> str:
        """Text for readers who cannot see the chart."""
        named = [one.name for one in self.series if one.name]
        what = f"{self.title}: " if self.title else ""
        return f"{what}{self.y.title} against {self.x.title or 'the level'}. {', '.join(dict.fromkeys(named))}"

    def plain(self) -> dict[str, Any]:
        """The chart as data for JSON, as charts.js reads them."""
        return {
            "kind": self.kind,
            "x": self.x._asdict(),
            "y": self.y._asdict(),
            "series": [vars(one) for one in self.series],
        }


class HeatMap(NamedTuple):
    """A table whose cells are coloured. `corner`: what the rows and columns are; `rows`: (label, cells)."""

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[TableCell]]]

    @property
    def alt(self) -> str:
        """Text for readers who cannot see the map."""
        return f"{self.title}: {self.corner}" if self.title else self.corner


class PageSection(NamedTuple):
    """A section of a page: a title, a note, and a table with `heads` and `rows`, maps and charts, each of which may be
    missing."""

    title: str
    note: str
    heads: Sequence[str] = ()
    rows: Sequence[list[TableCell]] = ()
    maps: Sequence[HeatMap] = ()
    charts: Sequence[Chart] = ()

    @property
    def has_content(self) -> bool:
        """Whether there is more than a title and a note."""
        return bool(self.rows or self.maps or self.charts)

    @property
    def legend(self) -> dict[str, tuple[int, bool, bool, str]]:
        """Name in the charts -> its style, whether it has a line, whether it has markers, and their symbol, "" for that
        of the style; {} where one name would be all."""
        found: dict[str, tuple[int, bool, bool, str]] = {}
        for figure in self.charts:
            for one in figure.series:
                if isinstance(one, Curve):
                    found.setdefault(one.name, (one.style, True, True, ""))
                elif one.legend:
                    filled = figure.kind in ("bars", "stack")
                    found.setdefault(one.name, (one.style, one.line or filled, one.markers, one.symbol))
        found.pop("", None)
        return found if any(len(figure.series) > 1 for figure in self.charts) and len(found) > 1 else {}

    @property
    def scales(self) -> dict[str, bool | None]:
        """Axis, x or y -> whether its scale is logarithmic at first; None if it cannot be, because the axis has labels
        or begins at 0, or a number is not positive."""
        made: dict[str, bool | None] = {}
        for name in ("x", "y"):
            axes = [(getattr(f, name), f) for f in self.charts if f.kind != "stack" and not getattr(f, name).labels]
            positive = all(value > 0 for _, figure in axes for value in values_of(figure, name))
            positive = positive and not any(axis.zero for axis, _ in axes)
            made[name] = any(axis.log for axis, _ in axes) if axes and positive else None
        return made

    @property
    def shares_y(self) -> bool:
        """Whether its charts show one quantity, so that they may have one range of y."""
        titles = {figure.y.title for figure in self.charts if figure.kind != "stack" and not figure.y.labels}
        return len(self.charts) > 1 and len(titles) == 1 and all(not f.y.labels for f in self.charts)

    @property
    def kinds(self) -> list[str]:
        return sorted({figure.kind for figure in self.charts})

    @property
    def has_seeds(self) -> bool:
        return any(isinstance(one, Curve) and len(one.seeds) > 1 for f in self.charts for one in f.series)


class Page(NamedTuple):
    """A page. `head`: texts below the title; `changes`: in what a study differs from its file; `claims`:
    what the paper shows; `problem`: why there is no result, or ""."""

    title: str
    head: list[str]
    sections: list[PageSection]
    changes: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    problem: str = ""


def values_of(figure: Chart, axis: str) -> Iterator[float]:
    """All numbers of a chart on its axis x or y."""
    for one in figure.series:
        columns = [getattr(one, axis)] if isinstance(one, Marks) else one.x.values() if axis == "x" else [one.mean]
        yield from (value for column in columns for value in column if isinstance(value, int | float))


def thinned(count: int) -> np.ndarray:
    """Indices of the points of a curve with `count` points that a page shows."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))


def numbers(values: Iterable[float]) -> list[float | None]:
    """The values with six digits, for JSON; None for nan and infinity."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in map(float, values)]


def shares(values: Sequence[float], larger_is_better: bool) -> list[float | None]:
    """The place of each value between the worst (0) and the best (1); None for nan. Equal values are all in the
    middle."""
    there = [value for value in values if not math.isnan(value)]
    low, high = (min(there), max(there)) if there else (0.0, 0.0)
    made: list[float | None] = []
    for value in values:
        if math.isnan(value):
            made.append(None)
        else:
            share = (value - low) / (high - low) if high > low else 0.5
            made.append(share if larger_is_better else 1 - share)
    return made
