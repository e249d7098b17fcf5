"""A study in MLflow: an experiment per study, a parent run per study, a run below it for every cell and seed.

One thread of the study's own process writes all of it, in batches, from what lies in the folder: cells never touch the
store, so SQLite's one writer is enough however many run at once. A cell's run is tagged with its key; one that was left
half-written by a study that was killed is written anew, one that is whole is left alone. A store that fails costs the
record, never the study.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from ...engine.config.run_spec import RunSpec
from ...engine.config.schema import experiment
from ..mlflow_runs import (
    again,
    commit,
    keep,
    kept,
    log_metrics,
    log_parameters,
    name_of,
    nested,
    not_tracked,
    now,
    partition_of,
)
from ..search.trial import rows
from ..stores import load_mlflow, open_store, store
from .cells import Cell
from .folder import FINISHED, OVER, Folder
from .spec import Study

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
            not_tracked(error, "study")

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
        run_id = again(self.client, kept(self.folder.path).get("run_id", ""))
        if not run_id:
            run_id = self.client.create_run(self.experiment, run_name=self.study.name).info.run_id
            keep(self.folder.path, self.uri, run_id)
        self._tags(run_id)
        return run_id

    def _tags(self, run_id: str) -> None:
        for name, value in self._common().items():
            self.client.set_tag(run_id, name, value)

    def _common(self) -> dict[str, str]:
        reduced = "; ".join(self.study.notes) or "no"
        return {"study": self.study.name, "paper": self.study.paper, "reduced": reduced, "commit": self.commit}

    def _known(self) -> dict[str, str]:
        """Cell -> "whole", or the id of a run that was left half-written."""
        known = {}
        for run in nested(self.client, self.experiment, self.parent):
            whole = run.data.tags.get("status", "") in OVER
            known[run.data.tags.get(CELL, "")] = "whole" if whole else run.info.run_id
        return known

    def _cell(self, cell: Cell, half: str | None) -> None:
        if half is not None:
            self.client.delete_run(half)
        status = self.folder.status(cell)
        run = self.client.create_run(self.experiment, tags=self._cell_tags(cell), run_name=cell.label)
        run_id = run.info.run_id
        log_parameters(self.client, run_id, experiment(cell.data))
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
            "partition": partition_of(RunSpec.of("", made)),
            "level": ", ".join(cell.place),
            "seed": str(cell.seed),
            **axes,
            **({"reason": reason} if reason else {}),
        }

    def _metrics(self, run_id: str, cell: Cell) -> None:
        """All of a run at once; metrics of one run share the time at which they were written."""
        folder, stamp = self.folder.of(cell), now()
        if (folder / "rounds.parquet").is_file():
            log_metrics(self.client, run_id, [(stamp, row) for row in rows(folder)])

    def _artifacts(self, run_id: str, cell: Cell) -> None:
        place = self.folder.of(cell)
        for name in ("config.yaml", "rounds.parquet", "result.json", "failure.json", "environment.json"):
            if (place / name).is_file():
                self.client.log_artifact(run_id, str(place / name))
        points = self.folder.points(cell, self.study.report.metric)
        if points is not None and self.folder.status(cell) == FINISHED:
            from ..report.charts import single

            self.client.log_text(run_id, single(points, self.study.report, cell.label), "curve.svg")
