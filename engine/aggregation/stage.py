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
from ...algorithms.contract import Message, Round
from ...workloads import counted
from ..cohorts.tasks import TrainingTask
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..reduction.round_totals import RoundTotals
from ..run_spec import RunSpec
from ..state.folders import message_folder
from .attacking import Forgery
from .collected import Cohort, Collected, Spans, StageState
from .defence import Aggregated, Defence, is_pairwise
from .message_rows import EXTRA, MessageRows, capacity
from .passes import RunPass
from .planning import collects, extra_row, largest_cohort, planned_rule
from .vectors import (
    PIECE,
    Span,
    Vector,
    grouped,
    shaped,
    spans_of,
    vector_leaves,
    vectors_of,
    with_vector_leaves,
)

GRAMS = 8
"""Matrices of S x S numbers that the driver has at the same time: inner products, distances, combinations, bounds of
rounding errors, the order of the distances."""


class StageRunner:
    """Runs the stage of every round. Its state is passed in and returned, as the server's is."""

    def __init__(self, run_spec: RunSpec, run_pass: RunPass) -> None:
        """run_pass: has the workers run the tasks of a pass, and returns their results in any order."""
        self.run_spec, self.run_pass = run_spec, run_pass
        self.stage, self.rule = run_spec.stage, planned_rule(run_spec)
        self.collects = collects(run_spec)
        self.seed = run_spec.experiment.seed
        self.removed = np.array(run_spec.experiment.federation.without, dtype=np.int64)
        self.opened: dict[bool, MessageRows] = {}
        self.extra_row = extra_row(run_spec)

    def check_memory(self, free: int | None) -> None:
        """Raise ConfigError if a rule cannot look at the messages of the largest round in memory. free: the bytes that
        are available, None if the system does not say."""
        attack, rows = self.stage.attack, capacity(largest_cohort(self.run_spec), False)
        asks = isinstance(attack, CohortAttack) and attack.pairwise
        grams = GRAMS * 8 * rows * rows if asks or is_pairwise(self.rule) else 0
        needed = grams + 12 * rows * PIECE  # a piece of the rows, as it is stored and in float64
        if free is not None and needed > free:
            raise ConfigError(
                f"aggregate: {self.rule.called} looks at {rows - EXTRA:,} messages at once, which takes {needed:,} "
                f"bytes of memory, and {free:,} bytes are free; lower federation.cohort, or use norm_clipping or "
                "sign_vote"
            )

    def vectors(self, message: Message) -> list[Vector]:
        """The vectors that the rule acts on."""
        return vectors_of(message, self.rule.vectors, len(self.run_spec.buffers))

    def single_vectors(self, message: Message) -> list[Vector]:
        """The vectors that an attack acts on, each by itself."""
        return vectors_of(message, "each", len(self.run_spec.buffers))

    def init(self, state_spec: StateSpec) -> StageState:
        """The state before round 1, and before a warm start."""
        message = state_spec.message
        noise = () if self.stage.noise is None else self.stage.noise.init(message)
        if not self.collects:
            return StageState(noise=noise)
        vectors, single = self.vectors(message), self.single_vectors(message)
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
        return self.run_spec.byzantine[clients] & ~np.isin(clients, self.removed)

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
        totals: RoundTotals,
    ) -> Aggregated:  # fmt: skip
        """The message that takes the place of the mean. sampled, weights: (S,), the cohort and its client weights."""
        began = time.perf_counter()
        leaves = [torch.as_tensor(leaf) for leaf in totals.leaves]
        byzantine = self.byzantine(round.number, sampled)
        cohort = Cohort.of(sampled, weights, byzantine, totals)
        told = {} if self.stage.attack is None else {"robust/byzantine": float(byzantine.sum())}
        if not self.collects:
            found = self._from_sums(state_spec, state, round, leaves, cohort, totals.facts)
            return found._replace(columns={**told, **found.columns})
        if not len(cohort.clients):
            return Aggregated(self._nothing(state_spec, leaves), state, told)
        facts = state_spec.facts_only().mean(leaves, round.cohort, totals.facts["weight"]).facts
        found = self._from_rows(state_spec, state, round.number, cohort)
        columns = {**told, **found.columns, "time/aggregate": time.perf_counter() - began}
        return found._replace(mean=found.mean._replace(facts=facts), columns=columns)

    def _nothing(self, state_spec: StateSpec, leaves: list[Tensor]) -> Message:
        """The answer in a round without clients: 0, as the mean's. leaves: sums of the facts of nobody."""
        zeros = [torch.zeros_like(leaf) for leaf in vector_leaves(state_spec.message)]
        facts = state_spec.facts_only().mean(leaves, 1, 1).facts
        return with_vector_leaves(state_spec.message, zeros)._replace(facts=facts)

    def _from_sums(
        self, state_spec: StateSpec, state: StageState, round: Round, leaves: list[Tensor], cohort: Cohort,
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
        vectors = self.vectors(state_spec.message)
        norms2, sound = grouped(cohort.norms2, self.single_vectors(state_spec.message), vectors)
        for number, vector in enumerate(vectors):
            those = sound[:, number]
            stored, key = Stored(norms2=norms2[those, number]), counted.key(self.seed, "aggregate", round.number)
            own = cohort.weights[those] if vector.weighted else np.ones(int(those.sum()))
            x = Messages(stored=stored, length=vector.length, round=round.number, key=key, weights=own)
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
        plain = answer(float(x.count)) if vector.plain else own
        for span, weighted, uniform in zip(spans, own, plain, strict=True):
            flat[span.leaf][span.begin : span.end] = uniform if span.leaf in vector.plain else weighted

    def _from_rows(self, state_spec: StateSpec, state: StageState, number: int, cohort: Cohort) -> Aggregated:
        """From the messages that the workers have written to rows. number: of the round."""
        files = self.files(state_spec, number == 0)
        collected = Collected(self.run_spec, self.run_pass, files, state_spec.message, number, cohort)
        rule = self.rule.scaled(cohort.drawn, collected.full_cohort)
        if state.last:
            self._write_last(files, self.vectors(state_spec.message), state.last)
        attack, told = self.stage.attack, dict[str, float]()
        if isinstance(attack, CohortAttack) and cohort.byzantine.any():
            collected, kept, told = Forgery(collected, attack, rule, state).run()
            state = state._replace(attack=kept)
        found = Defence(collected, rule, state).run()
        return found._replace(columns={**found.columns, **told})

    def _write_last(self, files: MessageRows, vectors: Sequence[Vector], last: Sequence[Spans]) -> None:
        """Write the rule's answer of the round before to the extra row. last: for each vector."""
        for vector, parts in zip(vectors, last, strict=True):
            files.write_spans(self.extra_row, (*vector.spans, *vector.follows), parts)

    def files(self, state_spec: StateSpec, warm_start: bool) -> MessageRows:
        """The files of messages, opened by the driver."""
        if warm_start not in self.opened:
            folder = str(message_folder(self.run_spec))
            self.opened[warm_start] = MessageRows(folder, vector_leaves(state_spec.message))
        return self.opened[warm_start]
