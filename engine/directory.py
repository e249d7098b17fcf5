"""A run's folder: config.yaml, environment.json, rounds.parquet, model.safetensors, result.json, run.log."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from .driver import Record
from .errors import ConfigError
from .job import Job
from .launch import Result

PACKAGES = ("fedfleet", "torch", "numpy", "ray", "pyarrow", "optuna", "mlflow")


class RunDirectory:
    """Writes the folder as the run goes. `rows`: the rounds so far, of an earlier part of the run too."""

    def __init__(self, path: Path, run_id: str = "", rows: list[Record] | None = None) -> None:
        self.path, self.run_id, self.rows = path.resolve(), run_id, rows or []

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
        return RunDirectory(path, json.loads((path / "run.json").read_text())["run_id"], read_rounds(path))

    def config(self) -> dict[str, Any]:
        """What the run was started with."""
        return yaml.safe_load((self.path / "config.yaml").read_text())

    def begin(self, job: Job, facts: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(yaml.safe_dump(job.experiment.plain(), sort_keys=False))
        (self.path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
        (self.path / "run.json").write_text(json.dumps({"run_id": job.run_id}) + "\n")
        self._log(f"run {job.run_id} {'resumes' if job.resume else 'begins'}")

    def record(self, record: Record) -> None:
        while self.rows and self.rows[-1]["round"] >= record["round"]:
            self.rows.pop()
        self.rows.append(record)
        self._log(" ".join(f"{name}={value:.6g}" for name, value in record.items()))

    def event(self, text: str) -> None:
        self._log(text)

    def end(self, result: Result) -> None:
        from safetensors.torch import save_file

        self._write_rounds()
        save_file({name: value.contiguous() for name, value in result.model.items()}, self.path / "model.safetensors")
        (self.path / "result.json").write_text(json.dumps(result.summary(), indent=2) + "\n")
        self._log("finished")

    def failed(self, error: BaseException) -> None:
        if self.path.is_dir():
            if self.rows:
                self._write_rounds()
            self._log(f"failed: {type(error).__name__}: {error}")

    def _write_rounds(self) -> None:
        import pyarrow.parquet as pq

        from .records import to_table

        pq.write_table(to_table(self.rows), self.path / "rounds.parquet")

    def _log(self, line: str) -> None:
        from datetime import datetime, timezone

        with (self.path / "run.log").open("a") as log:
            log.write(f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} {line}\n")


def read_rounds(path: Path) -> list[Record]:
    """The rounds that an interrupted run has told of."""
    import pyarrow.parquet as pq

    if not (path / "rounds.parquet").is_file():
        return []
    rows = pq.read_table(path / "rounds.parquet").to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


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
