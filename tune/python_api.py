"""`fedfleet.run` and `fedfleet.resume`: those of the engine, with progress for whoever waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, overload

from ..engine import api
from ..engine.config.schema import Experiment
from ..engine.runs.observer import Watching
from ..engine.runs.result import Result
from .progress import with_progress


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    observers: Iterable[Watching] = (),
    run_id: str | None = None,
    stop: Callable[[], int] | None = None,
    *,
    initial_model: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Result:
    """Run an experiment to its last round.

    out: a folder for the run's files (configuration, environment, rounds.parquet, model, log, checkpoints); None for a
    run without files, which cannot be resumed. observers: they receive every round and every line of the log; a
    function instead of an Observer is called with the record of every round, and one of two arguments also gets the
    run, see `Observer`. run_id: the run's name; a new one is made
    if it is None. stop: called often, returns the number of a signal that shall end the run, or 0; without it, SIGINT,
    SIGTERM, SIGHUP and SIGUSR1 of this process end the run, the last two unless the program handles or ignores them.
    initial_model: the model before round 1, name -> tensor or array, such as the `model` of another result; None for
    the workload's own. progress: whether to show a line with the round, on a terminal and in a notebook; elsewhere
    standard error gets a line after ten seconds, and then now and then.

    On Ray, the runs of one process share the Ray that the first of them starts; see `fedfleet.shutdown`.

    Raises ConfigError if the experiment cannot run, Diverged if the model is not finite or becomes far too large,
    Interrupted if the run was ended by a signal (with a checkpoint, if the run has a folder), and other FedFleetErrors.
    """
    watching = with_progress(observers, progress)
    return api.run(experiment, out, watching, run_id, stop, initial_model=initial_model)


@overload
def resume(
    experiment: str | Path,
    *,
    observers: Iterable[Watching] = (),
    stop: Callable[[], int] | None = None,
    rounds: int | None = None,
    progress: bool = True,
) -> Result: ...


@overload
def resume(
    experiment: Experiment,
    directory: str | Path,
    observers: Iterable[Watching] = (),
    stop: Callable[[], int] | None = None,
    *,
    rounds: int | None = None,
    progress: bool = True,
) -> Result: ...


def resume(
    experiment: Experiment | str | Path,
    directory: str | Path | None = None,
    observers: Iterable[Watching] = (),
    stop: Callable[[], int] | None = None,
    *,
    rounds: int | None = None,
    progress: bool = True,
) -> Result:
    """Continue the run in a folder from its last sound checkpoint, to the same bits as a run without interruption.

        fedfleet.resume("runs/mine")
        fedfleet.resume(experiment, "runs/mine")
        fedfleet.resume("runs/mine", rounds=500)

    experiment: the run's folder alone, and the run continues with the configuration there, which is impossible if the
    workload or the method was an object and not a name; or the configuration, with the folder as `directory`. It may
    differ from that in the folder in settings that do not change the result (workers, backend, tracking), and it may
    have more rounds, also if the run is complete. rounds: the number of rounds, in place of that of the configuration.
    observers, stop, progress: as in `run`. Raises ConfigError if there is nothing to resume from, or if other settings
    differ, which it names; and what `run` raises.
    """
    return api.resume(experiment, directory, with_progress(observers, progress), stop, rounds=rounds)
