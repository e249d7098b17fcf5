"""Tilted empirical risk minimisation with clients as groups: large, or small, losses count more.

Li, Beirami, Sanjabi, Smith, ICLR 2021, arXiv:2007.01162, as in the authors' federated code.

    x <- x + sum of p_i e_i (y_K - x) / sum of p_i e_i,   e_i = exp(tilt F_i(x))

F_i is the loss of the round's x on all rows of client i, and p_i the federation's weight of the client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .samplers import NOBODY, Ask, Draw, Sampler, State, uniform_draw


@dataclass(frozen=True)
class Tilted(Sampler):
    """The cohort is drawn uniformly without replacement, and clients weigh by their losses.

    tilt: above 0 for clients with large losses, below 0 against clients with bad data; 0 is the plain mean.
    """

    has_probabilities: ClassVar[bool] = False
    sets_weights: ClassVar[bool] = True

    tilt: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.tilt):
            raise ValueError(f"tilt must be finite, got {self.tilt}; choose a number such as 1")

    def draw(self, state: State, ask: Ask) -> Draw:
        clients = uniform_draw(ask, "cohort", ask.candidates, ask.size)
        weights = np.ones(ask.clients) if ask.target is None else ask.clients * ask.target
        if len(clients):
            exponents = self.tilt * ask.probe(clients, None)
            own = weights[clients] * np.exp(exponents - exponents.max())  # the same mean, without overflow
            weights[clients] = own / own.mean()  # a cohort counts for S clients, as with the federation's weights
        return Draw(clients, NOBODY, weights)
