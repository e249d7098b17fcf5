"""Runs of the commands `run`, `resume` and `fork`: with progress, with what to do where one stops early, and with the
result as text."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import psutil

from ..engine.api import resume, run
from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError, Diverged, FedFleetError, Interrupted, NotSaved
from ..engine.records.metrics import is_in_short
from ..engine.runs.launch import execute
from ..engine.runs.prepare import new_run_id
from ..engine.runs.result import Result
from ..engine.state.checkpoint import checkpointed_rounds
from .forking import prepared
from .output_paths import check_out
from .progress import observers
from .run_files import privacy_spent
from .streams import say


def folder_of(out: Path | None) -> tuple[str, Path]:
    """(id of a new run, its folder). out: the folder that the command line names. Raises ConfigError for one that
    cannot be created."""
    check_out(out or Path("runs"))
    run_id = new_run_id()
    return run_id, out or Path("runs") / run_id


def begin_run(experiment: Experiment, folder: Path, run_id: str, quiet: bool) -> Result:
    """Run an experiment. quiet: whether to show no progress."""
    with resumable(folder):
        return run(experiment, folder, observers(quiet), run_id)


def resume_run(experiment: Experiment, folder: Path, quiet: bool, rounds: int | None = None) -> Result:
    """Continue the run in a folder. rounds: that it is to have, also if it is complete; None if nobody said so."""
    with resumable(folder):
        return resume(experiment, folder, observers(quiet), rounds=rounds)


def fork_run(
    run: Path, number: int, overrides: tuple[str, ...], out: Path | None, without: tuple[int, ...], quiet: bool
) -> Result:
    """Go on from a round of the run in a folder as a run of its own; the arguments are those of `forking.fork`."""
    run_spec, folder = prepared(run, number, overrides, out, without)
    with resumable(folder.path):
        return execute(run_spec, folder, observers(quiet))


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Add to the error of a run that stops early how to resume it, if it has left a checkpoint in `folder`.

    What Ray prints in this context goes to standard error, since standard output is for the result. A Ray that the run
    has started ends with the context, because a command that was interrupted ends without Python's own clean-up.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (ConfigError, Diverged, NotSaved):
        raise
    except FedFleetError as error:
        rounds = checkpointed_rounds(folder)
        if not rounds:
            raise
        how = f"; checkpoint after round {rounds[-1]}; to go on: fedfleet resume {folder}"
        if isinstance(error, Interrupted):
            raise Interrupted(error.signal, how) from None
        raise FedFleetError(f"{error}{how}") from error
    finally:
        if "ray" in sys.modules:
            from ..engine.backends.ray.connect import shutdown

            shutdown()


def show_result(result: Result, as_json: bool) -> None:
    """Print the result of a command that has run, continued or followed a run."""
    took = time.time() - psutil.Process().create_time()  # also for the imports, which are half of a short run
    say(json.dumps(result.summary()) if as_json else text_of(result, took))


def text_of(result: Result, took: float) -> str:
    """A run's result in three lines, in one more if it is private, and in one more for each warning. took: the seconds
    since the command began."""
    summary, spent = result.summary(), privacy_spent(result.directory) if result.directory else ""
    short = {name: value for name, value in result.metrics.items() if is_in_short(name)}
    for name in [name for name in short if "validation_" in name]:
        if name.replace("validation_", "test_") in short:
            del short[name]  # the line would be twice as long
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in short.items() if not math.isnan(value))
    return "\n".join(
        [
            f"{summary['rounds']} rounds in {summary['seconds']:.1f} s, the command took {took:.1f} s   {metrics}",
            f"down {megabytes(summary['bytes_down'])}, up {megabytes(summary['bytes_up'])}   "
            f"model sha256 {summary['model_sha256'][:16]}…",
            f"run {summary['run_id']} in {summary['directory']}",
            *([f"privacy: {spent}"] if spent else []),
            *([f"stopped early: {result.stopped}"] if result.stopped else []),
            *([f"best: {best.metric} {best.value:.4f} in round {best.round}"] if (best := result.best) else []),
            *(f"warning: {sentence}" for sentence in summary["warnings"]),
        ]
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
