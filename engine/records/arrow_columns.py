"""Columns of examples as an Arrow table, and back without a copy: one table a node serves every worker on it.

By buffers, not by pyarrow's conversions, which load pandas into every worker.
"""

from __future__ import annotations

import json
import warnings

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ...workloads.base import Columns


def to_arrow(columns: Columns) -> pa.Table:
    """(n, …) arrays as fixed-size lists on the arrays' own memory; shapes and dtypes go into the fields' metadata."""
    arrays, fields = [], []
    for name, column in columns.items():
        whole = np.ascontiguousarray(column)
        kind = pa.from_numpy_dtype(whole.dtype)
        values = pa.Array.from_buffers(kind, whole.size, [None, pa.py_buffer(whole)])
        arrays.append(pa.FixedSizeListArray.from_arrays(values, whole.size // len(whole)))
        about = {"shape": json.dumps(whole.shape[1:]), "dtype": whole.dtype.str}
        fields.append(pa.field(name, arrays[-1].type, metadata=about))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def from_arrow(table: pa.Table) -> dict[str, Tensor]:
    """Tensors (n, …) on the table's own memory: read-only, so nothing may be written to them."""
    columns = {}
    for field in table.schema:
        chunk = table[field.name].combine_chunks()
        values = chunk.flatten()
        dtype, shape = np.dtype(field.metadata[b"dtype"].decode()), json.loads(field.metadata[b"shape"])
        array = np.frombuffer(values.buffers()[1], dtype, count=len(values), offset=values.offset * dtype.itemsize)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only arrays; batches are gathered into fresh tensors
            columns[field.name] = torch.from_numpy(array).view(len(chunk), *shape)
    return columns
