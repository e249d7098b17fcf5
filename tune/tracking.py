"""A run as an MLflow run: parameters flattened, metrics with step = round, tags, artifacts.

One thread does all the writing, in batches: SQLite has one writer, and importing mlflow and creating its database take
seconds that the run need not wait for. Nothing is written before the first round is over, so an experiment that cannot
start leaves no trace. A run that is resumed goes on in its MLflow run, which a file in its folder names. A store that
fails costs the record in MLflow, never the run: the reason is printed at once. One that fails for a while, such as a
server that is restarted, gets what it missed with the next batch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.config.run_spec import RunSpec
from ..engine.errors import ConfigError, Diverged, Interrupted
from ..engine.rounds.driver import Record
from ..engine.runs.observer import Observer
from ..engine.runs.result import Result
from .mlflow_runs import again, keep, kept, log_metrics, log_parameters, name_of, not_tracked, now, partition_of, steps
from .stores import SECONDS, load_mlflow, open_store, store

FLUSH_SECONDS = 1.0
LOOK_SECONDS = 0.2
DONE = object()
NEVER = ("", "")
"""Status and reason of a run that could not begin."""


@dataclass
class MlflowTracker(Observer):
    uri: str = "auto"
    experiment: str = "default"
    directory: str | None = None
    waiting: queue.Queue[Any] = field(default_factory=queue.Queue)
    writer: threading.Thread | None = None
    opening: float = 0.0  # when the store began to be opened, by time.monotonic
    opened: threading.Event = field(default_factory=threading.Event)
    began: int = 0  # milliseconds
    rounds: int = 0

    def __post_init__(self) -> None:
        before = self._kept()
        file = before.get("uri", "").removeprefix("sqlite:///")
        if self.uri == "auto" and file != before.get("uri", "") and Path(file).is_file():
            self.uri = before["uri"]  # that of the run's first part, wherever it is resumed from on this machine
        self.uri = store(self.uri)

    def _kept(self) -> dict[str, str]:
        """Store and id of the MLflow run of this folder's run so far."""
        return kept(Path(self.directory)) if self.directory else {}

    # --- an observer ----------------------------------------------------------------------------------------------
    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        self.began = now()
        self.writer = threading.Thread(target=self._write, args=(run_spec,), name="mlflow", daemon=True)
        self.writer.start()

    def record(self, record: Record) -> None:
        """A round that is run again, since a node took clients' states along, has the numbers that it had, but for its
        times: MLflow keeps those of the first time, the run's folder those of the last."""
        if record["round"] > self.rounds:
            self.rounds = int(record["round"])
            self.waiting.put((now(), record))

    def resumed(self, records: list[Record]) -> None:
        """The store has them, but for those that a killed launcher had not written yet."""
        for record in records:
            self.record(record)

    def end(self, result: Result) -> None:
        self._close("FINISHED", "finished")

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ConfigError) and self.rounds == 0:
            self._close(*NEVER)
        elif isinstance(error, Interrupted | KeyboardInterrupt) and self.rounds == 0:
            self.waiting.put((*NEVER, DONE))  # nobody waits for the import of mlflow
        elif isinstance(error, Interrupted | KeyboardInterrupt | SystemExit):
            self._close("KILLED", "interrupted")
        else:
            self._close("FAILED", "diverged" if isinstance(error, Diverged) else type(error).__name__)

    def _close(self, status: str, reason: str) -> None:
        self.waiting.put((status, reason, DONE))
        closing = time.monotonic()
        while self.writer is not None and self.writer.is_alive():
            self.writer.join(LOOK_SECONDS)
            waited = time.monotonic() - max(closing, self.opening)
            if self.opening and not self.opened.is_set() and not self.uri.startswith("sqlite") and waited > SECONDS:
                not_tracked(TimeoutError(f"tracking.uri: the store has not answered within {SECONDS:g} s"), "run")
                return

    # --- the writer's thread --------------------------------------------------------------------------------------
    def _write(self, run_spec: RunSpec) -> None:
        try:
            self._track(run_spec)
        except Exception as error:  # any failure of the store, of whatever kind it raises
            not_tracked(error, "run")

    def _track(self, run_spec: RunSpec) -> None:
        load_mlflow()
        first = self.waiting.get()
        if first == (*NEVER, DONE):
            return
        self.opening = time.monotonic()
        client, experiment = open_store(self.uri, self.experiment)
        self.opened.set()
        run_id = again(client, self._kept().get("run_id", "")) if run_spec.resume else ""
        known = steps(client, run_id) if run_id else set()
        if not run_id:
            run = client.create_run(experiment, start_time=self.began, tags=tags(run_spec), run_name=label(run_spec))
            run_id = run.info.run_id
            log_parameters(client, run_id, run_spec.experiment)
        if self.directory:
            keep(Path(self.directory), self.uri, run_id)
        status, reason = self._rounds(client, run_id, first, known)
        try:
            client.set_tag(run_id, "status", reason)
            self._artifacts(client, run_id, run_spec)
        finally:
            client.set_terminated(run_id, status)

    def _rounds(self, client: Any, run_id: str, first: Any, known: Collection[tuple[str, int]] = ()) -> tuple[str, str]:
        """Write the rounds' metrics as they come, but for those in `known`; how it ended."""
        batch = [first]
        while True:
            self._gather(batch)
            end = batch.pop() if batch[-1][-1] is DONE else None
            try:
                log_metrics(client, run_id, batch, known)
                batch = []
            except Exception:
                if end is not None:
                    raise
            if end is not None:
                return end[0], end[1]
            batch.append(self.waiting.get())

    def _gather(self, batch: list[Any]) -> None:
        """Add what comes within FLUSH_SECONDS."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while batch[-1][-1] is not DONE and (left := deadline - time.monotonic()) > 0:
            try:
                batch.append(self.waiting.get(timeout=left))
            except queue.Empty:
                return

    def _artifacts(self, client: Any, run_id: str, run_spec: RunSpec) -> None:
        import yaml

        client.log_text(run_id, yaml.safe_dump(run_spec.experiment.plain(), sort_keys=False), "config.yaml")
        for name in ("rounds.parquet", "result.json", "environment.json"):
            if self.directory and (Path(self.directory) / name).is_file():
                client.log_artifact(run_id, str(Path(self.directory) / name))


def label(run_spec: RunSpec) -> str:
    return f"{name_of(run_spec.experiment.method)}-{name_of(run_spec.experiment.workload)}-{run_spec.run_id}"


def tags(run_spec: RunSpec) -> dict[str, str]:
    from importlib.metadata import version

    found = {
        "method": name_of(run_spec.experiment.method),
        "workload": name_of(run_spec.experiment.workload),
        "seed": str(run_spec.experiment.seed),
        "fedfleet.run_id": run_spec.run_id,
        "fedfleet.version": version("fedfleet"),
    }
    partition = partition_of(run_spec)
    return {**found, "partition": partition} if partition else found
