"""Ditto: every client keeps a model of its own, which is pulled towards the server's.

Li, Hu, Beirami, Smith, ICML 2021, arXiv:2012.04221, Algorithm 1.

Choose it when clients need models of their own and the server's model must be that of FedAvg. With `lam` = 0 a client
trains alone, and a larger `lam` keeps its model nearer to the server's; a local step takes two gradients.

    y   <- x;  K times: y <- y - step(g(y)),  v <- v - step(g(v) + lam (v - x))
    x   <- x + server_lr * mean of (y_K - x)
    v_i <- v

Both steps are on the step's batch. x is as in FedAvg, to the bit. A client's model is v_i. Before its first visit it is
the server's model of that time (start = "current"), or the model before round 1 ("initial").

With `base`, x and what is sent are those of another method, whose local steps see x and y alone. With `split` = [a, b]
a parts of a visit's steps move v, and b parts then move y, as the paper gives both numbers of steps of their own;
without it both move in every step, as in the authors' code. All steps take two gradients.

Departures:
- The paper chooses lam for each client on validation rows; here it is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from .contract import (
    Algorithm,
    Around,
    Client,
    Constant,
    Deferred,
    Local,
    LocalSteps,
    Message,
    Oracle,
    Public,
    Round,
    RunContext,
    Server,
)  # fmt: skip
from .fedavg import Plain
from .local import LocalMethod, Rule, declared_lr
from .parts.checks import nonnegative, one_of, refuse
from .parts.rules import Sgd
from .parts.servers import Mean
from .parts.turns import Turns, chosen
from .tree import Tree


class Shared(NamedTuple):
    method: Any  # the public state of FedAvg
    first: Any  # the model before round 1, where clients begin with it, else ()


class Own(NamedTuple):
    """What a client keeps."""

    method: Any
    v: Tree


class LocalState(NamedTuple):
    method: Any
    v: Tree
    rule: Any  # the state of v's rule


class OwnSteps(LocalSteps):
    """The local steps of a client as the method sees them, which takes those of v beside."""

    def __init__(self, ditto: Ditto, steps: LocalSteps, v: Tree, rule: Any, x: Tree) -> None:
        """x: the server's model, towards which v is pulled."""
        self.ditto, self.of, self.v, self.rule, self.x = ditto, steps, v, rule, x
        self.steps = steps.steps

    def __iter__(self) -> Iterator[Oracle]:
        for oracle in self.of:
            yield oracle
            self.v, self.rule = self.ditto._step(oracle, self.v, self.rule, self.x)

    def descend(self, y: Tree, lr: float, shift: Any = (), total: Any = (), pull: Any = ()) -> tuple[Tree, Any] | None:
        own_lr, own_pull = declared_lr(self.ditto.rule), (self.ditto.lam, self.x) if self.ditto.lam else ()
        found = None if own_lr is None else self.of.descend(y, lr, shift, total, pull)
        if own_lr is None or found is None:
            return None
        own = self.of.descend(self.v, own_lr, pull=own_pull)
        assert own is not None  # the engine has a kernel for it
        self.v = own[0]
        return found


@dataclass(frozen=True)
class Ditto(Around):
    """`method` for x, and a model of its own for each client. `rule`: v's local step, whose state starts anew every
    visit; `turns`: None to move both in every step."""

    method: Algorithm
    rule: Rule
    lam: float = 1.0
    start: Literal["current", "initial"] = "current"
    turns: Turns | None = None

    def __post_init__(self) -> None:
        nonnegative(lam=self.lam)
        one_of("current", "initial", start=self.start)

    @property
    def own_models(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    @property
    def least_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.least_steps if self.turns is None else self.turns.least_steps()

    def origin(self, public: Public) -> Tree:
        return self.method.origin(public.method)

    def server_init(self, x: Tree) -> Server:
        server = self.method.server_init(x)
        return server._replace(public=Shared(server.public, Constant(x) if self.start == "initial" else ()))

    def broadcast(self, server: Server) -> Public:
        return server.public._replace(method=self.method.broadcast(self._server_of_method(server)))

    def unpack(self, public: Public) -> Any:
        return public._replace(method=self.method.unpack(public.method))

    def client_init(self, public: Public) -> Client:
        v = public.first.value if self.start == "initial" else self.origin(public)
        return Own(self.method.client_init(public.method), v)

    def client_begin(self, public: Public, client: Client) -> Local:
        local = self.method.client_begin(public.method, client.method)
        return LocalState(local, client.v, self.rule.init(client.v))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        method = self.method.client_step(public.method, client.method, local.method, oracle)
        v, rule = self._step(oracle, local.v, local.rule, self.origin(public))
        if self.turns is None:
            return LocalState(method, v, rule)
        own = self.turns.is_personal(oracle.done)
        v, rule = chosen(own, (v, rule), (local.v, local.rule))
        return LocalState(chosen(~own, method, local.method), v, rule)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        """The method's steps, and on the same batches those of v: in one call where the method's are."""
        if self.turns is not None:
            return super().client_steps(public, client, local, steps)
        own = OwnSteps(self, steps, local.v, local.rule, self.origin(public))
        method = self.method.client_steps(public.method, client.method, local.method, own)
        return LocalState(method, own.v, own.rule)

    def _step(self, oracle: Oracle, v: Tree, rule: Any, x: Tree) -> tuple[Tree, Any]:
        """(the next v, the next state of its rule)."""
        return self.rule.step(v, oracle(v).add(v - x, self.lam), rule)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, kept = self.method.client_finish(public.method, client.method, local.method)
        facts = {**message.facts, "personal_norm2": (local.v - client.v).norm2()}
        return message._replace(facts=facts), Own(kept, local.v)

    def decode(self, public: Public, message: Message) -> Message:
        return self.method.decode(public.method, message)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        after = self.method.server_update(self._server_of_method(server), mean, round)
        return after._replace(public=server.public._replace(method=after.public))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._server_of_method(server), mean, round)

    def model(self, server: Server) -> Tree:
        return self.method.model(self._server_of_method(server))

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return client.v

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        return client.v

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        return self.method.traffic(round, public.method, message, client)

    def _server_of_method(self, server: Server) -> Server:
        return server._replace(public=server.public.method)


@dataclass(frozen=True)
class Planned(Deferred):
    """Ditto around a method whose settings follow from the run; `ditto` makes it from this method."""

    base: Deferred
    ditto: Callable[[Algorithm], Ditto]

    def build(self, context: RunContext) -> Ditto:
        return self.ditto(self.base.build(context))


def around(base: Algorithm, rule: Rule, lam: float, start: Literal["current", "initial"], turns: Turns | None) -> Ditto:
    """Ditto around a method. Raises ValueError for one that it does not go with."""
    lacks = {
        "gives clients models of their own": base.own_models,
        "lets clients make something of their own of the broadcast": base.own_view,
        "begins with a pass over all clients": base.warm_start is not None,
        "sends no changes of a model": type(base).origin is Algorithm.origin,
    }
    for why, holds in lacks.items():
        if holds:
            raise ValueError(f"base must be another method, got {type(base).__name__}, which {why}; choose fedavg")
    return Ditto(base, rule, lam, start, turns)


def ditto(
    lam: float = 1.0,
    rule: Rule = Sgd(0.1),
    personal_rule: Rule | None = None,
    server_lr: float = 1.0,
    start: Literal["current", "initial"] = "current",
    base: Algorithm | None = None,
    split: tuple[int, int] | None = None,
) -> Ditto | Planned:
    """lam: weight of the pull of a client's own model towards the server's; rule: the local optimiser of the server's
    model; personal_rule: that of the clients' own models, the same as `rule` unless given; server_lr: step size along
    the mean displacement; start: a client's own model before its first visit, the server's of that time (current), or
    the model before round 1 (initial); base: the method of the server's model, FedAvg with `rule` and `server_lr`
    unless given, which then has arguments of its own; split: as in [10, 1], the parts of a visit's steps that first
    move the own model and then the server's, unless given all steps move both."""
    if split is not None and min(split) < 1:
        raise ValueError(f"split must be two whole numbers of 1 or more, got {list(split)}; leave it out")
    turns = None if split is None else Turns(*split)
    if base is None:
        return Ditto(LocalMethod(rule, Plain(), Mean(server_lr)), personal_rule or rule, lam, start, turns)
    if personal_rule is None:
        raise ValueError("personal_rule must be given with base, got none; give the rule of clients' own models")
    refuse({"rule": rule if rule != Sgd(0.1) else None}, "base has its own", "leave it out")
    refuse({"server_lr": server_lr if server_lr != 1 else None}, "base has its own", "leave it out")
    if base.moves_weights:
        raise ValueError(
            "base must leave the weights beside adapters as they are, got flora or fedex_lora; choose fedavg"
        )
    made = partial(around, rule=personal_rule, lam=lam, start=start, turns=turns)
    return Planned(base, made) if isinstance(base, Deferred) else made(base)
