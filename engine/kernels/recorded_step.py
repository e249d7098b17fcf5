"""Local steps of a block that are recorded once, as a CUDA graph, and replayed for every later step.

A small network's step is hundreds of kernels of some microseconds, and the processor needs longer to start each of them
than the GPU to run it. A replay starts all of them with one call. It reads its inputs from fixed places in memory,
into which they are copied before each step, and it writes the new local states over the old ones. So everything that
may differ from step to step is an input: batches, the number of the step, client states and the public state.

What is recorded must be what would have run. On a device, the bits of a sum may depend on where its numbers lie in
memory, on the memory that a library has for its work, and on whatever the step took from anywhere else than its inputs,
and some of it shows in later rounds only: a momentum is zero in round 1. So no replay is used before recordings for the
same shapes have been proven in `PROVEN_ROUNDS` rounds. In each of them, all steps of a block run both ways, from the
same inputs, and their results are compared to the bit; meanwhile the run goes on with the steps themselves. One more
block does so in the rounds that are 4, 8, 16 … rounds after the first one. Where the results differ, or where the step
cannot be recorded, all steps run without recordings.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import type_and_first_line
from ..memory import is_out_of_memory
from .agreement import agrees

Step = Callable[[Any, Any], Any]
"""(inputs, local state) -> new local state, all of them trees of tensors; a pure function."""
Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""A function that records what a call does with tensors, and returns what does it again."""
MOST = 4
"""The largest number of recordings that are kept. The blocks of a task have two sizes, and batches of as many widths as
there are different largest batches, of which the newest are kept: each recording holds memory of the device."""
PROVEN_ROUNDS = 3
"""The number of rounds in which recordings for the same shapes are proven before a replay is used. In the third one the
states of the server and of clients have come from states that were no longer initial."""
WARM_UPS = 3


@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """The stream on which all graphs of a device are recorded. cuBLAS and cuBLASLt keep a workspace (32 MiB each) for
    every stream on which they have run, as long as the process lives, so that there is not one stream a recording."""
    return torch.cuda.Stream(device)


def record_cuda_graph(call: Callable[[], None]) -> Replay:
    """Record a call as a CUDA graph on the current device. It runs a few times before on the same stream: libraries
    allocate their workspaces then, which is not possible while a graph is recorded."""
    side = recording_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a graph of an earlier recording must not be freed while this one is recorded
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        call()
    return graph.replay


class Recording:
    """One recorded step: the fixed tensors of its inputs and of the local state, and its replay. `rounds`: those in
    which recordings for the same shapes were proven. `proven`: whether this one was, in the last block that ran both
    ways."""

    def __init__(self, step: Step, inputs: Any, local: Any, record: Record, rounds: set[int]) -> None:
        """inputs, local: of the first step. Raises an exception of any kind if the step cannot be recorded."""
        self.inputs: Any = fixed(inputs)
        self.local: Any = fixed(local)
        self.rounds: set[int] = rounds
        self.proven: bool = False

        def call() -> None:
            copy_into(self.local, step(self.inputs, self.local))

        self.replay: Replay = record(call)

    def gives(self, inputs: Any, local: Any, expected: Any) -> bool:
        """Whether a replay from these inputs and this local state gives what the step gave, to the bit."""
        copy_into(self.inputs, inputs)
        copy_into(self.local, local)
        self.replay()
        return agrees(pytree.tree_leaves(expected), pytree.tree_leaves(self.local))


class StepRecorder:
    """The recordings of a worker's steps, by the step and the shapes of its inputs. Where a schedule changes the method
    in every round, they are made anew.

    `round`: the round of the blocks that run. `rounds`: in which recordings for some shapes were proven, see
    `Recording`. `enough`: the number of these rounds from which on replays are used. `refused`: why none is used, "" if
    they are.
    """

    def __init__(self, record: Record = record_cuda_graph, enough: int = PROVEN_ROUNDS) -> None:
        self.record: Record = record
        self.enough: int = enough
        self.round: int = 0
        self.kept: dict[Any, Recording] = {}
        self.rounds: dict[Any, set[int]] = {}
        self.refused: str = ""

    def recording(self, step: Step, inputs: Any, local: Any) -> Recording | None:
        """The recording for inputs of these shapes, made if necessary; None where steps cannot be recorded."""
        if self.refused:
            self.kept.clear()
            return None
        shapes = shapes_of((inputs, local))
        key = (step, shapes)
        if key not in self.kept:
            rounds = self.rounds.setdefault(shapes, set())
            try:
                self.kept[key] = Recording(step, inputs, local, self.record, rounds)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.refuse(type_and_first_line(error))
            while len(self.kept) > MOST:
                del self.kept[next(iter(self.kept))]
        return self.kept.get(key)

    def refuse(self, why: str) -> None:
        """Use no recording from here on."""
        self.refused = why
        self.kept.clear()

    def can_use(self, recording: Recording) -> bool:
        """Whether replays may take the place of steps."""
        return recording.proven and len(recording.rounds) >= self.enough

    def is_to_be_proven(self, recording: Recording) -> bool:
        """Whether the steps of the block that runs are to be compared with a recording: if it is new, has been proven
        in too few rounds, or if it is time for another proof."""
        if recording.proven and self.round in recording.rounds:
            return False
        return not self.can_use(recording) or (self.round - min(recording.rounds)).bit_count() == 1

    def proved(self, recording: Recording) -> None:
        """Note that all steps of a block agreed with a recording."""
        recording.proven = True
        recording.rounds.add(self.round)


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
