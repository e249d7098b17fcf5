"""Checkpoints in a run's folder: what the run needs to continue to the same bits.

    DIR/checkpoints/round-000050/   server.safetensors, table.safetensors, rounds-000.safetensors, …, manifest.json
    DIR/state/                      the rows of client states, which the running store uses too: a checkpoint pins rows

A checkpoint is written into a temporary folder, which gets its name when everything is on the disk. The manifest has
the digest of every file and of itself, and the table has the digest of every row. A checkpoint that does not match its
digests is skipped in favour of the one before it, and is removed once there is a newer one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..records.history import History
from ..storage.secrets import redacted
from ..storage.sha256 import sha256_of_file, sha256_of_json
from .table import Table

FORMAT = 4
"""The version of the format of a checkpoint's files."""
SEGMENT = 1000
"""The number of rounds whose records are in one file."""
FORKED = ".forked"
"""The ending of the mark of a checkpoint from which a fork was made."""
NAME = re.compile(r"round-[0-9]{6,}")


class Snapshot(NamedTuple):
    """The driver's state after round `round`, for N clients."""

    round: int
    server: list[Tensor]  # the leaves of the server's state (public, private)
    row: np.ndarray  # (N,) the row of each client's state, -1 for none
    digest: np.ndarray  # (N, 16) the digest of each client's row
    visits: np.ndarray  # (N,) how often each client has taken part
    records: History  # of all rounds so far
    config: dict[str, Any]
    plan: dict[str, Any]
    """The execution plan: what the bits depend on besides the configuration (clients in a block, and kernels)."""
    frozen: Mapping[str, Any] = MappingProxyType({})
    """Names and digest of the model's frozen tensors, see `RunSpec.frozen_facts`; their numbers are not in it."""


Loaded = tuple[Snapshot | None, list[str]]
"""(the checkpoint that was loaded, or None; lines for the log)"""


class CheckpointCopies(Protocol):
    """Copies of checkpoints in a folder that other machines reach; implemented in `shared_checkpoint`."""

    url: str

    def put(self, snapshot: Snapshot) -> None:
        """Write a copy. Raises an exception of any kind if it cannot be written."""
        ...

    def newest(self) -> Iterator[tuple[int, Snapshot | None, str]]:
        """(round, the checkpoint or None, what is wrong with it) of every copy, the newest first."""
        ...


class Checkpoints:
    """Saves and loads the checkpoints of a run.

    They are written in another thread while the next rounds run, one at a time. It is the same thread for all of them,
    because the C library keeps memory for each thread: with a new thread for each checkpoint, the driver grew by 0.1
    MiB each time.
    """

    def __init__(self, directory: str, keep: int, table: Table, copies: CheckpointCopies | None = None) -> None:
        """directory: the run's folder. keep: how many checkpoints are kept. copies: where copies of them go, if any."""
        self.folder, self.keep, self.table = Path(directory) / "checkpoints", keep, table
        self.copies = copies
        self.pinned: dict[int, np.ndarray] = {}  # round of a checkpoint -> the rows that it pins, (N,)
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        self.under_way: Snapshot | None = None
        self.error: str = ""  # why the checkpoint under way could not be written
        self.copy_errors: list[str] = []  # lines for the log about copies that could not be written

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write a checkpoint. The previous one must have been finished by `finish`."""
        self.table.pin(snapshot.row)
        self.under_way = snapshot
        try:
            self.writing = self.writer.submit(self._write, snapshot)
        except RuntimeError:  # the process ends, and a pool takes nothing more
            self.writing = Future()
            try:
                self.writing.set_result(self._write(snapshot))
            except Exception as error:
                self.writing.set_exception(error)

    def finish(self) -> list[str]:
        """Wait for the checkpoint under way, and remove those beyond `keep`. Returns lines for the log about what went
        wrong."""
        if self.writing is None or self.under_way is None:
            return []
        self.writing.result()
        snapshot, self.writing, self.under_way = self.under_way, None, None
        copy_errors, self.copy_errors = self.copy_errors, []
        if self.error:
            self.table.unpin(snapshot.row)
            reason, self.error = self.error, ""
            return [
                f"round {snapshot.round}: no checkpoint could be written ({reason}); the one before it stays",
                *copy_errors,
            ]
        if snapshot.round in self.pinned:
            self.table.unpin(self.pinned[snapshot.round])
        self.pinned[snapshot.round] = snapshot.row
        for number in sorted(self.pinned)[: -self.keep]:
            self._remove(number)
        for folder in written(self.folder.parent):
            if folder.name not in map(name_of, self.pinned):
                shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        return copy_errors

    def _remove(self, number: int) -> None:
        """Remove the checkpoint of a round."""
        shutil.rmtree(self.folder / name_of(number), ignore_errors=True)
        row = self.pinned.pop(number)
        if not is_forked(self.folder, number):  # which is looked up after its files are gone, see `mark_forked`
            self.table.unpin(row)

    def drop(self, numbers: Iterable[int]) -> list[str]:
        """Remove the checkpoints of these rounds, so that their rows are free. Returns lines for the log."""
        lines = self.finish()
        for number in sorted(self.pinned.keys() & set(numbers)):
            self._remove(number)
        return lines

    def _write(self, snapshot: Snapshot) -> None:
        """Write the checkpoint into the run's folder, then its copy."""
        self._write_to_folder(snapshot)
        if self.copies is not None:
            try:
                self.copies.put(snapshot)
            except Exception as error:  # of whatever kind a file system raises
                why = redacted(str(error).splitlines()[0] if str(error) else type(error).__name__)
                self.copy_errors = [f"round {snapshot.round}: no copy in {self.copies.url} ({why})"]

    def _write_to_folder(self, snapshot: Snapshot) -> None:
        temporary = self.folder / f".{name_of(snapshot.round)}"
        final = self.folder / name_of(snapshot.round)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self.table.sync(snapshot.row)
            write(temporary, snapshot)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            sync_folder(self.folder)
        except OSError as error:
            self.error = error.strerror or str(error)
            shutil.rmtree(temporary, ignore_errors=True)
        except Exception as error:  # safetensors and pyarrow wrap the system's errors in their own
            self.error = f"{type(error).__name__}: {error}"
            shutil.rmtree(temporary, ignore_errors=True)

    def load(self, verify: Callable[[Snapshot], str]) -> Loaded:
        """The newest checkpoint that matches its digests, and lines for the log about those that were skipped.

        Older sound checkpoints stay pinned. verify: returns what is wrong with the rows of a checkpoint, or "".
        """
        events: list[str] = []
        found: Snapshot | None = None
        for folder in reversed(written(self.folder.parent)):
            snapshot, wrong = read(folder)
            if snapshot is not None and found is None:
                wrong = verify(snapshot)
            if snapshot is None or wrong:
                remedy = "" if found else "; the one before it is used"
                events.append(f"checkpoint {folder.name} is damaged ({wrong}){remedy}")
                continue
            found = found or snapshot
            self.pinned[snapshot.round] = snapshot.row
        return (found, events) if found or self.copies is None else self._load_copy(self.copies, verify, events)

    def _load_copy(self, copies: CheckpointCopies, verify: Callable[[Snapshot], str], events: list[str]) -> Loaded:
        """The newest sound copy, for a run whose folder has no sound checkpoint."""
        try:
            for number, snapshot, wrong in copies.newest():
                if snapshot is not None and not (wrong := verify(snapshot)):
                    self.table.on_restored(snapshot.row[snapshot.row >= 0])
                    return snapshot, [*events, f"round {number} is restored from {copies.url}"]
                events.append(f"checkpoint {name_of(number)} in {copies.url} is damaged ({wrong})")
        except OSError as error:
            events.append(f"{copies.url} cannot be read ({redacted(str(error))})")
        return None, events

    def remove(self) -> None:
        """Remove all checkpoints of the run's folder. Copies stay."""
        self.finish()
        remove_all(self.folder.parent)


def written(directory: str | Path) -> list[Path]:
    """The folders of the checkpoints in a run's folder, the oldest first."""
    folders = (Path(directory) / "checkpoints").glob("round-*")
    return sorted(folder for folder in folders if NAME.fullmatch(folder.name))


def remove_all(directory: str | Path) -> None:
    """Remove the checkpoints of a run's folder, also half-written ones, and `checkpoints/` unless it holds something
    else."""
    parent = Path(directory) / "checkpoints"
    for half_written in parent.glob(".round-*"):
        if NAME.fullmatch(half_written.name[1:]):
            shutil.rmtree(half_written, ignore_errors=True)
    for folder in written(directory):
        shutil.rmtree(folder, ignore_errors=True)
    for mark in parent.glob(f"round-*{FORKED}"):
        mark.unlink(missing_ok=True)
    with suppress(OSError):
        parent.rmdir()


def name_of(number: int) -> str:
    """The name of the checkpoint of a round."""
    return f"round-{number:06d}"


def mark_forked(folder: Path) -> None:
    """Have the run, which may be running, keep the rows that a checkpoint pins even after it is removed.

    folder: of the checkpoint. Whoever makes a fork marks the checkpoint first, and sees at the end whether it is still
    there. The run looks for the mark after it has removed the checkpoint. So either the run sees the mark, or the fork
    sees that the checkpoint is gone.
    """
    folder.with_name(folder.name + FORKED).touch()


def is_forked(checkpoints: Path, number: int) -> bool:
    """Whether the checkpoint of a round has been marked by `mark_forked`. checkpoints: the folder of all of them."""
    return (checkpoints / f"{name_of(number)}{FORKED}").exists()


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write the files of a checkpoint into `folder`, and have them on the disk."""
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import save_file

    save_file({f"leaf{i}": leaf.contiguous() for i, leaf in enumerate(snapshot.server)}, folder / "server.safetensors")
    table = {"row": snapshot.row, "digest": snapshot.digest, "visits": snapshot.visits}
    save_file({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in table.items()}, folder / "table.safetensors")
    for begin in range(0, len(snapshot.records), SEGMENT):
        save_arrays(snapshot.records.packed(begin, begin + SEGMENT), folder / segment(begin))
    files = {path.name: sha256_of_file(path) for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "round": snapshot.round, "config": snapshot.config, "files": files}
    manifest["columns"] = list(snapshot.records.columns)
    manifest["plan"] = snapshot.plan
    if snapshot.frozen:
        manifest["frozen"] = dict(snapshot.frozen)
    manifest["digest"] = sha256_of_json(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sealed_plan(directory: str) -> dict[str, Any] | None:
    """The execution plan of the newest checkpoint in a run's folder whose manifest matches its digest, or None."""
    for folder in reversed(written(directory)):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            manifest = json.loads((folder / "manifest.json").read_text())
            if manifest.pop("digest") == sha256_of_json(manifest) and manifest["format"] == FORMAT:
                return manifest["plan"]
    return None


def read(folder: Path) -> tuple[Snapshot | None, str]:
    """(the checkpoint in `folder`, "") or (None, what is wrong with it)."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        if not isinstance(manifest, dict):
            return None, f"manifest.json holds a {type(manifest).__name__}, not an object"
        sealed = manifest.pop("digest", None)
        if sealed != sha256_of_json(manifest):
            return None, "manifest.json does not match its digest"
        if manifest["format"] != FORMAT:
            return None, f"format {manifest['format']} is not {FORMAT}"
        for name, expected in manifest["files"].items():
            if sha256_of_file(folder / name) != expected:
                return None, f"{name} does not match its digest"
        return _read(folder, manifest), ""
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except Exception as error:  # damage shows itself in any kind of error
        return None, f"{type(error).__name__}: {error}"


def _read(folder: Path, manifest: dict[str, Any]) -> Snapshot:
    from safetensors.numpy import load_file as load_arrays
    from safetensors.torch import load_file

    server, table = load_file(folder / "server.safetensors"), load_file(folder / "table.safetensors")
    rounds = manifest["round"]
    return Snapshot(
        rounds,
        [server[f"leaf{i}"] for i in range(len(server))],
        table["row"].numpy(),
        table["digest"].numpy(),
        table["visits"].numpy(),
        History.of(manifest["columns"], [load_arrays(folder / segment(at)) for at in range(0, rounds, SEGMENT)]),
        manifest["config"],
        manifest["plan"],
        manifest.get("frozen", {}),
    )


def segment(begin: int) -> str:
    """The name of the file with the records of round `begin` and the following ones.

    A file has at most SEGMENT rounds, so that the buffers that a checkpoint needs do not grow with the run.
    """
    return f"rounds-{begin // SEGMENT:03d}.safetensors"


def sync_folder(folder: Path) -> None:
    """Have the renames in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
