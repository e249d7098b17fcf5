"""An attack that looks at the messages of a round: the workers write what the Byzantine clients send.

Its rows lie behind those of the cohort in the files, so that the clients' own messages stay: a task that runs again
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...algorithms.aggregation.contract import Aggregator
from ...algorithms.aggregation.messages import Answer, Messages, combined_gram, product
from ...algorithms.attacks.contract import CohortAttack, Plan, Seen
from ..errors import MethodFailed
from ..user_code import plugin_errors
from .collected import Collected, Spans, StageState
from .defence import answer_of, is_pairwise
from .passes import StoredRows, Work, columns, direction, forged, weighted
from .planning import largest_cohort
from .vectors import vector_leaves

Remembered = tuple[tuple[Spans, tuple[Spans, ...]], ...]


class Forgery:
    """The attack of one round, on each vector by itself.

    Behind the rows of the known messages lie the vectors that the attack remembers, its direction, and the extra vector
    of the rule if the attack searches against it.
    """

    def __init__(self, collected: Collected, attack: CohortAttack, rule: Aggregator, state: StageState) -> None:
        """rule: for a round of this size."""
        self.collected, self.attack, self.rule, self.state = collected, attack, rule, state
        self.cohort, self.round, self.vectors = collected.cohort, collected.round, collected.vectors("each")
        honest = ~self.cohort.byzantine
        known = np.flatnonzero(honest if attack.knows == "honest" and honest.any() else ~honest)
        self.known = [sound_of(known, norms2[known]) for norms2 in self.cohort.norms2.T]
        self.byzantine = int(self.cohort.byzantine.sum())
        first = collected.extra_row + 1
        self.remembered = [first + place for place in range(attack.remembers)]
        self.directed = [first + attack.remembers] if attack.directs else []
        extra = [collected.extra_row] if attack.searches and rule.extra else []
        behind = [*self.remembered, *self.directed, *extra]
        rows = [np.array([*self.cohort.rows[places], *behind], dtype=np.int64) for places in self.known]
        self.passes = collected.passes(self.vectors, rows)

    def run(self) -> tuple[Collected, Remembered, dict[str, float]]:
        """(the messages with those of the Byzantine clients, the state of the attack, columns for the record)."""
        state = self.state.attack
        self._write_remembered(state)
        if self.attack.directs:
            first = [not any(bool(span.any()) for each in kept for span in each) for _, kept in state]
            to = np.array(self.directed)
            work = {n: partial(direction, **self._forging(n), to=to, first=each) for n, each in enumerate(first)}
            self._write("direction", work)
        plans = []
        for number in range(len(self.vectors)):
            seen = self._seen(number)
            with plugin_errors(f"round {self.round}: {self.attack.called} raised", MethodFailed):
                plans.append(self.attack.plan(seen, state[number][0]))
        kept = self._remember(plans, state)
        to = largest_cohort(self.collected.run_spec) + np.arange(self.byzantine)
        work = {n: partial(forged, **self._forging(n), to=to, plan=plan) for n, plan in enumerate(plans)}
        norms2 = self._write("forged rows", work)
        several = max(len(each) for each in norms2) > 1
        all_norms2 = np.stack([np.broadcast_to(each, self.byzantine) for each in norms2], axis=1)
        changed = self.collected.with_rows(self.cohort.byzantine, to if several else to[:1], all_norms2)
        return changed, kept, {f"attack/{name}": value for name, value in plans[0].columns.items()}

    def _about(self, number: int) -> dict[str, Any]:
        return self.collected.about(self.vectors[number], "attack", self.round, number)

    def _forging(self, number: int) -> dict[str, Any]:
        """What `direction` and `forged` are told of one vector."""
        about, rows = self._about(number), self.passes.rows[number][: len(self.known[number])]
        return {"rows": rows, "length": about["length"], "key": about["key"]}

    def _write_remembered(self, state: Remembered) -> None:
        for vector, (_, kept) in zip(self.vectors, state, strict=True):
            for row, spans in zip(self.remembered, kept, strict=True):
                self.collected.files.write_spans(row, vector.spans, spans)

    def _write(self, what: str, work: Mapping[int, Work]) -> list[np.ndarray]:
        """Run a pass that writes rows. Returns for each vector the squared norms of what was written."""
        norms2: dict[int, np.ndarray] = {}
        for piece, part in self.passes.results(self.passes.tasks(what, work)):
            norms2[piece.vector] = norms2[piece.vector] + part if piece.vector in norms2 else part
        return [norms2[number] for number in range(len(self.vectors))]

    def _seen(self, number: int) -> Seen:
        """What the attacker sees of one vector."""
        places = self.known[number]
        norms2, extra = self.cohort.norms2[places, number], len(self.remembered) + len(self.directed)
        stored = StoredRows(norms2=norms2, passes=self.passes, number=number, extra=extra)
        error = self._error(number) if self.attack.searches else None
        more = {"byzantine": self.byzantine, "clients": self.cohort.clients[places], "error": error}
        return Seen(stored=stored, **self._about(number), weights=np.ones(len(places)), **more)

    # --- what it remembers ------------------------------------------------------------------------------------------
    def _remember(self, plans: list[Plan], state: Remembered) -> Remembered:
        kept = []
        for place in range(self.attack.remembers):
            work: dict[int, Work] = {}
            for number, plan in enumerate(plans):
                weights = plan.remember[place]
                work[number] = partial(weighted, rows=self.passes.rows[number][: len(weights)], weights=weights)
            flat = [np.zeros(leaf.numel()) for leaf in vector_leaves(self.collected.sample)]
            self.passes.answers("weighted sum", work, flat)
            kept.append(flat)
        found = []
        for number, (plan, vector) in enumerate(zip(plans, self.vectors, strict=True)):
            vectors = tuple(
                tuple(
                    torch.from_numpy(flat[span.leaf][span.begin : span.end].copy()).to(old.dtype)
                    for span, old in zip(vector.spans, spans, strict=True)
                )
                for flat, spans in zip(kept, state[number][1], strict=True)
            )
            found.append((plan.state, vectors))
        return tuple(found)

    # --- the search against the rule --------------------------------------------------------------------------------
    def _error(self, number: int) -> Callable[[np.ndarray], float]:
        """The function `Seen.error` for one vector."""
        known, cohort, rule = self.known[number], self.cohort, self.rule
        byzantine = np.flatnonzero(cohort.byzantine)
        everyone = np.concatenate([known, byzantine])
        honest = not cohort.byzantine[known].any()
        order = np.argsort(everyone, kind="stable") if honest else np.arange(len(everyone))
        forges, which = order >= len(known), order[order < len(known)]  # which of the known ones the others send
        broken = len(cohort.clients) - len(everyone) if honest else 0  # messages that the rule will leave out
        f = max(0, self.collected.faults(len(everyone) + broken, self.byzantine) - broken)
        weights = cohort.weights[everyone[order]] if self.vectors[number].weighted else np.ones(len(everyone))
        about, extra, size = self.collected.about(self.vectors[number]), bool(rule.extra), len(self.passes.rows[number])
        mean = np.zeros(size)
        mean[: len(known)] = 1.0 / len(known)

        def error(sent: np.ndarray) -> float:
            sends = np.zeros((len(everyone) + extra, size))
            sends[np.flatnonzero(~forges), which] = 1.0
            sends[np.flatnonzero(forges), : len(sent)] = sent
            if extra:
                sends[-1, -1] = 1.0
            gram = combined_gram(sends, self.passes.grams()[number])
            norms2 = np.maximum(np.diagonal(gram)[: len(everyone)], 0.0)
            more = {"sends": sends, "inner_products": gram, "compares": is_pairwise(rule)}
            most = rule.most_places(about["length"])
            stored = Imagined(norms2=norms2, passes=self.passes, number=number, most_places=most, **more)
            x = Messages(stored=stored, **about, weights=weights, f=f, state=self.state.rule[number])
            return stored.distance(answer_of(rule, x, self.collected.full_cohort), mean)

        return error


@dataclass(frozen=True, eq=False, kw_only=True)
class Imagined(StoredRows):
    """Messages that are combinations of the rows that an attacker knows, as if they had been sent. sends: (S + E, n),
    the weights of all rows. inner_products: (S + E, S + E). compares: whether the rule looks at them."""

    sends: np.ndarray
    inner_products: np.ndarray
    compares: bool

    @property
    def rows(self) -> np.ndarray:
        return self.passes.rows[self.number]

    @property
    def has_gram(self) -> bool:
        return self.compares

    def gram(self) -> np.ndarray:
        return self.inner_products

    def of_rows(self, matrix: np.ndarray | None) -> np.ndarray:
        """(S', n): the weights of the rows in combinations of the messages."""
        own = self.sends[: len(self.norms2)]
        return own if matrix is None else product(matrix, own)

    def distance(self, answer: Answer, mean: np.ndarray) -> float:
        """How far an answer is from the sum of the rows with the weights `mean`, (n,)."""
        if answer.weights is None:
            matrix, f, scale = self.of_rows(answer.messages.matrix), answer.messages.f, answer.scale
            work = partial(columns, rows=self.rows, matrix=matrix, f=f, scale=scale, mean=mean)
            return float(np.sqrt(self.passes.answers("columns", {self.number: work}, None)[self.number][0]))
        difference = product(self.sends.T, answer.stored_weights()) - mean
        gram = self.passes.grams()[self.number]
        return float(np.sqrt(max(0.0, float(product(difference, product(gram, difference))))))


def sound_of(places: np.ndarray, norms2: np.ndarray) -> np.ndarray:
    """Those of some messages whose squared norms are finite, or all of them if there is none."""
    sound = np.isfinite(norms2)
    return places[sound] if sound.any() else places
