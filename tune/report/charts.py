"""The charts of the Markdown report, as SVG. Text stays text, in the reader's fonts. The panels are small, so that they
also fit a phone."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..chart import COLOURS, MARKERS
from ..study.folder import Points
from ..study.spec import Report
from .findings import Findings, Place, Run, mean_clock, mean_curve, name_of
from .heat import Grid, grids, label_x, note_of, paint, plain
from .statistics import front, spread

SIZE = (4.3, 3.1)
PANELS = 12
"""Largest number of panels of a kind; the tables contain all levels."""
BYTES = (
    "Bytes of all clients in both directions over the whole run. The line joins the methods that no other method "
    "surpasses in both bytes and value."
)
VIRTUAL = (
    "The same against the virtual clock, averaged over seeds. On the logarithmic scale equal distances are factors."
)
LINES = ("-", "--", ":", "-.")
CURVES = "Mean over seeds; the band is one standard deviation."
LOGARITHMIC = " On the logarithmic scale it reaches by the same factor below the mean as above it."


class Chart(NamedTuple):
    """A chart. `name`: of its file, without suffix; `alt`: text for readers who cannot see it; `svg`: its element."""

    name: str
    alt: str
    svg: str


class Group(NamedTuple):
    """A section of charts. `legend`: of the methods in its charts, or None."""

    title: str
    note: str
    charts: list[Chart]
    legend: Chart | None = None


def groups(found: Findings) -> list[Group]:
    """The sections that have charts."""
    more = f" The first {PANELS} of {len(found.places)} levels are shown." if len(found.places) > PANELS else ""
    title = f"{found.what[:1].upper()}{found.what[1:]} against"
    over_clock = curves(found, virtual=True) if found.virtual else []
    made = {
        "1": Group("Learning curves", CURVES + LOGARITHMIC * found.report.log + more, curves(found)),
        "clock": Group("Learning curves over virtual time", VIRTUAL + more, over_clock),
        "2": Group(f"{title} the level", "Final values, mean and standard deviation over seeds.", list(against(found))),
        "3": Group(f"{title} bytes", BYTES + more, pareto(found)),
    }
    keyed = [group._replace(legend=legend(found, f"key-{name}")) for name, group in made.items()]
    drawable = [grid for grid in grids(found) if len(grid.names) <= 2][:PANELS]
    sensitivity = Group("Sensitivity", note_of(drawable), list(rendered(found, drawable)))
    return [group for group in [*keyed, sensitivity] if group.charts]


def rendered(found: Findings, drawable: list[Grid]) -> Iterator[Chart]:
    for number, grid in enumerate(drawable, 1):
        figure, axes = panel(grid.title)
        paint(found, grid, axes)
        yield Chart(f"sensitivity-{number}", f"Sensitivity: {grid.title}", svg(figure, f"s{number}"))


# --- figures ----------------------------------------------------------------------------------------------------------
def panel(title: str, size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    """A new figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(plain(title), fontsize=11)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def svg(figure: Any, prefix: str) -> str:
    """The figure as an element for a page. prefix: makes its ids unique in the page. Its only size is the view box."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()[out.getvalue().index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text
    )  # hundredths of a point suffice
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1))


def style(found: Findings, method: str) -> dict[str, Any]:
    """Colour, marker and line of a method, the same in all charts."""
    i = found.methods.index(method)
    line = LINES[i // len(COLOURS) % len(LINES)]
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": line}


def legend(found: Findings, name: str) -> Chart | None:
    """The legend of the methods; None for a single method."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = [m for m in found.methods if any(run.method == m for run in found.runs)]
    if len(shown) < 2:
        return None
    columns = 2 if max(map(len, shown), default=0) <= 22 else 1
    figure = Figure(figsize=(SIZE[0], 0.1 + 0.26 * math.ceil(len(shown) / columns)))
    lines = [Line2D([], [], markersize=5, **style(found, method)) for method in shown]
    figure.legend(
        lines, list(map(plain, shown)), loc="center left", borderaxespad=0, ncols=columns, frameon=False, fontsize=10
    )
    return Chart(name, "Methods: " + ", ".join(shown), svg(figure, name))


def titled(what: str, place: Place) -> str:
    """The description of a chart, with the level if there is one."""
    return f"{what}, {name_of(place)}" if place else what


# --- kinds ------------------------------------------------------------------------------------------------------------
def curves(found: Findings, virtual: bool = False) -> list[Chart]:
    """Learning curves, one panel for each level. virtual: over the virtual clock, on a logarithmic scale, and not over
    rounds."""
    made = []
    for number, place in enumerate(found.places[:PANELS], 1):
        figure, axes = panel(name_of(place))
        drawn = [curve(axes, found, method, place, virtual) for method in found.methods]
        if any(drawn):
            if virtual:
                axes.set_xscale("log")
            else:
                axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set(xlabel="virtual seconds" if virtual else "round", ylabel=found.unit)
            scaled(axes, found.report)
            name, prefix, what = ("clock", "v", " over virtual time") if virtual else ("curves", "c", "")
            alt = titled(f"Learning curves{what}", place)
            made.append(Chart(f"{name}-{number}", alt, svg(figure, f"{prefix}{number}")))
    return made


def curve(axes: Any, found: Findings, method: str, place: Place, virtual: bool) -> bool:
    """Draw a method's mean curve at a level; returns whether there is one."""
    runs = [run for run in found.at(method, place) if run.status == "finished"]
    points = mean_curve(runs)
    x = None if points is None else mean_clock(runs, points[0]) if virtual else points[0]
    if points is None or x is None:
        return False
    mean, std = points[1] * found.factor, points[2] * found.factor
    look = style(found, method)
    axes.plot(x, mean, markersize=4, markevery=max(1, len(x) // 8), linewidth=1.5, **look)
    if std.any():
        low, high = band(mean, std, found.report.log)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    return True


def band(mean: np.ndarray, std: np.ndarray, log: bool) -> tuple[np.ndarray, np.ndarray]:
    """(lower edge, upper edge), each (E,), of the band around a mean curve, (E,), with a standard deviation, (E,).

    log: whether the scale is logarithmic. There the mean minus the standard deviation may have no place, because it is
    not positive. So the lower edge lies by the same factor below the mean as the upper edge above it, which is nearly
    the same number where the deviation is small. charts.js has the same for the page.
    """
    low, high = mean - std, mean + std
    return (np.divide(mean**2, high, out=low, where=mean > 0) if log else low), high


def scaled(axes: Any, report: Report) -> None:
    if report.log:
        axes.set_yscale("log")


def single(points: Points, report: Report, title: str) -> str:
    """The learning curve of one run, as an SVG file."""
    figure, axes = panel(title)
    axes.plot(points.rounds, points.values, color=COLOURS[0], marker=MARKERS[0], markersize=3)
    axes.set(xlabel="round", ylabel=report.metric)
    axes.xaxis.get_major_locator().set_params(integer=True)
    scaled(axes, report)
    return '<?xml version="1.0"?>\n' + svg(figure, "curve")


def against(found: Findings) -> Iterator[Chart]:
    """Final values along one axis, one panel for each combination of the other axes' levels."""
    axis = found.report.level_axis or (list(found.axes)[-1] if found.axes else None)
    if axis is None or len(found.axes[axis]) < 2:
        return
    at = list(found.axes).index(axis)
    others = list(dict.fromkeys(place[:at] + place[at + 1 :] for place in found.places))
    for number, other in enumerate(others[:PANELS], 1):
        figure, axes = panel(name_of(other) if other else "")
        labels = found.axes[axis]
        for i, method in enumerate(found.methods):
            spreads = [spread(list(found.finals(method, (*other[:at], v, *other[at:])).values())) for v in labels]
            means = np.array([s.mean for s in spreads]) * found.factor
            errors = np.nan_to_num(np.array([s.std for s in spreads])) * found.factor
            aside = np.arange(len(labels)) + 0.04 * (i - (len(found.methods) - 1) / 2)
            low, high = band(means, errors, found.report.log)
            bars, look = (means - low, high - means), style(found, method)
            axes.errorbar(aside, means, bars, capsize=2, markersize=4, linewidth=1.5, **look)
        label_x(axes, [plain(label.removeprefix(f"{axis} = ")) for label in labels])
        axes.set(xlabel=plain(axis), ylabel=found.unit)
        scaled(axes, found.report)
        yield Chart(f"levels-{number}", titled(f"Final values along {axis}", other), svg(figure, f"l{number}"))


def pareto(found: Findings) -> list[Chart]:
    """Final values against bytes, one panel for each level with at least two methods."""
    made = []
    for number, place in enumerate(found.places[:PANELS], 1):
        points = {m: found.at(m, place) for m in found.methods if found.finals(m, place)}
        if len(points) < 2:
            continue
        figure, axes = panel(name_of(place))
        where = [sent_and_final(found, runs) for runs in points.values()]
        for method, (sent, value) in zip(points, where, strict=True):
            axes.plot([sent], [value], markersize=8, **{**style(found, method), "linestyle": "none"})
        ahead = [where[i] for i in front(where, found.better)]
        axes.plot([p[0] for p in ahead], [p[1] for p in ahead], color="#888888", linewidth=1, zorder=0)
        axes.set(xlabel="MB up and down", ylabel=found.unit)
        scaled(axes, found.report)
        made.append(Chart(f"bytes-{number}", titled("Final value against bytes", place), svg(figure, f"b{number}")))
    return made


def sent_and_final(found: Findings, runs: list[Run]) -> tuple[float, float]:
    """(mean MB, mean final value) of the runs that finished."""
    done = [run for run in runs if not math.isnan(run.final)]
    sent = spread([(run.up + run.down) / 1e6 for run in done]).mean
    return sent, spread([run.final for run in done]).mean * found.factor
