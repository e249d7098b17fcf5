"""FAFED: STEM with Adam's preconditioner, which all clients share.

Wu, Huang, Hu, Huang, AAAI 2023, arXiv:2212.00974.

Choose it when batches are noisy, coordinates need step sizes of their own, as in Adam, and all clients take part: they
all divide by the same preconditioner. It takes two gradients per step and three times the traffic of FedAvg, and each
client keeps a vector of the model's size.

    start  m <- mean gradient at x0, v <- mean of the clients' squared gradients, p_i <- x0, x <- x0 - lr m
    y <- x, m_i <- m, v_i <- v, A = sqrt(v) + rho for the round;  K times:
           m_i <- g(y) + (1 - alpha) (m_i - g(p_i)), v_i <- beta v_i + (1 - beta) g(y)^2
           p_i <- y;  y <- y - lr m_i / A, except for the K-th time
    m   <- mean of m_i, v <- mean of v_i
    x   <- mean of y - lr m / (sqrt(v) + rho)          the K-th step

All means have the federation's client weights, those of m, v and the start's gradients like that of x.

Uncertain: the rules come from third-party code, and the hyperparameters are ours, constants instead of the paper's
decaying ones (give schedules). The start's step is not preconditioned, as in that code, unless first =
"preconditioned". p_i at the beginning of a round is the client's own, or the mean over the cohort (previous =
"server"). With the mean, the server sends one vector more and clients keep none. Clients send no further vector,
because the mean of the p_i is the mean of the y.

Departures:
- The start is a pass over all data and not over K batches.
- The start may be left out, m = v = 0 and p_i = x0 (start = "zeros").
- All clients take part in the paper; here, in a cohort, a client that did not take part in the round before takes p_i =
  x.
- lr and alpha are constants, or schedules that are given, instead of the paper's decaying ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from .parts.checks import closed_fraction, one_of, positive, refuse
from .parts.warm_start import Start, WarmStart, WarmStarted
from .stem import Own, last_point, no_round
from .tree import Tree


class Moments(NamedTuple):
    first: Tree  # m
    second: Tree  # v


class Shared(NamedTuple):
    x: Tree
    moments: Moments
    number: Tensor  # (), rounds done
    previous: Any  # mean of p_i, where the server has it; else ()


class LocalState(NamedTuple):
    """The step along m_i is taken when the next one begins, so that the K-th step is left to the server."""

    y: Tree
    point: Tree  # p_i
    moments: Moments
    begun: Tensor  # (), bool: a step has been taken


@dataclass(frozen=True)
class Step:
    """The preconditioned step lr m / (sqrt(v) + rho)."""

    lr: float = 0.01
    rho: float = 0.001

    def __post_init__(self) -> None:
        positive(lr=self.lr, rho=self.rho)

    def along(self, m: Tree, v: Tree) -> Tree:
        return Tree(self.lr * m.flat / (v.flat.sqrt() + self.rho), m.layout)


@dataclass(frozen=True)
class Fafed(WarmStarted):
    """The method on the contract. `first`: the form of the start's step."""

    step: Step
    alpha: float = 0.1
    beta: float = 0.999
    start: Start = "gradient"
    first: Literal["plain", "preconditioned"] = "plain"
    previous: Literal["own", "server"] = "own"
    warm_start_averaged = True
    not_private = "noise makes the averaged squares of gradients negative, and the step takes their square roots"

    def __post_init__(self) -> None:
        closed_fraction(alpha=self.alpha, beta=self.beta)
        one_of("zeros", "gradient", start=self.start)
        one_of("plain", "preconditioned", first=self.first)
        one_of("own", "server", previous=self.previous)

    def server_init(self, x: Tree) -> Server:
        previous = x if self.previous == "server" else ()
        return Server(Shared(x, Moments(x.zeros(), x.zeros()), no_round(x), previous))

    def client_init(self, public: Public) -> Client:
        return Own(public.x, public.number) if self.previous == "own" else ()

    def client_begin(self, public: Public, client: Client) -> Local:
        point = last_point(client, public.x, public.number) if self.previous == "own" else public.previous
        return LocalState(public.x, point, public.moments, torch.zeros_like(public.number, dtype=torch.bool))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        (m, v), begun = local.moments, local.begun
        moved = local.y - self.step.along(m, public.moments.second)
        y = Tree(torch.where(begun, moved.flat, local.y.flat), m.layout)
        point = Tree(torch.where(begun, local.y.flat, local.point.flat), m.layout)
        g = oracle(y)
        m = g.add(m - oracle(point), 1 - self.alpha)
        return LocalState(y, point, Moments(m, v.lerp(g * g, 1 - self.beta)), torch.ones_like(begun))

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        kept = Own(local.y, public.number + 1) if self.previous == "own" else ()
        return Message(delta, (), {"norm2": delta.norm2()}, local.moments), kept

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        moments: Moments = mean.averaged
        stopped = server.public.x + mean.delta  # where clients are before the K-th step: the mean of their p_i too
        x, previous = stopped - self.step.along(*moments), stopped if self.previous == "server" else ()
        return Server(Shared(x, moments, server.public.number + 1, previous))

    def model(self, server: Server) -> Tree:
        return server.public.x

    @property
    def warm_start(self) -> Algorithm | None:
        return WarmStart(self) if self.start == "gradient" else None

    def warm_start_sent(self, gradient: Tree) -> Any:
        return Moments(gradient, gradient * gradient)

    def warm_started_server(self, server: Server, mean: Moments) -> Server:
        step = self.step.along(*mean) if self.first == "preconditioned" else mean.first * self.step.lr
        return Server(server.public._replace(x=server.public.x - step, moments=mean))


def fafed(
    lr: float = 0.01,
    alpha: float = 0.1,
    beta: float = 0.999,
    rho: float = 0.001,
    start: Start = "gradient",
    first: Literal["plain", "preconditioned"] | None = None,
    previous: Literal["own", "server"] = "own",
) -> Fafed:
    """lr: step size; alpha: weight of the new gradient; beta: weight of the old second moment; rho: added to the root
    of the second moment; start: one pass over all clients for m and v at x0 and a first step along m (gradient), or m =
    v = 0 and no first step (zeros); first: the first step is plain, as it is unless given, or preconditioned; previous:
    p_i stays with the client (own), or the server has the mean of all p_i (server)."""
    if start == "zeros":
        refuse({"first": first}, "start=zeros takes no first step", "leave it out, or choose start: gradient")
    return Fafed(Step(lr, rho), alpha, beta, start, "plain" if first is None else first, previous)
