"""Launches a run: it runs the rounds, and reports events to the observers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from ..errors import ConfigError, FedFleetError, Interrupted, OutOfMemory, type_and_first_line
from ..memory import is_out_of_memory
from ..records.history import Event, History
from ..rounds.pool import Phase, Results
from ..rounds.under_way import Outcome, UnderWay
from ..run_spec import RunSpec
from ..state.checkpoint import checkpointed_rounds
from ..state.folders import discard
from ..stopping import stopping
from .host import Host
from .needs import nearly_too_large
from .observer import Observer
from .result import Result


def execute(
    run_spec: RunSpec, directory: Any, observers: list[Observer], stop: Callable[[], int] | None = None
) -> Result:
    """Run all rounds and write the result, while no other process runs in the folder.

    directory: the RunDirectory, or None. stop: returns the number of a signal that shall end the run, or 0; None to
    handle the signals that this process receives.
    """
    with stopping() if stop is None else nullcontext(stop) as stop_signal:
        playing = play(run_spec, directory, observers, stop_signal)
        while True:
            try:
                next(playing)
            except StopIteration as end:
                return end.value


def play(
    run_spec: RunSpec,
    directory: Any,
    observers: list[Observer],
    stop: Callable[[], int],
    host: Host | None = None,
    under_way: UnderWay | None = None,
) -> Generator[Any, Results | None, Result]:
    """The same as `execute`, round by round: yields the record of each round, and returns the result.

    The folder is locked from the first round that is asked for to the end. Whoever does not ask for all rounds makes
    `stop` return a signal and asks for one more, which raises Interrupted after the last round has been checkpointed.
    host: of a run in this process that shares it with others. The phases that it yields are yielded, too. under_way:
    how the caller asks for the model, or ends the run early, between two rounds; None if it does neither.
    """
    with directory.exclusive(run_spec.resume) if directory is not None else nullcontext():
        observers = [*filter(None, [directory]), *observers, *trackers(run_spec)]
        under_way = under_way or UnderWay(any(getattr(observer, "steers", False) for observer in observers))
        started, begun, process = time.perf_counter(), list[Observer](), os.getpid()
        try:
            for observer in observers:
                begun.append(observer)
                if isinstance(observer, Observer):
                    observer.under_way = under_way
                observer.begin(run_spec)
            if line := nearly_too_large(run_spec):
                notify(line, observers)
            events = events_of(run_spec, directory, stop, host or Host(), under_way)
            rows, (model, stopped, best), seconds = yield from _observed(run_spec, events, observers)
            seconds += time.perf_counter() - started
            path = directory and directory.path
            result = Result(run_spec.run_id, run_spec.experiment, rows, model, seconds, path, stopped, best)
            for observer in observers:
                observer.end(result)
            if exported(result, observers):
                discard(run_spec.experiment, run_spec.run_id, run_spec.directory, complete=len(rows))
            return result
        except BaseException as error:
            if os.getpid() == process:  # a process that was forked meanwhile has only a copy of the run
                for observer in begun:
                    observer.failed(error)
            if isinstance(error, Interrupted):
                raise Interrupted(error.signal, how_to_continue(run_spec)) from None
            raise


def exported(result: Result, observers: list[Observer]) -> bool:
    """Write clients' models to files if the run is to do so. Returns False where that fails: the states of clients are
    then kept, from which `fedfleet export` writes them."""
    clients = result.experiment.evaluate.clients
    if clients is None or clients.export == "none":
        return True
    try:
        result.client_states().save_all(clients.export)
    except ConfigError as error:
        notify(f"evaluate.clients.export: {error}; the states of clients are kept for `fedfleet export`", observers)
        return False
    return True


def trackers(run_spec: RunSpec) -> Iterator[Observer]:
    """The trackers that the run asks for. Each is given what it takes of the store, the experiment and the folder."""
    tracking, registry = run_spec.experiment.tracking, run_spec.registry
    offered = {"uri": tracking.uri, "experiment": tracking.experiment, "directory": run_spec.directory}
    for name in tracking.names:
        taken = registry.parameters("TRACKERS", name, "tracking")
        arguments = {key: value for key, value in offered.items() if key in taken}
        yield registry.build("TRACKERS", {"name": name, **arguments}, "tracking")


def events_of(
    run_spec: RunSpec, directory: Any, stop: Callable[[], int], host: Host, under_way: UnderWay
) -> Generator[Event | Phase, Results | None, Outcome]:
    """The events of a run, and those phases that its host yields."""
    kept = directory.kept_result(run_spec) if directory is not None and run_spec.resume else None
    if kept is not None:  # an earlier process has run all rounds, and could not write its result
        yield kept.rows
        return kept.outcome
    on_ray = run_spec.backend.name == "ray"
    return (yield from (_on_ray if on_ray else host.execute)(run_spec, stop, under_way))


def _observed(
    run_spec: RunSpec, events: Generator[Event | Phase, Results | None, Outcome], observers: list[Observer]
) -> Generator[Any, Results | None, tuple[History, Outcome, float]]:
    """Report every event to the observers, and yield every record and phase. Returns the records, the outcome, and the
    seconds of those rounds that an earlier process has run."""
    rows, before, given = History(), 0.0, None
    with memory_errors(run_spec), closing(events):  # end the run now, not when an observer's exception is collected
        while True:
            try:
                event = events.send(given)
            except StopIteration as end:
                return rows, end.value, before
            given = None
            if isinstance(event, Phase):
                given = yield event
                continue
            if isinstance(event, list):
                before += sum(row["time/seconds"] for row in event)
            for row in event if isinstance(event, list) else [event]:
                if isinstance(row, dict):
                    rows.replace(row)
            notify(event, observers)
            if isinstance(event, dict):
                yield event


def how_to_continue(run_spec: RunSpec) -> str:
    """How an interrupted run can be continued, as the end of a message; "" if its folder has no checkpoint."""
    if run_spec.directory is None:
        return "; the run has no folder, so nothing is kept: give out to be able to resume"
    rounds = checkpointed_rounds(run_spec.directory)
    if not rounds:
        return ""
    given = "experiment, " if run_spec.experiment.has_objects else ""
    return f"; checkpoint after round {rounds[-1]}; to go on: fedfleet.resume({given}{run_spec.directory!r})"


@contextmanager
def memory_errors(run_spec: RunSpec) -> Iterator[None]:
    """Turns any exception that means that memory ran out into OutOfMemory, with one sentence."""
    try:
        yield
    except Exception as error:
        found = error.__cause__ if isinstance(error, FedFleetError) and error.__cause__ is not None else error
        if isinstance(error, ConfigError | OutOfMemory) or not is_out_of_memory(found):
            raise
        remedy = run_spec.memory_remedy()
        raise OutOfMemory(f"memory ran out ({type_and_first_line(found)}): {remedy}") from error


def notify(event: Event, observers: list[Observer]) -> None:
    """Report an event to the observers: a line of the log, the record of a round, or all records of a resumed run."""
    for observer in observers:
        if isinstance(event, str):
            observer.event(event)
        elif isinstance(event, list):
            observer.resumed(event)
        else:
            observer.record(event)


def _on_ray(run_spec: RunSpec, stop: Callable[[], int], under_way: UnderWay) -> Generator[Event, None, Outcome]:
    from ..backends.ray.driver_actor import play

    run_spec.forget_frozen()  # the driver and the workers have them in shared memory
    return play(run_spec, stop, under_way)
