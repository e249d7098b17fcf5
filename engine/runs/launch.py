"""Launches a run: it resolves the names in a configuration, runs the rounds, and reports events to the observers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.tree import Tree
from ...workloads.workload import taken_notes
from ..accelerators import settings
from ..accelerators.memory import bounded_memory
from ..aggregation.planning import check_stage
from ..config.held_out import unused_rows
from ..config.limits import building_model, check_folder
from ..config.schema import Experiment
from ..errors import ConfigError, FedFleetError, Interrupted, OutOfMemory, type_and_first_line
from ..fleet.asynchronous import check_pending
from ..fleet.visits import check_fleet
from ..memory import is_out_of_memory
from ..method_form.state_spec import StateSpec
from ..records.history import Event, History, Record
from ..run_spec import RUN_ID, RunSpec
from ..state.checkpoint import checkpointed_rounds
from ..state.folders import discard
from ..stopping import stopping
from ..user_code import plugin_errors
from .built_conflicts import Built, check_conflicts
from .host import Host
from .observer import Observer
from .result import Result


def new_run_id() -> str:
    """A new id: the time (UTC) and six random digits."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def prepare(
    experiment: Experiment,
    run_id: str,
    directory: Path | None = None,
    resume: bool = False,
    initial_model: Mapping[str, Any] | None = None,
) -> RunSpec:
    """The specification of a run. Raises ConfigError for an invalid configuration, before anything starts.

    directory: the run's folder, None for a run without files. resume: whether the run continues an earlier one.
    initial_model: name -> tensor or array, the model before round 1; None for the workload's own.
    """
    with settings.applied(threads=experiment.engine.threads):
        return _prepare(experiment, run_id, directory, resume, initial_model)


def _prepare(
    experiment: Experiment,
    run_id: str,
    directory: Path | None,
    resume: bool,
    initial_model: Mapping[str, Any] | None,
) -> RunSpec:
    """The same, with the settings of torch that a run has."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run_id must be letters, digits, dots, dashes and underscores, got {run_id!r}; change it")
    experiment.check()
    run_spec = RunSpec.of(run_id, experiment, str(directory) if directory else None, resume, initial_model)
    workload, engine = run_spec.workload, experiment.engine
    with plugin_errors("workload", settings=experiment.workload):
        workload.check()
    x, built = run_spec.checked_initial_model(), Built(run_spec)
    with plugin_errors("method", settings=experiment.method), building_model(experiment.workload):
        check_privacy(built, x)
        check_conflicts(built)
    check_stage(run_spec)
    check_fleet(run_spec, built.state_spec)
    if experiment.is_asynchronous and engine.pending is not None:
        check_pending(experiment.federation, built.state_spec, engine.pending)
    if engine.store and not engine.address:
        check_folder("engine.store", engine.store)
    check_device(run_spec)
    return run_spec


def check_device(run_spec: RunSpec) -> None:
    """Raise ConfigError if the GPUs that this process sees cannot be those of the run.

    CUDA_VISIBLE_DEVICES says which GPUs a process sees. On a running cluster, its nodes know what they have.
    """
    engine, device = run_spec.experiment.engine, run_spec.device
    if device.type != "cuda" or engine.address:
        return
    if not torch.cuda.is_available():
        gpus = max(group.gpus for group in engine.groups())
        raise ConfigError(f"engine.device={engine.device}, gpus={gpus:g} a worker: no CUDA device is here; use cpu")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"engine.device={engine.device}: this process sees {count} GPUs, numbered from 0; use cuda:0")
    asked = sum(group.count * group.gpus for group in engine.groups()) if engine.backend == "ray" else engine.gpus
    if asked > count:
        raise ConfigError(
            f"engine.gpus: the workers reserve {asked:g} GPUs, and this process sees {count} (CUDA_VISIBLE_DEVICES); "
            "lower engine.gpus, which may be a fraction, or engine.workers"
        )


def check_privacy(built: Built, x: Tree) -> None:
    """Raise ConfigError for a private run whose method, model or budget does not fit. x: the initial model."""
    run_spec, privacy = built.run_spec, built.run_spec.privacy
    if privacy is None:
        return
    method = privacy.unwrapped(built.method)
    privacy.check_method(method, len(run_spec.buffers))
    privacy.check_message(StateSpec(method, x).message)
    privacy.check_spending()


def execute(
    run_spec: RunSpec,
    directory: Any,
    observers: list[Observer],
    stop: Callable[[], int] | None = None,
    host: Host | None = None,
) -> Result:
    """Run all rounds and write the result, while no other process runs in the folder.

    directory: the RunDirectory, or None. stop: returns the number of a signal that shall end the run, or 0; None to
    handle the signals that this process receives. host: of a run in this process that shares it with others.
    """
    with stopping() if stop is None else nullcontext(stop) as stop_signal:
        rounds = play(run_spec, directory, observers, stop_signal, host)
        while True:
            try:
                next(rounds)
            except StopIteration as end:
                return end.value


def play(
    run_spec: RunSpec, directory: Any, observers: list[Observer], stop: Callable[[], int], host: Host | None = None
) -> Generator[Record, None, Result]:
    """The same as `execute`, round by round: yields the record of each round, and returns the result.

    The folder is locked from the first round that is asked for to the end. Whoever does not ask for all rounds makes
    `stop` return a signal and asks for one more, which raises Interrupted after the last round has been checkpointed.
    """
    with directory.exclusive(run_spec.resume) if directory is not None else nullcontext():
        try:
            return (yield from _play(run_spec, directory, observers, stop, host or Host()))
        except Interrupted as error:
            raise Interrupted(error.signal, how_to_continue(run_spec)) from None


def how_to_continue(run_spec: RunSpec) -> str:
    """How an interrupted run can be continued, as the end of a message; "" if its folder has no checkpoint."""
    if run_spec.directory is None:
        return "; the run has no folder, so nothing is kept: give out to be able to resume"
    rounds = checkpointed_rounds(run_spec.directory)
    if not rounds:
        return ""
    given = "experiment, " if run_spec.experiment.has_objects else ""
    return f"; checkpoint after round {rounds[-1]}; to go on: fedfleet.resume({given}{run_spec.directory!r})"


def _play(
    run_spec: RunSpec, directory: Any, observers: list[Observer], stop: Callable[[], int], host: Host
) -> Generator[Record, None, Result]:
    if directory is not None:
        observers.insert(0, directory)
    tracking = run_spec.experiment.tracking
    if tracking.uri != "none":
        spec = {"name": tracking.name, "uri": tracking.uri, "experiment": tracking.experiment}
        observers.append(run_spec.registry.build("TRACKERS", {**spec, "directory": run_spec.directory}, "tracking"))
    started, rows, before = time.perf_counter(), History(), list[Record]()
    begun, process = list[Observer](), os.getpid()
    try:
        for observer in observers:
            begun.append(observer)
            observer.begin(run_spec, {})
        kept = directory.kept_result(run_spec) if directory is not None and run_spec.resume else None
        if kept is not None:
            notify(kept.rows, observers)
            model = kept.model
            before += kept.rows
            for row in kept.rows:
                rows.replace(row)
        else:
            with memory_errors(run_spec):
                model = yield from _play_rounds(run_spec, observers, (rows, before), stop, host)
        result = Result(
            run_spec.run_id,
            run_spec.experiment,
            rows,
            model,
            time.perf_counter() - started + sum(row["time/seconds"] for row in before),
            directory and directory.path,
        )
        for observer in observers:
            observer.end(result)
        discard(run_spec)
        return result
    except BaseException as error:
        if os.getpid() == process:  # a process that was forked meanwhile has only a copy of the run
            for observer in begun:
                observer.failed(error)
        raise


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


def _play_rounds(
    run_spec: RunSpec,
    observers: list[Observer],
    records: tuple[History, list[Record]],
    stop: Callable[[], int],
    host: Host,
) -> Generator[Record, None, dict[str, Tensor]]:
    """Run all rounds, collect their records, report every event to the observers, and yield every record.

    records: those of all rounds, and those of the rounds that an earlier process has run. Returns the final model's
    tensors.
    """
    rows, before = records
    on_ray = run_spec.experiment.engine.backend == "ray"
    events = _on_ray(run_spec, stop) if on_ray else in_process(run_spec, stop, host)
    with closing(events):  # end the run now if an observer raises, not when its exception is garbage-collected
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                return end.value
            before += event if isinstance(event, list) else []
            for row in event if isinstance(event, list) else [event]:
                if not isinstance(row, str):
                    rows.replace(row)
            notify(event, observers)
            if isinstance(event, dict):
                yield event


def notify(event: Event, observers: list[Observer]) -> None:
    """Report an event to the observers: a line of the log, the record of a round, or all records of a resumed run."""
    for observer in observers:
        if isinstance(event, str):
            observer.event(event)
        elif isinstance(event, list):
            observer.resumed(event)
        else:
            observer.record(event)


def _on_ray(run_spec: RunSpec, stop: Callable[[], int]) -> Generator[Event, None, dict[str, Tensor]]:
    from ..backends.ray.driver_actor import play

    return play(run_spec, stop)


def in_process(
    run_spec: RunSpec, stop: Callable[[], int] = lambda: 0, host: Host | None = None
) -> Generator[Event, None, dict[str, Tensor]]:
    """Run in this process. Yields the events of the driver, and returns the final model's tensors."""
    with bounded_memory(run_spec.device, run_spec.experiment.engine.gpus):
        return (
            yield from settings.in_turns(
                _in_process(run_spec, stop, host or Host()), lambda: settings.computing(run_spec)
            )
        )


def _in_process(run_spec: RunSpec, stop: Callable[[], int], host: Host) -> Generator[Event, None, dict[str, Tensor]]:
    """The same, with the settings of the run whenever it is asked for an event."""

    def beat() -> None:
        if stop():
            raise Interrupted(stop())

    split = host.split(run_spec)
    beat()
    run_spec, plan_line = host.plan(run_spec, split)
    beat()
    with host.driver(run_spec, split, beat) as driver:
        for line in (plan_line, *taken_notes()):
            driver.log(line)
        if run_spec.device.type == "cuda" and (clause := settings.workspace_clause()):
            driver.log(clause)
        if unused := unused_rows(split):
            driver.log(unused)
        yield from driver.rounds()
        return driver.tensors()
