"""Ditto: every client keeps a model of its own, which is pulled towards the server's.

Li, Hu, Beirami, Smith, ICML 2021, arXiv:2012.04221, Algorithm 1.

Choose it when clients need models of their own and the server's model must be that of FedAvg. With `lam` = 0 a client
trains alone, and a larger `lam` keeps its model nearer to the server's; a local step takes two gradients.

    y   <- x;  K times: y <- y - step(g(y)),  v <- v - step(g(v) + lam (v - x))
    x   <- x + server_lr * mean of (y_K - x)
    v_i <- v

Both steps are on the step's batch. x is as in FedAvg, to the bit. A client's model is v_i. Before its first visit it is
the server's model of that time (start = "current"), or the model before round 1 ("initial").

Departures:
- The paper lets y and v take numbers of steps of their own; here both take one in each step, as in the authors' code.
- The paper chooses lam for each client on validation rows; here it is one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .contract import Algorithm, Around, Client, Constant, Local, Message, Oracle, Public, Round, Server
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.checks import nonnegative, one_of
from .parts.rules import Sgd
from .parts.servers import Mean
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


@dataclass(frozen=True)
class Ditto(Around):
    """`method` for x, and a model of its own for each client. `rule`: v's local step, whose state starts anew every
    visit."""

    method: Algorithm
    rule: Rule
    lam: float = 1.0
    start: Literal["current", "initial"] = "current"

    def __post_init__(self) -> None:
        nonnegative(lam=self.lam)
        one_of("current", "initial", start=self.start)

    @property
    def own_models(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    def origin(self, public: Public) -> Tree:
        return self.method.origin(public.method)

    def server_init(self, x: Tree) -> Server:
        server = self.method.server_init(x)
        return server._replace(public=Shared(server.public, Constant(x) if self.start == "initial" else ()))

    def client_init(self, public: Public) -> Client:
        v = public.first.value if self.start == "initial" else self.origin(public)
        return Own(self.method.client_init(public.method), v)

    def client_begin(self, public: Public, client: Client) -> Local:
        local = self.method.client_begin(public.method, client.method)
        return LocalState(local, client.v, self.rule.init(client.v))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        method = self.method.client_step(public.method, client.method, local.method, oracle)
        direction = oracle(local.v).add(local.v - self.origin(public), self.lam)
        return LocalState(method, *self.rule.step(local.v, direction, local.rule))

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, kept = self.method.client_finish(public.method, client.method, local.method)
        facts = {**message.facts, "personal_norm2": (local.v - client.v).norm2()}
        return message._replace(facts=facts), Own(kept, local.v)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        after = self.method.server_update(self._server_of_method(server), mean, round)
        return after._replace(public=server.public._replace(method=after.public))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._server_of_method(server), mean, round)

    def model(self, server: Server) -> Tree:
        return self.method.model(self._server_of_method(server))

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return client.v

    def _server_of_method(self, server: Server) -> Server:
        return server._replace(public=server.public.method)


def ditto(
    lam: float = 1.0,
    rule: Rule = Sgd(0.1),
    personal_rule: Rule | None = None,
    server_lr: float = 1.0,
    start: Literal["current", "initial"] = "current",
) -> Ditto:
    """lam: weight of the pull of a client's own model towards the server's; rule: the local optimiser of the server's
    model; personal_rule: that of the clients' own models, the same as `rule` unless given; server_lr: step size along
    the mean displacement; start: a client's own model before its first visit, the server's of that time (current), or
    the model before round 1 (initial)."""
    base = LocalMethod(rule, Plain(), Mean(server_lr))
    return Ditto(base, personal_rule or rule, lam, start)
