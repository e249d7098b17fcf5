"""The sensitivity to settings: the metric at the points of grids, as maps and charts.

The points are the trials of tuned methods, and the study's own cells if two of its axes are keys with values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..page.content import NO_STYLE, Axis, Chart, HeatMap, Marks, PageSection, TableCell, numbers, shares
from ..study.folder import DIVERGED, FAILED
from ..units import setting
from .findings import Findings, MeasuredRun, name_of
from .statistics import spread

Part = float | str
"""The value of one setting in a point, see `part_of`."""
Point = tuple[Part, ...]
Values = dict[Point, float]
"""Point of the grid -> mean of the metric over seeds; nan if a run diverged or failed."""
MARKS = {DIVERGED: "×", FAILED: "△"}
"""Status of a run without a value -> what stands for it in maps."""
SYMBOLS = {DIVERGED: "x-thin-open", FAILED: "triangle-up-open"}
"""The same for charts, where it is a symbol that looks alike."""
LINES = "The lines join the best values over all other settings."
WIDE = 16
"""Values of a setting up to which a grid over two settings is a map."""
LABEL = 24
"""Characters of the longest label of an axis of settings; longer ones would leave no room for the chart."""


class SettingsGrid(NamedTuple):
    """The points over some settings. `found`: the findings, whose `report` has the metric of the points; `names`: of
    the settings; `values`: the metric; `lost`: the status of the points without a value, DIVERGED or FAILED."""

    found: Findings
    title: str
    names: list[str]
    values: Values
    lost: dict[Point, str]

    def ordered(self, at: int) -> list[Part]:
        """The sorted values of one setting, the numbers first."""
        return sorted({point[at] for point in self.values}, key=lambda part: (isinstance(part, str), part))

    @property
    def best(self) -> Point | None:
        """The best point; None if none has a value."""
        return self.found.first_best(self.values)

    @property
    def is_map(self) -> bool:
        """Whether it is drawn as a map, and not as charts over each setting."""
        return len(self.names) == 2 and len(self.ordered(1)) <= WIDE

    def named(self, point: Point) -> str:
        """A point as text."""
        return ", ".join(f"{name} {setting(part)}" for name, part in zip(self.names, point, strict=True))


def grids(found: Findings) -> list[SettingsGrid]:
    """All grids with at least one setting that varies and at least one point that was run."""
    return [grid for grid in [*of_trials(found), *of_axes(found)] if grid.names and grid.values]


def note_of(found: Findings, shown: list[SettingsGrid]) -> str:
    """What a section says about these grids. It explains only the marks that they have."""
    deciding = dict.fromkeys(grid.found.unit for grid in shown if grid.found.unit != found.unit)
    by = f" Trials are shown by what decided: {', '.join(deciding)}." if deciding else ""
    statuses = {status for grid in shown for status in grid.lost.values()}
    marks = [f"{mark} stands for a {status} run" for status, mark in MARKS.items() if status in statuses]
    return f"Mean over seeds of every point that was run. {'; '.join(['The best point is framed', *marks])}.{by}"


def of_trials(found: Findings) -> list[SettingsGrid]:
    """The grids of tuned methods, one for each method and level, by what decided."""
    made = []
    for place in found.places:
        for method in found.methods:
            runs = [run for run in found.trials if run.method == method and run.place == place]
            if runs and any(not math.isnan(run.final) for run in runs):
                keys = [key for key in runs[0].settings if len({str(run.settings.get(key)) for run in runs}) > 1]
                title = ", ".join([method, *place])
                by = replace(found, report=found.deciding.get(method, found.report))
                made.append(grid(by, title, keys, [(tuple(run.settings[k] for k in keys), run) for run in runs]))
    return made


def of_axes(found: Findings) -> list[SettingsGrid]:
    """The grids over the last two axes whose levels are values, one for each method and level of the other axes."""
    axes = [a for a, labels in found.axes.items() if all(label.startswith(f"{a} = ") for label in labels)][-2:]
    if len(axes) < 2:
        return []
    at = [list(found.axes).index(axis) for axis in axes]
    made = []
    for method in found.methods:
        for other in dict.fromkeys(tuple(v for i, v in enumerate(p) if i not in at) for p in found.places):
            runs = [r for r in found.runs if r.method == method and without(r.place, at) == other]
            points = [(tuple(value_of(run.place[i]) for i in at), run) for run in runs]
            title = f"{method}, {name_of(other)}" if other else method
            made.append(grid(found, title, axes, points))
    return made


def without(place: tuple[str, ...], at: list[int]) -> tuple[str, ...]:
    return tuple(v for i, v in enumerate(place) if i not in at)


def value_of(label: str) -> Any:
    """The value in a label "axis = value", a number if it is one."""
    text = label.partition(" = ")[2]
    try:
        return float(text)
    except ValueError:
        return text


def grid(found: Findings, title: str, keys: list[str], points: list[tuple[Any, MeasuredRun]]) -> SettingsGrid:
    """The means over seeds. points: (values of the keys, run).

    Runs that have not been run, or have not measured the metric, do not count. A point has no mean if one of its runs
    diverged or failed; that one diverged says more about the point.
    """
    together: dict[Point, list[MeasuredRun]] = {}
    for point, run in points:
        if run.status in MARKS or not math.isnan(run.final):
            together.setdefault(tuple(map(part_of, point)), []).append(run)
    values = {point: spread([run.final for run in runs]).mean for point, runs in together.items()}
    statuses = {point: {run.status for run in together[point]} for point, value in values.items() if math.isnan(value)}
    lost = {point: DIVERGED if DIVERGED in those else FAILED for point, those in statuses.items()}
    return SettingsGrid(found, title, [key.removeprefix("method.") for key in keys], values, lost)


def part_of(value: Any) -> Part:
    """A setting's value as a part of a point: a finite number as it is, anything else as text.

    Lists and mappings cannot be keys, and None cannot be sorted. True is the same key as 1, and nan is not even the
    same as itself.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else str(value)


# --- maps and charts --------------------------------------------------------------------------------------------------
def sensitivity(found: Findings) -> PageSection:
    """Grids over two settings as maps; over one setting, or each of many, as charts."""
    shown = grids(found)
    maps = [grid for grid in shown if grid.is_map]
    lines = [setting_line(grid, at) for grid in shown if not grid.is_map for at in range(len(grid.names))]
    return PageSection(
        "Sensitivity", f"{note_of(found, shown)} {LINES}", maps=[setting_map(grid) for grid in maps], charts=lines
    )


def setting_map(grid: SettingsGrid) -> HeatMap:
    found, rows, columns, best = grid.found, grid.ordered(0), grid.ordered(1), grid.best
    share = dict(zip(grid.values, shares(list(grid.values.values()), found.report.best == "max"), strict=True))

    def cell(point: Point) -> TableCell:
        if point not in grid.values:
            return TableCell("")
        status = grid.lost.get(point)
        text = MARKS[status] if status else found.number(grid.values[point])
        return TableCell(text, point == best, share[point], f"{grid.named(point)}: {status or text}")

    made = [(setting(row), [cell((row, column)) for column in columns]) for row in rows]
    return HeatMap(grid.title, f"{grid.names[0]} ↓ {grid.names[1]} →", list(map(setting, columns)), made)


def setting_line(grid: SettingsGrid, at: int) -> Chart:
    """The metric over one setting. The line joins the best values over all other settings."""
    found, places, best = grid.found, grid.ordered(at), grid.best
    logs = all(not isinstance(part, str) and part > 0 for part in places)
    x_of = dict(zip(places, places if logs else range(len(places)), strict=True))
    known = {point: value for point, value in grid.values.items() if not math.isnan(value)}

    def marks(values: Mapping[Point, float], style: int, texts: list[str], symbol: str = "") -> Marks:
        x, y = [x_of[point[at]] for point in values], numbers(value * found.factor for value in values.values())
        return Marks("", style, x, y, texts=texts, symbol=symbol, legend=False)

    of_place = [[value for point, value in known.items() if point[at] == place] for place in places]
    tops = numbers(found.best_of(values, default=math.nan) * found.factor for values in of_place)
    series = [
        Marks("best of the others", 0, list(x_of.values()), tops, line=True, markers=False, legend=False),
        marks(known, 0, [f"{grid.named(point)}\n{found.number(value)}" for point, value in known.items()]),
    ]
    if best is not None:
        series.append(marks({best: known[best]}, 1, [f"best\n{grid.named(best)}"], "square-open"))
        worst = (min if found.report.best == "max" else max)(known.values())
        for status, symbol in SYMBOLS.items():
            if lost := [point for point, how in grid.lost.items() if how == status]:
                texts = [f"{grid.named(point)}\n{status}" for point in lost]
                series.append(marks(dict.fromkeys(lost, worst), NO_STYLE, texts, symbol))
    title = grid.title if len(grid.names) == 1 else f"{grid.title}: {grid.names[at]}"
    axis = Axis(grid.names[at], log=logs, labels=() if logs else tuple(map(cut, places)))
    return Chart("marks", title, axis, Axis(found.unit, log=found.report.log), series)


def cut(part: Part) -> str:
    """A value as a label of an axis. The texts of the points have the whole value."""
    text = setting(part)
    return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"
