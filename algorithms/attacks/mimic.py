"""Mimic: all Byzantine clients send the message of one honest client, so that it counts for more than it should.

Karimireddy, He, Jaggi, ICLR 2022, arXiv:2006.09365. With `warmup` the target is the client whose message has the
largest part along a direction z, along which messages vary most, and which is learned in the first rounds:

    round 1:          m = mean;  z = sum of <x_i - m, g> (x_i - m), g random;  z <- z / |z|
    rounds < warmup:  m <- (t m + mean) / (1 + t);  u = sum of <x_i - m, z> (x_i - m);  z <- (t z + u / |u|) / (1 + t)
    target:           argmax of <x_i, z>; from round `warmup` on it stays, unless it is not in the cohort
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..aggregation.messages import product
from . import draws
from .contract import CohortAttack, Columns, Plan, Seen


@dataclass(frozen=True, kw_only=True)
class Mimic(CohortAttack):
    """client: the position of the target among the honest clients of the round."""

    client: int = 0
    called: ClassVar[str] = "mimic"

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        return Plan((min(self.client, seen.count - 1),))

    def forge(self, x: Columns) -> np.ndarray:
        return x.rows[int(x.numbers[0])]


@dataclass(frozen=True, kw_only=True)
class MimicWithWarmUp(CohortAttack):
    """warmup: the round from which on the direction and the target stay. It remembers m and z."""

    warmup: int = 1

    pairwise: ClassVar[bool] = True
    directs: ClassVar[bool] = True
    remembers: ClassVar[int] = 2
    called: ClassVar[str] = "mimic"

    def init(self) -> tuple[Tensor, ...]:
        """(the rounds seen, the target)."""
        return torch.zeros((), dtype=torch.int64), torch.full((), -1, dtype=torch.int64)

    def direction(self, x: Columns) -> np.ndarray:
        """g, which only the first round needs."""
        return draws.normal(x.key, x.length, x.begin, x.end).numpy()

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        """The rows of the Gram matrix are the known messages, m, z and g."""
        gram = seen.gram(extra=True)
        t, target = int(state[0]) + 1, int(state[1])
        unit = np.eye(len(gram))
        middle, z, g = unit[seen.count], unit[seen.count + 1], unit[seen.count + 2]
        if t == 1:
            middle = seen.mean
            z = self._scaled(seen, self._outer(seen, middle, g))
        elif t < self.warmup:
            middle = (t * middle + seen.mean) / (1 + t)
            u = self._scaled(seen, self._outer(seen, middle, z))
            z = self._scaled(seen, (t * z + u) / (1 + t))
        found = np.flatnonzero(seen.clients == target)
        if t == 1 or t < self.warmup or not len(found):
            place = int(np.argmax(product(gram, z)[: seen.count]))
        else:
            place = int(found[0])
        target = int(seen.clients[place]) if t <= max(1, self.warmup - 1) else target
        kept = (torch.tensor(t), torch.tensor(target))
        return Plan((place,), remember=(middle, z), state=kept, columns={"target": float(seen.clients[place])})

    def forge(self, x: Columns) -> np.ndarray:
        return x.rows[int(x.numbers[0])]

    @staticmethod
    def _outer(seen: Seen, middle: np.ndarray, along: np.ndarray) -> np.ndarray:
        """The weights of sum of <x_i - m, v> (x_i - m). middle, along: the weights of m and v."""
        products = product(seen.gram(extra=True), along)
        parts = products[: seen.count] - float(product(middle, products))
        weights = -parts.sum() * middle
        weights[: seen.count] += parts
        return weights

    @staticmethod
    def _scaled(seen: Seen, weights: np.ndarray) -> np.ndarray:
        """The weights of the vector at length 1."""
        squared = float(product(weights, product(seen.gram(extra=True), weights)))
        return weights / np.sqrt(squared) if squared > 0 else weights


def mimic(
    client: int = 0,
    warmup: int | None = None,
    share: float | None = None,
    clients: tuple[int, ...] | None = None,
    knows: Literal["honest", "own"] = "honest",
    rounds: str | None = None,
) -> Mimic | MimicWithWarmUp:
    """All Byzantine clients send what one honest client sends. client: its position among those of the round. warmup:
    it is chosen along a direction that is learned until this round, instead."""
    if warmup is not None:
        return MimicWithWarmUp(warmup=warmup, share=share, clients=clients, knows=knows, rounds=rounds)
    return Mimic(client=client, share=share, clients=clients, knows=knows, rounds=rounds)
