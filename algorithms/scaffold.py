"""SCAFFOLD: control variates that cancel client drift.

Karimireddy et al., ICML 2020, arXiv:1910.06378, Algorithm 1, option II, or I as control = "server".

    line 10   y   <- y - step(g(y) - c_i + c)
    line 12   c_i <- mean of the K gradients g(y)
    line 17   x   <- x + server_lr * mean(y_K - x)
    line 17   c   <- c + |S|/N * mean(change of c_i)

Departures. Line 12 is printed as c_i - c + (x - y_K) / (K lr), which is this mean under plain SGD. Written as a mean it
needs neither K nor lr and keeps its sense when the rule is Momentum or Adam (which the paper does not treat; the
corrected gradient is what the rule sees). control = "last" keeps the last of the K gradients instead: the special case
of FedMuon in Takezawa et al. 2025 with alpha = 1 and no lmo; equal at K = 1. control = "server" is option I, c_i is the
gradient of F_i at the server's x; in place of an extra pass over the client's data it is the mean over the round's K
batches of their gradients at x, two gradients a step. With epochs as the local work these batches are all of its data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .contract import Oracle, Round
from .groups import Number
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
            raise ValueError(f"control must be mean or last, or server for option I, got {self.control!r}")
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


class AtServer(NamedTuple):
    x: Tree
    total: Tree  # of the gradients at x


@dataclass(frozen=True)
class ServerControl(ControlVariates):
    """Option I. Trace: x and the sum of the gradients at x; the rest as above."""

    def begin(self, x: Tree, c: Tree, c_i: Tree) -> Any:
        return AtServer(x, x.zeros())

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Any) -> tuple[Tree, Any]:
        return oracle(y) - c_i + c, AtServer(trace.x, trace.total + oracle(trace.x))

    def finish(self, c: Tree, c_i: Tree, trace: Any, steps: Tensor) -> tuple[Tree, Tree]:
        new = trace.total / steps
        return new, new - c_i


def scaffold(
    rule: Rule = Sgd(0.1),
    server_lr: Number = 1.0,
    control: Literal["mean", "last", "server"] = "mean",
    start: Literal["zeros", "gradient"] = "zeros",
    over: Literal["cohort", "all"] = "cohort",
) -> LocalMethod:
    """rule: the local optimiser of the corrected gradient; control: c_i is the mean of the round's gradients, or the
    last, or the gradient at the server's model; start: c_i = 0, or one pass over all clients for c_i = gradient at x0;
    over: see `Mean`."""
    estimator = ServerControl(start=start) if control == "server" else ControlVariates(control, start)
    return LocalMethod(rule, estimator, Mean(server_lr, over))
