"""Where a run keeps clients' states and checkpoints, and whether what an earlier part of it kept can be used."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config.differences import differences
from ..config.run_spec import RunSpec
from ..errors import ConfigError, StoreFull
from ..methods.state_spec import StateSpec
from ..storage.atomic_write import release, reserve
from ..storage.lock import LAUNCHER
from ..storage.object_store import Folder
from .checkpoint import Checkpoints, Snapshot, remove_all, written
from .row_files import RowFiles, remove_files
from .shared_checkpoint import Copies
from .table import Table


def make_table(run_spec: RunSpec, state_spec: StateSpec, opens: bool) -> Table:
    """Room for a row a client, a round's fresh rows, and the rows that checkpoints pin; opens: with everyone."""
    experiment, plan, directory = run_spec.experiment, run_spec.experiment.federation, run_spec.directory
    everyone = plan.clients if opens else plan.cohort
    kept = 0 if directory is None else 1 + (experiment.checkpoint.keep if experiment.checkpoint.every else 0)
    if directory is not None and run_spec.resume:
        kept = max(kept, 1 + len(written(directory)))  # all of which may pin rows
    folder = str(state_folder(run_spec))
    narrow = experiment.engine.state_dtype == "bfloat16"
    place = (folder, narrow, directory is not None)
    return Table(state_spec.client, plan.clients, everyone + kept * plan.clients, place)


def make_checkpoints(run_spec: RunSpec, table: Table, state_spec: StateSpec) -> Checkpoints | None:
    """None for a run without a folder. ConfigError where copies are asked for and their folder cannot be written to."""
    asked = run_spec.experiment.checkpoint
    if run_spec.directory is None:
        return None
    copies = None
    if asked.folder:
        rows = RowFiles(table.place, state_spec.client) if table.place.folder else None
        copies = Copies(asked.folder, run_spec.run_id, asked.keep, rows, Path(run_spec.directory))
        copies.check()
    return Checkpoints(run_spec.directory, asked.keep, table, copies)


def take_room(run_spec: RunSpec, server: list[torch.Tensor]) -> None:
    """Take room on the disk for the last checkpoint or the result, so that a disk that has become full meanwhile does
    not cost the run. server: the leaves of the server's state. StoreFull where there is no room."""
    if run_spec.directory is None:
        return
    plan = run_spec.experiment.federation
    state = sum(leaf.numel() * leaf.element_size() for leaf in server)
    count = 2 * state + 32 * plan.clients + 1024 * plan.rounds + 2**16
    try:
        reserve(Path(run_spec.directory), count)
    except OSError as error:
        raise StoreFull(
            f"no room for the model and the record of the rounds, {count:,} bytes, in {run_spec.directory} "
            f"({error.strerror}); make room or choose another --out"
        ) from None


def give_room(run_spec: RunSpec, launcher: bool = True) -> None:
    """Give that room back; launcher: also where the launcher has the same folder, and will do so itself."""
    if run_spec.directory is not None and (launcher or not (Path(run_spec.directory) / LAUNCHER).exists()):
        release(Path(run_spec.directory))


def state_folder(run_spec: RunSpec) -> Path:
    """The run's own, whatever else is kept in engine.store."""
    store = run_spec.experiment.engine.store
    if store:
        return Path(store) / f"state-{run_spec.run_id}"
    return (
        Path(run_spec.directory) / "state"
        if run_spec.directory
        else Path(tempfile.gettempdir()) / f"fedfleet-{run_spec.run_id}"
    )


def discard(run_spec: RunSpec, complete: bool = True) -> None:
    """Remove what a run would be resumed from: one that is complete, or that has no checkpoint."""
    if run_spec.experiment.engine.keep_state or (not complete and run_spec.directory and written(run_spec.directory)):
        return
    remove_files(str(state_folder(run_spec)))
    if run_spec.directory:
        remove_all(run_spec.directory)
    if run_spec.directory and complete and (folder := run_spec.experiment.checkpoint.folder):
        with suppress(OSError):  # what it costs is room there
            Folder(folder).remove(run_spec.run_id)


def usable(snapshot: Snapshot | None, run_spec: RunSpec, events: list[str]) -> Snapshot:
    """The snapshot, or ConfigError: none is sound, it is of another configuration, or there is no round left."""
    rounds = run_spec.experiment.federation.rounds
    if snapshot is None:
        why = f" ({'; '.join(events)})" if events else ""
        raise ConfigError(f"{run_spec.directory} has no checkpoint to resume from{why}; start the run anew")
    if keys := differences(snapshot.config, run_spec.experiment.plain()):
        raise ConfigError(f"the checkpoint is of another configuration: {'; '.join(keys)}; undo these changes")
    if snapshot.plan != (plan := run_spec.plan_for_checkpoint()):
        raise ConfigError(f"the checkpoint is of a run by {told(snapshot.plan)}, this one goes by {told(plan)}")
    before = snapshot.config["federation"]["rounds"]
    if resized(run_spec, before):
        raise ConfigError(
            f"federation.rounds must stay {before} to resume, got {rounds}: the method's own settings follow from it"
        )
    if snapshot.round >= rounds:
        raise ConfigError(f"federation.rounds > {snapshot.round} must hold to resume, got {rounds}")
    return snapshot


def told(plan: dict[str, Any]) -> str:
    """A plan for a sentence."""
    return f"blocks of {plan.get('block')} clients and {plan.get('kernels')} kernels"


def resized(run_spec: RunSpec, rounds: int) -> bool:
    """Whether the method would have other settings in a run of so many rounds."""
    federation = run_spec.experiment.federation.model_copy(update={"rounds": rounds})
    other = replace(run_spec, experiment=run_spec.experiment.model_copy(update={"federation": federation}))
    here, again, there = run_spec.method(), run_spec.method(), other.method()
    return here == again != there  # one without equality is none that can be asked


def wrong_rows(snapshot: Snapshot, table: Table, state_spec: StateSpec) -> str:
    """What is wrong with the rows of a checkpoint, or ""."""
    if len(snapshot.row) != len(table.row):
        return ""  # another configuration: said so later
    held = np.flatnonzero(snapshot.row >= 0)
    if not table.place.folder or not len(held):
        return ""
    if int(snapshot.row.max()) >= table.capacity:
        return "rows beyond the store"
    found = RowFiles(table.place, state_spec.client).digests(snapshot.row[held])
    bad = int((found != snapshot.digest[held]).any(1).sum())
    return f"the states of {bad} clients do not match their digests" if bad else ""
