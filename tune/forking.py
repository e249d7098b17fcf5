"""`fedfleet.fork` and the command `fedfleet fork`: a new run from a committed round of another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..engine.config.schema import Experiment
from ..engine.config.schema import experiment as validated
from ..engine.errors import ConfigError
from ..engine.run_spec import RunSpec
from ..engine.runs.fork import fork_of
from ..engine.runs.launch import execute
from ..engine.runs.observer import Watching, observers_of
from ..engine.runs.prepare import new_run_id
from ..engine.runs.result import Result
from ..engine.runs.run_directory import RunDirectory
from ..engine.runs.saved_files import require_kind
from ..engine.storage.expanded import expanded
from .files import load
from .progress import with_progress


def fork(
    run: str | Path | Result,
    round: int,
    changes: str | Iterable[str] | Experiment = (),
    out: str | Path | None = None,
    *,
    without_clients: Iterable[int] = (),
    observers: Iterable[Watching] = (),
    run_id: str | None = None,
    stop: Callable[[], int] | None = None,
    progress: bool = True,
) -> Result:
    """Go on from a committed round of a run with other settings, as a run of its own.

        fedfleet.fork("runs/mine", 20, "method.rule.lr=0.05", out="runs/half-the-step")
        fedfleet.fork("runs/mine", 20, out="runs/without", without_clients=[3])

    run: the folder of a run, or a result that has one. round: the round to go on from, which must have a checkpoint
    there; 0 goes on from the beginning and needs none. changes: one `a.b=c`, or several; or the whole configuration of
    the fork. out: the folder of the fork, by default runs/ID. without_clients: clients that are drawn but not used from
    there on, besides those of `federation.without`. observers, run_id, stop, progress: as in `run`.

    All draws are those of the parent. Without any change the fork has the parent's bits, and its records are equal from
    the next round on. The states of clients are shared with the parent and not copied, if both folders are on the same
    file system. Raises ConfigError if the round has no checkpoint, or if a setting differs that a fork must not change;
    see docs/howto/forks.md.
    """
    if isinstance(run, Result) and run.directory is None:
        raise ConfigError("run has no folder, so it has no checkpoints to go on from; run it with out")
    folder = run.directory if isinstance(run, Result) else expanded(run)
    assert folder is not None
    run_spec, directory = prepared(folder, round, changes, out, tuple(without_clients), run_id)
    return execute(run_spec, directory, observers_of(with_progress(observers, progress)), stop)


def prepared(
    run: Path,
    round: int,
    changes: str | Iterable[str] | Experiment,
    out: str | Path | None,
    without_clients: tuple[int, ...] = (),
    run_id: str | None = None,
) -> tuple[RunSpec, RunDirectory]:
    """Make a fork, whose rounds are yet to run; the arguments are those of `fork`."""
    require_kind(run, "run")
    experiment = changes if isinstance(changes, Experiment) else load(run / "config.yaml", changes)
    if without_clients:
        federation = experiment.federation
        without = [*federation.without, *(client for client in without_clients if client not in federation.without)]
        changed = {**federation.model_dump(), "without": without}
        experiment = validated({**dict(experiment), "federation": changed})
    run_id = run_id or new_run_id()
    return fork_of(run, round, experiment, expanded(out) if out is not None else Path("runs") / run_id, run_id)


def client_numbers(texts: Iterable[str], option: str = "--without-client") -> tuple[int, ...]:
    """The clients that options such as "3,7" name. option: its name. Raises ConfigError for anything else."""
    found = []
    for text in texts:
        for part in text.split(","):
            if not part.strip().isdigit():
                raise ConfigError(f"{option} must be numbers of clients as in 3,7, got {text!r}; change it")
            found.append(int(part))
    return tuple(dict.fromkeys(found))
