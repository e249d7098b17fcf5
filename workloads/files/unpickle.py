"""Reads pickles of arrays without running the functions that they name.

The published CIFAR batches are Python 2 pickles, and loading a pickle runs any function that it names. Even a loader
that allows nothing but functions of NumPy is not safe: a pickle may give a dtype or an array any state, and NumPy does
not check it. Therefore no pickle is loaded here. Its instructions are read one by one, and only those that make
numbers, texts, lists, dictionaries and plain arrays of numbers are executed, on objects of this module. Anything else
is refused.
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .roots import damaged

NUMBERS = re.compile(r"[uifb][0-9]+")
"""Codes of the types that an array may have: unsigned and signed integers, floats, booleans."""
BYTE_ORDERS = ("<", ">", "=", "|")


class Refused(ValueError):
    """A pickle holds something that no pickle of arrays needs."""


class Kind:
    """The type of the numbers of an array. Its state in a pickle may set the byte order, and nothing else."""

    def __init__(self, code: Any = None, *flags: Any) -> None:
        name = text(code)
        if NUMBERS.fullmatch(name) is None:
            raise Refused(f"numbers of type {name[:20]!r}")
        try:
            self.dtype = np.dtype(name)
        except TypeError:
            raise Refused(f"numbers of type {name[:20]!r}") from None

    def set(self, state: Any) -> None:
        """state: (version, byte order, and six entries that only records, subarrays, strings and dates use)."""
        if not isinstance(state, tuple) or len(state) != 8 or state[2:] != (None, None, None, -1, -1, 0):
            raise Refused("a type with a state that no type of numbers has")
        order = text(state[1])
        if order not in BYTE_ORDERS:
            raise Refused("numbers with bytes in an unknown order")
        self.dtype = self.dtype.newbyteorder(order)


class Array:
    """An array. `values` is None until the pickle sets its state."""

    def __init__(self, kind: Any = None, *shape_and_code: Any) -> None:
        if kind is not NAMED["numpy", "ndarray"]:
            raise Refused("an array of another class")
        self.values: np.ndarray | None = None

    def set(self, state: Any) -> None:
        """state: (version, shape, Kind, whether the first axis varies fastest, bytes)."""
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], Kind):
            raise Refused("an array with a state that no array of numbers has")
        _, shape, kind, transposed, data = state
        if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
            raise Refused("an array without a shape")
        data = data.encode("latin1") if isinstance(data, str) else data
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * kind.dtype.itemsize:
            raise Refused("an array whose bytes do not fit its shape")
        self.values = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if transposed else "C").copy()


class Named:
    """A name in a pickle. `call`: what runs instead of the named function when the pickle calls it."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call


def encoded(value: Any = None, encoding: Any = "latin1") -> bytes:
    """Replaces `_codecs.encode`, by which protocol 2 writes bytes."""
    if not isinstance(value, str) or encoding != "latin1":
        raise Refused("an encoding other than latin1")
    return value.encode("latin1")


def no_bytes() -> bytes:
    """Replaces `bytes`, by which protocol 2 writes empty bytes."""
    return b""


NAMED = {
    ("numpy", "ndarray"): Named(),
    ("numpy", "dtype"): Named(Kind),
    ("numpy.core.multiarray", "_reconstruct"): Named(Array),
    ("numpy._core.multiarray", "_reconstruct"): Named(Array),
    ("_codecs", "encode"): Named(encoded),
    ("__builtin__", "bytes"): Named(no_bytes),
}


def text(value: Any) -> str:
    """A value that must be text or, in pickles of Python 2, bytes; as text."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise Refused(f"{type(value).__name__} in the place of text")
    return value


MARK = object()
GIVEN = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
"""Instructions that push their argument on the stack."""
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "MARK": lambda: MARK,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
KEPT = {"PUT", "BINPUT", "LONG_BINPUT"}
FETCHED = {"GET", "BINGET", "LONG_BINGET"}
NOTHING = {"PROTO", "FRAME"}
OWN = {"TUPLE", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "STACK_GLOBAL", "REDUCE", "BUILD", "POP"}
"""Instructions that a method of `Reader` executes, `_` and the name in lower case."""


class Reader:
    """Executes the known instructions of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.left = 0  # bytes that arrays may still take; a pickle cannot need more than it has itself

    def read(self, data: bytes) -> Any:
        """The object in the pickle. Raises ValueError, IndexError or KeyError if it is no pickle of arrays."""
        self.left = 2 * len(data)
        for code, argument, _ in pickletools.genops(data):
            if code.name == "STOP":
                return self.stack.pop()
            self._step(code.name, argument)
        raise Refused("it has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in GIVEN:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in TUPLES:
            self._tuple(len(stack) - TUPLES[name])
        elif name in KEPT:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in FETCHED:
            stack.append(self.memo[int(argument)])
        elif name == "GLOBAL":
            stack.append(named(*argument.split(" ", 1)))
        elif name in OWN:
            getattr(self, f"_{name.lower()}")()
        elif name not in NOTHING:
            raise Refused(f"an instruction {name}, which no array needs")

    def _marked(self) -> list[Any]:
        """Pop the objects above the last mark, and the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise Refused("an instruction without its mark")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def _tuple(self, begin: int | None = None) -> None:
        if begin is None:
            found = self._marked()
        else:
            if begin < 0:
                raise Refused("a tuple of nothing")
            found = self.stack[begin:]
            del self.stack[begin:]
        if any(value is MARK for value in found):
            raise Refused("a mark inside a tuple")
        self.stack.append(tuple(found))

    def _list(self) -> None:
        self.stack.append(self._marked())

    def _dict(self) -> None:
        found = self._marked()
        self.stack.append({})
        self._set(found)

    def _append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused("an item of what is no list")
        self.stack[-1].extend(values)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._marked())

    def _set(self, pairs: list[Any]) -> None:
        """Set entries of a dictionary. Keys must be texts or numbers: the hash of a deeply nested one may overflow the
        stack."""
        target = self.stack[-1]
        keys, values = pairs[::2], pairs[1::2]
        if type(target) is not dict or len(keys) != len(values):
            raise Refused("an entry of what is no dictionary")
        if not all(isinstance(key, str | bytes | int) for key in keys):
            raise Refused("an entry whose name is no text")
        target.update(zip(keys, values, strict=True))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(named(text(module), text(name)))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Named) or function.call is None or type(arguments) is not tuple:
            raise Refused("a call of what is no function")
        found = function.call(*arguments)
        self._pay(len(found) if isinstance(found, bytes) else 0)
        self.stack.append(found)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Kind | Array):
            raise Refused("a state of what has none")
        target.set(state)
        self._pay(target.values.nbytes if isinstance(target, Array) and target.values is not None else 0)

    def _pay(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Refused("the same bytes over and over")

    def _pop(self) -> None:
        self.stack.pop()


def named(module: str, name: str) -> Named:
    """The replacement of module.name; Refused if there is none."""
    try:
        return NAMED[module, name]
    except KeyError:
        raise Refused(f"it names {module}.{name}, which no array needs") from None


def arrays(data: bytes, where: Path) -> dict[str, Any]:
    """The dictionary in a pickle of numbers, texts, lists and arrays. where: its file, for the message of the
    ValueError that is raised otherwise."""
    try:
        found = Reader().read(data)
        if not isinstance(found, dict):
            raise Refused(f"a {type(found).__name__}, not a dictionary")
        return {text(key): plain(value) for key, value in found.items()}
    except Exception as error:  # a damaged pickle may raise any exception
        raise damaged(where, error) from None


def plain(value: Any) -> Any:
    """A value of the dictionary; an Array becomes a numpy array."""
    if isinstance(value, Array):
        if value.values is None:
            raise Refused("an array without its numbers")
        return value.values
    if isinstance(value, Kind | Named) or value is MARK:
        raise Refused("an entry that is no data")
    return value
