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

from ...algorithms.aggregation.contract import Aggregator, Before, Decision, Mean, Rows, product
from ...algorithms.contract import Message, Round
from ...workloads import counted
from ..aggregation.message_rows import MessageRows
from ..aggregation.passes import PassTask, RowsOf, add_grams, in_piece
from ..aggregation.planning import collects, further_row, number_of_faults, planned_rule
from ..aggregation.vectors import (
    Piece,
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
from ..state.retention import message_folder
from ..user_code import plugin_errors

RunPass = Callable[[Sequence[PassTask]], Iterable[TaskResult]]


class StageState(NamedTuple):
    """What the parts of the stage keep from round to round. rule: for each vector. last: for each vector the answer of
    the round before, a tensor for each span; () where the rule does not read it."""

    rule: tuple[Any, ...] = ()
    last: tuple[tuple[Tensor, ...], ...] = ()
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


class Sums(NamedTuple):
    """What workers that add messages up return. leaves: the float64 sums. weight: the sum of the client weights.
    weights: (S,) of the clients, in ascending client number. norms2: (S, V), see `Cohort`; without entries for the
    plain mean."""

    leaves: list[Tensor]
    weight: float
    weights: np.ndarray
    norms2: np.ndarray


class StageRunner:
    """Runs the stage of every round. Its state is passed in and returned, as the server's is."""

    def __init__(self, run_spec: RunSpec, run_pass: RunPass) -> None:
        """run_pass: has the workers run the tasks of a pass, and returns their results in any order."""
        self.run_spec, self.run_pass = run_spec, run_pass
        self.stage, self.rule = run_spec.stage, planned_rule(run_spec)
        self.collects = collects(run_spec)
        self.seed = run_spec.experiment.seed
        self.opened: dict[bool, MessageRows] = {}
        self.further = further_row(run_spec)

    def vectors(self, message: Message) -> list[Vector]:
        return vectors_of(message, self.rule.vectors, len(self.run_spec.buffers))

    def init(self, state_spec: StateSpec) -> StageState:
        """The state before round 1, and before a warm start."""
        noise = () if self.stage.noise is None else self.stage.noise.init(state_spec.message)
        if not self.collects:
            return StageState(noise=noise)
        vectors = self.vectors(state_spec.message)
        leaves = [torch.zeros(leaf.numel(), dtype=leaf.dtype) for leaf in vector_leaves(state_spec.message)]
        last = answers_of(vectors, leaves) if "last" in self.rule.reads else ()
        return StageState(tuple(self.rule.init(vector.length) for vector in vectors), last, noise)

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
            order = np.argsort(totals.clients["id"])
            present = weights[np.searchsorted(sampled, totals.clients["id"][order])]
            norms2 = totals.clients["norms2"][order] if "norms2" in totals.clients else np.zeros((0, 0))
            return self._from_sums(state_spec, state, round, Sums(leaves, weight, present, norms2))
        facts = state_spec.facts_only().mean(leaves, round.cohort, weight).facts
        found = Collected(self, state_spec, state, round, Cohort.of(sampled, weights, totals)).run()
        columns = {**found.columns, "time/aggregate": time.perf_counter() - began}
        return found._replace(mean=found.mean._replace(facts=facts), columns=columns)

    def _from_sums(self, state_spec: StateSpec, state: StageState, round: Round, cohort: Sums) -> Aggregated:
        """From the sums that the workers made."""
        if self.stage.noise is not None:
            sums = pytree.tree_unflatten(cohort.leaves, state_spec.message_spec)
            released = self.stage.noise.release(sums, state.noise, round)
            mean = state_spec.converted(pytree.tree_leaves(released.mean))
            return Aggregated(mean, state._replace(noise=released.state), dict(released.columns))
        if not round.cohort:  # a round without clients: the mean of no messages is 0
            return Aggregated(state_spec.mean(cohort.leaves, 1, 1), state, {})
        mean = state_spec.mean(cohort.leaves, round.cohort, cohort.weight)
        if isinstance(self.rule, Mean):
            return Aggregated(mean, state, {})
        sums = pytree.tree_unflatten(cohort.leaves, state_spec.message_spec)
        flat = [leaf.reshape(-1) for leaf in vector_leaves(sums)]
        broken = np.zeros(len(cohort.norms2), dtype=bool)
        for number, vector in enumerate(self.vectors(state_spec.message)):
            norms2 = cohort.norms2[:, number]
            sound = np.isfinite(norms2)
            broken |= ~sound
            weights = cohort.weights[sound] if vector.weighted else np.ones(int(sound.sum()))
            key = counted.key(self.seed, "aggregate", round.number)
            rows = Rows(len(weights), vector.length, 0, weights, norms2[sound], round.number, key)
            for spans in (vector.spans, vector.follows):
                if spans:
                    total = torch.cat([flat[span.leaf][span.begin : span.end] for span in spans])
                    parts = self.rule.from_sum(total, rows).split([span.length for span in spans])
                    for span, part in zip(spans, parts, strict=True):
                        flat[span.leaf][span.begin : span.end] = part
        samples = vector_leaves(state_spec.message)
        leaves = [
            leaf.view(sample.shape).to(sample.device, sample.dtype) for leaf, sample in zip(flat, samples, strict=True)
        ]
        return Aggregated(with_vector_leaves(mean, leaves), state, {"robust/broken": float(broken.sum())})

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
        self.runner, self.rule, self.state_spec, self.state = runner, runner.rule, state_spec, state
        self.round, self.cohort = round, cohort
        self.vectors = runner.vectors(state_spec.message)
        self.sound = np.isfinite(cohort.norms2)  # (S, V): the others are taken out

    def run(self) -> Aggregated:
        grams = self._grams()
        mixed = [self._before(number, grams.get(number)) for number in range(len(self.vectors))]
        if "values" in self.rule.reads or "signs" in self.rule.reads:
            mixed = self._look(mixed)
        decided = [self._decide(number, each) for number, each in enumerate(mixed)]
        leaves, columns = self._answer(decided)
        mean = with_vector_leaves(self.state_spec.message, leaves)
        broken = int((~self.sound).any(1).sum())
        first = decided[0].decision.columns if decided else {}
        columns = {"robust/broken": float(broken), **columns, **{f"robust/{k}": v for k, v in first.items()}}
        state = self.state._replace(rule=tuple(each.decision.state for each in decided))
        if state.last:
            flat = [leaf.detach().to("cpu").reshape(-1) for leaf in leaves]
            state = state._replace(last=answers_of(self.vectors, flat))
        return Aggregated(mean, state, columns)

    # --- what is read -------------------------------------------------------------------------------------------------
    def _rows(self, number: int) -> np.ndarray:
        """The rows of one vector's messages in the files, and the further row where the rule reads one."""
        rows = self.cohort.rows[self.sound[:, number]]
        return np.append(rows, self.runner.further) if has_further_row(self.rule) else rows

    def _write_last(self) -> None:
        """Write what the rule gave in the round before to the further row."""
        files = self.runner.files(self.state_spec, self.round.number == 0)
        for vector, last in zip(self.vectors, self.state.last, strict=True):
            for span, values in zip(vector.spans, last, strict=True):
                files.write_span(self.runner.further, span, values.numpy())

    def _tasks(self, what: str, of: Sequence[RowsOf | None], also_following: bool) -> list[PassTask]:
        return self._in_tasks(what, of, pieces_of(self.vectors, also_following))

    def _in_tasks(self, what: str, of: Sequence[RowsOf | None], pieces: Sequence[Piece]) -> list[PassTask]:
        return [
            PassTask(index, what, part, tuple(of), self.round.number) for index, part in enumerate(in_tasks(pieces))
        ]

    def _grams(self) -> dict[int, np.ndarray]:
        """The Gram matrix of each vector, where something reads it."""
        if not reads_gram(self.rule):
            return {}
        if self.state.last:
            self._write_last()
        tasks = self._tasks("Gram matrix", [RowsOf(self._rows(n)) for n in range(len(self.vectors))], False)
        return add_grams(tasks, self.runner.run_pass(tasks))

    # --- the decision -------------------------------------------------------------------------------------------------
    def _before(self, number: int, gram: np.ndarray | None) -> Mixed:
        """What the rule knows of one vector, after what stands before it."""
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
            with plugin_errors(f"round {self.round.number}: {part.called} raised", MethodFailed):
                step = part.matrix(without_further(rows._replace(f=own)))
            matrix = step if matrix is None else product(step, matrix)
            rows = transformed(rows, step, part.scales)
        self._check_count(self.rule.called, rows.count, f, self.rule.fewest(f))
        if why := self.rule.refuses(rows.count, f):
            raise TooFewMessages(f"round {self.round.number}: {why}")
        return Mixed(rows, matrix)

    def _look(self, mixed: Sequence[Mixed]) -> list[Mixed]:
        """The same, with the values or the signs that the rule reads."""
        windows = [self.rule.window(each.rows) for each in mixed] if "signs" in self.rule.reads else []
        places = [np.arange(window.start, window.stop) for window in windows]
        places = places or [self.rule.places(each.rows) for each in mixed]
        of = [RowsOf(self._rows(n), matrix=each.matrix, places=places[n]) for n, each in enumerate(mixed)]
        pieces = [piece for piece in pieces_of(self.vectors, False) if len(in_piece(places[piece.vector], piece))]
        found = self._parts(self._in_tasks("signs" if windows else "values", of, pieces))
        looked = []
        for number, each in enumerate(mixed):
            parts = [part for piece, part in zip(pieces, found, strict=True) if piece.vector == number]
            if windows:
                looked.append(each._replace(rows=each.rows._replace(signs=sum(parts) / len(places[number]))))
            else:
                looked.append(each._replace(rows=each.rows._replace(values=np.concatenate(parts, axis=1))))
        return looked

    def _parts(self, tasks: Sequence[PassTask]) -> list[np.ndarray]:
        """What a pass gives for its pieces, in their order."""
        by_task = {result.index: [np.array(part) for part in result.leaves or []] for result in self._run(tasks)}
        return [part for index in range(len(tasks)) for part in by_task[index]]

    def _run(self, tasks: Sequence[PassTask]) -> Iterable[TaskResult]:
        return self.runner.run_pass(tasks)

    def _decide(self, number: int, mixed: Mixed) -> Decided:
        """The rule's decision on one vector."""
        state = self.state.rule[number]
        with plugin_errors(f"round {self.round.number}: {self.rule.called} raised", MethodFailed):
            return Decided(self.rule.decide(mixed.rows, state), mixed.matrix, mixed.rows.f)

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
    def _answer(self, decided: Sequence[Decided]) -> tuple[list[Tensor], dict[str, float]]:
        """(the leaves of the answer, columns for the record)."""
        by_columns = self.rule.by == "columns"
        of = [each.rows_of(self._rows(number), by_columns) for number, each in enumerate(decided)]
        honest = np.ones(len(of[0].rows))
        honest[int(self.sound[:, 0].sum()) :] = 0.0  # a further row
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


class Mixed(NamedTuple):
    """What a rule knows of one vector, and the matrix of what stands before it, None for nothing."""

    rows: Rows
    matrix: np.ndarray | None


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
            weights = decision.weights
            if matrix is not None:
                own = product(matrix.T, weights[: len(matrix)])
                weights = np.append(own, weights[len(matrix) :])  # the further row, which nothing mixes
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


def has_further_row(rule: Aggregator) -> bool:
    """Whether a vector that is no message of the cohort appears as a further row, see `Rows`."""
    return "last" in rule.reads or "trusted" in rule.reads


def answers_of(vectors: Sequence[Vector], leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """For each vector the numbers of its spans. leaves: of a message, flat."""
    return tuple(tuple(leaves[span.leaf][span.begin : span.end].clone() for span in vector.spans) for vector in vectors)


def without_further(rows: Rows) -> Rows:
    """The rows as a pre-aggregation sees them: without a further row."""
    return rows if rows.gram is None else rows._replace(gram=rows.gram[: rows.count, : rows.count])


def transformed(rows: Rows, matrix: np.ndarray, scales: bool) -> Rows:
    """The rows after a pre-aggregation, see `Before.matrix`. scales: whether it only multiplies rows by numbers."""
    weights = rows.weights if scales else np.ones(len(matrix))
    changed = rows._replace(count=len(matrix), weights=weights)
    if rows.gram is not None:
        further = len(rows.gram) - rows.count
        whole = np.zeros((len(matrix) + further, len(rows.gram)))
        whole[: len(matrix), : rows.count] = matrix
        whole[len(matrix) :, rows.count :] = np.eye(further)
        gram = product(whole, rows.gram, whole.T)
        gram = np.triu(gram) + np.triu(gram, 1).T
        return changed._replace(gram=gram, norms2=np.maximum(np.diagonal(gram)[: len(matrix)], 0.0))
    if scales:
        return changed._replace(norms2=np.square(np.diagonal(matrix)) * rows.norms2)
    return changed._replace(norms2=np.full(len(matrix), np.nan))  # which nothing reads, see `reads_gram`
