"""The charts of a report: of a study, or of a comparison of runs. The page and the Markdown show the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..by_client import scatters
from ..page.content import (
    NO_STYLE,
    Axis,
    Chart,
    Curve,
    HeatMap,
    Marks,
    PageSection,
    TableCell,
    numbers,
    shares,
    thinned,
)
from ..study.folder import FINISHED, Points
from ..study.spec import Report
from ..units import factor, with_unit
from .findings import Findings, MeasuredRun, Place, at_rounds, key_of, mean_at_rounds, mean_curve, name_of
from .sensitivity import sensitivity
from .statistics import Spread, front, spread

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
CLOCK = "virtual seconds"
"""Title of the axis with the virtual clock."""


def charts(found: Findings) -> dict[str, PageSection]:
    """The sections that have charts, each under a short name."""
    title = found.what[:1].upper() + found.what[1:]
    traffic = list(pareto(found, "MB up and down", lambda run: run.up + run.down))
    seconds = list(pareto(found, "seconds", lambda run: run.seconds))
    made = {
        "map": PageSection(f"{title} by method and level", LEVELS, maps=list(levels_map(found))),
        "curves": PageSection("Learning curves", CURVES, charts=list(curves(found))),
        "also": PageSection("Learning curves of further metrics", CURVES, charts=list(curves_of_others(found))),
        "clients": scatters(found.by_client, found.report.metric),
        "levels": PageSection(f"{title} against the level", FINALS, charts=list(against(found))),
        "published": PageSection("The published numbers beside ours", note_of(found), charts=list(published(found))),
        "bytes": PageSection(f"{title} against bytes", BYTES, charts=traffic),
        "seconds": PageSection(f"{title} against seconds", SECONDS, charts=seconds),
        "sensitivity": sensitivity(found),
    }
    return {name: section for name, section in made.items() if section.has_content}


def style(found: Findings, method: str) -> int:
    return found.methods.index(method)


# --- methods and levels -----------------------------------------------------------------------------------------------
def levels_map(found: Findings) -> Iterator[HeatMap]:
    """The final values of all methods at all levels; nothing for a single method or level."""
    if len(found.methods) < 2 or len(found.places) < 2:
        return
    means = {(m, p): found.spread(m, p).mean for m in found.methods for p in found.places}
    share = dict(zip(means, shares(list(means.values()), found.report.best == "max"), strict=True))
    best = {place: found.leader(place) for place in found.places}
    rows = []
    for method in found.methods:
        cells = []
        for place in found.places:
            seeds = len(found.at(method, place))
            more = f"{method}, {name_of(place)}: {found.mean_and_std(method, place)}, seeds: {seeds}"
            value = found.number(means[method, place])
            cells.append(TableCell(value, best[place] == method, share[method, place], more))
        rows.append((method, cells))
    yield HeatMap("", found.unit, list(map(name_of, found.places)), rows)


def against(found: Findings) -> Iterator[Chart]:
    """Final values along one axis, one chart for each combination of the other axes' levels."""
    axis = found.report.level_axis or (list(found.axes)[-1] if found.axes else None)
    if axis is None or len(found.axes[axis]) < 2:
        return
    at, labels = list(found.axes).index(axis), found.axes[axis]
    for other in dict.fromkeys(place[:at] + place[at + 1 :] for place in found.places):
        places, series = [(*other[:at], label, *other[at:]) for label in labels], []
        for i, method in enumerate(found.methods):
            aside = 0.04 * (i - (len(found.methods) - 1) / 2)
            means, errors = in_unit(found, [found.spread(method, place) for place in places])
            texts = [
                f"{method}, {label}\n{found.mean_and_std(method, place)}"
                for place, label in zip(places, labels, strict=True)
            ]
            x = [number + aside for number in range(len(labels))]
            series.append(Marks(method, i, x, means, dy=errors, texts=texts, line=True))
        level = Axis(axis, labels=tuple(label.removeprefix(f"{axis} = ") for label in labels))
        yield Chart("marks", name_of(other), level, value_axis(found), series)


def in_unit(found: Findings, spreads: Sequence[Spread]) -> tuple[list[float | None], list[float | None]]:
    """(means, standard deviations, 0 for a single value) of the metric, in the unit of the charts."""
    means = numbers(each.mean * found.factor for each in spreads)
    return means, numbers(np.nan_to_num(each.std) * found.factor for each in spreads)


def value_axis(found: Findings) -> Axis:
    return Axis(found.unit, log=found.report.log)


# --- the paper's numbers ----------------------------------------------------------------------------------------------
def note_of(found: Findings) -> str:
    note = f"Filled: ours, mean and standard deviation over seeds. Open: {found.published.source or found.paper}."
    if found.notes:
        note += " This study was changed from its file, so the numbers cannot be compared directly."
    return note


def published(found: Findings) -> Iterator[Chart]:
    """Our values and the paper's, one chart for each level."""
    theirs = found.published.values
    for place in found.places:
        methods = [m for m in found.methods if key_of(place) in theirs.get(m, {})]
        series = []
        for i, method in enumerate(methods):
            value, number = theirs[method][key_of(place)], style(found, method)
            mean, std = in_unit(found, [found.spread(method, place)])
            texts = [f"{method}\npublished: {value:.1f}, here: {found.mean_and_std(method, place)}"]
            series.append(Marks(method, number, [value], [i], texts=texts, symbol="diamond-open", legend=False))
            series.append(Marks(method, number, mean, [i], std, texts=texts, legend=False))
            if mean != [None]:
                series.append(Marks("", NO_STYLE, [value, *mean], [i, i], line=True, markers=False))
        if methods:
            yield Chart("marks", name_of(place), value_axis(found), Axis("", labels=tuple(methods)), series)


# --- curves -----------------------------------------------------------------------------------------------------------
def curves(found: Findings) -> Iterator[Chart]:
    """Learning curves, one chart for each level."""
    for place in found.places:
        drawn = [curve(found, method, place) for method in found.methods]
        if series := [one for one in drawn if one is not None]:
            yield Chart("curves", name_of(place), Axis("round", whole=True), value_axis(found), series)


def curves_of_others(found: Findings) -> Iterator[Chart]:
    """The learning curves of all further metrics."""
    for other in found.others:
        for chart in curves(other):
            yield chart._replace(title=", ".join(filter(None, (other.what, chart.title))))


def curve(found: Findings, method: str, place: Place) -> Curve | None:
    """A method's mean curve at a level, against rounds, bytes, seconds and the virtual clock; None without
    evaluations."""
    runs = [run for run in found.at(method, place) if run.status == FINISHED and run.points is not None]
    points = mean_curve(runs)
    if points is None:
        return None
    shown = thinned(len(points[0]))
    rounds, mean, std = (column[shown] for column in points)
    x = {"round": rounds.tolist()}
    for title, name, unit in (("MB up and down", "sent", 1e6), ("seconds", "seconds", 1), (CLOCK, "clock", 1)):
        if (column := mean_at_rounds(runs, name, rounds)) is not None:
            x[title] = numbers(column / unit)
    seeds = {f"seed {run.seed}": numbers(at_rounds(run, "values", rounds) * found.factor) for run in runs}
    band = numbers(std * found.factor) if std.any() else []
    return Curve(method, style(found, method), x, numbers(mean * found.factor), band, seeds)


def single(points: Points, report: Report, title: str, rows: str = "test") -> Chart:
    """The learning curve of one run. rows: those on which the workload is evaluated, see `units.in_words`."""
    curve = Curve("", 0, {"round": points.rounds.tolist()}, numbers(points.values * factor(report.metric)))
    axis = Axis(with_unit(report.metric, rows), log=report.log)
    return Chart("curves", title, Axis("round", whole=True), axis, [curve])


# --- costs ------------------------------------------------------------------------------------------------------------
def pareto(found: Findings, title: str, cost: Callable[[MeasuredRun], float]) -> Iterator[Chart]:
    """Final values against a cost, one chart for each level with at least two methods."""
    for place in found.places:
        series, where = [], []
        for method in found.methods:
            runs = [run for run in found.at(method, place) if not math.isnan(run.final)]
            if not runs:
                continue
            costs, values = spread([cost(run) for run in runs]), found.spread(method, place)
            where.append((costs.mean, values.mean * found.factor))
            (x, y), bars = numbers(where[-1]), numbers(np.nan_to_num([costs.std, values.std * found.factor]))
            both = f"{found.mean_and_std(method, place)} at {costs.mean:,.4g} {title.partition(' ')[0]}"
            series.append(Marks(method, style(found, method), [x], [y], bars[:1], bars[1:], [f"{method}\n{both}"]))
        ahead = [where[i] for i in front(where, found.better)]
        line = Marks("", NO_STYLE, numbers(p[0] for p in ahead), numbers(p[1] for p in ahead), line=True, markers=False)
        if len(where) > 1:
            yield Chart("marks", name_of(place), Axis(title), value_axis(found), [line, *series])
