"""Columns of examples as an Arrow table, frozen tensors as arrays, and both back without a copy. One table per node
serves all workers on it, and so does one array.

The tables are made from buffers, since pyarrow's own conversions load pandas into every worker.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import torch
from torch import Tensor

from ....workloads.workload import Columns


def to_arrow(columns: Columns) -> pa.Table:
    """A table of (n, …) arrays as fixed-size lists. It shares the memory of the arrays.

    Shapes and dtypes are in the metadata of the fields.
    """
    arrays, fields = [], []
    for name, column in columns.items():
        array = np.ascontiguousarray(column)
        kind = pa.from_numpy_dtype(array.dtype)
        values = pa.Array.from_buffers(kind, array.size, [None, pa.py_buffer(array)])
        arrays.append(pa.FixedSizeListArray.from_arrays(values, array.size // len(array)))
        metadata = {"shape": json.dumps(array.shape[1:]), "dtype": array.dtype.str}
        fields.append(pa.field(name, arrays[-1].type, metadata=metadata))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def from_arrow(table: pa.Table, copied: bool = False) -> dict[str, Tensor]:
    """The columns as tensors (n, …).

    By default they share the memory of the table, which other processes read too: whoever makes batches must gather
    rows into new tensors and never hand out a view. copied: the tensors have memory of their own.
    """
    columns = {}
    for field in table.schema:
        chunks = table[field.name]  # combine_chunks copies even a single chunk
        chunk = chunks.chunk(0) if chunks.num_chunks == 1 and not copied else chunks.combine_chunks()
        values = chunk.flatten()
        dtype, shape = np.dtype(field.metadata[b"dtype"].decode()), json.loads(field.metadata[b"shape"])
        array = np.frombuffer(values.buffers()[1], dtype, count=len(values), offset=values.offset * dtype.itemsize)
        columns[field.name] = read_only(array).view(len(chunk), *shape)
    return columns


def read_only(array: np.ndarray) -> Tensor:
    """A tensor in the memory of an array of the object store, which nobody may write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only arrays
        return torch.from_numpy(array)


class Shared(NamedTuple):
    """A tensor in Ray's object store. NumPy has no bfloat16, whose bits are there as whole numbers."""

    reference: Any
    bits_of_bfloat16: bool

    @staticmethod
    def put(tensor: Tensor) -> Shared:
        as_bits = tensor.dtype == torch.bfloat16
        return Shared(ray.put((tensor.view(torch.int16) if as_bits else tensor).numpy()), as_bits)


def put(tensors: Mapping[str, Tensor]) -> dict[str, Shared]:
    """name -> the reference to each frozen tensor in Ray's object store, where one copy serves all processes of a node.
    No more than one of them is in the memory of this process at a time, if `tensors` reads each when it is asked for.
    """
    return {name: Shared.put(tensors[name].contiguous()) for name in tensors}


def shared(references: Mapping[str, Shared]) -> dict[str, Tensor]:
    """The tensors of `put`, in the memory of the object store."""
    arrays: Any = ray.get([each.reference for each in references.values()])
    tensors = {name: read_only(array) for name, array in zip(references, arrays, strict=True)}
    as_bits = [name for name, each in references.items() if each.bits_of_bfloat16]
    return tensors | {name: tensors[name].view(torch.bfloat16) for name in as_bits}
