"""The driver's part of the stage between the clients' messages and the server's update.

If the run collects messages, the workers have written them to rows. Then an attack and the rule have workers read what
they look at, and the answer is computed by the workers, too. Otherwise the workers have added the messages up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Mean
from ...algorithms.aggregation.messages import Messages, Stored
from ...algorithms.attacks.contract import CohortAttack
from ...algorithms.contract import Algorithm, Message, Round
from ...algorithms.tree import Tree
from ..cohorts.tasks import TrainingTask
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..reduction.tree import RoundTotals
from .attack import apply_attack
from .message_rows import (
    EXTRA,
    Span,
    Vector,
    capacity,
    make_rows,
    shaped,
    spans_of,
    vector_leaves,
    vectors_of,
    with_vector_leaves,
)
from .passes import PIECE
from .round_messages import RoundMessages, RunPass
from .rule import Aggregated, Parts, StageState, apply_parts, apply_rule, is_pairwise
from .stage_plan import StagePlan
from .staged import StagedMessages

GRAMS = 8
"""Matrices of S x S numbers that the driver has at the same time: inner products, distances, combinations, bounds of
rounding errors, the order of the distances."""


class StageRunner:
    """Runs the stage of every round. Its state is passed in and returned, as the server's is."""

    def __init__(self, plan: StagePlan, run_pass: RunPass, folder: str = "") -> None:
        """run_pass: has the workers run the tasks of a pass, and returns their results in any order. folder: of the
        rows, if the run collects messages."""
        self.plan, self.run_pass, self.folder = plan, run_pass, folder
        self.stage, self.rule, self.collects = plan.stage, plan.rule, plan.collects
        self.removed = np.array(plan.federation.without, dtype=np.int64)
        self.staged: dict[bool, StagedMessages] = {}  # by warm_start
        self.forged_row, self.extra_row = plan.further_rows

    def check_memory(self, free: int | None) -> None:
        """Raise ConfigError if a rule cannot look at the messages of the largest round in memory. free: the bytes that
        are available, None if the system does not say."""
        attack, rows = self.stage.attack, capacity(self.plan.largest_cohort, False)
        asks = isinstance(attack, CohortAttack) and attack.pairwise
        grams = GRAMS * 8 * rows * rows if asks or is_pairwise(self.rule) or self.plan.compares else 0
        needed = grams + 12 * rows * PIECE  # a piece of the rows, as it is stored and in float64
        if free is not None and needed > free:
            key, who = ("method", "the method") if self.plan.compares else ("aggregate", self.rule.called)
            other = "choose another method" if self.plan.compares else "use norm_clipping or sign_vote"
            raise ConfigError(
                f"{key}: {who} looks at {rows - EXTRA:,} messages at once, which takes {needed:,} bytes of memory, and "
                f"{free:,} bytes are free; lower federation.cohort, or {other}"
            )

    def make_rows(self, method: Algorithm, x: Tree) -> str:
        """Make the files for the messages of a round, and of the pass over all clients if the method has one. Returns
        their folder. Raises StoreFull."""
        make_rows(self.folder, *self.plan.row_files(method, x), self.plan.largest_cohort, self.rule.called)
        return self.folder

    def init(self, state_spec: StateSpec) -> StageState:
        """The state before round 1, and before a warm start."""
        message = state_spec.message
        noise = () if self.stage.noise is None else self.stage.noise.init(message)
        if not self.collects:
            return StageState(noise=noise)
        buffers = self.plan.buffers
        vectors, single = (vectors_of(message, how, buffers) for how in (self.rule.vectors, "each"))
        zeros = [torch.zeros(leaf.numel(), dtype=leaf.dtype) for leaf in vector_leaves(message)]
        last = spans_of(vectors, zeros) if self.rule.extra == "last" else ()
        attack: tuple[Any, ...] = ()
        if isinstance(self.stage.attack, CohortAttack):
            kept = self.stage.attack
            attack = tuple((kept.init(), (spans,) * kept.remembers) for spans in spans_of(single, zeros))
        return StageState(tuple(self.rule.init(vector.length) for vector in vectors), last, attack, noise)

    def summed(self, state_spec: StateSpec) -> StateSpec:
        """The specification of what workers add up."""
        return state_spec.facts_only() if self.collects else state_spec

    def byzantine(self, round: int, clients: np.ndarray) -> np.ndarray:
        """(c,) bool: which of these clients attack in this round. clients: (c,)."""
        attack = self.stage.attack
        if attack is None or not attack.active(round):
            return np.zeros(len(clients), dtype=bool)
        return self.plan.byzantine[clients] & ~np.isin(clients, self.removed)

    def without_silent(self, tasks: list[TrainingTask], round: int) -> tuple[list[TrainingTask], tuple[int, ...]]:
        """(the tasks without the clients that send no message, these clients). Blocks keep their places in the tree."""
        silent_attack = self.stage.attack is not None and self.stage.attack.silent
        if not silent_attack and not len(self.removed):
            return tasks, ()
        masks = [np.isin(task.clients, self.removed) for task in tasks]
        if silent_attack:
            masks = [mask | self.byzantine(round, task.clients) for mask, task in zip(masks, tasks, strict=True)]
        pairs = list(zip(tasks, masks, strict=True))
        silent = tuple(sorted(int(client) for task, those in pairs for client in task.clients[those]))
        return [task.subset(np.flatnonzero(~those)) for task, those in pairs], silent

    def aggregate(
        self, state_spec: StateSpec, state: StageState, round: Round, sampled: np.ndarray, weights: np.ndarray,
        totals: RoundTotals, parts: Parts | None = None,
    ) -> Aggregated:  # fmt: skip
        """The message that takes the place of the mean. sampled, weights: (S,), the cohort and its client weights.
        parts: of a method that compares messages."""
        began = time.perf_counter()
        byzantine = self.byzantine(round.number, sampled)
        messages = RoundMessages.of(
            totals.clients,
            sampled,
            weights,
            byzantine,
            staged=self._staged(state_spec, round.number == 0),
            run_pass=self.run_pass,
            number=round.number,
            forged_row=self.forged_row,
            extra_row=self.extra_row,
        )
        leaves = [torch.as_tensor(leaf) for leaf in totals.leaves]
        told = {} if self.stage.attack is None else {"robust/byzantine": float(byzantine.sum())}
        if not self.collects:
            found = self._from_sums(state_spec, state, round, leaves, messages, totals.facts)
            return found._replace(columns={**told, **found.columns})
        if not len(messages.clients):
            return Aggregated(self._nothing(state_spec, leaves), state, told)
        facts = state_spec.facts_only().mean(leaves, round.cohort, totals.facts["weight"]).facts
        found = self._from_rows(state, messages, parts)
        columns = {**told, **found.columns, "time/aggregate": time.perf_counter() - began}
        return found._replace(mean=found.mean._replace(facts=facts), columns=columns)

    def _nothing(self, state_spec: StateSpec, leaves: list[Tensor]) -> Message:
        """The answer in a round without clients: 0, as the mean's. leaves: sums of the facts of nobody."""
        zeros = [torch.zeros_like(leaf) for leaf in vector_leaves(state_spec.message)]
        facts = state_spec.facts_only().mean(leaves, 1, 1).facts
        return with_vector_leaves(state_spec.message, zeros)._replace(facts=facts)

    # --- where messages are added up ----------------------------------------------------------------------------------
    def _from_sums(
        self, state_spec: StateSpec, state: StageState, round: Round, leaves: list[Tensor], messages: RoundMessages,
        facts: Mapping[str, float],
    ) -> Aggregated:  # fmt: skip
        """From the float64 sums that the workers made. facts: of the round, with "weight", the sum of the client
        weights, and perhaps "divisor", that of the displacements."""
        if self.stage.noise is not None:
            sums = pytree.tree_unflatten(leaves, state_spec.message_spec)
            released = self.stage.noise.release(sums, state.noise, round)
            mean = state_spec.converted(pytree.tree_leaves(released.mean))
            return Aggregated(mean, state._replace(noise=released.state), dict(released.columns))
        if not round.cohort:  # a round without clients: the mean of no messages is 0
            return Aggregated(state_spec.mean(leaves, 1, 1), state, {})
        mean = state_spec.mean(leaves, round.cohort, facts["weight"], facts.get("divisor"))
        if isinstance(self.rule, Mean):
            return Aggregated(mean, state, {})
        flat = [leaf.reshape(-1) for leaf in vector_leaves(pytree.tree_unflatten(leaves, state_spec.message_spec))]
        vectors, (norms2, sound) = messages.staged.vectors, messages.norms2_of_rule()
        for number, vector in enumerate(vectors):
            those = sound[:, number]
            own = messages.weights[those] if vector.weighted else np.ones(int(those.sum()))
            x = Messages(stored=Stored(norms2=norms2[those, number]), **messages.about(vector), weights=own)
            added = facts["weight"] if vector.weighted and those.all() else float(own.sum())
            for spans in filter(None, (vector.spans, vector.follows, vector.statistics)):
                self._answer_from_sums(flat, vector, spans, x, added)
        broken = float((~sound).any(1).sum())
        leaves = shaped(flat, vector_leaves(state_spec.message))
        return Aggregated(with_vector_leaves(mean, leaves), state, {"robust/broken": broken})

    def _answer_from_sums(
        self, flat: list[Tensor], vector: Vector, spans: Sequence[Span], x: Messages, weight: float
    ) -> None:
        """Put the rule's answer in the place of the sums of some numbers of a vector. flat: the leaves of a message.
        spans: those of the vector itself, those that follow it, or its running statistics. weight: the sum of the
        client weights, in the order of the sums, so that a rule that changes no message gives the bits of the mean."""
        lengths = [span.length for span in spans]
        total = torch.cat([flat[span.leaf][span.begin : span.end] for span in spans])
        averaged = self.rule.steps and spans is vector.statistics

        def answer(weight: float) -> Sequence[Tensor]:
            return (total / weight if averaged else self.rule.from_sum(total, weight, x)).split(lengths)

        own = answer(weight)
        uniform = answer(float(x.count)) if vector.uniform else own
        for span, weighted, equal in zip(spans, own, uniform, strict=True):
            flat[span.leaf][span.begin : span.end] = equal if span.leaf in vector.uniform else weighted

    # --- where messages are collected ---------------------------------------------------------------------------------
    def _from_rows(self, state: StageState, messages: RoundMessages, parts: Parts | None) -> Aggregated:
        """From the messages that the workers have written to rows."""
        attack, told = self.stage.attack, dict[str, float]()
        rule = self.rule.scaled(messages.drawn, messages.full_cohort)
        for vector, last in zip(messages.staged.vectors if state.last else [], state.last, strict=True):
            messages.write(self.extra_row, (*vector.spans, *vector.follows), last)
        if isinstance(attack, CohortAttack) and messages.byzantine.any():
            messages, state, told = apply_attack(messages, attack, rule, state)
        found = apply_rule(messages, rule, state) if parts is None else apply_parts(messages, rule, state, parts)
        return found._replace(columns={**found.columns, **told})

    def _staged(self, state_spec: StateSpec, warm_start: bool) -> StagedMessages:
        """The messages as the driver handles them."""
        if warm_start not in self.staged:
            folder = self.folder if self.collects else ""
            self.staged[warm_start] = StagedMessages(self.plan, state_spec.message, folder)
        return self.staged[warm_start]
