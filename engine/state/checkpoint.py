"""Checkpoints: what a run needs to go on to the same bits.

    DIR/checkpoints/round-000050/   server.safetensors, table.safetensors, rounds-000.safetensors, …, manifest.json
    DIR/state/                      the clients' rows, shared with the running store: a checkpoint pins its rows

Written beside and renamed when all is on the disk; the manifest has a digest of every file, of itself, and the table
has one of every row. A checkpoint that does not agree with its digests is passed over for the one before it, and
removed once there is a newer one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..records.history import History
from ..storage.secrets import redacted
from .table import Table

FORMAT = 3
SEGMENT = 1000
NAME = re.compile(r"round-[0-9]{6,}")


class Snapshot(NamedTuple):
    """The driver's state after `round`."""

    round: int
    server: list[Tensor]  # leaves of (public, private)
    row: np.ndarray  # (N,)
    digest: np.ndarray  # (N, 32)
    visits: np.ndarray  # (N,)
    records: History
    config: dict[str, Any]
    plan: dict[str, Any]
    """What the bits depend on besides the configuration: the number of clients in a block, and the kernels."""


Loaded = tuple[Snapshot | None, list[str]]


class Elsewhere(Protocol):
    """Copies of checkpoints that need nothing of this machine; see `copies`."""

    url: str

    def put(self, snapshot: Snapshot) -> None: ...

    def newest(self) -> Iterator[tuple[int, Snapshot | None, str]]: ...


class Checkpoints:
    """Saves in a thread of its own, so that rounds go on; at most one is under way. One thread for all of a run's: the
    C library keeps memory by thread, and a new one for each let the driver grow by 0.1 MiB a checkpoint."""

    def __init__(self, directory: str, keep: int, table: Table, copies: Elsewhere | None = None) -> None:
        self.folder, self.keep, self.table = Path(directory) / "checkpoints", keep, table
        self.copies = copies
        self.pinned: dict[int, np.ndarray] = {}
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        self.under_way: Snapshot | None = None
        self.error: str = ""
        self.missed: list[str] = []  # what to say of copies

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write; the one before must have been finished."""
        self.table.pin(snapshot.row)
        self.under_way = snapshot
        self.writing = self.writer.submit(self._write, snapshot)

    def finish(self) -> list[str]:
        """Wait for the one under way; drop those beyond `keep`. What went wrong is returned as events."""
        if self.writing is None or self.under_way is None:
            return []
        self.writing.result()
        snapshot, self.writing, self.under_way = self.under_way, None, None
        missed, self.missed = self.missed, []
        if self.error:
            self.table.unpin(snapshot.row)
            reason, self.error = self.error, ""
            return [
                f"round {snapshot.round}: no checkpoint could be written ({reason}); the one before it stays",
                *missed,
            ]
        self._hold(snapshot.round, snapshot.row)
        for number in sorted(self.pinned)[: -self.keep]:
            shutil.rmtree(self.folder / name_of(number), ignore_errors=True)
            self.table.unpin(self.pinned.pop(number))
        for folder in written(self.folder.parent):
            if folder.name not in map(name_of, self.pinned):
                shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        return missed

    def _hold(self, number: int, row: np.ndarray) -> None:
        if number in self.pinned:
            self.table.unpin(self.pinned[number])
        self.pinned[number] = row

    def _write(self, snapshot: Snapshot) -> None:
        self._write_here(snapshot)
        if self.copies is not None:
            try:
                self.copies.put(snapshot)
            except Exception as error:  # of whatever kind a file system raises
                why = redacted(str(error).splitlines()[0] if str(error) else type(error).__name__)
                self.missed = [f"round {snapshot.round}: no copy in {self.copies.url} ({why})"]

    def _write_here(self, snapshot: Snapshot) -> None:
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
        """The newest that agrees with its digests, and what was passed over. Older sound ones stay pinned.

        verify: a sentence on what is wrong with the rows of a checkpoint, or "".
        """
        events: list[str] = []
        found: Snapshot | None = None
        for folder in reversed(written(self.folder.parent)):
            snapshot, wrong = read(folder)
            if snapshot is not None and found is None:
                wrong = verify(snapshot)
            if snapshot is None or wrong:
                instead = "" if found else "; the one before it is used"
                events.append(f"checkpoint {folder.name} is damaged ({wrong}){instead}")
                continue
            found = found or snapshot
            self.pinned[snapshot.round] = snapshot.row
        return (found, events) if found or self.copies is None else self._load_copy(self.copies, verify, events)

    def _load_copy(self, copies: Elsewhere, verify: Callable[[Snapshot], str], events: list[str]) -> Loaded:
        """Where there is none here, the newest sound one elsewhere."""
        try:
            for number, snapshot, wrong in copies.newest():
                if snapshot is not None and not (wrong := verify(snapshot)):
                    self.table.brought(snapshot.row[snapshot.row >= 0])
                    return snapshot, [*events, f"takes round {number} from {copies.url}"]
                events.append(f"checkpoint {name_of(number)} in {copies.url} is damaged ({wrong})")
        except OSError as error:
            events.append(f"{copies.url} cannot be read ({redacted(str(error))})")
        return None, events

    def remove(self) -> None:
        self.finish()
        remove_all(self.folder.parent)


def written(directory: str | Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest first."""
    folders = (Path(directory) / "checkpoints").glob("round-*")
    return sorted(folder for folder in folders if NAME.fullmatch(folder.name))


def remove_all(directory: str | Path) -> None:
    """Remove a run's checkpoints, half-written ones too; their folder, unless there is something else in it."""
    folder = Path(directory) / "checkpoints"
    for half_written in folder.glob(".round-*"):
        if NAME.fullmatch(half_written.name[1:]):
            shutil.rmtree(half_written, ignore_errors=True)
    for each in written(directory):
        shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


def name_of(number: int) -> str:
    return f"round-{number:06d}"


def write(folder: Path, snapshot: Snapshot) -> None:
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import save_file

    save_file({f"leaf{i}": leaf.contiguous() for i, leaf in enumerate(snapshot.server)}, folder / "server.safetensors")
    table = {"row": snapshot.row, "digest": snapshot.digest, "visits": snapshot.visits}
    save_file({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in table.items()}, folder / "table.safetensors")
    for begin in range(0, len(snapshot.records), SEGMENT):
        save_arrays(snapshot.records.packed(begin, begin + SEGMENT), folder / segment(begin))
    files = {path.name: digest(path) for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "round": snapshot.round, "config": snapshot.config, "files": files}
    manifest["columns"] = list(snapshot.records.columns)  # of the rounds
    manifest["plan"] = snapshot.plan
    manifest["digest"] = seal(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sealed_plan(directory: str) -> dict[str, Any] | None:
    """The plan of the newest checkpoint of a run's folder whose manifest agrees with its digest, None without one."""
    for folder in reversed(written(directory)):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            manifest = json.loads((folder / "manifest.json").read_text())
            if manifest.pop("digest") == seal(manifest) and manifest["format"] == FORMAT:
                return manifest["plan"]
    return None


def read(folder: Path) -> tuple[Snapshot | None, str]:
    """(the snapshot, "") or (None, what is wrong)."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        if not isinstance(manifest, dict):
            return None, f"manifest.json holds {type(manifest).__name__} and no object"
        sealed = manifest.pop("digest", None)
        if sealed != seal(manifest):
            return None, "manifest.json is not what was written"
        if manifest["format"] != FORMAT:
            return None, f"format {manifest['format']} is not {FORMAT}"
        for name, expected in manifest["files"].items():
            if digest(folder / name) != expected:
                return None, f"{name} is not what was written"
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
    )


def segment(begin: int) -> str:
    """Rounds go by the thousand, so that what a checkpoint takes for buffers does not grow with the run."""
    return f"rounds-{begin // SEGMENT:03d}.safetensors"


def digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """A rename is on the disk once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
