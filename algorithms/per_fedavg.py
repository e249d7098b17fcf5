"""Per-FedAvg: a model from which one step on a client's own rows leads to a good model of the client.

Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv:2002.07948, Algorithm 1.

Choose it when clients can keep no state but can take one step on their own rows before they use the server's model,
which is trained to be good after this step. Clients that have never taken part are served in the same way.

    y   <- x;  in each group of batches D, D', D'':
    t   = y - lr_inner g_D(y);  o = g_D'(t)
    y   <- y - step(o)                                                                                    variant = "fo"
    y   <- y - step(o - lr_inner (g_D''(y + delta o) - g_D''(y - delta o)) / (2 delta))                   variant = "hf"
    x   <- x + server_lr * mean of (y_K - x)

A group is two local steps (fo), or three (hf), so that an epoch stays an epoch; with batches = "same" it is one. Before
it is evaluated, a client's model takes one step of lr_inner on all of the client's training rows.

Departures:
- With clients that pass over their rows, the steps of an incomplete last group move nothing.
- hf asks for two gradients in all three steps of a group, where the first two need one, so that the clients of a block
  may be at different places of their groups.
- The product with the Hessian is a difference quotient, as in the authors' experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .contract import Adaptation, Algorithm, Client, Deferred, Local, Message, Oracle, Public, Round, RunContext, Server
from .local import Rule
from .parts.checks import one_of, positive
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree


class LocalState(NamedTuple):
    y: Tree
    tried: Tree  # t
    outer: Tree  # o
    rule: Any  # the rule's state
    place: Tensor  # (), of the next step in its group


def either(first: Tensor, tree: Tree, other: Tree) -> Tree:
    """`tree` where `first`, (), holds, else `other`."""
    return Tree(torch.where(first, tree.flat, other.flat), tree.layout)


@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """The method on the contract. `rule`: the step of y, whose state starts anew every visit."""

    rule: Rule
    server: Mean
    lr_inner: float = 0.01
    variant: Literal["fo", "hf"] = "fo"
    delta: float = 1e-3
    batches: Literal["own", "same"] = "own"

    @property
    def adaptation(self) -> Adaptation | None:
        return Adaptation(Sgd(self.lr_inner), steps=1)

    def origin(self, public: Public) -> Tree:
        return public

    def server_init(self, x: Tree) -> Server:
        return Server(x)

    def client_init(self, public: Public) -> Client:
        return ()

    def client_begin(self, public: Public, client: Client) -> Local:
        x = public
        return LocalState(x, x, x.zeros(), self.rule.init(x), x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        if self.batches == "same":
            outer = oracle(local.y.add(oracle(local.y), -self.lr_inner))
            y, rule = self.rule.step(local.y, self._direction(oracle, local.y, outer), local.rule)
            return local._replace(y=y, rule=rule)
        return self._first_order(local, oracle) if self.variant == "fo" else self._with_hessian(local, oracle)

    def _direction(self, oracle: Oracle, y: Tree, outer: Tree) -> Tree:
        """The direction of y's step from o."""
        if self.variant == "fo":
            return outer
        bend = (oracle(y.add(outer, self.delta)) - oracle(y.add(outer, -self.delta))) / (2 * self.delta)
        return outer.add(bend, -self.lr_inner)

    def _first_order(self, local: LocalState, oracle: Oracle) -> LocalState:
        """A step of a group of two. The gradient of the first one gives t, that of the second one is at t."""
        y, first = local.y, local.place == 0
        g = oracle(either(first, y, local.tried))
        tried = either(first, y.add(g, -self.lr_inner), local.tried)
        return self._moved(local._replace(tried=tried), g, ~first, 2)

    def _with_hessian(self, local: LocalState, oracle: Oracle) -> LocalState:
        """A step of a group of three."""
        y, first, last = local.y, local.place == 0, local.place == 2
        ahead, behind = (y.add(local.outer, shift) for shift in (self.delta, -self.delta))
        g = oracle(either(first, y, either(last, ahead, local.tried)))
        bend = (g - oracle(either(last, behind, y))) / (2 * self.delta)
        tried = either(first, y.add(g, -self.lr_inner), local.tried)
        outer = either(local.place == 1, g, local.outer)
        return self._moved(local._replace(tried=tried, outer=outer), outer.add(bend, -self.lr_inner), last, 3)

    def _moved(self, local: LocalState, direction: Tree, last: Tensor, group: int) -> LocalState:
        """The state after a step of a group. last: (), whether it is the last one, which moves y."""
        y, rule = self.rule.step(local.y, direction, local.rule)
        kept = pytree.tree_map(lambda new, old: torch.where(last, new, old), rule, local.rule)
        return local._replace(y=either(last, y, local.y), rule=kept, place=(local.place + 1) % group)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public
        return Message(delta, (), {"norm2": delta.norm2()}), ()

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return Server(self.server.step(server.public, mean.delta, torch.full((), torch.nan), (), round)[0])

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: server_lr."""
        return {"lr": self.server.rate(server.public, mean.delta, torch.full((), torch.nan), (), round)}

    def model(self, server: Server) -> Tree:
        return server.public


@dataclass(frozen=True)
class PerFedAvgOfSteps(Deferred):
    """Per-FedAvg, whose groups of batches must fit into the local steps of a run."""

    method: PerFedAvg

    def build(self, context: RunContext) -> PerFedAvg:
        group = 1 if self.method.batches == "same" else {"fo": 2, "hf": 3}[self.method.variant]
        if context.steps is not None and context.steps % group:
            below = context.steps - context.steps % group
            wanted = f"{below} or {below + group}" if below else f"{group}"
            raise ValueError(
                f"variant {self.method.variant} takes batches in groups of {group}, got {context.steps} local steps; "
                f"choose {wanted}, or batches: same"
            )
        return self.method


def per_fedavg(
    lr_inner: float = 0.01,
    rule: Rule = Sgd(0.01),
    variant: Literal["fo", "hf"] = "fo",
    delta: float | None = None,
    batches: Literal["own", "same"] = "own",
    server_lr: float = 1.0,
) -> PerFedAvgOfSteps:
    """lr_inner: the step size of the step that clients take before they use the model; rule: the local optimiser;
    variant: first-order (fo), or with the Hessian by a difference quotient (hf); delta: with hf the length of the
    difference in units of o, 1e-3 unless given; batches: every gradient of a group has a batch of its own (own), or all
    have one (same); server_lr: step size along the mean displacement."""
    if variant == "fo" and delta is not None:
        raise ValueError(f"delta has no effect with variant=fo, got delta={delta}; leave it out, or choose hf")
    one_of("fo", "hf", variant=variant)
    one_of("own", "same", batches=batches)
    delta = 1e-3 if delta is None else delta
    positive(lr_inner=lr_inner, delta=delta)
    return PerFedAvgOfSteps(PerFedAvg(rule, Mean(server_lr), lr_inner, variant, delta, batches))
