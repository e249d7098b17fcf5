"""One trial, in a process that Tune started: a run whose rounds are reported as they are evaluated.

What a trial leaves in its folder is a run's folder. One that an earlier process finished without being heard is read
from there; one that it left with a checkpoint is resumed; one that it left without is begun again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...engine.config.schema import Experiment, experiment
from ...engine.errors import ConfigError, Diverged
from ...engine.rounds.driver import Record
from ...engine.runs.observer import Observer

Report = dict[str, Any]
"""`rows`: records since the last report; `status`: running, or how it ended; `reason`: of what failed."""


def play(config: dict[str, Any]) -> None:
    """Tune's function. config: `experiment` as plain data, `run_id`, `folder`, `columns` that make a round worth a
    report, `keep_model`, and `cwd`, which relative paths in the experiment are meant from."""
    from ray import tune

    os.chdir(config["cwd"])
    reporter = Reporter(tuple(config["columns"]), tune.report)
    folder = Path(config["folder"])
    try:
        with alone(folder):
            run_or_read(experiment(config["experiment"]), folder, config["run_id"], reporter)
            if not config["keep_model"]:
                (folder / "model.safetensors").unlink(missing_ok=True)
    except Diverged as error:
        reporter.over("diverged", str(error))
    except Exception as error:  # whatever a method, a workload or a plug-in raises costs its trial
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        reporter.over("failed", " ".join(reason.split()))
    else:
        reporter.over("finished")


def run_or_read(wanted: Experiment, folder: Path, run_id: str, reporter: Reporter) -> None:
    from ...engine.api import resume, run
    from ...engine.runs.run_directory import clear

    if (folder / "result.json").is_file():
        reporter.resumed(rows(folder))
    elif (folder / "run.json").is_file() and list((folder / "checkpoints").glob("round-*")):
        resume(wanted, folder, [reporter])
    else:
        clear(folder)
        run(wanted, folder, [reporter], run_id)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait for a process of a search that was killed, if it still works on this trial; then until this one is over."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


def trial_folder(search: Path, number: int) -> Path:
    return search / "trials" / f"{number:04d}"


def lock_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def rows(folder: Path) -> list[Record]:
    """The record of a run's folder."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "rounds.parquet").to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in table]


class Reporter(Observer):
    """An observer of the run; `send` may end it by raising SystemExit."""

    def __init__(self, columns: tuple[str, ...], send: Callable[[Report], None]) -> None:
        self.columns, self.send = columns, send
        self.rows: list[Record] = []
        self.rounds = 0

    def begin(self, run_spec: Any, facts: dict[str, Any]) -> None:
        self.rounds = run_spec.experiment.federation.rounds

    def record(self, record: Record) -> None:
        self.rows.append(record)
        if all(column in record for column in self.columns) and record["round"] < self.rounds:
            self._flush("running")

    def resumed(self, records: list[Record]) -> None:
        self.rows[:] = records

    def event(self, text: str) -> None:
        """The run's log has it."""

    def end(self, result: Any) -> None:
        """Told by `over`, when the folder is complete."""

    def failed(self, error: BaseException) -> None:
        """Told by `over`."""

    def over(self, status: str, reason: str = "") -> None:
        self._flush(status, reason)

    def _flush(self, status: str, reason: str = "") -> None:
        rows, self.rows = self.rows, []
        self.send({"rows": rows, "status": status, "reason": reason})
