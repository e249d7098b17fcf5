"""Local AdaAlter: Adagrad on the clients, whose sums of squared gradients are averaged like their models.

Xie, Koyejo, Gupta, Lin 2019 ("Local AdaAlter: Communication-Efficient Stochastic Gradient Descent with Adaptive
Learning Rates"), arXiv:1911.09030.

Choose it when local steps need a step size for each coordinate, as with rare words in texts, and clients can keep no
state. The sums are sent and averaged as models are, which doubles the traffic of FedAvg.

    y <- x, A2_i <- B2;  for t' = 1, 2, ..., K:
        y    <- y - lr g / sqrt(B2 + t' eps^2)     g: the gradient at y; squares, roots and quotients by coordinate
        A2_i <- A2_i + g^2
    x  <- mean of y_K
    B2 <- mean of A2_i

All local steps of a round have the same B2, so that no client divides by squares that the others have not seen; t'
eps^2 stands for the squares of the steps since the last average. B2 is b0^2 before the first round.

Uncertain: the paper's text was not at hand; the equations were compared with states of the authors' program, which
have eps^2, or eps^2 sqrt(t'), where t' eps^2 stands above. eps = 1, b0 = 0 and lr = 0.5 are that program's. It begins
with some hundred steps that all clients take together while lr rises; here only lr may rise, by a schedule.

Departures:
- The paper's workers keep x and B2, which are the same for all after averaging; here both are sent down, so that
  clients need no state.
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
- Both means have the federation's client weights, uniform unless it says otherwise; the paper's are uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from .parts.checks import nonnegative, positive
from .parts.groups import Number
from .tree import Tree


class Shared(NamedTuple):
    x: Tree
    squares: Tree  # B2


class LocalState(NamedTuple):
    y: Tree
    squares: Tree  # A2_i
    steps: Tensor  # (), local steps taken


@dataclass(frozen=True)
class LocalAdaAlter(Algorithm):
    """The method on the contract. `eps`: epsilon, not its square."""

    lr: Number = 0.5
    eps: float = 1.0
    b0: float = 0.0
    averages_states = True
    not_private = "noise makes the averaged squares of gradients negative, and the step takes their square roots"

    def __post_init__(self) -> None:
        positive(lr=self.lr, eps=self.eps)
        nonnegative(b0=self.b0)

    def origin(self, public: Public) -> Tree:
        return public.x

    def server_init(self, x: Tree) -> Server:
        return Server(Shared(x, Tree(torch.full_like(x.flat, self.b0**2), x.layout)))

    def client_init(self, public: Public) -> Client:
        return ()

    def client_begin(self, public: Public, client: Client) -> Local:
        return LocalState(public.x, public.squares, public.x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        g, t = oracle(local.y), local.steps + 1
        v = Tree(g.flat / (public.squares.flat + t * self.eps**2).sqrt(), g.layout)
        return LocalState(local.y.add(v, -self.lr), local.squares + g * g, t)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        return Message(delta, (), {"norm2": delta.norm2()}, local.squares), ()

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return Server(Shared(server.public.x + mean.delta, mean.averaged))

    def model(self, server: Server) -> Tree:
        return server.public.x


def local_adaalter(lr: Number = 0.5, eps: float = 1.0, b0: float = 0.0) -> LocalAdaAlter:
    """lr: local step size; eps: its square is added to the squares in every local step; b0: its square is the sum of
    squares before the first round."""
    return LocalAdaAlter(lr, eps, b0)
