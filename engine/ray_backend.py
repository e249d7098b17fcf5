"""The fleet on Ray: a driver actor per run, client hosts as actors with fractional shares of processors and cards."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from ..workloads.base import Columns, Parts
from .columns import from_arrow, to_arrow
from .config import Engine
from .driver import Driver, Record, Setup
from .errors import ConfigError
from .fleet import Call
from .host import Data, Host, Shared, Sums
from .job import Job

AHEAD = 2
"""Tasks a host is given at a time: one to run and one waiting, so that it is never idle while work is left."""


class HostProcess(Host):
    def __init__(self, job: Job, train: Any, test: Any, parts: Parts, store: tuple[str, int]) -> None:
        super().__init__(job, Data(from_arrow(train), from_arrow(test), parts), store)

    def ready(self) -> int:
        return os.getpid()


class RayFleet:
    def __init__(self, job: Job, data: Sequence[Any], store: tuple[str, int]) -> None:
        engine = job.experiment.engine
        # The store is a file of this node, so are its readers.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": engine.cpus, "num_gpus": engine.gpus, "scheduling_strategy": here}
        actor: Any = ray.remote(**options)(HostProcess)
        self.hosts: list[Any] = [actor.remote(job, *data, store) for _ in range(engine.count_hosts())]
        ray.get([host.ready.remote() for host in self.hosts])

    def map(self, call: Call, tasks: Sequence[Any], shared: Shared) -> Iterator[Sums]:
        left, running = deque(tasks), {}
        reference = ray.put(shared)

        def hand(host: Any) -> None:
            if left:
                running[getattr(host, call).remote(left.popleft(), reference)] = host

        for _ in range(AHEAD):
            for host in self.hosts:
                hand(host)
        while running:
            done, _ = ray.wait(list(running), num_returns=1)
            hand(running.pop(done[0]))
            yield ray.get(done[0])

    def close(self) -> None:
        for host in self.hosts:
            ray.kill(host)


class DriverProcess:
    """Runs the rounds in one thread; other calls look at what has been recorded so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records: list[Record] = []
        self.news = threading.Condition()
        self.over = False
        self.driver: Driver | None = None

    def run(self) -> dict[str, Tensor]:
        """All rounds, then the final model."""
        try:
            split = self.job.split()
            data = tuple(ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.parts))
            setup = Setup(split.parts, examples(split.test))
            driver = Driver(self.job, setup, lambda store: RayFleet(self.job, data, store))
            self.driver = driver
            try:
                for record in driver.rounds():
                    self._tell(record)
                return driver.tensors()
            finally:
                driver.close()
        finally:
            with self.news:
                self.over = True
                self.news.notify_all()

    def _tell(self, record: Record) -> None:
        with self.news:
            self.records.append(record)
            self.news.notify_all()

    def since(self, seen: int) -> tuple[list[Record], bool]:
        """Records after the first `seen`, waiting for news; and whether the run is over."""
        with self.news:
            self.news.wait_for(lambda: len(self.records) > seen or self.over)
            return self.records[seen:], self.over


def examples(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def start_ray(job: Job) -> bool:
    """Connect to Ray, starting it here unless an address is given; whether it was started (and is ours to stop)."""
    engine = job.experiment.engine
    started = not ray.is_initialized()
    if started:
        if not engine.address:
            _fits(engine, {"CPU": float(os.cpu_count() or 1), "GPU": engine.gpus * engine.count_hosts()})
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if engine.address:
            ray.init(address=engine.address, **quiet)
        else:
            gpus = int(np.ceil(engine.gpus * engine.count_hosts())) or None
            ray.init(include_dashboard=False, num_gpus=gpus, object_store_memory=STORE_BYTES, **quiet)
    try:
        _fits(engine, ray.cluster_resources())
    except ConfigError:
        if started:
            ray.shutdown()
        raise
    return started


STORE_BYTES = 2 * 2**30
"""Object store of a Ray started here: data sets and models of a laptop's size; Ray spills to disk beyond."""


def _fits(engine: Engine, have: dict[str, float]) -> None:
    """Refuse what Ray could never place, before anything waits for it."""
    for key, resource, each in (("cpus", "CPU", engine.cpus), ("gpus", "GPU", engine.gpus)):
        asked, granted = each * engine.count_hosts(), have.get(resource, 0.0)
        if asked > granted + 1e-9:
            raise ConfigError(
                f"engine.hosts x engine.{key} <= {granted:g} must hold, got {engine.count_hosts()} x {each:g}; "
                f"lower engine.hosts or engine.{key} (fractions are allowed)"
            )


def play(job: Job) -> Iterator[Record]:
    """Run on Ray; yields records, returns the final model's tensors."""
    started = start_ray(job)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4}
    actor: Any = ray.remote(**options)(DriverProcess)
    driver = actor.remote(job)
    try:
        final, seen, over = driver.run.remote(), 0, False
        while not over:
            records, over = ray.get(driver.since.remote(seen))
            seen += len(records)
            yield from records
        return ray.get(final)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    finally:
        ray.kill(driver)
        if started:
            ray.shutdown()
