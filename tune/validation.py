"""Choices are made on rows for validation, where a run has them, and never on test rows."""

from __future__ import annotations

from typing import Any

from ..engine.errors import ConfigError


def fraction(data: dict[str, Any]) -> Any:
    """`evaluate.validation` of the plain data of an experiment, 0 if it is not set."""
    evaluate = data.get("evaluate")
    return evaluate.get("validation", 0.0) if isinstance(evaluate, dict) else 0.0


def on_validation(metric: str) -> str | None:
    """The column of a metric of test rows on the rows for validation; None for any other column."""
    name = metric.removeprefix("eval/")
    if name == metric or name.startswith("validation_"):
        return None
    whose, _, own = name.rpartition("/")
    if not whose:
        return f"eval/validation_{name}"
    return f"eval/{whose}/validation_{own.removeprefix('test_')}" if own.startswith("test_") else None


def refuse_test_metric(key: str, metric: str) -> None:
    """Raise ConfigError for a metric of test rows by which settings would be chosen. key: what names the metric."""
    if instead := on_validation(metric):
        raise ConfigError(f"{key}: choices are made on validation rows, got {metric}; choose {instead}")
