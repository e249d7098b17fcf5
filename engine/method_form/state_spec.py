"""The shapes of a method's states and messages, from which rows, bytes and the parsing of sums follow."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Constant, Known, Message, Server, Viewer
from ...algorithms.tree import Tree
from ..errors import ConfigError
from .batch_norm import buffers_in


class StateSpec:
    """Samples of a method's states and messages for a given model, made by calling the method once.

    Only the structure, shapes and dtypes of the samples have a meaning, not their values. `at_work`: the bytes that one
    client carries from step to step.
    """

    def __init__(self, algorithm: Algorithm, x: Tree) -> None:
        self.bytes_with_buffers, self.dtype = byte_count(x), x.flat.dtype
        with torch.no_grad():
            self.server: Server = algorithm.server_init(x)
            self.public: Any = algorithm.broadcast(self.server)
            public = algorithm.unpack(self.public)
            self.client: Any = algorithm.client_init(public)
            public = some_view(algorithm, public, self.client)
            local = algorithm.client_begin(public, self.client)
            self.at_work = byte_count(local)
            self.sent: Message = checked(algorithm.client_finish(public, self.client, local))[0]
            self.message: Message = algorithm.decode(public, self.sent)
        self.public_spec = pytree.tree_structure(self.public)
        self.client_spec = pytree.tree_structure(self.client)
        self.message_spec = pytree.tree_structure(self.message)
        self.parts = [part for part in Message._fields for _ in pytree.tree_leaves(getattr(self.message, part))]
        """For each leaf of the message: the field that it belongs to."""
        self.shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(self.message)]
        """The shape of each leaf of the message."""

    def facts_only(self) -> StateSpec:
        """The same, for messages without anything but their facts, where the rest is not added up."""
        other = copy(self)
        other.__dict__.pop("sum_bytes", None)
        other.message = Message((), (), self.message.facts)
        other.message_spec = pytree.tree_structure(other.message)
        other.shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(other.message)]
        other.parts = ["facts"] * len(other.shapes)
        return other

    @cached_property
    def down(self) -> int:
        """Bytes that one client receives per round, without buffers."""
        return byte_count(without_known(self.public)) - self.buffers

    @cached_property
    def up(self) -> int:
        """Bytes that one client sends per round, without buffers."""
        return byte_count((self.sent.delta, self.sent.sent, self.sent.averaged, self.sent.norm2)) - self.buffers

    def traffic(self, algorithm: Algorithm, round: int, client: int = 0, public: Any = None) -> tuple[int, int]:
        """(down, up): bytes that one client receives and sends in a round, from 1, without buffers. client: its number,
        and public: the broadcast, None for a sample; with `Algorithm.own_traffic` alone they make a difference."""
        down, up = algorithm.traffic(round, self.public if public is None else public, self.sent, client)
        return self.down if down is None else down, self.up if up is None else up

    @cached_property
    def sum_bytes(self) -> int:
        """Bytes of a message in a sum, which is float64."""
        return sum(8 * leaf.numel() for leaf in pytree.tree_leaves(self.message))

    @cached_property
    def model(self) -> int:
        """Bytes of the model without buffers."""
        return self.bytes_with_buffers - self.buffers

    @cached_property
    def buffers(self) -> int:
        """Bytes of running statistics that one client receives per round; it sends as many."""
        buffers = buffers_in(self.public)
        return 0 if buffers is None else byte_count(buffers)

    @cached_property
    def statistics(self) -> int:
        """The number of running statistics, which are the last ones of the message's displacement."""
        buffers = buffers_in(self.public)
        return 0 if buffers is None else buffers.flat.numel()

    @cached_property
    def kept(self) -> int:
        """Bytes that one client keeps between rounds, including what it knows from all earlier broadcasts."""
        followed = byte_count(self.public) - byte_count(without(self.public, Known))
        return byte_count(self.client) + followed

    @property
    def weighted(self) -> list[bool]:
        """For each leaf of the message: whether it is added up with the federation's client weights or uniformly."""
        return [part in ("delta", "averaged", "norm2") for part in self.parts]

    def mean(self, sums: list[Tensor], count: float, weight: float, divisor: float | None = None) -> Message:
        """The mean message from float64 sums of its leaves.

        `count`: clients in the sums, the divisor of uniformly averaged leaves. `weight`: the sum of their weights, the
        divisor of states and of running statistics. `divisor`: that of displacements, by default the same.
        """
        divisor = weight if divisor is None else divisor
        of_part = {"delta": divisor, "norm2": divisor, "averaged": weight}
        means = [total / of_part.get(part, count) for total, part in zip(sums, self.parts, strict=True)]
        if divisor != weight and self.statistics and self.parts[0] == "delta":
            last = 0 if isinstance(self.message.delta, Tree) else self.parts.count("delta") - 1
            means[last][..., -self.statistics :] = sums[last][..., -self.statistics :] / weight
        return self.converted(means)

    def converted(self, leaves: list[Tensor]) -> Message:
        """The message with these leaves, in the dtypes and on the devices of the method's messages. A mean of whole
        numbers is not one of them; it has the dtype of the model."""
        found = [
            leaf.to(sample.device, sample.dtype if sample.is_floating_point() else self.dtype)
            for leaf, sample in zip(leaves, self.message_leaves, strict=True)
        ]
        return pytree.tree_unflatten(found, self.message_spec)

    @cached_property
    def message_leaves(self) -> list[Tensor]:
        """Samples of the leaves of a message, which have its shapes, dtypes and devices."""
        return pytree.tree_leaves(self.message)


def checked(finished: Any) -> tuple[Message, Any]:
    """What `client_finish` returns. Raises ConfigError for anything but a message of tensors and a state."""
    message = finished[0] if isinstance(finished, tuple) and len(finished) == 2 else finished
    if message is finished or not isinstance(message, Message):
        got = type(message).__name__
        raise ConfigError(f"method: client_finish must return (a Message, the client's state), got {got}; return both")
    for part, value in message._asdict().items():
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, Tensor):
                raise ConfigError(
                    f"method: a Message has tensors only, got {leaf!r} in {part}; give torch.as_tensor of it"
                )
    return message, finished[1]


def some_view(algorithm: Algorithm, public: Any, client: Any) -> Any:
    """What a client makes of the broadcast, for its form: that of client 0 with losses of 0."""
    if not algorithm.own_view:
        return public
    models = algorithm.looks(public, client)
    losses = models[0].flat.new_zeros(len(models)) if models else torch.zeros(0)
    number = torch.zeros((), dtype=torch.int64, device=losses.device)
    return algorithm.view(public, Viewer(number, torch.ones_like(number, dtype=torch.float64)), losses)


def without_known(public: Any) -> Any:
    """The part of a public state that is broadcast: without what every client already knows."""
    return without(public, Known, Constant)


def without(public: Any, *kinds: type) -> Any:
    """A public state in which () stands for the parts of these kinds."""

    def left_out(part: Any) -> bool:
        return isinstance(part, kinds)

    return pytree.tree_map(lambda part: () if left_out(part) else part, public, is_leaf=left_out)


def byte_count(state: Any) -> int:
    """The bytes of all leaves of a state, as they are stored."""
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(state))


def traffic_columns(
    state_spec: StateSpec, down: int, up: int | None = None, traffic: tuple[int, int] | None = None
) -> dict[str, float]:
    """The columns comm/… of one round. `down`: clients that receive the broadcast; `up`: clients that send a message
    (by default all that receive); `traffic`: the bytes of all of them together, where `StateSpec.traffic` of the round
    differs from the sizes of its states."""
    up = down if up is None else up
    all_down, all_up = (down * state_spec.down, up * state_spec.up) if traffic is None else traffic
    record = {"comm/bytes_down": float(all_down), "comm/bytes_up": float(all_up)}
    if not state_spec.buffers:
        return record
    buffers = float(state_spec.buffers)
    return {**record, "comm/bytes_buffers_down": down * buffers, "comm/bytes_buffers_up": up * buffers}
