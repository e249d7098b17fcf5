"""Forks: a new run from a committed round of another run, with other settings.

A fork is the folder of a run that was interrupted after that round and has other settings. It has a copy of the round's
checkpoint, in which the states of parts that were exchanged are those before round 1, and links to the client states,
see `state/sharing.py`. From then on it is resumed as any run is; so a fork that is killed is resumed in the same way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils import _pytree as pytree

from ..accelerators.settings import applied
from ..config.differences import fork_changes
from ..config.schema import Experiment
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..records.lineage import Lineage, lineage_of, write_lineage
from ..rounds.resuming import check_frozen, check_stop
from ..run_spec import RunSpec
from ..state.checkpoint import checkpointed_rounds, checkpoints_in, fork_mark
from ..state.checkpoint_store import Damaged, Snapshot, name_of
from ..state.folders import state_folder
from ..state.row_files import remove_files, width
from ..state.sharing import share_rows
from ..storage.plain_files import refuse_unusual
from .fork_states import check_workload, parent_of, states_of_fork, validated_with
from .prepare import new_run_id, prepare
from .run_directory import RunDirectory, json_of_frozen, log_line, read_run_id, refuse_run
from .saved_files import FROZEN, INITIAL, NAMES, initial_model, require_kind, saved_config


@applied()
def fork_of(
    parent: Path, number: int, experiment: Experiment, out: Path, run_id: str | None = None
) -> tuple[RunSpec, RunDirectory]:
    """Make a fork of the run in the folder `parent` after round `number`: its specification and its folder.

    experiment: the configuration of the fork. out: its folder, which must not exist or be empty. run_id: a new one is
    made if it is None. Raises ConfigError if the round has no sound checkpoint, or if a setting differs that must not.
    """
    refuse_run(out)
    require_kind(parent, "run", "run.json")
    refuse_unusual(parent, NAMES)
    origin, run_id = RunDirectory(parent, read_run_id(parent)), run_id or new_run_id()
    if number == 0:
        config = saved_config(origin.path)
        changes = fork_changes(config, experiment.plain())
        lineage = Lineage(origin.run_id, str(origin.path), 0, changes, lineage_of(origin.path))
        run_spec = prepare(experiment, run_id, out.resolve(), initial_model=initial_model(origin.path))
        check_workload(parent_of(config, run_spec), run_spec)
        return run_spec, RunDirectory(out, run_id, lineage)
    unsafe, snapshot = mark_checkpoint(origin.path, number), snapshot_of(origin.path, number)
    changes = fork_changes(snapshot.config, experiment.plain())
    lineage = Lineage(origin.run_id, str(origin.path), number, changes, lineage_of(origin.path))
    if experiment.federation.rounds <= number:
        rounds = experiment.federation.rounds
        raise ConfigError(f"federation.rounds > {number} must hold to go on after it, got {rounds}; set it higher")
    run_spec = prepare(experiment, run_id, out.resolve(), resume=True, initial_model=initial_model(origin.path))
    check_rounds(snapshot, run_spec)
    check_frozen(snapshot, run_spec)
    check_stop(run_spec, snapshot)
    fork, fresh = states_of_fork(snapshot, run_spec) if changes else (snapshot.server, [])
    snapshot = snapshot._replace(server=fork, config=experiment.plain())
    write_folder(origin, snapshot, run_spec, lineage, fresh, unsafe)
    return run_spec, RunDirectory(out, run_id, lineage)


def mark_checkpoint(parent: Path, number: int) -> str:
    """Mark a checkpoint, see `fork_mark`. Returns why that is impossible, such as a folder that cannot be written to,
    or "". Raises ConfigError if there is no checkpoint of the round."""
    if number not in checkpointed_rounds(parent):
        raise ConfigError(f"--round: {parent} has no checkpoint of round {number}; {rounds_nearby(parent, number)}")
    try:
        fork_mark(parent, number).touch()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def snapshot_of(parent: Path, number: int) -> Snapshot:
    """The checkpoint of a round. Raises ConfigError if it is damaged."""
    try:
        return checkpoints_in(parent).read(number)
    except Damaged as wrong:
        raise ConfigError(
            f"{parent / 'checkpoints' / name_of(number)} is damaged ({wrong}); fork another round: "
            f"{rounds_nearby(parent, number)}"
        ) from None


def rounds_nearby(parent: Path, number: int) -> str:
    """Which rounds near this one can be forked, and how to keep more, as the end of a message."""
    numbers = {*checkpointed_rounds(parent)} - {number}
    nearest = sorted(sorted(numbers, key=lambda each: abs(each - number))[:4])
    there = f"it has those of {', '.join(map(str, nearest))}, and round 0 needs none" if nearest else "it has no others"
    return f"{there}; to keep more, run it with checkpoint.every=N checkpoint.keep=M engine.keep_state=true"


def check_rounds(snapshot: Snapshot, run_spec: RunSpec) -> None:
    """Raise ConfigError if another number of rounds would change noise that has been accounted for."""
    rounds, before = run_spec.experiment.federation.rounds, snapshot.config["federation"]["rounds"]
    privacy = run_spec.privacy
    if privacy is not None and privacy.follows_rounds and rounds != before:
        raise ConfigError(
            f"federation.rounds must stay {before} in a fork, got {rounds}: the noise depends on their number; undo it"
        )


# --- the folder -------------------------------------------------------------------------------------------------------
def write_folder(
    parent: RunDirectory, snapshot: Snapshot, run_spec: RunSpec, lineage: Lineage, fresh: Sequence[str], unsafe: str
) -> None:
    """Write the folder of a fork beside its place, and give it its name when it is complete. fresh: the parts whose
    state is that before round 1. unsafe: see `share_rows`. Raises ConfigError if the folder cannot be written."""
    assert run_spec.directory is not None
    out = Path(run_spec.directory)
    unfinished = out.with_name(f".{out.name}.{run_spec.run_id}")
    rows = run_spec.state_folder
    rows_now = unfinished / "state" if rows == out / "state" else rows
    try:
        unfinished.mkdir(parents=True)
        states = share_states(parent, snapshot, run_spec, rows_now, unsafe)
        checkpoints_in(unfinished).write(snapshot)
        if (parent.path / INITIAL).is_file():
            shutil.copyfile(parent.path / INITIAL, unfinished / INITIAL)
        write_lineage(unfinished, lineage)
        for name, text in small_files(run_spec, snapshot.plan).items():
            (unfinished / name).write_text(text, encoding="utf-8")
        for line in (lineage.sentence, *log_lines(states, run_spec, fresh)):
            log_line(unfinished, line)
        if snapshot.round not in checkpointed_rounds(parent.path):
            raise ConfigError(
                f"--round: the run in {parent.path} has just removed its checkpoint of round {snapshot.round}; "
                f"{rounds_nearby(parent.path, snapshot.round)}"
            )
        try:
            unfinished.replace(out)
        except OSError as error:
            raise ConfigError(f"--out {out} must be a new or empty folder ({error.strerror}); choose another") from None
    except BaseException as error:
        remove_files(str(rows_now))
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            raise ConfigError(f"--out {out} cannot be written ({why}); make room, or choose another folder") from error
        raise


def small_files(run_spec: RunSpec, plan: dict[str, Any]) -> dict[str, str]:
    """The small files that a folder needs to be resumed, by name. plan: the execution plan of the checkpoint."""
    frozen = {FROZEN: json_of_frozen(run_spec)} if run_spec.frozen else {}
    return {
        **frozen,
        "plan.json": json.dumps({**plan, "how": "that of the run it is a fork of"}) + "\n",
        "config.yaml": yaml.safe_dump(run_spec.experiment.plain(), sort_keys=False),
        "run.json": f'{{"run_id": "{run_spec.run_id}"}}\n',
    }


def share_states(parent: RunDirectory, snapshot: Snapshot, run_spec: RunSpec, folder: Path, unsafe: str) -> list[str]:
    """Give the fork the client states of the checkpoint. folder: of the fork's rows. unsafe: see `share_rows`. Returns
    lines for the log, none for clients without states."""
    leaves = pytree.tree_leaves(StateSpec(run_spec.method(), run_spec.initial_model()).client)
    if not leaves:
        return []
    before = validated_with(snapshot.config, run_spec.experiment)
    own = state_folder(before.engine, parent.run_id, str(parent.path))
    each = width(leaves, run_spec.experiment.engine.state_dtype == "bfloat16")
    rows = snapshot.row[snapshot.row >= 0]
    copied = share_rows(str(own), str(folder), rows, each, unsafe)
    states = f"the states of {len(rows)} clients, {len(rows) * each:,} bytes"
    if copied:
        return [f"{states}, are copied from {parent.path}, because they cannot be linked ({copied})"]
    return [f"{states}, are shared with {parent.path}"] if len(rows) else []


def log_lines(states: Sequence[str], run_spec: RunSpec, fresh: Sequence[str]) -> list[str]:
    """Lines for the log of a new fork. states: those of `share_states`."""
    found = [*(f"the state of {part} is that before round 1" for part in fresh), *states]
    if run_spec.privacy is not None and run_spec.privacy.is_noisy:
        found.append(
            "privacy: epsilon is that of this run alone; it has the same noise as its parent, so whoever sees both of "
            "them sees their difference without noise"
        )
    return found
