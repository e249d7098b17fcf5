"""FedHM: the server keeps whole weights and sends their truncated singular value decompositions; clients train these.

Yao, Pan, Wan, Jin, Sun 2021, arXiv:2111.14655 ("FedHM: Efficient Federated Learning for Heterogeneous Models via
Low-rank Factorization").

    down     U = P_r S_r^(1/2), V = Q_r S_r^(1/2) of each compressed W = P S Q^T, in the reshape (o h) x (i w)
    clients  K local steps on U, V and all that is not compressed
    server   W <- mean of U_i V_i^T, the rest averaged

The mean is of products, so a message is multiplied out before it is added; what was sent are factors. Server rules act
on whole models, with x the model that was sent, U V^T of the truncation: without a local step the model is truncated
once and then stays. The first W is the model's own start. States on variables that are decomposed anew every round
would mean nothing, so estimators and rules that keep any between rounds are refused.

Departures:
- All clients have one rank, from the ratio; the paper's ranks differ by client, which is its point, and Li et al. 2025
  compare it at one ratio.
- The paper's weight decay as |U V^T|^2 is left out.
- The weights of the mean are the federation's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import Algorithm, Message, Round, Server
from .fedavg import Plain
from .local import LocalMethod, Rule, with_decoded_norm2
from .parts.compression import RATIO, Budget, Compressed, Compression
from .parts.factors import Pair
from .parts.matrices import Layers, Reshape, Sized, to_matrix
from .parts.products import LowRank
from .parts.reparameterisation import Factored, Report, Unpacked, Within, refuse_states
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Layout, Tree


class Halved(NamedTuple):
    """The method's public state, its x factors and all else."""

    method: Any


@dataclass(frozen=True)
class Truncated(Within):
    """Private: x, whole, and the server rule's state."""

    method: LocalMethod
    space: Factored
    reshape: Reshape

    def split(self, x: Tree) -> Tree:
        """z: every compressed weight's best factors."""
        leaves = dict(x.items())
        parts: dict[str, Tensor] = {}
        ranks = {s.weight.name: s for s in self.space.sized}
        for name, leaf in leaves.items():
            parts |= self._factors(leaf, ranks[name]) if name in ranks else {name: leaf}
        return Tree.of(parts)

    def _factors(self, leaf: Tensor, sized: Sized) -> dict[str, Tensor]:
        left, values, right = torch.linalg.svd(to_matrix(leaf, sized.weight, self.reshape), full_matrices=False)
        root = values[: sized.size[0]].sqrt()
        name = sized.weight.name
        return {f"{name}.u": left[:, : len(root)] * root, f"{name}.v": right[: len(root)].mT * root}

    def server_init(self, x: Tree) -> Server:
        return self._sent(self.method.server_init(x))

    def _sent(self, inner: Server) -> Server:
        x = inner.public.x
        return Server(Halved(inner.public._replace(x=self.split(x))), (x, inner.private))

    def unpack(self, public: Halved) -> Unpacked:
        return Unpacked(public.method, (), {})

    def decode(self, public: Unpacked, message: Message) -> Message:
        z = public.method.x
        delta = self.space.lift(z + message.delta, {}) - self.space.lift(z, {})
        return with_decoded_norm2(message._replace(delta=delta))

    def _truncated(self, server: Server) -> Server:
        """The method's, at the model that was sent."""
        public = server.public.method
        return Server(public._replace(x=self.space.lift(public.x, {})), server.private[1])

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self._sent(self.method.server_update(self._truncated(server), mean, round))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._truncated(server), mean, round)

    def model(self, server: Server) -> Tree:
        x, private = server.private
        return self.method.model(Server(server.public.method._replace(x=x), private))

    @property
    def report(self) -> Report:
        return self.space.report


@dataclass(frozen=True)
class Decomposition(Compression):
    """truncated singular value decompositions of whole weights, made anew every round, as in FedHM"""

    ratio: float = RATIO
    reshape: Reshape = "permuted"
    layers: Layers = "inner"
    nearest: bool = False

    def around(self, method: LocalMethod, layout: Layout, seed: int) -> Algorithm:
        refuse_states(method, "weights are decomposed anew every round; choose another compression, as factors")
        form = Pair(LowRank(), self.reshape)
        sized = Budget(self.ratio, self.layers, self.nearest).fit(layout, form)
        return Truncated(method, Factored(layout, sized, form, "uniform", 0.0, seed), self.reshape)


def fedhm(
    rule: Rule = Sgd(0.1),
    ratio: float = RATIO,
    reshape: Reshape = "permuted",
    layers: Layers = "inner",
    nearest: bool = False,
    server_lr: float = 1.0,
) -> Compressed:
    """rule: the local optimiser, of the factors and all else; ratio: numbers sent over numbers of the model; reshape:
    of convolutions to matrices, raw or permuted; layers: inner leaves out the first and the last weight, or all;
    nearest: where the ratio cannot be reached, the least that can."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, Decomposition(ratio, reshape, layers, nearest))
