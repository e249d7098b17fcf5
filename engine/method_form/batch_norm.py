"""BatchNorm's running statistics (buffers) are kept outside of the method.

They are averaged with the clients' weights and enter no norm, momentum or control variate. The model of a workload with
buffers is one tree, the parameters first and the buffers last. The method sees only the parameters. `Buffered` handles
the buffers as a method on the contract, so blocks, stores, checkpoints and evaluations need no code for them:

    round start      b_i <- b
    each local step  b_i <- the statistics after the batch of the step's first gradient
    round end        b <- b + mean of (b_i - b)

Statistics are not variables of the optimisation, so the server rule does not apply to them. b is the average of what
the cohort's clients measured, whatever the server's step size, momentum or preconditioner is. This is also true if
clients that were not sampled count as not having moved (over = "all"). A model that is evaluated at the mean of the
last two iterates (evaluate = "last_two") has the newest b, because the clients measured it on their way from one of the
two iterates to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Around, Client, Local, Message, Oracle, Public, Round, Server, Viewer
from ...algorithms.tree import Layout, Tree


class WithBuffers(NamedTuple):
    """A public or local state of the method, and the buffers."""

    method: Any
    buffers: Tree


def buffers_in(public: Any) -> Tree | None:
    """The running statistics in a public state; None where no client receives any."""
    parts = pytree.tree_leaves(public, is_leaf=lambda part: isinstance(part, WithBuffers))
    return next((part.buffers for part in parts if isinstance(part, WithBuffers)), None)


def join_trees(first: Tree, last: Tree) -> Tree:
    """One tree with the leaves of `first`, then those of `last`."""
    layout = Layout(first.layout.names + last.layout.names, first.layout.shapes + last.layout.shapes)
    return Tree(torch.cat([first.flat, last.flat]), layout)


def split_tree(tree: Tree, count: int) -> tuple[Tree, Tree]:
    """The inverse: (the tree without its last `count` leaves, a tree of these leaves)."""
    names, shapes = tree.layout.names, tree.layout.shapes
    at = len(names) - count
    size = sum(tree.layout.sizes[:at])
    first, last = Layout(names[:at], shapes[:at]), Layout(names[at:], shapes[at:])
    return Tree(tree.flat[:size], first), Tree(tree.flat[size:], last)


class ParameterOracle:
    """The oracle that a method sees: gradients of the parameters only.

    `moved` holds the buffers after each call.
    """

    key: Tensor
    done: Tensor
    examples: Tensor

    def __init__(self, oracle: Oracle, buffers: Tree) -> None:
        self.oracle, self.buffers = oracle, buffers
        self.moved: list[Tree] = []

    def __call__(self, y: Tree, /) -> Tree:
        gradient, move = split_tree(self.oracle(join_trees(y, self.buffers)), len(self.buffers.layout.names))
        self.moved.append(self.buffers - move)
        return gradient

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)


@dataclass(frozen=True)
class Buffered(Around):
    """`method` on models whose last `count` tensors are buffers."""

    method: Algorithm
    count: int

    def origin(self, public: Public) -> Tree:
        return join_trees(self.method.origin(public.method), public.buffers)

    def server_init(self, x: Tree) -> Server:
        parameters, buffers = split_tree(x, self.count)
        server = self.method.server_init(parameters)
        return server._replace(public=WithBuffers(server.public, buffers))

    def broadcast(self, server: Server) -> Public:
        return WithBuffers(self.method.broadcast(self._method_server(server)), server.public.buffers)

    def unpack(self, public: Public) -> Any:
        return public._replace(method=self.method.unpack(public.method))

    def held(self, public: Public) -> Mapping[str, Tensor]:
        return self.method.held(public.method)

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(public.method)

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        return tuple(join_trees(x, public.buffers) for x in self.method.looks(public.method, client))

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        return public._replace(method=self.method.view(public.method, viewer, losses))

    def client_begin(self, public: Public, client: Client) -> Local:
        return WithBuffers(self.method.client_begin(public.method, client), public.buffers)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        parameter_oracle = ParameterOracle(oracle, local.buffers)
        after = self.method.client_step(public.method, client, local.method, parameter_oracle)
        return WithBuffers(after, parameter_oracle.moved[0])

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, client = self.method.client_finish(public.method, client, local.method)
        moved = local.buffers - public.buffers
        return message._replace(delta=self._join_delta(message.delta, moved)), client

    def decode(self, public: Public, message: Message) -> Message:
        delta, moved = self._split_delta(message.delta)
        decoded = self.method.decode(public.method, message._replace(delta=delta))
        return decoded._replace(delta=self._join_delta(decoded.delta, moved))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        delta, moved = self._split_delta(mean.delta)
        after = self.method.server_update(self._method_server(server), mean._replace(delta=delta), round)
        return after._replace(public=WithBuffers(after.public, server.public.buffers + moved))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        mean = mean._replace(delta=self._split_delta(mean.delta)[0])
        return self.method.server_metrics(self._method_server(server), mean, round)

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        delta = self._split_delta(message.delta)[0]
        return self.method.traffic(round, public.method, message._replace(delta=delta), client)

    def model(self, server: Server) -> Tree:
        return join_trees(self.method.model(self._method_server(server)), server.public.buffers)

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        parameters, buffers = split_tree(x, self.count)
        return join_trees(self.method.client_model(parameters, public.method, client), buffers)

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        return self.method.own_part(split_tree(x, self.count)[0], public.method, client)

    def client_facts(self, public: Public, client: Client) -> dict[str, Tensor]:
        return self.method.client_facts(public.method, client)

    @property
    def warm_start(self) -> Algorithm | None:
        warm_start = self.method.warm_start
        return None if warm_start is None else Buffered(warm_start, self.count)

    def _join_delta(self, delta: Any, moved: Tree) -> Any:
        """The method's delta with the change of the buffers. The delta may be a tree, encoded, or () for none."""
        return join_trees(delta, moved) if isinstance(delta, Tree) else WithBuffers(delta, moved)

    def _split_delta(self, delta: Any) -> tuple[Any, Tree]:
        """The inverse: (the method's delta, the change of the buffers)."""
        return split_tree(delta, self.count) if isinstance(delta, Tree) else (delta.method, delta.buffers)

    def _method_server(self, server: Server) -> Server:
        """The server's state as the method knows it."""
        return server._replace(public=server.public.method)
