"""Local steps of a block that are recorded once, as a CUDA graph, and replayed for every later step.

A small network's step is hundreds of kernels of some microseconds, and the processor needs longer to start each of them
than the GPU to run it. A replay starts all of them with one call. It reads its inputs from fixed places in memory,
into which they are copied before each step, and it writes the new local states over the old ones. So everything that
may differ from step to step is an input: batches, the number of the step, client states and the public state.

What is recorded must be what would have run. Each recording is therefore replayed once on the first inputs, and its
results are compared to the bit with those of the same step without it. Where they differ, or where the step cannot be
recorded, all steps run without recordings. So recordings never change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import type_and_first_line
from ..memory import is_out_of_memory
from .random_generators import same_bits

Step = Callable[[Any, Any], Any]
"""(inputs, local state) -> new local state, all of them trees of tensors; a pure function."""
Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""A function that records what a call does with tensors, and returns what does it again."""
MOST = 4
"""The largest number of recordings that are kept. The blocks of a task have two sizes, and batches of as many widths as
there are different largest batches, of which the newest are kept: each recording holds memory of the device."""
WARM_UPS = 3


def record_cuda_graph(call: Callable[[], None]) -> Replay:
    """Record a call as a CUDA graph. It runs a few times before on a stream of its own: libraries allocate their
    workspaces then, which is not possible while a graph is recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


class Differs(Exception):
    """A recorded step does not do what the step does."""


class Recording:
    """One recorded step: the fixed tensors of its inputs and of the local state, and its replay."""

    def __init__(self, step: Step, inputs: Any, local: Any, record: Record) -> None:
        """inputs, local: of the first step. Raises an exception of any kind if the step cannot be recorded, and Differs
        if a replay does something else."""
        self.inputs, self.local = fixed(inputs), fixed(local)
        expected = step(self.inputs, self.local)

        def call() -> None:
            copy_into(self.local, step(self.inputs, self.local))

        self.replay = record(call)
        copy_into(self.local, local)
        self.replay()
        pairs = zip(pytree.tree_leaves(self.local), pytree.tree_leaves(expected), strict=True)
        if not all(same_bits(found, wanted) for found, wanted in pairs):
            raise Differs("a replay gave other bits than the step")


class StepRecorder:
    """The recordings of a trainer's steps, by the shapes of their inputs. `refused`: why none is used, "" if they
    are."""

    def __init__(self, record: Record = record_cuda_graph) -> None:
        self.record, self.refused = record, ""
        self.kept: dict[Any, Recording] = {}

    def recording(self, step: Step, inputs: Any, local: Any) -> Recording | None:
        """The recording for inputs of these shapes, made if necessary; None where steps cannot be recorded."""
        key = shapes_of((inputs, local))
        if key not in self.kept and not self.refused:
            try:
                self.kept[key] = Recording(step, inputs, local, self.record)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.refused = type_and_first_line(error)
                self.kept.clear()
            while len(self.kept) > MOST:
                del self.kept[next(iter(self.kept))]
        return self.kept.get(key)


def fixed(state: Any) -> Any:
    """Copies of a state's tensors, each contiguous, whose places in memory will not change."""
    return pytree.tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), state)


def copy_into(state: Any, values: Any) -> None:
    """Write values over a state's tensors."""
    for place, value in zip(pytree.tree_leaves(state), pytree.tree_leaves(values), strict=True):
        place.copy_(value)


def shapes_of(state: Any) -> Any:
    """The structure of a state with the shapes and dtypes of its tensors; it can be a key of a dictionary."""
    leaves, spec = pytree.tree_flatten(state)
    return spec, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
