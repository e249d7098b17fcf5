"""Whether a run collects messages, in how many rows, and whether its rule can be used: known before it starts."""

from __future__ import annotations

import numpy as np

from ...algorithms.aggregation.contract import Aggregator, Mean, in_proportion
from ...algorithms.attacks.contract import Attack, OwnAttack, PoisoningAttack
from ..config.schema import Federation
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..run_spec import RunSpec
from .message_rows import EXTRA, capacity, vector_leaves


def collects(run_spec: RunSpec) -> bool:
    """Whether workers write messages to rows of files. If not, they add them up. What stands before a rule looks at the
    messages of other clients too."""
    rule, attack = planned_rule(run_spec), run_spec.stage.attack
    return bool(rule.before) or not rule.adds or (attack is not None and attack.collects)


def leaves_messages_alone(run_spec: RunSpec, folder: str) -> bool:
    """Whether messages are added up as they are. folder: of the rows, "" where no messages are collected, also where
    the steps of a run that collects them are only measured."""
    rule = planned_rule(run_spec)
    return not folder and (isinstance(rule, Mean) or not rule.adds) and not sends(run_spec.stage.attack)


def sends(attack: Attack | None) -> bool:
    """Whether Byzantine clients change their own messages."""
    return isinstance(attack, OwnAttack) and (not isinstance(attack, PoisoningAttack) or attack.sends)


def planned_rule(run_spec: RunSpec) -> Aggregator:
    """The rule of the run, or the mean where the rule always is the mean of a cohort."""
    rule = run_spec.stage.rule
    if isinstance(rule, Mean) and not rule.before:
        return rule
    return Mean() if all(is_mean(run_spec, size) for size in round_sizes(run_spec)) else rule


def is_mean(run_spec: RunSpec, rows: int) -> bool:
    """Whether the rule, with what stands before it, is the mean of a round with so many clients."""
    cohort = run_spec.experiment.federation.cohort
    rule = run_spec.stage.rule.scaled(rows, cohort)
    if isinstance(rule.faults, str):
        return False
    f = in_proportion(rule.faults, rows, cohort)
    for part in rule.before:
        if not part.keeps_mean(rows):
            return False
        rows = part.count(rows)
    return rule.is_mean(rows, f)


def round_sizes(run_spec: RunSpec) -> frozenset[int]:
    """The numbers of clients in the rounds of a run."""
    return sizes_up_to(run_spec, run_spec.experiment.federation.rounds)


def sizes_up_to(run_spec: RunSpec, rounds: int) -> frozenset[int]:
    """The numbers of clients in the first rounds of a run, as far as they are known before."""
    federation = run_spec.experiment.federation
    return run_spec.sampler.sizes(run_spec.experiment.seed, rounds, federation.clients, federation.cohort)


def largest_cohort(run_spec: RunSpec) -> int:
    """The most messages of one pass: of a round, or of a pass over all clients before round 1."""
    if run_spec.method().warm_start is not None:
        return run_spec.experiment.federation.clients
    return max(round_sizes(run_spec))


def row_files(run_spec: RunSpec) -> tuple[int, int]:
    """(the number of rows for messages, the bytes of the widest row)."""
    method, x = run_spec.method(), run_spec.initial_model()
    messages = [StateSpec(each, x).message for each in (method, method.warm_start) if each is not None]
    widths = [sum(leaf.numel() * leaf.element_size() for leaf in vector_leaves(message)) for message in messages]
    return capacity(largest_cohort(run_spec), run_spec.stage.attack is not None), max(widths)


def further_rows(run_spec: RunSpec) -> tuple[int, int]:
    """(the first row for what Byzantine clients send, the row of the vector that a rule sees beside the messages); the
    vectors that an attack looks at lie behind the latter."""
    largest = largest_cohort(run_spec)
    return largest, capacity(largest, run_spec.stage.attack is not None) - EXTRA


def number_of_faults(run_spec: RunSpec, rule: Aggregator, rows: int, drawn: int, known: int) -> int:
    """f of the run's rule for so many rows. drawn: the number of clients in the round, more than `rows` where some were
    dropped. known: how many of the rows are Byzantine."""
    if rule.faults == "known":
        return known
    if rule.faults == "expected":
        return -(-rows * int(run_spec.byzantine.sum()) // len(run_spec.byzantine))
    return in_proportion(int(rule.faults), drawn, run_spec.experiment.federation.cohort)


def check_stage(run_spec: RunSpec) -> None:
    """Raise ConfigError for a rule that needs more messages than a round of this run has, or if nobody trains."""
    rule, federation = run_spec.stage.rule, run_spec.experiment.federation
    check_somebody_trains(run_spec)
    if isinstance(rule.faults, int):
        if rule.faults < 0:
            raise ConfigError(f"aggregate.f: f >= 0 must hold, got f={rule.faults}; give a number of messages")
        for size in sorted(round_sizes(run_spec) - {0}):  # the answer to no messages is 0 under every rule
            check_counts(rule, federation, size)


def check_somebody_trains(run_spec: RunSpec) -> None:
    """Raise ConfigError if it is known before the start that no client will take part in any round."""
    federation, attack = run_spec.experiment.federation, run_spec.stage.attack
    rounds = range(1, run_spec.last_round + 1)
    if not any(sizes_up_to(run_spec, run_spec.last_round)):
        raise ConfigError(
            f"federation.sampler: {federation.sampled} draws no client in any of the {len(rounds)} rounds, with a "
            f"mean of cohort={federation.cohort} clients and this seed; raise federation.cohort or federation.rounds"
        )
    if attack is None or not attack.silent or not all(map(attack.active, rounds)):
        return
    others = np.delete(~run_spec.byzantine, list(federation.without))
    if not others.any():
        raise ConfigError(
            f"attack: {attack.called} has all clients send nothing in all rounds, got {run_spec.byzantine.sum()} "
            f"Byzantine clients of {federation.clients}; lower attack.share, or name fewer clients"
        )


def check_counts(rule: Aggregator, federation: Federation, drawn: int) -> None:
    """Raise ConfigError if a rule, or a part before it, needs more messages than a round has. drawn: clients of the
    round."""
    assert isinstance(rule.faults, int)
    rows, f = drawn, in_proportion(rule.faults, drawn, federation.cohort)
    rule = rule.scaled(drawn, federation.cohort)
    where, remedy = f"with federation.cohort={drawn}", "lower {} or raise federation.cohort"
    if drawn != federation.cohort:
        where = f"in a round of {drawn} clients, which federation.sampler: {federation.sampled} draws"
        remedy = "lower {}, raise federation.cohort or choose federation.sampler: uniform"
    for part in rule.before:
        own = part.faults(f)
        if rows < part.fewest(own):
            raise ConfigError(
                f"aggregate.before: {part.called} needs {part.condition}, got f={own} {where}; {remedy.format('f')}"
            )
        rows = part.count(rows)
    if rows < rule.fewest(f):
        after = f" ({rows} rows after aggregate.before)" if rows != drawn else ""
        raise ConfigError(
            f"aggregate.f: {rule.called} needs {rule.condition}, got f={f} {where}{after}; "
            f"{remedy.format('aggregate.f')}"
        )
    if why := rule.refuses(rows, f):
        raise ConfigError(f"aggregate: {why}")
