"""Where a run keeps client states, messages and checkpoints: made when it begins, removed when it is over."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..config.schema import Checkpoint, Engine, Experiment, Federation
from ..errors import StoreFull
from ..method_form.state_spec import StateSpec
from ..storage.atomic_write import release, reserve
from ..storage.lock import LAUNCHER
from ..storage.object_store import join_url, open_folder
from .checkpoint import Checkpoints, checkpointed_rounds, checkpoints_in, keep_only, remove_all
from .checkpoint_store import CheckpointStore, Damaged
from .copies import Copies
from .row_files import RowFiles, remove_files
from .row_table import RowTable
from .sharing import shared_ends

CHECKPOINT_SECONDS = 600.0
"""The seconds between checkpoints if `checkpoint.seconds` is auto: what a kill or a power cut may cost. A checkpoint
takes milliseconds of the driver, because it copies no client states."""

LAST_BYTES = 64 * 2**20
"""The most bytes of the state after the last round that a complete run keeps if `checkpoint.last` is auto."""


def checkpoint_seconds(settings: Checkpoint, directory: str | None) -> float | None:
    """The seconds between two checkpoints; None if none are written because of the time. directory: the run's folder,
    None for a run without files."""
    if directory is None:
        return None
    if settings.seconds != "auto":
        return settings.seconds
    return None if settings.every else CHECKPOINT_SECONDS


def keeps_last(settings: Checkpoint, engine: Engine, directory: str | None, count: int) -> bool:
    """Whether a complete run keeps the state after its last round. directory: the run's folder, None for a run without
    files. count: the bytes of this state."""
    if directory is None or settings.last != "auto":
        return directory is not None and bool(settings.last)
    return not engine.store and count <= LAST_BYTES


def make_table(
    experiment: Experiment, state_spec: StateSpec, folder: Path, directory: str | None, resume: bool, warm_start: bool
) -> RowTable:
    """The table of client states, with the files of their rows.

    It has a row for each client, fresh rows for a round, and the rows that checkpoints pin. folder: of the client
    states. directory: the run's folder, None for a run without files. resume: whether the run continues from the
    checkpoints there. warm_start: whether all clients take part in a pass before round 1.
    """
    federation = experiment.federation
    fresh = max(federation.clients if warm_start else 0, federation.largest_cohort)
    several = experiment.checkpoint.every or checkpoint_seconds(experiment.checkpoint, directory) is not None
    checkpoints = 0 if directory is None else 1 + (experiment.checkpoint.keep if several else 0)
    if directory is not None and resume:
        checkpoints = max(checkpoints, 1 + len(checkpointed_rounds(directory)))  # all of them may pin rows
    return RowTable(
        state_spec.client,
        federation.clients,
        spare=fresh + checkpoints * federation.clients,
        folder=str(folder),
        bfloat16=experiment.engine.state_dtype == "bfloat16",
        digests=directory is not None,
        shared=shared_ends(str(folder)),
    )


def make_checkpoints(
    settings: Checkpoint, run_id: str, directory: str | None, table: RowTable, state_spec: StateSpec
) -> Checkpoints | None:
    """The checkpoints of a run; None for a run without a folder.

    Raises ConfigError if `checkpoint.folder` is set and cannot be written to.
    """
    if directory is None:
        return None
    copies = None
    if settings.folder:
        rows = RowFiles(table.layout, state_spec.client) if table.layout.folder else None
        copies = Copies(settings.folder, run_id, settings.keep, rows, Path(directory))
        copies.check()
    return Checkpoints(directory, settings.keep, table, copies)


def sealed_plan(settings: Checkpoint, run_id: str, directory: str | None) -> dict[str, Any] | None:
    """The execution plan in the newest sound manifest of the run's folder, or else of its copies; None if there is
    none."""
    stores = [] if directory is None else [checkpoints_in(directory)]
    if settings.folder:
        stores.append(CheckpointStore(open_folder(join_url(settings.folder, run_id))))
    for store in stores:
        with suppress(Damaged, OSError):
            return store.newest_manifest()["plan"]
    return None


def reserve_disk(directory: str | None, federation: Federation, server: list[torch.Tensor]) -> None:
    """Reserve disk space for the last checkpoint or the result, so that a disk that fills up does not cost the run.

    directory: the run's folder, if it has one. server: the leaves of the server's state. Raises StoreFull if there is
    not enough space.
    """
    if directory is None:
        return
    server_bytes = sum(leaf.numel() * leaf.element_size() for leaf in server)
    count = 2 * server_bytes + 32 * federation.clients + 1024 * federation.rounds + 2**16
    try:
        reserve(Path(directory), count)
    except OSError as error:
        raise StoreFull(
            f"no room for the model and the record of the rounds, {count:,} bytes, in {directory} "
            f"({error.strerror}); make room or choose another --out"
        ) from None


def release_disk(directory: str | None, beside_launcher: bool = True) -> None:
    """Release the space that `reserve_disk` took.

    beside_launcher: do so even if the launcher uses the same folder, and will release the space itself.
    """
    if directory is not None and (beside_launcher or not (Path(directory) / LAUNCHER).exists()):
        release(Path(directory))


def state_folder(engine: Engine, run_id: str, directory: str | None) -> Path:
    """The folder of a run's client states; no other run uses it. directory: the run's folder, if it has one."""
    if engine.store:
        return Path(engine.store) / f"state-{run_id}"
    return Path(directory) / "state" if directory else Path(tempfile.gettempdir()) / f"fedfleet-{run_id}"


def message_folder(states: Path) -> Path:
    """The folder of the messages of the round under way. states: the folder of the run's client states."""
    return states.with_name(f"{states.name}-messages")


def discard(experiment: Experiment, run_id: str, directory: str | None, complete: int = 0) -> None:
    """Remove the client states and checkpoints of a run that is complete, or that has no checkpoint to resume from.

    complete: the number of the rounds of a complete run, whose state after the last one stays if it is to be kept; 0
    for a run that is not complete.
    """
    if experiment.engine.keep_state or (not complete and directory and checkpointed_rounds(directory)):
        return
    if directory and complete:
        forget_copies(experiment.checkpoint, run_id)
    if directory and complete and has_last(experiment, directory, complete):
        return keep_only(directory, complete)
    states = state_folder(experiment.engine, run_id, directory)
    remove_files(str(states))
    remove_files(str(message_folder(states)))
    if directory:
        remove_all(directory)


def has_last(experiment: Experiment, directory: str, number: int) -> bool:
    """Whether the folder of a run has the state after its last round, `number`, which is to be kept."""
    there = checkpointed_rounds(directory)[-1:] == [number]
    return there and keeps_last(experiment.checkpoint, experiment.engine, directory, bytes_in(directory))


def bytes_in(directory: str) -> int:
    """The bytes on the disk of the client states and checkpoints in the folder of a run."""
    files = (file for name in ("state", "checkpoints") for file in (Path(directory) / name).rglob("*"))
    return sum(512 * file.lstat().st_blocks for file in files)


def forget_copies(settings: Checkpoint, run_id: str) -> None:
    """Remove the copies of the checkpoints of a run that is complete, or begins again with another execution plan."""
    if settings.folder:
        with suppress(OSError):  # copies that stay cost space, nothing else
            open_folder(settings.folder).remove(run_id)
