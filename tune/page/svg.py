"""The charts and maps of a page as SVG, for what runs no scripts: Markdown and MLflow. matplotlib draws them.

Text stays text, in the reader's fonts. The panels are small, so that they also fit a phone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from .content import Axis, Chart, Curve, HeatMap, Marks, PageSection
from .style import colour, ink, style

SIZE = (4.3, 3.1)
"""Inches of a panel."""
LINE, LINES = 18, 4
"""Characters in a line of a tick's label, and the largest number of its lines."""
FRAME = "#d55e00"
MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle-up": "^",
    "triangle-down": "v",
    "diamond": "D",
    "cross": "P",
    "x": "X",
    "x-thin": "x",
}
"""Markers of a page -> those of matplotlib; "-open" at the end of a name makes a marker hollow."""
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def load_matplotlib() -> Any:
    """The module matplotlib with its modules for figures, lines and patches, whose import takes a second."""
    import matplotlib.figure

    return matplotlib


def chart(what: Chart | HeatMap, prefix: str) -> str:
    """A chart or a map as an element. prefix: makes its ids unique in a page that has several."""
    return element(heat_map(what) if isinstance(what, HeatMap) else drawn(what), prefix)


def save(figure: Chart, path: Path) -> None:
    """Write a chart as an image file, with a legend if its series have names."""
    made = drawn(figure, (8, 5))
    if any(one.name for one in figure.series):
        made.axes[0].legend(frameon=False)
    made.savefig(path, dpi=120)


def legend(section: PageSection, prefix: str) -> str:
    """The legend of a section as an element."""
    matplotlib = load_matplotlib()
    columns = 2 if max(map(len, section.legend)) <= 22 else 1
    made = matplotlib.figure.Figure(figsize=(SIZE[0], 0.1 + 0.26 * math.ceil(len(section.legend) / columns)))
    lines = [matplotlib.lines.Line2D([], [], **look(*shown)) for shown in section.legend.values()]
    names = list(map(plain, section.legend))
    made.legend(lines, names, loc="center left", borderaxespad=0, ncols=columns, frameon=False, fontsize=10)
    return element(made, prefix)


# --- panels -----------------------------------------------------------------------------------------------------------
def panel(title: str, size: tuple[float, float]) -> tuple[Any, Any]:
    """A new figure of matplotlib and its axes."""
    made = load_matplotlib().figure.Figure(figsize=size, layout="constrained")
    axes = made.add_subplot()
    axes.set_title(plain(title), fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


def heat_map(map: HeatMap) -> Any:
    """A map as a figure of matplotlib. Its cells are shapes, so that their numbers stay text."""
    rectangle = load_matplotlib().patches.Rectangle
    made, axes = panel(map.title, SIZE)
    axes.grid(visible=False)
    for i, (_, cells) in enumerate(map.rows):
        for j, cell in enumerate(cells):
            shade = "black"
            if cell.share is not None:
                shade = ink(cell.share)
                axes.add_patch(rectangle((j - 0.5, i - 0.5), 1, 1, color=colour(cell.share), linewidth=0))
            axes.text(j, i, plain(cell.text), ha="center", va="center", fontsize=10, color=shade)
            if cell.best:
                axes.add_patch(rectangle((j - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor=FRAME, linewidth=2.5))
    scale(axes, "x", Axis(map.corner, labels=tuple(map.columns)))
    scale(axes, "y", Axis("", labels=tuple(label for label, _ in map.rows)))
    return made


def drawn(figure: Chart, size: tuple[float, float] = SIZE) -> Any:
    """A chart of kind "curves" or "marks" as a figure of matplotlib. A curve is drawn against its first choice of x."""
    made, axes = panel(figure.title, size)
    for one in figure.series:
        if isinstance(one, Curve):
            curve(axes, one, figure.y.log)
        else:
            marks(axes, one, figure)
    scale(axes, "x", figure.x)
    scale(axes, "y", figure.y)
    return made


def curve(axes: Any, one: Curve, log: bool) -> None:
    """Draw a mean with its band. log: whether the scale of y is logarithmic."""
    x, mean = floats(next(iter(one.x.values()))), floats(one.mean)
    chosen = look(one.style)
    axes.plot(x, mean, label=plain(one.name), markevery=max(1, len(x) // 8), **{**chosen, "markersize": 4})
    if len(one.std):
        axes.fill_between(x, *band(mean, floats(one.std), log), color=chosen["color"], alpha=0.15, linewidth=0)


def marks(axes: Any, one: Marks, figure: Chart) -> None:
    """Draw points, and the line and the error bars that they have."""
    x, y = floats(one.x), floats(one.y)
    bars: dict[str, Any] = {}
    for name, values, sizes, axis in (("xerr", x, one.dx, figure.x), ("yerr", y, one.dy, figure.y)):
        if len(sizes):
            low, high = band(values, floats(sizes), axis.log)
            bars[name] = (values - low, high - values)
    chosen = look(one.style, one.line, one.markers, one.symbol)
    axes.errorbar(x, y, **bars, label=plain(one.name), capsize=2, elinewidth=1, **chosen)


def look(number: int, line: bool = True, markers: bool = True, symbol: str = "") -> dict[str, Any]:
    """Colour, marker and line of a style as arguments of matplotlib. symbol: instead of that of the style, or ""."""
    chosen = style(number)
    shape, hollow = (symbol or chosen["symbol"]).removesuffix("-open"), symbol.endswith("-open")
    return {
        "color": chosen["colour"],
        "linestyle": DASHES[chosen["dash"]] if line else "none",
        "linewidth": 1.5,
        "marker": MARKERS[shape] if markers else "",
        "markersize": 10 if hollow else 5,
        "markeredgewidth": 2 if hollow else 1,
        "markerfacecolor": "none" if hollow else chosen["colour"],
    }


def band(mean: np.ndarray, std: np.ndarray, log: bool) -> tuple[np.ndarray, np.ndarray]:
    """(lower edge, upper edge), each (E,), of the band around a mean curve, (E,), with a standard deviation, (E,).

    log: whether the scale is logarithmic. There the mean minus the standard deviation may have no place, because it is
    not positive. So the lower edge lies by the same factor below the mean as the upper edge above it, which is nearly
    the same number where the deviation is small. charts.js has the same for the page.
    """
    low, high = mean - std, mean + std
    if log:  # the mean times a factor of at most 1, which rounding brings to the mean at most
        part = np.divide(mean, high, out=np.ones_like(mean), where=mean > 0)
        np.multiply(mean, part, out=low, where=mean > 0)
    return low, high


def scale(axes: Any, name: str, axis: Axis) -> None:
    """Make an axis of matplotlib as a page has it. name: x or y."""
    own = axes.xaxis if name == "x" else axes.yaxis
    own.set_label_text(plain(axis.title))
    if axis.labels:
        edges, ticks = (-0.5, len(axis.labels) - 0.5), list(map(tick, axis.labels))
        axes.set(**{f"{name}lim": edges if name == "x" else edges[::-1]})
        own.set_ticks(range(len(ticks)), ticks)
        if name == "x" and max(len(line) for text in ticks for line in text.split("\n")) * len(ticks) > 50:
            for text in axes.get_xticklabels():  # labels that are too long to stand side by side
                text.set(rotation=30, ha="right", rotation_mode="anchor")  # a label ends at its tick
    elif axis.log:
        axes.set(**{f"{name}scale": "log"})
    elif axis.whole:
        own.get_major_locator().set_params(integer=True)
    elif axis.zero:
        axes.set(**{f"{name}lim": (0, None)})


# --- texts ------------------------------------------------------------------------------------------------------------
def element(made: Any, prefix: str) -> str:
    """matplotlib's figure as an element of SVG, whose only size is its view box."""
    out = io.StringIO()
    with load_matplotlib().rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        made.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()[out.getvalue().index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text
    )  # hundredths of a point suffice
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1))


def floats(values: Sequence[Any]) -> np.ndarray:
    """(n,): the values, nan for None."""
    return np.array(values, dtype=float)


def tick(label: str) -> str:
    """The label of a tick, in lines."""
    return plain("\n".join(wrap(label, LINE, max_lines=LINES, placeholder=" …")))


def plain(label: str) -> str:
    """The label with escaped $, which matplotlib would read as mathematics."""
    return label.replace("$", r"\$")
