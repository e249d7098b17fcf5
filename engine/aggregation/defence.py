"""One round's passes over the rows of messages, and the rule of aggregation as the driver asks it for its decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ...algorithms.aggregation.contract import UNIT, Aggregator, Before, Decision, Rows, product
from ..errors import MethodFailed, TooFewMessages
from ..reduction.round_totals import RoundTotals
from ..reduction.tree import TaskResult
from ..user_code import plugin_errors
from .passes import PassTask, RowsOf, add_grams, in_piece
from .vectors import Piece, Vector, in_tasks, pieces_of

if TYPE_CHECKING:
    from .stage import StageRunner

RunPass = Callable[[Sequence[PassTask]], Iterable[TaskResult]]


class StageState(NamedTuple):
    """What the parts of the stage keep from round to round.

    rule: the state of the rule for each vector. last: for each vector the answer of the round before, a tensor for each
    span; () if the rule does not read it. attack: for each vector the attack's numbers and the vectors that it keeps, a
    tensor for each span. noise: the state of the noise.
    """

    rule: tuple[Any, ...] = ()
    last: tuple[tuple[Tensor, ...], ...] = ()
    attack: tuple[tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]], ...] = ()
    noise: Any = ()


class Cohort(NamedTuple):
    """The clients that have sent messages, in ascending client number.

    clients: (S,). rows: (S,) of their messages in the files. weights: (S,) their client weights. norms2: (S, V) the
    squared norms of the vectors, each by itself. byzantine: (S,) bool: which clients attack in this round. drawn: the
    number of clients in the round, with those that were dropped.
    """

    clients: np.ndarray
    rows: np.ndarray
    weights: np.ndarray
    norms2: np.ndarray
    byzantine: np.ndarray
    drawn: int

    @staticmethod
    def of(sampled: np.ndarray, weights: np.ndarray, byzantine: np.ndarray, totals: RoundTotals) -> Cohort:
        """sampled: (S,) in ascending order. weights: (S,) their client weights. byzantine: (S,) which of them attack in
        this round."""
        order = np.argsort(totals.clients["id"])
        clients = totals.clients["id"][order]
        rows = np.searchsorted(sampled, clients)
        norms2 = totals.clients["norms2"][order] if "norms2" in totals.clients else np.zeros((len(clients), 0))
        return Cohort(clients, rows, weights[rows], norms2, byzantine[rows], len(sampled))


class Mixed(NamedTuple):
    """What a rule knows of one vector, and the matrix of the pre-aggregations, None if there are none."""

    rows: Rows
    matrix: np.ndarray | None


class Decided(NamedTuple):
    """A rule's decision on one vector. matrix: that of the pre-aggregations, or None. f: the f of the rule."""

    decision: Decision
    matrix: np.ndarray | None
    f: int

    def weights(self) -> np.ndarray:
        """The weights of the rows, for a rule by weights."""
        weights = self.decision.weights
        assert weights is not None
        if self.matrix is not None:
            own = product(self.matrix.T, weights[: len(self.matrix)])
            weights = np.append(own, weights[len(self.matrix) :])  # the further row is never mixed
        return weights * self.decision.scale

    def statistics(self, count: int) -> np.ndarray:
        """(count,): the weights of the running statistics of `count` messages, for a rule by weights: the same as those
        of the messages, as far as these are weights of a mean of the messages and of what is there already. A further
        row has none. Otherwise a variance or a count could become negative."""
        weights = np.maximum(self.weights()[:count], 0.0)
        total = weights.sum()
        return weights / total if total > 1 + count * np.finfo(float).eps else weights

    def combination(self, count: int) -> np.ndarray | None:
        """The matrix by which `count` rows are combined before their columns are read, or None."""
        if self.decision.chosen is None:
            return self.matrix
        return (np.eye(count) if self.matrix is None else self.matrix)[self.decision.chosen]


class Passes:
    """The passes over the rows of one round's messages, for a list of vectors."""

    def __init__(self, run_pass: RunPass, vectors: Sequence[Vector], round: int) -> None:
        self.run, self.vectors, self.round = run_pass, vectors, round

    def tasks(self, what: str, of: Sequence[RowsOf | None], pieces: Sequence[Piece] | None = None) -> list[PassTask]:
        """pieces: those to go through; None for all that decide."""
        pieces = pieces_of(self.vectors, False) if pieces is None else pieces
        wanted = [piece for piece in pieces if of[piece.vector] is not None]
        lengths = tuple(vector.length for vector in self.vectors)
        return [
            PassTask(index, what, part, tuple(of), self.round, lengths) for index, part in enumerate(in_tasks(wanted))
        ]

    def grams(self, of: Sequence[RowsOf | None]) -> dict[int, np.ndarray]:
        """number of a vector -> its Gram matrix."""
        tasks = self.tasks("Gram matrix", of)
        return add_grams(tasks, self.run(tasks))

    def parts(self, tasks: Sequence[PassTask]) -> list[tuple[Piece, np.ndarray]]:
        """What a pass gives for its pieces, in their order."""
        found = {result.index: [np.array(part) for part in result.leaves or []] for result in self.run(tasks)}
        return [item for task in tasks for item in zip(task.pieces, found[task.index], strict=True)]

    def places(self, what: str, of: Sequence[RowsOf | None]) -> dict[int, list[np.ndarray]]:
        """number of a vector -> what the pass "values" or "signs" gives for its pieces, in order."""
        pieces = []
        for piece in pieces_of(self.vectors, False):
            rows_of = of[piece.vector]
            if rows_of is not None and rows_of.places is not None and len(in_piece(rows_of.places, piece)):
                pieces.append(piece)
        found: dict[int, list[np.ndarray]] = {}
        for piece, part in self.parts(self.tasks(what, of, pieces)):
            found.setdefault(piece.vector, []).append(part)
        return found

    def answers(self, what: str, of: Sequence[RowsOf | None], flat: list[np.ndarray] | None) -> dict[int, np.ndarray]:
        """Run the pass "columns" or "weighted sum". Returns for each vector |F - mean|^2 and |mean|^2, (2,). flat: the
        leaves into which the answers are written, or None."""
        tasks = self.tasks(what, of, None if flat is None else pieces_of(self.vectors, True))
        apart: dict[int, dict[int, np.ndarray]] = {}
        for result in self.run(tasks):
            task = tasks[result.index]
            *parts, sums = result.leaves or []
            if flat is not None:
                for piece, part in zip(task.pieces, parts, strict=True):
                    flat[piece.span.leaf][piece.span.begin : piece.span.end] = part
            for number, numbers in zip(task.numbers, sums, strict=True):
                apart.setdefault(number, {})[task.index] = np.array(numbers)
        return {number: sum((by[i] for i in sorted(by)), np.zeros(2)) for number, by in apart.items()}


class Defence:
    """The rule of one round, with its pre-aggregations."""

    def __init__(self, runner: StageRunner, passes: Passes, state: StageState, drawn: int) -> None:
        """drawn: the number of clients in the round."""
        self.runner, self.passes, self.state = runner, passes, state
        self.rule = runner.rule.scaled(drawn, runner.run_spec.experiment.federation.cohort)

    def mix(self, rows: Rows) -> Mixed:
        """What the rule knows of one vector after the pre-aggregations. rows: the rows before them."""
        f, matrix = rows.f, None
        for part in self.rule.before:
            own = part.faults(f)
            self._check_count(part.called, rows.count, own, part.fewest(own))
            with plugin_errors(f"round {rows.round}: {part.called} raised", MethodFailed):
                step = part.matrix(without_further(rows._replace(f=own)))
            matrix = step if matrix is None else product(step, matrix)
            rows = transformed(rows, step, part.scales)
        self._check_count(self.rule.called, rows.count, f, self.rule.fewest(f))
        if why := self.rule.refuses(rows.count, f):
            raise TooFewMessages(f"round {rows.round}: {why}")
        return Mixed(rows, matrix)

    def _check_count(self, called: str, count: int, f: int, fewest: int) -> None:
        if count < fewest:
            cohort = self.runner.run_spec.experiment.federation.cohort
            raise TooFewMessages(
                f"round {self.passes.round}: {count} of {cohort} messages are left, and {called} with f={f} needs "
                f"{fewest} or more; see engine.on_failure"
            )

    def look(self, mixed: dict[int, Mixed], of: dict[int, RowsOf]) -> dict[int, Mixed]:
        """The same, with the values or the signs that the rule reads. of: what is read of each vector, with the matrix
        of all pre-aggregations."""
        signs = "signs" in self.rule.reads
        if not signs and "values" not in self.rule.reads:
            return mixed
        wanted: list[RowsOf | None] = [None] * len(self.passes.vectors)
        for number, each in mixed.items():
            places = self._window(each.rows) if signs else self.rule.places(each.rows)
            wanted[number] = of[number]._replace(places=places)
        found = self.passes.places("signs" if signs else "values", wanted)
        looked = {}
        for number, each in mixed.items():
            parts, read = found[number], wanted[number]
            assert read is not None
            assert read.places is not None
            if signs:
                looked[number] = each._replace(rows=each.rows._replace(signs=sum(parts) / len(read.places)))
            else:
                looked[number] = each._replace(rows=each.rows._replace(values=np.concatenate(parts, axis=1)))
        return looked

    def _window(self, rows: Rows) -> np.ndarray:
        window = self.rule.window(rows)
        return np.arange(window.start, window.stop)

    def decide(self, number: int, mixed: Mixed) -> Decided:
        """The rule's decision on one vector."""
        with plugin_errors(f"round {self.passes.round}: {self.rule.called} raised", MethodFailed):
            return Decided(self.rule.decide(mixed.rows, self.state.rule[number]), mixed.matrix, mixed.rows.f)


def reads_gram(rule: Aggregator) -> bool:
    """Whether a rule or a pre-aggregation needs the Gram matrix of the rows: because it declares that, or because it
    needs the norms of rows that are combinations of other rows."""
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


def without_further(rows: Rows) -> Rows:
    """The rows as a pre-aggregation sees them: without a further row."""
    if rows.gram is None:
        return rows
    errors = None if rows.errors is None else rows.errors[: rows.count, : rows.count]
    return rows._replace(gram=rows.gram[: rows.count, : rows.count], errors=errors)


def transformed(rows: Rows, matrix: np.ndarray, scales: bool) -> Rows:
    """The rows after a pre-aggregation, see `Before.matrix`. scales: whether it only multiplies rows by numbers."""
    weights = rows.weights if scales else np.ones(len(matrix))
    changed = rows._replace(count=len(matrix), weights=weights)
    if rows.gram is not None:
        further = len(rows.gram) - rows.count
        whole = np.zeros((len(matrix) + further, len(rows.gram)))
        whole[: len(matrix), : rows.count] = matrix
        whole[len(matrix) :, rows.count :] = np.eye(further)
        gram, errors = combined_gram(whole, rows.gram), combined_errors(whole, rows.gram, rows.errors)
        return changed._replace(gram=gram, errors=errors, norms2=np.maximum(np.diagonal(gram)[: len(matrix)], 0.0))
    if scales:
        return changed._replace(norms2=np.square(np.diagonal(matrix)) * rows.norms2)
    return changed._replace(norms2=np.full(len(matrix), np.nan))  # these are never read, see `reads_gram`


def combined_errors(matrix: np.ndarray, gram: np.ndarray, errors: np.ndarray | None) -> np.ndarray:
    """Bounds of the rounding errors of `combined_gram`: two products of n terms each, on a Gram matrix that has errors
    of its own."""
    inexact = 2 * (len(gram) + 1) * UNIT * np.abs(gram) + (0.0 if errors is None else errors)
    return product(np.abs(matrix), inexact, np.abs(matrix).T)


def combined_gram(matrix: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """The Gram matrix of the rows of `matrix` times rows with this Gram matrix; it is symmetric to the bit."""
    found = product(matrix, gram, matrix.T)
    return np.triu(found) + np.triu(found, 1).T
