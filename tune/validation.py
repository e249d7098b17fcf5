"""Choices are made on rows for validation, where a run has them, and never on test rows."""

from __future__ import annotations

from typing import Any


def fraction(data: dict[str, Any]) -> Any:
    """`evaluate.validation` of the plain data of an experiment, 0 if it is not set."""
    evaluate = data.get("evaluate")
    return evaluate.get("validation", 0.0) if isinstance(evaluate, dict) else 0.0
