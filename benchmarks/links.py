"""Measures what it costs to send a model to the agents of two nodes, and to bring the sums of their clients back.

    python benchmarks/links.py
    python benchmarks/links.py --parameters 10000

Both go once by calls of Ray, and once by the sockets of engine/backends/ray/links.py. Each line gives the median and
the 90th percentile of the time for both nodes at once, and the processor time that all processes of this machine took
for it.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import nodes
import numpy as np
import psutil
import ray

from fedfleet.engine.backends.ray.links import Address, Link, Listener
from fedfleet.engine.backends.ray.local_ray import QUIET
from fedfleet.engine.backends.ray.placement import on_node


class Echo:
    """An actor that takes a model of float32 and returns sums of float64."""

    def __init__(self, parameters: int) -> None:
        self.sums = [np.zeros(parameters)]

    def take(self, model: Any) -> None: ...

    def sum(self) -> list[np.ndarray]:
        return self.sums

    def connect(self, address: Address, name: int) -> None:
        self.link = Link.to(address, name)
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        """Answer a model by a short message, and anything else by sums."""
        while True:
            self.link.send("taken" if isinstance(self.link.receive(), list) else self.sums)


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
        listener = Listener(ray.util.get_node_ip_address())
        ray.get([actor.connect.remote(listener.address, name) for name, actor in enumerate(actors)])
        links = [listener.link(name) for name in range(len(actors))]

        def put() -> None:
            reference = ray.put(model)
            ray.get([actor.take.remote(reference) for actor in actors])

        def fetch() -> None:
            ray.get([actor.sum.remote() for actor in actors])

        def exchange(message: Any) -> None:
            for link in links:
                link.send(message)
            for link in links:
                link.receive()

        print(f"{asked.parameters:,} parameters, two nodes{'':13} median     90 %  processor ms")
        measure("model, calls of Ray", put, asked.times)
        measure("model, sockets", lambda: exchange(model), asked.times)
        measure("sums, calls of Ray", fetch, asked.times)
        measure("sums, sockets", lambda: exchange("sums"), asked.times)
        listener.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
