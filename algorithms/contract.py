"""The contract of a federated method: seven pure functions over named tensors.

    server_init      the server's state before round 1
    client_init      what a client keeps between rounds, before its first round
    client_begin     a client's local state at the beginning of a round
    client_step      one local step
    client_finish    the client's message, and what it keeps until its next round
    server_update    the server's next state, from the mean of the cohort's messages
    model            the model that is evaluated

Methods whose clients have models of their own define an eighth, `client_model`. Those in which each client makes
something of its own of the broadcast, as of its losses, define `looks` and `view`. Those whose server compares the
clients' messages before it adds them up define `parts`.

The functions are written for ONE client. The engine calls them for one client, or for a block of clients at once under
`torch.func.vmap`; it averages the messages and gives the mean to the server. Therefore the client's functions change
nothing in place, take no branch on a tensor's value (use `torch.where`), return tensors only (`()` for nothing, never
`None`), and keep shapes and dtypes the same from step to step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ..workloads.pair import Pair
from .aggregation.messages import Messages
from .tree import Layout, Tree

# The states of a method have the types that the method chooses: a NamedTuple of trees and 0-d tensors, or `()`.
Public = Any
"""What clients make of the broadcast: by default the server's public state."""
Private = Any
"""What only the server has."""
Client = Any
"""What one client keeps between rounds."""
Local = Any
"""What one client carries from step to step within a round."""


class Oracle(Protocol):
    """Gradients on the batch of one local step. `oracle(y)` is the gradient at y, which has all tensors of the model
    but those of `Algorithm.held`; a second call in the same step uses the same batch and the same noise."""

    def __call__(self, y: Tree, /) -> Tree: ...

    @property
    def key(self) -> Tensor:
        """(), int64: the key of this client's random numbers in this step, for `counted`."""
        ...

    @property
    def done(self) -> Tensor:
        """(), float64: the fraction of the round's local steps that are finished, 0 at the first step."""
        ...

    @property
    def examples(self) -> Tensor:
        """(), int64: the number of examples in this step's batch. The last batch of a pass over a client's rows may be
        short, so that the plain mean of a pass's gradients is not the gradient over all rows."""
        ...


class LocalSteps(Protocol):
    """The K local steps of one client in one round. Iterating gives one oracle per step."""

    steps: int
    """K."""

    def __iter__(self) -> Iterator[Oracle]: ...

    def descend(self, y: Tree, lr: float, shift: Any = (), total: Any = (), pull: Any = ()) -> tuple[Tree, Any] | None:
        """Take all K steps in one call, where the engine has a kernel for that: y <- y - lr (g + shift + lam (y - z))
        and total <- total + g, where g is the gradient at y. `shift` and `total` are trees or (), `pull` is (lam, z) or
        (). Returns (y, total), or None where the engine has no such kernel and the steps must be taken one by one.

        Further calls take the steps of other models on the same batches; the losses that are recorded are those of the
        first one."""
        ...


class Server(NamedTuple):
    """The server's state. `public` is broadcast to the cohort, unless `Algorithm.broadcast` sends less; `private` stays
    on the server."""

    public: Public
    private: Private = ()


class Known(NamedTuple):
    """A part of the broadcast that every client has already, because all clients follow all broadcasts, also those that
    are not sampled. It counts as no traffic."""

    value: Any


class Constant(NamedTuple):
    """A part of the broadcast that never changes and that every client has before its first round, such as the model
    before round 1, which follows from the seed. It counts as no traffic, and a client need not follow broadcasts to
    have it."""

    value: Any


class Message(NamedTuple):
    """What one client sends. The engine adds up the decoded messages of the cohort and divides, field by field.

    - `delta`: y_K - x or a multiple of it, added up with the federation's client weights. The sum is divided by D,
      which is the sum of the weights unless the sampler or the pace says otherwise. It is a Tree once it is decoded.
    - `sent`: averaged uniformly, whatever the client weights are, as control variates must be.
    - `facts`: 0-d diagnostics by name, averaged uniformly, recorded, and not counted as traffic. "norm2", the squared
      norm of y_K - x, is always there; a decoder replaces it by the squared norm of what it decoded.
    - `averaged`: states such as momenta and estimates of a gradient, added up with the client weights and divided by
      their sum (by a fixed number in private runs, as all fields are). A mean of states is a state, whereas a
      displacement may count for more or less than one.
    - `norm2`: the squared norm of `delta` for server rules that compare the mean of these with the squared norm of
      the mean, or what the mean of `delta` is divided by; added up and divided as `delta` is; else ().
    """

    delta: Any
    sent: Any
    facts: dict[str, Any]
    averaged: Any = ()
    norm2: Any = ()


class Round(NamedTuple):
    """The position in the run. `number`: of the round, from 1; `rounds`: R; `cohort`: S, the clients whose messages are
    in the mean; `clients`: N; `divisor`: D, where a sampler divides the sum of the displacements by another number."""

    number: int
    rounds: int
    cohort: int
    clients: int
    divisor: float | None = None

    @property
    def share(self) -> float:
        """S / N, times which a plain mean over the cohort is one over all clients of whom the others have sent 0."""
        return self.cohort / self.clients

    @property
    def moved_share(self) -> float:
        """The same for `Message.delta`, D / N."""
        return (self.cohort if self.divisor is None else self.divisor) / self.clients


class Adaptation(NamedTuple):
    """What a client does to its model before it is evaluated with it: local steps on its own training rows, of which
    nothing is kept or sent. `rule`: the local step, a Rule; `steps`, or `epochs` where these are None; `batch`: the
    examples of a batch, None for all rows of the client; `prox`: weight of the pull towards the model before;
    `tensors`: the names of those that move, None for all."""

    rule: Any
    steps: int | None = None
    epochs: int | None = None
    batch: int | None = None
    prox: float = 0.0
    tensors: tuple[str, ...] | None = None


class Viewer(NamedTuple):
    """The client that makes something of its own of the broadcast. `number`: (), int64; `share`: (), float64, how many
    rows it trains on, divided by their mean over all clients."""

    number: Tensor
    share: Tensor


class LocalNorms(NamedTuple):
    """How far clients can have gone after 1, 2, … local steps. The engine multiplies the weight of a client that took
    K steps by (the mean of `effective` over the cohort, with the client weights) / `norms`[K - 1]."""

    norms: tuple[float, ...]
    effective: tuple[float, ...]


class RunContext(NamedTuple):
    """What is known of a run before it starts. `cohort`: S; `clients`: N; `rounds`: R; `steps`: K, or None where it
    differs from client to client; `seed`: of everything that is drawn at random; `layout`: the model's tensors;
    `pairs`: its weights with factors of adapters beside them; `drawn`: gives the model that another seed would begin
    with, a tree of that layout, None where nothing can draw it."""

    cohort: int
    clients: int
    rounds: int
    steps: int | None
    seed: int = 0
    layout: Layout | None = None
    pairs: tuple[Pair, ...] = ()
    drawn: Callable[[int], Tree] | None = None


class Deferred(ABC):
    """A method whose settings follow in part from the run: its sizes, its seed or the model's shapes."""

    moves_weights: bool = False
    """See `Algorithm.moves_weights`."""

    @abstractmethod
    def build(self, context: RunContext) -> Algorithm:
        """The method for this run. Raises ValueError where the context lacks something that the method needs."""


class Algorithm(ABC):
    """A federated method. Implementations are frozen dataclasses of settings; all state is passed in and returned."""

    table: ClassVar[str] = "METHODS"
    """The registry's table of methods."""

    weighted: bool = True
    """False: the engine averages `delta` and `averaged` uniformly, whatever the federation's client weights are."""

    stale: str = ""
    """Why the method has no asynchronous form, in which the messages of an update were made from different versions of
    the broadcast; "" if it has one."""

    averages_states: bool = False
    """Whether the mean of the clients' states becomes part of the broadcast, which needs two clients or more."""

    not_private: str = ""
    """Why the method does not go with `privacy`, besides what the engine finds in its messages; "" if it does."""

    caution: str = ""
    """A sentence for the log of a run about what its settings do to the result; "" for none."""

    least_steps: int = 1
    """The fewest local steps of a visit."""

    needs_all: str = ""
    """Why all clients must take part in every round; "" if they need not."""

    needs_mean: str = ""
    """Why the server must get the mean of what clients have sent, neither a rule's answer nor messages that an attack
    has changed; "" if it need not."""

    own_models: bool = False
    """Whether clients are evaluated with models of their own, see `client_model`."""

    own_view: bool = False
    """Whether each client makes something of its own of the broadcast, see `view`."""

    own_traffic: bool = False
    """Whether clients differ in the bytes that they receive and send, see `traffic`."""

    compares: bool = False
    """Whether the server compares the clients' messages before it adds them up, see `parts`."""

    divides_means: bool = False
    """Whether the server divides one mean of the cohort by another. Rules of aggregation guard neither."""

    moves_weights: bool = False
    """Whether the server changes the weights with factors of adapters beside them. The tensors of the model then have
    these weights, too, and clients do not train them, see `held`."""

    shares_model: bool = True
    """False: clients send nothing of the model. Its running statistics then stay with them, too."""

    @property
    def adaptation(self) -> Adaptation | None:
        """What clients do to their models before they are evaluated; None for nothing."""
        return None

    @property
    def variables(self) -> Any:
        """What the numbers of the public state stand for, besides their shapes: something that equals that of another
        method only if it could go on from this one's public state. () for the tensors of the model."""
        return ()

    def origin(self, public: Any) -> Tree:
        """The model that `delta` is a change of, from what clients make of the broadcast. Raises NotImplementedError
        where `delta` is no change of a model."""
        raise NotImplementedError

    @abstractmethod
    def server_init(self, x: Tree) -> Server:
        """The server's state before round 1. `x`: the workload's starting model."""

    def broadcast(self, server: Server) -> Public:
        """What is sent to the cohort at the beginning of a round, made with the settings of this round; by default the
        public state. A method whose clients need only a combination of the public state sends that combination. The
        shapes must be the same in every round."""
        return server.public

    def unpack(self, public: Public) -> Any:
        """What clients make of the broadcast: the argument `public` of the client's functions. It is the same for all
        clients and runs once per round, not vectorised."""
        return public

    def held(self, public: Public) -> Mapping[str, Tensor]:
        """name -> tensor: the tensors of the model that are the same for all clients in all local steps of a round. An
        oracle is then asked for gradients of the others, `oracle(y)` with a tree of these. Runs once per round, not
        vectorised."""
        return {}

    @abstractmethod
    def client_init(self, public: Public) -> Client:
        """What one client keeps between rounds, before its first round; `()` for a stateless client."""

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        """The m models whose mean losses over all its training rows a client finds before its first local step, and
        before it is evaluated; all tensors of the model. Only with `own_view`."""
        return ()

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        """What one client makes of the broadcast, which its other functions then get in the place of `public`, except
        `client_init`. `losses`: (m,), those of `looks`. Only with `own_view`."""
        return public

    @abstractmethod
    def client_begin(self, public: Public, client: Client) -> Local:
        """The local state before the first local step of a round."""

    @abstractmethod
    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        """The local state after one more local step."""

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        """The local state after all local steps of a round. By definition these are `client_step`, one after the other;
        a method of plain descent may ask `steps.descend` to take them in one call."""
        for oracle in steps:
            local = self.client_step(public, client, local, oracle)
        return local

    @abstractmethod
    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        """(message, what the client keeps until its next round)."""

    def decode(self, public: Public, message: Message) -> Message:
        """What the server makes of one client's message before it is added up. The traffic is counted before. Runs
        vectorised."""
        return message

    def parts(self, server: Server, messages: Messages, round: Round) -> tuple[np.ndarray, Any]:
        """((M, S) float64 the weights of the messages in M sums, what the server has found, tensors). M is the same in
        every round. `messages`: the deltas of the cohort in ascending client number, of which the inner products, the
        norms and the client weights can be read. In the mean that the server then gets, `delta` is a tuple of the M
        sums, trees, and `sent` is what it has found. Only with `compares`; messages then have a tree as `delta`, and
        besides it only facts."""
        raise NotImplementedError

    @abstractmethod
    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        """The server's next state. `mean`: the mean message of the cohort."""

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        """Numbers, or 0-d tensors, that describe the server's step: the columns `server/NAME` of the record. The
        arguments are those of `server_update`."""
        return {}

    @abstractmethod
    def model(self, server: Server) -> Tree:
        """The model that is evaluated."""

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        """The model that one client is evaluated with, all tensors of x in their order. `x`: `model` of the server's
        state; `public`: what clients make of its broadcast; `client`: what the client keeps, `client_init(public)` if
        it has never taken part."""
        return x

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        """What a client alone has of the model that it is evaluated with, from which this follows together with x and
        `client_facts`. The arguments are those of `client_model`."""
        return self.client_model(x, public, client)

    def client_facts(self, public: Public, client: Client) -> dict[str, Tensor]:
        """0-d numbers by name that say what a client's model is, for the file with a row for each client. The arguments
        are those of `client_model`."""
        return {}

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        """(down, up): the bytes that one client receives and sends in a round, from 1, where they are fewer than those
        of the broadcast and of the message, which must have the same shapes in every round; None where they are these.
        `public`, `message`: samples of both, for shapes and types; with `own_traffic` `public` is the broadcast of the
        round, and `client` the number of the client."""
        return None, None

    def local_norms(self, most: int) -> LocalNorms | None:
        """What the weights of clients with different numbers of local steps follow from, for up to `most` steps; None
        where the number of steps changes no weight."""
        return None

    @property
    def warm_start(self) -> Algorithm | None:
        """A pass over ALL clients before the first round, one local epoch each, that initialises momenta and control
        variates; None for no such pass. It is an algorithm on the same states as the method itself."""
        return None


class Around(Algorithm):
    """A method around another, `method`. What it declares, what clients and server begin with, the server's step and
    where deltas begin are as for that method; a class for which that is not so says otherwise."""

    method: Algorithm

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.weighted

    @property
    def stale(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.stale

    @property
    def averages_states(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.averages_states

    @property
    def not_private(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.not_private

    @property
    def caution(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.caution

    @property
    def least_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.least_steps

    @property
    def needs_all(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.needs_all

    @property
    def needs_mean(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.needs_mean

    @property
    def own_models(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.own_models

    @property
    def own_view(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.own_view

    @property
    def own_traffic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.own_traffic

    @property
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.compares

    @property
    def divides_means(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.divides_means

    @property
    def moves_weights(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.moves_weights

    @property
    def shares_model(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.method.shares_model

    @property
    def adaptation(self) -> Adaptation | None:
        return self.method.adaptation

    @property
    def variables(self) -> Any:
        return self.method.variables

    def server_init(self, x: Tree) -> Server:
        return self.method.server_init(x)

    def client_init(self, public: Public) -> Client:
        return self.method.client_init(public)

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return self.method.server_update(server, mean, round)

    def model(self, server: Server) -> Tree:
        return self.method.model(server)

    def origin(self, public: Any) -> Tree:
        return self.method.origin(public)

    def looks(self, public: Public, client: Client) -> tuple[Tree, ...]:
        return self.method.looks(public, client)

    def view(self, public: Public, viewer: Viewer, losses: Tensor) -> Public:
        return self.method.view(public, viewer, losses)

    def client_model(self, x: Tree, public: Public, client: Client) -> Tree:
        return self.method.client_model(x, public, client)

    def own_part(self, x: Tree, public: Public, client: Client) -> Tree:
        return self.method.own_part(x, public, client)

    def client_facts(self, public: Public, client: Client) -> dict[str, Tensor]:
        return self.method.client_facts(public, client)

    def parts(self, server: Server, messages: Messages, round: Round) -> tuple[np.ndarray, Any]:
        return self.method.parts(server, messages, round)

    def traffic(self, round: int, public: Public, message: Message, client: int = 0) -> tuple[int | None, int | None]:
        return self.method.traffic(round, public, message, client)

    def local_norms(self, most: int) -> LocalNorms | None:
        return self.method.local_norms(most)
