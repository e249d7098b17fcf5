"""Metrics and durations as text for readers."""

from __future__ import annotations


def is_share(metric: str) -> bool:
    """Whether a metric is shown in per cent."""
    return metric.rsplit("/", 1)[-1].startswith(("accuracy", "auc"))


def shown(metric: str, value: float) -> str:
    """A metric's value with its unit."""
    return f"{100 * value:.1f} %" if is_share(metric) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A duration as text, such as "42 s", "7 min" or "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
