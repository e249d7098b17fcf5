"""The shapes of what a method keeps and sends, found by asking it: from them follow rows, bytes and messages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.contract import Algorithm, Message, Server
from ..algorithms.tree import Tree


class Forms:
    """A method's states on a given model. Only structure, shapes and dtypes of the samples mean anything."""

    def __init__(self, algorithm: Algorithm, x: Tree) -> None:
        with torch.no_grad():
            self.server: Server = algorithm.server_init(x)
            self.client: Any = algorithm.client_init(self.server.public)
            local = algorithm.client_begin(self.server.public, self.client)
            self.message: Message = algorithm.client_finish(self.server.public, self.client, local)[0]
        self.public_spec = pytree.tree_structure(self.server.public)
        self.client_spec = pytree.tree_structure(self.client)
        self.message_spec = pytree.tree_structure(self.message)

    @property
    def down(self) -> int:
        """Bytes that one client receives a round."""
        return size(self.server.public)

    @property
    def up(self) -> int:
        """Bytes that one client sends a round."""
        return size((self.message.delta, self.message.sent))

    @property
    def kept(self) -> int:
        """Bytes that one client keeps between rounds."""
        return size(self.client)

    def mean(self, sums: list[Tensor], count: float, weight: float) -> Message:
        """The mean message of `count` clients from float64 sums of its leaves; delta's, the first, by their weight."""
        samples = pytree.tree_leaves(self.message)
        divisors = [weight] + [count] * (len(sums) - 1)
        means = [
            (total / by).to(sample.device, sample.dtype)
            for total, by, sample in zip(sums, divisors, samples, strict=True)
        ]
        return pytree.tree_unflatten(means, self.message_spec)


def size(state: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(state))


def traffic(forms: Forms, down: int, up: int | None = None) -> dict[str, float]:
    """Bytes of one round: broadcast to `down` clients and sent by `up` of them, as they are stored."""
    up = down if up is None else up
    return {"comm/bytes_down": float(down * forms.down), "comm/bytes_up": float(up * forms.up)}
