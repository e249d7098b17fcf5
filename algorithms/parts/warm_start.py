"""Warm starts: a pass before round 1 in which every client takes its gradient at x over all of its rows, grad F_i(x).

The pass goes through a client's rows batch by batch, and the last batch is short where the batch size does not divide
the number of rows. A batch's gradient is the mean over its n_b examples, so that it is weighted by n_b:

    grad F_i(x) = sum over batches of (n_b / n_1) g_b / sum of n_b / n_1
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from ..tree import Tree

Start = Literal["zeros", "gradient"]
"""How a method's momenta and control variates start: at zero, or from the gradients of a warm start."""


class WarmStarted(Algorithm):
    """A method that may begin with the pass, and says what becomes of the gradients."""

    warm_start_averaged: ClassVar[bool] = False
    """Whether what clients send of the gradient is averaged with the federation's client weights, as x is. That is
    right where it starts a momentum or an estimator that the method averages like x. Control variates are plain
    means."""

    def warm_started_client(self, client: Client, gradient: Tree) -> Client:
        """The client's state before its first round, from its own gradient."""
        return client

    def warm_start_sent(self, gradient: Tree) -> Any:
        """What a client sends of its gradient."""
        return gradient

    @abstractmethod
    def warm_started_server(self, server: Server, mean: Any) -> Server:
        """The server's state before round 1, from the mean over all clients of what they sent."""


class Gradients(NamedTuple):
    """The sum of a client's gradients at one point."""

    total: Tree  # sum of (n_b / n_1) g_b
    shares: Tensor  # (), sum of n_b / n_1
    first: Tensor  # (), int64, n_1

    @staticmethod
    def none(x: Tree) -> Gradients:
        """The sum before the first batch."""
        return Gradients(x.zeros(), x.flat.new_zeros(()), x.flat.new_zeros((), dtype=torch.int64))

    def plus(self, oracle: Oracle, x: Tree) -> Gradients:
        """The sum with the gradient at x on one more batch."""
        examples = oracle.examples.to(self.first)
        first = torch.where(self.first > 0, self.first, examples)
        # The share of a full batch is exactly 1, so that the sum over full batches is the plain sum to the bit.
        share = examples.to(self.shares) / first.to(self.shares)
        return Gradients(self.total + oracle(x) * share, self.shares + share, first)

    @property
    def mean(self) -> Tree:
        """The gradient over all examples of the batches."""
        return self.total / torch.where(self.shares > 0, self.shares, 1.0)


@dataclass(frozen=True)
class WarmStart(Algorithm):
    """The pass, as an algorithm on the states of `method`. No model moves, so that a message has no delta."""

    method: WarmStarted

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.weighted

    def broadcast(self, server: Server) -> Public:
        return self.method.broadcast(server)

    def unpack(self, public: Public) -> Any:
        return self.method.unpack(public)

    def server_init(self, x: Tree) -> Server:
        return self.method.server_init(x)

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(public)

    def client_begin(self, public: Public, client: Client) -> Local:
        return Gradients.none(public.x)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return local.plus(oracle, public.x)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        gradient = local.mean
        sent, facts = self.method.warm_start_sent(gradient), {"norm2": torch.zeros_like(local.shares)}
        message = Message((), (), facts, sent) if self.method.warm_start_averaged else Message((), sent, facts)
        return message, self.method.warm_started_client(client, gradient)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self.method.warm_started_server(server, mean.averaged if self.method.warm_start_averaged else mean.sent)

    def model(self, server: Server) -> Tree:
        return self.method.model(server)
