"""Local steps along one momentum G that all clients share: the machinery of FedAvg-M, FedAvg-VR, SCAFFOLD-M,
SCAFFOLD-VR.

Cheng, Huang, Wu, Yuan, ICLR 2024, arXiv:2306.16504. PAdaMFed and PAdaMFed-VR take normalised steps in the same way.

    y   <- y - lr u                      K times; u is the method's direction, G does not change during the round
    c_i <- mean of the K gradients g     where there are control variates
    G   <- mean over clients and steps of u, which is (x - y_K) / (lr K) per client
    x   <- x - gamma G
    c   <- c + |S|/N mean(change of c_i)

A message carries (y_K - x) / K instead of y_K - x. G follows from it with this round's lr, also where clients take
unequal numbers of steps. gamma = server_lr * lr * K, with K the mean number of steps, unless gamma is given. All means
are uniform, whatever the federation's client weights are: c is the plain mean of all c_i, and with other weights G,
which follows from both, would not be the mean of u.

The SCAFFOLD methods send down beta c + (1 - beta) G instead of c and G, since a step needs nothing else of the two.
With a rule other than `sgd` the displacement is no multiple of the mean of u, so that every client sends that mean too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from ..contract import Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from ..local import Rule
from ..tree import Tree
from .checks import one_of, positive, positive_fraction, refuse
from .groups import Number, PerGroup
from .rules import Normalised, Sgd
from .warm_start import Start, WarmStart, WarmStarted


class Shared(NamedTuple):
    """The server's state: what all clients share."""

    x: Tree
    momentum: Tree  # G
    control: Any  # c where there are control variates, else ()
    previous: Any  # x_prev where the direction is reduced, else ()


class Broadcast(NamedTuple):
    x: Tree
    along: Tree  # G; with control variates beta c + (1 - beta) G
    previous: Any  # x_prev where the direction is reduced, else ()


class LocalState(NamedTuple):
    y: Tree
    rule: Any  # the rule's state
    gradients: Any  # sum of g where there are control variates, else ()
    directions: Any  # sum of u where it is sent, else ()
    steps: Tensor  # (), local steps taken


class Sent(NamedTuple):
    change: Any  # of c_i where there are control variates, else ()
    direction: Any  # mean of u over the steps where it is sent, else ()
    steps: Tensor  # (), K; counts as one number up


@dataclass(frozen=True)
class Direction(ABC):
    """The direction u of a local step. `beta`: weight of the new gradient.

    `controlled`: whether clients keep control variates c_i; `reduced`: whether x_prev is sent down, at which a second
    gradient is taken on the same batch.
    """

    beta: float = 0.1
    controlled: ClassVar[bool] = False
    reduced: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive_fraction(beta=self.beta)

    def along(self, shared: Shared) -> Tree:
        """What a step needs of G and c. Both are the same in all steps of a round, so that one vector goes down where
        the formulas have two."""
        return shared.momentum.lerp(shared.control, self.beta) if self.controlled else shared.momentum

    @abstractmethod
    def at(self, y: Tree, public: Broadcast, own: Any, oracle: Oracle) -> tuple[Tree, Tree]:
        """(u, g) at y; `own`: c_i, or ()."""


@dataclass(frozen=True)
class ServerStep:
    """x <- x - gamma G, with gamma = lr * (local lr) * K unless given.

    `momentum` says where the next G comes from. "displacement": from y_K - x, which needs plain steps. "directions":
    the mean of u, which clients send. "controls": beta (mean change of c_i + c) + (1 - beta) G, which is the mean of u
    for a direction that is not reduced.
    """

    gamma: float | None = None
    lr: float = 1.0
    momentum: Literal["displacement", "directions", "controls"] = "displacement"

    def __post_init__(self) -> None:
        positive(server_lr=self.lr)
        if self.gamma is not None:
            positive(gamma=self.gamma)


@dataclass(frozen=True)
class SharedMomentum(WarmStarted):
    """The method of a direction. `rule`: the local step along u; its state starts anew every round. Clients keep c_i
    where there are control variates, else nothing. `step_size`: the rule's, where the server divides by it; it is a
    number of its own, so that it counts as one that is used outside of the local steps."""

    direction: Direction
    rule: Rule
    server: ServerStep
    start: Start = "zeros"
    step_size: Number | None = field(init=False, default=None)
    weighted = False

    def __post_init__(self) -> None:
        one_of("zeros", "gradient", start=self.start)
        if self.server.gamma is not None or self.server.momentum == "displacement":
            rule: Any = self.rule
            object.__setattr__(self, "step_size", rule.lr)

    @property
    def _step_size(self) -> Number:
        assert self.step_size is not None
        return self.step_size

    def server_init(self, x: Tree) -> Server:
        control = x.zeros() if self.direction.controlled else ()
        return Server(Shared(x, x.zeros(), control, x if self.direction.reduced else ()))

    def broadcast(self, server: Server) -> Broadcast:
        """x, what a step needs of G and c with this round's beta, and x_prev where the direction is reduced."""
        shared: Shared = server.public
        return Broadcast(shared.x, self.direction.along(shared), shared.previous)

    def client_init(self, public: Public) -> Client:
        return public.x.zeros() if self.direction.controlled else ()

    def client_begin(self, public: Public, client: Client) -> Local:
        x, zero = public.x, public.x.zeros()
        sends = self.server.momentum == "directions"
        gradients = zero if self.direction.controlled else ()
        return LocalState(x, self.rule.init(x), gradients, zero if sends else (), x.flat.new_zeros(()))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        u, g = self.direction.at(local.y, public, client, oracle)
        y, rule = self.rule.step(local.y, u, local.rule)
        gradients = local.gradients + g if self.direction.controlled else ()
        directions = local.directions + u if self.server.momentum == "directions" else ()
        return LocalState(y, rule, gradients, directions, local.steps + 1)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        moved, k = local.y - public.x, local.steps
        own = local.gradients / k if self.direction.controlled else ()
        change = own - client if self.direction.controlled else ()
        direction = local.directions / k if self.server.momentum == "directions" else ()
        return Message(moved / k, Sent(change, direction, k), {"norm2": moved.norm2()}), own

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x, c, moved, sent = server.public.x, server.public.control, mean.delta, mean.sent
        gamma, lr = self.server.gamma, self.server.lr
        new = x + moved * (lr * sent.steps) if gamma is None else x.add(moved, gamma / self._step_size)
        control = c.add(sent.change, round.share) if self.direction.controlled else ()
        return Server(Shared(new, self._momentum(server.public, mean), control, x if self.direction.reduced else ()))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: gamma. No column where gamma is not given and the local rule has no single step size."""
        if self.server.gamma is not None:
            return {"lr": self.server.gamma}
        if not isinstance(self.rule, Sgd | Normalised) or isinstance(self.rule.lr, PerGroup):
            return {}
        return {"lr": self.server.lr * self.rule.lr * mean.sent.steps}

    def _momentum(self, public: Shared, mean: Message) -> Tree:
        """The next G."""
        if self.server.momentum == "directions":
            return mean.sent.direction
        if self.server.momentum == "controls":
            return public.momentum.lerp(mean.sent.change + public.control, self.direction.beta)
        return mean.delta / -self._step_size

    def model(self, server: Server) -> Tree:
        return server.public.x

    @property
    def warm_start(self) -> Algorithm | None:
        return WarmStart(self) if self.start == "gradient" else None

    def warm_started_client(self, client: Client, gradient: Tree) -> Client:
        return gradient if self.direction.controlled else ()

    def warm_started_server(self, server: Server, mean: Tree) -> Server:
        control = mean if self.direction.controlled else ()
        return Server(server.public._replace(momentum=mean, control=control))


def shared_momentum(
    direction: Direction, rule: Rule, gamma: float | None, server_lr: float | None, start: Start
) -> SharedMomentum:
    """The method with this direction; the other arguments as in the recipe `fedavg_m`."""
    plain = isinstance(rule, Sgd)
    if gamma is not None and not plain:
        raise ValueError(f"gamma needs the rule sgd, got gamma={gamma}, rule={rule}; give server_lr")
    if gamma is not None:
        refuse({"server_lr": server_lr}, f"the server's step is gamma={gamma}", "give one of the two")
    server_lr = 1.0 if server_lr is None else server_lr
    server = ServerStep(gamma, server_lr, "displacement" if plain else "directions")
    return SharedMomentum(direction, rule, server, start)
