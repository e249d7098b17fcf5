"""Local training of a model that the client keeps: nothing of it is sent.

y <- y_i;  K times: y <- y - step(g(y) + prox (y - y_i));  y_i <- y
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..contract import Algorithm, Client, Constant, Local, LocalSteps, Message, Oracle, Public, Round, Server
from ..local import Rule, declared_lr, defines_both
from ..tree import Tree
from .checks import nonnegative


class Own(NamedTuple):
    """What a client keeps."""

    y: Tree
    rule: Any  # the rule's state where the client keeps it, else ()


class LocalState(NamedTuple):
    y: Tree
    rule: Any  # the rule's state


@dataclass(frozen=True)
class OwnModel(Algorithm):
    """The method. `rule`: the local step; `keep`: whether its state stays with the client between visits; `prox`:
    weight of the pull towards the model that the visit began with."""

    rule: Rule
    keep: bool = False
    prox: float = 0.0
    own_models = True
    shares_model = False
    not_private = "its clients send nothing"

    def __post_init__(self) -> None:
        nonnegative(prox=self.prox)

    def server_init(self, x: Tree) -> Server:
        return Server(Constant(x))

    def client_init(self, public: Public) -> Client:
        return Own(public.value, self.rule.init(public.value) if self.keep else ())

    def client_begin(self, public: Public, client: Client) -> Local:
        return LocalState(client.y, client.rule if self.keep else self.rule.init(client.y))

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        v = oracle(local.y)
        if self.prox:
            v = v.add(local.y - client.y, self.prox)
        return LocalState(*self.rule.step(local.y, v, local.rule))

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        """All steps in one call, where they are plain descent and the engine has a kernel for it; else one by one."""
        lr = declared_lr(self.rule) if defines_both(type(self), "client_step", "client_steps") else None
        pull = (self.prox, client.y) if self.prox else ()
        if lr is not None and (found := steps.descend(local.y, lr, pull=pull)):
            return local._replace(y=found[0])
        return super().client_steps(public, client, local, steps)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        moved = (local.y - client.y).norm2()
        facts = {"norm2": moved, "personal_norm2": moved}
        return Message((), (), facts), Own(local.y, local.rule if self.keep else ())

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return server

    def model(self, server: Server) -> Tree:
        return server.public.value

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return client.y
