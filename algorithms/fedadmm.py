"""FedADMM: clients keep a model and a dual variable, and send the change of their augmented model.

Gong, Li, Freris, ICDE 2022, arXiv:2204.03529; over = "all": Wang, Marella, Anderson 2022, arXiv:2203.15104.

Choose it when clients differ, do unequal amounts of local work and can keep two vectors of the model's size, a model
and a dual variable. The traffic is that of FedAvg, and `rho` is the number to tune.

    w   <- w_i;  K times: w <- w - step(g(w) + p_i + rho (w - x))
    p_i <- p_i + rho (w - x)
    u   = change of w_i + p_i / rho = (w - w_i) + (w - x);  w_i <- w
    x   <- x + server_lr * mean of u

w_i is the model before round 1 until client i takes part. With over = "all" and server_lr = 1, x is the mean of w_i +
p_i / rho over all clients.

The authors' code has neither of the paper's two: begin = "server" starts the local steps from x, and message = "twice"
sends 2 (w - x). Which of them its tables used is unknown. With the paper's start and the code's message the method
comes to rest elsewhere.

Uncertain: over = "all" is from memory of the paper that has it.

Departures:
- The paper lets clients solve their problems to an accuracy of their own; here they take K steps of any rule, and the
  fleet's local work gives clients unequal numbers of steps.
- The code's server_lr is 1, and 0.5 from round 60 on: give a schedule.
- The mean has the federation's client weights, uniform unless it says otherwise, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .contract import Algorithm, Client, Constant, Local, Message, Oracle, Public, Round, Server
from .local import Rule
from .parts.checks import one_of, positive
from .parts.rules import Sgd
from .parts.servers import Mean, Over
from .tree import Tree


class Shared(NamedTuple):
    x: Tree
    first: Constant  # the model before round 1, w_i of clients that have not taken part


class Own(NamedTuple):
    """What a client keeps."""

    w: Tree
    p: Tree


class LocalState(NamedTuple):
    w: Tree
    rule: Any  # the rule's state


@dataclass(frozen=True)
class FedAdmm(Algorithm):
    """The method on the contract. `rule`: the local step, whose state starts anew every round."""

    rule: Rule
    server: Mean
    rho: float = 0.01
    begin: Literal["own", "server"] = "own"
    message: Literal["augmented", "twice"] = "augmented"

    def __post_init__(self) -> None:
        positive(rho=self.rho)
        one_of("own", "server", begin=self.begin)
        one_of("augmented", "twice", message=self.message)

    def server_init(self, x: Tree) -> Server:
        return Server(Shared(x, Constant(x)))

    def client_init(self, public: Public) -> Client:
        return Own(public.first.value, public.x.zeros())

    def client_begin(self, public: Public, client: Client) -> Local:
        return LocalState(client.w if self.begin == "own" else public.x, self.rule.init(public.x))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        v = (oracle(local.w) + client.p).add(local.w - public.x, self.rho)
        return LocalState(*self.rule.step(local.w, v, local.rule))

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        moved = local.w - public.x
        u = (local.w - client.w) + moved if self.message == "augmented" else moved * 2.0
        return Message(u, (), {"norm2": moved.norm2()}), Own(local.w, client.p.add(moved, self.rho))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x, _ = self.server.step(server.public.x, mean.delta, torch.full((), torch.nan), (), round)
        return Server(server.public._replace(x=x))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: the step size along the mean of u."""
        return {"lr": self.server.rate(server.public.x, mean.delta, torch.full((), torch.nan), (), round)}

    def model(self, server: Server) -> Tree:
        return server.public.x


def fedadmm(
    rule: Rule = Sgd(0.1),
    rho: float = 0.01,
    server_lr: float = 1.0,
    over: Over = "cohort",
    begin: Literal["own", "server"] = "own",
    message: Literal["augmented", "twice"] = "augmented",
) -> FedAdmm:
    """rule: the local optimiser, which steps along the gradient of the augmented Lagrangian; rho: weight of its
    quadratic term; server_lr: step size along the mean message; over: the mean is over the cohort, or over all clients,
    where those that were not sampled have not changed (all); begin: local steps start from the client's own last model
    (own), or from the server's (server); message: the change of the augmented model (augmented), or twice the
    displacement from the server's model (twice)."""
    return FedAdmm(rule, Mean(server_lr, over), rho, begin, message)
