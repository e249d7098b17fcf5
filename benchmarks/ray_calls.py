"""Measures what it costs to send a model to two Ray nodes, and to bring the sums of its clients back.

    python benchmarks/ray_calls.py
    python benchmarks/ray_calls.py --parameters 10000

The model goes once through Ray's shared memory, and once in pieces that travel with the call, see
engine/backends/ray/pieces.py. Each line gives the median and the 90th percentile of the time of a call to both nodes at
once, and the processor time that all processes of this machine took for the call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import nodes
import numpy as np
import psutil
import ray

from fedfleet.engine.backends.ray.connect import QUIET
from fedfleet.engine.backends.ray.pieces import as_arguments, cut, from_arguments, joined, pieces_for
from fedfleet.engine.backends.ray.placement import on_node


class Echo:
    """An actor that takes a model of float32 and returns sums of float64."""

    def __init__(self, parameters: int) -> None:
        self.sums = [np.zeros(parameters)]

    def take(self, model: Any) -> None: ...

    def take_pieces(self, *pieces: Any) -> None:
        from_arguments(pieces)

    def sum(self) -> list[np.ndarray]:
        return self.sums

    def sum_in_pieces(self, room: int) -> Any:
        pieces = cut(self.sums, room)
        assert pieces is not None
        return (*pieces, *[b""] * (room - len(pieces)))


def processor_seconds() -> float:
    return sum(p.info["cpu_times"].user + p.info["cpu_times"].system for p in psutil.process_iter(["cpu_times"]))


def measure(name: str, call: Callable[[], Any], times: int) -> None:
    for _ in range(5):
        call()
    before, seconds = processor_seconds(), []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    spent = (processor_seconds() - before) / times
    print(f"{name:36} {1e3 * median(seconds):6.2f} ms  {1e3 * quantiles(seconds, n=10)[-1]:6.2f}  {1e3 * spent:6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, default=61_706, help="of the model")
    parser.add_argument("--times", type=int, default=100)
    asked = parser.parse_args()
    with nodes.cluster([1, 1]) as address:
        ray.init(address=address, **QUIET)
        remote: Any = ray.remote(num_cpus=0)(Echo)
        actors = [
            remote.options(scheduling_strategy=on_node(node["NodeID"])).remote(asked.parameters) for node in ray.nodes()
        ]
        model = [np.zeros(asked.parameters, dtype=np.float32)]
        room = pieces_for(8 * asked.parameters + 1000)

        def put() -> None:
            reference = ray.put(model)
            ray.get([actor.take.remote(reference) for actor in actors])

        def send() -> None:
            arguments = as_arguments(model)
            ray.get([actor.take_pieces.remote(*arguments) for actor in actors])

        def fetch() -> None:
            ray.get([actor.sum.remote() for actor in actors])

        def fetch_pieces() -> None:
            for told in [actor.sum_in_pieces.options(num_returns=room).remote(room) for actor in actors]:
                joined(ray.get(told))

        print(f"{asked.parameters:,} parameters, two nodes{'':13} median     90 %  processor ms")
        measure("model, Ray's shared memory", put, asked.times)
        measure("model, in pieces", send, asked.times)
        measure("sums, Ray's shared memory", fetch, asked.times)
        measure("sums, in pieces", fetch_pieces, asked.times)
        ray.shutdown()


if __name__ == "__main__":
    main()
