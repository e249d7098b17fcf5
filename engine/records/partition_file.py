"""Who had which rows, kept with a run: partition.arrow, a row a client with the numbers of its training rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...workloads.base import ClientIndex

MOST = 5_000_000
"""Rows and clients up to which all numbers are written; beyond, their digest alone: a start should not wait for it."""


def digest(client_index: ClientIndex) -> str:
    """Of who has which rows, in order: the same seed and settings give the same."""
    sha = hashlib.sha256()
    for array in (*client_index[:2], *(client_index.held or ())[:2]):
        sha.update(np.ascontiguousarray(array, dtype="<i8").data)
    return sha.hexdigest()


def keep(client_index: ClientIndex, folder: Path) -> None:
    """Write partition.json (clients, rows, sha256) and, unless there are too many, partition.arrow."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"clients": len(client_index.sizes), "rows": len(client_index.rows), "sha256": digest(client_index)}
    if client_index.held is not None:
        about["held_out"] = len(client_index.held.rows)
    (folder / "partition.json").write_text(json.dumps(about, indent=2) + "\n")
    if len(client_index.sizes) + len(client_index.rows) > MOST or client_index.rows.max(initial=0) >= 2**31:
        return
    lists = pa.ListArray.from_arrays(whole_numbers(client_index.offsets), whole_numbers(client_index.rows))
    table = pa.table({"rows": lists})
    with pa.ipc.new_file(
        folder / "partition.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as out:
        out.write_table(table)


def whole_numbers(array: np.ndarray) -> pa.Array:
    """int32; by its buffer, since pyarrow's conversions load pandas."""
    narrow = np.ascontiguousarray(array, dtype=np.int32)
    return pa.Array.from_buffers(pa.int32(), len(narrow), [None, pa.py_buffer(narrow)])


def kept(folder: Path) -> ClientIndex:
    """As `keep` wrote it."""
    with pa.ipc.open_file(folder / "partition.arrow") as file:
        lists = file.read_all()["rows"].combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return ClientIndex(offsets - offsets[0], lists.flatten().to_numpy().astype(np.int64))
