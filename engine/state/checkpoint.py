"""The checkpoints of a run: written in a thread while rounds go on, kept as long as they are needed, and loaded.

    DIR/checkpoints/    what `checkpoint_store` says, and round-000050.forked for a round from which a fork was made
    DIR/state/          the rows of client states, which the running store uses too

A checkpoint copies no rows but pins them: they are not overwritten while it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import first_line
from ..storage.object_store import LocalFolder
from ..storage.secrets import redacted
from .checkpoint_store import BLOBS, CheckpointStore, Damaged, Snapshot, name_of
from .copies import Copies
from .row_files import RowFiles
from .row_table import RowTable


class Checkpoints:
    """Saves and loads the checkpoints of a run.

    They are written in another thread while the next rounds run, one at a time. It is the same thread for all of them,
    because the C library keeps memory for each thread: with a new thread for each checkpoint, the driver grew by 0.1
    MiB each time.
    """

    def __init__(self, directory: str, keep: int, table: RowTable, copies: Copies | None = None) -> None:
        """directory: the run's folder. keep: how many checkpoints are kept. copies: where copies of them go, if any."""
        self.directory, self.keep, self.table, self.copies = Path(directory), keep, table, copies
        self.store = checkpoints_in(directory)
        self.pinned: dict[int, np.ndarray] = {}  # round of a checkpoint -> the rows that it pins, (N,)
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: tuple[Snapshot, Future[tuple[str, list[str]]]] | None = None

    # --- writing ------------------------------------------------------------------------------------------------------
    def save(self, snapshot: Snapshot, copied: bool = True) -> None:
        """Begin to write a checkpoint. The previous one must have been finished by `finish`. copied: whether it has a
        copy, if checkpoints have."""
        self.table.pin(snapshot.row)
        try:
            self.writing = snapshot, self.writer.submit(self._write, snapshot, copied)
        except RuntimeError:  # the process ends, and a pool takes nothing more
            self.writing = snapshot, Future()
            self.writing[1].set_result(self._write(snapshot, copied))

    def _write(self, snapshot: Snapshot, copied: bool) -> tuple[str, list[str]]:
        """Write the checkpoint into the run's folder, then its copy. Returns (why it could not be written, or ""; lines
        for the log on its copy)."""
        wrong, lines = "", []
        try:
            self.table.sync(snapshot.row)
            self.store.write(snapshot)
        except Exception as error:  # cluster pools raise errors of their own
            wrong = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if self.copies is not None and copied:
            try:
                self.copies.put(snapshot)
            except Exception as error:  # of whatever kind a file system raises
                lines.append(f"round {snapshot.round}: no copy in {self.copies.url} ({redacted(first_line(error))})")
        return wrong, lines

    def finish(self) -> list[str]:
        """Wait for the checkpoint under way, and remove those beyond `keep`. Returns lines for the log about what went
        wrong."""
        if self.writing is None:
            return []
        (snapshot, future), self.writing = self.writing, None
        wrong, lines = future.result()
        if wrong:
            self.table.unpin(snapshot.row)
            line = f"round {snapshot.round}: no checkpoint could be written ({wrong}); the one before it stays"
            lines = [line, *lines]
        else:
            if snapshot.round in self.pinned:
                self.table.unpin(self.pinned[snapshot.round])
            self.pinned[snapshot.round] = snapshot.row
        self._keep(sorted(self.pinned)[-self.keep :])
        return lines

    def drop(self, numbers: Iterable[int]) -> list[str]:
        """Remove the checkpoints of these rounds, so that their rows are free. Returns lines for the log."""
        lines = self.finish()
        self._keep(self.pinned.keys() - set(numbers))
        return lines

    def _keep(self, numbers: Iterable[int]) -> None:
        """Remove all other checkpoints, damaged ones too, and free their rows unless a fork needs them."""
        self.store.keep(numbers)
        for number in self.pinned.keys() - set(numbers):
            row = self.pinned.pop(number)
            if not fork_mark(self.directory, number).exists():  # looked up after the checkpoint is gone
                self.table.unpin(row)

    def remove(self) -> None:
        """Remove all checkpoints of the run's folder. Copies stay."""
        self.finish()
        remove_all(self.directory)

    # --- reading ------------------------------------------------------------------------------------------------------
    def load(self, sample: Any) -> tuple[Snapshot | None, list[str]]:
        """(the newest sound checkpoint or None, lines for the log about those that were skipped).

        Older sound checkpoints stay pinned. If none is sound, it is the newest sound copy. sample: a client state.
        """
        found, lines = None, list[str]()

        def read(number: int) -> Snapshot:
            snapshot = self.store.read(number)
            return snapshot if found else self._verified(snapshot, sample)

        def damaged(number: int, why: Damaged) -> None:
            remedy = "" if found else "; the one before it is used"
            lines.append(f"checkpoint {name_of(number)} is damaged ({why}){remedy}")

        for snapshot in self.store.sound(read, damaged):
            found = found or snapshot
            self.pinned[snapshot.round] = snapshot.row
        if found is None and self.copies is not None:
            found = self._load_copy(self.copies, sample, lines)
        return found, lines

    def _load_copy(self, copies: Copies, sample: Any, lines: list[str]) -> Snapshot | None:
        """The newest sound copy. lines: for the log, receives what was found."""

        def damaged(number: int, why: Damaged) -> None:
            lines.append(f"checkpoint {name_of(number)} in {copies.url} is damaged ({why})")

        try:
            for snapshot in copies.store.sound(lambda n: self._verified(copies.restore(n), sample), damaged):
                self.table.on_restored(snapshot.row[snapshot.row >= 0])
                lines.append(f"round {snapshot.round} is restored from {copies.url}")
                return snapshot
        except OSError as error:
            lines.append(f"{copies.url} cannot be read ({redacted(str(error))})")
        return None

    def _verified(self, snapshot: Snapshot, sample: Any) -> Snapshot:
        """The checkpoint. Raises Damaged if its rows are not in the store. sample: a client state."""
        clients, layout = np.flatnonzero(snapshot.row >= 0), self.table.layout
        if len(snapshot.row) != len(self.table.row) or not layout.folder or not len(clients):
            return snapshot  # another number of clients is another configuration, which is reported when it is used
        if int(snapshot.row.max()) >= self.table.capacity:
            raise Damaged("the store has too few rows")
        found = RowFiles(layout, sample).digests(snapshot.row[clients])
        if bad := int((found != snapshot.digest[clients]).any(1).sum()):
            raise Damaged(f"the states of {bad} clients do not match their digests")
        return snapshot


# --- the folder of a run ----------------------------------------------------------------------------------------------
def checkpoints_in(directory: str | Path) -> CheckpointStore:
    """The checkpoints in the folder of a run."""
    return CheckpointStore(LocalFolder(Path(directory) / "checkpoints"))


def checkpointed_rounds(directory: str | Path) -> list[int]:
    """The rounds of which the folder of a run has checkpoints, sound or not, ascending."""
    return checkpoints_in(directory).rounds()


def remove_all(directory: str | Path) -> None:
    """Remove the checkpoints of a run's folder, also half-written ones, and `checkpoints/` unless it holds something
    else."""
    folder = Path(directory) / "checkpoints"
    checkpoints_in(directory).keep(())
    remove_marks(folder)
    for empty in (folder / BLOBS, folder):
        with suppress(OSError):
            empty.rmdir()


def keep_only(directory: str | Path, number: int) -> None:
    """Remove all checkpoints of a run's folder but that of the round `number`, also half-written ones."""
    store = checkpoints_in(directory)
    store.manifests[number] = store.manifest(number)
    store.keep([number])
    remove_marks(Path(directory) / "checkpoints")


def remove_marks(folder: Path) -> None:
    """Remove half-written checkpoints and the marks of forks. folder: of the checkpoints."""
    for half_written_or_mark in (*folder.glob(".round-*.json"), *folder.glob("round-*.forked")):
        half_written_or_mark.unlink(missing_ok=True)


def fork_mark(directory: Path, number: int) -> Path:
    """The file that has a run keep the rows of a checkpoint even after the checkpoint is removed.

    Whoever makes a fork makes this file first, and sees at the end whether the checkpoint is still there. The run,
    which may go on meanwhile, looks for the file after it has removed the checkpoint. So either the run sees the file,
    or the fork sees that the checkpoint is gone.
    """
    return directory / "checkpoints" / f"{name_of(number)}.forked"
