"""`LocalMethod`: a method of local steps between averages, composed of parts.

    y <- x;  K times: v <- estimate(y), y <- rule(y, v);  x <- server(x, mean of y_K - x)

It implements the contract once, from four parts:

    estimator   the direction v of a local step, from gradients
    rule        the step that a direction gives; it has the learning rate
    carry       what becomes of the rule's state after a round: it is reset, kept by the client, or averaged
    server      what the server does with the mean of the displacements y_K - x

`LocalMethod` knows no method's name: a method that would need an `if` here is written on the contract instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .contract import Algorithm, Client, Local, LocalSteps, Message, Oracle, Public, Round, Server
from .parts.checks import one_of
from .parts.warm_start import Start, WarmStart, WarmStarted
from .tree import Tree

Carry = Literal["reset", "keep", "average"]


class Estimator(ABC):
    """The direction of a local step, from gradients.

    The letters are the papers': x is the server's model, y the local iterate, c what all clients share, c_i what client
    i keeps between rounds. The trace is what the estimator carries from step to step within a round. c, c_i and the
    trace are trees, tuples of trees and 0-d tensors, or ().
    """

    start: Start = "zeros"
    """"gradient": before the first round every client sends its gradient at x, from which c_i and c start."""

    weighted: bool = True
    """False: the means of displacements and of what is averaged are uniform, see `Algorithm.weighted`."""

    stale: str = ""
    """Why there is no asynchronous form, see `Algorithm.stale`; "" if there is one."""

    def shared_init(self, x: Tree) -> Any:
        """c before the first round."""
        return ()

    def own_init(self, x: Tree) -> Any:
        """c_i before the client's first round. x: the model that the client receives in it, not that before round 1."""
        return ()

    def begin(self, x: Tree, c: Any, c_i: Any) -> Any:
        """The trace before the first step of a round."""
        return ()

    @abstractmethod
    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Any, trace: Any) -> tuple[Tree, Any]:
        """(direction at y, next trace)."""

    def constant_shift(self, c: Any, c_i: Any) -> Any:
        """s, where every direction is the gradient + s and the trace is () or the sum of the gradients; () for s = 0.
        None where the directions are not of this form. With a rule of plain descent the engine may then take all steps
        of a round in one call."""
        return None

    def finish(self, c: Any, c_i: Any, trace: Any, steps: Tensor, delta: Tree) -> tuple[Any, Any]:
        """(next c_i, what is sent besides the displacement); `steps`: (), the number of local steps taken; `delta`: the
        displacement y_K - x of this client, before it is encoded."""
        return c_i, ()

    def update(self, c: Any, sent: Any, delta: Tree, round: Round) -> Any:
        """The next c, from the cohort's means of what was sent and of the displacement."""
        return c

    def own_from_gradient(self, gradient: Tree) -> Any:
        """c_i before the first round with start = "gradient", from the client's own gradient at x."""
        return gradient

    def shared_from_gradient(self, gradient: Tree) -> Any:
        """c before the first round with start = "gradient", from the mean of all clients' gradients at x."""
        return gradient


class Rule(ABC):
    """A step of the local optimiser. A rule has the learning rate; its state is passed in and returned."""

    table: ClassVar[str] = "RULES"
    """The registry's table of such parts."""

    def init(self, x: Tree) -> Any:
        """The state before the first step; () for none."""
        return ()

    @property
    def patterns(self) -> Mapping[str, tuple[str, ...]]:
        """Setting -> patterns of tensors' names, * and ? as in file names, each of which must match a trained one."""
        return {}

    def plain_lr(self) -> float | None:
        """lr, where a step is y - lr v and the rule keeps no state; else None."""
        return None

    @abstractmethod
    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        """(next y, next state) from the direction v."""

    def facts(self, state: Any) -> dict[str, Tensor]:
        """0-d numbers by name that the state after the last local step says of the client's round. Their means over the
        cohort are the columns `client/NAME` of the record."""
        return {}


def keeps_state(rule: Rule) -> bool:
    """Whether a rule keeps anything from step to step, tried on a model of one matrix and one vector."""
    probe = Tree.of({"matrix": torch.zeros(2, 2), "vector": torch.zeros(2)})
    return bool(pytree.tree_leaves(rule.init(probe)))


def check_carry(rule: Rule, carry: str | None) -> None:
    """Refuse carry = "keep" and carry = "average" for a rule without a state."""
    if carry in ("keep", "average") and not keeps_state(rule):
        raise ValueError(
            f"carry has no effect here, got carry={carry!r}: the rule {type(rule).__name__.lower()} keeps no state; "
            "leave it out, or choose a rule with a state, as momentum or adam"
        )


class ServerRule(ABC):
    """The server's step from the mean displacement."""

    uses_norm2: bool = False
    """Whether `step` uses norm2. If so, every client sends one number more; if not, norm2 is NaN."""

    def init(self, x: Tree) -> Any:
        """The state before round 1; () for none."""
        return ()

    @abstractmethod
    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        """(next x, next state) from the cohort's means: `delta`, of y_K - x, and `norm2`, (), of |y_K - x|^2. Both have
        the same client weights and are taken of the messages as they were decoded, so that norm2 >= |delta|^2."""

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor | float:
        """The global learning rate, (), of the step that `step` takes with the same arguments, as the rule's paper
        defines it. For a rule whose paper defines none: |x' - x| / |delta|, 0 where delta = 0."""
        moved, size = (self.step(x, delta, norm2, state, round)[0] - x).norm(), delta.norm()
        return torch.where(size > 0, moved / size, 0.0)

    def model(self, x: Tree, state: Any) -> Tree:
        """The model that is evaluated."""
        return x


class PublicState(NamedTuple):
    x: Tree
    shared: Any  # the estimator's c
    carried: Any  # the rule's state where it is averaged, else ()


class ClientState(NamedTuple):
    own: Any  # the estimator's c_i
    carried: Any  # the rule's state where the client keeps it, else ()


class LocalState(NamedTuple):
    y: Tree
    trace: Any  # the estimator's
    rule: Any  # the rule's state
    steps: Tensor  # (), local steps taken


class Sent(NamedTuple):
    """What is averaged uniformly."""

    estimator: Any


class Averaged(NamedTuple):
    """The states that are averaged with the client weights."""

    carried: Any  # the rule's state where it is averaged, else ()


def with_decoded_norm2(message: Message) -> Message:
    """A decoded message with the squared norm of its decoded displacement. Server rules compare the mean of the squared
    norms with the squared norm of the mean, so that both must be of the same vectors."""
    norm2 = message.delta.norm2()
    compared = norm2 if isinstance(message.norm2, Tensor) else ()
    return message._replace(norm2=compared, facts={**message.facts, "norm2": norm2})


@lru_cache
def defines_both(kind: type, step: str, declaration: str) -> bool:
    """Whether `kind` has both functions from the same class. If not, a subclass has overridden the step, and what the
    declaration of its base class says of the step no longer holds."""
    first, second = (next(base for base in kind.__mro__ if name in vars(base)) for name in (step, declaration))
    return first is second


def declared_lr(rule: Rule) -> float | None:
    """lr, where a rule declares that its step is y - lr v, and the declaration belongs to this step; else None."""
    return rule.plain_lr() if defines_both(type(rule), "step", "plain_lr") else None


@dataclass(frozen=True)
class LocalMethod(WarmStarted):
    """The contract from an estimator, a rule, its carry and a server rule."""

    rule: Rule
    estimator: Estimator
    server: ServerRule
    carry: Carry = "reset"
    follows_sent = False
    """Whether `client_sent` keeps anything of its own."""

    def __post_init__(self) -> None:
        one_of("reset", "keep", "average", carry=self.carry)

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.estimator.weighted

    @property
    def stale(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.estimator.stale

    @property
    def averages_states(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.carry == "average"

    def origin(self, public: Public) -> Tree:
        return public.x

    def server_init(self, x: Tree) -> Server:
        carried = self.rule.init(x) if self.carry == "average" else ()
        return Server(PublicState(x, self.estimator.shared_init(x), carried), self.server.init(x))

    def client_init(self, public: Public) -> Client:
        carried = self.rule.init(public.x) if self.carry == "keep" else ()
        return ClientState(self.estimator.own_init(public.x), carried)

    def client_begin(self, public: Public, client: Client) -> Local:
        x = public.x
        state = {"reset": self.rule.init(x), "keep": client.carried, "average": public.carried}[self.carry]
        return LocalState(x, self.estimator.begin(x, public.shared, client.own), state, x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        v, trace = self.estimator.estimate(oracle, local.y, public.shared, client.own, local.trace)
        y, rule = self.rule.step(local.y, v, local.rule)
        return LocalState(y, trace, rule, local.steps + 1)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        """All steps in one call, where estimator and rule declare that they are plain descent and the engine has a
        kernel for it; else one by one."""
        lr = declared_lr(self.rule) if self._declares_descent() else None
        shift = None if lr is None else self.estimator.constant_shift(public.shared, client.own)
        if lr is not None and shift is not None and (found := steps.descend(local.y, lr, shift, local.trace)):
            return LocalState(*found, local.rule, local.steps + steps.steps)
        return super().client_steps(public, client, local, steps)

    def _declares_descent(self) -> bool:
        """Whether the declarations of plain descent belong to the steps that this method really takes."""
        return defines_both(type(self), "client_step", "client_steps") and defines_both(
            type(self.estimator), "estimate", "constant_shift"
        )

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        own, sent = self.estimator.finish(public.shared, client.own, local.trace, local.steps, delta)
        norm2 = delta.norm2()
        averaged = Averaged(local.rule if self.carry == "average" else ())
        kept = ClientState(own, local.rule if self.carry == "keep" else ())
        compared = norm2 if self.server.uses_norm2 else ()
        facts = {**self.rule.facts(local.rule), "norm2": norm2}
        return Message(delta, Sent(sent), facts, averaged, compared), kept

    def sent_now(self, public: Public) -> Tensor | None:
        """(P,) bool: the numbers of the displacement that are sent in this round; None for all. The others are 0."""
        return None

    def client_sent(self, public: Public, client: Client, kept: Client, delta: Tree) -> Client:
        """What the client keeps until its next round, once it is known what the server makes of its displacement.
        `client`: what it has kept so far; `kept`: that of `client_finish`; `delta`: the displacement, decoded."""
        return kept

    def norm2(self, mean: Message) -> Tensor:
        """(), the mean squared norm for the server's rule; NaN where the rule does not use it."""
        return mean.norm2 if self.server.uses_norm2 else torch.full((), torch.nan)

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
        return client._replace(own=self.estimator.own_from_gradient(gradient))

    def warm_started_server(self, server: Server, mean: Any) -> Server:
        shared = self.estimator.shared_from_gradient(mean)
        return server._replace(public=server.public._replace(shared=shared))
