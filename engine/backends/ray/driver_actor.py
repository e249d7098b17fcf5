"""A run on Ray: the driver runs in an actor, and the launcher follows its events."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from torch import Tensor

from ....workloads.client_index import ClientIndex
from ....workloads.workload import Columns, taken_notes
from ...accelerators.choice import device_line
from ...accelerators.memory import bounded_memory
from ...cohorts.tasks import steps_of
from ...errors import ConfigError, DriverDied, Interrupted, InUse, NoRoom
from ...kernels.library import SECONDS as BUILD_SECONDS
from ...kernels.library import why_no_kernels
from ...memory import release_freed_memory
from ...planning.autotune import measure
from ...planning.data import checked_split
from ...planning.execution_plan import asks_for_kernels, plan_execution
from ...records.event_log import EventLog
from ...rounds.driver import Driver, Event
from ...rounds.pool import Pool
from ...rounds.under_way import Outcome, UnderWay
from ...run_spec import RunSpec
from ...state.folders import discard
from ...state.row_table import RowTable
from ...stopping import on_signal
from ...storage.lock import driver_lock
from ...workload.split import unused_rows
from .arrow_columns import put, shared, to_arrow
from .connect import carried, counted, here, ray_for
from .metrics import RunMetrics
from .placement import await_bundles, check_bundles, cluster, leave_all_of, on_node, take
from .ray_pool import Hooks, RayPool
from .watch import Watch
from .worker_handle import START_SECONDS, WorkerRequest, last_error_line

ABSENT = "fedfleet is not installed on the cluster; install it on every node, or have `fedfleet submit` bring it"
LOOK_SECONDS = 0.2
"""How often the launcher looks for a signal, and for new events."""
CLOSE_SECONDS = 60
"""How long a driver that was asked to stop may take for its checkpoint."""
RAY_SECONDS = 2
"""How long Ray may take to say why a driver has died."""
GONE_SECONDS = 5
"""How long a driver that was killed may hold the lock of its run. After that, its states stay, see `discard_states`."""
BEGIN_SECONDS = 2
"""The same before the driver has reported its first event."""
EVENT_SECONDS = 0.25
"""The least time between two messages with events of an asynchronous run. One for each update would cost more than the
update itself."""


class DriverProcess:
    """The driver's actor. One thread runs the rounds; calls in other threads read the events or stop the run."""

    def __init__(self, run_spec: RunSpec, alone: bool = False, waits: bool = False) -> None:
        """alone: whether nobody else uses this Ray, so that there is room for the workers. waits: whether each round
        waits until the launcher is done with the record of the one before."""
        updates = run_spec.experiment.federation.pace.versions > 1 and not waits  # may come in quick succession
        self.run_spec, self.alone, self.events = run_spec, alone, EventLog(gap=EVENT_SECONDS if updates else 0.0)
        self.waits, self.signal = waits, 0
        self.driver: Driver | None = None
        self.reason = ""  # why the launcher ends the run
        on_signal(self.stop)  # on a cluster that a batch system ends, the launcher may be elsewhere

    def run(self) -> Outcome:
        """Run all rounds."""
        try:
            with driver_lock(self.run_spec.directory, self._check):
                return self._rounds()
        finally:
            self.events.end()

    def _rounds(self) -> Outcome:
        data, client_index, test_rows, lines = self._data()
        self.driver = driver = Driver(self.run_spec, client_index, test_rows)
        driver.asked_to_end = lambda: self.reason
        for line in lines:
            driver.log(line)
        try:
            driver.start(lambda table: self._pool(data, client_index, table, driver.log))
            metrics = RunMetrics(driver) if self.run_spec.experiment.tracking.metrics else None
            with metrics.exported() if metrics is not None else nullcontext():
                for item in driver.rounds():
                    self.events.append(item)
                    if metrics is not None and isinstance(item, dict):
                        metrics.saw(item)
                    if self.waits and isinstance(item, dict):
                        self.events.wait_until_done_with(self._check)
            return driver.outcome()
        finally:
            driver.close()

    def _pool(self, data: list[Any], client_index: ClientIndex, table: RowTable, log: Callable[[str], None]) -> Pool:
        """The workers: those of this node alone where all of them are here, else those of a cluster's nodes.

        On a Ray that others use, the workers reserve their resources at once, or the run says within `engine.wait`
        seconds that others hold them. A trial of a search has reserved its resources already.
        """
        engine, mine = self.run_spec.experiment.engine, ray.get_runtime_context().get_node_id()
        here_all = len(engine.groups()) == 1 and not engine.address
        bundles, placement, several = get_current_placement_group(), None, False
        if bundles is not None:
            await_bundles(engine, bundles, self._check)
        if bundles is not None or (here_all and self.alone):
            requests = [WorkerRequest(group, here(), mine) for group in engine.groups() for _ in range(group.count)]
        else:
            log_now = self.events.append  # not at the end of a round
            placement = take(engine, self._check, log_now, self.run_spec.run_id, mine if here_all else None)
            spots = placement.spots
            requests = [WorkerRequest(spot.group, placement.of(i), spot.node) for i, spot in enumerate(spots)]
            fixed = len(engine.groups()) == 1 and engine.workers != "auto"
            several = not here_all and not (fixed and all(spot.node == mine for spot in spots))
        sizes = client_index.sizes
        sizes = np.append(sizes, sizes.max())  # behind the last client is the server, with trusted examples
        steps = steps_of(sizes, self.run_spec.experiment.federation.local)
        hooks = Hooks(self._check, log)
        return RayPool(self.run_spec, data, table, hooks, steps, requests, placement, several)

    def _data(self) -> tuple[list[Any], ClientIndex, int, list[str]]:
        """(references to the data and the frozen tensors in Ray's object store, the rows of every client, the number of
        test rows, lines for the log).

        No copy of them stays in this process. The lines are about the execution plan and about unused rows.
        """
        frozen = put(self.run_spec.frozen_one_by_one)
        self.run_spec.forget_frozen()
        self.run_spec = self.run_spec.with_frozen(shared(frozen))
        split = checked_split(self.run_spec, say=self.events.append)
        if self.run_spec.experiment.engine.address and asks_for_kernels(self.run_spec, split):
            self.run_spec = self.run_spec.with_missing_kernels(tuple(lacking_kernels(self.run_spec, self._check)))
        device = self.run_spec.device
        gpus = max(group.gpus for group in self.run_spec.experiment.engine.groups())
        with self.run_spec.computing(), bounded_memory(device, gpus):
            self.run_spec, plan_line = plan_execution(self.run_spec, split, measure)
        data = [ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.client_index)]
        told = device_line(self.run_spec.experiment.engine, device)
        lines = [plan_line, told, *taken_notes(), *filter(None, [self.run_spec.method().caution, unused_rows(split)])]
        if self.run_spec.frozen:
            release_freed_memory()  # of the base as it was read, and of the steps that were tried with it
        return [*data, frozen], split.client_index, examples(split.test), lines

    def _check(self) -> None:
        if self.signal:
            raise Interrupted(self.signal)

    def here(self) -> int:
        """The id of the actor's process, once it has started."""
        return os.getpid()

    def stop(self, signal: int) -> None:
        self.signal = self.signal or signal

    def since(self, seen: int, reason: str = "") -> tuple[list[Event], bool]:
        """(the events after the first `seen`, whether the run is over). Waits until there is an event or the end.
        reason: why the run shall end after its last round, "" if it shall go on."""
        self.reason = self.reason or reason
        return self.events.since(seen)

    def model(self) -> dict[str, Tensor]:
        """The model after the last round."""
        assert self.driver is not None
        return self.driver.tensors()


def lacking_kernels(run_spec: RunSpec, check: Callable[[], None]) -> Iterator[str]:
    """Error sentences for the nodes that could have workers of the run, but cannot have the native kernels.

    All nodes build the kernels at the same time, if they do not have them. A node that does not answer in time counts
    as one without kernels.
    """
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


def play(run_spec: RunSpec, stop: Callable[[], int], under_way: UnderWay) -> Generator[Event, None, Outcome]:
    """Run on Ray. Yields the driver's events.

    stop: returns the number of a signal that shall end the run, or 0.
    """
    with ray_for(run_spec.experiment.engine, stop) as alone:
        engine = counted(run_spec.experiment.engine)
        check_bundles(engine)
        return (yield from _play(run_spec.with_engine(engine), stop, under_way, alone))


def _play(
    run_spec: RunSpec, stop: Callable[[], int], under_way: UnderWay, alone: bool
) -> Generator[Event, None, Outcome]:
    """The same, in a process that is connected to Ray. alone: whether nobody else uses this Ray."""
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here()}
    options |= carried(run_spec.experiment.engine.address)
    actor: Any = ray.remote(**options)(DriverProcess)
    watch = Watch(run_spec.experiment.engine.address)
    driver = actor.remote(run_spec, alone, under_way.waited_for)
    final = driver.run.remote()
    try:
        watch.see_driver(started_within(START_SECONDS, driver.here.remote(), run_spec, stop))
        with under_way.going_on(lambda: ray.get(driver.model.remote())):
            yield from listen(driver, stop, watch, lambda: under_way.reason)
        outcome: Any = ray.get(final)
        watch.driver = None  # it has ended its work
        return outcome
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, Interrupted) and stop():
            raise Interrupted(
                stop()
            ) from None  # the driver may have been asked by another signal, see `Watch.ask_driver`
        if isinstance(cause, Interrupted) and (lost := watch.lost()):
            raise DriverDied(lost) from None  # for which the driver was asked to end
        raise cause from cause.__cause__
    except RayActorError as error:
        if "No module named 'fedfleet" in str(error):
            raise ConfigError(f"engine.address={run_spec.experiment.engine.address}: {ABSENT}") from None
        raise DriverDied(f"the driver died ({type(error).__name__})") from None
    except RayError as error:
        raise DriverDied(f"Ray cannot go on ({last_error_line(error)})") from None
    finally:
        watch.end_driver()
        ray.kill(driver)
        if not alone and not watch.lost():  # where Ray has died, nothing is reserved any more
            with suppress(RayError):
                leave_all_of(run_spec.run_id)
        discard_states(run_spec)


def discard_states(run_spec: RunSpec) -> None:
    """Remove the client states of a run whose driver was killed, and which has no checkpoint. They stay if a driver is
    still there: it may be writing the checkpoint that needs them."""
    with suppress(InUse, OSError), driver_lock(run_spec.directory, seconds=GONE_SECONDS):
        discard(run_spec.experiment, run_spec.run_id, run_spec.directory)


def started_within(seconds: float, here: Any, run_spec: RunSpec, stop: Callable[[], int]) -> int:
    """Wait until the driver has started, at most `seconds`. here: a reference to its first answer, the id of its
    process, which is returned.

    Raises Interrupted and NoRoom, and what Ray raises if the driver died.
    """
    end = time.monotonic() + seconds
    while not ray.wait([here], timeout=LOOK_SECONDS)[0]:
        if stop():
            raise Interrupted(stop())
        if time.monotonic() > end:
            raise NoRoom(
                f"engine.address={run_spec.experiment.engine.address}: the run's driver has not started on the cluster "
                f"within {seconds:g} s; look at `ray status` on its head"
            )
    return ray.get(here)


def listen(
    driver: Any, stop: Callable[[], int], watch: Watch | None = None, why_end: Callable[[], str] = lambda: ""
) -> Iterator[Event]:
    """The events of a driver until the run is over. A signal is passed to the driver once. watch: the processes without
    which the run cannot go on. why_end: returns why the run shall end after its last round, "" if it shall go on.

    A driver without any event has nothing to checkpoint. It is not waited for, because its process may still be
    starting.
    """
    seen, over, news, lost, asked, looked = 0, False, None, "", 0.0, 0.0
    while not over:
        now = time.monotonic()
        if watch is not None and not lost and now > looked + LOOK_SECONDS:
            looked, lost = now, watch.lost()
        if (stop() or lost) and not asked:
            asked = now
            driver.stop.remote(stop() or signal.SIGTERM)
            if watch is not None:
                watch.ask_driver()
        news = news or driver.since.remote(seen, *filter(None, [why_end()]))
        if ray.wait([news], timeout=LOOK_SECONDS)[0]:
            events, over = ray.get(news)
            seen, news = seen + len(events), None
            yield from events
            continue
        if watch is not None and watch.driver_gone_for() > (0 if lost else RAY_SECONDS):
            raise DriverDied(lost or "the driver died")
        if asked and not seen and now > asked + BEGIN_SECONDS:
            raise DriverDied(lost) if lost else Interrupted(stop())
        if asked and now > asked + CLOSE_SECONDS:
            raise DriverDied(lost or f"the driver did not stop within {CLOSE_SECONDS:g} s")
