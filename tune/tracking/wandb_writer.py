"""Writes to Weights & Biases, whose own environment variables say where to: WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE.

Without a key the runs are written to the folder `wandb` of the run, search or study, and `wandb sync` uploads them. The
runs of a search or study form a group. W&B leaves out the rounds that a run has already.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ...engine.storage.secrets import redacted_data
from .folder_writer import FolderWriter
from .stores import SECONDS
from .writer import REPORT, TOP, Batch, End, package_is_there

QUIET = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
"""Environment variables for W&B, unless they are set already: what it prints would stand between the lines of
`--json`."""


class WandbWriter(FolderWriter):
    """Writes to Weights & Biases."""

    tracker = "W&B"

    def __init__(self, project: str, folder: Path, what: str, system: bool = False) -> None:
        """project: W&B's. folder: of the run, search or study. what: run, search or study. system: whether the load of
        this machine is recorded. Raises ConfigError without the package wandb."""
        package_is_there("wandb", "wandb")
        self.project, self.system = project, system
        self.package: Any = None
        self.mode: str | None = None  # None: that of W&B's own settings
        self.runs: dict[str, Any] = {}  # key -> W&B's run
        super().__init__(folder, what, "wandb")

    def load(self) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self.package = import_module("wandb")

    def open(self) -> None:
        super().open()
        if "WANDB_MODE" not in os.environ and not self.package.login(prompt=False, verify=False):
            self.mode = "offline"  # W&B would ask on the terminal
        self.is_local = "offline" in (self.mode, os.environ.get("WANDB_MODE"))
        self._run(TOP)

    def stop(self) -> None:
        for key in list(self.runs):
            self.runs.pop(key).finish()

    def write_records(self, batch: Batch) -> None:
        run, trials = self._run(batch.key), self.has_trials(batch.key)
        for _, record in batch.records:
            values = {name: value for name, value in record.items() if name != "round"}
            if trials:  # they end in any order, and W&B takes steps in theirs
                run.log({"trial": int(record["round"]), **values})
            elif record["round"]:
                run.log(values, step=int(record["round"]))
            else:
                run.summary.update(values)

    def finish(self, end: End) -> None:
        run = self._run(end.key)
        report = end.texts().get(REPORT)
        for path in end.files:
            if path.name == REPORT and path.is_file():
                report = path.read_text("utf-8")
        if report is not None:
            run.log({"report": self.package.Html(report, inject=False)})
        run.summary.update({"status": end.status, **({"reason": end.reason} if end.reason else {})})
        self.runs.pop(end.key).finish()

    def _run(self, key: str) -> Any:
        """W&B's run, which is begun or continued at the first call."""
        if key not in self.runs:
            header = self.header(key)
            own = header.tags.get("fedfleet.run_id") or header.tags.get("fedfleet.search_id")
            self.runs[key] = self.package.init(
                project=self.project,
                name=header.name,
                id=own,
                resume="allow" if own else None,
                group=None if self.what == "run" else self.header(TOP).name,
                job_type=self.what if key == TOP else "run",
                config={**redacted_data(header.parameters), "tags": header.tags},
                dir=str(self.folder.parent),
                mode=self.mode,
                reinit="create_new",
                settings=self.package.Settings(x_disable_stats=not self.system, init_timeout=SECONDS),
            )
        return self.runs[key]
