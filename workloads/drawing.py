"""Initial weights: what a module draws when it is built follows from a seed, and the global generators of torch, NumPy
and Python keep their states."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import counted

T = TypeVar("T")


def initial(build: Callable[[], T], seed: int) -> T:
    """The module that `build()` returns, on the CPU, with weights that follow from the seed. The global generators of
    torch, NumPy and Python keep their states."""
    drawing = Drawing(torch.Generator().manual_seed(int(counted.key(seed, "init"))))
    with seeded_generators(seed), drawing, torch.device("cpu"):
        return build()


_building = threading.RLock()
"""Held while the generators of NumPy and Python, which all threads share, are those of a module that is built."""


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """A context in which the global generators of NumPy and Python follow from the seed. They have the states again
    that they had before."""
    with _building:
        states = np.random.get_state(), random.getstate()
        np.random.seed(int(counted.key(seed, "init", 1)) % 2**32)
        random.seed(int(counted.key(seed, "init", 2)))
        try:
            yield
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])


class Seeding:
    """What `torch.manual_seed` and its like find in the place of torch's global generator: the generator from which the
    calling thread draws in a context `Drawing`, the global one in all other threads."""

    def __init__(self) -> None:
        self.of_thread, self.lock, self.contexts = threading.local(), threading.Lock(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.of_thread, "generator", torch.default_generator), name)

    def count(self, change: int) -> None:
        """A context begins, 1, or ends, -1. torch has its own generator again when none is left."""
        with self.lock:
            self.contexts += change
            place: Any = torch.random
            place.default_generator = self if self.contexts else torch.default_generator


_seeding = Seeding()


class Drawing(TorchDispatchMode):
    """A context in which this thread draws from, and seeds, a generator on the CPU instead of torch's global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __enter__(self) -> Drawing:
        self.outer = getattr(_seeding.of_thread, "generator", torch.default_generator)
        _seeding.of_thread.generator = self.generator
        _seeding.count(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _seeding.count(-1)
        _seeding.of_thread.generator = self.outer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler has to pass over this class, for which every process would load it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        places = [value.device for value in args if isinstance(value, Tensor)] + [kwargs.get("device") or "cpu"]
        if any(torch.device(place).type != "cpu" for place in places):
            return func(*args, **kwargs)
        if (drawing := with_generator(func)) is not None:
            return drawing(*args, **kwargs, generator=self.generator)
        own = torch.default_generator.get_state()  # an operation like dropout has no such argument
        torch.default_generator.set_state(self.generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(own)


@lru_cache
def with_generator(operation: Any) -> Any:
    """The overload of an operation that has the same arguments and a generator; None if there is none."""
    names = [argument.name for argument in operation._schema.arguments]
    if "generator" in names:
        return operation
    for overload in map(operation.overloadpacket.__getattr__, operation.overloadpacket.overloads()):
        others = [argument.name for argument in overload._schema.arguments]
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return overload
    return None
