"""Tensors as the bytes of a file in the format of safetensors, https://huggingface.co/docs/safetensors.

The library's own `save` allocates a copy in Rust, where an allocation that fails ends the whole process. Checkpoints
are written while other threads train, so memory may well run out there. Here Python allocates, and raises MemoryError.
The bytes are those of the library, which also reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Type -> its code. A file has the tensors in the order of their types here, and by name among those of one type."""


def tensor_bytes(tensors: Mapping[str, Tensor | np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of a file with these tensors, of any shapes and layouts, on any device, and these metadata.

    Raises MemoryError if there is no memory for it, and ValueError for a type that the format has no code for.
    """
    types = {name: type_of(value) for name, value in tensors.items()}
    order = list(CODES)
    names = sorted(tensors, key=lambda name: (order.index(types[name]), name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    content, end = [], 0
    for name in names:
        flat = flat_bytes(tensors[name])
        begin, end = end, end + len(flat)
        shape = list(tensors[name].shape)
        header[name] = {"dtype": CODES[types[name]], "shape": shape, "data_offsets": [begin, end]}
        content.append(flat)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *content])


def type_of(value: Tensor | np.ndarray) -> str:
    """The name of a tensor's type in `CODES`. Raises ValueError if it is not there."""
    name = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else value.dtype.name
    if name not in CODES:
        raise ValueError(f"the format of safetensors has no code for numbers of type {name}")
    return name


def flat_bytes(value: Tensor | np.ndarray) -> memoryview:
    """The numbers of a tensor in row-major order, little-endian, without a copy where they lie so already."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data
