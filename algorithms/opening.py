"""The pass that warm starts begin with: every client's mean gradient at x, over its data once."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from .tree import Tree


class Opened(Algorithm):
    """A method that may begin with the pass, and says what becomes of the gradients."""

    def opened_client(self, client: Client, gradient: Tree) -> Client:
        """What a client keeps of its own gradient."""
        return client

    def opening_sent(self, gradient: Tree) -> Any:
        """What a client sends of it."""
        return gradient

    @abstractmethod
    def opened_server(self, server: Server, mean: Any) -> Server:
        """The server's state before round 1, from the mean over all clients of what they sent."""


class Gradients(NamedTuple):
    total: Tree
    steps: Tensor


@dataclass(frozen=True)
class Opening(Algorithm):
    """The pass, on the states of a method."""

    method: Opened

    def server_init(self, x: Tree) -> Server:
        return self.method.server_init(x)

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(public)

    def client_begin(self, public: Public, client: Client) -> Local:
        return Gradients(public.x.zeros(), public.x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return Gradients(local.total + oracle(public.x), local.steps + 1)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        gradient = local.total / local.steps.clamp(min=1)
        message = Message(
            public.x.zeros(), self.method.opening_sent(gradient), {"norm2": torch.zeros_like(local.steps)}
        )
        return message, self.method.opened_client(client, gradient)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self.method.opened_server(server, mean.sent)

    def model(self, server: Server) -> Tree:
        return self.method.model(server)
