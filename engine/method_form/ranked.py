"""Adapters whose clients have different ranks, for a method of local steps.

All clients' factors have the rows and columns of the largest rank r. Client i, of rank r_i, trains the first r_i of
them, and all others are 0:

    round start      A_i, B_i <- the first r_i rows of A and columns of B; 0 elsewhere
    each local step  gradients of the model W + s_i B_i A_i, 0 in the rows and columns from r_i on
    round end        the message is y_i - x, where x has all rows and columns

so that a mean of factors is that of factors padded with 0. The network computes with the scale s of the largest rank.
W + s_i B A = W + s ((s_i / s) B) A: gradients are taken at (s_i / s) B, and that of this product times s_i / s is that
of B. Rules of local steps keep 0 where x and gradients are 0: no step needs a mask. A frozen A has rows of its own, for
which the gradient of B would not be 0; therefore gradients are cut, too.

A message has the size of r_i, and so has the broadcast: what is 0 by its place is not sent.

Wang et al. 2024, arXiv:2409.05976 (FLoRA, section on heterogeneous ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import (
    Algorithm,
    Around,
    Client,
    Known,
    Local,
    Message,
    Oracle,
    Public,
    Round,
    Server,
    Viewer,
)
from ...algorithms.local import LocalMethod
from ...algorithms.tree import Layout, Tree
from ...workloads.pair import Pair, Ranks
from .batch_norm import Buffered, buffers_in
from .personal import Personal
from .scheduled import Scheduled
from .state_spec import byte_count, without_known


class Seen(NamedTuple):
    """What one client makes of the broadcast. Only `whole` is of the size of a model that clients share."""

    whole: Any  # the method's public state
    rank: Tensor  # (), int64: r_i
    ratio: Tensor  # (), float64: s_i / s


@dataclass(frozen=True)
class Places:
    """Where the numbers of factors are. `a`, `b`: the names of the factors A and B."""

    a: frozenset[str]
    b: frozenset[str]

    @staticmethod
    def of(pairs: Iterable[Pair]) -> Places:
        pairs = tuple(pairs)
        return Places(frozenset(pair.a for pair in pairs), frozenset(pair.b for pair in pairs))

    def rows(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """(numbers of the tensor,): the row of A or the column of B that each of them belongs to; 0 for others."""
        found = torch.zeros(shape, dtype=torch.int64)
        if name in self.a:
            found += torch.arange(shape[0]).view(-1, *(1,) * (len(shape) - 1))
        elif name in self.b:
            found += torch.arange(shape[1]).view(-1, *(1,) * (len(shape) - 2))
        return found.view(-1)


@lru_cache(64)
def rows_of(layout: Layout, places: Places, device: torch.device) -> Tensor:
    """(P,) int64: `Places.rows` of all tensors of a layout. It is made once, as a device would wait for each copy."""
    rows = [places.rows(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True)]
    return torch.cat(rows).to(device)


@lru_cache(64)
def in_b(layout: Layout, places: Places, device: torch.device) -> Tensor:
    """(P,) bool: which numbers are of a factor B."""
    sides = [torch.full((size,), name in places.b) for name, size in zip(layout.names, layout.sizes, strict=True)]
    return torch.cat(sides).to(device)


@lru_cache(256)
def numbers_beyond(layout: Layout, places: Places, rank: int) -> int:
    """How many numbers of the factors of a layout are beyond a rank."""
    return int((rows_of(layout, places, torch.device("cpu")) >= rank).sum())


class RankOracle:
    """The oracle that the method sees: gradients at the model of a client's own rank and scale."""

    key: Tensor
    done: Tensor
    examples: Tensor

    def __init__(self, oracle: Oracle, around: Ranked, seen: Seen) -> None:
        self.oracle, self.around, self.seen = oracle, around, seen

    def __call__(self, y: Tree, /) -> Tree:
        gradient = self.oracle(self.around.scaled(y, self.seen))
        return self.around.cut(self.around.scaled(gradient, self.seen), self.seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)


@dataclass(frozen=True)
class Ranked(Around):
    """`method` for clients of different ranks, see the module. `places`: the factors of the model."""

    method: Algorithm
    ranks: Ranks
    places: Places
    own_view = True  # pyright: ignore[reportAssignmentType]
    own_traffic = True  # pyright: ignore[reportAssignmentType]

    @property
    def not_private(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.not_private or (
            "messages have minus the server's factors in the rows and columns that a client of a smaller rank lacks, "
            "and the bound would be of these"
        )

    def cut(self, state: Any, seen: Seen) -> Any:
        """A state of which all trees have 0 in the rows and columns from r_i on. What is `Known` has no factors, and
        stays the one that clients share."""

        def of_tree(part: Any) -> Any:
            if not isinstance(part, Tree):
                return part
            rows = rows_of(part.layout, self.places, part.flat.device)
            return Tree(torch.where(rows < seen.rank, part.flat, 0.0), part.layout)

        return pytree.tree_map(of_tree, state, is_leaf=lambda part: isinstance(part, Tree | Known))

    def scaled(self, tree: Tree, seen: Seen) -> Tree:
        """The tree with (s_i / s) B in the place of B."""
        if len({*self.ranks.scales}) == 1:
            return tree
        factor = torch.where(in_b(tree.layout, self.places, tree.flat.device), seen.ratio, 1.0).to(tree.flat)
        return Tree(tree.flat * factor, tree.layout)

    # --- what clients make of the broadcast ---------------------------------------------------------------------------
    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        return ()

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Seen:
        whole = self.method.view(public, viewer, losses) if self.method.own_view else public
        return Seen(whole, *self.ranks.of(viewer.number))

    def origin(self, public: Any) -> Tree:
        return self.method.origin(public.whole if isinstance(public, Seen) else public)

    def held(self, public: Public) -> Mapping[str, Tensor]:
        return self.method.held(public.whole if isinstance(public, Seen) else public)

    # --- clients ------------------------------------------------------------------------------------------------------
    def client_begin(self, public: Seen, client: Client) -> Local:
        return self.method.client_begin(self.cut(public.whole, public), self.cut(client, public))

    def client_step(self, public: Seen, client: Client, local: Local, oracle: Oracle) -> Local:
        own = RankOracle(oracle, self, public)
        return self.method.client_step(self.cut(public.whole, public), self.cut(client, public), local, own)

    def client_finish(self, public: Seen, client: Client, local: Local) -> tuple[Message, Client]:
        """The message is a change of the whole x. The fact `rank` is r_i."""
        message, kept = self.method.client_finish(public.whole, self.cut(client, public), local)
        return message._replace(facts={**message.facts, "rank": public.rank.to(torch.float64)}), kept

    def decode(self, public: Seen, message: Message) -> Message:
        return self.method.decode(public.whole, message)

    def client_model(self, x: Tree, public: Seen, client: Client) -> Tree:
        """The model of the client's rank, as the network computes it with the scale of the largest rank."""
        whole = self.method.client_model(x, public.whole, self.cut(client, public))
        return self.scaled(self.cut(whole, public), public)

    def own_part(self, x: Tree, public: Seen, client: Client) -> Tree:
        own = self.method.own_part(x, public.whole, self.cut(client, public))
        return self.scaled(self.cut(own, public), public)

    def client_facts(self, public: Seen, client: Client) -> dict[str, Tensor]:
        return self.method.client_facts(public.whole, client)

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        rank, counted = self.ranks.rank(client), self.method.traffic(round, public, message, client)
        sent = (without_known(public), (message.delta, message.sent, message.averaged, message.norm2))
        buffers = buffers_in(public)
        apart = 0 if buffers is None else byte_count(buffers)  # they are counted by themselves
        down, up = (byte_count(state) - self._beyond(state, rank) - apart for state in sent)
        return down if counted[0] is None else counted[0], up if counted[1] is None else counted[1]

    def _beyond(self, state: Any, rank: int) -> int:
        """The bytes of a state that are 0 by their place for a client of this rank."""
        trees = pytree.tree_leaves(state, is_leaf=lambda part: isinstance(part, Tree))
        return sum(
            numbers_beyond(tree.layout, self.places, rank) * tree.flat.element_size()
            for tree in trees
            if isinstance(tree, Tree)
        )

    # --- the method's own ---------------------------------------------------------------------------------------------
    def broadcast(self, server: Server) -> Public:
        return self.method.broadcast(server)

    def unpack(self, public: Public) -> Any:
        return self.method.unpack(public)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(server, mean, round)


def why_not(method: Algorithm, x: Tree) -> str:
    """Why a method does not go with different ranks, "" if it does. x: the model that it sees."""
    while isinstance(method, Buffered | Scheduled | Personal):
        method = method.method
    if method.moves_weights:
        return ""
    if type(method) is not LocalMethod:
        return "its clients do more than local steps from the server's model"
    if method.warm_start is not None or pytree.tree_leaves((method.estimator.own_init(x),)):
        return "its clients keep something that was made with other ranks"
    return ""
