"""A run's folder: config.yaml, environment.json, rounds.parquet, model.safetensors, result.json, run.log."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, FedFleetError, whole
from .history import History, Record
from .job import Job
from .launch import Result
from .observer import Observer
from .whole import write

PACKAGES = ("fedfleet", "torch", "numpy", "ray", "pyarrow", "optuna", "mlflow")


class RunDirectory(Observer):
    """Writes the folder as the run goes. `rows`: the rounds so far, of an earlier part of the run too."""

    def __init__(self, path: Path, run_id: str = "") -> None:
        self.path, self.run_id = path.resolve(), run_id
        self.rows = History()

    @staticmethod
    def new(path: Path) -> RunDirectory:
        if (path / "config.yaml").exists():
            raise ConfigError(f"--out {path} already holds a run; choose another folder, remove it, or resume it")
        return RunDirectory(path)

    @staticmethod
    def old(path: Path) -> RunDirectory:
        """The folder of a run that did not finish."""
        if not (path / "run.json").is_file():
            raise ConfigError(f"{path} holds no run; give the folder that `fedfleet run` wrote")
        if (path / "result.json").is_file():
            raise ConfigError(f"{path}: the run is complete, there is nothing to resume")
        return RunDirectory(path, json.loads((path / "run.json").read_text())["run_id"])

    def config(self) -> dict[str, Any]:
        """What the run was started with."""
        return yaml.safe_load((self.path / "config.yaml").read_text())

    def begin(self, job: Job, facts: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write(self.path / "config.yaml", yaml.safe_dump(job.experiment.plain(), sort_keys=False))
        write(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        write(self.path / "run.json", json.dumps({"run_id": job.run_id}) + "\n")
        self._log(f"run {job.run_id} {'resumes' if job.resume else 'begins'}")

    def record(self, record: Record) -> None:
        self.rows.replace(record)
        self._log(" ".join(f"{name}={value:.6g}" for name, value in record.items()))

    def resumed(self, records: list[Record]) -> None:
        self.rows = History(records)

    def event(self, text: str) -> None:
        self._log(text)

    def end(self, result: Result) -> None:
        from safetensors.torch import save_file

        self._write_rounds()
        save_file({name: value.contiguous() for name, value in result.model.items()}, self.path / "model.safetensors")
        write(self.path / "result.json", json.dumps(result.summary(), indent=2) + "\n")
        self._log("finished")

    def failed(self, error: BaseException) -> None:
        """Says what it can, and never a second error: the disk may be full."""
        if self.path.is_dir():
            cause = error.__cause__ if isinstance(error, FedFleetError) else error
            trace = f"\n{whole(cause)}" if cause is not None else ""
            self._log(f"failed: {type(error).__name__}: {error}{trace}")
            with suppress(OSError):
                if self.rows:
                    self._write_rounds()

    def _write_rounds(self) -> None:
        import pyarrow.parquet as pq

        from .records import to_table

        pq.write_table(to_table(self.rows), self.path / "rounds.parquet")

    def _log(self, line: str) -> None:
        from datetime import datetime, timezone

        with suppress(OSError), (self.path / "run.log").open("a") as log:  # a full disk costs lines, not the run
            log.write(f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} {line}\n")


def environment() -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": found,
    }
