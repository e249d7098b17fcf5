"""A study in MLflow: an experiment per study, a parent run per study, a run below it for every cell and seed.

One thread of the study's own process writes all of it, in batches, from what lies in the folder: cells never touch the
store, so SQLite's one writer is enough however many run at once. A cell's run is tagged with its key; one that was left
half-written by a study that was killed is written anew, one that is whole is left alone. A store that fails costs the
record, never the study.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ...engine.config import experiment, redacted
from ...engine.directory import write
from ...engine.job import Job
from ..stores import load_mlflow, open_store, store
from ..tracking import BATCH, flatten, name_of, now, partition_of
from .cells import Cell
from .folder import FINISHED, OVER, Folder, column
from .spec import Study

KEPT = "mlflow.json"
CELL = "fedfleet.cell"
STATUS = {"finished": "FINISHED", "diverged": "FAILED", "failed": "FAILED"}


class Tracker:
    """`add` cells that are over, `close` at the end. Only `close` waits for the thread."""

    def __init__(self, study: Study, folder: Folder) -> None:
        self.study, self.folder = study, folder
        self.uri = "none" if study.tracking.uri == "none" else store(study.tracking.uri)
        self.waiting: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self._write, name="mlflow", daemon=True)
        if self.uri != "none":
            self.thread.start()

    def add(self, cell: Cell) -> None:
        self.waiting.put(cell)

    def close(self, status: str) -> None:
        """`status`: FINISHED or KILLED."""
        self.waiting.put(status)
        if self.thread.is_alive():
            self.thread.join()

    # --- the thread -----------------------------------------------------------------------------------------------
    def _write(self) -> None:
        try:
            load_mlflow()
            self._track()
        except Exception as error:  # any failure of the store, of whatever kind it raises
            reason = " ".join(redacted(str(error) or type(error).__name__).split())
            print(f"warning: not tracked in MLflow: {reason}; the study itself goes on", file=sys.stderr)

    def _track(self) -> None:
        first = self.waiting.get()
        self.client, self.experiment = open_store(self.uri, self.study.tracking.experiment or self.study.name)
        self.commit = commit()
        self.parent = self._parent()
        known = self._known()
        item = first
        while isinstance(item, Cell):
            if known.get(item.key) != "whole":
                self._cell(item, known.get(item.key))
            known[item.key] = "whole"
            item = self.waiting.get()
        for path in (self.folder.path / name for name in ("study.yaml", "report.html", "report.md")):
            if path.is_file():
                self.client.log_artifact(self.parent, str(path))
        if (self.folder.path / "charts").is_dir():
            self.client.log_artifacts(self.parent, str(self.folder.path / "charts"), "charts")
        self.client.set_tag(self.parent, "status", item.lower())
        self.client.set_terminated(self.parent, item)

    def _parent(self) -> str:
        """The study's run: that of its first part where there was one."""
        from mlflow.exceptions import MlflowException

        kept = self.folder.path / KEPT
        if kept.is_file():
            run_id = json.loads(kept.read_text()).get("run_id", "")
            try:
                self.client.get_run(run_id)
                self.client.update_run(run_id, status="RUNNING")
                self._tags(run_id)
                return run_id
            except MlflowException:  # another store
                pass
        run = self.client.create_run(self.experiment, run_name=self.study.name)
        write(kept, json.dumps({"uri": redacted(self.uri), "run_id": run.info.run_id}) + "\n")
        self._tags(run.info.run_id)
        return run.info.run_id

    def _tags(self, run_id: str) -> None:
        for name, value in self._common().items():
            self.client.set_tag(run_id, name, value)

    def _common(self) -> dict[str, str]:
        reduced = "; ".join(self.study.notes) or "no"
        return {"study": self.study.name, "paper": self.study.paper, "reduced": reduced, "commit": self.commit}

    def _known(self) -> dict[str, str]:
        """Cell -> "whole", or the id of a run that was left half-written."""
        known, token = {}, None
        below = f"tags.`mlflow.parentRunId` = '{self.parent}'"
        while True:
            page = self.client.search_runs([self.experiment], below, max_results=500, page_token=token)
            for run in page:
                whole = run.data.tags.get("status", "") in OVER
                known[run.data.tags.get(CELL, "")] = "whole" if whole else run.info.run_id
            token = page.token
            if not token:
                return known

    def _cell(self, cell: Cell, half: str | None) -> None:
        if half is not None:
            self.client.delete_run(half)
        status = self.folder.status(cell)
        run = self.client.create_run(self.experiment, tags=self._cell_tags(cell), run_name=cell.label)
        run_id = run.info.run_id
        self._parameters(run_id, cell)
        self._metrics(run_id, cell)
        self._artifacts(run_id, cell)
        self.client.set_tag(run_id, "status", status)  # last: from now on it is whole
        self.client.set_terminated(run_id, STATUS.get(status, "FAILED"))

    def _cell_tags(self, cell: Cell) -> dict[str, str]:
        made = experiment(cell.data)
        axes = {f"axis.{name}": label for name, label in zip(self.study.axes, cell.place, strict=True)}
        reason = self.folder.failure(cell).get("reason")
        return {
            **self._common(),
            "mlflow.parentRunId": self.parent,
            CELL: cell.key,
            "method": cell.method,
            "workload": name_of(made.workload),
            "partition": partition_of(Job.of("", made)),
            "level": ", ".join(cell.place),
            "seed": str(cell.seed),
            **axes,
            **({"reason": reason} if reason else {}),
        }

    def _parameters(self, run_id: str, cell: Cell) -> None:
        from mlflow.entities import Param

        plain = experiment(cell.data).plain()
        plain.pop("tracking")
        params = [Param(key, value[:6000]) for key, value in flatten(plain).items()]
        for at in range(0, len(params), BATCH):
            self.client.log_batch(run_id, params=params[at : at + BATCH])

    def _metrics(self, run_id: str, cell: Cell) -> None:
        """All of a run at once, a thousand a call; metrics of one run share the time at which they were written."""
        import pyarrow.parquet as pq
        from mlflow.entities import Metric

        path = self.folder.of(cell) / "rounds.parquet"
        if not path.is_file():
            return
        table, stamp = pq.read_table(path), now()
        rounds = column(table, "round")
        metrics = [
            Metric(name, float(value), stamp, int(number))
            for name in table.column_names
            if name != "round"
            for number, value in zip(rounds, column(table, name), strict=True)
            if value == value
        ]
        for at in range(0, len(metrics), 10 * BATCH):
            self.client.log_batch(run_id, metrics=metrics[at : at + 10 * BATCH])

    def _artifacts(self, run_id: str, cell: Cell) -> None:
        place = self.folder.of(cell)
        for name in ("config.yaml", "rounds.parquet", "result.json", "failure.json", "environment.json"):
            if (place / name).is_file():
                self.client.log_artifact(run_id, str(place / name))
        points = self.folder.points(cell, self.study.report.metric)
        if points is not None and self.folder.status(cell) == FINISHED:
            from ..report.charts import single

            self.client.log_text(run_id, single(points, self.study.report, cell.label), "curve.svg")


def commit() -> str:
    """Of the sources, where they are a git checkout; else of the current folder; else nothing."""
    for folder in (Path(__file__).parent, Path.cwd()):
        try:
            asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        if asked.returncode == 0:
            return asked.stdout.strip()
    return ""
