"""A run as an MLflow run: parameters flattened, metrics with step = round, tags, artifacts.

One thread does all the writing, in batches: SQLite has one writer, and importing mlflow and creating its database take
seconds that the run need not wait for. A store that fails costs the record in MLflow, never the run: the reason is
printed at the end.
"""

from __future__ import annotations

import logging
import queue
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.driver import Record
from ..engine.errors import ConfigError, Diverged
from ..engine.job import Job
from ..engine.launch import Result

FLUSH_SECONDS = 1.0
BATCH = 100
"""Parameters a call at most (MLflow's own limit); metrics may be ten times as many."""

DONE = object()


def flatten(data: Any, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; lists stay whole."""
    if isinstance(data, dict) and data:
        flat = {}
        for key, value in data.items():
            flat.update(flatten(value, f"{prefix}{key}."))
        return flat
    return {prefix[:-1]: str(data)}


def store(uri: str) -> str:
    """The store's URI; "auto" is a SQLite file in the current folder."""
    if uri == "auto":
        return f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    if not re.match(r"(sqlite|https?|postgresql|mysql|mssql|databricks)[:+]", uri):
        raise ConfigError(f"tracking.uri must be auto, none, sqlite:///… or a server's http(s)://…, got {uri!r}")
    return uri


@dataclass
class MlflowTracker:
    uri: str = "auto"
    experiment: str = "default"
    directory: str | None = None
    waiting: queue.Queue[Any] = field(default_factory=queue.Queue)
    writer: threading.Thread | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.uri = store(self.uri)

    # --- an observer ----------------------------------------------------------------------------------------------
    def begin(self, job: Job, facts: dict[str, Any]) -> None:
        self.writer = threading.Thread(target=self._write, args=(job,), name="mlflow", daemon=True)
        self.writer.start()

    def record(self, record: Record) -> None:
        self.waiting.put((int(time.time() * 1000), record))

    def end(self, result: Result) -> None:
        self._close("FINISHED", "finished")

    def failed(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._close("KILLED", "interrupted")
        else:
            self._close("FAILED", "diverged" if isinstance(error, Diverged) else type(error).__name__)

    def _close(self, status: str, reason: str) -> None:
        self.waiting.put((status, reason, DONE))
        if self.writer is not None:
            self.writer.join()
        if self.error is not None:
            print(f"warning: not tracked in MLflow: {self.error}; the run itself is complete", file=sys.stderr)

    # --- the writer's thread --------------------------------------------------------------------------------------
    def _write(self, job: Job) -> None:
        try:
            self._track(job)
        except Exception as error:  # any failure of the store, of whatever kind it raises
            self.error = error

    def _track(self, job: Job) -> None:
        from mlflow import MlflowClient

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.ERROR)

        client = MlflowClient(self.uri)
        run = client.create_run(experiment_id(client, self.experiment, self.uri), tags=tags(job), run_name=label(job))
        self._parameters(client, run.info.run_id, job)
        status, reason = "", ""
        while not status:
            batch = [self.waiting.get()]
            deadline = time.monotonic() + FLUSH_SECONDS
            while batch[-1][-1] is not DONE and (left := deadline - time.monotonic()) > 0:
                try:
                    batch.append(self.waiting.get(timeout=left))
                except queue.Empty:
                    break
            if batch[-1][-1] is DONE:
                status, reason, _ = batch.pop()
            self._metrics(client, run.info.run_id, batch)
        client.set_tag(run.info.run_id, "status", reason)
        self._artifacts(client, run.info.run_id, job)
        client.set_terminated(run.info.run_id, status)

    def _parameters(self, client: Any, run_id: str, job: Job) -> None:
        from mlflow.entities import Param

        plain = job.experiment.plain()
        plain.pop("tracking")  # a store's address may hold a password
        params = [Param(key, value[:6000]) for key, value in flatten(plain).items()]
        for at in range(0, len(params), BATCH):
            client.log_batch(run_id, params=params[at : at + BATCH])

    def _metrics(self, client: Any, run_id: str, batch: list[tuple[int, Record]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), stamp, int(record["round"]))
            for stamp, record in batch
            for name, value in record.items()
            if name != "round"
        ]
        for at in range(0, len(metrics), 10 * BATCH):
            client.log_batch(run_id, metrics=metrics[at : at + 10 * BATCH])

    def _artifacts(self, client: Any, run_id: str, job: Job) -> None:
        import yaml

        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            plain = job.experiment.plain()
            plain.pop("tracking")
            config.write_text(yaml.safe_dump(plain, sort_keys=False))
            client.log_artifact(run_id, str(config))
        for name in ("rounds.parquet", "result.json", "environment.json"):
            if self.directory and (Path(self.directory) / name).is_file():
                client.log_artifact(run_id, str(Path(self.directory) / name))


def label(job: Job) -> str:
    return f"{name_of(job.experiment.method)}-{name_of(job.experiment.workload)}-{job.run_id}"


def name_of(spec: Any) -> str:
    return spec["name"] if isinstance(spec, dict) else spec if isinstance(spec, str) else type(spec).__name__


def tags(job: Job) -> dict[str, str]:
    from importlib.metadata import version

    workload = job.experiment.workload
    found = {
        "method": name_of(job.experiment.method),
        "workload": name_of(workload),
        "seed": str(job.experiment.seed),
        "fedfleet.run_id": job.run_id,
        "fedfleet.version": version("fedfleet"),
    }
    if isinstance(workload, dict) and "partition" in workload:
        found["partition"] = name_of(workload["partition"])
    return found


def experiment_id(client: Any, name: str, uri: str) -> str:
    """The experiment's id, made if it is new; a local store keeps artifacts beside its database."""
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is not None:
        return known.experiment_id
    beside = None
    if uri.startswith("sqlite:///"):
        beside = (Path(uri.removeprefix("sqlite:///")).parent / "mlartifacts" / name).resolve().as_uri()
    try:
        return client.create_experiment(name, artifact_location=beside)
    except MlflowException:  # another process was quicker
        known = client.get_experiment_by_name(name)
        if known is None:
            raise
        return known.experiment_id
