"""The messages of one round, which lie in rows of files: the driver asks, and the workers pass over the rows to answer.

For each vector of a message they are a matrix (S, P) that is never in memory. Parts of a Gram matrix are added in the
order of a tree over the tasks of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from ...algorithms.aggregation.messages import Answer, Stored, combined_gram, product
from ...workloads import counted
from ..reduction.tree import TaskResult, TreeNode, TreeReducer, TreeShape
from . import passes
from .message_rows import Span, Vector, grouped
from .passes import PassTask, Piece, Work, in_piece, in_tasks, pieces_of
from .staged import StagedMessages

RunPass = Callable[[Sequence[PassTask]], Iterable[TaskResult]]
"""Has the workers run the tasks of a pass, and returns their results in any order."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundMessages:
    """The messages of a round, and the clients that have sent them, in ascending client number.

    staged: the messages as the driver handles them. run_pass: has the workers read the rows. number: of the round, 0
    for the pass over all clients. clients: (S,). rows: (S,) of their messages. weights: (S,) their client weights.
    norms2: (S, V) the squared norms of the vectors, each by itself. byzantine: (S,) bool: which of them attack in this
    round. drawn: the number of clients in the round, with those that were dropped. forged_row, extra_row: see
    `StagePlan.further_rows`.
    """

    staged: StagedMessages
    run_pass: RunPass
    number: int
    clients: np.ndarray
    rows: np.ndarray
    weights: np.ndarray
    norms2: np.ndarray
    byzantine: np.ndarray
    drawn: int
    forged_row: int
    extra_row: int

    @staticmethod
    def of(
        clients: Mapping[str, np.ndarray], sampled: np.ndarray, weights: np.ndarray, byzantine: np.ndarray, **more: Any
    ) -> RoundMessages:
        """clients: what the workers told of those who have sent messages, `RoundTotals.clients`. sampled: (S,) all
        clients of the round, in ascending order, with their weights and whether they attack. more: the other fields."""
        order = np.argsort(clients["id"])
        rows = np.searchsorted(sampled, clients["id"][order])
        norms2 = clients["norms2"][order] if "norms2" in clients else np.zeros((len(order), 0))
        return RoundMessages(
            clients=sampled[rows],
            rows=rows,
            weights=weights[rows],
            norms2=norms2,
            byzantine=byzantine[rows],
            drawn=len(sampled),
            **more,
        )

    # --- what a rule or an attack is told of them ---------------------------------------------------------------------
    def norms2_of_rule(self) -> tuple[np.ndarray, np.ndarray]:
        """((S, V) the squared norms of the vectors of the rule, (S, V) bool: whether these, and those of what follows
        the vectors, are finite)."""
        return grouped(self.norms2, self.staged.single, self.staged.vectors)

    def about(self, vector: Vector, *purpose: Any) -> dict[str, Any]:
        """Arguments of `Messages` for one vector. purpose: of its random numbers, those of the rule by default."""
        key = counted.key(self.staged.plan.seed, *(purpose or ("aggregate", self.number)))
        return {"length": vector.length, "round": self.number, "key": key}

    @property
    def attackers(self) -> int:
        """B, the number of Byzantine clients that attack."""
        return int(self.byzantine.sum())

    @property
    def full_cohort(self) -> int:
        """The number of clients that a round should have."""
        return self.staged.plan.federation.cohort

    def faults(self, count: int, left_out: int) -> int:
        """f of the rule for so many messages. left_out: those that are not finite; the rule sees none of them, and f is
        lower by as many."""
        return max(0, self.staged.plan.faults(count, self.drawn, self.attackers) - left_out)

    # --- their rows ---------------------------------------------------------------------------------------------------
    def write(self, row: int, spans: Sequence[Span], values: Sequence[Tensor]) -> None:
        """Write a vector into a row. values: of each span."""
        assert self.staged.files is not None
        self.staged.files.write_spans(row, spans, values)

    def with_rows(self, who: np.ndarray, rows: np.ndarray, norms2: np.ndarray) -> RoundMessages:
        """The same with other messages of some clients. who: (S,) bool. rows: (B,) of these messages in the files.
        norms2: (B, V)."""
        all_rows, all_norms2 = self.rows.copy(), self.norms2.copy()
        all_rows[who], all_norms2[who] = rows, norms2
        return replace(self, rows=all_rows, norms2=all_norms2)

    def stored(
        self, vectors: Sequence[Vector], chosen: np.ndarray, norms2: np.ndarray, behind: Sequence[int], *,
        shown: int, has_gram: bool,
    ) -> list[StoredRows]:  # fmt: skip
        """Some of the messages for each of the vectors. chosen: (S, V) bool: which of them. norms2: (S, V). behind: the
        rows of further vectors, of which inner products show the first `shown`. has_gram: see `Stored`."""
        rows = [np.array([*self.rows[those], *behind], dtype=np.int64) for those in chosen.T]
        grams = cache(partial(self.grams, vectors, rows))
        return [
            StoredRows(
                norms2=norms2[those, number],
                has_gram=has_gram,
                messages=self,
                number=number,
                vector=vector,
                chosen=those,
                rows=rows[number],
                shown=int(those.sum()) + shown,
                grams=grams,
            )
            for number, (vector, those) in enumerate(zip(vectors, chosen.T, strict=True))
        ]

    # --- passes over the rows -----------------------------------------------------------------------------------------
    def tasks(self, what: str, work: Mapping[int, Work], pieces: Sequence[Piece], adds: bool = False) -> list[PassTask]:
        """The tasks of a pass. what: in words. work: number of a vector -> what is computed of its pieces."""
        parts = in_tasks([piece for piece in pieces if piece.vector in work])
        return [PassTask(index, what, part, work, self.number, adds) for index, part in enumerate(parts)]

    def results(
        self, what: str, work: Mapping[int, Work], pieces: Sequence[Piece]
    ) -> Iterator[tuple[int, Piece, np.ndarray]]:
        """What a pass computes of each piece, with the number of its task; those of a task in order, tasks in any."""
        tasks = self.tasks(what, work, pieces)
        for result in self.run_pass(tasks):
            for piece, part in zip(tasks[result.index].pieces, result.leaves or [], strict=True):
                yield result.index, piece, np.array(part)

    def in_order(self, what: str, work: Mapping[int, Work], pieces: Sequence[Piece]) -> list[tuple[Piece, np.ndarray]]:
        """The same in the order of the tasks."""
        found = sorted(self.results(what, work, pieces), key=lambda each: each[0])
        return [(piece, part) for _, piece, part in found]

    def answers(
        self, what: str, work: Mapping[int, Work], pieces: Sequence[Piece], flat: list[np.ndarray] | None
    ) -> np.ndarray:
        """Compute answers, in the form of `passes.compared`. Returns |F - mean|^2 and |mean|^2, (2,), of the vector
        that is compared. flat: the leaves into which the answers are written, or None."""
        apart: dict[int, np.ndarray] = {}
        for index, piece, part in self.results(what, work, pieces):
            if flat is not None:
                flat[piece.span.leaf][piece.span.begin : piece.span.end] = part[:-2]
            apart[index] = apart.get(index, np.zeros(2)) + part[-2:]
        return sum((apart[index] for index in sorted(apart)), np.zeros(2))

    def grams(self, vectors: Sequence[Vector], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each vector the inner products of its rows, (n, n), from the parts of the tasks, which are added in the
        order of a tree over the tasks."""
        work = {number: partial(passes.gram, rows=each) for number, each in enumerate(rows)}
        tasks = self.tasks("Gram matrix", work, pieces_of(vectors, False), adds=True)
        members = [[task.index for task in tasks if number in task.numbers] for number in range(len(vectors))]
        reducers = [TreeReducer[np.ndarray](TreeShape([1] * len(indices)), np.add) for indices in members]
        for result in self.run_pass(tasks):
            for number, part in zip(tasks[result.index].numbers, result.leaves or [], strict=True):
                reducers[number].put(TreeNode(0, members[number].index(result.index)), np.array(part))
        return [reducer.total() for reducer in reducers]


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredRows(Stored):
    """One vector of some messages of a round, as `Messages` reads it: a matrix (S, P) in rows of files.

    messages: of the round. number: of the vector among those that are read together. chosen: (S of the round,) bool:
    which of the messages these are. rows: (n,) in the files, of the messages and then of further vectors. shown: the
    number of those whose inner products are shown. grams: gives for each vector the inner products of its rows.
    sends: for messages that nobody has sent, each a sum of the rows: (S + E, n), the weights of the rows, with E extra
    vectors; inner_products: theirs. See `sending`.
    """

    messages: RoundMessages
    number: int
    vector: Vector
    chosen: np.ndarray
    rows: np.ndarray
    shown: int
    grams: Callable[[], list[np.ndarray]]
    sends: np.ndarray | None = None
    inner_products: np.ndarray | None = None

    @property
    def client_weights(self) -> np.ndarray:
        """(S,) the client weights that count for this vector."""
        weights = self.messages.weights[self.chosen]
        return weights if self.vector.weighted else np.ones(len(weights))

    @property
    def honest(self) -> np.ndarray:
        """(S,) bool: which of the messages are those of honest clients."""
        return ~self.messages.byzantine[self.chosen]

    def gram(self) -> np.ndarray:
        if self.inner_products is not None:
            return self.inner_products
        return self.grams()[self.number][: self.shown, : self.shown]

    def values(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        return np.concatenate(self._at("values", passes.values, places, matrix), axis=1)

    def signs(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        return np.sum(self._at("signs", passes.signs, places, matrix), axis=0)

    def _at(
        self, what: str, function: Callable[..., np.ndarray], places: np.ndarray, matrix: np.ndarray | None
    ) -> list[np.ndarray]:
        """What a pass gives for those pieces that have one of these coordinates, in order."""
        pieces = [piece for piece in pieces_of([self.vector], False) if len(in_piece(places, piece))]
        work = {0: partial(function, **self.combined(matrix), places=places)}
        return [part for _, part in self.messages.in_order(what, work, pieces)]

    def combined(self, matrix: np.ndarray | None) -> dict[str, np.ndarray | None]:
        """The rows, and their weights in combinations of the messages, None for the rows themselves. matrix: (S', S),
        the weights of the messages, or None."""
        count = len(self.norms2)
        if self.sends is None:
            return {"rows": self.rows[:count], "matrix": matrix}
        own = self.sends[:count]
        return {"rows": self.rows, "matrix": own if matrix is None else product(matrix, own)}

    def sending(self, sends: np.ndarray, count: int, has_gram: bool) -> StoredRows:
        """The same round as if other messages had been sent. sends: (S + E, n), for each message and each extra vector
        the weights of the rows. count: S."""
        gram = combined_gram(sends, self.grams()[self.number])
        norms2 = np.maximum(np.diagonal(gram)[:count], 0.0)
        return replace(self, sends=sends, inner_products=gram, norms2=norms2, has_gram=has_gram)

    def distance(self, answer: Answer, mean: np.ndarray) -> float:
        """How far an answer to `sending` is from the sum of the rows with the weights `mean`, (n,)."""
        assert self.sends is not None
        if answer.weights is None:
            x = answer.messages
            work = partial(passes.columns, **self.combined(x.matrix), f=x.f, scale=answer.scale, mean=mean)
            pieces = pieces_of([self.vector], False)
            return float(np.sqrt(self.messages.answers("columns", {0: work}, pieces, None)[0]))
        difference = product(self.sends.T, answer.stored_weights()) - mean
        gram = self.grams()[self.number]
        return float(np.sqrt(max(0.0, float(product(difference, product(gram, difference))))))
