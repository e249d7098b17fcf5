"""STEM: STORM's estimator on every client; the server averages models and estimators.

Khanduri et al., NeurIPS 2021, arXiv:2106.10435; STORM: Cutkosky, Orabona, NeurIPS 2019, arXiv:1905.10018.

Choose it when batches are small and noisy, clients can keep a vector of the model's size, and all of them take part in
every round, as in its theory. It takes two gradients per step and twice the traffic of FedAvg.

    start  d <- mean gradient at x0, p_i <- x0, x <- x0 - lr d
    d_i <- d, y <- x;  K times:
           d_i <- g(y) + (1 - a) (d_i - g(p_i))      both on the same batch
           p_i <- y;  y <- y - lr d_i
    x   <- mean of y_K;  d <- mean of d_i

If each client takes its last local step before the averaging, the result is the same as if the server takes this step
after it. All means have the federation's client weights, those of d and of the start's gradient like that of x; the
number of local steps that t counts is a plain mean. schedule = "stem" has lr_t = lr / (w + sigma2 t)^(1/3) and a_{t+1}
= min(1, c (lr_t / lr)^2), where t counts local steps from 1 and the start's step is 0.

Uncertain: p_i at the beginning of a round is the client's own point before the averaged step (previous = "own");
"server" takes the mean of these points over the cohort instead: clients keep no vector, and one vector more is sent in
each direction. The constants
of schedule = "stem" are from memory; "constant" is the default. Whether the start's step has a step size of its own is
not known: first_lr, which is lr unless given. The values of a, c, w and sigma2 are ours.

Departures:
- The start is a pass over all data and not over K batches.
- The start may be left out, d = 0 and p_i = x0 (start = "zeros").
- All clients take part in the paper; here, in a cohort, a client that did not take part in the round before takes p_i =
  x.
- lr and a are constants by default; the paper's decaying ones are schedule = "stem", with constants from memory.
- previous = "server" is an option of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from .parts.checks import closed_fraction, nonnegative, one_of, positive, refuse
from .parts.warm_start import Start, WarmStart, WarmStarted
from .tree import Tree


class Own(NamedTuple):
    """What a client keeps."""

    point: Tree  # p_i, the penultimate local iterate
    number: Tensor  # (), int64, the number of rounds done when it was kept


def no_round(x: Tree) -> Tensor:
    """(), the number 0 as int64: client states may be stored in a float format that cannot count to 300."""
    return x.flat.new_zeros((), dtype=torch.int64)


def last_point(own: Own, x: Tree, number: Tensor) -> Tree:
    """p_i of a client that took part in the round before, x of any other one; `number`: (), rounds done."""
    return Tree(torch.where(own.number == number, own.point.flat, x.flat), x.layout)


@dataclass(frozen=True)
class Rates:
    """lr and a of local step t: constants, or, where they decay, those of schedule = "stem"."""

    lr: float = 0.1
    a: float = 0.1
    decays: bool = False
    decay: tuple[float, float, float] = (1.0, 1.0, 1.0)  # w, sigma2, c

    def __post_init__(self) -> None:
        w, sigma2, c = self.decay
        positive(lr=self.lr, w=w, c=c)
        nonnegative(sigma2=sigma2)
        closed_fraction(a=self.a)

    def shrunk(self, t: Any) -> Any:
        """lr_t / lr, where the rates decay."""
        return (self.decay[0] + self.decay[1] * t) ** (-1 / 3)

    def at(self, t: Any) -> tuple[Any, Any]:
        """(lr_t, a_t); `t`: a 0-d tensor, not used for constants."""
        if not self.decays:
            return self.lr, self.a
        return self.lr * self.shrunk(t), (self.decay[2] * self.shrunk(t - 1) ** 2).clamp(max=1.0)


class Shared(NamedTuple):
    x: Tree
    direction: Tree  # d
    number: Tensor  # (), rounds done
    steps: Any  # (), local steps done, where rates decay; else ()
    previous: Any  # mean of p_i, where the server has it; else ()


class LocalState(NamedTuple):
    y: Tree
    direction: Tree
    point: Tree  # p_i
    t: Any  # (), the number of the local step, where rates decay; else ()


class Averaged(NamedTuple):
    """What is averaged with the client weights, as x is."""

    direction: Tree
    previous: Any  # p_i, where the server has their mean; else ()


@dataclass(frozen=True)
class Stem(WarmStarted):
    """The method on the contract. `first_lr`: step size of the start's step, the rates' own unless given."""

    rates: Rates
    start: Start = "gradient"
    previous: Literal["own", "server"] = "own"
    first_lr: float | None = None
    warm_start_averaged = True

    def __post_init__(self) -> None:
        one_of("zeros", "gradient", start=self.start)
        one_of("own", "server", previous=self.previous)
        if self.first_lr is not None:
            positive(first_lr=self.first_lr)

    def server_init(self, x: Tree) -> Server:
        steps = x.flat.new_zeros(()) if self.rates.decays else ()
        return Server(Shared(x, x.zeros(), no_round(x), steps, x if self.previous == "server" else ()))

    def client_init(self, public: Public) -> Client:
        return Own(public.x, public.number) if self.previous == "own" else ()

    def client_begin(self, public: Public, client: Client) -> Local:
        point = last_point(client, public.x, public.number) if self.previous == "own" else public.previous
        return LocalState(public.x, public.direction, point, public.steps + 1 if self.rates.decays else ())

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        lr, a = self.rates.at(local.t)
        d = oracle(local.y) + (local.direction - oracle(local.point)) * (1 - a)
        return LocalState(local.y - d * lr, d, local.y, local.t + 1 if self.rates.decays else ())

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        steps = local.t - 1 - public.steps if self.rates.decays else ()
        averaged = Averaged(local.direction, local.point if self.previous == "server" else ())
        kept = Own(local.point, public.number + 1) if self.previous == "own" else ()
        return Message(delta, steps, {"norm2": delta.norm2()}, averaged), kept

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        public, averaged = server.public, mean.averaged
        steps = public.steps + mean.sent if self.rates.decays else ()
        return Server(Shared(public.x + mean.delta, averaged.direction, public.number + 1, steps, averaged.previous))

    def model(self, server: Server) -> Tree:
        return server.public.x

    @property
    def warm_start(self) -> Algorithm | None:
        return WarmStart(self) if self.start == "gradient" else None

    def warm_started_server(self, server: Server, mean: Tree) -> Server:
        x = server.public.x
        lr = self.first_lr
        if lr is None:
            lr = self.rates.lr * (self.rates.shrunk(0) if self.rates.decays else 1.0)
        return Server(server.public._replace(x=x.add(mean, -lr), direction=mean))


def stem(
    lr: float = 0.1,
    a: float | None = None,
    start: Start = "gradient",
    previous: Literal["own", "server"] = "own",
    schedule: Literal["constant", "stem"] = "constant",
    w: float | None = None,
    sigma2: float | None = None,
    c: float | None = None,
    first_lr: float | None = None,
) -> Stem:
    """lr: local step size, the constant kappa with schedule = stem; a: weight of the new gradient, 1 is FedAvg, 0.1
    unless given, refused with schedule = stem; start: one pass over all clients for d = gradient at x0 and a first step
    along it (gradient), or d = 0 and no first step (zeros); previous: p_i stays with the client (own), or the server
    has the mean of all p_i (server); schedule: constant lr and a (constant), or lr / (w + sigma2 t)^(1/3) and a = c /
    (w + sigma2 (t - 1))^(2/3) (stem); w, sigma2, c: constants of schedule = stem, 1 unless given; first_lr: step size
    of the first step with start = gradient, by default that of the local steps."""
    one_of("constant", "stem", schedule=schedule)
    decay = {"w": w, "sigma2": sigma2, "c": c}
    if schedule == "stem":
        refuse({"a": a}, "under schedule=stem it follows from w, sigma2 and c", "leave it out")
    else:
        refuse(decay, "schedule is constant", "leave it out, or choose schedule: stem")
    if start == "zeros":
        refuse({"first_lr": first_lr}, "start=zeros takes no first step", "leave it out, or choose start: gradient")
    w, sigma2, c = (1.0 if value is None else value for value in decay.values())
    return Stem(Rates(lr, 0.1 if a is None else a, schedule == "stem", (w, sigma2, c)), start, previous, first_lr)
