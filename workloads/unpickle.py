"""Pickles of arrays, read without running what they name.

The published CIFAR batches are Python 2 pickles, and loading a pickle runs any function that it names. Here only what
an array of numbers is made of can be named; anything else is refused before it is looked up.
"""

from __future__ import annotations

import codecs
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from .roots import damaged


def _reconstruct(kind: type, shape: tuple[int, ...], code: bytes | str) -> np.ndarray:
    """What numpy's pickles begin an array with; its numbers follow by `__setstate__`."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("an array of another class")
    return np.ndarray.__new__(np.ndarray, shape, code if isinstance(code, str) else code.decode("ascii"))


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"an encoding {encoding!r}")
    return codecs.encode(text, "latin1")


def _dtype(code: str | bytes, *flags: Any) -> np.dtype:
    name = code if isinstance(code, str) else code.decode("ascii")
    if name[:1] not in "uifb":
        raise pickle.UnpicklingError(f"numbers of type {name!r}")
    return np.dtype(name)


NAMED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,
}


class Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return NAMED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no array needs") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def arrays(data: bytes, where: Path) -> dict[str, Any]:
    """The dictionary in a pickle of numbers, text, lists and arrays."""
    try:
        found = Restricted(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises of any kind
        raise damaged(where, error) from error
    if not isinstance(found, dict):
        raise damaged(where, f"a {type(found).__name__}, not a dictionary")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
