"""A run on Ray: a driver actor of its own, watched by the launcher."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from ..workloads.base import Columns
from .columns import to_arrow
from .config import Engine
from .driver import Driver, Setup, Told
from .errors import ConfigError, DriverDied, Interrupted
from .hosts import RayFleet
from .job import Job
from .keeping import discard
from .path import settled
from .probe import measure

STORE_BYTES = 2 * 2**30
"""Object store of a Ray started here: data sets and models of a laptop's size; Ray spills to disk beyond."""
LOOK_SECONDS = 0.2
"""How soon a signal is passed on."""
CLOSE_SECONDS = 60
"""What a driver that is asked to stop may take for its checkpoint."""


class DriverProcess:
    """Runs the rounds in one thread; other calls look at what has been told so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.told: list[Told] = []
        self.gone = 0  # told, heard and forgotten
        self.news = threading.Condition()
        self.over = False
        self.signal = 0

    def run(self) -> dict[str, Tensor]:
        """All rounds, then the final model."""
        try:
            data, setup, told = self._data()
            driver = Driver(self.job, setup)
            driver.tell(told)
            try:
                driver.start(lambda place: RayFleet(self.job, data, place, self._check, driver.tell))
                for item in driver.rounds():
                    self._tell(item)
                return driver.tensors()
            finally:
                driver.close()
        finally:
            with self.news:
                self.over = True
                self.news.notify_all()

    def _data(self) -> tuple[list[Any], Setup, str]:
        """References to the data in the object store, of which no copy stays in this process; how clients are run."""
        split = self.job.split()
        self.job, told = settled(self.job, split, measure)
        data = [ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.parts)]
        return data, Setup(split.parts, examples(split.test)), told

    def _tell(self, item: Told) -> None:
        with self.news:
            self.told.append(item)
            self.news.notify_all()

    def _check(self) -> None:
        if self.signal:
            raise Interrupted(self.signal)

    def stop(self, signal: int) -> None:
        self.signal = signal

    def since(self, seen: int) -> tuple[list[Told], bool]:
        """What was told after the first `seen`, waiting for news; and whether the run is over. Those are forgotten."""
        with self.news:
            del self.told[: seen - self.gone]
            self.gone = seen
            self.news.wait_for(lambda: bool(self.told) or self.over)
            return list(self.told), self.over


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
        os.environ.setdefault("RAY_worker_niceness", "0")  # hosts are the work, not a background to it
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # a history of calls that nobody looks at
        with same_sigterm():
            if engine.address:
                ray.init(address=engine.address, **quiet)
            else:
                gpus = int(np.ceil(engine.gpus * engine.count_hosts())) or None
                # else it would join whatever cluster somebody has started on this machine
                own: dict[str, Any] = {"address": "local", "include_dashboard": False}
                ray.init(num_gpus=gpus, object_store_memory=STORE_BYTES, **own, **quiet)
    try:
        _fits(engine, ray.cluster_resources())
    except ConfigError:
        if started:
            ray.shutdown()
        raise
    return started


@contextmanager
def same_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself as it starts, and ends the process there and then; the caller keeps its handler."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _fits(engine: Engine, have: Mapping[str, float]) -> None:
    """Refuse what Ray could never place, before anything waits for it."""
    for key, resource, each in (("cpus", "CPU", engine.cpus), ("gpus", "GPU", engine.gpus)):
        asked, granted = each * engine.count_hosts(), have.get(resource, 0.0)
        if asked > granted + 1e-9:
            raise ConfigError(
                f"engine.hosts x engine.{key} <= {granted:g} must hold, got {engine.count_hosts()} x {each:g}; "
                f"lower engine.hosts or engine.{key} (fractions are allowed)"
            )


def play(job: Job, stop: Callable[[], int]) -> Generator[Told, None, dict[str, Tensor]]:
    """Run on Ray; yields what the driver tells, returns the final model. stop: the number of a signal, or 0."""
    started = start_ray(job)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4}
    actor: Any = ray.remote(**options)(DriverProcess)
    driver = actor.remote(job)
    final = driver.run.remote()
    try:
        yield from _listen(driver, stop)
        return ray.get(final)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayActorError as error:
        raise DriverDied(f"the driver died ({type(error).__name__})") from None
    finally:
        ray.kill(driver)
        discard(job, complete=False)  # a driver that was killed could not
        if started:
            ray.shutdown()


def _listen(driver: Any, stop: Callable[[], int]) -> Iterator[Told]:
    """What the driver tells, until it is over; passes a signal on, once."""
    seen, over, asked = 0, False, 0.0
    news = None
    while not over:
        if stop() and not asked:
            driver.stop.remote(stop())
            asked = time.monotonic()
        news = news or driver.since.remote(seen)
        if not ray.wait([news], timeout=LOOK_SECONDS)[0]:
            if asked and time.monotonic() - asked > CLOSE_SECONDS:
                raise DriverDied(f"the driver did not stop within {CLOSE_SECONDS} s")
            continue
        told, over = ray.get(news)
        seen, news = seen + len(told), None
        yield from told
