"""Whether a run can go on from the checkpoint of an earlier process."""

from __future__ import annotations

from typing import Any

from ..config.differences import differences
from ..errors import ConfigError
from ..run_spec import RunSpec
from ..state.checkpoint_store import Snapshot


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
    other = run_spec.with_experiment(run_spec.experiment.model_copy(update={"federation": federation}))
    method, same_method, other_method = run_spec.method(), run_spec.method(), other.method()
    return method == same_method != other_method  # a method that does not equal itself cannot be compared
