"""FedNova: clients may take unequal numbers of local steps, and the mean stays that of their objectives.

Wang et al., NeurIPS 2020, arXiv:2007.07481, equations 5 to 7.

Choose it when clients take unequal numbers of local steps, as with epochs over data of unequal size, and the mean must
not favour those that take more. The local rule must be linear in the gradients, as plain descent or momentum; Adam is
not.

    y <- x;  K_i times: y <- LocalOpt(y, g(y) + mu (y - x))          Delta_i = y - x
    x <- x + server_lr * tau * sum of p_i Delta_i / |a_i|_1,   tau = sum of p_i |a_i|_1   (p_i sum to 1)

With the mean of Delta_i a client that takes more steps weighs more, and the fixed point is that of another objective.
|a_i|_1 is how far a client moves along a gradient that is 1 everywhere, in units of its step size: K_i for plain
descent, and for any rule that is linear in the gradients what the rule itself does on the line. The engine knows K_i
beforehand and multiplies the weights of the mean by tau / |a_i|_1, so that clients send what those of FedAvg send.

Departures:
- The authors' recursion for momentum with a proximal term counts the term twice, and for Nesterov's momentum it takes
  that of plain momentum; here |a_i|_1 is what the rule does.
- With effective = "steps" tau is the mean of p_i K_i, which the authors' code takes where there is a proximal term.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch

from .contract import LocalNorms, Oracle
from .fedavg import Plain
from .fedprox import Prox
from .local import Estimator, LocalMethod, Rule
from .parts.checks import nonnegative, one_of, refuse
from .parts.rules import Sgd
from .parts.servers import Mean, Over
from .tree import Tree


class Along:
    """An oracle whose gradients are given, whatever the point is."""

    def __init__(self, gradient: Tree) -> None:
        self.gradient = gradient

    def __call__(self, y: Tree, /) -> Tree:
        return self.gradient


def path(rule: Rule, estimator: Estimator, gradients: list[Tree]) -> list[Tree]:
    """The iterates after each step from 0 along given gradients."""
    y = gradients[0].zeros()
    trace, state, found = estimator.begin(y, (), ()), rule.init(y), []
    for gradient in gradients:
        v, trace = estimator.estimate(cast(Oracle, Along(gradient)), y, (), (), trace)
        y, state = rule.step(y, v, state)
        found.append(y)
    return found


@lru_cache
def is_linear(rule: Rule) -> bool:
    """Whether a rule is linear in the gradients, tried on three steps of a model of one matrix and one vector."""
    source = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 2), "vector": (4,)}

    def draw() -> list[Tree]:
        return [
            Tree.of({name: torch.randn(*s, generator=source, dtype=torch.float64) for name, s in shapes.items()})
            for _ in range(3)
        ]

    one, other = draw(), draw()
    both = [a + b for a, b in zip(one, other, strict=True)]
    ends = [path(rule, Plain(), gradients)[-1].flat for gradients in (one, other, both)]
    return torch.allclose(ends[0] + ends[1], ends[2], rtol=1e-9, atol=0)


@lru_cache(16)
def norms(rule: Rule, mu: float, most: int) -> tuple[float, ...]:
    """(most,) |a|_1 after 1 … most steps, in units of the rule's step size `lr` where it has one."""
    ones = Tree.of({"x": torch.ones(1, dtype=torch.float64)})
    moved = path(rule, Prox(mu) if mu else Plain(), [ones] * most)
    lr = getattr(rule, "lr", 1.0)
    return tuple(-float(y.flat[0]) / lr for y in moved)


@dataclass(frozen=True)
class FedNova(LocalMethod):
    """Local steps whose displacements are weighted by how far they could have gone."""

    effective: Literal["norm", "steps"] = "norm"

    def local_norms(self, most: int) -> LocalNorms:
        mu = self.estimator.mu if isinstance(self.estimator, Prox) else 0.0
        found = norms(self.rule, mu, most)
        return LocalNorms(found, found if self.effective == "norm" else tuple(map(float, range(1, most + 1))))


def fednova(
    rule: Rule = Sgd(0.1),
    mu: float = 0.0,
    server_lr: float = 1.0,
    over: Over = "cohort",
    effective: Literal["norm", "steps"] | None = None,
) -> FedNova:
    """rule: the local optimiser, which must be linear in the gradients; mu: weight of a pull towards the server's
    model, as in `fedprox`; server_lr: step size along the mean displacement; over: see `fedavg`; effective: the length
    of the server's step in local steps, by the `norm` of what clients did, unless given, or by their numbers of
    `steps`; with plain descent these are the same."""
    nonnegative(mu=mu)
    if rule.plain_lr() is not None and not mu:
        refuse({"effective": effective}, "a step of plain descent counts as one", "leave it out, or choose momentum")
    effective = effective or "norm"
    one_of("norm", "steps", effective=effective)
    if not isinstance(getattr(rule, "lr", 1.0), float | int) or not is_linear(rule):
        raise ValueError(
            f"rule must be linear in the gradients, with one step size, got {type(rule).__name__.lower()}; choose sgd "
            "or momentum"
        )
    estimator: Any = Prox(mu) if mu else Plain()
    return FedNova(rule, estimator, Mean(server_lr, over), "reset", effective)
