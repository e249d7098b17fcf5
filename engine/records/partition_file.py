"""Which client has which rows, stored with a run: partition.arrow, one list of row numbers per client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...workloads.client_index import ClientIndex
from ..storage.sha256 import sha256
from .heterogeneity import measures, spread

MOST_NUMBERS = 5_000_000
"""The number of rows and clients up to which partition.arrow and measures are written. A larger partition would delay
the start of a run, so only its digest is written."""


def partition_digest(client_index: ClientIndex) -> str:
    """SHA-256 of which client has which rows, in order. The same seed and settings give the same digest."""
    arrays = (*client_index[:2], *(client_index.held or ())[:2], *(client_index.validation or ())[:2])
    drift, pieces = client_index.drift, [np.ascontiguousarray(array, dtype="<i8").data for array in arrays]
    if drift is not None:
        arrays = (*client_index.whole[:2], np.array([drift.window, drift.move]).view(np.int64))
        pieces += [np.ascontiguousarray(array, dtype="<i8").data for array in arrays]
    if client_index.unseen is not None:
        pieces.append(memoryview(partition_digest(client_index.unseen).encode()))
    return sha256(pieces)


def about_partition(client_index: ClientIndex, label: np.ndarray | None = None) -> dict[str, Any]:
    """What partition.json has: clients, rows, sha256 and, unless that takes long, how different the clients are. Of
    rows that drift, it has all that a client trains on in some round. label: (n,), of all training rows, if they have
    labels."""
    drift, digest, unseen = client_index.drift, partition_digest(client_index), client_index.unseen
    client_index = client_index.whole
    about: dict[str, Any] = {
        "clients": len(client_index.sizes),
        "rows": len(client_index.rows),
        "sha256": digest,
    }
    if drift is not None:
        about["drift"] = {"window": drift.window, "move": drift.move}
    if unseen is not None:
        about["unseen"] = len(unseen.sizes)
    if client_index.held is not None:
        about["held_out"] = len(client_index.held.rows)
    if client_index.validation is not None:
        about["validation"] = len(client_index.validation.rows)
    if is_small(client_index):
        about["heterogeneity"] = {name: spread(values) for name, values in measures(client_index, label).items()}
    return about


def is_small(client_index: ClientIndex) -> bool:
    """Whether a partition is measured and written, see MOST_NUMBERS."""
    return len(client_index.sizes) + len(client_index.rows) <= MOST_NUMBERS


def write_partition(client_index: ClientIndex, folder: Path, label: np.ndarray | None = None) -> None:
    """Write partition.json, see `about_partition`, and, unless it would be too large, partition.arrow. Clients that are
    never trained with are the last ones in the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "partition.json").write_text(json.dumps(about_partition(client_index, label), indent=2) + "\n")
    client_index, unseen = client_index.whole, client_index.unseen
    if not is_small(client_index) or client_index.rows.max(initial=0) >= 2**31:
        return
    if unseen is not None:
        client_index = client_index.and_then(unseen.whole)
    lists = pa.ListArray.from_arrays(int32_array(client_index.offsets), int32_array(client_index.rows))
    table = pa.table({"rows": lists})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(folder / "partition.arrow", table.schema, options=options) as out:
        out.write_table(table)


def int32_array(array: np.ndarray) -> pa.Array:
    """An Arrow array made from a buffer, since pyarrow's own conversions load pandas."""
    narrow = np.ascontiguousarray(array, dtype=np.int32)
    return pa.Array.from_buffers(pa.int32(), len(narrow), [None, pa.py_buffer(narrow)])


def read_partition(folder: Path) -> ClientIndex:
    """The rows of every client from partition.arrow."""
    with pa.ipc.open_file(folder / "partition.arrow") as file:
        lists = file.read_all()["rows"].combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return ClientIndex(offsets - offsets[0], lists.flatten().to_numpy().astype(np.int64))
