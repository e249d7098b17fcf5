"""Copies of a run's checkpoints in a folder that other machines reach (`checkpoint.folder`).

The checkpoints in the run's own folder pin rows of its store. A copy contains the rows, in packs: blobs with the states
of some clients. A row in the table of a copy counts through the packs that its manifest names. Only rows whose digest
has changed since the last copy go into new packs. When most rows of a pack are out of date, the others are written into
a new pack, so that the folder holds little more than twice the bytes that are in use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, first_line
from ..storage.object_store import join_url, open_folder
from ..storage.secrets import redacted
from ..storage.tensor_bytes import tensor_bytes
from .checkpoint_store import FORMAT, CheckpointStore, Snapshot
from .row_files import DIGEST, RowFiles, digests

PACK_BYTES = 32 * 2**20
"""The size of a pack, at most (unless a single row is larger)."""
LEAST_USED = 0.5
"""A pack is dropped if a smaller share of its rows than this is in use; these rows are written into a new pack."""
Packs = list[list[Any]]
"""[digest, number of rows] of each pack."""


class Packed(NamedTuple):
    """Where the states of N clients are in the folder."""

    row: np.ndarray  # (N,) counted through the packs, -1 for a client without a state
    digest: np.ndarray  # (N, 16) of each client's row
    packs: Packs


class Copies:
    """Writes and reads the copies of one run's checkpoints."""

    def __init__(self, url: str, run_id: str, keep: int, rows: RowFiles | None, directory: Path) -> None:
        """url: `checkpoint.folder`. keep: how many copies are kept. rows: the run's store of client states, None if
        clients keep no state. directory: the run's folder; every copy contains its small files."""
        self.url, self.keep, self.rows, self.directory = join_url(url, run_id), keep, rows, directory
        self.store = CheckpointStore(open_folder(self.url))
        self.packed: Packed | None = None  # the rows of the newest copy; None before the folder was read

    def check(self) -> None:
        """Raise ConfigError if nothing can be written to the folder."""
        try:
            self.store.folder.write("run.json", b"")
        except Exception as error:  # of whatever kind a file system raises
            why = redacted(first_line(error))
            raise ConfigError(
                f"checkpoint.folder: {self.url} cannot be written to ({why}); choose another folder, or allow it"
            ) from None

    # --- writing ------------------------------------------------------------------------------------------------------
    def put(self, snapshot: Snapshot) -> None:
        """Write a copy, then remove what is not needed any more. Raises OSError if that is not possible."""
        if self.packed is None:
            self.packed = self._newest_packed(len(snapshot.row))
        if snapshot.round in self.store.manifests:
            return
        packed = self._pack(snapshot, self.packed)
        self.store.write(snapshot._replace(row=packed.row), packs=packed.packs, run_files=small_files(self.directory))
        self.packed = packed
        self.store.keep(sorted(self.store.manifests)[-self.keep :])

    def _newest_packed(self, clients: int) -> Packed:
        """The rows of the newest copy that an earlier process of the run has left in the folder."""
        found: Packed | None = None
        for copy in self.store.sound(self.store.read):  # all of them, so that the store knows which blobs they name
            manifest = self.store.manifests[copy.round]
            if found is None and manifest["format"] == FORMAT:
                found = Packed(copy.row, copy.digest, manifest["packs"])
        return found or Packed(np.full(clients, -1, np.int64), np.zeros((clients, DIGEST), np.uint8), [])

    def _pack(self, snapshot: Snapshot, before: Packed) -> Packed:
        """Write new packs with the rows that the folder lacks. before: the rows of the copy before this one."""
        row, packs = np.full(len(snapshot.row), -1, np.int64), Packs()
        if self.rows is None:
            return Packed(row, snapshot.digest, packs)
        counts = np.array([count for _, count in before.packs], dtype=np.int64)
        pack = np.searchsorted(counts.cumsum(), before.row, "right")  # that has the row of each client
        same = (snapshot.row >= 0) & (before.row >= 0) & (before.digest == snapshot.digest).all(1)
        stays = np.bincount(pack[same], minlength=len(counts)) >= LEAST_USED * counts
        reused = same.copy()
        reused[same] = stays[pack[same]]
        row[reused] = (before.row - np.append(np.where(stays, 0, counts).cumsum(), 0)[pack])[reused]
        packs += [entry for entry, pack_stays in zip(before.packs, stays, strict=True) if pack_stays]
        missing, size = np.flatnonzero((snapshot.row >= 0) & ~reused), max(1, PACK_BYTES // max(1, self.rows.width))
        row[missing] = counts[stays].sum() + np.arange(len(missing))
        for begin in range(0, len(missing), size):
            clients = missing[begin : begin + size]
            packs.append([self._write_pack(snapshot, clients), len(clients)])
        return Packed(row, snapshot.digest, packs)

    def _write_pack(self, snapshot: Snapshot, clients: np.ndarray) -> str:
        """Write the rows of these clients as a pack. Returns its digest.

        Raises OSError if a row does not match the digest in the snapshot.
        """
        assert self.rows is not None
        rows = self.rows.packed(snapshot.row[clients])
        for client, data in zip(clients, rows, strict=True):
            if (digests([[data]])[0] != snapshot.digest[client]).any():
                raise OSError(f"the state of client {client} does not match its digest")
        return self.store.put(tensor_bytes({"rows": rows}))

    # --- reading ------------------------------------------------------------------------------------------------------
    def restore(self, number: int) -> Snapshot:
        """The copy of a round, whose rows are written to the run's store, from row 0 on. Raises Damaged."""
        from safetensors.numpy import load

        copy = self.store.read(number)
        manifest, has_row = self.store.manifests[number], copy.row >= 0
        row, end = np.where(has_row, np.cumsum(has_row) - 1, -1), 0
        for digest, count in manifest["packs"]:
            begin, end = end, end + count
            data = self.store.blob(manifest, f"pack {digest[:12]}", digest)
            clients = np.flatnonzero((copy.row >= begin) & (copy.row < end))
            if self.rows is not None:
                self.rows.unpack(row[clients], load(data)["rows"][copy.row[clients] - begin])
        return copy._replace(row=row)


def small_files(folder: Path) -> dict[str, str]:
    """name -> text of the small JSON files in a run's folder: the run's id, its execution plan, notes of trackers.

    Another machine needs them to continue the run to the same bits.
    """
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("[!.]*.json"))}
