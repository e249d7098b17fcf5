"""What the executor is given and what it passes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ...engine.rounds.driver import Record


class RunRequest(NamedTuple):
    """A run to execute. key: its name, unique among the runs of a source.

    experiment: its plain data. folder: of the run's files, on a file system that all nodes share. run_id: a new one
    unless given. columns: the run reports after each round that has all of them, and waits for the verdict; None: it
    reports about twice a second. keep_model: leave the final model in the folder.
    """

    key: str
    experiment: dict[str, Any]
    folder: str
    run_id: str | None = None
    columns: tuple[str, ...] | None = None
    keep_model: bool = False


class Report(NamedTuple):
    """rows: the records since the last report; status: running, finished, diverged or failed; reason: why it has
    failed or diverged, a sentence."""

    rows: list[Record]
    status: str
    reason: str


class Source:
    """Hands out the runs to execute and hears what becomes of them. All calls come from the driver's main thread."""

    def next(self) -> RunRequest | None:
        """The next run; None where there is none as long as no other run ends, or at all."""
        raise NotImplementedError

    def hear(self, key: str, report: Report) -> bool:
        """A run's report; whether the run is to be ended. The last one has another status than running."""
        raise NotImplementedError

    def died(self, key: str) -> None:
        """The process that executed a run died, and so did the one that tried again."""
        raise NotImplementedError


DIED = "the run's process died, twice; it may have run out of memory"
"""The reason of a run whose source heard `died`."""


def sweep(folder: Path) -> None:
    """Remove what a run that has ended would have been resumed from: its process may have been killed."""
    import shutil

    for name in ("state", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
