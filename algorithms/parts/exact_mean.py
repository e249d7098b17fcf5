"""Adapters whose mean is exact: the server changes the weights, too, by what the mean of the factors misses.

The mean of the clients' models W + s B_i A_i is no product of mean factors. Here the weights W beside the factors are
part of the public state, and change from round to round. Clients do not train them:

    clients   A_i, B_i <- local steps from A, B, with W as it is
    server    A', B' <- as the method says;  W' <- W + s B A + mean of (s B_i A_i - s B A) - s B' A'

so that W' + s B' A', the model that is evaluated, is the mean of the clients' models, whatever A' and B' are. Where
clients have ranks of their own, s of a client is that of its rank, and s of the server's factors that of the largest
one. What a client sends are its factors; `decode` makes their product, and the engine adds the products up. All other
trained tensors are averaged as in FedAvg.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...workloads.pair import Pair, Ranks
from ..contract import Deferred, Known, Message, Public, Round, RunContext, Server, Viewer
from ..local import LocalMethod, with_decoded_norm2
from ..tree import Layout, Tree


class Held(NamedTuple):
    """The public state: that of a `LocalMethod`, whose x has the trained tensors, and the weights beside factors."""

    x: Tree
    weights: Any  # Known
    shared: tuple[()] = ()
    carried: Any = ()
    stacked: Any = ()  # Known, (): the sum of the ranks of the last cohort, where clients have ranks of their own
    ratio: Any = ()  # (): in a client's view its scale divided by that of the largest rank
    round: Any = ()  # Known, (): the number of the next round, where clients draw factors for themselves
    begun: Any = ()  # Tree: in a client's view the trained tensors that it begins with, where they are not x


@dataclass(frozen=True)
class ExactMean(LocalMethod):
    """The method. `layout`: all tensors of the model; `pairs`: its adapters; `cohort`, `clients`: S and N, for the
    traffic; `seed`: of the run."""

    layout: Layout = Layout((), ())
    pairs: tuple[Pair, ...] = ()
    cohort: int = 1
    seed: int = 0
    clients: int = 1
    sends_factors = True
    """Whether factors are sent to clients, which otherwise draw them by themselves."""
    moves_weights = True
    stale = "the server changes weights by products of factors that began at the same version"  # pyright: ignore
    not_private = "the server adds products of factors to the weights, of which no noise is known"

    @abstractmethod
    def next_factors(self, x: Tree, round: int) -> Tree:
        """The trained tensors with which a round begins. x: their mean after the round before; round: from 2."""

    @cached_property
    def weights(self) -> Layout:
        """The layout of the weights that the server changes."""
        return self.layout.pick(pair.weight for pair in self.pairs)

    @cached_property
    def trained(self) -> Layout:
        """The layout of the tensors that clients train."""
        return self.layout.pick({*self.layout.names} - {*self.weights.names})

    @property
    def variables(self) -> Any:
        return ("weights", self.weights.names)

    @property
    def ranks(self) -> Ranks | None:
        """Those of the clients, None where all have the same."""
        return self.pairs[0].ranks if self.pairs else None

    @property
    def own_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ranks is not None

    @property
    def own_traffic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ranks is not None

    def changes(self, x: Tree) -> Tree:
        """s B A for each weight."""
        found: dict[str, Tensor] = {}
        for pair in self.pairs:
            change = pair.change(x, self.layout.spans[pair.weight][2])
            found[pair.weight] = found[pair.weight] + change if pair.weight in found else change
        return Tree.join(self.weights, found)

    def joined(self, x: Tree, weights: Tree) -> Tree:
        """A tree of all tensors of the model."""
        return Tree.join(self.layout, {**dict(x.items()), **dict(weights.items())})

    # --- clients ------------------------------------------------------------------------------------------------------
    def held(self, public: Public) -> Mapping[str, Tensor]:
        return dict(public.weights.value.items())

    def origin(self, public: Public) -> Tree:
        return self.joined(public.x, public.weights.value)

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        return public if self.ranks is None else public._replace(ratio=self.ranks.of(viewer.number)[1])

    def decode(self, public: Public, message: Message) -> Message:
        own = self.changes(public.x + message.delta)
        own = own if self.ranks is None else Tree(own.flat * public.ratio.to(own.flat), own.layout)
        moved = own - self.changes(public.x)
        return with_decoded_norm2(message._replace(delta=self.joined(message.delta, moved)))

    # --- the server ---------------------------------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        server = super().server_init(x.pick(self.trained.names))
        weights = Known(x.pick(self.weights.names))
        stacked: Any = ()
        if self.ranks is not None:  # what a cohort has on average, until there is one
            stacked = Known(torch.tensor(self.cohort * self.ranks.mean(self.clients), dtype=torch.float64))
        return server._replace(public=Held(server.public.x, weights, carried=server.public.carried, stacked=stacked))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        public: Held = server.public
        x = self.next_factors(public.x + mean.delta.pick(self.trained.names), round.number + 1)
        missed = self.changes(public.x) + mean.delta.pick(self.weights.names) - self.changes(x)
        weights, stacked = Known(public.weights.value + missed), public.stacked
        if self.ranks is not None:
            stacked = Known((mean.facts["rank"] * round.cohort).round())
        return server._replace(public=Held(x, weights, carried=mean.averaged.carried, stacked=stacked))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """missed: the norm of what the product of the mean factors misses of the mean of the products, s (mean of B_i
        A_i - mean B mean A)."""
        x = server.public.x
        product = self.changes(x + mean.delta.pick(self.trained.names)) - self.changes(x)
        return {"missed": (mean.delta.pick(self.weights.names) - product).norm()}

    def model(self, server: Server) -> Tree:
        return self.origin(server.public)

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        """Down: the trained tensors, and after round 1 for each adapter the factors of the last cohort, or the change
        of the weight where that is smaller. A client receives the rows and columns of its own rank."""
        spans, size = self.layout.spans, public.x.flat.element_size()
        largest = spans[self.pairs[0].a][2][0]
        sides = [(spans[pair.a][1] // largest, spans[pair.b][1] // largest) for pair in self.pairs]  # for each rank
        of_one = [sum(both) for both in sides]
        rank, stacked = largest, float(self.cohort * largest)
        if self.ranks is not None:
            rank, stacked = self.ranks.rank(client), float(public.stacked.value)
        numbers = public.x.flat.numel() - sum(of_one) * (largest - (rank if self.sends_factors else 0))
        for part in pytree.tree_leaves(public.carried, is_leaf=lambda part: isinstance(part, Tree)):
            numbers += part.flat.numel() - sum(of_one) * (largest - rank) if isinstance(part, Tree) else part.numel()
        if round > 1:
            numbers += sum(int(min(a * b, stacked * (a + b))) for a, b in sides)
        return size * numbers, None


@dataclass(frozen=True)
class OfAdapters(Deferred):
    """The method before the model's adapters are known. `method`: with settings for these that have no meaning;
    `name`: for messages."""

    method: ExactMean
    name: str
    moves_weights = True

    def build(self, context: RunContext) -> ExactMean:
        layout, pairs = context.layout, context.pairs
        if layout is None or not pairs:
            raise ValueError(
                f"{self.name} needs adapters, got a model without; give workload.adapter, or choose fedavg"
            )
        if tied := [pair.weight for pair in pairs if pair.tied]:
            raise ValueError(
                f"{self.name} changes the weights beside factors, got {tied[0]}, which other modules have, too; leave "
                "it out of the adapter's targets, or choose fedavg"
            )
        factors = [name for pair in pairs for name in (pair.a, pair.b)]
        if missing := [name for name in factors if name not in layout.names]:
            raise ValueError(
                f"{self.name} needs all factors, got {missing[0]} frozen or personal; leave it out of the section "
                "personal, or choose fedavg"
            )
        return replace(
            self.method, layout=layout, pairs=pairs, cohort=context.cohort, seed=context.seed, clients=context.clients
        )
