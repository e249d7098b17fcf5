"""Learning curves of a result, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ..errors import ConfigError
from ..records.history import History
from ..records.metrics import default_column, nearest_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Horizontal = Literal["round", "bytes", "seconds", "clock"]
LABELS = {
    "round": "round",
    "bytes": "bytes sent in both directions",
    "seconds": "seconds",
    "clock": "virtual seconds",
}
MOST_MARKERS = 60
"""A line with at most this many points has a marker at each of them."""


def optional(module: str, otherwise: str) -> Any:
    """The module, which is of a package that need not be installed. Raises ConfigError if it is not. otherwise: what
    else its user can do."""
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; install it (pip install {package}), {otherwise}")
    return import_module(module)


def draw(
    rows: History, columns: Sequence[str], x: Horizontal, ax: Axes | None, label: str, style: Mapping[str, Any]
) -> Axes:
    """Draw columns of the records; the arguments are those of `Result.plot`."""
    if x not in LABELS:
        raise ConfigError(f"x must be {', '.join(LABELS)}, got {x!r}")
    columns = columns or (default_column(rows.columns),)
    for name in columns:
        if name not in rows.columns:
            raise ConfigError(f"the records have no column {name}; {nearest_column(name, rows.columns)}")
    if ax is None:
        ax = cast("Axes", optional("matplotlib.pyplot", "or draw `records` with another library").subplots()[1])
        ax.grid(alpha=0.3)
    along = horizontal(rows, x)
    for name in columns:
        values, measured = rows.column(name)
        marker = "o" if measured.sum() <= MOST_MARKERS else ""
        text = label if len(columns) == 1 else f"{label}: {name}"
        ax.plot(along[measured], values[measured], **{"marker": marker, "markersize": 3, "label": text, **style})
    ax.set_xlabel(LABELS[x])
    if len(columns) == 1:
        ax.set_ylabel(columns[0])
    ax.legend()
    return ax


def horizontal(rows: History, x: Horizontal) -> np.ndarray:
    """(R,) the place of every round on the horizontal axis."""
    if x == "round":
        return rows.column("round")[0]
    if x == "clock":
        if "system/clock" not in rows.columns:
            raise ConfigError("x=clock needs a virtual clock, got a run without systems; choose round")
        return rows.column("system/clock")[0]
    if x == "seconds":
        return np.cumsum(rows.column("time/seconds")[0])
    return np.cumsum(rows.column("comm/bytes_up")[0] + rows.column("comm/bytes_down")[0])
