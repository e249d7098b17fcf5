"""FESS-GDA: LocalSGDA with a smoothed server step, which pulls the primal to a centre that follows it.

Shen, Huang, Zhang, Shen, AISTATS 2024 ("Stochastic smoothed gradient descent ascent for federated minimax
optimization"), arXiv:2311.00944.

Choose it for min-max problems on which LocalSGDA oscillates: the server pulls the primal towards a centre that follows
it. Clients and traffic are those of LocalSGDA; `rho` and `beta` are to be tuned.

    clients as in LocalSGDA
    x <- x + server_lr_x mean(x_i - x) - lr_x server_lr_x K rho (x - z)
    y <- y + server_lr_y mean(y_i - y)
    z <- z + beta (x - z)                              at the new x

The server alone takes the pull, which is scaled to equal K local steps; K is federation.local.steps. The paper writes p
for rho. In theory rho is 2 L, and 0 for objectives that are PL on both sides; the values of the experiments were not
found. rho = 0 is LocalSGDA. beta near 1 hardly smooths, as z is then nearly x.

Departures:
- The dual is not projected.
- rho = 0.1 and beta = 0.5 are defaults of ours.
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .contract import Deferred, Round, RunContext
from .fedavg import Plain
from .local import LocalMethod, ServerRule
from .parts.checks import nonnegative, positive, positive_fraction, refuse
from .parts.groups import Number, PerGroup, both
from .parts.rules import Sgd
from .tree import Tree


@dataclass(frozen=True)
class Smoothed(ServerRule):
    """x <- x + lr delta - pull (x - z), where the pull acts on the primal alone; z <- z + beta (x - z). State: z."""

    lr: Number = 1.0
    pull: float = 0.1
    beta: float = 0.5

    def __post_init__(self) -> None:
        positive(server_lr=self.lr)
        nonnegative(pull=self.pull)
        positive_fraction(beta=self.beta)

    def init(self, x: Tree) -> Tree:
        return x

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Tree, round: Round) -> tuple[Tree, Tree]:
        new = x.add(delta, self.lr)
        if self.pull:
            new = new.add(x - state, PerGroup(-self.pull, 0.0))
        return new, state.lerp(new, self.beta)

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Tree, round: Round) -> Tensor | float:
        return super().rate(x, delta, norm2, state, round) if isinstance(self.lr, PerGroup) else self.lr


@dataclass(frozen=True)
class FessGda(Deferred):
    """The method, whose pull follows from the number of local steps."""

    lr: Number
    server_lr: Number
    rho: float
    beta: float

    def __post_init__(self) -> None:
        nonnegative(rho=self.rho)
        self._method(0)

    def build(self, context: RunContext) -> LocalMethod:
        if context.steps is None and self.rho:
            raise ValueError(f"rho > 0 needs federation.local.steps, got epochs, rho={self.rho}; give steps")
        return self._method(context.steps or 0)

    def _method(self, steps: int) -> LocalMethod:
        pull = both(self.lr)[0] * both(self.server_lr)[0] * steps * self.rho
        return LocalMethod(Sgd(self.lr), Plain(), Smoothed(self.server_lr, pull, self.beta))


def fess_gda(lr: Number = 0.1, server_lr: Number = 1.0, rho: float = 0.1, beta: float | None = None) -> FessGda:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; server_lr: step size along the mean
    displacement, or one for each group; rho: weight of the smoothing, 0 is LocalSGDA; beta: the fraction of the way to
    x that the centre moves in a round, 0.5 unless given."""
    if rho == 0:
        refuse({"beta": beta}, "rho=0 has no centre", "leave it out, or give rho")
    return FessGda(lr, server_lr, rho, 0.5 if beta is None else beta)
