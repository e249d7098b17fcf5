"""The driver's part of an attack that reads the messages of a round: it has the workers write the Byzantine rows.

The forged rows lie behind those of the cohort in the files, so that the clients' own messages stay: a task that runs
again gives the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms.aggregation.contract import Rows, product
from ...algorithms.attacks.contract import CohortAttack, Plan, Seen
from ...workloads import counted
from ..errors import MethodFailed
from ..user_code import plugin_errors
from .defence import Cohort, Decided, Defence, Passes, combined_gram, has_further_row, reads_gram
from .passes import Forged, RowsOf
from .planning import largest_cohort, number_of_faults
from .vectors import Vector

if TYPE_CHECKING:
    from .stage import Collected

Remembered = tuple[tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]], ...]


class Forgery:
    """The attack of one round."""

    def __init__(self, collected: Collected, attack: CohortAttack) -> None:
        self.collected, self.attack, self.runner = collected, attack, collected.runner
        self.cohort, self.round, self.vectors = collected.cohort, collected.round.number, collected.single
        self.passes = Passes(self.runner.run_pass, self.vectors, self.round)
        honest = ~self.cohort.byzantine
        self.known = np.flatnonzero(honest if attack.knows == "honest" and honest.any() else ~honest)
        self.byzantine = int(self.cohort.byzantine.sum())
        self.remembered = [self.runner.further + 1 + place for place in range(attack.remembers)]
        self.directed = [self.runner.further + 1 + attack.remembers] if attack.directs else []
        self.forged = largest_cohort(self.runner.run_spec) + np.arange(self.byzantine)

    def run(self) -> tuple[Cohort, Remembered, dict[str, float]]:
        """(the cohort with the forged rows, the state of the attack, columns for the record)."""
        state = self.collected.state.attack
        self._write_remembered(state)
        if self.attack.directs:
            first = [not any(bool(span.any()) for each in kept for span in each) for _, kept in state]
            forged = [Forged(Plan(), np.array(self.directed), self.key(n), first[n]) for n in range(len(self.vectors))]
            self._write("direction", forged)
        seen = self._seen()
        plans = []
        for number, each in enumerate(seen):
            with plugin_errors(f"round {self.round}: {self.attack.called} raised", MethodFailed):
                plans.append(self.attack.plan(each, state[number][0]))
        kept = self._remember(plans, state)
        norms2 = self._write("forged rows", [Forged(plan, self.forged, self.key(n)) for n, plan in enumerate(plans)])
        cohort = self.cohort
        rows, all_norms2 = cohort.rows.copy(), cohort.norms2.copy()
        several = max(len(each) for each in norms2)
        rows[cohort.byzantine] = self.forged if several > 1 else self.forged[0]
        all_norms2[cohort.byzantine] = np.stack([np.broadcast_to(each, self.byzantine) for each in norms2], axis=1)
        columns = {f"attack/{name}": value for name, value in plans[0].columns.items()}
        return cohort._replace(rows=rows, norms2=all_norms2), kept, columns

    def key(self, number: int) -> Tensor:
        return counted.key(self.runner.seed, "attack", self.round, number)

    def _rows_of(self, number: int) -> RowsOf:
        """The known rows of one vector, without rows that are not finite."""
        rows = self.known
        sound = np.isfinite(self.cohort.norms2[rows, number])
        return RowsOf(self.cohort.rows[rows[sound] if sound.any() else rows])

    def _write_remembered(self, state: Remembered) -> None:
        files = self.runner.files(self.collected.state_spec, self.round == 0)
        for vector, (_, kept) in zip(self.vectors, state, strict=True):
            for row, spans in zip(self.remembered, kept, strict=True):
                for span, values in zip(vector.spans, spans, strict=True):
                    files.write_span(row, span, values.numpy())

    def _write(self, what: str, forged: list[Forged]) -> list[np.ndarray]:
        """Run a pass that writes rows. Returns for each vector the squared norms of what was written."""
        of = [self._rows_of(number)._replace(forged=each) for number, each in enumerate(forged)]
        norms2: dict[int, np.ndarray] = {}
        for piece, part in self.passes.parts(self.passes.tasks(what, of)):
            norms2[piece.vector] = norms2[piece.vector] + part if piece.vector in norms2 else part
        return [norms2[number] for number in range(len(self.vectors))]

    # --- what the attacker sees ---------------------------------------------------------------------------------------
    def _seen(self) -> list[Seen]:
        attack, numbers = self.attack, range(len(self.vectors))
        of = [self._rows_of(number) for number in numbers]
        grams: dict[int, np.ndarray] = {}
        further = [self.runner.further] if attack.searches and has_further_row(self.runner.rule) else []
        if "gram" in attack.reads:
            rows = [np.array([*each.rows, *self.remembered, *self.directed, *further]) for each in of]
            grams = self.passes.grams([RowsOf(each) for each in rows])
        signs = self._signs_of_mean(of) if "signs" in attack.reads else {}
        found = []
        for number in numbers:
            gram = grams.get(number)
            places = np.searchsorted(self.cohort.rows, of[number].rows)
            error = Search(self, number, of[number].rows, gram).error if attack.searches and gram is not None else None
            known = gram if gram is None or not further else gram[:-1, :-1]
            found.append(
                Seen(
                    len(places), self.byzantine, self.vectors[number].length, self.round, self.cohort.clients[places],
                    self.key(number), self.cohort.norms2[places, number], known, signs.get(number), error,
                )
            )  # fmt: skip
        return found

    def _signs_of_mean(self, of: list[RowsOf]) -> dict[int, np.ndarray]:
        """number of a vector -> (3,) how many coordinates of the mean are positive, zero, negative."""
        everywhere = [
            each._replace(matrix=np.full((1, len(each.rows)), 1 / len(each.rows)), places=np.arange(vector.length))
            for each, vector in zip(of, self.vectors, strict=True)
        ]
        return {number: np.sum(parts, axis=0)[0] for number, parts in self.passes.places("signs", everywhere).items()}

    # --- what it remembers ------------------------------------------------------------------------------------------
    def _remember(self, plans: list[Plan], state: Remembered) -> Remembered:
        if not self.attack.remembers:
            return tuple((plan.state, ()) for plan in plans)
        kept = []
        for place in range(self.attack.remembers):
            of = []
            for number, plan in enumerate(plans):
                rows = np.array([*self._rows_of(number).rows, *self.remembered, *self.directed])
                of.append(RowsOf(rows, plan.remember[place]))
            leaves = 1 + max(span.leaf for vector in self.vectors for span in vector.spans)
            flat = [np.zeros(self._end(leaf)) for leaf in range(leaves)]
            self.passes.answers("weighted sum", of, flat)
            kept.append(flat)
        found = []
        for number, (plan, vector) in enumerate(zip(plans, self.vectors, strict=True)):
            like = state[number][1]
            vectors = tuple(
                tuple(
                    torch.from_numpy(flat[span.leaf][span.begin : span.end].copy()).to(old.dtype)
                    for span, old in zip(vector.spans, spans, strict=True)
                )
                for flat, spans in zip(kept, like, strict=True)
            )
            found.append((plan.state, vectors))
        return tuple(found)

    def _end(self, leaf: int) -> int:
        """The number of entries of a leaf."""
        spans = [span for vector in self.vectors for span in (*vector.spans, *vector.statistics)]
        return max(span.end for span in spans if span.leaf == leaf)


class Search:
    """What an attacker that searches against the rule may evaluate: the distance by which the rule's answer moves."""

    def __init__(self, forgery: Forgery, number: int, rows: np.ndarray, gram: np.ndarray) -> None:
        """number: of the vector. rows: the known rows in the files. gram: see `Seen`, and the further row of the rule
        behind it."""
        self.forgery, self.number, self.gram = forgery, number, gram
        collected = forgery.collected
        self.runner = collected.runner
        self.defence = Defence(self.runner, forgery.passes, collected.state, forgery.cohort.drawn)
        self.rule = self.defence.rule
        self.further = [self.runner.further] if has_further_row(self.rule) else []
        self.rows = np.array([*rows, *forgery.remembered, *forgery.directed, *self.further])
        cohort = forgery.cohort
        byzantine = np.flatnonzero(cohort.byzantine)
        known = np.searchsorted(cohort.rows, rows)
        honest = not cohort.byzantine[known].any()
        everyone = np.concatenate([known, byzantine])
        order = np.argsort(everyone, kind="stable") if honest else np.arange(len(everyone))
        self.sender = (
            order >= len(known),
            np.where(order < len(known), order, 0),
        )  # (whether it is forged, else which)
        self.weights = cohort.weights[everyone[order]]
        self.count = len(known)
        self.broken = len(cohort.clients) - len(everyone) if honest else 0  # messages that the rule will leave out

    def error(self, sent: np.ndarray) -> float:
        """|F - mean of the known rows| if every Byzantine client sends the sum with these weights of the rows that the
        attacker knows of."""
        forged, which = self.sender
        size = len(self.gram)
        matrix = np.zeros((len(forged) + len(self.further), size))
        matrix[np.flatnonzero(~forged), which[~forged]] = 1.0
        matrix[np.flatnonzero(forged), : len(sent)] = sent
        if self.further:
            matrix[-1, -1] = 1.0
        mean = np.zeros(size)
        mean[: self.count] = 1.0 / self.count
        gram = combined_gram(matrix, self.gram)
        rows = self._rows(gram)
        mixed = self.defence.mix(rows if reads_gram(self.rule) else rows._replace(gram=None))
        messages = matrix[: len(forged)]
        whole = messages if mixed.matrix is None else product(mixed.matrix, messages)
        mixed = self.defence.look({self.number: mixed}, {self.number: RowsOf(self.rows, matrix=whole)})[self.number]
        decided = self.defence.decide(self.number, mixed)
        if self.rule.by == "weights":
            weights = decided.weights()
            difference = product(matrix.T, weights) - mean
            return float(np.sqrt(max(0.0, float(product(difference, product(self.gram, difference))))))
        return self._by_columns(decided, messages, mean)

    def _rows(self, gram: np.ndarray) -> Rows:
        vector: Vector = self.forgery.vectors[self.number]
        count = len(self.sender[0])
        of = (count + self.broken, self.forgery.cohort.drawn, self.forgery.byzantine)
        f = max(0, number_of_faults(self.runner.run_spec, *of) - self.broken)
        norms2 = np.maximum(np.diagonal(gram)[:count], 0.0)
        return self.runner.rows(vector, self.weights, f, norms2, self.forgery.round, gram)

    def _by_columns(self, decided: Decided, messages: np.ndarray, mean: np.ndarray) -> float:
        """The same for a rule by columns: one pass over the rows."""
        chosen = decided.combination(len(messages))
        matrix = messages if chosen is None else product(chosen, messages)
        of: list[Any] = [None] * len(self.forgery.vectors)
        of[self.number] = RowsOf(self.rows, None, matrix, decided.f, decided.decision.scale, mean)
        return float(np.sqrt(self.forgery.passes.answers("columns", of, None)[self.number][0]))
