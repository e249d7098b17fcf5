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

Theorems 1 and 2 give all sizes as functions of the clients N, here the cohort, of K, of the rounds T and of the
condition number kappa of the problem:

    lr = 1 / (K T^(1/2)),  beta = (N K / T)^(1/2),  gamma_x = (N K)^(1/4) / (kappa T^(3/4)),  gamma_y = 10 kappa gamma_x

with 1 for each constant that they leave open; the 10 is that of the proofs (Lemma A.5). kappa is the smoothness over
the constant of the Polyak-Lojasiewicz condition in the dual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..contract import Algorithm, Client, Deferred, Local, Message, Oracle, Public, Round, RunContext, Server
from ..local import Rule
from ..tree import Tree
from .checks import positive, positive_fraction, refuse
from .groups import Number, PerGroup, both


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


# --- sizes by theorems 1 and 2 ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SizedByTheorem(Deferred):
    """The method with the sizes of the theorems. `rule`: the local step of a step size; `condition`: kappa."""

    rule: Callable[[Number], Rule]
    condition: float

    def __post_init__(self) -> None:
        if not self.condition >= 1:
            raise ValueError(f"condition >= 1 must hold, got condition={self.condition}")

    def build(self, context: RunContext) -> ControlledMomentum:
        if context.steps is None:
            raise ValueError("parameter_free needs federation.local.steps, got epochs; give steps")
        together, rounds = context.cohort * context.steps, context.rounds
        if together > rounds:
            raise ValueError(
                f"parameter_free needs cohort * steps <= rounds, got cohort={context.cohort}, steps={context.steps}, "
                f"rounds={rounds}; raise rounds"
            )
        lr, beta = 1 / (context.steps * rounds**0.5), (together / rounds) ** 0.5
        gamma = together**0.25 / (self.condition * rounds**0.75)
        return controlled_momentum(self.rule(lr), lr, PerGroup(gamma, 10 * self.condition * gamma), beta)


def with_sizes(
    rule: Callable[[Number], Rule],
    lr: Number | None,
    gamma: Number | None,
    beta: Number | None,
    parameter_free: bool,
    condition: float | None,
) -> ControlledMomentum | SizedByTheorem:
    """The method with the sizes that are given, or with those of the theorems. lr is 0.01, beta 0.9 and condition 1
    where they are None."""
    if parameter_free:
        given = {"lr": lr, "gamma": gamma, "beta": beta}
        refuse(given, "parameter_free=true sets it from the run's sizes", "leave it out, or parameter_free")
        return SizedByTheorem(rule, 1.0 if condition is None else condition)
    refuse({"condition": condition}, "only parameter_free=true reads it", "leave it out, or set parameter_free")
    lr = 0.01 if lr is None else lr
    return controlled_momentum(rule(lr), lr, gamma, 0.9 if beta is None else beta)
