"""Displacements that clients and the server add up over the rounds: the machinery of FedDyn and FedDC.

Acar et al., ICLR 2021, arXiv:2111.04263; Gao et al., CVPR 2022, arXiv:2203.11751.

    y   <- y - lr (u + c - c_i),  u = g(y) + alpha (y - x + d_i)          K times
    d_i <- d_i + y_K - x
    c_i <- mean of the K directions u
    d   <- d + |S|/N mean(y_K - x)
    x   <- x + mean(y_K - x) + d
    c   <- c + |S|/N mean(change of c_i)

c and c_i are FedDC's; FedDyn has none of the two. d is the mean of all d_i and stays on the server. Means are uniform,
whatever the federation's client weights are: d would not be the mean of all d_i otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from ..local import Rule
from ..tree import Tree
from .checks import one_of


class Shared(NamedTuple):
    x: Tree
    control: Any  # c where there are control variates, else ()


class Own(NamedTuple):
    """What a client keeps."""

    drift: Tree  # d_i
    control: Any  # c_i where there are control variates, else ()


class LocalState(NamedTuple):
    y: Tree
    rule: Any  # the rule's state
    total: Any  # the sum of u where there are control variates, else ()
    steps: Tensor  # (), local steps taken


@dataclass(frozen=True)
class Drift(Algorithm):
    """The method. `rule`: the local step, whose state starts anew every round; `controlled`: whether there are control
    variates; `evaluate`: the model that is evaluated is x, or the mean of the cohort's models, x - d."""

    rule: Rule
    alpha: float
    controlled: bool = False
    evaluate: Literal["server", "mean"] = "server"
    weighted = False
    stale = "the displacements that are added up must be from one version of the model"

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha must be more than 0, got {self.alpha}; choose fedavg")
        one_of("server", "mean", evaluate=self.evaluate)

    def origin(self, public: Public) -> Tree:
        return public.x

    def server_init(self, x: Tree) -> Server:
        return Server(Shared(x, x.zeros() if self.controlled else ()), x.zeros())

    def client_init(self, public: Public) -> Client:
        return Own(public.x.zeros(), public.x.zeros() if self.controlled else ())

    def client_begin(self, public: Public, client: Client) -> Local:
        x = public.x
        return LocalState(x, self.rule.init(x), x.zeros() if self.controlled else (), x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        u = oracle(local.y).add(local.y - public.x + client.drift, self.alpha)
        v = u + public.control - client.control if self.controlled else u
        y, rule = self.rule.step(local.y, v, local.rule)
        return LocalState(y, rule, local.total + u if self.controlled else (), local.steps + 1)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        control = local.total / local.steps if self.controlled else ()
        change = control - client.control if self.controlled else ()
        return Message(delta, change, {"norm2": delta.norm2()}), Own(client.drift + delta, control)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x, c = server.public
        d = server.private.add(mean.delta, round.share)
        control = c.add(mean.sent, round.share) if self.controlled else ()
        return Server(Shared(x + mean.delta + d, control), d)

    def model(self, server: Server) -> Tree:
        return server.public.x - server.private if self.evaluate == "mean" else server.public.x
