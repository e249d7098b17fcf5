"""SCAFFOLD: control variates that cancel client drift.

Karimireddy et al., ICML 2020, arXiv:1910.06378, Algorithm 1, option II.

    line 10   y   <- y - step(g(y) - c_i + c)
    line 12   c_i <- mean of the K gradients g(y)
    line 17   x   <- x + server_lr * mean(y_K - x)
    line 17   c   <- c + |S|/N * mean(change of c_i)

Departures. Line 12 is printed as c_i - c + (x - y_K) / (K lr), which is this mean under plain SGD. Written as a mean it
needs neither K nor lr and keeps its sense when the rule is Momentum or Adam (which the paper does not treat; the
corrected gradient is what the rule sees). control = "last" keeps the last of the K gradients instead: the special case
of FedMuon in Takezawa et al. 2025 with alpha = 1 and no lmo; equal at K = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .contract import Oracle, Round
from .local import Estimator, LocalMethod, Rule
from .rules import Sgd
from .servers import Mean
from .tree import Tree


@dataclass(frozen=True)
class ControlVariates(Estimator):
    """Shared: c. Own: c_i. Trace: the sum of the gradients met, or the last. Sent: the change of c_i. All like x."""

    control: Literal["mean", "last"] = "mean"
    start: Literal["zeros", "gradient"] = "zeros"

    def __post_init__(self) -> None:
        if self.control not in ("mean", "last"):
            raise ValueError(f"control must be mean or last, got {self.control!r}")
        if self.start not in ("zeros", "gradient"):
            raise ValueError(f"start must be zeros or gradient, got {self.start!r}")

    def shared_init(self, x: Tree) -> Tree:
        return x.zeros()

    def own_init(self, x: Tree) -> Tree:
        return x.zeros()

    def begin(self, x: Tree, c: Tree, c_i: Tree) -> Tree:
        return x.zeros()

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Tree) -> tuple[Tree, Tree]:
        g = oracle(y)
        return g - c_i + c, trace + g if self.control == "mean" else g

    def finish(self, c: Tree, c_i: Tree, trace: Tree, steps: Tensor) -> tuple[Tree, Tree]:
        new = trace / steps if self.control == "mean" else trace
        return new, new - c_i

    def update(self, c: Tree, sent: Tree, delta: Tree, round: Round) -> Tree:
        return c.add(sent, round.share)


def scaffold(
    rule: Rule = Sgd(0.1),
    server_lr: float = 1.0,
    control: Literal["mean", "last"] = "mean",
    start: Literal["zeros", "gradient"] = "zeros",
    over: Literal["cohort", "all"] = "cohort",
) -> LocalMethod:
    """rule: the local optimiser of the corrected gradient; control: c_i is the mean of the round's gradients, or the
    last; start: c_i = 0, or one pass over all clients for c_i = gradient at x0; over: see `Mean`."""
    return LocalMethod(rule, ControlVariates(control, start), Mean(server_lr, over))
