"""Agnostic federated learning: a mean whose weights move towards the clients, or groups of clients, with large losses.

Mohri, Sivek, Suresh, ICML 2019, arXiv:1902.00146; by = "lambda": Deng, Kamani, Mahdavi, NeurIPS 2020 (DRFA),
arXiv:2102.12660.

    x      <- x + sum of q_i (y_K - x),  q_i = lambda_g n_i / n_g          g: the group of client i; n: examples
    lambda <- projection of lambda + gamma F_g(x) on {lambda >= floor, sum = 1}

F_g is the loss of the round's x on all rows of the group. With by = "lambda" S clients are drawn with probabilities
pi_i near S q_i, they weigh q_i / pi_i, and F_g is estimated from S other clients, drawn uniformly. DRFA takes the
losses at the model of a random local step; here it is x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .samplers import NOBODY, Ask, Draw, Feedback, Sampler, State, capped, systematic, uniform_draw

GROUPS = 20
"""Up to so many groups have a column of the record each."""


@dataclass(frozen=True)
class Agnostic(Sampler):
    """Clients weigh by lambda, which moves towards those with the largest losses.

    gamma: step size of lambda; floor: the least lambda of a group; groups: the number of each client's group, from 0,
    or the name of a training column, such as a domain, of which all rows of a client have one value: the groups are its
    values in their order; each client is a group unless given; first: lambda before round 1, in proportion to the
    groups' examples (`share`), or `uniform`; by: `all` clients take part in every round, or S of them are drawn in
    proportion to `lambda`.
    """

    has_probabilities: ClassVar[bool] = False
    sets_weights: ClassVar[bool] = True

    gamma: float = 0.01
    floor: float = 0.0
    groups: tuple[int, ...] | str | None = None
    first: Literal["share", "uniform"] = "share"
    by: Literal["all", "lambda"] = "all"

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError(f"gamma >= 0 must hold, got {self.gamma}; choose 0 or more")
        if self.by == "lambda" and not self.floor > 0:
            raise ValueError(f"floor > 0 must hold with by=lambda, got {self.floor}; choose 0.001")

    @property
    def grouped_by(self) -> str | None:
        return self.groups if isinstance(self.groups, str) else None

    def check(self, clients: int, cohort: int, weights: str) -> None:
        if self.by == "all" and cohort < clients:
            raise ValueError(f"by=all needs every client, got cohort {cohort} of {clients}; choose by: lambda")
        if weights != "uniform":
            raise ValueError(f"it sets the weights itself, got federation.weights={weights}; leave weights out")
        if isinstance(self.groups, str):
            return  # their number is known with the data
        groups = range(clients) if self.groups is None else self.groups
        if len(groups) != clients or set(groups) != set(range(max(groups, default=-1) + 1)):
            raise ValueError(
                f"groups must give each of {clients} clients a group, numbered from 0 without gaps, got "
                f"{len(groups)} numbers of {len(set(groups))} groups up to {max(groups, default=0)}; change them"
            )
        self.check_groups(len(set(groups)))

    def check_groups(self, count: int) -> None:
        if not 0 <= self.floor * count <= 1:
            raise ValueError(f"0 <= floor <= 1 / {count} groups must hold, got {self.floor}; lower it")

    def start(self, clients: int, cohort: int) -> State:
        """lambda follows from the groups and their numbers of examples, which the first draw knows."""
        return {"lambda": np.full(1, np.nan)}

    def draw(self, state: State, ask: Ask) -> Draw:
        given = ask.groups if isinstance(self.groups, str) else self.groups
        group = np.arange(ask.clients) if given is None else np.asarray(given)
        examples = np.bincount(group, ask.sizes)
        within = ask.sizes / examples[group]  # n_i / n_g
        weight = self._first(examples) if np.isnan(state["lambda"]).any() else state["lambda"]
        shares = weight[group] * within
        if self.by == "all":
            probed = clients = ask.candidates
            weights, divisor = ask.clients * shares, ask.clients
        else:
            pi = capped(shares[ask.candidates], ask.size)
            clients = systematic(ask, "agnostic", ask.candidates, pi)
            probed = uniform_draw(ask, "agnostic losses", ask.candidates, ask.size)
            weights, divisor = np.zeros(ask.clients), min(ask.size, len(ask.candidates))
            weights[ask.candidates] = divisor * shares[ask.candidates] / pi
        part = within[probed] * ask.probe(probed, None)
        losses = np.bincount(group[probed], part, len(weight)) * (ask.clients / len(probed))
        moved = onto_simplex(weight + self.gamma * losses, self.floor)
        columns = {"sampler/lambda_max": float(weight.max())}
        if len(weight) <= GROUPS:
            columns |= {f"sampler/lambda_{g}": value for g, value in enumerate(weight.tolist())}
        return Draw(clients, NOBODY, weights, float(divisor), columns, {"lambda": moved})

    def _first(self, examples: np.ndarray) -> np.ndarray:
        """(G,) lambda before round 1; examples: (G,) n_g."""
        return examples / examples.sum() if self.first == "share" else np.full(len(examples), 1 / len(examples))

    def told(self, state: State, ask: Ask, draw: Draw, feedback: Feedback) -> State:
        return dict(draw.note)


def onto_simplex(v: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """(G,) the nearest point to v with entries of at least `floor` that sum to 1."""
    above, mass = v - floor, 1 - floor * len(v)
    ordered = np.sort(above)[::-1]
    cut = (np.cumsum(ordered) - mass) / np.arange(1, len(v) + 1)  # what to subtract if only the largest remain
    return np.maximum(above - cut[np.flatnonzero(ordered > cut)[-1]], 0.0) + floor
