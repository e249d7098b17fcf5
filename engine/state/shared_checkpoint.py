"""Copies of checkpoints in a folder that other machines reach (`checkpoint.folder`).

    FOLDER/RUN ID/round-000050/   server.safetensors, table.safetensors, rounds-000.safetensors, …, manifest.json last
    FOLDER/RUN ID/rows/           packs: files of client states, named by their digests

The checkpoints in the run's own folder pin rows of its store. A copy contains the rows. The table says which pack has
the row of which client. Only rows whose digest has changed since the last copy go into new packs. When most rows of a
pack are out of date, the others are written into a new pack, so the folder holds little more than twice the bytes that
are in use.
"""

from __future__ import annotations

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
from ..storage.sha256 import sha256, sha256_of_json
from .checkpoint import SEGMENT, Snapshot, name_of, segment
from .row_files import DIGEST, RowFiles, digests

FORMAT = 3
"""The version of the format of a copy's files."""
PACK_BYTES = 32 * 2**20
"""The size of a pack, at most (unless a single row is larger)."""
LEAST_USED = 0.5
"""A pack is dropped if a smaller share of its rows than this is in use; these rows are written into a new pack."""
MANIFEST = "manifest.json"


class Index(NamedTuple):
    """Where the row of each of N clients is in the folder."""

    digest: np.ndarray  # (N, 16) the digest of each row
    pack: np.ndarray  # (N,) the position of its pack in `packs`, -1 for a client without a row
    position: np.ndarray  # (N,) its position in the pack; "place" in the file
    packs: list[list[Any]]  # [name, number of rows]

    @staticmethod
    def empty(clients: int) -> Index:
        return Index(
            np.zeros((clients, DIGEST), np.uint8), np.full(clients, -1, np.int64), np.zeros(clients, np.int64), []
        )


class Copies:
    """Writes and reads the copies of one run's checkpoints."""

    def __init__(self, url: str, run_id: str, keep: int, rows: RowFiles | None, directory: Path) -> None:
        """url: `checkpoint.folder`. keep: how many copies are kept. rows: the run's store of client states, None if
        clients keep no state. directory: the run's folder; every copy contains its small files."""
        self.url, self.keep, self.rows, self.directory = join_url(url, run_id), keep, rows, directory
        self.folder = Folder(self.url)
        self.index: Index | None = None  # of the newest copy in the folder; None before the folder was read
        self.packs: dict[int, set[str]] = {}  # round of a copy -> the packs that it uses

    def check(self) -> None:
        """Raise ConfigError if nothing can be written to the folder."""
        try:
            self.folder.write("run.json", b"")
        except Exception as error:  # of whatever kind a file system raises
            why = redacted(first_line(error))
            raise ConfigError(f"checkpoint.folder: {self.url} cannot be written to ({why})") from None

    # --- writing ------------------------------------------------------------------------------------------------------
    def put(self, snapshot: Snapshot) -> None:
        """Write a copy, then remove what is not needed any more. Raises OSError if that is not possible."""
        if self.index is None:
            self._read_index(len(snapshot.row))
        if snapshot.round in self.packs:
            return
        folder, index = name_of(snapshot.round), self._write_packs(snapshot)
        files = dict(self._files(snapshot, index))
        for name, data in files.items():
            self.folder.write(f"{folder}/{name}", data)
        manifest = {"format": FORMAT, "round": snapshot.round, "config": snapshot.config, "packs": index.packs}
        manifest |= {"files": {name: sha256(data) for name, data in files.items()}}
        manifest["beside"] = small_files(self.directory)
        manifest["columns"] = list(snapshot.records.columns)
        manifest["plan"] = snapshot.plan
        if snapshot.frozen:
            manifest["frozen"] = dict(snapshot.frozen)
        manifest["digest"] = sha256_of_json(manifest)
        self.folder.write(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
        self.index, self.packs[snapshot.round] = index, {name for name, _ in index.packs}
        self._prune()

    def _read_index(self, clients: int) -> None:
        """Find out which copies an earlier process of the run has left in the folder."""
        self.index = Index.empty(clients)
        for number in rounds(self.folder):
            try:
                manifest, files = read(self.folder, number)
            except Damaged:
                continue
            self.index, self.packs[number] = index_of(manifest, files), {name for name, _ in manifest["packs"]}

    def _write_packs(self, snapshot: Snapshot) -> Index:
        """Write new packs with the rows that the folder lacks. Returns the index of all rows of the snapshot."""
        assert self.index is not None
        has_row, old = snapshot.row >= 0, self.index
        unchanged = has_row & (old.pack >= 0)
        unchanged &= (old.digest == snapshot.digest).all(1) if len(snapshot.digest) else ~has_row
        used = np.bincount(old.pack[unchanged], minlength=len(old.packs))
        stays = np.array([n >= LEAST_USED * size for n, (_, size) in zip(used, old.packs, strict=True)], dtype=bool)
        reused = unchanged.copy()  # whether the row is in a pack that stays
        reused[unchanged] = stays[old.pack[unchanged]] if len(stays) else False
        new_number = np.cumsum(stays) - 1  # for each pack that stays
        pack, position = np.full(len(has_row), -1, np.int64), np.zeros(len(has_row), np.int64)
        pack[reused], position[reused] = new_number[old.pack[reused]] if len(stays) else -1, old.position[reused]
        packs = [entry for entry, pack_stays in zip(old.packs, stays, strict=True) if pack_stays]
        for clients in self._chunks(np.flatnonzero(has_row & ~reused)):
            pack[clients], position[clients] = len(packs), np.arange(len(clients))
            packs.append([self._write_pack(snapshot, clients), len(clients)])
        return Index(snapshot.digest, pack, position, packs)

    def _chunks(self, clients: np.ndarray) -> Iterator[np.ndarray]:
        """The clients in groups whose rows have the size of a pack."""
        if self.rows is not None:
            size = max(1, PACK_BYTES // max(1, self.rows.width))
            for begin in range(0, len(clients), size):
                yield clients[begin : begin + size]

    def _write_pack(self, snapshot: Snapshot, clients: np.ndarray) -> str:
        """Write the rows of these clients as a pack. Returns its name, which is its digest.

        Raises OSError if a row does not match the digest in the snapshot.
        """
        from safetensors.numpy import save

        assert self.rows is not None
        packed = self.rows.packed(snapshot.row[clients])
        for client, data in zip(clients, packed, strict=True):
            if (digests([[data]])[0] != snapshot.digest[client]).any():
                raise OSError(f"the state of client {client} does not match its digest")
        data = save({"rows": packed})
        name = sha256(data)
        self.folder.write(pack_file(name), data)
        return name

    def _files(self, snapshot: Snapshot, index: Index) -> Iterator[tuple[str, bytes]]:
        """(name, content) of the files of a copy, without its manifest."""
        from safetensors.numpy import save as save_arrays
        from safetensors.torch import save

        yield "server.safetensors", save({f"leaf{i}": leaf.contiguous() for i, leaf in enumerate(snapshot.server)})
        table = {"digest": index.digest, "pack": index.pack, "place": index.position, "visits": snapshot.visits}
        yield "table.safetensors", save_arrays({k: np.ascontiguousarray(v) for k, v in table.items()})
        for begin in range(0, len(snapshot.records), SEGMENT):
            yield segment(begin), save_arrays(snapshot.records.packed(begin, begin + SEGMENT))

    def _prune(self) -> None:
        """Remove copies beyond `keep` and damaged ones, their manifests first; then the packs that no copy uses."""
        for number in sorted(self.packs)[: -self.keep]:
            del self.packs[number]
        for number in rounds(self.folder):
            if number not in self.packs:
                self.folder.remove(f"{name_of(number)}/{MANIFEST}")
                self.folder.remove(name_of(number))
        in_use = {pack_file(name) for packs in self.packs.values() for name in packs}
        for name in self.folder.names("rows"):
            if f"rows/{name}" not in in_use:
                self.folder.remove(f"rows/{name}")

    # --- reading ------------------------------------------------------------------------------------------------------
    def newest(self) -> Iterator[tuple[int, Snapshot | None, str]]:
        """(round, the checkpoint or None, what is wrong with it) of every copy, the newest first.

        When a sound one is returned, its rows have been written to the store, from row 0 on.
        """
        for number in reversed(rounds(self.folder)):
            try:
                yield number, self._restore(*read(self.folder, number)), ""
            except Damaged as error:
                yield number, None, str(error)

    def _restore(self, manifest: dict[str, Any], files: dict[str, bytes]) -> Snapshot:
        """Write the rows of a copy to the store, and make a snapshot of its files."""
        from safetensors.numpy import load as load_arrays
        from safetensors.torch import load

        index, server = index_of(manifest, files), load(files["server.safetensors"])
        has_row = index.pack >= 0
        row = np.where(has_row, np.cumsum(has_row) - 1, -1)
        for number, (name, _) in enumerate(manifest["packs"]):
            self._unpack(name, index.position[index.pack == number], row[index.pack == number])
        segments = [load_arrays(files[segment(begin)]) for begin in range(0, manifest["round"], SEGMENT)]
        visits = load_arrays(files["table.safetensors"])["visits"]
        leaves = [server[f"leaf{i}"] for i in range(len(server))]
        records = History.of(manifest["columns"], segments)
        config, plan, frozen = manifest["config"], manifest["plan"], manifest.get("frozen", {})
        return Snapshot(manifest["round"], leaves, row, index.digest, visits, records, config, plan, frozen)

    def _unpack(self, name: str, positions: np.ndarray, rows: np.ndarray) -> None:
        """Copy the states at these positions of a pack into `rows` of the store. Raises Damaged."""
        from safetensors.numpy import load

        try:
            data = self.folder.read(pack_file(name))
        except OSError as error:
            raise Damaged(f"pack {name[:12]} cannot be read: {error}") from error
        if sha256(data) != name:
            raise Damaged(f"pack {name[:12]} does not match its digest")
        if self.rows is not None:
            self.rows.unpack(rows, load(data)["rows"][positions])


class Damaged(Exception):
    """A copy that cannot be used; its text says what is wrong with it."""


def rounds(folder: Folder) -> list[int]:
    """The rounds of which a run's folder has copies, sound or not, the oldest first."""
    return [int(name[6:]) for name in folder.names() if name.startswith("round-") and name[6:].isdigit()]


def sealed_plan(url: str, run_id: str) -> dict[str, Any] | None:
    """The execution plan of the newest copy of a run whose manifest matches its digest.

    url: `checkpoint.folder`. None if there is no such copy, or if the folder cannot be read.
    """
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
    """(the manifest of the copy of round `number`, the contents of its files by name). Raises Damaged."""
    manifest, files = read_manifest(folder, number), {}
    for name, expected in manifest["files"].items():
        try:
            files[name] = folder.read(f"{name_of(number)}/{name}")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from error
        if sha256(files[name]) != expected:
            raise Damaged(f"{name} does not match its digest")
    return manifest, files


def read_manifest(folder: Folder, number: int) -> dict[str, Any]:
    """The manifest of the copy of round `number`, without its digest. Raises Damaged."""
    try:
        manifest = json.loads(folder.read(f"{name_of(number)}/{MANIFEST}"))
        if not isinstance(manifest, dict):
            raise Damaged(f"{MANIFEST} holds a {type(manifest).__name__}, not an object")
        sealed = manifest.pop("digest", None)
        if sealed != sha256_of_json(manifest) or manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} does not match its digest")
        return manifest
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except Damaged:
        raise
    except Exception as error:  # damage shows itself in any kind of error
        raise Damaged(f"{MANIFEST}: {type(error).__name__}: {error}") from error


def index_of(manifest: dict[str, Any], files: dict[str, bytes]) -> Index:
    """The index of a copy, from what `read` returned."""
    from safetensors.numpy import load

    table = load(files["table.safetensors"])
    return Index(table["digest"], table["pack"], table["place"], manifest["packs"])


def pack_file(name: str) -> str:
    """The path of a pack in a run's folder."""
    return f"rows/{name}.safetensors"


def small_files(folder: Path) -> dict[str, str]:
    """name -> text of the small JSON files in a run's folder: the run's id, its execution plan, notes of trackers.

    Another machine needs them to continue the run to the same bits.
    """
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("[!.]*.json"))}
