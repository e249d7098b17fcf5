"""Detached runs: a run in a named actor of a Ray cluster, which outlives the process that launched it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ..backends.ray.connect import carried, connect, here, join
from ..backends.ray.driver_actor import listen
from ..backends.ray.worker_handle import START_SECONDS
from ..errors import ConfigError, DriverDied, FedFleetError, NoRoom
from ..records.event_log import EventLog
from ..records.history import Record
from ..run_spec import RunSpec
from ..stopping import on_signal
from .launch import execute, notify
from .observer import Observer
from .result import Result
from .run_directory import RunDirectory

NAMESPACE = "fedfleet"
LINGER_SECONDS = 600.0
"""How long the actor stays after the end of the run, so that its outcome can be read. The run's folder has it too."""
GRACE_SECONDS = 30.0
"""How long the actor stays for processes that have seen the end of the run, but have not read the outcome yet."""


class Detached(Observer):
    """The actor of a detached run. It observes the run and keeps all events for processes that attach later."""

    def __init__(self, run_spec: RunSpec) -> None:
        self.run_spec, self.events = run_spec, EventLog(keep=True)
        self.signal = 0
        on_signal(self.stop)
        self.outcome: Result | Exception | None = None
        self.begun = threading.Event()
        self.thread = threading.Thread(target=self._run, name="run", daemon=True)

    def start(self) -> None:
        """Start the run. Returns when it has its folder to itself; raises what prevented that, such as InUse."""
        self.thread.start()
        self.begun.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome

    def _run(self) -> None:
        assert self.run_spec.directory is not None
        try:
            self.outcome = execute(
                self.run_spec, RunDirectory(Path(self.run_spec.directory), self.run_spec.run_id), [self], self._stop
            )
        except FedFleetError as error:
            self.outcome = error
        except BaseException as error:
            self.outcome = FedFleetError(f"{type(error).__name__}: {error}")
        self.begun.set()
        self.events.end()
        self.events.wait_until_delivered(LINGER_SECONDS)
        time.sleep(GRACE_SECONDS)
        ray.kill(ray.get_actor(actor_name(self.run_spec.run_id), NAMESPACE))

    def _stop(self) -> int:
        return self.signal

    # --- an observer ------------------------------------------------------------------------------------------------
    def begin(self, run_spec: RunSpec) -> None:
        self.begun.set()

    def record(self, record: Record) -> None:
        self.events.append(record)

    def resumed(self, records: list[Record]) -> None:
        self.events.append(records)

    def event(self, text: str) -> None:
        self.events.append(text)

    # --- for those who attach ---------------------------------------------------------------------------------------
    def specification(self) -> RunSpec:
        return self.run_spec

    def since(self, seen: int) -> tuple[list[Any], bool]:
        return self.events.since(seen)

    def stop(self, signal: int) -> None:
        self.signal = self.signal or signal

    def ended(self) -> Result | Exception | None:
        return self.outcome


def actor_name(run_id: str) -> str:
    return f"fedfleet-{run_id}"


def detach(run_spec: RunSpec) -> None:
    """Start a run on its cluster, and return while it runs there."""
    address = run_spec.experiment.engine.address
    if not address or run_spec.backend.name != "ray":
        raise ConfigError("a run can only be left on a Ray that stays: give --address, with engine.backend=ray")
    connect(run_spec.experiment.engine)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 16, "scheduling_strategy": here()}
    options |= {"name": actor_name(run_spec.run_id), "namespace": NAMESPACE, "lifetime": "detached"}
    actor: Any = ray.remote(**options, **carried(address))(Detached)
    detached = actor.remote(run_spec)
    try:
        answered(detached.start.remote(), "the run's process", address)
    except RayTaskError as error:
        ray.kill(detached)
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def answered(reference: Any, who: str, address: str) -> Any:
    """The value of a reference. Raises NoRoom if the process `who` does not answer within START_SECONDS."""
    try:
        return ray.get(reference, timeout=START_SECONDS)
    except GetTimeoutError:
        raise NoRoom(
            f"engine.address={address}: {who} has not answered within {START_SECONDS:g} s; look at `ray status` on the "
            "cluster's head"
        ) from None


def attach(run_id: str, address: str, observers: Iterable[Observer], signal: int = 0) -> Result:
    """Follow a detached run to its end. If this process ends earlier, the run continues.

    signal: if it is not 0, ask the run to write a checkpoint and to stop. Raises ConfigError if there is no such run,
    and whatever the run raised.
    """
    if not ray.is_initialized():
        join(address)
    try:
        actor = ray.get_actor(actor_name(run_id), NAMESPACE)
    except ValueError:
        going = ", ".join(running()) or "none"
        raise ConfigError(
            f"RUN: no detached run {run_id} is under way at {address}; give one that is ({going}), or another --address"
        ) from None
    if signal:
        answered(actor.stop.remote(signal), f"run {run_id}", address)
    watching = list(observers)
    outcome: Any = None
    try:
        run_spec: Any = answered(actor.specification.remote(), f"run {run_id}", address)
        for observer in watching:
            observer.begin(run_spec)
        for event in listen(actor, lambda: 0):
            notify(event, watching)
        outcome = answered(actor.ended.remote(), f"run {run_id}", address)
        ray.kill(actor)
    except RayActorError as error:
        outcome = DriverDied(f"the run's process died ({type(error).__name__})")
    if isinstance(outcome, Result):
        for observer in watching:
            observer.end(outcome)
        return outcome
    for observer in watching:
        observer.failed(outcome)
    raise outcome


def running() -> Sequence[str]:
    """The ids of the detached runs on the cluster that this process is connected to."""
    found: Any = ray.util.list_named_actors(all_namespaces=True)
    prefix = actor_name("")
    names = [each["name"] for each in found if each["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))
