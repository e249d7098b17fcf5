"""The stage of a run as it is known before the run starts: whether messages are collected, in how many rows, and
whether the rule can be used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...algorithms.aggregation.contract import Aggregator, Mean, Stage, in_proportion
from ...algorithms.attacks.contract import Attack, OwnAttack, PoisoningAttack
from ...algorithms.contract import Algorithm
from ...algorithms.tree import Tree
from ..cohorts.samplers import Sampler
from ..config.schema import Federation
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from .message_rows import EXTRA, capacity, vector_leaves


@dataclass(frozen=True, eq=False)
class StagePlan:
    """The stage of a run, and what follows for it from the federation.

    `stage`: the rule, the attack and the noise as they are configured. `seed`: of the run. `byzantine`: (N,) bool.
    `buffers`: the number of the model's running statistics. `warm_start`: whether all clients take part in a pass
    before round 1. `compares`: whether the method looks at messages before they are added up, see `Algorithm.parts`.
    """

    stage: Stage
    federation: Federation
    seed: int
    sampler: Sampler
    byzantine: np.ndarray
    buffers: int
    warm_start: bool
    compares: bool = False

    @cached_property
    def rule(self) -> Aggregator:
        """The rule of the run, or the mean where the rule always is the mean of a cohort."""
        rule = self.stage.rule
        if self.compares:
            return Mean(vectors="joint")  # a method that compares messages goes with no other rule
        if isinstance(rule, Mean) and not rule.before:
            return rule
        return Mean() if all(self._is_mean(size) for size in self.round_sizes) else rule

    def _is_mean(self, rows: int) -> bool:
        """Whether the rule, with what stands before it, is the mean of a round with so many clients."""
        rule = self.stage.rule.scaled(rows, self.federation.cohort)
        if isinstance(rule.faults, str):
            return False
        f = in_proportion(rule.faults, rows, self.federation.cohort)
        for part in rule.before:
            if not part.keeps_mean(rows):
                return False
            rows = part.count(rows)
        return rule.is_mean(rows, f)

    @property
    def collects(self) -> bool:
        """Whether workers write messages to rows of files. If not, they add them up. What stands before a rule looks at
        the messages of other clients too."""
        attack = self.stage.attack
        attacks = attack is not None and attack.collects
        return bool(self.rule.before) or not self.rule.adds or attacks or self.compares

    def leaves_messages_alone(self, folder: str) -> bool:
        """Whether messages are added up as they are. folder: of the rows, "" where no messages are collected, also
        where the steps of a run that collects them are only measured."""
        return not folder and (isinstance(self.rule, Mean) or not self.rule.adds) and not sends(self.stage.attack)

    # --- how many messages --------------------------------------------------------------------------------------------
    @cached_property
    def round_sizes(self) -> frozenset[int]:
        """The numbers of clients in the rounds of the run."""
        return self.sizes_up_to(self.federation.rounds)

    def sizes_up_to(self, rounds: int) -> frozenset[int]:
        """The numbers of clients in the first rounds of the run, as far as they are known before."""
        return self.sampler.sizes(self.seed, rounds, self.federation.clients, self.federation.cohort)

    @property
    def largest_cohort(self) -> int:
        """The most messages of one pass: of a round, or of a pass over all clients before round 1."""
        return self.federation.clients if self.warm_start else max(self.round_sizes)

    def row_files(self, method: Algorithm, x: Tree) -> tuple[int, int]:
        """(the number of rows for messages, the bytes of the widest row) for the run's method and model."""
        messages = [StateSpec(each, x).message for each in (method, method.warm_start) if each is not None]
        widths = [sum(leaf.numel() * leaf.element_size() for leaf in vector_leaves(message)) for message in messages]
        return capacity(self.largest_cohort, self.stage.attack is not None), max(widths)

    @property
    def further_rows(self) -> tuple[int, int]:
        """(the first row for what Byzantine clients send, the row of the vector that a rule sees beside the messages);
        the vectors that an attack looks at lie behind the latter."""
        largest = self.largest_cohort
        return largest, capacity(largest, self.stage.attack is not None) - EXTRA

    def faults(self, rows: int, drawn: int, known: int) -> int:
        """f of the rule for so many rows. drawn: the number of clients in the round, more than `rows` where some were
        dropped. known: how many of the rows are Byzantine."""
        if self.rule.faults == "known":
            return known
        if self.rule.faults == "expected":
            return -(-rows * int(self.byzantine.sum()) // len(self.byzantine))
        return in_proportion(int(self.rule.faults), drawn, self.federation.cohort)

    # --- whether the run can have it ----------------------------------------------------------------------------------
    def check(self, last_round: int) -> None:
        """Raise ConfigError for a rule that needs more messages than a round of this run has, or if nobody trains."""
        rule = self.stage.rule
        self._check_somebody_trains(last_round)
        if isinstance(rule.faults, int):
            if rule.faults < 0:
                raise ConfigError(f"aggregate.f: f >= 0 must hold, got f={rule.faults}; give a number of messages")
            for size in sorted(self.round_sizes - {0}):  # the answer to no messages is 0 under every rule
                check_counts(rule, self.federation, size)

    def _check_somebody_trains(self, last_round: int) -> None:
        """Raise ConfigError if it is known before the start that no client will take part in any round."""
        federation, attack, rounds = self.federation, self.stage.attack, range(1, last_round + 1)
        if not any(self.sizes_up_to(last_round)):
            raise ConfigError(
                f"federation.sampler: {federation.sampled} draws no client in any of the {len(rounds)} rounds, with a "
                f"mean of cohort={federation.cohort} clients and this seed; raise federation.cohort or "
                "federation.rounds"
            )
        if attack is None or not attack.silent or not all(map(attack.active, rounds)):
            return
        others = np.delete(~self.byzantine, list(federation.without))
        if not others.any():
            raise ConfigError(
                f"attack: {attack.called} has all clients send nothing in all rounds, got {self.byzantine.sum()} "
                f"Byzantine clients of {federation.clients}; lower attack.share, or name fewer clients"
            )


def sends(attack: Attack | None) -> bool:
    """Whether Byzantine clients change their own messages."""
    return isinstance(attack, OwnAttack) and (not isinstance(attack, PoisoningAttack) or attack.sends)


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
