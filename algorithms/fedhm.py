"""FedHM: the server keeps whole weights and sends their truncated singular value decompositions; clients train these.

Yao, Pan, Wan, Jin, Sun 2021, arXiv:2111.14655 ("FedHM: Efficient Federated Learning for Heterogeneous Models via
Low-rank Factorization").

Choose it when clients are to train and exchange low-rank models and can keep no state, and the server is to keep whole
weights. The model is truncated anew in every round, which adds an error each time.

    down     U = P_r S_r^(1/2), V = Q_r S_r^(1/2) of each compressed W = P S Q^T, in the reshape (o h) x (i w)
    clients  K local steps on U, V and all that is not compressed
    server   W <- mean of U_i V_i^T, the rest averaged

The mean is of products, so that a message is multiplied out before it is added; what is sent are factors. Server rules
act on whole models, where x is the model that was sent, U V^T of the truncation: without any local step the model is
truncated once and then stays. The first W is the model's own start. States of variables that are decomposed anew every
round would mean nothing, so that estimators and rules that keep a state between rounds are refused.

Departures:
- All clients have one rank, from the ratio; the paper's ranks differ by client, which is its point, and Li et al. 2025
  compare it at one ratio.
- The paper's weight decay as |U V^T|^2 is left out.
- The weights of the mean are the federation's.
- Server rules that evaluate the mean of the last two models (`evaluate: last_two`) take the older one as it was sent,
  truncated, and the newest one whole.
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
from .parts.reparameterisation import Factored, InSpace, Report, Unpacked, refuse_states
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Layout, Tree


class PublicState(NamedTuple):
    method: Any  # the method's public state; its x has the factors in place of the compressed weights


@dataclass(frozen=True)
class Truncated(InSpace):
    """The method in the factors of truncated decompositions. The server's private state is the whole x and the state of
    the server rule."""

    method: LocalMethod
    space: Factored
    reshape: Reshape

    def split(self, x: Tree) -> Tree:
        """z: x with the best factors of every compressed weight in its place."""
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
        return Server(PublicState(inner.public._replace(x=self.split(x))), (x, inner.private))

    def unpack(self, public: PublicState) -> Unpacked:
        return Unpacked(public.method, (), {})

    def decode(self, public: Unpacked, message: Message) -> Message:
        z = public.method.x
        delta = self.space.lift(z + message.delta, {}) - self.space.lift(z, {})
        return with_decoded_norm2(message._replace(delta=delta))

    def _at_truncation(self, server: Server) -> Server:
        """The method's server state at the model that was sent down."""
        public = server.public.method
        return Server(public._replace(x=self.space.lift(public.x, {})), server.private[1])

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self._sent(self.method.server_update(self._at_truncation(server), mean, round))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._at_truncation(server), mean, round)

    def model(self, server: Server) -> Tree:
        x, private = server.private
        return self.method.model(Server(server.public.method._replace(x=x), private))

    @property
    def report(self) -> Report:
        return self.space.report


@dataclass(frozen=True)
class Decomposition(Compression):
    """truncated singular value decompositions of whole weights, computed anew every round, as in FedHM"""

    ratio: float = RATIO
    reshape: Reshape = "permuted"
    layers: Layers = "inner"
    nearest: bool = False
    factors = True

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
    """rule: the local optimiser of the factors and of all that is not compressed; ratio: numbers sent over numbers of
    the model; reshape: how a convolution becomes a matrix, raw or permuted; layers: inner leaves out the first and the
    last weight, all compresses every weight; nearest: where the ratio cannot be reached, the smallest achievable one is
    taken."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, Decomposition(ratio, reshape, layers, nearest))
