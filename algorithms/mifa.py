"""MIFA: the server uses the last update of every client, also of those that are away.

Gu, Huang, Zhang, Huang, NeurIPS 2021, arXiv:2106.04159, Algorithm 1.

Choose it when clients are available by patterns that you do not control: the last update of each client stands for it
while it is away, so that clients that are there more often do not weigh more. Local steps are plain descent, and each
client keeps a vector of the model's size.

    y   <- x;  K times: y <- y - lr g(y);  G_i <- (x - y) / lr          for the clients of the round
    x   <- x - lr * mean of G_i over all clients

G_i is 0 until client i takes part for the first time. Clients send the change of G_i; the server keeps the mean G of
all G_i, to which it adds |S|/N of the mean change. With all clients in every round the method is FedAvg. A schedule of
lr is that of the server's step, too.

Departures:
- All clients take part in the paper's first round; here they do with federation.sampler = {name: uniform, first: all},
  and are else drawn as in any round. over = "seen" divides by the number of clients that have taken part so far, in
  place of N.
- Who keeps the G_i is open in the paper; here it is the clients, who send changes.
- Local optimisers other than plain descent have no step size that a displacement could be divided by.
- Means are uniform, whatever the federation's client weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .contract import Client, Local, Message, Public, Round, Server
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.checks import one_of
from .parts.groups import Number
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree


class Own(NamedTuple):
    """What a client keeps."""

    update: Tree  # G_i
    seen: Any  # (), 1 once the client has taken part, where that is counted; else ()


class Memory(NamedTuple):
    """What only the server has."""

    mean: Tree  # of G_i over all clients
    seen: Any  # (), how many have taken part so far, where they are counted; else ()


@dataclass(frozen=True)
class Mifa(LocalMethod):
    """FedAvg's local training; the messages are changes of G_i, and the server steps along the mean of all G_i. `lr`:
    the rule's, which the server and the end of a visit need too."""

    lr: Number = 0.1
    over: Literal["all", "seen"] = "all"
    weighted = False  # pyright: ignore[reportAssignmentType]
    stale = "the changes that are added up must be of the clients' last messages"  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("all", "seen", over=self.over)

    def _count(self, x: Tree) -> Any:
        return x.flat.new_zeros(()) if self.over == "seen" else ()

    def server_init(self, x: Tree) -> Server:
        return super().server_init(x)._replace(private=Memory(x.zeros(), self._count(x)))

    def client_init(self, public: Public) -> Client:
        return super().client_init(public)._replace(own=Own(public.x.zeros(), self._count(public.x)))

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, kept = super().client_finish(public, client, local)
        update, before = message.delta / -self.lr, client.own
        first = 1 - before.seen if self.over == "seen" else ()
        own = Own(update, torch.ones_like(before.seen) if self.over == "seen" else ())
        return message._replace(delta=update - before.update, sent=first), kept._replace(own=own)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        kept: Memory = server.private
        new, seen, share = kept.mean.add(mean.delta, round.share), kept.seen, 1.0
        if self.over == "seen":
            seen = seen + (mean.sent * round.cohort).round()
            share = round.clients / seen
        x = server.public.x.add(new, -self.lr * share)
        return Server(server.public._replace(x=x), Memory(new, seen))


def mifa(rule: Rule = Sgd(0.1), over: Literal["all", "seen"] = "all") -> Mifa:
    """rule: plain descent, `sgd`, by whose step size displacements are divided; over: the mean is over all clients,
    with G_i = 0 for those that have not taken part (all), or over those that have (seen)."""
    if not isinstance(rule, Sgd):
        raise ValueError(
            "rule must be plain descent, by whose step size mifa divides displacements, got "
            f"{type(rule).__name__.lower()}; choose sgd"
        )
    return Mifa(rule, Plain(), Mean(), lr=rule.lr, over=over)
