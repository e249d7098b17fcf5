"""The shapes of what a method keeps and sends, found by asking it: from them follow rows, bytes and messages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Known, Message, Server
from ...algorithms.tree import Tree
from .batch_norm import WithBuffers


class StateSpec:
    """A method's states on a given model. Only structure, shapes and dtypes of the samples mean anything."""

    def __init__(self, algorithm: Algorithm, x: Tree) -> None:
        self.whole = size(x)
        with torch.no_grad():
            self.server: Server = algorithm.server_init(x)
            self.public: Any = algorithm.broadcast(self.server)
            public = algorithm.unpack(self.public)
            self.client: Any = algorithm.client_init(public)
            local = algorithm.client_begin(public, self.client)
            self.sent: Message = algorithm.client_finish(public, self.client, local)[0]
            self.message: Message = algorithm.decode(public, self.sent)
        self.public_spec = pytree.tree_structure(self.public)
        self.client_spec = pytree.tree_structure(self.client)
        self.message_spec = pytree.tree_structure(self.message)
        self.weighted = [
            part in ("delta", "averaged")
            for part in Message._fields
            for _ in pytree.tree_leaves(getattr(self.message, part))
        ]
        """Which of the message's leaves are averaged with the federation's client weights; the others uniformly."""

    @property
    def down(self) -> int:
        """Bytes that one client receives a round, buffers not counted."""
        return size(wire(self.public)) - self.buffers

    @property
    def up(self) -> int:
        """Bytes that one client sends a round, buffers not counted."""
        return size((self.sent.delta, self.sent.sent, self.sent.averaged)) - self.buffers

    @property
    def model(self) -> int:
        """Bytes of the model, buffers not counted."""
        return self.whole - self.buffers

    @property
    def buffers(self) -> int:
        """Bytes of running statistics that one client receives, and sends, a round."""
        return size(self.public.buffers) if isinstance(self.public, WithBuffers) else 0

    @property
    def kept(self) -> int:
        """Bytes that one client keeps between rounds, with what it knows from following the broadcasts."""
        return size(self.client) + size(self.public) - size(wire(self.public))

    def mean(self, sums: list[Tensor], count: float, weight: float) -> Message:
        """The mean message of `count` clients from float64 sums of its leaves; those that were weighted are divided by
        the clients' summed weight."""
        samples = pytree.tree_leaves(self.message)
        divisors = [weight if weighted else count for weighted in self.weighted]
        means = [
            (total / by).to(sample.device, sample.dtype)
            for total, by, sample in zip(sums, divisors, samples, strict=True)
        ]
        return pytree.tree_unflatten(means, self.message_spec)


def wire(public: Any) -> Any:
    """What is broadcast: a public state without what every client knows already."""

    def known(part: Any) -> bool:
        return isinstance(part, Known)

    return pytree.tree_map(lambda part: () if known(part) else part, public, is_leaf=known)


def size(state: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(state))


def traffic(state_spec: StateSpec, down: int, up: int | None = None) -> dict[str, float]:
    """Bytes of one round: broadcast to `down` clients and sent by `up` of them, as they are stored."""
    up = down if up is None else up
    record = {"comm/bytes_down": float(down * state_spec.down), "comm/bytes_up": float(up * state_spec.up)}
    if not state_spec.buffers:
        return record
    buffers = float(state_spec.buffers)
    return {**record, "comm/bytes_buffers_down": down * buffers, "comm/bytes_buffers_up": up * buffers}
