"""A run on Ray: a driver actor of its own, watched by the launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from torch import Tensor

from ....workloads.base import Columns
from ...cohorts.tasks import steps_of
from ...config.held_out import unused_rows
from ...config.run_spec import RunSpec
from ...errors import ConfigError, DriverDied, Interrupted, NoRoom
from ...kernels.library import SECONDS as BUILD_SECONDS
from ...kernels.library import why_no_kernels
from ...planning.autotune import measure
from ...planning.data import checked_split
from ...planning.execution_plan import asks_for_kernels, plan_execution
from ...records.arrow_columns import to_arrow
from ...records.event_log import EventLog
from ...rounds.driver import DataSummary, Driver, Event
from ...state.retention import discard
from ...state.table import Table
from ...stopping import at_once
from ...storage.lock import driver_lock
from ..base import Pool
from .cluster_pool import ClusterPool
from .connect import carried, here, start_ray
from .placement import cluster, on_node, take
from .worker_pool import START_SECONDS, Hooks, WorkerPool, WorkerRequest, last_error_line

ABSENT = "fedfleet is not installed on the cluster; install it on every node, or have `fedfleet submit` bring it"
LOOK_SECONDS = 0.2
"""How soon a signal is passed on."""
CLOSE_SECONDS = 60
"""What a driver that is asked to stop may take for its checkpoint."""
BEGIN_SECONDS = 2
"""The same before its first round is over."""


class DriverProcess:
    """Runs the rounds in one thread; other calls look at what has been told so far."""

    def __init__(self, run_spec: RunSpec) -> None:
        self.run_spec, self.news = run_spec, EventLog()
        self.signal = 0

    def run(self) -> dict[str, Tensor]:
        """All rounds, then the final model."""
        try:
            with driver_lock(self.run_spec.directory, self._check):
                return self._rounds()
        finally:
            self.news.end()

    def _rounds(self) -> dict[str, Tensor]:
        data, setup, told = self._data()
        driver = Driver(self.run_spec, setup)
        for sentence in told:
            driver.log(sentence)
        try:
            driver.start(lambda table: self._pool(data, setup, table, driver.log))
            for item in driver.rounds():
                self.news.append(item)
            return driver.tensors()
        finally:
            driver.close()

    def _pool(self, data: list[Any], setup: DataSummary, table: Table, log: Callable[[str], None]) -> Pool:
        """The workers: those of this node alone where all of them are here, else those of a cluster's nodes.

        On a cluster that was there before, the workers take their room at once. A trial of a search has its own room.
        """
        engine, hooks = self.run_spec.experiment.engine, Hooks(self._check, log)
        alike = len(engine.groups()) == 1
        here_all = (alike and not engine.address) or get_current_placement_group() is not None
        if here_all:
            worker_requests = [WorkerRequest(group, here()) for group in engine.groups() for _ in range(group.count)]
            return WorkerPool(self.run_spec, data, table.layout, hooks, worker_requests)
        placement = take(engine, self._check, self.news.append)  # the log is written now, not at the end of a round
        mine = ray.get_runtime_context().get_node_id()
        if alike and engine.workers != "auto" and all(spot.node == mine for spot in placement.spots):
            worker_requests = [
                WorkerRequest(spot.group, placement.of(bundle)) for bundle, spot in enumerate(placement.spots)
            ]
            return WorkerPool(self.run_spec, data, table.layout, hooks, worker_requests, placement)
        steps = steps_of(setup.client_index.sizes, self.run_spec.experiment.federation.local)
        pool = ClusterPool(self.run_spec, data, table, hooks, steps, placement)
        try:
            pool.open()
        except BaseException:
            pool.close()
            raise
        return pool

    def _data(self) -> tuple[list[Any], DataSummary, list[str]]:
        """References to the data in the object store, of which no copy stays in this process; sentences for the log on
        how clients are run and which rows nobody has."""
        split = checked_split(self.run_spec)
        if self.run_spec.experiment.engine.address and asks_for_kernels(self.run_spec, split):
            self.run_spec = self.run_spec.with_missing_kernels(tuple(lacking_kernels(self.run_spec, self._check)))
        self.run_spec, told = plan_execution(self.run_spec, split, measure)
        data = [ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.client_index)]
        return data, DataSummary(split.client_index, examples(split.test)), [told, *filter(None, [unused_rows(split)])]

    def _check(self) -> None:
        if self.signal:
            raise Interrupted(self.signal)

    def here(self) -> None:
        """It has started."""

    def stop(self, signal: int) -> None:
        self.signal = signal

    def since(self, seen: int) -> tuple[list[Event], bool]:
        """What was told after the first `seen`, waiting for news; and whether the run is over."""
        return self.news.since(seen)


def lacking_kernels(run_spec: RunSpec, check: Callable[[], None]) -> Iterator[str]:
    """Why nodes of the cluster that could have workers of the run cannot have kernels of our own, a sentence each. They
    build them now, all at once, if need be; one that does not answer in time has none."""
    groups = run_spec.experiment.engine.groups()
    asked: dict[Any, str] = {}
    for node in cluster():
        if any(node.fits(group) for group in groups):
            task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node.id))(why_no_kernels)
            asked[task.remote()] = node.name
    waiting, end = list(asked), time.monotonic() + BUILD_SECONDS + START_SECONDS
    while waiting and time.monotonic() < end:
        check()
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_SECONDS)
        for reference in ready:
            try:
                why = ray.get(reference)
            except RayError as error:
                why = last_error_line(error)
            if why:
                yield f"node {asked[reference]}: {why}"
    for reference in waiting:
        yield f"node {asked[reference]} did not say within {BUILD_SECONDS + START_SECONDS:g} s whether it can"


def examples(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def play(run_spec: RunSpec, stop: Callable[[], int]) -> Generator[Event, None, dict[str, Tensor]]:
    """Run on Ray; yields what the driver tells, returns the final model. stop: the number of a signal, or 0."""
    before = set(below(os.getpid()))
    with none_left(before), at_once(stop):
        started = start_ray(run_spec)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here()}
    options |= carried(run_spec.experiment.engine.address)
    actor: Any = ray.remote(**options)(DriverProcess)
    driver = actor.remote(run_spec)
    final = driver.run.remote()
    try:
        started_within(START_SECONDS, driver.here.remote(), run_spec, stop)
        yield from listen(driver, stop)
        return ray.get(final)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise cause from cause.__cause__
    except RayActorError as error:
        if "No module named 'fedfleet" in str(error):
            raise ConfigError(f"engine.address={run_spec.experiment.engine.address}: {ABSENT}") from None
        raise DriverDied(f"the driver died ({type(error).__name__})") from None
    finally:
        ray.kill(driver)
        discard(run_spec, complete=False)  # a driver that was killed could not
        if started:
            shut_down(before)


@contextmanager
def none_left(before: set[int]) -> Iterator[None]:
    """Ray's processes do not outlive a start that was interrupted."""
    try:
        yield
    except Interrupted:
        shut_down(before)
        raise


def shut_down(before: set[int]) -> None:
    """End the Ray that was started here. It kills its node's process where that does not end within a second, as on a
    busy machine, and that process's children would stay. before: processes of ours that are none of Ray's."""
    started = [process for process in below(os.getpid()) if process not in before]
    ray.shutdown()
    for process in started:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def below(process: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have; parents come first."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield child
                yield from below(child)


def started_within(seconds: float, here: Any, run_spec: RunSpec, stop: Callable[[], int]) -> None:
    """Wait for a driver to start; here: a reference to its first answer. What it died of is raised by who asks it."""
    end = time.monotonic() + seconds
    while not ray.wait([here], timeout=LOOK_SECONDS)[0]:
        if stop():
            raise Interrupted(stop())
        if time.monotonic() > end:
            raise NoRoom(
                f"engine.address={run_spec.experiment.engine.address}: the run's driver has not started on the cluster "
                f"within {seconds:g} s; look at `ray status` on its head"
            )


def listen(driver: Any, stop: Callable[[], int]) -> Iterator[Event]:
    """What the driver tells, until it is over; passes a signal on, once. A driver that has told nothing yet has nothing
    to checkpoint, and is not waited for: its process may still be starting."""
    seen, over, asked, patience = 0, False, 0.0, CLOSE_SECONDS
    news = None
    while not over:
        if stop() and not asked:
            driver.stop.remote(stop())
            asked = time.monotonic()
            patience = CLOSE_SECONDS if seen else BEGIN_SECONDS
        news = news or driver.since.remote(seen)
        if not ray.wait([news], timeout=LOOK_SECONDS)[0]:
            if asked and not seen and time.monotonic() - asked > patience:
                raise Interrupted(stop())
            if asked and time.monotonic() - asked > patience:
                raise DriverDied(f"the driver did not stop within {CLOSE_SECONDS} s")
            continue
        told, over = ray.get(news)
        seen, news = seen + len(told), None
        yield from told
