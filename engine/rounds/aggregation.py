"""The driver's part of the stage between the clients' messages and the server's update.

In a run that collects messages, the workers have written them to rows. The driver has the workers compute what the rule
reads, asks the rule for its decision, and has them compute the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Aggregator, Before, Decision, Rows, product
from ...algorithms.contract import Message, Round
from ...workloads import counted
from ..aggregation.passes import PassTask, RowsOf, add_grams
from ..aggregation.planning import collects, number_of_faults, planned_rule
from ..aggregation.vectors import (
    Vector,
    in_tasks,
    pieces_of,
    vector_leaves,
    vectors_of,
    with_vector_leaves,
)
from ..config.run_spec import RunSpec
from ..errors import MethodFailed, TooFewMessages
from ..methods.state_spec import StateSpec
from ..reduction.round_totals import RoundTotals
from ..reduction.tree import TaskResult
from ..user_code import plugin_errors

RunPass = Callable[[Sequence[PassTask]], Iterable[TaskResult]]


class StageState(NamedTuple):
    """What the parts of the stage keep from round to round. rule: for each vector."""

    rule: tuple[Any, ...] = ()
    noise: Any = ()


class Aggregated(NamedTuple):
    """What the stage gives in a round. columns: for the record."""

    mean: Message
    state: StageState
    columns: dict[str, float]


class Cohort(NamedTuple):
    """The clients whose messages there are, in ascending client number.

    rows: (S,) of their messages in the files. weights: (S,) their client weights. norms2: (S, V) the squared norms of
    their vectors.
    """

    rows: np.ndarray
    weights: np.ndarray
    norms2: np.ndarray

    @staticmethod
    def of(sampled: np.ndarray, weights: np.ndarray, totals: RoundTotals) -> Cohort:
        """sampled: (S,) in ascending order. weights: of them."""
        order = np.argsort(totals.clients["id"])
        rows = np.searchsorted(sampled, totals.clients["id"][order])
        return Cohort(rows, weights[rows], totals.clients["norms2"][order])


class StageRunner:
    """Runs the stage of every round. Its state is passed in and returned, as the server's is."""

    def __init__(self, run_spec: RunSpec, run_pass: RunPass) -> None:
        """run_pass: has the workers run the tasks of a pass, and returns their results in any order."""
        self.run_spec, self.run_pass = run_spec, run_pass
        self.stage, self.rule = run_spec.stage, planned_rule(run_spec)
        self.collects = collects(run_spec)
        self.seed = run_spec.experiment.seed

    def vectors(self, message: Message) -> list[Vector]:
        return vectors_of(message, self.rule.vectors, len(self.run_spec.buffers))

    def init(self, state_spec: StateSpec) -> StageState:
        """The state before round 1, and before a warm start."""
        noise = () if self.stage.noise is None else self.stage.noise.init(state_spec.message)
        if not self.collects:
            return StageState(noise=noise)
        return StageState(tuple(self.rule.init(vector.length) for vector in self.vectors(state_spec.message)), noise)

    def summed(self, state_spec: StateSpec) -> StateSpec:
        """The specification of what workers add up."""
        return state_spec.facts_only() if self.collects else state_spec

    def aggregate(
        self, state_spec: StateSpec, state: StageState, round: Round, sampled: np.ndarray, weights: np.ndarray,
        totals: RoundTotals,
    ) -> Aggregated:  # fmt: skip
        """The message that takes the place of the mean. sampled, weights: (S,), the cohort and its client weights."""
        began = time.perf_counter()
        leaves = [torch.as_tensor(leaf) for leaf in totals.leaves]
        weight = totals.facts["weight"]
        if not self.collects:
            return self._from_sums(state_spec, state, round, leaves, weight)
        facts = state_spec.facts_only().mean(leaves, round.cohort, weight).facts
        found = Collected(self, state_spec, state, round, Cohort.of(sampled, weights, totals)).run()
        columns = {**found.columns, "time/aggregate": time.perf_counter() - began}
        return found._replace(mean=found.mean._replace(facts=facts), columns=columns)

    def _from_sums(
        self, state_spec: StateSpec, state: StageState, round: Round, leaves: list[Tensor], weight: float
    ) -> Aggregated:
        """From the sums that the workers made."""
        if self.stage.noise is None:
            return Aggregated(state_spec.mean(leaves, round.cohort, weight), state, {})
        sums = pytree.tree_unflatten(leaves, state_spec.message_spec)
        released = self.stage.noise.release(sums, state.noise, round)
        mean = state_spec.converted(pytree.tree_leaves(released.mean))
        return Aggregated(mean, state._replace(noise=released.state), dict(released.columns))


class Collected:
    """The stage of one round whose messages lie in rows."""

    def __init__(
        self, runner: StageRunner, state_spec: StateSpec, state: StageState, round: Round, cohort: Cohort
    ) -> None:
        self.runner, self.rule, self.state_spec, self.state = runner, runner.rule, state_spec, state
        self.round, self.cohort = round, cohort
        self.vectors = runner.vectors(state_spec.message)
        self.sound = np.isfinite(cohort.norms2)  # (S, V): the others are taken out

    def run(self) -> Aggregated:
        grams = self._grams()
        decided = [self._decide(number, grams.get(number)) for number in range(len(self.vectors))]
        leaves, columns = self._answer(decided, grams)
        mean = with_vector_leaves(self.state_spec.message, leaves)
        broken = int((~self.sound).any(1).sum())
        first = decided[0].decision.columns if decided else {}
        columns = {"robust/broken": float(broken), **columns, **{f"robust/{k}": v for k, v in first.items()}}
        return Aggregated(mean, self.state._replace(rule=tuple(each.decision.state for each in decided)), columns)

    # --- what is read -------------------------------------------------------------------------------------------------
    def _rows(self, number: int) -> np.ndarray:
        """The rows of one vector's messages in the files."""
        return self.cohort.rows[self.sound[:, number]]

    def _tasks(self, what: str, of: Sequence[RowsOf | None], also_following: bool) -> list[PassTask]:
        pieces = [piece for piece in pieces_of(self.vectors, also_following) if of[piece.vector] is not None]
        return [
            PassTask(index, what, part, tuple(of), self.round.number) for index, part in enumerate(in_tasks(pieces))
        ]

    def _grams(self) -> dict[int, np.ndarray]:
        """The Gram matrix of each vector, where something reads it."""
        if not reads_gram(self.rule):
            return {}
        tasks = self._tasks("Gram matrix", [RowsOf(self._rows(n)) for n in range(len(self.vectors))], False)
        return add_grams(tasks, self.runner.run_pass(tasks))

    # --- the decision -------------------------------------------------------------------------------------------------
    def _decide(self, number: int, gram: np.ndarray | None) -> Decided:
        """The rule's decision on one vector, after what stands before it."""
        sound, vector = self.sound[:, number], self.vectors[number]
        weights = self.cohort.weights[sound] if vector.weighted else np.ones(int(sound.sum()))
        f = max(0, self._faults() - int((~sound).sum()))
        key = counted.key(self.runner.seed, "aggregate", self.round.number)
        norms2 = self.cohort.norms2[sound, number]
        rows = Rows(len(weights), vector.length, f, weights, norms2, self.round.number, key, gram)
        matrix = None
        for part in self.rule.before:
            own = part.faults(f)
            self._check_count(part.called, rows.count, own, part.fewest(own))
            step = part.matrix(rows._replace(f=own))
            matrix = step if matrix is None else product(step, matrix)
            rows = transformed(rows, step, part.scales)
        self._check_count(self.rule.called, rows.count, f, self.rule.fewest(f))
        state = self.state.rule[number] if self.state.rule else self.rule.init(vector.length)
        with plugin_errors(f"round {self.round.number}: {self.rule.called} raised", MethodFailed):
            decision = self.rule.decide(rows, state)
        return Decided(decision, matrix, f)

    def _faults(self) -> int:
        federation = self.runner.run_spec.experiment.federation
        return number_of_faults(self.rule.faults, len(self.cohort.rows), federation.cohort, 0.0, 0)

    def _check_count(self, called: str, count: int, f: int, fewest: int) -> None:
        if count < fewest:
            cohort = self.runner.run_spec.experiment.federation.cohort
            raise TooFewMessages(
                f"round {self.round.number}: {count} of {cohort} messages are left, and {called} with f={f} needs "
                f"{fewest} or more; see engine.on_failure"
            )

    # --- the answer ---------------------------------------------------------------------------------------------------
    def _answer(
        self, decided: Sequence[Decided], grams: dict[int, np.ndarray]
    ) -> tuple[list[Tensor], dict[str, float]]:
        """(the leaves of the answer, columns for the record)."""
        by_columns = self.rule.by == "columns"
        of = [each.rows_of(self._rows(number), by_columns) for number, each in enumerate(decided)]
        honest = np.ones(len(of[0].rows))
        of[0] = of[0]._replace(mean=honest / honest.sum())
        tasks = self._tasks("columns" if by_columns else "weighted sum", of, True)
        samples = vector_leaves(self.state_spec.message)
        flat = [np.zeros(sample.numel()) for sample in samples]
        apart: dict[int, np.ndarray] = {}
        for result in self.runner.run_pass(tasks):
            task = tasks[result.index]
            *parts, sums = result.leaves or []
            for piece, part in zip(task.pieces, parts, strict=True):
                flat[piece.span.leaf][piece.span.begin : piece.span.end] = part
            if 0 in task.numbers:
                apart[task.index] = np.array(sums[task.numbers.index(0)])
        leaves = [
            torch.from_numpy(values).view(sample.shape).to(sample.device, sample.dtype)
            for values, sample in zip(flat, samples, strict=True)
        ]
        return leaves, self._columns(apart, of[0])

    def _columns(self, apart: dict[int, np.ndarray], of: RowsOf) -> dict[str, float]:
        """robust/error: |F - mean|, in units of the root mean squared distance of the honest rows from their mean."""
        difference2, mean2 = sum((apart[index] for index in sorted(apart)), np.zeros(2))
        spread2 = float(self.cohort.norms2[self.sound[:, 0], 0].mean()) - mean2
        return {"robust/error": float(np.sqrt(difference2 / spread2)) if spread2 > 0 else 0.0}


class Decided(NamedTuple):
    """A rule's decision on one vector. matrix: of what stands before the rule, or None. f: of the rule."""

    decision: Decision
    matrix: np.ndarray | None
    f: int

    def rows_of(self, rows: np.ndarray, by_columns: bool) -> RowsOf:
        """What the last pass reads. rows: (S,) of the vector's messages in the files."""
        decision, matrix = self.decision, self.matrix
        if not by_columns:
            assert decision.weights is not None
            weights = decision.weights if matrix is None else product(matrix.T, decision.weights)
            return RowsOf(rows, weights * decision.scale)
        if decision.chosen is not None:
            matrix = np.eye(len(rows))[decision.chosen] if matrix is None else matrix[decision.chosen]
        return RowsOf(rows, None, matrix, self.f, decision.scale)


def reads_gram(rule: Aggregator) -> bool:
    """Whether a rule, or what stands before it, needs the Gram matrix of the rows: where it says so, and where norms
    are wanted of rows that are combinations of others."""
    parts: list[Before | Aggregator] = [*rule.before, rule]
    combined = False
    for part in parts:
        if "gram" in part.reads or ("norms" in part.reads and combined):
            return True
        combined = combined or (isinstance(part, Before) and not part.scales)
    return False


def transformed(rows: Rows, matrix: np.ndarray, scales: bool) -> Rows:
    """The rows after a pre-aggregation, see `Before.matrix`. scales: whether it only multiplies rows by numbers."""
    weights = rows.weights if scales else np.ones(len(matrix))
    changed = rows._replace(count=len(matrix), weights=weights)
    if rows.gram is not None:
        gram = product(matrix, rows.gram, matrix.T)
        gram = np.triu(gram) + np.triu(gram, 1).T
        return changed._replace(gram=gram, norms2=np.maximum(np.diagonal(gram), 0.0))
    if scales:
        return changed._replace(norms2=np.square(np.diagonal(matrix)) * rows.norms2)
    return changed._replace(norms2=np.full(len(matrix), np.nan))  # which nothing reads, see `reads_gram`
