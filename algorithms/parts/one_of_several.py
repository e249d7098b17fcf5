"""Methods whose server has several models, of which each client trains one: what a client does with its model.

A method says which model a client gets, in its `view` of the broadcast by `view_of`, and what becomes of the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Algorithm, Client, Local, LocalSteps, Message, Oracle, Public
from ..local import LocalMethod, PublicState
from ..tree import Tree


class View(NamedTuple):
    """What a client makes of the broadcast."""

    method: PublicState  # of FedAvg, with the client's model
    chosen: Tensor  # (), int64, the number of the model


def view_of(models: tuple[Tree, ...], chosen: Tensor) -> View:
    """What the client sees whose model has the number `chosen`, (), int64. On the processor clients with the same model
    share its memory; of a tensor on a card nobody waits for the number."""
    if chosen.device.type == "cpu":
        return View(PublicState(models[int(chosen)], (), ()), chosen)
    flat = torch.stack([x.flat for x in models]).index_select(0, chosen.view(1))[0]
    return View(PublicState(Tree(flat, models[0].layout), (), ()), chosen)


@dataclass(frozen=True)
class OneOfSeveral(Algorithm):
    """`method`: FedAvg, for the model that a client trains. Clients keep nothing between rounds."""

    method: LocalMethod
    own_view = True
    own_models = True

    def client_init(self, public: Public) -> Client:
        return ()

    def client_begin(self, public: Public, client: Client) -> Local:
        return self.method.client_begin(public.method, self.method.client_init(public.method))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return self.method.client_step(public.method, self.method.client_init(public.method), local, oracle)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        return self.method.client_steps(public.method, self.method.client_init(public.method), local, steps)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, _ = self.method.client_finish(public.method, self.method.client_init(public.method), local)
        return message, ()

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return public.method.x

    def client_facts(self, public: Public, client: Client) -> dict[str, Tensor]:
        """cluster: the number of the client's model, from 0."""
        return {"cluster": public.chosen}
