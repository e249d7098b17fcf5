"""Streaming DiLoCo: DiLoCo that exchanges one fragment of the model at a time, while training goes on.

Douillard et al. 2025, arXiv:2501.18512.

Choose it when DiLoCo sends too much at once: after the first round an exchange has one fragment of the model, and
training goes on meanwhile. All clients must take part, and each keeps three vectors of the model's size.

    every round        K local steps of the inner rule on all of y_i, which is never reset
    its end            fragment f = (t - 1) mod F:  D_f <- mean of x_f - y_f;  u_f <- mu u_f + D_f
                       x_f <- x_f - outer_lr (D_f + mu u_f)
    the next round     after `overlap` steps:  y_f <- alpha y_f + (1 - alpha) x_f

A fragment is exchanged every H = K F steps. The evaluated model is x, whose fragments have been exchanged at different
times; nothing is merged after the last round. With one fragment, overlap = 0 and alpha = 0 it is DiLoCo. The default
code of four bits is the paper's; `compression: null` sends floats.

Departures:
- H follows from K and F, where the paper gives H.
- The paper leaves open which fragments have the embeddings and the last norm: here those of the first layer and of the
  last one.
- The scale of the four-bit floats is the largest magnitude of a tensor, which the paper does not say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .contract import Algorithm, Client, Deferred, Known, Local, Message, Oracle, Public, Round, RunContext, Server
from .fedavg import Plain
from .fedavgm import ServerMomentum
from .local import ClientState, LocalMethod, Rule
from .parts.checks import closed_fraction, fraction, positive, refuse
from .parts.coded import Coding, only_coded
from .parts.compression import Compression
from .parts.fragments import Fragments, LayerOrder, by_layers, by_patterns, fragment_numbers
from .parts.quantisers import E3m0
from .parts.rules import Clip, adamw
from .tree import Tree


class Outer(NamedTuple):
    """The public state: that of a `LocalMethod` without states to share, and the number of the round."""

    x: Tree
    number: Known  # (), int64, from 1
    shared: tuple[()] = ()
    carried: tuple[()] = ()


class Worker(NamedTuple):
    """What a client keeps."""

    y: Tree
    method: ClientState  # the rule's state


@dataclass(frozen=True)
class Streaming(LocalMethod):
    """The method. `fragments`: the names of their tensors; `overlap`: the local steps before a fragment is merged;
    `alpha`: the share of the client's own numbers in it."""

    fragments: Fragments = ()
    overlap: int = 1
    alpha: float = 0.5
    needs_all = "its clients keep models of their own, of which fragments are averaged in turns"
    stale = needs_all  # pyright: ignore[reportAssignmentType]
    not_private = needs_all

    def __post_init__(self) -> None:
        super().__post_init__()
        closed_fraction(alpha=self.alpha)

    def _in_fragment(self, number: Tensor | int, x: Tree) -> Tensor:
        """(P,) bool: what is exchanged at the end of the round with this number, (), from 1."""
        return fragment_numbers(self.fragments, x.layout, x.flat.device) == (number - 1) % len(self.fragments)

    # --- clients ------------------------------------------------------------------------------------------------------
    def sent_now(self, public: Public) -> Tensor:
        return self._in_fragment(public.number.value, public.x)

    def client_init(self, public: Public) -> Client:
        return Worker(public.x, super().client_init(public))

    def client_begin(self, public: Public, client: Client) -> Local:
        return super().client_begin(public, client.method)._replace(y=client.y)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        y, x, number = local.y, public.x, public.number.value
        merges = self._in_fragment(number - 1, x) & (number > 1) & (local.steps == self.overlap)
        merged = torch.where(merges, self.alpha * y.flat + (1 - self.alpha) * x.flat, y.flat)
        return super().client_step(public, client.method, local._replace(y=Tree(merged, y.layout)), oracle)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        moved = torch.where(self.sent_now(public), local.y.flat, public.x.flat)
        sent = local._replace(y=Tree(moved, local.y.layout))
        message, kept = super().client_finish(public, client.method, sent)
        return message, Worker(local.y, kept)

    # --- the server ---------------------------------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        return Server(Outer(x, Known(torch.ones((), dtype=torch.int64))), self.server.init(x))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        public: Outer = server.public
        exchanged = self._in_fragment(round.number, public.x)
        stepped = self.server.step(public.x, mean.delta, self.norm2(mean), server.private, round)
        x, u = pytree.tree_map(lambda new, old: torch.where(exchanged, new, old), stepped, (public.x, server.private))
        return Server(public._replace(x=x, number=Known(public.number.value + 1)), u)

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        """The fragment of the round before goes down, in round 1 the whole model, and that of the round goes up."""
        layout, count = public.x.layout, len(self.fragments)
        codes = message.delta.views() if isinstance(message.delta, Tree) else message.delta

        def bytes_of(tensors: Any, fragment: int) -> int:
            found = [each for name, each in zip(layout.names, tensors, strict=True) if name in self.fragments[fragment]]
            return sum(leaf.nbytes for leaf in pytree.tree_leaves(found))

        down = public.x.flat.nbytes if round == 1 else bytes_of(public.x.views(), (round - 2) % count)
        return down, bytes_of(codes, (round - 1) % count)


@dataclass(frozen=True)
class StreamingDiloco(Deferred):
    """The method before the model's tensors are known. The fields are the arguments of `streaming_diloco`."""

    rule: Rule
    server: ServerMomentum
    layers: int | None
    order: LayerOrder | None
    fragments: int | Fragments | None
    overlap: int
    alpha: float
    compression: Coding | None

    def build(self, context: RunContext) -> Algorithm:
        if context.layout is None:
            raise ValueError("streaming_diloco needs the model's shapes, got layout=None; give RunContext a layout")
        if context.steps is None and self.overlap:
            raise ValueError(
                f"overlap={self.overlap} needs federation.local.steps, got epochs: numbers of steps would differ; give "
                "steps, or overlap: 0"
            )
        if context.steps is not None and not self.overlap < context.steps:
            raise ValueError(
                f"overlap < local.steps must hold, got overlap={self.overlap}, steps={context.steps}; raise steps or "
                "lower overlap"
            )
        if isinstance(self.fragments, tuple):
            fragments = by_patterns(context.layout, self.fragments)
        else:
            fragments = by_layers(context.layout, self.layers or LAYERS, self.fragments, self.order or "strided")
        method = Streaming(self.rule, Plain(), self.server, "keep", fragments, self.overlap, self.alpha)
        return method if self.compression is None else self.compression.around(method, context.layout, context.seed)


LAYERS = 3
"""The layers of a fragment."""


def streaming_diloco(
    rule: Rule = Clip(adamw(4e-4, (0.9, 0.95), 1e-8, 0.1), 1.0),
    outer_lr: float = 0.7,
    outer_mu: float = 0.9,
    layers: int | None = None,
    order: LayerOrder | None = None,
    fragments: int | tuple[tuple[str, ...], ...] | None = None,
    overlap: int = 1,
    alpha: float = 0.5,
    compression: Compression | None = Coding(E3m0(), "none"),
) -> StreamingDiloco:
    """rule: the inner optimiser, whose state clients keep; outer_lr, outer_mu: of the outer Nesterov step; layers: of a
    fragment, 3 unless given; order: each F-th layer is in a fragment (strided, the default), or neighbours
    (sequential); fragments: their number F, or lists of patterns of the names of tensors; overlap: the local steps
    before a fragment that was exchanged is merged; alpha: the share of the client's own numbers in it; compression:
    only `coded`, four bits without memory unless given."""
    positive(outer_lr=outer_lr)
    fraction(outer_mu=outer_mu)
    if overlap < 0:
        raise ValueError(f"overlap >= 0 must hold, got overlap={overlap}")
    if layers is not None and layers < 1:
        raise ValueError(f"layers >= 1 must hold, got layers={layers}")
    if fragments is not None:
        refuse({"layers": layers}, "fragments says how many there are", "leave one of them out")
    if isinstance(fragments, tuple):
        refuse({"order": order}, "fragments says what is in each", "leave one of them out")
    server = ServerMomentum(outer_lr, outer_mu, nesterov=True)
    coding = only_coded(compression, "what clients send is masked, which other compressions do not know")
    return StreamingDiloco(rule, server, layers, order, fragments, overlap, alpha, coding)
