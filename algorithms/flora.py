"""FLoRA: the products of all clients' factors are added to the weights, and new factors begin in every round.

Wang et al. 2024, arXiv:2409.05976.

Choose it to fine-tune with adapters where the mean of the clients' models should be exact and its rank should grow from
round to round. After the first round a client receives the factors of a whole cohort.

    A_i, B_i <- local steps from A, B = 0                   beside W
    W        <- W + mean of s B_i A_i
    A        <- drawn anew, the same for all clients, or one for each;  B <- 0

The authors stack the factors, [w_1 A_1; w_2 A_2; ...] and [B_1 | B_2 | ...], which has the same product. New factors
are drawn from the seed and the round: A uniformly from +-1 / sqrt(fan_in), for embeddings B from the standard normal
distribution. The first ones are those of the adapter. With redraw = "client" every client draws its own, in all rounds,
from the seed, the round and its number.

Departures:
- In the authors' code every client draws an A of its own, which is redraw = "client".
- Means have the federation's client weights, uniform unless it says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..workloads import counted
from .contract import Client, Known, Local, Message, Public, Round, Server, Viewer
from .fedavg import Plain
from .local import Carry, Rule
from .parts.checks import one_of
from .parts.exact_mean import ExactMean, Held, OfAdapters
from .parts.rules import adamw
from .parts.servers import Mean
from .tree import Tree

Redraw = Literal["round", "client"]


@dataclass(frozen=True)
class Flora(ExactMean):
    """The method. `redraw`: whether all clients of a round begin with the same factors, or each with its own."""

    redraw: Redraw = "round"
    sends_factors = False

    @property
    def own_view(self) -> bool:
        return super().own_view or self.redraw == "client"

    def drawn(self, x: Tree, *parts: int | Tensor) -> Tree:
        """The trained tensors with new factors. parts: of the key, besides the seed and the place of the pair."""
        found = dict(x.items())
        for number, pair in enumerate(self.pairs):
            drawn, zero = (pair.a, pair.b) if pair.drawn == "a" else (pair.b, pair.a)
            found[zero] = torch.zeros_like(found[zero])
            shape, key = found[drawn].shape, counted.key(self.seed, "adapter", number, pair.drawn, *parts)
            if pair.drawn == "a":
                new = (2 * counted.uniform(key, shape.numel()) - 1) / math.sqrt(shape[1:].numel())
            else:
                new = counted.normal(key, shape.numel())
            found[drawn] = new.view(shape).to(found[drawn])
        return Tree.join(x.layout, found)

    def next_factors(self, x: Tree, round: int) -> Tree:
        return self.drawn(x, round)

    # --- clients that draw for themselves -----------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        """Where clients begin with factors of their own, the first change of the weights is added to them."""
        server = super().server_init(x)
        if self.redraw == "round":
            return server
        public: Held = server.public
        weights = Known(public.weights.value + self.changes(public.x))
        x = self.next_factors(public.x, 1)
        return server._replace(public=public._replace(x=x, weights=weights, round=Known(torch.tensor(1))))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        after = super().server_update(server, mean, round)
        if self.redraw == "round":
            return after
        return after._replace(public=after.public._replace(round=Known(torch.tensor(round.number + 1))))

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        public = super().view(public, viewer, losses)
        if self.redraw == "round":
            return public
        return public._replace(begun=self.drawn(public.x, public.round.value, viewer.number))

    def client_begin(self, public: Public, client: Client) -> Local:
        return super().client_begin(public if self.redraw == "round" else public._replace(x=public.begun), client)


def flora(rule: Rule = adamw(3e-4), carry: Carry = "reset", redraw: Redraw = "round") -> OfAdapters:
    """rule: the local optimiser; carry: only reset, as factors begin anew in every round; redraw: new factors are the
    same for all clients of a round (round), or each client draws its own (client)."""
    if carry != "reset":
        raise ValueError(
            f"flora draws its factors anew in every round, so that no state can be kept, got carry={carry!r}; give "
            "carry: reset, or choose fedex_lora"
        )
    one_of("round", "client", redraw=redraw)
    return OfAdapters(Flora(rule, Plain(), Mean(), redraw=redraw), "flora")
