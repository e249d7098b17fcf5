"""`LocalMethod`: local steps between averages, composed of parts.

    x_i <- x;  K times: v <- estimate, x_i <- rule(x_i, v);  x <- server(x, mean of x_i - x)

Five slots: the estimator says what the descent direction is, the rule which step it gives, carry what becomes of the
rule's state after the round, the server what is done with the mean. `LocalMethod` knows no method's name: a
method that needs an `if` here is written on the contract instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .contract import Algorithm, Client, Local, LocalSteps, Message, Oracle, Public, Round, Server
from .parts.warm_start import WarmStart, WarmStarted
from .tree import Tree


class Estimator(ABC):
    """The descent direction from gradients. Letters as in the papers: x server, y local iterate, c shared, c_i own."""

    start: Literal["zeros", "gradient"] = "zeros"
    """"gradient": before the first round every client sends its gradient at x; see `own_warm` and `shared_warm`."""

    def shared_init(self, x: Tree) -> Any:
        return ()

    def own_init(self, x: Tree) -> Any:
        return ()

    def begin(self, x: Tree, c: Any, c_i: Any) -> Any:
        """The trace: what the estimator carries from step to step."""
        return ()

    @abstractmethod
    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Any, trace: Any) -> tuple[Tree, Any]:
        """(direction at y, next trace)."""

    def constant(self, c: Any, c_i: Any) -> Any:
        """s, where every direction is the gradient + s, and the trace the sum of the gradients; () for none of either.
        The engine may then take the steps of a rule that is `plain` at once. None: it is not so."""
        return None

    def finish(self, c: Any, c_i: Any, trace: Any, steps: Tensor) -> tuple[Any, Any]:
        """(next c_i, what is sent beside delta); `steps`: (), local steps really taken."""
        return c_i, ()

    def update(self, c: Any, sent: Any, delta: Tree, round: Round) -> Any:
        """The next c from the cohort's means."""
        return c

    def own_warm(self, gradient: Tree) -> Any:
        """c_i before the first round, where start = "gradient"."""
        return gradient

    def shared_warm(self, gradient: Tree) -> Any:
        """c before the first round, from the mean gradient over all clients, where start = "gradient"."""
        return gradient


class Rule(ABC):
    """A step of the local optimiser; holds the learning rate."""

    table: ClassVar[str] = "RULES"

    def init(self, x: Tree) -> Any:
        return ()

    def plain(self) -> float | None:
        """lr, where a step is y - lr v and nothing is kept."""
        return None

    @abstractmethod
    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        """(next y, next state) from the direction v."""


def keeps_state(rule: Rule) -> bool:
    """Whether a rule keeps anything from step to step, on a model of a matrix and a vector."""
    probe = Tree.of({"matrix": torch.zeros(2, 2), "vector": torch.zeros(2)})
    return bool(pytree.tree_leaves(rule.init(probe)))


def check_carry(rule: Rule, carry: str | None) -> None:
    """Refuse a `carry` other than reset of a rule that keeps nothing."""
    if carry in ("keep", "average") and not keeps_state(rule):
        raise ValueError(
            f"carry has no effect here, got carry={carry!r}: the rule {type(rule).__name__.lower()} keeps no state; "
            "leave it out, or choose a rule with a state, as momentum or adam"
        )


class ServerRule(ABC):
    measures: bool = False
    """Whether `step` uses norm2: every client then sends one number more. Else norm2 is not a number."""

    def init(self, x: Tree) -> Any:
        return ()

    @abstractmethod
    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        """(next x, next state) from the cohort's means: delta, of y_K - x, and norm2, (), of |y_K - x|^2, both with
        the same client weights and both of the clients' messages as they were decoded, so that norm2 >= |delta|^2."""

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor | float:
        """The global learning rate of the step that `step` takes with these arguments, (), as the rule's paper defines
        it. For a rule whose paper has none: |x' - x| / |delta|, 0 where delta = 0."""
        moved, size = (self.step(x, delta, norm2, state, round)[0] - x).norm(), delta.norm()
        return torch.where(size > 0, moved / size, 0.0)

    def model(self, x: Tree, state: Any) -> Tree:
        """What to evaluate."""
        return x


@lru_cache
def beside(kind: type, step: str, other: str) -> bool:
    """Whether one class of these defines both functions."""
    first, second = (next(made for made in kind.__mro__ if name in vars(made)) for name in (step, other))
    return first is second


class PublicState(NamedTuple):
    x: Tree
    shared: Any  # the estimator's c
    carried: Any  # the rule's state, where it is averaged; else ()


class ClientState(NamedTuple):
    own: Any  # the estimator's c_i
    carried: Any  # the rule's state, where it is kept; else ()


class LocalState(NamedTuple):
    y: Tree
    trace: Any
    rule: Any
    steps: Tensor  # (), local steps taken


class Sent(NamedTuple):
    estimator: Any  # averaged uniformly


class Averaged(NamedTuple):
    """What is averaged with the clients' weights, as the displacement is."""

    carried: Any
    norm2: Any  # (), where the server's rule uses it; else ()


def remeasured(message: Message) -> Message:
    """A message that was decoded, with the squared norm of what it has come to: server rules compare the mean of the
    squared norms with the squared norm of the mean, and so both must be of the same vectors."""
    norm2 = message.delta.norm2()
    averaged: Averaged = message.averaged
    if isinstance(averaged.norm2, Tensor):
        averaged = averaged._replace(norm2=norm2)
    return message._replace(averaged=averaged, facts={**message.facts, "norm2": norm2})


@dataclass(frozen=True)
class LocalMethod(WarmStarted):
    rule: Rule
    estimator: Estimator
    server: ServerRule
    carry: Literal["reset", "keep", "average"] = "reset"

    def __post_init__(self) -> None:
        if self.carry not in ("reset", "keep", "average"):
            raise ValueError(f"carry must be one of reset, keep, average, got {self.carry!r}")

    def server_init(self, x: Tree) -> Server:
        carried = self.rule.init(x) if self.carry == "average" else ()
        return Server(PublicState(x, self.estimator.shared_init(x), carried), self.server.init(x))

    def client_init(self, public: Public) -> Client:
        carried = self.rule.init(public.x) if self.carry == "keep" else ()
        return ClientState(self.estimator.own_init(public.x), carried)

    def client_begin(self, public: Public, client: Client) -> Local:
        x = public.x
        kept = {"reset": self.rule.init(x), "keep": client.carried, "average": public.carried}[self.carry]
        return LocalState(x, self.estimator.begin(x, public.shared, client.own), kept, x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        v, trace = self.estimator.estimate(oracle, local.y, public.shared, client.own, local.trace)
        y, rule = self.rule.step(local.y, v, local.rule)
        return LocalState(y, trace, rule, local.steps + 1)

    def client_steps(self, public: Public, client: Client, local: Local, visit: LocalSteps) -> Local:
        """At once where estimator and rule say that this is plain descent; a class that defines how a step goes and
        nothing of the kind beside it does not say so."""
        says = (self, "client_step", "client_steps"), (self.rule, "step", "plain")
        if all(beside(type(part), *names) for part, *names in (*says, (self.estimator, "estimate", "constant"))):
            shift, lr = self.estimator.constant(public.shared, client.own), self.rule.plain()
            if shift is not None and lr is not None and (found := visit.descend(local.y, lr, shift, local.trace)):
                return LocalState(*found, local.rule, local.steps + visit.steps)
        return super().client_steps(public, client, local, visit)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        own, sent = self.estimator.finish(public.shared, client.own, local.trace, local.steps)
        norm2 = delta.norm2()
        averaged = Averaged(local.rule if self.carry == "average" else (), norm2 if self.server.measures else ())
        kept = ClientState(own, local.rule if self.carry == "keep" else ())
        return Message(delta, Sent(sent), {"norm2": norm2}, averaged), kept

    def norm2(self, mean: Message) -> Tensor:
        """(), the mean squared norm for the server's rule; not a number where the rule does not say that it uses it."""
        return mean.averaged.norm2 if self.server.measures else torch.full((), torch.nan)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x, private = self.server.step(server.public.x, mean.delta, self.norm2(mean), server.private, round)
        shared = self.estimator.update(server.public.shared, mean.sent.estimator, mean.delta, round)
        return Server(PublicState(x, shared, mean.averaged.carried), private)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: the global learning rate."""
        arguments = (server.public.x, mean.delta, self.norm2(mean), server.private, round)
        return {"lr": self.server.rate(*arguments)}

    def model(self, server: Server) -> Tree:
        return self.server.model(server.public.x, server.private)

    @property
    def warm_start(self) -> Algorithm | None:
        return WarmStart(self) if self.estimator.start == "gradient" else None

    def warm_started_client(self, client: Client, gradient: Tree) -> Client:
        return client._replace(own=self.estimator.own_warm(gradient))

    def warm_started_server(self, server: Server, mean: Any) -> Server:
        return server._replace(public=server.public._replace(shared=self.estimator.shared_warm(mean)))
