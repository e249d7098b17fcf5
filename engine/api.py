"""`run(experiment)`: from a validated experiment to records, a model and a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from .config.differences import differences
from .config.schema import Experiment
from .errors import ConfigError
from .runs.launch import new_run_id, prepare, watched
from .runs.observer import Observer
from .runs.result import Result


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    observers: Iterable[Observer] = (),
    run_id: str | None = None,
    stop: Callable[[], int] | None = None,
) -> Result:
    """Run to the last round.

    out: a folder for the run's files (configuration, environment, rounds.parquet, model, log, checkpoints); None writes
    none. observers: told of every round. stop: is asked often and returns the number of a signal to end by, or 0;
    without it SIGINT and SIGTERM of this process end the run. Raises ConfigError for what cannot run, Diverged where
    the model explodes, Interrupted when the run was asked to end (with a checkpoint, where there is a folder) and other
    FedFleetErrors.
    """
    from .runs.run_directory import RunDirectory

    if out == "":
        raise ConfigError("out must name a folder, got an empty text; give one, or None for a run without files")
    directory = RunDirectory.new(Path(out)) if out is not None else None
    run_spec = prepare(experiment, run_id or new_run_id(), directory.path if directory else None)
    return watched(run_spec, directory, list(observers), stop)


def resume(
    experiment: Experiment,
    directory: str | Path,
    observers: Iterable[Observer] = (),
    stop: Callable[[], int] | None = None,
) -> Result:
    """Go on from the last sound checkpoint of a run's folder, to the same bits as a run without a break.

    experiment: the folder's configuration; it may differ in what moves no bit (workers, backend, tracking) and have
    more rounds. stop: as in `run`. Raises ConfigError where there is nothing to resume from, or naming the settings
    that differ.
    """
    from .runs.run_directory import RunDirectory

    kept = RunDirectory.old(Path(directory))
    if keys := differences(kept.config(), experiment.plain()):
        raise ConfigError(f"the run in {directory} is of another configuration: {'; '.join(keys)}; undo these changes")
    run_spec = prepare(experiment, kept.run_id, kept.path, resume=True)
    return watched(run_spec, kept, list(observers), stop)
