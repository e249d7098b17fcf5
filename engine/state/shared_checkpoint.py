"""Checkpoints that are complete by themselves, in a folder that other machines reach (`checkpoint.folder`).

    FOLDER/RUN ID/round-000050/   server.safetensors, table.safetensors, rounds-000.safetensors, …, manifest.json last
    FOLDER/RUN ID/rows/           packs of clients' rows, named by their digest

The run's own checkpoints pin rows of its store; these hold them. A row is written once: the table says in which pack it
is, and only rows whose digest has changed since the last checkpoint here go into new packs. What is left of packs that
are mostly out of date is written again, so the folder holds little more than twice what is alive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, first_line
from ..records.history import History
from ..storage.object_store import Folder, join_url
from ..storage.secrets import redacted
from .checkpoint import SEGMENT, Snapshot, name_of, seal, segment
from .row_files import DIGEST, RowFiles, digests

FORMAT = 2
PACK_BYTES = 32 * 2**20
THIN = 0.5
"""A pack of whose rows fewer than this share are in use is given up."""
MANIFEST = "manifest.json"


class Index(NamedTuple):
    """Where each client's row is in the folder."""

    digest: np.ndarray  # (N, 32)
    pack: np.ndarray  # (N,), -1 for none: a place in `packs`
    place: np.ndarray  # (N,) in the pack
    packs: list[list[Any]]  # [name, rows]

    @staticmethod
    def empty(clients: int) -> Index:
        return Index(
            np.zeros((clients, DIGEST), np.uint8), np.full(clients, -1, np.int64), np.zeros(clients, np.int64), []
        )


class Copies:
    """rows: the run's store, None where clients keep nothing. beside: the run's folder, whose small files go along."""

    def __init__(self, url: str, run_id: str, keep: int, rows: RowFiles | None, beside: Path) -> None:
        self.url, self.keep, self.rows, self.beside = join_url(url, run_id), keep, rows, beside
        self.folder = Folder(self.url)
        self.index: Index | None = None  # of the newest one here
        self.packs: dict[int, set[str]] = {}  # round -> packs that its checkpoint names

    def check(self) -> None:
        """ConfigError where nothing can be written."""
        try:
            self.folder.write("run.json", b"")
        except Exception as error:  # of whatever kind a file system raises
            why = redacted(first_line(error))
            raise ConfigError(f"checkpoint.folder: {self.url} cannot be written to ({why})") from None

    # --- writing ------------------------------------------------------------------------------------------------------
    def put(self, snapshot: Snapshot) -> None:
        """Write one, then remove what is not needed any more. OSError where that cannot be."""
        if self.index is None:
            self._survey(len(snapshot.row))
        if snapshot.round in self.packs:
            return
        folder, index = name_of(snapshot.round), self._with_rows(snapshot)
        files = dict(self._files(snapshot, index))
        for name, data in files.items():
            self.folder.write(f"{folder}/{name}", data)
        manifest = {"format": FORMAT, "round": snapshot.round, "config": snapshot.config, "packs": index.packs}
        manifest |= {"files": {name: digest(data) for name, data in files.items()}, "beside": small(self.beside)}
        manifest["columns"] = list(snapshot.records.columns)
        manifest["plan"] = snapshot.plan
        manifest["digest"] = seal(manifest)
        self.folder.write(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
        self.index, self.packs[snapshot.round] = index, {name for name, _ in index.packs}
        self._prune()

    def _survey(self, clients: int) -> None:
        """What an earlier part of the run has left here."""
        self.index = Index.empty(clients)
        for number in rounds(self.folder):
            try:
                manifest, files = read(self.folder, number)
            except Damaged:
                continue
            self.index, self.packs[number] = index_of(manifest, files), {name for name, _ in manifest["packs"]}

    def _with_rows(self, snapshot: Snapshot) -> Index:
        """The index with new packs for the rows that are not here."""
        assert self.index is not None
        held, old = snapshot.row >= 0, self.index
        same = held & (old.pack >= 0) & (old.digest == snapshot.digest).all(1) if len(snapshot.digest) else ~held
        used = np.bincount(old.pack[same], minlength=len(old.packs))
        good = np.array([n >= THIN * size for n, (_, size) in zip(used, old.packs, strict=True)], dtype=bool)
        kept = same.copy()
        kept[same] = good[old.pack[same]] if len(good) else False
        again = np.cumsum(good) - 1  # the numbers of the packs that stay
        pack, place = np.full(len(held), -1, np.int64), np.zeros(len(held), np.int64)
        pack[kept], place[kept] = again[old.pack[kept]] if len(good) else -1, old.place[kept]
        packs = [each for each, stays in zip(old.packs, good, strict=True) if stays]
        for clients in self._chunks(np.flatnonzero(held & ~kept)):
            pack[clients], place[clients] = len(packs), np.arange(len(clients))
            packs.append([self._pack(snapshot, clients), len(clients)])
        return Index(snapshot.digest, pack, place, packs)

    def _chunks(self, clients: np.ndarray) -> Iterator[np.ndarray]:
        if self.rows is not None:
            size = max(1, PACK_BYTES // max(1, self.rows.width))
            for begin in range(0, len(clients), size):
                yield clients[begin : begin + size]

    def _pack(self, snapshot: Snapshot, clients: np.ndarray) -> str:
        """Write these clients' rows; the pack's name."""
        from safetensors.numpy import save

        assert self.rows is not None
        packed = self.rows.packed(snapshot.row[clients])
        for client, data in zip(clients, packed, strict=True):
            if (digests([[data]])[0] != snapshot.digest[client]).any():
                raise OSError(f"the state of client {client} is not what was written")
        data = save({"rows": packed})
        name = digest(data)
        self.folder.write(pack_file(name), data)
        return name

    def _files(self, snapshot: Snapshot, index: Index) -> Iterator[tuple[str, bytes]]:
        from safetensors.numpy import save as save_arrays
        from safetensors.torch import save

        yield "server.safetensors", save({f"leaf{i}": leaf.contiguous() for i, leaf in enumerate(snapshot.server)})
        table = {"digest": index.digest, "pack": index.pack, "place": index.place, "visits": snapshot.visits}
        yield "table.safetensors", save_arrays({k: np.ascontiguousarray(v) for k, v in table.items()})
        for begin in range(0, len(snapshot.records), SEGMENT):
            yield segment(begin), save_arrays(snapshot.records.packed(begin, begin + SEGMENT))

    def _prune(self) -> None:
        """Checkpoints beyond `keep` and damaged ones, manifest first; then packs that nothing names."""
        for number in sorted(self.packs)[: -self.keep]:
            del self.packs[number]
        for number in rounds(self.folder):
            if number not in self.packs:
                self.folder.remove(f"{name_of(number)}/{MANIFEST}")
                self.folder.remove(name_of(number))
        named = {pack_file(name) for packs in self.packs.values() for name in packs}
        for name in self.folder.names("rows"):
            if f"rows/{name}" not in named:
                self.folder.remove(f"rows/{name}")

    # --- reading ------------------------------------------------------------------------------------------------------
    def newest(self) -> Iterator[tuple[int, Snapshot | None, str]]:
        """(round, the checkpoint or None, what is wrong with it), the newest first. The rows of one that is sound are
        in the store when it comes, from row 0 on."""
        for number in reversed(rounds(self.folder)):
            try:
                yield number, self._fetch(*read(self.folder, number)), ""
            except Damaged as error:
                yield number, None, str(error)

    def _fetch(self, manifest: dict[str, Any], files: dict[str, bytes]) -> Snapshot:
        from safetensors.numpy import load as load_arrays
        from safetensors.torch import load

        index, server = index_of(manifest, files), load(files["server.safetensors"])
        held = index.pack >= 0
        row = np.where(held, np.cumsum(held) - 1, -1)
        for number, (name, _) in enumerate(manifest["packs"]):
            self._unpack(name, index.place[index.pack == number], row[index.pack == number])
        parts = [load_arrays(files[segment(at)]) for at in range(0, manifest["round"], SEGMENT)]
        visits = load_arrays(files["table.safetensors"])["visits"]
        leaves = [server[f"leaf{i}"] for i in range(len(server))]
        records = History.of(manifest["columns"], parts)
        config, plan = manifest["config"], manifest["plan"]
        return Snapshot(manifest["round"], leaves, row, index.digest, visits, records, config, plan)

    def _unpack(self, name: str, places: np.ndarray, rows: np.ndarray) -> None:
        from safetensors.numpy import load

        try:
            data = self.folder.read(pack_file(name))
        except OSError as error:
            raise Damaged(f"pack {name[:12]} cannot be read: {error}") from error
        if digest(data) != name:
            raise Damaged(f"pack {name[:12]} is not what was written")
        if self.rows is not None:
            self.rows.unpack(rows, load(data)["rows"][places])


class Damaged(Exception):
    """What is wrong with a checkpoint."""


def rounds(folder: Folder) -> list[int]:
    """Of the checkpoints in a run's folder, sound or not, oldest first."""
    return [int(name[6:]) for name in folder.names() if name.startswith("round-") and name[6:].isdigit()]


def sealed_plan(url: str, run_id: str) -> dict[str, Any] | None:
    """The plan of the newest checkpoint of a run that is kept at `url` (`checkpoint.folder`) and whose manifest agrees
    with its digest; None without one, or where the folder cannot be read."""
    try:
        folder = Folder(join_url(url, run_id))
        numbers = rounds(folder)
    except OSError:
        return None
    for number in reversed(numbers):
        with suppress(Damaged):
            return read_manifest(folder, number)["plan"]
    return None


def read(folder: Folder, number: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the manifest, files by name) as they were written, else Damaged."""
    manifest, files = read_manifest(folder, number), {}
    for name, expected in manifest["files"].items():
        try:
            files[name] = folder.read(f"{name_of(number)}/{name}")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from error
        if digest(files[name]) != expected:
            raise Damaged(f"{name} is not what was written")
    return manifest, files


def read_manifest(folder: Folder, number: int) -> dict[str, Any]:
    try:
        manifest = json.loads(folder.read(f"{name_of(number)}/{MANIFEST}"))
        if not isinstance(manifest, dict):
            raise Damaged(f"{MANIFEST} holds {type(manifest).__name__} and no object")
        sealed = manifest.pop("digest", None)
        if sealed != seal(manifest) or manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} is not what was written")
        return manifest
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except Damaged:
        raise
    except Exception as error:  # damage shows itself in any kind of error
        raise Damaged(f"{MANIFEST}: {type(error).__name__}: {error}") from error


def index_of(manifest: dict[str, Any], files: dict[str, bytes]) -> Index:
    from safetensors.numpy import load

    table = load(files["table.safetensors"])
    return Index(table["digest"], table["pack"], table["place"], manifest["packs"])


def pack_file(name: str) -> str:
    return f"rows/{name}.safetensors"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def small(folder: Path) -> dict[str, str]:
    """The run's id, its path, what a tracker has noted: without them another machine could not go on alike."""
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("[!.]*.json"))}
