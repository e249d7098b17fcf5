"""The table of trackers, which experiments choose by name."""

from __future__ import annotations

from ..workloads.entry import Entry

RUN = "fedfleet.tune.tracking.run"
TRACKERS = {
    "mlflow": Entry(f"{RUN}:MlflowTracker", "an MLflow run for each run"),
    "tensorboard": Entry(f"{RUN}:TensorBoardTracker", "event files in the folder tensorboard of each run"),
    "wandb": Entry(f"{RUN}:WandbTracker", "a run of Weights & Biases for each run"),
    "csv": Entry(f"{RUN}:CsvTracker", "rounds.csv in the folder of each run"),
}
