"""FedBAT: clients learn to send one bit per weight.

Li, Xu, Wang, Tang, Qi, Xu, Luo, Li, He, Li, ICML 2024 ("FedBAT: Communication-Efficient Federated Learning via
Learnable Binarization"), and the authors' code.

Choose it when clients may send about one bit per weight. The server sends the whole model unless `both_ways` is set.

Per compressed weight, with u = y - x the update and b = +1 or -1, drawn anew at every step:

    the first share phi of the local steps   G = gradient at x + u;  y <- step(y, G)
    then alpha0 = mean |u|, theta = 0, and   G = gradient at x + B,  B = alpha b
        b = 1 with probability clip((1 + u / alpha) / 2, 0, 1),  alpha = clip(alpha0 e^(rho theta), lo, hi)
        du = G where |u| <= alpha, else 0
        dalpha = sum G (sign(u) where |u| > alpha, else b - u / alpha);  dtheta = rho alpha dalpha, 0 where clipped
    up       the bits of a last B(u, alpha), and alpha;  x <- x + server's step on the mean of B
    down     x, as it is;  or both_ways: Q(x - x_hat) = B(., mean |.|), as Li et al. 2025 (FedMUD) compare it

lo and hi are the code's 5e-4 and 5e-2. The rule sees y, so that weight decay is that of y.

phi = 0 binarises from the first step on, where u = 0. Then alpha0 = mean |u| = 0, alpha is clipped to lo, and theta,
whose gradient is 0 at a bound, stays 0. So clients learn no scale, whatever rho is, and send + or - 5e-4.

On CNN4 for FashionMNIST, one bit per weight and everything else in full make 0.041 of the model's bytes; FedMUD at 1/32
sends 0.030 of them in each direction. Clients always send this much, and with both_ways the server does too; without
both_ways it sends the whole model. `fedfleet show` prints both fractions.

Departures:
- The first and the last weight, and vectors, are sent in full; layers = "all" binarises all weights, as the paper does.
- alpha0 starts anew every round, and where no step was binarised (phi = 1) it is mean |u| at the end; the code sends
  with a scale left over from an earlier round.
- both_ways is a reconstruction, and feedback = true, which sends later what it loses, is ours.
- The weights of the mean are the federation's; the code's are numbers of minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..workloads import counted
from .contract import Algorithm, Client, Known, Local, Message, Oracle, Round, Server
from .fedavg import Plain
from .local import LocalMethod, PublicState, Rule, with_decoded_norm2
from .parts.checks import closed_fraction, nonnegative, refuse
from .parts.codecs import Bits, Signs, pack, signs
from .parts.compression import Compressed, Compression
from .parts.downlink import Change, Downlink, Halves
from .parts.matrices import Layers, Weight, compressible
from .parts.reparameterisation import Compressing, Report, refuse_states
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Layout, Tree

THETA = "binarisation"
"""The name of theta, (L,), among the tensors that the local rule sees."""


class Broadcast(NamedTuple):
    change: Change
    known: Known  # the compressed half of x_hat before the change, where the server's change is binarised


class Private(NamedTuple):
    x: Tree
    rule: Any  # the server rule's state


class LocalState(NamedTuple):
    y: Tree  # with theta
    rule: Any  # the rule's state
    alpha0: Tensor  # (L,), one number per compressed weight
    begun: Tensor  # (), bool: whether weights are binarised already
    key: Tensor  # of the last step


class Upload(NamedTuple):
    codes: tuple[Bits, ...]  # one per compressed weight
    rest: Tensor  # the half of y_K - x that is not compressed


@dataclass(frozen=True)
class FedBat(Compressing):
    """`method`: gives the local rule and the server rule; `bounds`: lo and hi. Clients see x_hat as the public
    state."""

    method: LocalMethod
    down: Downlink
    weights: tuple[Weight, ...]
    phi: float = 0.5
    rho: float = 6.0
    bounds: tuple[float, float] = (5e-4, 5e-2)

    @property
    def halves(self) -> Halves:
        return self.down.halves

    def server_init(self, x: Tree) -> Server:
        inner = self.method.server_init(x)
        return Server(Broadcast(*self.down.first(x)), Private(x, inner.private))

    def unpack(self, public: Broadcast) -> Tree:
        return self.down.follow(public.change, public.known)

    def client_init(self, public: Tree) -> Client:
        return ()

    def client_begin(self, public: Tree, client: Client) -> Local:
        none = public.flat.new_zeros(len(self.halves.sizes))
        y = Tree.of({**dict(public.items()), THETA: none})
        begun = torch.zeros((), dtype=torch.bool, device=none.device)
        return LocalState(y, self.method.rule.init(y), none, begun, torch.zeros_like(begun, dtype=torch.int64))

    def spread(self, alpha: Tensor) -> Tensor:
        """(L,) -> (c,): each weight's number, repeated for all of its entries."""
        return torch.cat([a.expand(n) for a, n in zip(alpha.unbind(), self.halves.sizes, strict=True)])

    def means(self, u: Tensor) -> Tensor:
        """(L,) mean magnitudes of u (c,), weight by weight."""
        return torch.stack([part.abs().mean() for part in u.split(self.halves.sizes)])

    def raw(self, alpha0: Tensor, theta: Tensor) -> Tensor:
        """alpha before it is clipped, (L,)."""
        return alpha0 * torch.exp(self.rho * theta)

    def client_step(self, public: Tree, client: Client, local: LocalState, oracle: Oracle) -> Local:
        y = local.y.pick(public)
        (held, _), (moved, rest) = self.halves.split(public), self.halves.split(y)
        u, theta = moved - held, local.y[THETA]
        begun = local.begun | (oracle.done >= self.phi)
        alpha0 = torch.where(begun & ~local.begun, self.means(u), local.alpha0)
        raw = self.raw(alpha0, theta)
        alpha = raw.clamp(*self.bounds)
        wide = self.spread(alpha)
        b = 2 * signs(u, wide, counted.key(oracle.key, "binarise")).to(u.dtype) - 1
        g = oracle(self.halves.join(torch.where(begun, held + wide * b, moved), rest))
        inside, others = self.halves.split(g)
        small = u.abs() <= wide
        slope = inside * torch.where(small, b - u / wide, u.sign())
        dalpha = torch.stack([part.sum() for part in slope.split(self.halves.sizes)])
        free = begun & (raw > self.bounds[0]) & (raw < self.bounds[1])
        dtheta = torch.where(free, self.rho * alpha * dalpha, 0.0)
        du = torch.where(begun & ~small, 0.0, inside)
        v = Tree.of({**dict(self.halves.join(du, others).items()), THETA: dtheta})
        y, rule = self.method.rule.step(local.y, v, local.rule)
        return LocalState(y, rule, alpha0, begun, oracle.key)

    def client_finish(self, public: Tree, client: Client, local: LocalState) -> tuple[Message, Client]:
        delta = local.y.pick(public) - public
        u, rest = self.halves.split(delta)
        alpha = torch.where(local.begun, self.raw(local.alpha0, local.y[THETA]), self.means(u)).clamp(*self.bounds)
        drawn = signs(u, self.spread(alpha), counted.key(local.key, "up")).split(self.halves.sizes)
        codes = tuple(Bits(pack(bits), a) for bits, a in zip(drawn, alpha.unbind(), strict=True))
        norm2 = delta.norm2()
        compared = norm2 if self.method.server.uses_norm2 else ()
        return Message(Upload(codes, rest), (), {"norm2": norm2}, norm2=compared), client

    def decode(self, public: Tree, message: Message) -> Message:
        codes, rest = message.delta.codes, message.delta.rest
        return with_decoded_norm2(message._replace(delta=self.halves.join(self.halves.decode(Signs(), codes), rest)))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        held: Private = server.private
        x, rule = self.method.server.step(held.x, mean.delta, self.method.norm2(mean), held.rule, round)
        change, known, x = self.down.next(x, self.unpack(server.public), round.number + 1)
        return Server(Broadcast(change, known), Private(x, rule))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        held: Private = server.private
        return self.method.server_metrics(Server(PublicState(held.x, (), ()), held.rule), mean, round)

    def model(self, server: Server) -> Tree:
        return self.method.server.model(self.unpack(server.public), server.private.rule)

    @property
    def report(self) -> Report:
        return self.halves.report(Signs(), self.weights)


@dataclass(frozen=True)
class Binarisation(Compression):
    """one bit per weight, with scales that clients learn, up or both ways, as in FedBAT"""

    phi: float = 0.5
    rho: float | None = None
    both_ways: bool = False
    feedback: bool = False
    layers: Layers = "inner"

    def __post_init__(self) -> None:
        closed_fraction(phi=self.phi)
        nonnegative(rho=self.rho or 0.0)
        if self.phi in (0, 1):
            refuse({"rho": self.rho}, f"with phi={self.phi:g} no scale is learned", "leave it out, or give 0 < phi < 1")
        if not self.both_ways:
            given = {"feedback": self.feedback or None}
            refuse(given, "the whole model is sent down", "leave it out, or give both_ways: true")

    def around(self, method: LocalMethod, layout: Layout, seed: int) -> Algorithm:
        refuse_states(method, "only x is binarised; choose fedavg, carry: reset, local: plain")
        if not isinstance(method.estimator, Plain):
            raise ValueError("binarisation works with plain gradients alone; choose fedavg, or local: plain")
        weights = tuple(compressible(layout, self.layers))
        halves = Halves(layout, tuple(w.name for w in weights), whole=False)
        down = Downlink(halves, Signs() if self.both_ways else None, self.feedback, seed)
        return FedBat(method, down, weights, self.phi, 6.0 if self.rho is None else self.rho)


def fedbat(
    rule: Rule = Sgd(0.1),
    phi: float = 0.5,
    rho: float | None = None,
    both_ways: bool = False,
    feedback: bool = False,
    layers: Layers = "inner",
    server_lr: float = 1.0,
) -> Compressed:
    """rule: the local optimiser; phi: fraction of the local steps before weights are binarised, at 0 and at 1 no scale
    is learned; rho: how fast scales are learned, 6 unless given, 0 freezes them; both_ways: the server's change is
    binarised too; feedback: with both_ways, what the binarisation of the server's change loses is sent later; layers:
    inner leaves out the first and the last weight, all binarises every weight."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, Binarisation(phi, rho, both_ways, feedback, layers))
