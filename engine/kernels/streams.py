"""The clients of a block beside each other on a GPU, each with the kernels that it has alone.

A network whose kernels keep a card busy for one client gains nothing by blocks under vmap, whose kernels may be slower.
What it needs is that the processor does not start each kernel, and that a kernel which leaves a part of the card idle
runs beside those of another client. So the step of each client is given to one of some streams, and the step of the
block, with all of them, is one CUDA graph. In a block of one client, that is its own step from a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils import _pytree as pytree

from .cuda_graph import Graph

STREAMS = 4
"""The largest number of streams, and of clients in a block for which a measurement tries them."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Streams(Graph):
    """Torch's kernels on a CUDA device, each client of a block on one of some streams, replayed from a CUDA graph."""

    name: ClassVar[str] = "streams"
    blocks_of_one: ClassVar[bool] = True

    def suits(self, block: int) -> bool:
        return block <= STREAMS

    def together(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def of_block(*given: Any) -> Any:
            leaves, spec = pytree.tree_flatten(given)
            clients = [pytree.tree_unflatten(list(own), spec) for own in zip(*leaves, strict=True)]
            calls = [functools.partial(step, *client) for client in clients]
            results = beside(calls) if leaves[0].is_cuda else [call() for call in calls]
            return pytree.tree_map(lambda *parts: torch.stack(parts), *results)

        return of_block


def beside(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of some calls, each of which starts its kernels on one of STREAMS streams of the current device.

    The first stream is the current one. The others begin after what was given to it before, and what is given to it
    afterwards waits for them.
    """
    main = torch.cuda.current_stream()
    used = [main, *(side_stream(main.device_index, number) for number in range(1, min(STREAMS, len(calls))))]
    for side in used[1:]:
        side.wait_stream(main)
    results: list[Result] = []
    for number, call in enumerate(calls):
        with torch.cuda.stream(used[number % len(used)]):
            results.append(call())
    for side in used[1:]:
        main.wait_stream(side)
    return results


@functools.cache
def side_stream(device: int, number: int) -> torch.cuda.Stream:
    """One of the streams beside the current one. They stay as long as the process, see `recording_stream`."""
    return torch.cuda.Stream(device)
