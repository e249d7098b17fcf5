"""FedDuA: a server step that adapts both its metric and its length, for FedDuAdagrad and FedDuAdam.

Takakura, Liew, Hasegawa 2025, arXiv:2505.11126, Algorithm 1.

    s, v, m <- the method's averages of delta^2, of delta and of A / 2,  A = mean |y_K - x|^2,  delta = mean(y_K - x)
    G <- sqrt(s) + epsilon
    x <- x + m / (sum v^2 / G + epsilon_g) v / G

With G = 1 these are FedExP without its floor, and FedExP-M. epsilon_g has the unit of |delta|. The means have the
federation's client weights, A as well as delta; under a compression both are of the messages as they were decoded. 0 /
0 counts as 0, and there is no step where sum v^2 / G = 0.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..contract import Round
from ..local import ServerRule
from ..tree import Tree
from .checks import nonnegative
from .servers import quotient, ratio


class Averages(NamedTuple):
    s: Tree
    v: Tree
    m: Tensor  # ()


@dataclass(frozen=True)
class DoublyAdaptive(ServerRule):
    """`epsilon`: added to the root of s; `epsilon_g`: added to the denominator of the step."""

    epsilon: float = 1e-9
    epsilon_g: float = 0.0

    uses_norm2 = True

    def __post_init__(self) -> None:
        nonnegative(epsilon=self.epsilon, epsilon_g=self.epsilon_g)

    def metric(self, s: Tree) -> Tree:
        """G, a diagonal matrix."""
        return Tree(s.flat.sqrt() + self.epsilon, s.layout)

    def preconditioned(self, s: Tree, v: Tree, m: Tensor) -> tuple[Tree, Tensor]:
        """(v / G, eta_g)."""
        scaled = quotient(v, self.metric(s))
        below = v.dot(scaled)
        return scaled, ratio(m * (below > 0), below + self.epsilon_g)

    @abstractmethod
    def averages(self, delta: Tree, norm2: Tensor, state: Any) -> Averages:
        """The next s, and the v and m of this step."""

    @abstractmethod
    def kept(self, averages: Averages) -> Any:
        """The next state."""

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        averages = self.averages(delta, norm2, state)
        scaled, rate = self.preconditioned(*averages)
        return x + scaled * rate, self.kept(averages)

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor:
        return self.preconditioned(*self.averages(delta, norm2, state))[1]
