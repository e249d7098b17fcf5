"""Data-parallel training: clients send gradients at one model, and the optimiser is on the server.

As FedSGD, McMahan et al., AISTATS 2017, arXiv:1602.05629; with one batch per round, synchronous training on many GPUs,
which is what methods of little communication are compared with.

Choose it as the baseline of methods with little communication: each client sends one gradient per round, and the
optimiser is on the server. With `federation.local.steps: 1` this is an exchange after every batch.

    g_i = gradient of client i at x, over the batches of its K local steps
    x <- step(x, mean of g_i)                                    AdamW on the gradient clipped at norm 1

With K = 1, M clients with equal weights and batches of b examples do what one worker does with a batch of M b examples,
so that this is H = 1 of `diloco` with the optimiser where it belongs. With K batches, client i sends the mean gradient
of all of their examples: its batch is K times as large, in the memory of one. An epoch is its whole gradient.

Departures:
- FedSGD's step is plain gradient descent, which is `rule: sgd`.
- With a schedule over steps the server's step has the numbers of the last local step of the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .contract import Client, Local, Message, Oracle, Public, Round, Server
from .fedavg import Plain
from .local import Averaged, ClientState, LocalMethod, PublicState, Rule, Sent
from .parts.coded import only_coded
from .parts.compression import Compressed, Compression, compressed
from .parts.rules import Clip, adamw
from .parts.servers import Mean
from .parts.warm_start import Gradients
from .tree import Tree


@dataclass(frozen=True)
class DataParallel(LocalMethod):
    """A method without local iterates: `rule` is the server's, and what clients send as their displacement is -g_i."""

    def server_init(self, x: Tree) -> Server:
        return Server(PublicState(x, (), ()), self.rule.init(x))

    def client_init(self, public: Public) -> Client:
        return ClientState((), ())

    def client_begin(self, public: Public, client: Client) -> Local:
        return Gradients.none(public.x)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return local.plus(oracle, public.x)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = -local.mean
        return Message(delta, Sent(()), {"norm2": delta.norm2()}, Averaged(())), client

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x, state = self.rule.step(server.public.x, -mean.delta, server.private)
        return Server(server.public._replace(x=x), state)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: how far x moves, over the norm of the mean gradient; 0 where that is 0."""
        moved, size = (self.server_update(server, mean, round).public.x - server.public.x).norm(), mean.delta.norm()
        return {"lr": torch.where(size > 0, moved / size, 0.0)}


def data_parallel(
    rule: Rule = Clip(adamw(4e-4, (0.9, 0.95), 1e-8, 0.1), 1.0), compression: Compression | None = None
) -> LocalMethod | Compressed:
    """rule: the server's optimiser; compression: only `coded`, of the gradients."""
    coding = only_coded(compression, "clients send gradients, which only coded is for")
    return compressed(DataParallel(rule, Plain(), Mean()), coding)
