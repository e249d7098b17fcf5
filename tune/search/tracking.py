"""A search in MLflow: a run for the search, a nested one for each trial, metrics with step = round.

One thread in the search's own process does all the writing, in batches; trials never touch the store, so SQLite's one
writer is enough however many there are. A search that is resumed goes on in its run, and so do its trials; what a
killed process had not written yet is read from the trials' folders. A store that fails costs the record, never the
search.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any

from ...engine.config.run_spec import RunSpec
from ...engine.config.schema import Experiment, Tracking
from ...engine.rounds.driver import Record
from ..mlflow_runs import (
    again,
    commit,
    keep,
    kept,
    log_flat,
    log_metrics,
    log_parameters,
    name_of,
    nested,
    not_tracked,
    now,
    partition_of,
    steps,
)
from ..stores import load_mlflow, open_store, store
from ..tracking import FLUSH_SECONDS
from .ledger import Trial
from .plan import Plan
from .trial import rows as rows_of
from .trial import trial_folder

STATUS = {"finished": "FINISHED", "pruned": "KILLED", "diverged": "FAILED", "failed": "FAILED", "running": "KILLED"}
TRIAL = "fedfleet.trial"
FILES = ("config.yaml", "rounds.parquet", "result.json", "environment.json")
DONE = object()


class SearchTracker:
    """A watcher. `ended`: the trials of earlier parts of the search."""

    def __init__(self, plan: Plan, tracking: Tracking, folder: Path, search_id: str, parent: str | None) -> None:
        self.plan, self.tracking, self.folder, self.search_id = plan, tracking, folder, search_id
        self.uri, self.outer = store(tracking.uri), parent
        self.ended: list[Trial] = []
        self.experiments: dict[int, Experiment] = {}
        self.waiting: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.runs: dict[int, str] = {}  # trial -> its MLflow run
        self.known: dict[int, set[tuple[str, int]]] = {}  # (metric, round) that an earlier part has written
        self.over: set[int] = set()
        self.thread: threading.Thread | None = None

    def begins(self, trials: list[Trial]) -> None:
        self.ended = [t for t in trials if t.status != "running"]
        self.thread = threading.Thread(target=self._write, name="mlflow", daemon=True)
        self.thread.start()

    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment) -> None:
        self.waiting.put((self._begin, number, experiment, now()))

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        if rows:
            stamp = now()
            self.waiting.put((self._rounds, number, [(stamp, row) for row in rows]))

    def trial_ends(self, trial: Trial) -> None:
        self.waiting.put((self._end, trial))

    def ends(self, status: str) -> None:
        """status: FINISHED, FAILED or KILLED."""
        self.waiting.put((DONE, status))
        if self.thread is not None:
            self.thread.join()

    # --- the thread -----------------------------------------------------------------------------------------------
    def _write(self) -> None:
        try:
            load_mlflow()
            first = self.waiting.get()
            if first[0] is DONE and not self.ended:
                return
            self._open()
            self._follow(first)
        except Exception as error:  # any failure of the store, of whatever kind it raises
            not_tracked(error, "search")

    def _open(self) -> None:
        self.client, self.place = open_store(self.uri, self.tracking.experiment)
        self.commit = commit() or ""
        self.parent = again(self.client, kept(self.folder).get("run_id", "")) or self._new()
        self._earlier()
        for trial in self.ended:
            if trial.number not in self.over:
                self._mend(trial)

    def _new(self) -> str:
        name = str(self.plan.data.get("name") or "search")
        kind = {"fedfleet.search_id": self.search_id, "kind": "search", "commit": self.commit}
        outer = {"mlflow.parentRunId": self.outer} if self.outer else {}
        run_id = self.client.create_run(self.place, tags={**kind, **outer}, run_name=name).info.run_id
        keep(self.folder, self.uri, run_id)
        asked = {key: value for key, value in self.plan.plain().items() if key not in ("tracking", "plugins")}
        log_flat(self.client, run_id, asked)
        return run_id

    def _earlier(self) -> None:
        """The trials' runs that an earlier part of the search has begun."""
        for run in nested(self.client, self.place, self.parent):
            number = int(run.data.tags[TRIAL])
            self.runs[number] = run.info.run_id
            if run.data.tags.get("status") in STATUS:
                self.over.add(number)

    def _mend(self, trial: Trial) -> None:
        """Write what a killed process had not: the trial ended, its folder has its record."""
        self._begin(trial.number, self.plan.experiment(trial.params), now())
        if (trial_folder(self.folder, trial.number) / "rounds.parquet").is_file():
            stamp = now()
            self._rounds(trial.number, [(stamp, row) for row in rows_of(trial_folder(self.folder, trial.number))])
        self._end(trial)

    def _follow(self, first: tuple[Any, ...]) -> None:
        """Do what comes, in batches; a store that fails for a while gets what it missed with the next one."""
        todo, end = [first], None
        while end is None:
            self._gather(todo)
            end = todo.pop() if todo[-1][0] is DONE else None
            todo = self._merged(todo)
            try:
                while todo:
                    todo[0][0](*todo[0][1:])
                    todo.pop(0)
            except Exception:
                if end is not None:
                    raise
            if end is None:
                todo.append(self.waiting.get())
        self._close(end[1])

    def _gather(self, todo: list[tuple[Any, ...]]) -> None:
        """Add what comes within FLUSH_SECONDS."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while todo[-1][0] is not DONE and (left := deadline - time.monotonic()) > 0:
            try:
                todo.append(self.waiting.get(timeout=left))
            except queue.Empty:
                return

    def _merged(self, todo: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The same, with all rounds of a trial in one message."""
        made: list[tuple[Any, ...]] = []
        batches: dict[int, list[tuple[int, Record]]] = {}
        for message in todo:
            number = message[1].number if isinstance(message[1], Trial) else message[1]
            if message[0] != self._rounds:
                made.append(message)
                batches.pop(number, None)
            elif number in batches:
                batches[number] += message[2]
            else:
                batches[number] = list(message[2])
                made.append((self._rounds, number, batches[number]))
        return made

    def _close(self, status: str) -> None:
        for name in ("search.yaml", "best.yaml", "result.json"):
            if (self.folder / name).is_file():
                self.client.log_artifact(self.parent, str(self.folder / name))
        self.client.set_tag(self.parent, "status", status.lower())
        for number in set(self.runs) - self.over:
            self.client.set_terminated(self.runs[number], "KILLED")
        self.client.set_terminated(self.parent, status)

    def _begin(self, number: int, experiment: Experiment, stamp: int) -> None:
        if number in self.runs:  # of a part that was killed
            self.known[number] = steps(self.client, self.runs[number])
            self.client.update_run(self.runs[number], status="RUNNING")
            return
        tags = {"mlflow.parentRunId": self.parent, TRIAL: str(number), **self._tags(number, experiment)}
        run = self.client.create_run(self.place, start_time=stamp, tags=tags, run_name=f"{number:04d}")
        self.runs[number] = run.info.run_id
        log_parameters(self.client, run.info.run_id, experiment)

    def _tags(self, number: int, experiment: Experiment) -> dict[str, str]:
        run_spec = RunSpec.of(f"{self.search_id}-{number:04d}", experiment)
        found = {
            "method": name_of(experiment.method),
            "workload": name_of(experiment.workload),
            "partition": partition_of(run_spec),
            "level": level(experiment.workload),
            "seed": str(experiment.seed),
            "commit": self.commit,
            "fedfleet.run_id": run_spec.run_id,
        }
        return {key: value for key, value in found.items() if value}

    def _rounds(self, number: int, batch: list[tuple[int, Record]]) -> None:
        log_metrics(self.client, self.runs[number], batch, self.known.get(number, ()))

    def _end(self, trial: Trial) -> None:
        run_id, folder = self.runs[trial.number], trial_folder(self.folder, trial.number)
        for name in FILES:
            if trial.status == "finished" and (folder / name).is_file():
                self.client.log_artifact(run_id, str(folder / name))
        if trial.reason:
            self.client.set_tag(run_id, "reason", trial.reason[:5000])
        for name, value in zip(self.plan.settings.objectives, trial.values, strict=False):
            self.client.log_metric(run_id, f"objective/{name}", value)
            self.client.log_metric(self.parent, name, value, step=trial.number)
        self.client.set_tag(run_id, "status", trial.status)  # last but one: from now on it is whole
        self.client.set_terminated(run_id, STATUS[trial.status])
        self.over.add(trial.number)


def level(workload: Any) -> str:
    """How unlike the clients are, as the file says it: the partition's arguments, beta=0.1."""
    spec = workload.get("partition") if isinstance(workload, dict) else None
    return ", ".join(f"{key}={value}" for key, value in spec.items() if key != "name") if isinstance(spec, dict) else ""
