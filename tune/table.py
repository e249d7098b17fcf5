"""The table of trackers, which experiments choose by name."""

from __future__ import annotations

from ..workloads.entry import Entry

TRACKERS = {"mlflow": Entry("fedfleet.tune.tracking.run:MlflowTracker", "an MLflow run for each run")}
