"""The contract of a federated method: seven pure functions over named tensors.

They are written for ONE client. An engine runs them for one client, or for a block of clients at once under
`torch.func.vmap`; adds the messages; and hands their mean to the server. So inside the client's functions: nothing in
place, no branch on a tensor's value (`torch.where`), tensors only (`()` for nothing, never `None`), and shapes and
dtypes that do not change from step to step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .tree import Layout, Tree


class Oracle(Protocol):
    """oracle(y): the gradient at y on this step's batch. Called twice, it sees the same batch and the same noise."""

    def __call__(self, y: Tree, /) -> Tree: ...

    @property
    def key(self) -> Tensor:
        """(), int64: this client's and this step's source of randomness, for `counted`."""
        ...

    @property
    def done(self) -> Tensor:
        """(), float64: the share of the round's local steps that lie behind, 0 at the first."""
        ...

    @property
    def examples(self) -> Tensor:
        """(), int64: the number of examples in this step's batch. The last batch of a pass over a client's rows may be
        short, so that the plain mean of a pass's gradients is not the gradient over all rows."""
        ...


class LocalSteps(Protocol):
    """A client's local steps of a round, K in all: their oracles one after the other, or plain descent at once."""

    steps: int

    def __iter__(self) -> Iterator[Oracle]: ...

    def descend(self, y: Tree, lr: float, shift: Any, total: Any) -> tuple[Tree, Any] | None:
        """(y, total) after K steps y <- y - lr (g + shift), total <- total + g, where g is the gradient at y; either of
        shift and total may be (). None where that is no quicker than step by step."""
        ...


# What a method keeps is its own affair: a NamedTuple of trees and 0-d tensors, or `()`.
Public = Any
Private = Any
Client = Any
Local = Any


class Server(NamedTuple):
    """`public` is broadcast to the cohort, unless `Algorithm.broadcast` makes less of it; `private` stays with the
    server."""

    public: Public
    private: Private = ()


class Known(NamedTuple):
    """What every client has already, sampled or not, because it followed all broadcasts: no traffic."""

    value: Any


class Message(NamedTuple):
    """What one client sends; anything in it, once decoded, may be added. The engine averages it over the cohort.

    `delta`: y_K - x, or a multiple of it, averaged with the federation's client weights. `sent`: what the method
    averages uniformly whatever these weights are, as control variates. `facts`: 0-d diagnostics, averaged uniformly,
    recorded and not counted as traffic; always has `norm2`, the squared norm of y_K - x, which a decoder replaces by
    that of what it decoded. `averaged`: what the method averages as it averages x, with the same client weights:
    momenta, estimators of a gradient, squared norms that are compared with that of the mean.
    """

    delta: Any  # a Tree, once decoded
    sent: Any
    facts: dict[str, Any]
    averaged: Any = ()


class Round(NamedTuple):
    """Where the run stands. `number` counts from 1; `cohort` is S, `clients` is N, `rounds` is R."""

    number: int
    rounds: int
    cohort: int
    clients: int

    @property
    def share(self) -> float:
        """S / N."""
        return self.cohort / self.clients


class RunContext(NamedTuple):
    """The sizes of a run, S, N and R; `steps`: K, or None where it differs from client to client. `seed`: of all that
    is drawn; `layout`: of the model."""

    cohort: int
    clients: int
    rounds: int
    steps: int | None
    seed: int = 0
    layout: Layout | None = None


class Deferred(ABC):
    """A method some of whose settings follow from the run's sizes, its seed or the model's shapes."""

    @abstractmethod
    def build(self, context: RunContext) -> Algorithm:
        """The method itself; ValueError where the plan does not say enough."""


class Algorithm(ABC):
    """A federated method. Implementations are frozen dataclasses: settings only, no state."""

    weighted: bool = True
    """False: `delta` and `averaged` are averaged uniformly whatever the federation's client weights are."""

    @abstractmethod
    def server_init(self, x: Tree) -> Server: ...

    def broadcast(self, server: Server) -> Public:
        """What is sent down at the beginning of a round, made with this round's settings. A method whose clients need
        only a combination of what the server keeps public sends that combination. It has the same shapes every round.
        """
        return server.public

    def unpack(self, public: Public) -> Any:
        """What a client makes of the broadcast, the same for all of them: the `public` of the functions below. It runs
        once a round, not vectorised."""
        return public

    @abstractmethod
    def client_init(self, public: Public) -> Client:
        """What one client keeps between rounds, before its first round."""

    @abstractmethod
    def client_begin(self, public: Public, client: Client) -> Local: ...

    @abstractmethod
    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local: ...

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        """All of a steps's steps. What is here is what is meant; a method of plain descent may have it done at once."""
        for oracle in steps:
            local = self.client_step(public, client, local, oracle)
        return local

    @abstractmethod
    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]: ...

    def decode(self, public: Public, message: Message) -> Message:
        """What the server makes of one client's message before it adds up; bytes are counted before. Vectorised."""
        return message

    @abstractmethod
    def server_update(self, server: Server, mean: Message, round: Round) -> Server: ...

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """Numbers, or tensors (), of the server's step for the record, columns `server/NAME`. It is given what
        `server_update` is given."""
        return {}

    @abstractmethod
    def model(self, server: Server) -> Tree:
        """What to evaluate."""

    @property
    def warm_start(self) -> Algorithm | None:
        """A pass over ALL clients before the first round (one local epoch each), or None.

        It shares the states of the method proper: a warm start of momenta and control variates.
        """
        return None
