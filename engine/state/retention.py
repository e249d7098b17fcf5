"""Where a run keeps client states and checkpoints, and whether a checkpoint of an earlier process can be used."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config.differences import differences
from ..errors import ConfigError, StoreFull
from ..method_form.state_spec import StateSpec
from ..run_spec import RunSpec
from ..storage.atomic_write import release, reserve
from ..storage.lock import LAUNCHER
from ..storage.object_store import join_url, open_folder
from .checkpoint import Checkpoints, checkpointed_rounds, checkpoints_in, remove_all
from .checkpoint_store import CheckpointStore, Damaged, Snapshot
from .copies import Copies
from .row_files import RowFiles, remove_files
from .sharing import shared_ends
from .table import Table

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


def make_table(run_spec: RunSpec, state_spec: StateSpec, warm_start: bool) -> Table:
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
    return Table(
        state_spec.client,
        federation.clients,
        spare=fresh + checkpoints * federation.clients,
        folder=str(state_folder(run_spec)),
        narrow=experiment.engine.state_dtype == "bfloat16",
        digests=directory is not None,
        shared=shared_ends(str(state_folder(run_spec))),
    )


def make_checkpoints(run_spec: RunSpec, table: Table, state_spec: StateSpec) -> Checkpoints | None:
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


def sealed_plan(run_spec: RunSpec) -> dict[str, Any] | None:
    """The execution plan in the newest sound manifest of the run's folder, or else of its copies; None if there is
    none."""
    folder, stores = run_spec.experiment.checkpoint.folder, list[CheckpointStore]()
    if run_spec.directory is not None:
        stores.append(checkpoints_in(run_spec.directory))
    if folder:
        stores.append(CheckpointStore(open_folder(join_url(folder, run_spec.run_id))))
    for store in stores:
        with suppress(Damaged, OSError):
            return store.newest_manifest()["plan"]
    return None


def check_usable(snapshot: Snapshot | None, run_spec: RunSpec, events: list[str]) -> Snapshot:
    """The checkpoint that was loaded.

    Raises ConfigError if there is none, if it is of another configuration or execution plan, or if no round is left.
    events: what was wrong with the checkpoints that were skipped.
    """
    rounds, privacy = run_spec.experiment.federation.rounds, run_spec.privacy
    if snapshot is None:
        why = f" ({'; '.join(events)})" if events else ""
        raise ConfigError(f"{run_spec.directory} has no checkpoint to resume from{why}; start the run anew")
    if keys := differences(snapshot.config, run_spec.experiment.plain()):
        raise ConfigError(f"the checkpoint is of another configuration: {'; '.join(keys)}; undo these changes")
    if snapshot.plan != (plan := run_spec.plan_for_checkpoint()):
        raise ConfigError(
            f"the checkpoint is of a run with {describe_plan(snapshot.plan)}, this run has {describe_plan(plan)}; "
            "start the run anew"
        )
    check_frozen(snapshot, run_spec)
    before = snapshot.config["federation"]["rounds"]
    if rounds_change_method(run_spec, before):
        raise ConfigError(
            f"federation.rounds must stay {before} to resume, got {rounds}: the method's own settings follow from it"
        )
    if privacy is not None and privacy.follows_rounds and rounds != before:
        raise ConfigError(
            f"federation.rounds must stay {before} to resume, got {rounds}: the noise depends on their number"
        )
    if rounds > run_spec.last_round <= snapshot.round:
        raise ConfigError(f"privacy.epsilon is spent after round {snapshot.round}; raise it in a new run")
    if snapshot.round >= rounds:
        raise ConfigError(f"federation.rounds > {snapshot.round} must hold to resume, got {rounds}; set it higher")
    return snapshot


def check_frozen(snapshot: Snapshot, run_spec: RunSpec) -> None:
    """Raise ConfigError if the frozen tensors of the model are not those that the rounds of a checkpoint had."""
    before, now = snapshot.frozen, run_spec.frozen_facts
    if before.get("tensors", []) != now.get("tensors", []):
        got = f"{', '.join(now.get('tensors', [])) or 'none'} after {', '.join(before.get('tensors', [])) or 'none'}"
        raise ConfigError(f"workload: the same tensors must be frozen as in the checkpoint, got {got}; undo this")
    if before.get("sha256") != now.get("sha256"):
        raise ConfigError(
            f"workload: the frozen tensors must have the numbers that they had in the checkpoint, got others for "
            f"{run_spec.frozen_text}; build the model as it was built then, or put "
            "the initial.safetensors of the run into its folder"
        )


def describe_plan(plan: dict[str, Any]) -> str:
    """An execution plan in words, for an error message."""
    return f"blocks of {plan.get('block')} clients and {plan.get('kernels')} kernels"


def rounds_change_method(run_spec: RunSpec, rounds: int) -> bool:
    """Whether the method would have other settings in a run with this number of rounds."""
    federation = run_spec.experiment.federation.model_copy(update={"rounds": rounds})
    other = replace(run_spec, experiment=run_spec.experiment.model_copy(update={"federation": federation}))
    method, same_method, other_method = run_spec.method(), run_spec.method(), other.method()
    return method == same_method != other_method  # a method that does not equal itself cannot be compared


def verify_rows(snapshot: Snapshot, table: Table, state_spec: StateSpec) -> None:
    """Raise Damaged if the rows of a checkpoint are not in the store."""
    if len(snapshot.row) != len(table.row):
        return  # the configuration differs, which `check_usable` reports
    clients = np.flatnonzero(snapshot.row >= 0)
    if not table.layout.folder or not len(clients):
        return
    if int(snapshot.row.max()) >= table.capacity:
        raise Damaged("the store has too few rows")
    digests = RowFiles(table.layout, state_spec.client).digests(snapshot.row[clients])
    if bad := int((digests != snapshot.digest[clients]).any(1).sum()):
        raise Damaged(f"the states of {bad} clients do not match their digests")
