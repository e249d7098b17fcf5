"""pFedMe: the server's model is the one from which all clients reach good models of their own under a pull back.

Dinh, Tran, Nguyen, NeurIPS 2020, arXiv:2006.08848, Algorithm 1.

Choose it when clients need models of their own and these should move the server's model, which they do not do in Ditto.
A local step takes several gradients, five by default.

    w       <- x;  K times:
    theta   <- w;  J times: theta <- theta - step(g(theta) + lam (theta - w) + decay theta)
    w       <- w - step(lam (w - theta))
    x       <- x + beta * mean of (w_K - x)
    theta_i <- the last theta

A client's model is theta_i. All J inner steps are on the step's batch. With J = 1 and an inner step size of 1 / lam, x
is as in FedAvg.

Departures:
- The paper solves the inner problem to an accuracy; here, as in the authors' code, by J steps of any rule.
- In the authors' code all clients train in every round and those that are drawn are averaged; here, as in the paper's
  experiments with a part of the clients, only those that are drawn train.
- decay and begin = "previous", by which theta goes on where the last local step left it, are the authors' code's.
- keep = "nothing" is for clients without states, who reach theta anew before they are evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .contract import Adaptation, Algorithm, Client, Local, Message, Oracle, Public, Round, Server
from .local import Rule
from .parts.checks import nonnegative, one_of, positive
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree


class LocalState(NamedTuple):
    w: Tree
    theta: Tree
    rule: Any  # the state of w's rule


@dataclass(frozen=True)
class PFedMe(Algorithm):
    """The method on the contract. `rule`: the step of w, whose state starts anew every visit; `personal_rule`: the step
    of theta, whose state starts anew every local step."""

    rule: Rule
    personal_rule: Rule
    server: Mean
    lam: float = 15.0
    inner_steps: int = 5
    decay: float = 0.0
    begin: Literal["server", "previous"] = "server"
    keep: Literal["theta", "nothing"] = "theta"

    def __post_init__(self) -> None:
        positive(lam=self.lam)
        nonnegative(decay=self.decay)
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps >= 1 must hold, got inner_steps={self.inner_steps}; raise it")
        one_of("server", "previous", begin=self.begin)
        one_of("theta", "nothing", keep=self.keep)

    @property
    def own_models(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.keep == "theta"

    @property
    def adaptation(self) -> Adaptation | None:
        return None if self.own_models else Adaptation(self.personal_rule, self.inner_steps, prox=self.lam)

    @property
    def caution(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        lr = self.rule.plain_lr()
        if lr is None or lr * self.lam <= 1:
            return ""
        return (
            f"a step of w is lr * lam = {lr * self.lam:g} times its distance from theta and goes beyond it, got "
            f"lr={lr:g} of method.rule and lam={self.lam:g}; lower one of them, so that the product is at most 1"
        )

    def origin(self, public: Public) -> Tree:
        return public

    def server_init(self, x: Tree) -> Server:
        return Server(x)

    def client_init(self, public: Public) -> Client:
        return public if self.own_models else ()

    def client_begin(self, public: Public, client: Client) -> Local:
        return LocalState(public, public, self.rule.init(public))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        w, theta = local.w, local.w if self.begin == "server" else local.theta
        state = self.personal_rule.init(theta)
        for _ in range(self.inner_steps):
            direction = oracle(theta).add(theta - w, self.lam).add(theta, self.decay)
            theta, state = self.personal_rule.step(theta, direction, state)
        w, rule = self.rule.step(w, (w - theta) * self.lam, local.rule)
        return LocalState(w, theta, rule)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.w - public
        facts = {"norm2": delta.norm2()}
        if self.own_models:
            facts["personal_norm2"] = (local.theta - client).norm2()
        return Message(delta, (), facts), local.theta if self.own_models else ()

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return Server(self.server.step(server.public, mean.delta, torch.full((), torch.nan), (), round)[0])

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """lr: beta."""
        return {"lr": self.server.rate(server.public, mean.delta, torch.full((), torch.nan), (), round)}

    def model(self, server: Server) -> Tree:
        return server.public

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return client if self.own_models else x


def pfedme(
    lam: float = 15.0,
    inner_steps: int = 5,
    rule: Rule = Sgd(0.005),
    personal_rule: Rule = Sgd(0.05),
    beta: float = 1.0,
    decay: float = 0.0,
    begin: Literal["server", "previous"] = "server",
    keep: Literal["theta", "nothing"] = "theta",
) -> PFedMe:
    """lam: weight of the pull of a client's own model towards w; inner_steps: J, the steps of the own model in each
    local step; rule: the step of w; personal_rule: the step of the own model; beta: step size along the mean
    displacement; decay: weight decay of the own model; begin: the inner steps of a local step begin at w (server), or
    where those of the step before ended (previous); keep: clients keep their own models between visits (theta), or
    nothing."""
    return PFedMe(rule, personal_rule, Mean(beta), lam, inner_steps, decay, begin, keep)
