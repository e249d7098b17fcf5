"""Tensors of the model that stay with the client, for any method.

The tensors of a model are divided into shared and personal ones. The method sees a model with the shared tensors alone:
its norms, momenta, control variates, messages and codecs are of them. `Personal` keeps the others as a method on the
contract, so rows, stores, checkpoints and forks need no code for them:

    first visit      p <- the personal tensors of the model before round 1
    each local step  (g, g_p) <- the gradient of the whole model at (y, p) that the method asks for first
                     y <- the method's step with g,  p <- rule(p, g_p)
    visit's end      the client keeps p; the message is the method's
    client_model     the evaluated model with p in the place of its personal tensors

Both steps are taken from the same point. With `split` the first steps of a visit move one side and the later ones the
other; meanwhile the other side, the method's local state included, stays as it is. Running statistics among the
personal tensors are those after the batch of the first gradient, in every step.

Arivazhagan et al. 2019, arXiv:1912.00818 (FedPer: the head is personal); Liang et al. 2020, arXiv:2001.01523
(LG-FedAvg: the body); Collins et al. 2021, arXiv:2102.07078 (FedRep: the head, with a split); Li et al. 2021,
arXiv:2102.07623 (FedBN: normalisation layers); Andreux et al. 2020, arXiv:2008.07424 (running statistics).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algorithms.contract import (
    Algorithm,
    Around,
    Client,
    Constant,
    Local,
    LocalSteps,
    Message,
    Oracle,
    Public,
    Round,
    Server,
    Viewer,
)
from ...algorithms.local import Rule, declared_lr
from ...algorithms.parts.turns import Turns, chosen
from ...algorithms.tree import Layout, Tree
from .batch_norm import join_trees, split_tree
from .numbers import with_numbers
from .scheduled import StepNumbers


@dataclass(frozen=True)
class Division:
    """How the tensors of a model are divided. layout: of the whole model, its running statistics last. names: of the
    personal tensors. statistics: how many of them, the last ones, are running statistics."""

    layout: Layout
    names: tuple[str, ...]
    statistics: int = 0

    @cached_property
    def personal(self) -> Layout:
        return self.layout.pick(self.names)

    @cached_property
    def shared(self) -> Layout:
        return self.layout.pick(set(self.layout.names) - set(self.names))

    @cached_property
    def runs(self) -> list[tuple[bool, int]]:
        """(whether they are personal, the number of entries) of consecutive tensors on the flat vector."""
        names = set(self.names)
        sizes = zip(self.layout.names, self.layout.sizes, strict=True)
        sides = groupby(sizes, lambda leaf: leaf[0] in names)
        return [(personal, sum(size for _, size in leaves)) for personal, leaves in sides]

    def split(self, whole: Tree) -> tuple[Tree, Tree]:
        """(the shared tensors, the personal ones)."""
        pieces = whole.flat.split([size for _, size in self.runs])
        shared, personal = (
            [piece for piece, (personal, _) in zip(pieces, self.runs, strict=True) if personal is side]
            for side in (False, True)
        )
        return Tree(joined(shared), self.shared), Tree(joined(personal), self.personal)

    def join(self, shared: Tree, personal: Tree) -> Tree:
        """The inverse."""
        rest = {
            side: iter(tree.flat.split([size for personal, size in self.runs if personal is side]))
            for side, tree in ((False, shared), (True, personal))
        }
        return Tree(joined([next(rest[personal]) for personal, _ in self.runs]), self.layout)


def joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class WithPersonal(NamedTuple):
    """The public state of the method, and the personal tensors before round 1."""

    method: Any
    initial: Constant


class Own(NamedTuple):
    """What a client keeps."""

    method: Any  # what it keeps for the method
    personal: Tree
    rule: Any  # the state of the rule of the personal tensors where the client keeps it, else ()


class LocalState(NamedTuple):
    method: Any
    personal: Tree
    rule: Any  # the state of the rule of the personal tensors


class SharedOracle:
    """The oracle that the method sees: gradients of the shared tensors. `gradients` has those of the personal ones."""

    key: Tensor
    done: Tensor
    examples: Tensor

    def __init__(self, oracle: Oracle, division: Division, personal: Tree) -> None:
        self.oracle, self.division, self.personal = oracle, division, personal
        self.gradients: list[Tree] = []

    def __call__(self, y: Tree, /) -> Tree:
        shared, personal = self.division.split(self.oracle(self.division.join(y, self.personal)))
        self.gradients.append(personal)
        return shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)


class PersonalSteps(LocalSteps):
    """The local steps of a client as the method sees them, which takes those of the personal tensors beside."""

    def __init__(self, around: Personal, steps: LocalSteps, personal: Tree, rule: Any) -> None:
        self.around, self.of, self.personal, self.rule = around, steps, personal, rule
        self.steps = steps.steps

    def __iter__(self) -> Iterator[Oracle]:
        for oracle in self.of:
            shared = SharedOracle(oracle, self.around.division, self.personal)
            yield shared
            self.personal, self.rule = self.around._step(self.personal, shared, self.rule)

    def descend(self, y: Tree, lr: float, shift: Any = (), total: Any = (), pull: Any = ()) -> tuple[Tree, Any] | None:
        division = self.around.division
        if division.statistics or pull or self.around.rule_numbers or declared_lr(self.around.rule) != lr:
            return None

        def whole(tree: Any) -> Any:
            return division.join(tree, self.personal.zeros()) if isinstance(tree, Tree) else ()

        found = self.of.descend(division.join(y, self.personal), lr, whole(shift), whole(total))
        if found is None:
            return None
        y, self.personal = division.split(found[0])
        return y, division.split(found[1])[0] if isinstance(total, Tree) else total


@dataclass(frozen=True)
class Personal(Around):
    """`method` on the shared tensors of a model, see the module. `rule`: the local step of the personal ones; `keep`:
    whether clients keep its state between visits; `turns`: None to move both sides in every step; `trains`: False for a
    pass in which the personal tensors stay; `rule_numbers`: the rule's numbers in each local step, as schedules over
    steps say, with paths that begin at the rule."""

    method: Algorithm
    division: Division
    rule: Rule
    keep: bool = False
    turns: Turns | None = None
    trains: bool = True
    rule_numbers: StepNumbers | None = None

    @property
    def own_models(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    @property
    def least_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.least_steps if self.turns is None else self.turns.least_steps()

    @property
    def variables(self) -> Any:
        return (self.division.names, self.method.variables)

    def server_init(self, x: Tree) -> Server:
        shared, personal = self.division.split(x)
        server = self.method.server_init(shared)
        return server._replace(public=WithPersonal(server.public, Constant(personal)))

    def origin(self, public: Public) -> Tree:
        return self.method.origin(public.method)

    def broadcast(self, server: Server) -> Public:
        return WithPersonal(self.method.broadcast(self._method_server(server)), server.public.initial)

    def unpack(self, public: Public) -> Any:
        return public._replace(method=self.method.unpack(public.method))

    def held(self, public: Public) -> Mapping[str, Tensor]:
        return self.method.held(public.method)

    def client_init(self, public: Public) -> Client:
        personal = public.initial.value
        rule = self.rule.init(self._trained(personal)) if self.keep else ()
        return Own(self.method.client_init(public.method), personal, rule)

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        shared = self.method.looks(public.method, client.method)
        return tuple(self.division.join(x, client.personal) for x in shared)

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        return public._replace(method=self.method.view(public.method, viewer, losses))

    def client_begin(self, public: Public, client: Client) -> Local:
        local = self.method.client_begin(public.method, client.method)
        rule = client.rule if self.keep else self.rule.init(self._trained(client.personal))
        return LocalState(local, client.personal, rule)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        shared_oracle = SharedOracle(oracle, self.division, local.personal)
        method = self.method.client_step(public.method, client.method, local.method, shared_oracle)
        if not self.trains:
            return local._replace(method=method)
        personal, rule = self._step(local.personal, shared_oracle, local.rule)
        after = LocalState(method, personal, rule)
        return after if self.turns is None else self._in_turn(self.turns.is_personal(oracle.done), local, after)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        """The method's steps, and beside them those of the personal tensors: in one call where the method's are and
        both sides take the same plain steps."""
        if self.turns is not None or not self.trains:
            return super().client_steps(public, client, local, steps)
        beside = PersonalSteps(self, steps, local.personal, local.rule)
        method = self.method.client_steps(public.method, client.method, local.method, beside)
        return LocalState(method, beside.personal, beside.rule)

    def _step(self, personal: Tree, oracle: SharedOracle, state: Any) -> tuple[Tree, Any]:
        """(the next personal tensors, the next state of their rule). oracle: which the method has asked."""
        gradient, rule = oracle.gradients[0], self.rule
        if self.rule_numbers is not None:
            rule = with_numbers(rule, self.rule_numbers.at(oracle.done))
        if not self.division.statistics:
            return rule.step(personal, gradient, state)
        p, statistics = split_tree(personal, self.division.statistics)
        g, move = split_tree(gradient, self.division.statistics)
        if p.layout.names:
            p, state = rule.step(p, g, state)
        return join_trees(p, statistics - move), state

    def _in_turn(self, personal: Tensor, before: LocalState, after: LocalState) -> LocalState:
        """What is left of a step in which one side moves. personal: (), whether it is the personal one. Running
        statistics move in every step."""
        own = chosen(personal, after.personal, before.personal)
        if last := self.division.statistics:
            own = join_trees(split_tree(own, last)[0], split_tree(after.personal, last)[1])
        return LocalState(
            chosen(~personal, after.method, before.method), own, chosen(personal, after.rule, before.rule)
        )

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, kept = self.method.client_finish(public.method, client.method, local.method)
        moved = (local.personal - client.personal).norm2()
        facts = {**message.facts, "personal_norm2": moved}
        return message._replace(facts=facts), Own(kept, local.personal, local.rule if self.keep else ())

    def decode(self, public: Public, message: Message) -> Message:
        return self.method.decode(public.method, message)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        after = self.method.server_update(self._method_server(server), mean, round)
        return after._replace(public=WithPersonal(after.public, server.public.initial))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._method_server(server), mean, round)

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        return self.method.traffic(round, public.method, message, client)

    def model(self, server: Server) -> Tree:
        """The shared tensors, and the personal ones before round 1."""
        return self.division.join(self.method.model(self._method_server(server)), server.public.initial.value)

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        shared, _ = self.division.split(x)
        return self.division.join(self.method.client_model(shared, public.method, client.method), client.personal)

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        return client.personal

    @property
    def warm_start(self) -> Algorithm | None:
        warm_start = self.method.warm_start
        if warm_start is None:
            return None
        return Personal(warm_start, self.division, self.rule, self.keep, trains=False)

    def _trained(self, personal: Tree) -> Tree:
        """The personal tensors that the rule moves."""
        return split_tree(personal, self.division.statistics)[0] if self.division.statistics else personal

    def _method_server(self, server: Server) -> Server:
        """The server's state as the method knows it."""
        return server._replace(public=server.public.method)
