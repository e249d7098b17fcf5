"""`run` and `resume`: from a validated experiment to a result, and to the files of a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from .config.differences import differences
from .config.schema import Experiment
from .errors import ConfigError
from .runs.launch import execute, new_run_id, prepare
from .runs.observer import Observer
from .runs.result import Result


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    observers: Iterable[Observer] = (),
    run_id: str | None = None,
    stop: Callable[[], int] | None = None,
) -> Result:
    """Run an experiment to its last round.

    out: a folder for the run's files (configuration, environment, rounds.parquet, model, log, checkpoints); None for a
    run without files. observers: they receive every round and every line of the log. run_id: the run's name; a new one
    is made if it is None. stop: called often, returns the number of a signal that shall end the run, or 0; without it,
    SIGINT and SIGTERM of this process end the run.

    Raises ConfigError if the experiment cannot run, Diverged if the model is not finite or becomes far too large,
    Interrupted if the run was ended by a signal (with a checkpoint, if the run has a folder), and other FedFleetErrors.
    """
    from .runs.run_directory import RunDirectory

    if out == "":
        raise ConfigError("out must name a folder, got an empty text; give one, or None for a run without files")
    directory = RunDirectory.new(Path(out)) if out is not None else None
    run_spec = prepare(experiment, run_id or new_run_id(), directory.path if directory else None)
    return execute(run_spec, directory, list(observers), stop)


def resume(
    experiment: Experiment,
    directory: str | Path,
    observers: Iterable[Observer] = (),
    stop: Callable[[], int] | None = None,
) -> Result:
    """Continue the run in a folder from its last sound checkpoint, to the same bits as a run without interruption.

    experiment: the configuration of the run. It may differ in settings that do not change the result (workers, backend,
    tracking), and it may have more rounds. observers, stop: as in `run`. Raises ConfigError if there is nothing to
    resume from, or if other settings differ, which it names.
    """
    from .runs.run_directory import RunDirectory

    run_directory = RunDirectory.old(Path(directory))
    if keys := differences(run_directory.config(), experiment.plain()):
        raise ConfigError(f"the run in {directory} is of another configuration: {'; '.join(keys)}; undo these changes")
    run_spec = prepare(experiment, run_directory.run_id, run_directory.path, resume=True)
    return execute(run_spec, run_directory, list(observers), stop)
