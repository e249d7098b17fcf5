"""The local training of a block that is recorded once, as CUDA graphs, and replayed for every later block.

A small network's step is hundreds of kernels of some microseconds, and the processor needs longer to start each of them
than the GPU to run it. A replay starts all of them with one call. What begins the visit of the clients and what
finishes it are recorded too, each in a graph of its own, because a visit has any number of steps. Replays read their
inputs from fixed places in memory, into which they are copied before the visit, and every step writes the new local
states over the old ones, with the number of the next step among them. So everything that may differ from visit to visit
is an input: batches, client states and the public state.

What is recorded must be what would have run. On a device, the bits of a sum may depend on where its numbers lie in
memory, on the memory that a library has for its work, and on whatever a part took from anywhere else than its inputs,
and some of it shows in later rounds only: a momentum is zero in round 1. So no replay is used before recordings for the
same shapes have been proven in `PROVEN_ROUNDS` rounds. In each of them, all parts of the visit of a block run both
ways, from the same inputs, and their results are compared to the bit; meanwhile the run goes on with the parts
themselves. One more block does so in the rounds that are 4, 8, 16 … rounds after the first one. Where the results
differ, or where a part cannot be recorded, all blocks are trained without recordings.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ..errors import type_and_first_line
from ..memory import is_out_of_memory
from .agreement import agrees

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


class Visit(Protocol):
    """The local training of a block in a round, as pure functions of trees of tensors. It can be a key of a dictionary.

    `form`: recordings of visits of the same form, with inputs of the same shapes, are proven together.
    """

    @property
    def form(self) -> Hashable: ...

    def begin(self, inputs: Any, /) -> Any:
        """The local state before the first step."""
        ...

    def step(self, inputs: Any, local: Any, /) -> Any:
        """The local state after another step."""
        ...

    def finish(self, inputs: Any, local: Any, /) -> Any:
        """The result, from the local state after the last step."""
        ...


class Recording:
    """A recorded visit: the fixed tensors of its inputs, of the local state and of its result, and the replays of its
    parts. `rounds`: those in which recordings of its form and shapes were proven. `proven`: whether this one was, in
    the last block that ran both ways."""

    def __init__(self, visit: Visit, inputs: Any, record: Record, rounds: set[int]) -> None:
        """inputs: of the first visit. Raises an exception of any kind if the visit cannot be recorded."""
        given = fixed(inputs)
        local = fixed(visit.begin(given))
        result = fixed(visit.finish(given, local))
        self.inputs: Any = given
        self.local: Any = local
        self.result: Any = result
        self.rounds: set[int] = rounds
        self.proven: bool = False
        self.begin: Replay = record(lambda: copy_into(local, visit.begin(given)))
        self.step: Replay = record(lambda: copy_into(local, apart(visit.step(given, local), local)))
        self.finish: Replay = record(lambda: copy_into(result, visit.finish(given, local)))

    def begins(self, inputs: Any, expected: Any) -> bool:
        """Whether a replay begins the visit with these inputs as its first part did, to the bit."""
        copy_into(self.inputs, inputs)
        self.begin()
        return agrees(pytree.tree_leaves(expected), pytree.tree_leaves(self.local))

    def steps(self, inputs: Any, local: Any, expected: Any) -> bool:
        """Whether a replay from these inputs and this local state gives what the step gave, to the bit."""
        copy_into(self.inputs, inputs)
        copy_into(self.local, local)
        self.step()
        return agrees(pytree.tree_leaves(expected), pytree.tree_leaves(self.local))

    def finishes(self, inputs: Any, local: Any, expected: Any) -> bool:
        """Whether a replay finishes a visit with these inputs and this local state as its last part did, to the bit."""
        copy_into(self.inputs, inputs)
        copy_into(self.local, local)
        self.finish()
        return agrees(pytree.tree_leaves(expected), pytree.tree_leaves(self.result))


class VisitRecorder:
    """The recordings of a worker's blocks, by the visit and the shapes of its inputs. Where a schedule changes the
    method in every round, they are made anew.

    `round`: the round of the blocks that run. `rounds`: in which recordings for some form and shapes were proven, see
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

    def recording(self, visit: Visit, inputs: Any) -> Recording | None:
        """The recording for inputs of these shapes, made if necessary; None where visits cannot be recorded."""
        if self.refused:
            self.kept.clear()
            return None
        shapes = shapes_of(inputs)
        key = (visit, shapes)
        if key not in self.kept:
            rounds = self.rounds.setdefault((visit.form, shapes), set())
            try:
                self.kept[key] = Recording(visit, inputs, self.record, rounds)
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
        """Whether replays may take the place of what is recorded."""
        return recording.proven and len(recording.rounds) >= self.enough

    def is_to_be_proven(self, recording: Recording) -> bool:
        """Whether the block that runs is to be compared with a recording: if it is new, has been proven in too few
        rounds, or if it is time for another proof."""
        if recording.proven and self.round in recording.rounds:
            return False
        return not self.can_use(recording) or (self.round - min(recording.rounds)).bit_count() == 1

    def proved(self, recording: Recording) -> None:
        """Note that all parts of a block's visit agreed with a recording."""
        recording.proven = True
        recording.rounds.add(self.round)


def fixed(state: Any) -> Any:
    """Copies of a state's tensors, each contiguous, whose places in memory will not change."""
    return pytree.tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), state)


def apart(values: Any, state: Any) -> Any:
    """The values, with copies of those that are in the memory of one of the state's tensors: written over the state, an
    earlier value would change a later one. Methods keep what was the model before a step, for example."""
    own = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(state)}
    return pytree.tree_map(lambda value: value.clone() if value.untyped_storage().data_ptr() in own else value, values)


def copy_into(state: Any, values: Any) -> None:
    """Write values over a state's tensors."""
    for place, value in zip(pytree.tree_leaves(state), pytree.tree_leaves(values), strict=True):
        place.copy_(value)


def shapes_of(state: Any) -> Any:
    """The structure of a state with the shapes and dtypes of its tensors; it can be a key of a dictionary."""
    leaves, spec = pytree.tree_flatten(state)
    return spec, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
