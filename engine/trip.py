"""A client's trip through a round, begin -> step … step -> finish: one at a time, or a block at once under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from ..algorithms.contract import Algorithm
from ..algorithms.tree import Layout, Tree
from ..workloads.base import Batch, Workload
from .forms import Forms

Batches = Callable[[int], dict[str, Tensor]]
"""step -> the block's batch, each column (c, B, …), "key" (c,), "weight" (c, B) where there are short batches."""


class Outcome(NamedTuple):
    """What comes of a block: leaves with the clients' axis first."""

    message: Any
    client: Any
    loss: Tensor  # (c,) mean training loss over the steps
    gradients: int  # evaluations of the gradient per step


class Trips:
    def __init__(self, algorithm: Algorithm, workload: Workload, x: Tree) -> None:
        self.algorithm, self.workload = algorithm, workload
        self.forms = Forms(algorithm, x)
        self.gradients = 0

    def loss(self, layout: Layout, views: list[Tensor], batch: Batch) -> Tensor:
        """The batch's mean loss, ()."""
        losses = self.workload.losses(dict(zip(layout.names, views, strict=True)), batch)
        weight = batch.get("weight")
        return losses.mean() if weight is None else (losses * weight).sum()

    def step(
        self, gradient: Callable[[Tree, Batch], tuple[Tree, Tensor]], public: Any, client: Any, local: Any, batch: Batch
    ) -> tuple[Any, Tensor]:
        """(next local state, loss at the first gradient)."""
        losses = []

        def oracle(y: Tree) -> Tree:
            g, loss = gradient(y, batch)
            losses.append(loss)
            return g

        local = self.algorithm.client_step(public, client, local, oracle)
        self.gradients = len(losses)
        return local, losses[0]

    # --- one client ---------------------------------------------------------------------------------------------
    def _gradient(self, y: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        with torch.enable_grad():
            point = Tree(y.flat.detach().requires_grad_(), y.layout)
            loss = self.loss(y.layout, point.views(), batch)
            (gradient,) = torch.autograd.grad(loss, point.flat)
        return Tree(gradient, y.layout), loss.detach()

    def alone(self, public: Any, client: Any, steps: int, batches: Batches) -> Outcome:
        """One client, no clients' axis in `client`; the outcome's leaves have none either, but for the loss ()."""
        local = self.algorithm.client_begin(public, client)
        total = torch.zeros((), dtype=torch.float64)
        for k in range(steps):
            local, loss = self.step(self._gradient, public, client, local, batches(k))
            total = total + loss.to(total)
        message, client = self.algorithm.client_finish(public, client, local)
        return Outcome(message, client, total / steps, self.gradients)

    # --- a block --------------------------------------------------------------------------------------------------
    def _gradient_in_block(self, y: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        def loss_at(flat: Tensor) -> Tensor:
            return self.loss(y.layout, Tree(flat, y.layout).views(), batch)

        gradient, loss = grad_and_value(loss_at)(y.flat)
        return Tree(gradient, y.layout), loss

    def together(self, public: Any, client: Any, steps: Tensor, batches: Batches) -> Outcome:
        """Clients along the first axis of every leaf of `client`; steps: (c,), they may differ."""
        # Stateless clients have no tensor to vectorise over; their steps always are one.
        begin = vmap(lambda key, client: self.algorithm.client_begin(public, client))
        step = vmap(lambda client, local, batch: self.step(self._gradient_in_block, public, client, local, batch))
        finish = vmap(lambda client, local: self.algorithm.client_finish(public, client, local))
        local = begin(steps, client)
        total = torch.zeros(len(steps), dtype=torch.float64)
        shortest, longest = int(steps.min()), int(steps.max())
        for k in range(longest):
            after, loss = step(client, local, batches(k))
            if k >= shortest:
                active = steps > k
                after, loss = select(active, after, local), torch.where(active, loss.to(total), 0)
            local, total = after, total + loss.to(total)
        message, client = finish(client, local)
        return Outcome(message, client, total / steps, self.gradients)


def select(active: Tensor, new: Any, old: Any) -> Any:
    """Leaf by leaf, `new` for active clients (c,), `old` for those that have finished."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(active.to(a.device).view(-1, *[1] * (a.ndim - 1)), a, b)

    return pytree.tree_map(pick, new, old)
