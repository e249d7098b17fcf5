"""Running statistics beside a method: averaged with the clients' weights, in no norm, momentum or control variate.

The model of a workload with buffers is one tree, parameters first. A method sees the parameters alone; what is done
with the rest is here, on the contract, so that blocks, stores, checkpoints and evaluations know of it without a word:

    x -> b_i <- b;  each step: b_i <- what the batch of its first gradient makes of it;  b <- b + mean of b_i - b

Statistics are no variables of the optimisation, so that what a server's rule does with the weights is not done with
them. Whatever its step size, momentum or preconditioner is, and also where clients that were not sampled count as not
having moved (over = "all"), b is the average of what the cohort's clients measured. A model that is evaluated at the
mean of the last two iterates (evaluate = "last_two") has the newest b: the clients measured it on their way from one of
the two iterates towards the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algorithms.contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from ...algorithms.tree import Layout, Tree


class WithBuffers(NamedTuple):
    """A public or local state of the method's, and the buffers."""

    method: Any
    buffers: Tree


def joined(first: Tree, last: Tree) -> Tree:
    layout = Layout(first.layout.names + last.layout.names, first.layout.shapes + last.layout.shapes)
    return Tree(torch.cat([first.flat, last.flat]), layout)


def parted(whole: Tree, last: int) -> tuple[Tree, Tree]:
    """The leaves but for the `last` ones, and those."""
    names, shapes = whole.layout.names, whole.layout.shapes
    at = len(names) - last
    size = sum(whole.layout.sizes[:at])
    first, rest = Layout(names[:at], shapes[:at]), Layout(names[at:], shapes[at:])
    return Tree(whole.flat[:size], first), Tree(whole.flat[size:], rest)


class Own:
    """The oracle as the method knows it; `moved`: what each call makes of the buffers."""

    key: Tensor
    done: Tensor
    examples: Tensor

    def __init__(self, oracle: Oracle, buffers: Tree) -> None:
        self.oracle, self.buffers = oracle, buffers
        self.moved: list[Tree] = []

    def __call__(self, y: Tree, /) -> Tree:
        gradient, move = parted(self.oracle(joined(y, self.buffers)), len(self.buffers.layout.names))
        self.moved.append(self.buffers - move)
        return gradient

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)


@dataclass(frozen=True)
class Buffered(Algorithm):
    """`method` on models whose `count` last tensors are buffers."""

    method: Algorithm
    count: int

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.weighted

    def server_init(self, x: Tree) -> Server:
        own, buffers = parted(x, self.count)
        server = self.method.server_init(own)
        return server._replace(public=WithBuffers(server.public, buffers))

    def broadcast(self, server: Server) -> Public:
        return WithBuffers(self.method.broadcast(self._own(server)), server.public.buffers)

    def unpack(self, public: Public) -> Any:
        return public._replace(method=self.method.unpack(public.method))

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(public.method)

    def client_begin(self, public: Public, client: Client) -> Local:
        return WithBuffers(self.method.client_begin(public.method, client), public.buffers)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        own = Own(oracle, local.buffers)
        after = self.method.client_step(public.method, client, local.method, own)
        return WithBuffers(after, own.moved[0])

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, client = self.method.client_finish(public.method, client, local.method)
        moved = local.buffers - public.buffers
        return message._replace(delta=self._with(message.delta, moved)), client

    def decode(self, public: Public, message: Message) -> Message:
        delta, moved = self._apart(message.delta)
        decoded = self.method.decode(public.method, message._replace(delta=delta))
        return decoded._replace(delta=self._with(decoded.delta, moved))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        delta, moved = self._apart(mean.delta)
        after = self.method.server_update(self._own(server), mean._replace(delta=delta), round)
        return after._replace(public=WithBuffers(after.public, server.public.buffers + moved))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._own(server), mean._replace(delta=self._apart(mean.delta)[0]), round)

    def model(self, server: Server) -> Tree:
        return joined(self.method.model(self._own(server)), server.public.buffers)

    @property
    def warm_start(self) -> Algorithm | None:
        warm_start = self.method.warm_start
        return None if warm_start is None else Buffered(warm_start, self.count)

    def _with(self, delta: Any, moved: Tree) -> Any:
        """A delta of the method's and the buffers' change; the delta may be encoded, or () where there is none."""
        return joined(delta, moved) if isinstance(delta, Tree) else WithBuffers(delta, moved)

    def _apart(self, delta: Any) -> tuple[Any, Tree]:
        """The inverse."""
        return parted(delta, self.count) if isinstance(delta, Tree) else (delta.method, delta.buffers)

    def _own(self, server: Server) -> Server:
        return server._replace(public=server.public.method)
