"""Metrics and durations as text for readers: one name and one unit for each metric, wherever it is shown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..engine.records.metrics import OWN
from ..workloads.table import WORKLOADS

ROWS = ("test", "validation", "training")
"""The rows that a metric may be of, where its name says it."""
BYTES = "bytes"
"""The objective of a search that is no column of the records: the traffic of a run."""


def is_share(metric: str) -> bool:
    """Whether a metric is shown in per cent."""
    return re.sub(f"^({'|'.join(ROWS)})_", "", metric.rsplit("/", 1)[-1]).startswith(("accuracy", "auc"))


def factor(metric: str) -> float:
    """Factor from a metric to the unit in which it is shown."""
    return 100.0 if is_share(metric) else 1e-6 if metric == BYTES else 1.0


def base_workload(workload: Any) -> str:
    """The name of the workload of a configuration that reads or makes the data, without those around it."""
    while isinstance(workload, Mapping) and "of" in workload:
        workload = workload["of"]
    return str(workload.get("name", "") if isinstance(workload, Mapping) else workload)


def evaluated_rows(workloads: Iterable[Any]) -> str:
    """The rows on which the workloads of configurations are evaluated, as `in_words` has them: see `Entry.rows`. A
    plug-in's workload has test rows; workloads that are evaluated on different rows have no word in common."""
    entries = (WORKLOADS.get(base_workload(workload)) for workload in workloads)
    found = {"test" if entry is None else entry.rows for entry in entries}
    return found.pop() if len(found) == 1 else ""


def in_words(metric: str, rows: str = "test") -> str:
    """A metric in words, such as "test accuracy", or "own test accuracy" of clients' own models. rows: those on which
    the workload is evaluated, see `evaluated_rows`."""
    prefix = {"eval": rows and f"{rows} ", "train": "training "}.get(metric.partition("/")[0], "")
    where, _, name = metric.rpartition("/")
    kind, _, rest = name.partition("_")
    if kind in ROWS and rest:
        prefix, name = f"{kind} ", rest
    of = re.fullmatch(rf"eval/(unseen/)?(server|{OWN})", where)
    whose = f"{'unseen ' if of[1] else ''}{of[2]} " if of else ""
    return whose + prefix + (name.upper() if name == "auc" else name.replace("_", " "))


def with_unit(metric: str, rows: str = "test") -> str:
    """A metric in words with its unit, for an axis. rows: see `in_words`."""
    return "MB up and down" if metric == BYTES else f"{in_words(metric, rows)}{' (%)' if is_share(metric) else ''}"


def number(metric: str, value: float) -> str:
    """A metric's value in its unit, without it; – for nan."""
    if math.isnan(value):
        return "–"
    return f"{value * factor(metric):{'.1f' if is_share(metric) else ',.4g' if metric == BYTES else '.4g'}}"


def shown(metric: str, value: float) -> str:
    """A metric's value with its unit."""
    return f"{number(metric, value)}{' %' if is_share(metric) else ' MB' if metric == BYTES else ''}"


def setting(value: Any) -> str:
    """The value of a setting as short text, wherever runs, trials and points are named."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return value if isinstance(value, str) else json.dumps(value)


def written(value: Any) -> str:
    """The value of a setting as a configuration file has it, in full."""
    return value if isinstance(value, str) else json.dumps(value)


def duration(seconds: float) -> str:
    """A duration as text, such as "42 s", "7 min" or "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
