"""The driver's part of the stage between the clients' messages and the server's update.

In a run that collects messages, the workers have written them to rows. The driver has the workers compute what the rule
reads, asks the rule for its decision, and has them compute the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Mean, Rows, product
from ...algorithms.attacks.contract import CohortAttack
from ...algorithms.contract import Message, Round
from ...workloads import counted
from ..cohorts.tasks import TrainingTask
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..reduction.round_totals import RoundTotals
from ..run_spec import RunSpec
from ..state.retention import message_folder
from .attacking import Forgery
from .defence import (
    Cohort,
    Decided,
    Defence,
    Passes,
    RunPass,
    StageState,
    has_further_row,
    reads_gram,
)
from .message_rows import FURTHER, MessageRows, capacity
from .passes import RowsOf
from .planning import collects, further_row, largest_cohort, number_of_faults, planned_rule
from .vectors import (
    PIECE,
    Span,
    Vector,
    vector_leaves,
    vectors_of,
    with_vector_leaves,
)

GRAMS = 8
"""Matrices of S x S numbers that the driver has at the same time: inner products, distances, combinations, bounds of
rounding errors, the order of the distances."""


class Aggregated(NamedTuple):
    """The result of the stage in a round. columns: for the record. notes: sentences for the log."""

    mean: Message
    state: StageState
    columns: dict[str, float]
    notes: tuple[str, ...] = ()


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
        self.further = further_row(run_spec)

    def check_memory(self, free: int | None) -> None:
        """Raise ConfigError if a rule cannot look at the messages of the largest round in memory. free: the bytes that
        are available, None if the system does not say."""
        attack, rows = self.stage.attack, capacity(largest_cohort(self.run_spec), False)
        asks = isinstance(attack, CohortAttack) and "gram" in attack.reads
        grams = GRAMS * 8 * rows * rows if asks or reads_gram(self.rule) else 0
        needed = grams + 12 * rows * PIECE  # a piece of the rows, as it is stored and in float64
        if free is not None and needed > free:
            raise ConfigError(
                f"aggregate: {self.rule.called} looks at {rows - FURTHER:,} messages at once, which takes {needed:,} "
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
        last = spans_of(vectors, zeros) if "last" in self.rule.reads else ()
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
        found = Collected(self, state_spec, state, round, cohort).run()
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
            rows = self.rows(vector, cohort.weights[those], 0, norms2[those, number], round.number)
            if vector.weighted and those.all():
                rows = rows._replace(added_weight=facts["weight"])
            for spans in filter(None, (vector.spans, vector.follows, vector.statistics)):
                self._answer_from_sums(flat, vector, spans, rows)
        broken = float((~sound).any(1).sum())
        leaves = shaped(flat, vector_leaves(state_spec.message))
        return Aggregated(with_vector_leaves(mean, leaves), state, {"robust/broken": broken})

    def _answer_from_sums(self, flat: list[Tensor], vector: Vector, spans: Sequence[Span], rows: Rows) -> None:
        """Put the rule's answer in the place of the sums of some numbers of a vector. flat: the leaves of a message.
        spans: those of the vector itself, those that follow it, or its running statistics."""
        lengths = [span.length for span in spans]
        total = torch.cat([flat[span.leaf][span.begin : span.end] for span in spans])

        def answer(rows: Rows) -> Sequence[Tensor]:
            averaged = self.rule.steps and spans is vector.statistics
            return (total / rows.weight if averaged else self.rule.from_sum(total, rows)).split(lengths)

        own = uniform = answer(rows)
        if vector.plain:
            uniform = answer(rows._replace(weights=np.ones(len(rows.weights)), added_weight=None))
        for span, weighted, plain in zip(spans, own, uniform, strict=True):
            flat[span.leaf][span.begin : span.end] = plain if span.leaf in vector.plain else weighted

    def rows(
        self, vector: Vector, weights: np.ndarray, f: int, norms2: np.ndarray, round: int,
        gram: np.ndarray | None = None,
    ) -> Rows:  # fmt: skip
        """What the rule knows of the rows of one vector."""
        weights = weights if vector.weighted else np.ones(len(weights))
        key = counted.key(self.seed, "aggregate", round)
        return Rows(len(weights), vector.length, f, weights, norms2, round, key, gram)

    def files(self, state_spec: StateSpec, warm_start: bool) -> MessageRows:
        """The files of messages, opened by the driver."""
        if warm_start not in self.opened:
            folder = str(message_folder(self.run_spec))
            self.opened[warm_start] = MessageRows(folder, vector_leaves(state_spec.message))
        return self.opened[warm_start]


class Collected:
    """The stage of one round whose messages lie in rows."""

    def __init__(
        self, runner: StageRunner, state_spec: StateSpec, state: StageState, round: Round, cohort: Cohort
    ) -> None:
        self.runner, self.state_spec, self.state = runner, state_spec, state
        self.round, self.cohort = round, cohort
        self.vectors, self.single = runner.vectors(state_spec.message), runner.single_vectors(state_spec.message)
        self.passes = Passes(runner.run_pass, self.vectors, round.number)
        self.defence = Defence(runner, self.passes, state, cohort.drawn)
        self.rule = self.defence.rule

    def run(self) -> Aggregated:
        """The answer of the rule, after the attack."""
        told: dict[str, float] = {}
        if self.state.last:
            self._write_last()
        if isinstance(self.runner.stage.attack, CohortAttack) and self.cohort.byzantine.any():
            forgery = Forgery(self, self.runner.stage.attack)
            self.cohort, attack, told = forgery.run()
            self.state = self.state._replace(attack=attack)
        self.norms2, sound = grouped(self.cohort.norms2, self.single, self.vectors)
        self.sound = sound | isinstance(self.rule, Mean)  # (S, V): all others are left out
        numbers = range(len(self.vectors))
        of = {number: RowsOf(self._rows(number)) for number in numbers}
        grams = self.passes.grams(list(of.values())) if reads_gram(self.rule) else {}
        known = {number: self._known(number, grams.get(number)) for number in numbers}
        uneven = {
            n: rows for n, rows in known.items() if self.vectors[n].plain and (rows.weights != rows.weights[:1]).any()
        }
        plain = {n: rows._replace(weights=np.ones(rows.count)) for n, rows in uneven.items()}
        return self._answer(self._decide(known, of), self._decide(plain, of), grams.get(0), told)

    def _decide(self, known: dict[int, Rows], of: dict[int, RowsOf]) -> dict[int, Decided]:
        """number of a vector -> the rule's decision on what is known of its rows."""
        if not known:
            return {}
        mixed = {number: self.defence.mix(rows) for number, rows in known.items()}
        mixed = self.defence.look(mixed, {n: of[n]._replace(matrix=each.matrix) for n, each in mixed.items()})
        return {number: self.defence.decide(number, each) for number, each in mixed.items()}

    # --- what is known ------------------------------------------------------------------------------------------------
    def _rows(self, number: int) -> np.ndarray:
        """The rows of one vector's messages in the files, and the further row where the rule reads one."""
        rows = self.cohort.rows[self.sound[:, number]]
        return np.append(rows, self.runner.further) if has_further_row(self.rule) else rows

    def _write_last(self) -> None:
        """Write the rule's answer of the round before to the further row."""
        files = self.runner.files(self.state_spec, self.round.number == 0)
        for vector, last in zip(self.vectors, self.state.last, strict=True):
            for span, values in zip((*vector.spans, *vector.follows), last, strict=True):
                files.write_span(self.runner.further, span, values.numpy())

    def _known(self, number: int, gram: np.ndarray | None) -> Rows:
        """What is known of the rows of one vector, before any pre-aggregation."""
        sound = self.sound[:, number]
        f = max(0, self.faults() - int((~sound).sum()))
        norms2, weights = self.norms2[sound, number], self.cohort.weights[sound]
        return self.runner.rows(self.vectors[number], weights, f, norms2, self.round.number, gram)

    def faults(self) -> int:
        """f of the rule for this round's messages, before broken ones are taken out."""
        byzantine = self.cohort.byzantine
        return number_of_faults(self.runner.run_spec, len(byzantine), self.cohort.drawn, int(byzantine.sum()))

    # --- the answer ---------------------------------------------------------------------------------------------------
    def _answer(
        self, decided: dict[int, Decided], plain: dict[int, Decided], gram: np.ndarray | None, told: dict[str, float]
    ) -> Aggregated:
        """The rule's answer from its decisions on all vectors. plain: those with equal client weights, for vectors of
        which a part is averaged uniformly. gram: of the first vector, if it is known. told: columns of the attack."""
        columns = self.rule.by == "columns"
        of = []
        for number, each in decided.items():
            rows, statistics = self._rows(number), self._statistics(number, each)
            if columns:
                combination = each.combination(len(rows))
                of.append(RowsOf(rows, None, combination, each.f, each.decision.scale, statistics=statistics))
            else:
                uniform = plain[number].weights() if number in plain else None
                of.append(RowsOf(rows, each.weights(), plain=uniform, statistics=statistics))
        honest = ~self.cohort.byzantine[self.sound[:, 0]]
        compared = np.zeros(len(of[0].rows))
        compared[: len(honest)] = honest / max(1, honest.sum())
        in_gram = gram is not None and of[0].weights is not None  # then the comparison needs no pass
        of[0] = of[0]._replace(mean=None if in_gram else compared)
        samples = vector_leaves(self.state_spec.message)
        flat = [np.zeros(sample.numel()) for sample in samples]
        apart = self.passes.answers("columns" if columns else "weighted sum", of, flat)[0]
        if gram is not None and of[0].weights is not None:
            pairs = [(each, product(gram, each)) for each in (of[0].weights - compared, compared)]
            apart = np.array([max(0.0, float(product(*pair))) for pair in pairs])
        leaves = shaped([torch.from_numpy(values) for values in flat], samples)
        state = self.state._replace(rule=tuple(each.decision.state for each in decided.values()))
        if state.last:
            state = state._replace(last=spans_of(self.vectors, [leaf.detach().cpu().reshape(-1) for leaf in leaves]))
        record = {**self._columns(apart, honest, of[0].weights), **told}
        record |= {f"robust/{name}": value for name, value in decided[0].decision.columns.items()}
        notes = tuple(each.decision.note for each in decided.values() if each.decision.note)
        return Aggregated(with_vector_leaves(self.state_spec.message, leaves), state, record, notes[:1])

    def _statistics(self, number: int, decided: Decided) -> np.ndarray | None:
        """The weights of the rows for the running statistics of a vector; None where the rule's columns serve them."""
        count, further = int(self.sound[:, number].sum()), has_further_row(self.rule)
        if self.rule.steps:
            weights = self.cohort.weights[self.sound[:, number]]
            weights = weights / weights.sum()
        elif self.rule.by == "columns":
            return None
        else:
            weights = decided.statistics(count)
        return np.append(weights, 0.0) if further else weights

    def _columns(self, apart: np.ndarray, honest: np.ndarray, weights: np.ndarray | None) -> dict[str, float]:
        """The columns robust/… of the first vector, see docs/howto/robustness.md. apart: |F - mean|^2 and |mean|^2 over
        the honest rows. honest: (S,) bool, of the sound rows."""
        record = {"robust/broken": float((~self.sound).any(1).sum())}
        spread2 = float(self.norms2[self.sound[:, 0], 0][honest].mean()) - apart[1] if honest.any() else 0.0
        record["robust/error"] = float(np.sqrt(apart[0] / spread2)) if spread2 > 0 else 0.0
        if weights is not None and self.runner.stage.attack is not None:
            own = weights[: len(honest)]
            record["robust/kept_honest"] = float(own[honest].sum())
            record["robust/kept_byzantine"] = float(own[~honest].sum())
        return record


def spans_of(vectors: Sequence[Vector], leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """For each vector the numbers of its spans, and of those that follow. leaves: of a message, flat."""
    spans = [(*vector.spans, *vector.follows) for vector in vectors]
    return tuple(tuple(leaves[span.leaf][span.begin : span.end].clone() for span in each) for each in spans)


def shaped(flat: Sequence[Tensor], samples: Sequence[Tensor]) -> list[Tensor]:
    """Flat leaves in the shapes and dtypes, and on the devices, of the samples."""
    return [leaf.view(sample.shape).to(sample.device, sample.dtype) for leaf, sample in zip(flat, samples, strict=True)]


def grouped(norms2: np.ndarray, single: Sequence[Vector], vectors: Sequence[Vector]) -> tuple[np.ndarray, np.ndarray]:
    """((S, V) the squared norms of vectors that consist of the single ones; (S, V) bool: whether these are finite, and
    those of what follows the vectors). norms2: (S, V') of the single ones."""
    found, sound = [], []
    for vector in vectors:
        own, all_of_it = set(vector.spans), {*vector.spans, *vector.follows}
        found.append(norms2[:, [i for i, one in enumerate(single) if set(one.spans) <= own]].sum(axis=1))
        parts = norms2[:, [i for i, one in enumerate(single) if set(one.spans) <= all_of_it]]
        sound.append(np.isfinite(parts).all(axis=1) & np.isfinite(found[-1]))
    return np.stack(found, axis=1), np.stack(sound, axis=1)
