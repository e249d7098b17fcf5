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
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Server
from ..accelerators.settings import applied
from ..aggregation.collected import StageState
from ..aggregation.stage import StageRunner
from ..config.forkable import fork_changes
from ..config.schema import PARTS, Experiment, part_name
from ..config.schema import experiment as validated
from ..errors import ConfigError
from ..fleet.planner import PlanState, build_sampler, first_plan_state
from ..method_form.state_spec import StateSpec
from ..records.lineage import Lineage, lineage_of, write_lineage
from ..run_spec import RunSpec
from ..state.checkpoint import checkpointed_rounds, checkpoints_in, fork_mark
from ..state.checkpoint_store import Damaged, Snapshot, name_of
from ..state.retention import check_frozen, state_folder
from ..state.row_files import remove_files, width
from ..state.sharing import SharedRows, share_rows
from ..storage.plain_files import refuse_unusual
from .launch import new_run_id, prepare
from .run_directory import RunDirectory, json_of_frozen, log_line, read_run_id, refuse_run
from .saved_files import FROZEN, INITIAL, NAMES, saved_config


class States(NamedTuple):
    """What a run commits with a round, besides the client states."""

    server: Server
    stage: StageState
    plan: PlanState


@applied()
def fork_of(
    parent: Path, number: int, experiment: Experiment, out: Path, run_id: str | None = None
) -> tuple[RunSpec, RunDirectory]:
    """Make a fork of the run in the folder `parent` after round `number`: its specification and its folder.

    experiment: the configuration of the fork. out: its folder, which must not exist or be empty. run_id: a new one is
    made if it is None. Raises ConfigError if the round has no sound checkpoint, or if a setting differs that must not.
    """
    refuse_run(out)
    if not (parent / "run.json").is_file():
        raise ConfigError(f"{parent} holds no run; give the folder that `fedfleet run` wrote")
    refuse_unusual(parent, NAMES)
    origin, run_id = RunDirectory(parent, read_run_id(parent)), run_id or new_run_id()
    if number == 0:
        config = saved_config(origin.path)
        changes = fork_changes(config, experiment.plain())
        lineage = Lineage(origin.run_id, str(origin.path), 0, changes, lineage_of(origin.path))
        run_spec = prepare(experiment, run_id, out.resolve(), initial_model=origin.initial_model())
        check_workload(parent_of(config, run_spec), run_spec)
        return run_spec, RunDirectory(out, run_id, lineage)
    unsafe, snapshot = mark_checkpoint(origin.path, number), snapshot_of(origin.path, number)
    changes = fork_changes(snapshot.config, experiment.plain())
    lineage = Lineage(origin.run_id, str(origin.path), number, changes, lineage_of(origin.path))
    if experiment.federation.rounds <= number:
        rounds = experiment.federation.rounds
        raise ConfigError(f"federation.rounds > {number} must hold to go on after it, got {rounds}; set it higher")
    run_spec = prepare(experiment, run_id, out.resolve(), resume=True, initial_model=origin.initial_model())
    check_rounds(snapshot, run_spec)
    check_frozen(snapshot, run_spec)
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
    rows = state_folder(run_spec)
    rows_now = unfinished / "state" if rows == out / "state" else rows
    try:
        unfinished.mkdir(parents=True)
        shared = share_states(parent, snapshot, run_spec, rows_now, unsafe)
        checkpoints_in(unfinished).write(snapshot)
        if (parent.path / INITIAL).is_file():
            shutil.copyfile(parent.path / INITIAL, unfinished / INITIAL)
        write_lineage(unfinished, lineage)
        for name, text in small_files(run_spec, snapshot.plan).items():
            (unfinished / name).write_text(text, encoding="utf-8")
        for line in (lineage.sentence, *log_lines(shared, parent.path, run_spec, fresh)):
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


def share_states(parent: RunDirectory, snapshot: Snapshot, run_spec: RunSpec, folder: Path, unsafe: str) -> SharedRows:
    """Give the fork the client states of the checkpoint. folder: of the fork's rows. unsafe: see `share_rows`."""
    sample = StateSpec(run_spec.method(), run_spec.initial_model()).client
    leaves = pytree.tree_leaves(sample)
    if not leaves:
        return SharedRows(0, 0, "")
    before = validated_with(snapshot.config, run_spec.experiment)
    own = state_folder(RunSpec.of(parent.run_id, before, str(parent.path)))
    each = width(leaves, run_spec.experiment.engine.state_dtype == "bfloat16")
    return share_rows(str(own), str(folder), snapshot.row[snapshot.row >= 0], each, unsafe)


def log_lines(shared: SharedRows, parent: Path, run_spec: RunSpec, fresh: Sequence[str]) -> list[str]:
    """Lines for the log of a new fork."""
    found = [f"the state of {part} is that before round 1" for part in fresh]
    if shared.copied:
        found.append(
            f"the states of {shared.clients} clients, {shared.size:,} bytes, are copied from {parent}, because they "
            f"cannot be linked ({shared.copied})"
        )
    elif shared.clients:
        found.append(f"the states of {shared.clients} clients, {shared.size:,} bytes, are shared with {parent}")
    if run_spec.privacy is not None and run_spec.privacy.is_noisy:
        found.append(
            "privacy: epsilon is that of this run alone; it has the same noise as its parent, so whoever sees both of "
            "them sees their difference without noise"
        )
    return found


# --- states -----------------------------------------------------------------------------------------------------------
def parent_of(config: dict[str, Any], run_spec: RunSpec) -> RunSpec:
    """The specification of the run that a fork is a fork of. config: its configuration. run_spec: of the fork."""
    return RunSpec.of("parent", validated_with(config, run_spec.experiment), initial_model=run_spec.given_model)


def validated_with(config: dict[str, Any], other: Experiment) -> Experiment:
    """The experiment of a parent's configuration. Its parts that are the same in `other` are taken from there, because
    parts that were objects are only texts in a configuration."""
    plain = other.plain()
    same = {part: getattr(other, part) for part in PARTS if part in config and config[part] == plain[part]}
    return validated({**config, **same})


def states_of_fork(snapshot: Snapshot, run_spec: RunSpec) -> tuple[list[Tensor], list[str]]:
    """(the leaves of a fork's checkpoint besides the client states, the parts whose state is that before round 1).

    Raises ConfigError if the parent's states do not fit the fork's settings.
    """
    parent = parent_of(snapshot.config, run_spec)
    before = parent.experiment
    check_workload(parent, run_spec)
    check_messages(parent, run_spec)
    old, new = first_states(parent), first_states(run_spec)
    count = pytree.tree_structure(old).num_leaves
    taken = pytree.tree_unflatten(snapshot.server[:count], pytree.tree_structure(old))
    in_flight = snapshot.server[count:]
    fresh: list[str] = []
    server = server_of_fork((parent, taken.server), (run_spec, new.server), fresh)
    same_rule, same_attack = (same_name(before, run_spec, part) for part in ("aggregate", "attack"))
    stage = StageState(
        rule=old_or_fresh(taken.stage.rule, new.stage.rule, same_rule, "aggregate", fresh),
        last=old_or_fresh(taken.stage.last, new.stage.last, True, "aggregate", fresh),
        attack=old_or_fresh(taken.stage.attack, new.stage.attack, same_attack, "attack", fresh),
        noise=with_new_levels(taken.stage.noise, new.stage.noise),
    )
    samplers = [part_name(each.federation.sampler) for each in (before, run_spec.experiment)]
    # The states before round 1 are compared, because a sampler's state may grow, as Oort's history does.
    same = samplers[0] == samplers[1] and same_shapes(old.plan.sampler, new.plan.sampler)
    sampler = taken.plan.sampler if same else fresh_state(new.plan.sampler, "federation.sampler", fresh)
    plan = PlanState(sampler, taken.plan.clock)
    return [*pytree.tree_leaves(States(server, stage, plan)), *in_flight], list(dict.fromkeys(fresh))


@torch.no_grad()
def first_states(run_spec: RunSpec) -> States:
    """What a run has before round 1, as a checkpoint has it."""
    experiment = run_spec.experiment
    method, x = run_spec.method(), run_spec.initial_model()
    stage = StageRunner(run_spec, lambda tasks: iter(())).init(StateSpec(method, x))
    plan = first_plan_state(build_sampler(run_spec), experiment.federation, experiment.systems is not None)
    return States(method.server_init(x), stage, pytree.tree_map(torch.from_numpy, plan))


def check_workload(parent: RunSpec, run_spec: RunSpec) -> None:
    """Raise ConfigError if the fork's workload has another model, or other rows of clients."""
    if parent.experiment.workload == run_spec.experiment.workload:
        return
    if (parent.initial_model().layout, [*parent.frozen]) != (run_spec.initial_model().layout, [*run_spec.frozen]):
        raise ConfigError(
            "workload: the model must keep its tensors in a fork, got another model; undo this, or start a new run"
        )
    old, new = (each.split().client_index for each in (parent, run_spec))
    if not all(np.array_equal(a, b) for a, b in zip(old[:2], new[:2], strict=True)):
        raise ConfigError(
            "workload: the clients must keep their rows in a fork, got another partition; undo this, or start a new run"
        )


def check_messages(parent: RunSpec, run_spec: RunSpec) -> None:
    """Raise ConfigError if noise that goes on from round to round would meet messages of another shape."""
    privacy = run_spec.privacy
    if privacy is None or not privacy.is_noisy or "poisson" in privacy.mechanism.samplings:  # noise of one round alone
        return
    messages = [StateSpec(each.method(), each.initial_model()).message for each in (parent, run_spec)]
    old, new = (pytree.tree_leaves((each.delta, each.sent, each.averaged)) for each in messages)
    if [leaf.shape for leaf in old] != [leaf.shape for leaf in new]:
        raise ConfigError(
            "method: clients must send messages of the same shape in a fork whose noise goes on from earlier rounds, "
            f"got {title_of(run_spec)} after {title_of(parent)}; undo this, or start a new run"
        )


def with_new_levels(taken: Any, new: Any) -> Any:
    """The state of the noise, which goes on in every fork, because the account is over the rounds of the parent too.

    A run keeps empty tensors for the levels of a tree that it does not reach. Where a fork has more rounds and reaches
    them, they are those of `new`, the state before round 1: they are zero until they are reached.
    """
    leaves, spec = pytree.tree_flatten(taken)
    pairs = zip(leaves, pytree.tree_leaves(new), strict=True)
    return pytree.tree_unflatten([old if old.numel() else begun for old, begun in pairs], spec)


def server_of_fork(parent: tuple[RunSpec, Server], fork: tuple[RunSpec, Server], fresh: list[str]) -> Server:
    """The server's state of a fork. parent: its specification and the state to go on from. fork: its specification and
    its state before round 1. fresh: receives the parts whose state is that before round 1."""
    (old_spec, server), (new_spec, new) = parent, fork
    old_method, method = old_spec.method(), new_spec.method()
    clients = [StateSpec(each.method(), each.initial_model()).client for each in (old_spec, new_spec)]
    if not same_shapes(*clients):
        raise ConfigError(
            "method: clients must keep states of the same shape in a fork, got another shape; undo this, or start a "
            "new run"
        )
    if meaning_of_states(old_method) == meaning_of_states(method) and same_shapes(server.public, new.public):
        same = server_rules(old_method) == server_rules(method)
        return Server(server.public, old_or_fresh(server.private, new.private, same, "the server's rule", fresh))
    if pytree.tree_leaves(clients[1]) or new_spec.experiment.federation.pace.versions > 1:
        raise ConfigError(
            f"method: what clients keep must mean the same in a fork, got {title_of(new_spec)} after "
            f"{title_of(old_spec)}; undo this, or start a new run"
        )
    fresh.append("the method")
    x = old_method.model(server)
    begun = method.server_init(x)
    if not torch.equal(method.model(begun).flat, x.flat):
        raise ConfigError(
            f"method: it must begin from the parent's model in a fork, but {title_of(new_spec)} begins from factors "
            "that it draws; undo this, or start a new run"
        )
    return begun


def title_of(run_spec: RunSpec) -> str:
    """The method of a run in a message."""
    return run_spec.experiment.title.split(" on ")[0]


def meaning_of_states(method: Algorithm) -> tuple[Any, ...]:
    """What the states of clients, and the public state of the server, mean: the classes of the method, of those that it
    wraps, and of its estimator, and what its variables stand for."""
    estimator, inner = getattr(method, "estimator", None), getattr(method, "method", None)
    own = (type(method), type(estimator), method.variables)
    return (*own, *meaning_of_states(inner)) if isinstance(inner, Algorithm) else own


def server_rules(method: Algorithm) -> list[type]:
    """The classes of the server's rule of a method, or of one that it wraps, and of the rules that this one wraps."""
    inner = getattr(method, "method", None)
    if isinstance(inner, Algorithm):
        return server_rules(inner)
    found, rule = [], getattr(method, "server", None)
    while rule is not None:
        found.append(type(rule))
        rule = getattr(rule, "rule", None)
    return found


def same_name(before: Experiment, run_spec: RunSpec, part: str) -> bool:
    """Whether a part of the fork has the name that it had in the parent."""
    names = []
    for experiment in (before, run_spec.experiment):
        spec = getattr(experiment, part)
        names.append(part_name(spec) if isinstance(spec, str | dict) else type(spec).__name__)
    return names[0] == names[1]


def old_or_fresh(old: Any, new: Any, same: bool, part: str, fresh: list[str]) -> Any:
    """The old state of a part if it is the same part and has the same shape, else the new one. fresh: receives the name
    of a part that begins anew."""
    if same and same_shapes(old, new):
        return old
    return fresh_state(new, part, fresh)


def fresh_state(new: Any, part: str, fresh: list[str]) -> Any:
    """The state before round 1 of a part that begins anew. fresh: receives its name if it has a state."""
    if pytree.tree_leaves(new):
        fresh.append(part)
    return new


def same_shapes(a: Any, b: Any) -> bool:
    """Whether two states have the same structure, shapes and dtypes."""
    if pytree.tree_structure(a) != pytree.tree_structure(b):
        return False
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)
