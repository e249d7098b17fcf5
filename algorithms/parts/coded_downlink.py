"""Codes on the way down: the server sends a code of what its model has changed, and remembers what the code left out.

EF21-P: Gruntkowska, Tyurin, Richtarik, ICML 2023, arXiv:2209.15218; see `downlink`. Clients begin with x_hat, which all
of them follow, and x_hat is the evaluated model; the server's step is from its own x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..contract import Algorithm, Around, Client, Known, Local, LocalSteps, Message, Oracle, Public, Round, Server
from ..tree import Tree
from .downlink import Change, Downlink
from .reparameterisation import Compressing, Report
from .warm_start import WarmStart, WarmStarted


class Broadcast(NamedTuple):
    method: Any  # the method's broadcast, with () in place of x
    change: Change
    known: Known  # the coded tensors of x_hat before the change


class Held(NamedTuple):
    """What only the server has."""

    x: Tree
    method: Any  # the method's private state


@dataclass(frozen=True)
class CodedDownlink(Around, Compressing, WarmStarted):
    """`method`, a method of coded messages, whose server sends codes, too."""

    method: Any
    down: Downlink

    @property
    def stale(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.stale

    # --- the server ---------------------------------------------------------------------------------------------------
    def _inner(self, server: Server) -> Server:
        """The server's state as the method knows it."""
        return Server(server.public.method._replace(x=server.private.x), server.private.method)

    def _outer(self, inner: Server, x: Tree, change: Change, known: Known) -> Server:
        return Server(Broadcast(inner.public._replace(x=()), change, known), Held(x, inner.private))

    def server_init(self, x: Tree) -> Server:
        inner = self.method.server_init(x)
        return self._outer(inner, inner.public.x, *self.down.first(inner.public.x))

    def broadcast(self, server: Server) -> Public:
        return server.public._replace(method=self.method.broadcast(self._inner(server))._replace(x=()))

    def _x_hat(self, public: Broadcast) -> Tree:
        return self.down.follow(public.change, public.known)

    def unpack(self, public: Public) -> Any:
        return self.method.unpack(public.method._replace(x=self._x_hat(public)))

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        inner = self.method.server_update(self._inner(server), mean, round)
        change, known, x = self.down.next(inner.public.x, self._x_hat(server.public), round.number + 1)
        return self._outer(inner, x, change, known)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._inner(server), mean, round)

    def model(self, server: Server) -> Tree:
        inner = self._inner(server)
        return self.method.model(inner._replace(public=inner.public._replace(x=self._x_hat(server.public))))

    # --- clients, who see the method ----------------------------------------------------------------------------------
    def client_begin(self, public: Public, client: Client) -> Local:
        return self.method.client_begin(public, client)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        return self.method.client_step(public, client, local, oracle)

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        return self.method.client_steps(public, client, local, steps)

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        return self.method.client_finish(public, client, local)

    def decode(self, public: Public, message: Message) -> Message:
        return self.method.decode(public, message)

    @property
    def report(self) -> Report:
        return self.method.report

    # --- a pass before round 1 ----------------------------------------------------------------------------------------
    @property
    def warm_start(self) -> Algorithm | None:
        return None if self.method.warm_start is None else WarmStart(self)

    def warm_started_client(self, client: Client, gradient: Tree) -> Client:
        return self.method.warm_started_client(client, gradient)

    def warm_started_server(self, server: Server, mean: Any) -> Server:
        after = self.method.warm_started_server(self._inner(server), mean)
        return server._replace(public=server.public._replace(method=after.public._replace(x=())))
