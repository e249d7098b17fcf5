"""Columns of examples as an Arrow table, and back without a copy: one table a node serves every host on it."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..workloads.base import Columns


def to_arrow(columns: Columns) -> pa.Table:
    """(n, …) arrays as fixed-size lists; shapes go into the fields' metadata."""
    arrays, fields = [], []
    for name, column in columns.items():
        flat = np.ascontiguousarray(column)
        width = flat.size // len(flat)
        values = pa.array(flat.reshape(-1))
        arrays.append(pa.FixedSizeListArray.from_arrays(values, width))
        fields.append(pa.field(name, arrays[-1].type, metadata={"shape": json.dumps(flat.shape[1:])}))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def from_arrow(table: pa.Table) -> dict[str, Tensor]:
    """Tensors (n, …) on the table's own memory: read-only, so nothing may be written to them."""
    columns = {}
    for field in table.schema:
        chunk = table[field.name].combine_chunks()
        values = chunk.flatten().to_numpy(zero_copy_only=True)
        shape = json.loads(field.metadata[b"shape"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only arrays; batches are gathered into fresh tensors
            columns[field.name] = torch.from_numpy(values).view(len(chunk), *shape)
    return columns
