"""A bound on what one client sends, as a wrapper of any method.

    joint     v_i = (a_0 delta_i, a_1 s_i1, ...), one vector of all groups;  every leaf <- min(1, C / |v_i|) leaf
    shares    each group g by itself to C_g = C w_g / |w|

The groups are `delta` and each field of `sent` and of `averaged` that holds tensors. A message is bounded as it would
be added up: after `decode`. It keeps its bits if it is within the bound, and becomes zeros if it is not finite, because
otherwise one client could end the run, which would be a release. What clients keep is not bounded: it reaches others
through bounded messages only.

With a quantile (Andrew et al. 2021) the bound is in the server's public state, and each client also sends whether its
message was within the bound, minus one half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..contract import (
    Adaptation,
    Algorithm,
    Client,
    Local,
    LocalNorms,
    LocalSteps,
    Message,
    Oracle,
    Public,
    Round,
    Server,
    Viewer,
)
from ..tree import Tree

Factors = tuple[tuple[str, float], ...]
"""A number for each of some groups, by name."""
LARGEST = 2.0**100
"""A message whose norm is larger than the bound times this becomes zeros: a factor below would lose its precision."""


class WithBound(NamedTuple):
    """A method's public state, and the bound C."""

    method: Any
    bound: Tensor  # ()


class WithCount(NamedTuple):
    """What a method sends, and one number for the quantile: of a client 1/2 if its message was within the bound, else
    -1/2; in the mean message the server's next bound."""

    sent: Any
    within: Tensor  # ()


def group_names(message: Message) -> list[str]:
    """The group of each leaf of (delta, sent, averaged), without the count for the quantile."""
    names = ["delta"] * len(pytree.tree_leaves(message.delta))
    for part in ("sent", "averaged"):
        value = getattr(message, part)
        value = value.sent if isinstance(value, WithCount) else value
        fields = value._asdict() if hasattr(value, "_asdict") else {part: value}
        names += [field for field, inner in fields.items() for _ in pytree.tree_leaves(inner)]
    return names


@dataclass(frozen=True)
class Clipped(Algorithm):
    """`method` whose messages have at most the norm `bound`.

    `adaptive`: the bound is in the public state, and `bound` is the first one. `scales`: a_g of groups, 1 where there
    is none. `shares`: w_g of all groups, or () for joint clipping.
    """

    method: Algorithm
    bound: float
    adaptive: bool = False
    scales: Factors = ()
    shares: Factors = ()

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.weighted

    @property
    def own_models(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.own_models

    @property
    def shares_model(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.shares_model

    @property
    def own_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.own_view

    @property
    def adaptation(self) -> Adaptation | None:
        return self.method.adaptation

    # --- the method's functions -------------------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        server = self.method.server_init(x)
        if not self.adaptive:
            return server
        return server._replace(public=WithBound(server.public, x.flat.new_tensor(self.bound)))

    def broadcast(self, server: Server) -> Public:
        public = self.method.broadcast(self._server_of_method(server))
        return WithBound(public, server.public.bound) if self.adaptive else public

    def unpack(self, public: Public) -> Any:
        if not self.adaptive:
            return self.method.unpack(public)
        return public._replace(method=self.method.unpack(public.method))

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        return self.method.looks(self._public_of_method(public), client)

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        seen = self.method.view(self._public_of_method(public), viewer, losses)
        return public._replace(method=seen) if self.adaptive else seen

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(self._public_of_method(public))

    def client_begin(self, public: Public, client: Client) -> Local:
        return self.method.client_begin(self._public_of_method(public), client)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return self.method.client_step(self._public_of_method(public), client, local, oracle)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        return self.method.client_steps(self._public_of_method(public), client, local, steps)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, client = self.method.client_finish(self._public_of_method(public), client, local)
        if self.adaptive:
            message = message._replace(sent=WithCount(message.sent, torch.zeros_like(public.bound)))
        return message, client

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        after = self.method.server_update(self._server_of_method(server), self._mean_of_method(mean), round)
        return after._replace(public=WithBound(after.public, mean.sent.within)) if self.adaptive else after

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._server_of_method(server), self._mean_of_method(mean), round)

    def model(self, server: Server) -> Tree:
        return self.method.model(self._server_of_method(server))

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return self.method.client_model(x, self._public_of_method(public), client)

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        return self.method.own_part(x, self._public_of_method(public), client)

    def client_facts(self, public: Public, client: Client) -> dict[str, Tensor]:
        return self.method.client_facts(self._public_of_method(public), client)

    def local_norms(self, most: int) -> LocalNorms | None:
        return self.method.local_norms(most)

    @property
    def warm_start(self) -> Algorithm | None:
        return self.method.warm_start

    def _public_of_method(self, public: Any) -> Any:
        return public.method if self.adaptive else public

    def _server_of_method(self, server: Server) -> Server:
        return server._replace(public=server.public.method) if self.adaptive else server

    def _mean_of_method(self, mean: Message) -> Message:
        """The mean message as the method sees it. Facts are not bounded, so that no server rule may use them."""
        facts = {name: torch.full((), torch.nan) for name in mean.facts}
        return mean._replace(sent=mean.sent.sent if self.adaptive else mean.sent, facts=facts)

    # --- the bound --------------------------------------------------------------------------------------------------
    def decode(self, public: Public, message: Message) -> Message:
        if self.adaptive:
            message = message._replace(sent=message.sent.sent)
        decoded = self.method.decode(self._public_of_method(public), message)
        leaves, spec = pytree.tree_flatten((decoded.delta, decoded.sent, decoded.averaged))
        bound = public.bound if self.adaptive else self.bound
        leaves, within, finite = self._bounded(leaves, group_names(decoded), bound)
        delta, sent, averaged = pytree.tree_unflatten(leaves, spec)
        facts = {**decoded.facts, "clipped": (finite & ~within).double(), "nonfinite": (~finite).double()}
        if self.adaptive:
            sent = WithCount(sent, torch.where(within, 0.5, -0.5).to(public.bound.dtype))
        return Message(delta, sent, facts, averaged)

    def _bounded(self, leaves: list[Tensor], names: list[str], bound: Any) -> tuple[list[Tensor], Tensor, Tensor]:
        """(the bounded leaves; whether the message was within the bound, (); whether it was finite and not far larger
        than the bound, ())."""
        scales, shares = dict(self.scales), dict(self.shares)
        whole = sum(share**2 for share in shares.values()) ** 0.5
        groups = dict.fromkeys(names) if shares else {"": None}
        found, within, finite = {}, [], []
        for group in groups:
            members = [i for i, name in enumerate(names) if group in ("", name)]
            factors = [scales.get(names[i], 1.0) for i in members]
            norm = joint_norm([leaves[i] for i in members], factors)
            limit = bound * (shares[group] / whole) if shares else bound
            kept, usable, factor = shrinkage(norm, limit, leaves[0].dtype)
            for i in members:
                scaled = torch.where(usable, leaves[i] * factor.to(leaves[i].dtype), 0)
                found[i] = torch.where(kept, leaves[i], scaled)
            within.append(kept)
            finite.append(usable)
        ok = torch.stack(finite).all()
        bounded = [torch.where(ok, found[i], 0) for i in range(len(leaves))]  # one group that is broken, all zeros
        return bounded, torch.stack(within).all(), ok


def joint_norm(leaves: list[Tensor], factors: list[float]) -> Tensor:
    """(), float64: the norm of all leaves as one vector, each multiplied by its factor."""
    norms = [torch.linalg.vector_norm(leaf.reshape(-1), dtype=torch.float64) for leaf in leaves]
    return torch.linalg.vector_norm(torch.stack([n * f for n, f in zip(norms, factors, strict=True)]))


def shrinkage(norm: Tensor, bound: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(whether a message of this norm keeps its bits, whether it is kept or shrinks, its factor), all ().

    C / norm alone may overshoot, by the rounding of the factor and of the products; 2^-22 below it, the norm of a
    float32 message is at most C, always.
    """
    finite = torch.isfinite(norm)
    kept = finite & (norm <= bound)
    usable = finite & (norm <= LARGEST * bound)
    below = 1 - (2.0**-50 if dtype == torch.float64 else 2.0**-22)
    return kept, usable, torch.where(kept, 1.0, bound / torch.where(norm > 0, norm, 1.0) * below)
