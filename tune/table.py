"""Trackers that experiments choose by name."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    build: str
    summary: str


TRACKERS = {"mlflow": Part("fedfleet.tune.tracking:MlflowTracker", "an MLflow run for each run")}
