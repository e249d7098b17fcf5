"""Whether a run can go on from the checkpoint of an earlier process, and whether a complete one can be made longer."""

from __future__ import annotations

from typing import Any

from ..config.differences import differences
from ..errors import ConfigError
from ..records.metrics import Metric, why_stop
from ..run_spec import RunSpec
from ..state.checkpoint import checkpointed_rounds, checkpoints_in
from ..state.checkpoint_store import Damaged, Snapshot


def check_usable(snapshot: Snapshot | None, run_spec: RunSpec, events: list[str]) -> Snapshot:
    """The checkpoint that was loaded.

    Raises ConfigError if there is none, if it is of another configuration or execution plan, or if no round is left.
    events: what was wrong with the checkpoints that were skipped.
    """
    if snapshot is None:
        why = f" ({'; '.join(events)})" if events else ""
        raise ConfigError(f"{run_spec.directory} has no checkpoint to resume from{why}; start the run anew")
    if keys := differences(snapshot.config, run_spec.experiment.plain(), snapshot.round):
        raise ConfigError(f"the checkpoint is of another configuration: {'; '.join(keys)}; undo these changes")
    if snapshot.plan != (plan := run_spec.plan_for_checkpoint()):
        raise ConfigError(
            f"the checkpoint is of a run with {describe_plan(snapshot.plan)}, this run has {describe_plan(plan)}; "
            "start the run anew"
        )
    check_frozen(snapshot, run_spec)
    check_rounds(run_spec, snapshot.config["federation"]["rounds"])
    check_length(run_spec, snapshot.round)
    return snapshot


def check_rounds(run_spec: RunSpec, before: int) -> None:
    """Raise ConfigError if a run of `before` rounds would have had other rounds with the number of this one."""
    rounds, privacy = run_spec.experiment.federation.rounds, run_spec.privacy
    if rounds == before:
        return
    must = f"federation.rounds must stay {before} to resume, got {rounds}"
    if rounds_change_method(run_spec, before):
        raise ConfigError(f"{must}: the method's own settings follow from it; start a new run")
    if privacy is not None and privacy.follows_rounds:
        raise ConfigError(f"{must}: the noise (privacy.noise, privacy.mechanism) depends on it; start a new run")


def check_length(run_spec: RunSpec, least: int) -> None:
    """Raise ConfigError if a run is to have fewer rounds than `least`."""
    rounds = run_spec.experiment.federation.rounds
    if run_spec.last_round < min(least, rounds):
        raise ConfigError(f"privacy.epsilon is spent after round {run_spec.last_round}; raise it in a new run")
    if rounds < least:
        raise ConfigError(f"federation.rounds >= {least} must hold to go on, got {rounds}; set it higher")


def check_longer(run_spec: RunSpec, asked: bool) -> None:
    """Raise ConfigError if a run that is complete cannot be made longer. asked: whether it is to be."""
    folder = run_spec.directory
    assert folder is not None
    there = checkpointed_rounds(folder)
    if not asked:
        after = f" after round {there[-1]}" if there else ""
        raise ConfigError(
            f"{folder}: the run is complete{after}; to make it longer: fedfleet resume {folder} federation.rounds=N"
        )
    if not there:
        raise ConfigError(
            f"{folder}: the run is complete and has not kept the state of its end, so that it cannot be made longer; "
            f"run {folder}/config.yaml anew, with more rounds, whose first ones have the same bits, and with "
            "checkpoint.last=true"
        )
    check_length(run_spec, there[-1] + 1)
    if run_spec.experiment.evaluate.stop is not None:
        try:
            check_stop(run_spec, checkpoints_in(folder).read(there[-1]))
        except Damaged as wrong:
            raise ConfigError(f"{folder}: the state of the run's end is damaged ({wrong}); run it anew") from None


def check_stop(run_spec: RunSpec, snapshot: Snapshot) -> None:
    """Raise ConfigError if the run would end at once by `evaluate.stop`."""
    stop = run_spec.experiment.evaluate.stop
    if stop is None:
        return
    metric = Metric.of(stop.metric, stop.best, run_spec.workload.lower)
    if why := why_stop(stop, metric, snapshot.records.measured(metric.name), snapshot.round):
        raise ConfigError(
            f"evaluate.stop: the run would end at once after round {snapshot.round}, because {why}; give "
            "evaluate.stop=null, or others"
        )


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
