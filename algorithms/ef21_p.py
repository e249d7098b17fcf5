"""EF21-P: random entries are sent up, the largest ones down, and the server remembers what it left out.

Gruntkowska, Tyurin, Richtarik, ICML 2023 ("EF21-P and Friends"), arXiv:2209.15218; with local steps as Li et al. 2025
(FedMUD) compare it.

Choose it as the baseline of sparse messages: clients send random entries, the server sends the largest ones and
remembers what it left out, and each client keeps a copy of the model. Its use with local steps is a reconstruction, see
the notes.

    all hold x_hat;  sampled clients take K local steps from x_hat;  up  Rand-k(y_K - x_hat)
    x <- x + mean of what came up;  down  q = Top-k(x - x_hat);  x_hat <- x_hat + q

k is floor(ratio d) of the d compressed numbers. What q leaves out stays in x - x_hat, which is error feedback for the
server's messages. memory is what a client remembers of what its own messages left out. "none": nothing, as in the
paper's table of states. "error": the client adds what it left out to its next message. "shift": DIANA's shift h_i;
C(delta - h_i) is sent up, h_i <- h_i + beta C(.), and x moves by h plus the mean of the messages, where h is the mean
of h_i. unbiased multiplies Rand-k by d / k, which diverges with local steps at 1/32. evaluate chooses which model is
evaluated: x_hat, which clients hold, or the server's x.

budget says what ratio is a fraction of. "compressed": of the compressed numbers, as above. Only their values count,
which is how "3 % of the parameters" is read. The bytes are a larger fraction, because some tensors are sent in full,
and the server also sends indices: on CNN4 for FashionMNIST, 1/32 comes to 0.041 of the model's bytes up and 0.059 down,
where FedMUD at 1/32 sends 0.030 up and 0.030 down. "model": everything that is sent in one direction is a fraction of
the model, as FedMUD and the other factored methods count; k follows from what everything else and the indices leave,
with numbers of 32 bits. `fedfleet show` prints both fractions for every method.

Departures:
- The original takes one gradient per round of all clients; how Li et al. adapted it to local steps and a cohort is not
  published, so that this is a reconstruction.
- Rand-k is not multiplied by d / k unless `unbiased` says so.
- The first and the last weight, and vectors, are sent in full (layers = "all" compresses all weights).
- Server rules that evaluate the mean of the last two models (`evaluate: last_two`) take the newest one as x_hat and the
  older one as the server's x; with evaluate = "x" both are the server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..workloads import counted
from .contract import Algorithm, Client, Known, Local, Message, Oracle, Round, Server
from .fedavg import Plain
from .local import LocalMethod, Rule, with_decoded_norm2
from .parts.checks import one_of, positive, positive_fraction, refuse
from .parts.codecs import Codec, Identity, RandK, TopK
from .parts.compression import RATIO, Compressed, Compression
from .parts.downlink import Change, Downlink, Halves
from .parts.matrices import Layers, Weight, compressible
from .parts.reparameterisation import Compressing, Report, refuse_states
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Layout, Tree

Memory = Literal["none", "error", "shift"]
Counted = Literal["compressed", "model"]
Evaluated = Literal["x_hat", "x"]


class Broadcast(NamedTuple):
    method: Any  # the method's public state, with () in place of x
    change: Change  # q, and all that is not compressed
    known: Known  # the compressed half of x_hat before q


class Private(NamedTuple):
    x: Tree
    method: Any  # the server rule's state
    h: Any  # (c,), the mean of all clients' h_i, or ()


class LocalState(NamedTuple):
    method: Any  # the method's local state
    key: Tensor  # of the last step


class Encoded(NamedTuple):
    codes: tuple[Any, ...]  # of the compressed half
    rest: Tensor  # the other half


@dataclass(frozen=True)
class Sparsified(Compressing):
    """`method`: a LocalMethod whose clients keep nothing; `up`, `down`: how the messages of clients and of the server
    are compressed. The client's state is a vector (c,), the error or h_i, or ()."""

    method: LocalMethod
    up: Codec
    down: Downlink
    memory: Memory
    beta: float
    evaluate: Evaluated
    weights: tuple[Weight, ...]

    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """With shifts h is a plain mean, so that the mean displacement must be one too."""
        return self.memory != "shift"

    @property
    def halves(self) -> Halves:
        return self.down.halves

    def server_init(self, x: Tree) -> Server:
        inner = self.method.server_init(x)
        change, known = self.down.first(x)
        h = torch.zeros_like(self.halves.split(x)[0]) if self.memory == "shift" else ()
        return Server(Broadcast(inner.public._replace(x=()), change, known), Private(x, inner.private, h))

    def unpack(self, public: Broadcast) -> Any:
        return public.method._replace(x=self.down.follow(public.change, public.known))

    def client_init(self, public: Any) -> Client:
        return () if self.memory == "none" else torch.zeros_like(self.halves.split(public.x)[0])

    def client_begin(self, public: Any, client: Client) -> Local:
        inner = self.method.client_begin(public, self.method.client_init(public))
        return LocalState(inner, torch.zeros((), dtype=torch.int64, device=public.x.flat.device))

    def client_step(self, public: Any, client: Client, local: LocalState, oracle: Oracle) -> Local:
        kept = self.method.client_init(public)
        return LocalState(self.method.client_step(public, kept, local.method, oracle), oracle.key)

    def client_finish(self, public: Any, client: Client, local: LocalState) -> tuple[Message, Client]:
        message, _ = self.method.client_finish(public, self.method.client_init(public), local.method)
        inside, rest = self.halves.split(message.delta)
        if self.memory != "none":
            inside = inside + client if self.memory == "error" else inside - client
        codes = self.halves.encode(self.up, inside, counted.key(local.key, "up"))
        if self.memory != "none":
            sent = self.halves.decode(self.up, codes)
            client = inside - sent if self.memory == "error" else client + self.beta * sent
        return message._replace(delta=Encoded(codes, rest)), client

    def decode(self, public: Any, message: Message) -> Message:
        codes, rest = message.delta.codes, message.delta.rest
        return with_decoded_norm2(message._replace(delta=self.halves.join(self.halves.decode(self.up, codes), rest)))

    def _inner(self, server: Server, mean: Message) -> tuple[Server, Message]:
        """The method's server state and mean message. With shifts, h + C(.) takes the place of a client's displacement:
        the mean of these is the server's direction, and the mean of their squared norms follows from the two means."""
        held: Private = server.private
        if self.memory == "shift":
            sent, rest = self.halves.split(mean.delta)
            norm2 = mean.norm2 + held.h.dot(held.h + 2 * sent) if self.method.server.uses_norm2 else ()
            mean = mean._replace(delta=self.halves.join(held.h + sent, rest), norm2=norm2)
        return Server(server.public.method._replace(x=held.x), held.method), mean

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        x_hat, h = self.unpack(server.public).x, server.private.h
        if self.memory == "shift":
            h = h + self.beta * round.moved_share * self.halves.split(mean.delta)[0]
        inner = self.method.server_update(*self._inner(server, mean), round)
        change, known, x = self.down.next(inner.public.x, x_hat, round.number + 1)
        return Server(Broadcast(inner.public._replace(x=()), change, known), Private(x, inner.private, h))

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(*self._inner(server, mean), round)

    def model(self, server: Server) -> Tree:
        public, held = server.public, server.private
        x = held.x if self.evaluate == "x" else self.unpack(public).x
        return self.method.model(Server(public.method._replace(x=x), held.method))

    @property
    def report(self) -> Report:
        return self.halves.report(self.up, self.weights)


@dataclass(frozen=True)
class Sparsification(Compression):
    """a fraction of the entries each way: random ones up, the largest missing ones down, as in EF21-P"""

    ratio: float = RATIO
    memory: Memory = "none"
    beta: float | None = None
    unbiased: bool = False
    masks: Literal["global", "layer"] = "global"
    layers: Layers = "inner"
    evaluate: Evaluated = "x_hat"
    up: Literal["random", "identity"] = "random"
    down: Literal["top", "identity"] = "top"
    budget: Counted = "compressed"

    def __post_init__(self) -> None:
        positive_fraction(ratio=self.ratio)
        if self.beta is not None:
            positive(beta=self.beta)
        if self.memory != "shift":
            refuse({"beta": self.beta}, f"memory is {self.memory}", "leave it out, or choose memory: shift")
        if self.up == "identity":
            refuse({"unbiased": self.unbiased or None}, "everything is sent up", "leave it out, or choose up: random")
        one_of("none", "error", "shift", memory=self.memory)
        one_of("global", "layer", masks=self.masks)
        one_of("x_hat", "x", evaluate=self.evaluate)
        one_of("random", "identity", up=self.up)
        one_of("top", "identity", down=self.down)
        one_of("compressed", "model", budget=self.budget)

    def around(self, method: LocalMethod, layout: Layout, seed: int) -> Algorithm:
        refuse_states(method, "only x is compressed; choose fedavg or fedprox, carry: reset, local: plain or prox")
        weights = tuple(compressible(layout, self.layers))
        halves = Halves(layout, tuple(w.name for w in weights), self.masks == "global")
        up = RandK(self._share(halves, RandK), self.unbiased) if self.up == "random" else Identity()
        down = TopK(self._share(halves, TopK)) if self.down == "top" else Identity()
        down = Downlink(halves, down, True, seed)
        beta = self.ratio if self.beta is None else self.beta
        return Sparsified(method, up, down, self.memory, beta, self.evaluate, weights)

    def _share(self, halves: Halves, codec: type[RandK] | type[TopK]) -> float:
        """The fraction of the compressed numbers that is sent one way."""
        if self.budget == "compressed":
            return self.ratio
        total, compressed = sum(halves.layout.sizes), sum(halves.sizes)
        uncompressed = total - compressed + sum(codec.cost_of_message for _ in halves.sizes)
        each = sum(n * codec.cost_of_value(n) for n in halves.sizes)
        share = (self.ratio * total - uncompressed) / each
        if not all(share * n >= 1 for n in halves.sizes):
            raise ValueError(
                f"ratio={self.ratio:g} of the whole model cannot be reached: what is not compressed is "
                f"{uncompressed / total:.4f} of it; raise ratio, or choose budget: compressed"
            )
        return min(1.0, share)


def ef21_p(
    rule: Rule = Sgd(0.1),
    ratio: float = RATIO,
    memory: Memory = "none",
    beta: float | None = None,
    unbiased: bool = False,
    masks: Literal["global", "layer"] = "global",
    layers: Layers = "inner",
    evaluate: Evaluated = "x_hat",
    server_lr: float = 1.0,
    budget: Counted = "compressed",
) -> Compressed:
    """rule: the local optimiser; ratio: the fraction that is sent each way, of what `budget` says; memory: what clients
    remember of what they did not send: nothing (none), the error, which they add to the next message (error), or
    DIANA's shift h_i (shift); beta: step size of the shift, the ratio unless given; unbiased: random entries are
    multiplied by 1 / ratio; masks: entries are chosen in the whole model (global) or layer by layer (layer); layers:
    inner leaves out the first and the last weight, all compresses every weight; evaluate: x_hat, which clients hold, or
    x, which the server holds; budget: ratio is a fraction of the compressed numbers (compressed), or of the whole model
    for all that is sent (model), as other methods count."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, Sparsification(ratio, memory, beta, unbiased, masks, layers, evaluate, budget=budget))
