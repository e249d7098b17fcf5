"""The messages of one round that the workers have written to rows of files, and what the stage keeps between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...algorithms.aggregation.contract import Vectors
from ...algorithms.contract import Message
from ...workloads import counted
from ..reduction.round_totals import RoundTotals
from ..run_spec import RunSpec
from .message_rows import MessageRows
from .passes import Passes, RunPass
from .planning import extra_row, number_of_faults
from .vectors import Vector, vectors_of

Spans = tuple[Tensor, ...]
"""The numbers of a vector, a tensor for each of its spans."""


class StageState(NamedTuple):
    """What the parts of the stage keep from round to round.

    rule: the state of the rule for each vector. last: for each vector the answer of the round before; () if the rule
    does not look at it. attack: for each vector the attack's numbers and the vectors that it remembers. noise: the
    state of the noise.
    """

    rule: tuple[Any, ...] = ()
    last: tuple[Spans, ...] = ()
    attack: tuple[tuple[Spans, tuple[Spans, ...]], ...] = ()
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


@dataclass(frozen=True)
class Collected:
    """The messages of one round, in rows of files.

    run_pass: has the workers read them. files: these, as the driver writes them. sample: a message, for its structure.
    round: the number of the round, 0 for the pass over all clients.
    """

    run_spec: RunSpec
    run_pass: RunPass
    files: MessageRows
    sample: Message
    round: int
    cohort: Cohort

    def vectors(self, how: Vectors) -> list[Vector]:
        """The vectors of a message. A rule says on which it acts; an attack acts on each by itself."""
        return vectors_of(self.sample, how, len(self.run_spec.buffers))

    @property
    def extra_row(self) -> int:
        """The row of the extra vector of a rule, behind which those of the attack follow."""
        return extra_row(self.run_spec)

    def passes(self, vectors: Sequence[Vector], rows: Sequence[np.ndarray]) -> Passes:
        """Some rows for each of these vectors."""
        return Passes(self.run_pass, vectors, rows, self.round)

    def about(self, vector: Vector, *purpose: Any) -> dict[str, Any]:
        """Arguments of `Messages` for one vector. purpose: of its random numbers, those of the rule by default."""
        key = counted.key(self.run_spec.experiment.seed, *(purpose or ("aggregate", self.round)))
        return {"length": vector.length, "round": self.round, "key": key}

    @property
    def full_cohort(self) -> int:
        """The number of clients that a round should have."""
        return self.run_spec.experiment.federation.cohort

    def faults(self, rows: int, byzantine: int) -> int:
        """f of the rule for so many messages, `byzantine` of which are Byzantine."""
        return number_of_faults(self.run_spec, rows, self.cohort.drawn, byzantine)

    def with_rows(self, who: np.ndarray, rows: np.ndarray, norms2: np.ndarray) -> Collected:
        """The same with other messages of some clients. who: (S,) bool. rows: (B,) of these messages in the files.
        norms2: (B, V)."""
        cohort = self.cohort
        all_rows, all_norms2 = cohort.rows.copy(), cohort.norms2.copy()
        all_rows[who], all_norms2[who] = rows, norms2
        return replace(self, cohort=cohort._replace(rows=all_rows, norms2=all_norms2))
