"""The charts of a report: of a study, or of a comparison of runs. The page and the Markdown show the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ..page.content import NO_STYLE, Axis, Chart, Curve, HeatMap, MapCell, Marks, PageSection, numbers, shares, thinned
from ..study.folder import DIVERGED, FAILED, Points
from ..study.spec import Report
from .findings import Findings, Place, Run, at_rounds, key_of, mean_clock, mean_curve, name_of
from .sensitivity import MARKS, Part, Point, SettingsGrid, grids, note_of, short
from .statistics import front, spread
from .tables import mean_and_std

CURVES = (
    "Mean over seeds; the band is one standard deviation, and on a logarithmic scale it reaches by the same factor "
    "below the mean as above it."
)
LEVELS = "Means over seeds. The best value of each level is framed."
FINALS = "Final values, mean and standard deviation over seeds."
BYTES = (
    "Bytes of all clients in both directions over the whole run. The line joins the methods that no other method "
    "surpasses in both bytes and value."
)
SECONDS = (
    "Seconds of a run's rounds. They were measured while other runs may have been under way at the same time, so they "
    "are no benchmark. The line joins the methods that no other method surpasses in both seconds and value."
)
LINES = "The lines join the best values over all other settings."
WIDE = 16
"""Values of a setting up to which a grid over two settings is a map."""
LABEL = 24
"""Characters of the longest label of an axis of settings; longer ones would leave no room for the chart."""
CLOCK = "virtual seconds"
"""Title of the axis with the virtual clock."""
SYMBOLS = {DIVERGED: "x-thin-open", FAILED: "triangle-up-open"}
"""Status of a point without a value -> its symbol in charts, which looks as that of `MARKS` in maps."""


def charts(found: Findings) -> dict[str, PageSection]:
    """The sections that have charts, each under a short name."""
    title = found.what[:1].upper() + found.what[1:]
    shown = grids(found)
    maps, lines = sensitivity(found, shown)
    made = {
        "map": PageSection(f"{title} by method and level", LEVELS, maps=tuple(levels_map(found))),
        "curves": PageSection("Learning curves", CURVES, charts=tuple(curves(found))),
        "levels": PageSection(f"{title} against the level", FINALS, charts=tuple(against(found))),
        "published": PageSection(
            "The published numbers beside ours", published_note(found), charts=tuple(published(found))
        ),
        "bytes": PageSection(f"{title} against bytes", BYTES, charts=tuple(pareto(found, "MB up and down", megabytes))),
        "seconds": PageSection(f"{title} against seconds", SECONDS, charts=tuple(pareto(found, "seconds", seconds))),
        "sensitivity": PageSection("Sensitivity", f"{note_of(shown)} {LINES}", maps=tuple(maps), charts=tuple(lines)),
    }
    return {name: section for name, section in made.items() if section.maps or section.charts}


def style(found: Findings, method: str) -> int:
    return found.methods.index(method)


# --- methods and levels -----------------------------------------------------------------------------------------------
def levels_map(found: Findings) -> Iterator[HeatMap]:
    """The final values of all methods at all levels; nothing for a single method or level."""
    if len(found.methods) < 2 or len(found.places) < 2:
        return
    spreads = {(m, p): spread(list(found.finals(m, p).values())) for m in found.methods for p in found.places}
    share = dict(zip(spreads, shares([s.mean for s in spreads.values()], found.report.best == "max"), strict=True))
    rows = []
    for method in found.methods:
        cells = []
        for place in found.places:
            mean = spreads[method, place].mean
            rivals = [spreads[m, place].mean for m in found.methods]
            best = not math.isnan(mean) and not any(found.better(rival, mean) for rival in rivals)
            seeds = len(found.at(method, place))
            more = f"{method}, {name_of(place)}: {mean_and_std(found, spreads[method, place], seeds)}, seeds: {seeds}"
            cells.append(MapCell(found.number(mean), share[method, place], best, more))
        rows.append((method, cells))
    yield HeatMap("", found.unit, list(map(name_of, found.places)), rows)


def against(found: Findings) -> Iterator[Chart]:
    """Final values along one axis, one chart for each combination of the other axes' levels."""
    axis = found.report.level_axis or (list(found.axes)[-1] if found.axes else None)
    if axis is None or len(found.axes[axis]) < 2:
        return
    at, labels = list(found.axes).index(axis), found.axes[axis]
    for other in dict.fromkeys(place[:at] + place[at + 1 :] for place in found.places):
        series = []
        for i, method in enumerate(found.methods):
            spreads = [spread(list(found.finals(method, (*other[:at], v, *other[at:])).values())) for v in labels]
            aside = 0.04 * (i - (len(found.methods) - 1) / 2)
            means = numbers(s.mean * found.factor for s in spreads)
            errors = numbers(np.nan_to_num(s.std) * found.factor for s in spreads)
            texts = [
                f"{method}, {label}\n{mean_and_std(found, s, len(found.at(method, (*other[:at], label, *other[at:]))))}"
                for s, label in zip(spreads, labels, strict=True)
            ]
            series.append(Marks(method, i, [k + aside for k in range(len(labels))], means, [], errors, texts, True))
        short_labels = tuple(label.removeprefix(f"{axis} = ") for label in labels)
        level = Axis(axis, labels=short_labels)
        yield Chart("marks", name_of(other) if other else "", level, value_axis(found), series)


def value_axis(found: Findings) -> Axis:
    return Axis(found.unit, log=found.report.log)


# --- the paper's numbers ----------------------------------------------------------------------------------------------
def published_note(found: Findings) -> str:
    note = f"Filled: ours, mean and standard deviation over seeds. Open: {found.published.source or found.paper}."
    if found.notes:
        note += " This study was changed from its file, so the numbers cannot be compared directly."
    return note


def published(found: Findings) -> Iterator[Chart]:
    """Our values and the paper's, one chart for each level."""
    theirs = found.published.values
    for place in found.places:
        methods = [m for m in found.methods if key_of(place) in theirs.get(m, {})]
        if not methods:
            continue
        spreads = [spread(list(found.finals(method, place).values())) for method in methods]
        series = []
        for i, (method, ours) in enumerate(zip(methods, spreads, strict=True)):
            value, number = theirs[method][key_of(place)], style(found, method)
            texts = [f"{method}\npublished: {value:.1f}, here: {mean_and_std(found, ours, ours.n)}"]
            mean, std = numbers([ours.mean * found.factor]), numbers([np.nan_to_num(ours.std) * found.factor])
            series.append(Marks(method, number, [value], [i], texts=texts, symbol="diamond-open", legend=False))
            series.append(Marks(method, number, mean, [i], std, texts=texts, legend=False))
            if not math.isnan(ours.mean):
                series.append(Marks("", NO_STYLE, [value, *mean], [i, i], line=True, markers=False))
        yield Chart("marks", name_of(place), value_axis(found), Axis("", labels=tuple(methods)), series)


# --- curves -----------------------------------------------------------------------------------------------------------
def curves(found: Findings) -> Iterator[Chart]:
    """Learning curves, one chart for each level."""
    for place in found.places:
        drawn = [curve(found, method, place) for method in found.methods]
        if series := [one for one in drawn if one is not None]:
            yield Chart("curves", name_of(place), Axis("round", whole=True), value_axis(found), series)


def curve(found: Findings, method: str, place: Place) -> Curve | None:
    """A method's mean curve at a level, against rounds, bytes, seconds and the virtual clock; None without
    evaluations."""
    runs = [run for run in found.at(method, place) if run.status == "finished"]
    points = mean_curve(runs)
    if points is None:
        return None
    rounds, mean, std = points
    shown = thinned(len(rounds))
    rounds, mean, std = rounds[shown], mean[shown] * found.factor, std[shown] * found.factor
    sent = np.nanmean([at_rounds(run, "sent", rounds) for run in runs if run.points is not None], axis=0)
    took = np.nanmean([at_rounds(run, "seconds", rounds) for run in runs if run.points is not None], axis=0)
    x = {"round": rounds.tolist(), "MB up and down": numbers(sent / 1e6), "seconds": numbers(took)}
    if (clock := mean_clock(runs, rounds)) is not None:
        x[CLOCK] = numbers(clock)
    seeds = {
        f"seed {run.seed}": numbers(at_rounds(run, "values", rounds) * found.factor)
        for run in runs
        if run.points is not None
    }
    return Curve(method, style(found, method), x, numbers(mean), numbers(std) if std.any() else [], seeds)


def single(points: Points, report: Report, title: str) -> Chart:
    """The learning curve of one run."""
    curve = Curve("", 0, {"round": points.rounds.tolist()}, numbers(points.values))
    return Chart("curves", title, Axis("round", whole=True), Axis(report.metric, log=report.log), [curve])


# --- costs ------------------------------------------------------------------------------------------------------------
def megabytes(run: Run) -> float:
    return (run.up + run.down) / 1e6


def seconds(run: Run) -> float:
    return run.seconds


def pareto(found: Findings, title: str, cost: Callable[[Run], float]) -> Iterator[Chart]:
    """Final values against a cost, one chart for each level with at least two methods."""
    for place in found.places:
        done = {m: [run for run in found.at(m, place) if not math.isnan(run.final)] for m in found.methods}
        done = {method: runs for method, runs in done.items() if runs}
        if len(done) < 2:
            continue
        series, where = [], []
        for method, runs in done.items():
            costs, values = spread([cost(run) for run in runs]), spread([run.final for run in runs])
            where.append((costs.mean, values.mean * found.factor))
            texts = [
                f"{method}\n{mean_and_std(found, values, values.n)} at {costs.mean:,.4g} {title.partition(' ')[0]}"
            ]
            (x, y), bars = numbers(where[-1]), numbers(np.nan_to_num([costs.std, values.std * found.factor]))
            series.append(Marks(method, style(found, method), [x], [y], bars[:1], bars[1:], texts))
        ahead = [where[i] for i in front(where, found.better)]
        line = Marks("", NO_STYLE, numbers(p[0] for p in ahead), numbers(p[1] for p in ahead), line=True, markers=False)
        yield Chart("marks", name_of(place), Axis(title), value_axis(found), [line, *series])


# --- sensitivity ------------------------------------------------------------------------------------------------------
def sensitivity(found: Findings, shown: list[SettingsGrid]) -> tuple[list[HeatMap], list[Chart]]:
    """Grids over two settings as maps; over one setting, or each of many, as charts."""
    maps, lines = [], []
    for grid in shown:
        if len(grid.names) == 2 and len(grid.ordered(1)) <= WIDE:
            maps.append(setting_map(found, grid))
        else:
            lines += [setting_line(found, grid, at) for at in range(len(grid.names))]
    return maps, lines


def setting_map(found: Findings, grid: SettingsGrid) -> HeatMap:
    rows, columns, best = grid.ordered(0), grid.ordered(1), grid.best(found)
    share = dict(zip(grid.values, shares(list(grid.values.values()), found.report.best == "max"), strict=True))
    made = []
    for row in rows:
        cells = [setting_cell(found, grid, (row, column), share, best) for column in columns]
        made.append((short(row), cells))
    return HeatMap(grid.title, f"{grid.names[0]} ↓ {grid.names[1]} →", list(map(short, columns)), made)


def setting_cell(
    found: Findings, grid: SettingsGrid, point: Point, share: dict[Point, float | None], best: Point | None
) -> MapCell:
    if point not in grid.values:
        return MapCell("", None)
    status = grid.lost.get(point)
    text = MARKS[status] if status else in_unit(found, grid.values[point])
    return MapCell(text, share[point], point == best, f"{settings_text(grid, point)}: {status or text}")


def setting_line(found: Findings, grid: SettingsGrid, at: int) -> Chart:
    """The metric over one setting. The line joins the best values over all other settings."""
    places, best = grid.ordered(at), grid.best(found)
    by_place = {place: [v for point, v in grid.values.items() if point[at] == place] for place in places}
    logs = all(not isinstance(p, str) and p > 0 for p in places)
    spaced = dict(zip(places, places if logs else range(len(places)), strict=True))
    choose = max if found.report.best == "max" else min
    known = {place: [v for v in values if not math.isnan(v)] for place, values in by_place.items()}
    finite = [v for values in known.values() for v in values]
    tops = [choose(values) if values else math.nan for values in known.values()]
    points = [(point, value) for point, value in grid.values.items() if not math.isnan(value)]
    series = [
        Marks("best of the others", 0, list(spaced.values()), numbers(tops), line=True, markers=False),
        Marks(
            "",
            0,
            [spaced[point[at]] for point, _ in points],
            numbers(v for _, v in points),
            texts=[f"{settings_text(grid, point)}\n{in_unit(found, v)}" for point, v in points],
        ),
    ]
    if best is not None:
        x, y = [spaced[best[at]]], numbers([grid.values[best]])
        series.append(Marks("", 1, x, y, symbol="square-open", texts=[f"best\n{settings_text(grid, best)}"]))
    worst = (min if found.report.best == "max" else max)(finite, default=None)
    for status, symbol in SYMBOLS.items():
        lost = [point for point, how in grid.lost.items() if how == status]
        if lost and worst is not None:
            x, y = [spaced[point[at]] for point in lost], numbers([worst] * len(lost))
            texts = [f"{settings_text(grid, point)}\n{status}" for point in lost]
            series.append(Marks("", NO_STYLE, x, y, texts=texts, symbol=symbol))
    title = grid.title if len(grid.names) == 1 else f"{grid.title}: {grid.names[at]}"
    axis = Axis(grid.names[at], log=True) if logs else Axis(grid.names[at], labels=tuple(map(cut, places)))
    return Chart("marks", title, axis, value_axis(found), [replace(one, legend=False) for one in series])


def cut(part: Part) -> str:
    """A value as a label of an axis. The texts of the points have the whole value."""
    text = short(part)
    return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"


def settings_text(grid: SettingsGrid, point: Point) -> str:
    return ", ".join(f"{name} {short(part)}" for name, part in zip(grid.names, point, strict=True))


def in_unit(found: Findings, value: float) -> str:
    """A value in the report's unit as text."""
    return f"{value:.1f}" if found.factor == 100 else f"{value:.4g}"
