"""The pass that warm starts begin with: every client's gradient at x over all of its rows, F_i's.

A pass goes through the rows batch by batch, and the last batch is short where the batch size does not divide their
number. Each batch's gradient is a mean over its examples, so that it counts by their number:

    grad F_i(x) = sum over batches of (n_b / n_1) g_b / sum of n_b / n_1
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from ..tree import Tree


class WarmStarted(Algorithm):
    """A method that may begin with the pass, and says what becomes of the gradients."""

    def warm_started_client(self, client: Client, gradient: Tree) -> Client:
        """What a client keeps of its own gradient."""
        return client

    warm_start_averaged: ClassVar[bool] = False
    """Whether what clients send of it is averaged as x is, with the federation's client weights: so where it begins a
    momentum or an estimator that the method averages like x. Control variates are plain means."""

    def warm_start_sent(self, gradient: Tree) -> Any:
        """What a client sends of it."""
        return gradient

    @abstractmethod
    def warm_started_server(self, server: Server, mean: Any) -> Server:
        """The server's state before round 1, from the mean over all clients of what they sent."""


class Gradients(NamedTuple):
    total: Tree  # of the batches' gradients, each by its share
    shares: Tensor  # (), of all batches so far; a batch's share is its examples over those of the first batch
    first: Tensor  # (), int64, examples of the first batch


@dataclass(frozen=True)
class WarmStart(Algorithm):
    """The pass, on the states of a method. No model moves, so that a message has no delta."""

    method: WarmStarted

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.weighted

    def broadcast(self, server: Server) -> Public:
        return self.method.broadcast(server)

    def server_init(self, x: Tree) -> Server:
        return self.method.server_init(x)

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(public)

    def client_begin(self, public: Public, client: Client) -> Local:
        x = public.x
        return Gradients(x.zeros(), x.flat.new_zeros(()), x.flat.new_zeros((), dtype=torch.int64))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        examples = oracle.examples.to(local.first)
        first = torch.where(local.first > 0, local.first, examples)
        # Of full batches the share is exactly 1, so that their sum is the plain one to the bit.
        share = examples.to(local.shares) / first.to(local.shares)
        return Gradients(local.total + oracle(public.x) * share, local.shares + share, first)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        gradient = local.total / torch.where(local.shares > 0, local.shares, 1.0)
        sent, nothing = self.method.warm_start_sent(gradient), {"norm2": torch.zeros_like(local.shares)}
        message = Message((), (), nothing, sent) if self.method.warm_start_averaged else Message((), sent, nothing)
        return message, self.method.warm_started_client(client, gradient)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self.method.warm_started_server(server, mean.averaged if self.method.warm_start_averaged else mean.sent)

    def model(self, server: Server) -> Tree:
        return self.method.model(server)
