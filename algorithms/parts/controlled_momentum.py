"""The momentum with control variates that Fed-NSGDA-M, FedMuon-DA and FedSGDA-Clip share.

Zhang, Gao 2025 ("Federated Stochastic Minimax Optimization under Heavy-Tailed Noises"), arXiv:2511.04456, Algorithms 1
and 2. With g a descent direction on both groups (the workload reverses the sign of the dual's gradient):

    each step      u_k <- beta (g - h_i + h) + (1 - beta) u;   y <- step(y, u_k)
    after K        h_i <- mean of the K gradients g
    server         h   <- h + |S|/N mean(change of h_i)
                   u   <- beta h + (1 - beta) u
                   x   <- x + gamma / (lr K) mean(y_K - x)

u and h do not change during a round. Clients form u_k = beta (g - h_i) + c with c = beta h + (1 - beta) u, so that only
x and c are sent down, two trees and not three. beta weighs the NEW gradient. The first u, h and h_i are zero, which the
paper leaves open.

Where steps are normalised, lr cancels from the server's step: gamma is the effective step size, and lr says only how
far apart the points are at which gradients are taken. gamma = lr K, the default, gives the plain mean. With unequal
numbers of local steps each client's displacement is divided by its own K. Means are uniform, whatever the federation's
client weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from ..local import Rule
from ..tree import Tree
from .checks import positive, positive_fraction
from .groups import Number, both


class Shared(NamedTuple):
    x: Tree


class Broadcast(NamedTuple):
    x: Tree
    c: Tree  # beta h + (1 - beta) u, with this round's beta


class PrivateState(NamedTuple):
    """What only the server has."""

    h: Tree  # mean of h_i over all clients
    u: Tree  # the momentum


class LocalState(NamedTuple):
    y: Tree
    rule: Any  # the rule's state
    total: Tree  # sum of the gradients
    steps: Tensor  # (), local steps taken


@dataclass(frozen=True)
class ControlledMomentum(Algorithm):
    """`rule`: the local step along u_k, whose state starts anew every round; `ratio`: gamma / lr, None for the plain
    mean; `gamma`: for the record. A client keeps h_i and sends its change."""

    rule: Rule
    beta: Number = 0.9
    ratio: Number | None = None
    gamma: Number | None = None
    weighted = False

    def __post_init__(self) -> None:
        positive_fraction(beta=self.beta)

    def server_init(self, x: Tree) -> Server:
        return Server(Shared(x), PrivateState(x.zeros(), x.zeros()))

    def broadcast(self, server: Server) -> Broadcast:
        kept: PrivateState = server.private
        return Broadcast(server.public.x, kept.u.lerp(kept.h, self.beta))

    def client_init(self, public: Public) -> Client:
        return public.x.zeros()

    def client_begin(self, public: Public, client: Client) -> Local:
        x = public.x
        return LocalState(x, self.rule.init(x), x.zeros(), x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        g = oracle(local.y)
        y, rule = self.rule.step(local.y, public.c.add(g - client, self.beta), local.rule)
        return LocalState(y, rule, local.total + g, local.steps + 1)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        moved, h = local.y - public.x, local.total / local.steps
        delta = moved if self.ratio is None else moved / local.steps
        return Message(delta, h - client, {"norm2": moved.norm2()}), h

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        h = server.private.h.add(mean.sent, round.share)
        u = server.private.u.lerp(h, self.beta)
        x = server.public.x.add(mean.delta, 1.0 if self.ratio is None else self.ratio)
        return Server(Shared(x), PrivateState(h, u))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: gamma; lr_dual: that of the dual group, where it is another one. No columns where gamma is not given."""
        if self.gamma is None:
            return {}
        primal, dual = both(self.gamma)
        return {"lr": primal} if primal == dual else {"lr": primal, "lr_dual": dual}

    def model(self, server: Server) -> Tree:
        return server.public.x


def controlled_momentum(rule: Rule, lr: Number, gamma: Number | None, beta: Number) -> ControlledMomentum:
    """The method of a rule. `lr`: the rule's step size; `gamma`: the server's, lr K where it is None."""
    if gamma is None:
        return ControlledMomentum(rule, beta)
    positive(gamma=gamma)
    return ControlledMomentum(rule, beta, gamma / lr, gamma)
