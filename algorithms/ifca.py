"""IFCA: k models, and every client trains the one that fits its rows best.

Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, arXiv:2006.04088, Algorithm 1 with model averaging.

Choose it when clients fall into a few groups with different problems, and nobody knows which client is in which group.
With k groups, the argument `clusters`, it costs k times the download, and k forward passes over a client's rows in
every visit.

    j   = the model with the smallest mean loss over the client's rows, the first of several
    y   <- x_j;  K times: y <- y - step(g(y))
    x_j <- x_j + mean over the clients that chose j of (y_K - x_j)          a model that nobody chose stays

Before round 1 the workload draws k models, as in the authors' code, or, with `spread`, each x_j with j > 1 is x_1 with
normal numbers added. A client is evaluated with the model that it would choose now, also if it has never taken part.
The server's model is x_1. With k = 1 it is FedAvg.

Departures:
- The authors' code lets clients choose by test rows when they are evaluated, and here they choose by training rows.
- Running statistics are averaged over all clients, whatever they have chosen.
- Variants that average gradients, or in which the models have layers in common, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..workloads import counted
from .contract import Client, Deferred, Local, Message, Public, Round, RunContext, Server, Viewer
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.checks import nonnegative
from .parts.one_of_several import OneOfSeveral, view_of
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree

LARGEST_SEED = 2**63 - 1
"""Of those by which a workload draws a model."""


class Change(NamedTuple):
    """The delta of a message."""

    delta: Tree
    chosen: Tensor  # (), int64


@dataclass(frozen=True)
class Ifca(OneOfSeveral):
    """`method`: FedAvg, for the model that a client has chosen; `clusters`: k; `spread`: how far apart the models are
    before round 1; `seed`: of the numbers that are added; `drawn`: x_2 … x_k where they are not made from x_1. The
    public state has the k models."""

    clusters: int
    spread: float
    seed: int = 0
    drawn: tuple[Tree, ...] = ()
    divides_means = True
    not_private = "a client's choice is a number that nothing bounds"

    def server_init(self, x: Tree) -> Server:
        return Server(self.starts(x))

    def starts(self, x: Tree) -> tuple[Tree, ...]:
        """The k models before round 1."""
        if self.drawn:
            return (x, *(drawn.to(x.flat.device) for drawn in self.drawn))
        return (x, *(self._beside(x, j) for j in range(1, self.clusters)))

    def _beside(self, x: Tree, j: int) -> Tree:
        """x with normal numbers added, whose deviation is `spread` times the root mean square of each tensor."""
        draws = counted.normal(counted.key(self.seed, "ifca", j), x.flat.numel()).to(x.flat)
        return Tree.of(
            {
                name: leaf + self.spread * leaf.square().mean().sqrt() * noise
                for (name, leaf), (_, noise) in zip(x.items(), Tree(draws, x.layout).items(), strict=True)
            }
        )

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        return public

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        return view_of(public, losses.argmin())

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, client = super().client_finish(public, client, local)
        return message._replace(delta=Change(message.delta, public.chosen)), client

    def decode(self, public: Public, message: Message) -> Message:
        """The change of every model, 0 but for the chosen one, and in the place of `norm2` who has chosen each."""
        delta, chosen = message.delta
        places = (torch.arange(self.clusters, device=chosen.device) == chosen).to(delta.flat.dtype)
        return message._replace(delta=tuple(delta * place for place in places.unbind()), norm2=places)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        shares = torch.where(mean.norm2 > 0, mean.norm2, 1)
        return Server(tuple(x + d / s for x, d, s in zip(server.public, mean.delta, shares.unbind(), strict=True)))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """share_1, …: the share of the clients' weights that chose each model."""
        return {f"share_{j}": share for j, share in enumerate((mean.norm2 / mean.norm2.sum()).unbind(), 1)}

    def model(self, server: Server) -> Tree:
        return server.public[0]


@dataclass(frozen=True)
class Planned(Deferred):
    """The settings, without the seed of the run."""

    method: LocalMethod
    clusters: int
    spread: float | None

    def build(self, context: RunContext) -> Ifca:
        if self.spread is not None:
            return Ifca(self.method, self.clusters, self.spread, context.seed)
        return Ifca(self.method, self.clusters, 0.0, context.seed, self._drawn(context))

    def _drawn(self, context: RunContext) -> tuple[Tree, ...]:
        """The models before round 1, without the first one."""
        if self.clusters == 1:
            return ()
        if context.drawn is None:
            raise ValueError("models are drawn by a workload, got none; give spread: 1.0")
        seeds = [int(counted.key(context.seed, "ifca", j)) & LARGEST_SEED for j in range(1, self.clusters)]
        found = tuple(context.drawn(seed) for seed in seeds)
        if torch.equal(found[0].flat, context.drawn(context.seed).flat):
            raise ValueError("the workload begins with the same model for every seed; give spread: 1.0")
        return found


def ifca(clusters: int = 2, rule: Rule = Sgd(0.1), spread: float | None = None) -> Planned:
    """clusters: the number k of models; rule: the local optimiser; spread: the deviation of the normal numbers by which
    the models differ before round 1, in units of the root mean square of each tensor; unless given, the workload draws
    each of them."""
    if clusters < 1:
        raise ValueError(f"clusters >= 1 must hold, got clusters={clusters}")
    if spread is not None:
        nonnegative(spread=spread)
    return Planned(LocalMethod(rule, Plain(), Mean()), clusters, spread)
