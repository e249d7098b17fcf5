"""APFL: a client's model is a mixture of one of its own and the server's, in proportions that it learns.

Deng, Kamani, Mahdavi 2020, arXiv:2003.13461.

Choose it when the server's model suits some clients and not others: each client learns in which proportion its own
model and the server's are mixed. A local step takes two gradients.

    y   <- x;  K times, both gradients on the step's batch and at the points before the step:
    m   = alpha v + (1 - alpha) y
    a'  = clip(alpha - lr_alpha (<v - y, g(m)> + alpha_decay alpha), 0, 1)
    y   <- y - step(g(y)),  v <- v - step(alpha g(m)),  alpha <- a'
    x   <- x + server_lr * mean of (y_K - x)

alpha moves in the first step of a visit (update = "first"), in every one or never. A client's model is alpha_i v_i +
(1 - alpha_i) x. x is as in FedAvg. Before its first visit v_i is the server's model of that time (start = "current", so
that alpha does not move in the first step), or the model before round 1 ("initial").

Uncertain: whether v's step has alpha before its update or after it; here it is the former.

Departures:
- The authors' code (FedTorch) mixes the outputs of the two models and not their parameters.
- alpha_decay is the authors' code's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .contract import Algorithm, Client, Constant, Local, Message, Oracle, Public, Round, Server
from .local import Rule
from .parts.checks import nonnegative, one_of, positive
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree


class Shared(NamedTuple):
    x: Tree
    first: Any  # the model before round 1, where clients begin with it, else ()


class Own(NamedTuple):
    """What a client keeps."""

    v: Tree
    alpha: Tensor  # ()


class LocalState(NamedTuple):
    y: Tree
    v: Tree
    alpha: Tensor  # ()
    rule: Any  # the state of y's rule
    personal_rule: Any  # the state of v's rule


def mixed(alpha: Tensor, v: Tree, y: Tree) -> Tree:
    """alpha v + (1 - alpha) y."""
    return v * alpha + y * (1 - alpha)


@dataclass(frozen=True)
class Apfl(Algorithm):
    """The method on the contract. The states of both rules start anew every visit. `lr_alpha`: alpha's step size."""

    rule: Rule
    personal_rule: Rule
    server: Mean
    alpha: float = 0.5
    update: Literal["first", "every", "never"] = "first"
    lr_alpha: float = 0.1
    alpha_decay: float = 0.0
    start: Literal["current", "initial"] = "current"
    own_models = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: 0 <= alpha <= 1 must hold, got alpha={self.alpha}; choose a number in between")
        positive(lr_alpha=self.lr_alpha)
        nonnegative(alpha_decay=self.alpha_decay)
        one_of("first", "every", "never", update=self.update)
        one_of("current", "initial", start=self.start)

    def origin(self, public: Public) -> Tree:
        return public.x

    def server_init(self, x: Tree) -> Server:
        return Server(Shared(x, Constant(x) if self.start == "initial" else ()))

    def client_init(self, public: Public) -> Client:
        v = public.first.value if self.start == "initial" else public.x
        return Own(v, torch.full_like(v.flat[0], self.alpha))

    def client_begin(self, public: Public, client: Client) -> Local:
        x, v = public.x, client.v
        return LocalState(x, v, client.alpha, self.rule.init(x), self.personal_rule.init(v))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        y, v, alpha = local.y, local.v, local.alpha
        g, g_mixed = oracle(y), oracle(mixed(alpha, v, y))
        y_next, rule = self.rule.step(y, g, local.rule)
        v_next, personal_rule = self.personal_rule.step(v, g_mixed * alpha, local.personal_rule)
        return LocalState(y_next, v_next, self._next(alpha, v - y, g_mixed, oracle.done), rule, personal_rule)

    def _next(self, alpha: Tensor, apart: Tree, g: Tree, done: Tensor) -> Tensor:
        """alpha after a step. apart: v - y; g: the gradient at the mixture; done: see `Oracle`."""
        if self.update == "never":
            return alpha
        slope = torch.dot(apart.flat.double(), g.flat.double()).to(alpha.dtype) + self.alpha_decay * alpha
        moved = (alpha - self.lr_alpha * slope).clamp(0, 1).to(alpha.dtype)
        return moved if self.update == "every" else torch.where(done == 0, moved, alpha)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta, moved = local.y - public.x, local.v - client.v
        facts = {"norm2": delta.norm2(), "personal_norm2": moved.norm2(), "alpha": local.alpha}
        return Message(delta, (), facts), Own(local.v, local.alpha)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x = self.server.step(server.public.x, mean.delta, torch.full((), torch.nan), (), round)[0]
        return Server(server.public._replace(x=x))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: server_lr."""
        return {"lr": self.server.rate(server.public.x, mean.delta, torch.full((), torch.nan), (), round)}

    def model(self, server: Server) -> Tree:
        return server.public.x

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return mixed(client.alpha, client.v, x)

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        """v."""
        return client.v

    def client_facts(self, public: Public, client: Client) -> dict[str, Tensor]:
        """alpha: the share of the client's own model."""
        return {"alpha": client.alpha}


def apfl(
    alpha: float = 0.5,
    rule: Rule = Sgd(0.1),
    personal_rule: Rule | None = None,
    update: Literal["first", "every", "never"] = "first",
    lr_alpha: float | None = None,
    alpha_decay: float = 0.0,
    server_lr: float = 1.0,
    start: Literal["current", "initial"] = "current",
) -> Apfl:
    """alpha: the share of a client's own model in its mixture before its first visit; rule: the local optimiser of the
    server's model; personal_rule: that of the own models, the same as `rule` unless given; update: alpha moves in the
    first step of a visit (first), in every step, or never; lr_alpha: alpha's step size, unless given that of `rule`,
    which must then be plain descent; alpha_decay: weight of a pull of alpha to 0; server_lr: step size along the mean
    displacement; start: the own model before the first visit, the server's of that time (current), or the model before
    round 1 (initial)."""
    for name, value, default in (("lr_alpha", lr_alpha, None), ("alpha_decay", alpha_decay, 0.0)):
        if update == "never" and value != default:
            raise ValueError(f"{name} has no effect with update=never, got {name}={value}; leave it out")
    lr = lr_alpha if lr_alpha is not None else rule.plain_lr()
    if lr is None and update != "never":
        raise ValueError(f"lr_alpha must be given with a rule like {type(rule).__name__.lower()}, got none; give 0.1")
    return Apfl(rule, personal_rule or rule, Mean(server_lr), alpha, update, lr or 0.1, alpha_decay, start)
