"""Where a run keeps client states, messages and checkpoints: made when it begins, removed when it is over."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import StoreFull
from ..method_form.state_spec import StateSpec
from ..run_spec import RunSpec
from ..storage.atomic_write import release, reserve
from ..storage.lock import LAUNCHER
from ..storage.object_store import open_folder
from .checkpoint import Checkpoints, checkpointed_rounds, remove_all
from .copies import Copies
from .row_files import RowFiles, remove_files
from .row_table import RowTable
from .sharing import shared_ends

CHECKPOINT_SECONDS = 600.0
"""The seconds between checkpoints if `checkpoint.seconds` is auto: what a kill or a power cut may cost. A checkpoint
takes milliseconds of the driver, because it copies no client states."""


def checkpoint_seconds(run_spec: RunSpec) -> float | None:
    """The seconds between two checkpoints; None if none are written because of the time."""
    settings = run_spec.experiment.checkpoint
    if run_spec.directory is None:
        return None
    if settings.seconds != "auto":
        return settings.seconds
    return None if settings.every else CHECKPOINT_SECONDS


def make_table(run_spec: RunSpec, state_spec: StateSpec, warm_start: bool) -> RowTable:
    """The table of client states, with the files of their rows.

    It has a row for each client, fresh rows for a round, and the rows that checkpoints pin. warm_start: whether all
    clients take part in a pass before round 1.
    """
    experiment, federation, directory = run_spec.experiment, run_spec.experiment.federation, run_spec.directory
    fresh = max(federation.clients if warm_start else 0, federation.largest_cohort)
    several = experiment.checkpoint.every or checkpoint_seconds(run_spec) is not None
    checkpoints = 0 if directory is None else 1 + (experiment.checkpoint.keep if several else 0)
    if directory is not None and run_spec.resume:
        checkpoints = max(checkpoints, 1 + len(checkpointed_rounds(directory)))  # all of them may pin rows
    return RowTable(
        state_spec.client,
        federation.clients,
        spare=fresh + checkpoints * federation.clients,
        folder=str(state_folder(run_spec)),
        bfloat16=experiment.engine.state_dtype == "bfloat16",
        digests=directory is not None,
        shared=shared_ends(str(state_folder(run_spec))),
    )


def make_checkpoints(run_spec: RunSpec, table: RowTable, state_spec: StateSpec) -> Checkpoints | None:
    """The checkpoints of a run; None for a run without a folder.

    Raises ConfigError if `checkpoint.folder` is set and cannot be written to.
    """
    settings = run_spec.experiment.checkpoint
    if run_spec.directory is None:
        return None
    copies = None
    if settings.folder:
        rows = RowFiles(table.layout, state_spec.client) if table.layout.folder else None
        copies = Copies(settings.folder, run_spec.run_id, settings.keep, rows, Path(run_spec.directory))
        copies.check()
    return Checkpoints(run_spec.directory, settings.keep, table, copies)


def reserve_disk(run_spec: RunSpec, server: list[torch.Tensor]) -> None:
    """Reserve disk space for the last checkpoint or the result, so that a disk that fills up does not cost the run.

    server: the leaves of the server's state. Raises StoreFull if there is not enough space.
    """
    if run_spec.directory is None:
        return
    federation = run_spec.experiment.federation
    server_bytes = sum(leaf.numel() * leaf.element_size() for leaf in server)
    count = 2 * server_bytes + 32 * federation.clients + 1024 * federation.rounds + 2**16
    try:
        reserve(Path(run_spec.directory), count)
    except OSError as error:
        raise StoreFull(
            f"no room for the model and the record of the rounds, {count:,} bytes, in {run_spec.directory} "
            f"({error.strerror}); make room or choose another --out"
        ) from None


def release_disk(run_spec: RunSpec, beside_launcher: bool = True) -> None:
    """Release the space that `reserve_disk` took.

    beside_launcher: do so even if the launcher uses the same folder, and will release the space itself.
    """
    if run_spec.directory is not None and (beside_launcher or not (Path(run_spec.directory) / LAUNCHER).exists()):
        release(Path(run_spec.directory))


def state_folder(run_spec: RunSpec) -> Path:
    """The folder of this run's client states; no other run uses it."""
    store = run_spec.experiment.engine.store
    if store:
        return Path(store) / f"state-{run_spec.run_id}"
    if run_spec.directory:
        return Path(run_spec.directory) / "state"
    return Path(tempfile.gettempdir()) / f"fedfleet-{run_spec.run_id}"


def message_folder(run_spec: RunSpec) -> Path:
    """The folder of the messages of the round under way."""
    folder = state_folder(run_spec)
    return folder.with_name(f"{folder.name}-messages")


def discard(run_spec: RunSpec, complete: bool = True) -> None:
    """Remove the client states and checkpoints of a run that is complete, or that has no checkpoint to resume from."""
    directory = run_spec.directory
    if run_spec.experiment.engine.keep_state or (not complete and directory and checkpointed_rounds(directory)):
        return
    remove_files(str(state_folder(run_spec)))
    remove_files(str(message_folder(run_spec)))
    if directory:
        remove_all(directory)
    if directory and complete:
        forget_copies(run_spec)


def forget_copies(run_spec: RunSpec) -> None:
    """Remove the copies of the checkpoints of a run that is complete, or begins again with another execution plan."""
    if folder := run_spec.experiment.checkpoint.folder:
        with suppress(OSError):  # copies that stay cost space, nothing else
            open_folder(folder).remove(run_spec.run_id)
