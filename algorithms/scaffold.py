"""SCAFFOLD: control variates that cancel client drift.

Karimireddy et al., ICML 2020, arXiv:1910.06378, Algorithm 1, option II, or I as control = "server".

Choose it when clients differ and come back often enough for their control variates to be fresh. It costs twice the
traffic of FedAvg, and each client keeps a vector of the model's size.

    line 10   y   <- y - step(g(y) - c_i + c)          K times
    line 12   c_i <- mean of the K gradients g(y)
    line 17   x   <- x + server_lr * mean(y_K - x)
    line 17   c   <- c + |S|/N * mean(change of c_i)

Line 12 is printed as c_i - c + (x - y_K) / (K lr), which is this mean under plain SGD. Written as a mean it needs
neither K nor lr, and it keeps its meaning when the rule is Momentum or Adam, which the paper does not treat; the rule
then sees the corrected gradient. c is the plain mean of all c_i, whatever the federation's client weights are: the
correction rests on that. So the point where nothing moves is the one of the plain mean.

control = "last" keeps the last of the K gradients instead. This is the special case of FedMuon in Takezawa et al. 2025
with alpha = 1 and no lmo, and the same as the mean at K = 1. control = "server" is option I, where c_i is the gradient
of F_i at the server's x. Instead of an extra pass over the client's data it is the mean over the round's K batches of
their gradients at x, two gradients per step. With epochs as the local work these batches are all of the client's data.

Uncertain with momentum or Adam, as Takezawa et al. compare them: whether the rule's state starts anew every round
(carry = "reset", the default), and what c_i is. For momentum there are two more choices. With the weights a_k = (1 -
mu^(K-k)) / (1 - mu) the displacement is x - y_K = lr sum a_k (g_k - c_i + c). control = "normalised" is c_i - c + (x -
y_K) / (lr sum a_k) = sum a_k g_k / sum a_k. control = "literal" is line 12 as printed, which is wrong by a factor of up
to 1 / (1 - mu).

Departures:
- c_i is the mean of the round's gradients, which under plain SGD is what line 12 prints and under other rules is not.
- Option I takes the mean over the round's K batches of the gradients at x, where the paper takes an extra pass over the
  client's data.
- Momentum, Adam and other rules of the local steps are not in the paper; they see the corrected gradient.
- The displacement is weighed as the federation says, and c is a plain mean in any case; all of the paper's means are
  uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .contract import Oracle, Round
from .local import Carry, Estimator, LocalMethod, Rule, check_carry
from .parts.checks import one_of
from .parts.compression import Compressed, Compression, compressed
from .parts.groups import Number
from .parts.rules import Momentum, Sgd
from .parts.servers import Mean, Over
from .parts.warm_start import Start
from .tree import Tree


@dataclass(frozen=True)
class ControlVariates(Estimator):
    """The direction is g - c_i + c. c_i becomes the mean of the round's gradients, or the last one (`control`). Trace:
    the sum of the gradients so far, or the last one. Sent: the change of c_i. All are shaped like x."""

    control: Literal["mean", "last"] = "mean"
    start: Start = "zeros"

    def __post_init__(self) -> None:
        one_of("mean", "last", control=self.control)
        one_of("zeros", "gradient", start=self.start)

    def shared_init(self, x: Tree) -> Tree:
        return x.zeros()

    def own_init(self, x: Tree) -> Tree:
        return x.zeros()

    def begin(self, x: Tree, c: Tree, c_i: Tree) -> Tree:
        return x.zeros()

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Tree) -> tuple[Tree, Tree]:
        g = oracle(y)
        return g - c_i + c, trace + g if self.control == "mean" else g

    def constant_shift(self, c: Tree, c_i: Tree) -> Tree | None:
        return c - c_i if self.control == "mean" else None

    def finish(self, c: Tree, c_i: Tree, trace: Tree, steps: Tensor, delta: Tree) -> tuple[Tree, Tree]:
        new = trace / steps if self.control == "mean" else trace
        return new, new - c_i

    def update(self, c: Tree, sent: Tree, delta: Tree, round: Round) -> Tree:
        return c.add(sent, round.share)


class AtServer(NamedTuple):
    x: Tree
    total: Tree  # of the gradients at x


@dataclass(frozen=True)
class ServerControl(ControlVariates):
    """Option I: c_i becomes the mean of the gradients at the server's model x. Trace: x and the sum of these
    gradients."""

    def begin(self, x: Tree, c: Tree, c_i: Tree) -> Any:
        return AtServer(x, x.zeros())

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Any) -> tuple[Tree, Any]:
        return oracle(y) - c_i + c, AtServer(trace.x, trace.total + oracle(trace.x))

    def finish(self, c: Tree, c_i: Tree, trace: Any, steps: Tensor, delta: Tree) -> tuple[Tree, Tree]:
        new = trace.total / steps
        return new, new - c_i


class MomentumSums(NamedTuple):
    """What momentum makes of the gradients: after K steps x - y_K = lr sum a_k (g_k - c_i + c)."""

    u: Tree  # momentum of the gradients so far
    total: Tree  # sum of a_k g_k
    w: Tensor  # (), momentum of ones
    weight: Tensor  # (), sum of a_k


@dataclass(frozen=True)
class DisplacementControl(ControlVariates):
    """c_i from the displacement x - y_K of a rule with momentum, computed from the gradients. `literal`: divided by K,
    as line 12 is printed, and not by the sum of the weights a_k."""

    momentum: Momentum = Momentum(mu=0.0)
    literal: bool = False

    def begin(self, x: Tree, c: Tree, c_i: Tree) -> Any:
        zero = x.flat.new_zeros(())
        return MomentumSums(x.zeros(), x.zeros(), zero, zero)

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Any) -> tuple[Tree, Any]:
        g, mu = oracle(y), self.momentum.mu
        u, w = g.add(trace.u, mu), 1 + mu * trace.w
        along, one = (g.add(u, mu), 1 + mu * w) if self.momentum.nesterov else (u, w)
        return g - c_i + c, MomentumSums(u, trace.total + along, w, trace.weight + one)

    def finish(self, c: Tree, c_i: Tree, trace: Any, steps: Tensor, delta: Tree) -> tuple[Tree, Tree]:
        if self.literal:
            new = trace.total / steps + (c_i - c) * (1 - trace.weight / steps)
        else:
            new = trace.total / trace.weight
        return new, new - c_i


Control = Literal["mean", "last", "server", "normalised", "literal"]


def estimator(control: Control, start: Start, rule: Rule, carry: str) -> ControlVariates:
    """The estimator for a choice of c_i; ValueError where the rule or its carry does not go with it."""
    one_of("mean", "last", "server", "normalised", "literal", control=control)
    if control == "server":
        return ServerControl(start=start)
    if control == "mean" or control == "last":
        return ControlVariates(control, start)
    if not isinstance(rule, Sgd | Momentum) or carry != "reset":
        raise ValueError(
            f"control={control} needs the rule sgd or momentum and carry=reset, got rule={rule}, carry={carry}; "
            "choose control=mean"
        )
    momentum = rule if isinstance(rule, Momentum) else Momentum(mu=0.0)
    return DisplacementControl(start=start, momentum=momentum, literal=control == "literal")


def scaffold(
    rule: Rule = Sgd(0.1),
    server_lr: Number = 1.0,
    control: Control = "mean",
    start: Start = "zeros",
    over: Over = "cohort",
    carry: Carry = "reset",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser, which steps along the corrected gradient; server_lr: step size along the mean
    displacement; control: c_i is the mean of the round's gradients (mean), the last one (last), the gradient at the
    server's model (server), or follows from the displacement under momentum (normalised, literal); start: c_i = 0
    (zeros), or one pass over all clients for c_i = gradient at x0 (gradient); over: see `fedavg`; carry: see `fedavg`;
    compression: one whose variables stay the same over rounds, as `factors`."""
    check_carry(rule, carry)
    return compressed(
        LocalMethod(rule, estimator(control, start, rule, carry), Mean(server_lr, over), carry), compression
    )
