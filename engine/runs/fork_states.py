"""Which states a fork goes on with: those of its parent, and those before round 1 of parts that were exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Server
from ..aggregation.rule import StageState
from ..aggregation.stage import StageRunner
from ..config.schema import PARTS, Experiment, part_name
from ..config.schema import experiment as validated
from ..errors import ConfigError
from ..fleet.planner import PlanState, first_plan_state
from ..method_form.state_spec import StateSpec
from ..run_spec import RunSpec
from ..state.checkpoint_store import Snapshot


class States(NamedTuple):
    """What a run commits with a round, besides the client states."""

    server: Server
    stage: StageState
    plan: PlanState


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
    stage = StageRunner(run_spec.stage_plan, lambda tasks: iter(())).init(StateSpec(method, x))
    plan = first_plan_state(run_spec.sampler, experiment.federation, experiment.systems is not None)
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
    if privacy is None or not privacy.is_noisy or "binomial" in privacy.mechanism.samplers:  # noise of one round alone
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
