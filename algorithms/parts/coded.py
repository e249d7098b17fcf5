"""Coded messages: what clients send of their displacement is a code, and they may remember what it left out.

Error feedback: Seide et al. 2014; Karimireddy et al., ICML 2019, arXiv:1901.09847. EF21: Richtarik, Sokolov,
Fatkhullin, NeurIPS 2021, arXiv:2106.05203.

    D_i = x - y_K                                     after the local steps of any method
    none     C_i = code(D_i)
    error    z = decay e_i + D_i;  C_i = code(z);  e_i <- z - decode(C_i)
    ef21     C_i = code(D_i - g_i);  g_i <- g_i + decode(C_i);  G <- G + (1 / N) sum over the cohort of decode(C_i)
    the server's step from D = mean of decode(C_i);  ef21: from D = G

Every tensor is coded by itself. What is coded is x - y, and not y - x, because some codecs are not odd. e_i and g_i
begin at 0 and stay with the client, who keeps them unchanged in rounds in which it is not sampled. mean = "sent"
divides, in each coordinate, by the weights of those clients that sent it, as SparseLoCo's code does; its paper's mean
is over all.

A codec that draws at random takes the key of the client's last local step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...workloads import counted
from ..contract import Algorithm, Around, Client, Local, LocalSteps, Message, Oracle, Public, Round, Server
from ..local import LocalMethod, with_decoded_norm2
from ..tree import Layout, Tree
from .checks import one_of, positive_fraction, refuse
from .codecs import Coder
from .coded_downlink import CodedDownlink
from .compression import Compression
from .downlink import Downlink, Halves
from .matrices import Sized, Weight
from .quantisers import Placed
from .reparameterisation import Compressing, Report
from .servers import quotient
from .warm_start import WarmStart, WarmStarted

Memory = Literal["none", "error", "ef21"]
MeanOver = Literal["all", "sent"]


class Kept(NamedTuple):
    """What a client keeps."""

    method: Any  # the method's client state
    memory: Any  # e_i or g_i, a Tree, or ()


class Stepped(NamedTuple):
    """What a client carries from step to step."""

    method: Any  # the method's local state
    key: Any  # (), of the last step; () for codecs that draw nothing


class Placing(NamedTuple):
    """What is averaged with the client weights where mean = "sent"."""

    method: Any  # what the method averages so
    sent: Tree  # 1 for each number that was sent, 0 for all others


class Following(NamedTuple):
    """What only the server has, with ef21."""

    method: Any  # the method's private state
    moved: Tree  # -G


def only(places: Tensor | None, z: Tree, other: Callable[[], Tree]) -> Tree:
    """z at these places, (P,) bool, and the other tree elsewhere; z where `places` is None."""
    return z if places is None else Tree(torch.where(places, z.flat, other().flat), z.layout)


@dataclass(frozen=True)
class Coded(Around, Compressing, WarmStarted):
    """`method`, whose clients send codes. `names`: the coded tensors; all others are sent as they are."""

    method: LocalMethod
    codec: Coder
    names: frozenset[str]
    layout: Layout
    memory: Memory
    decay: float
    mean: MeanOver

    # --- the method's declarations ----------------------------------------------------------------------------------
    @property
    def weighted(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """With ef21 G is a plain mean."""
        return self.method.weighted and self.memory != "ef21"

    @property
    def stale(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.memory == "ef21":
            return "ef21's server follows the memories of all clients, which stale messages change too late"
        return self.method.stale

    @property
    def not_private(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.memory != "none":
            return "coded messages have no bounded sensitivity with memory; give memory: none, or leave privacy out"
        return self.method.not_private

    @property
    def caution(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.memory == "none" and self.names and not self.codec.unbiased:
            return (
                f"codes of {type(self.codec).__name__.lower()} are biased, and what they leave out is lost, because "
                "clients remember none of it; memory: error sends it in later rounds"
            )
        return self.method.caution

    # --- codes ------------------------------------------------------------------------------------------------------
    @property
    def codecs(self) -> tuple[Coder | None, ...]:
        """The codec of each tensor; None for those that are sent as they are."""
        shaped = zip(self.layout.names, self.layout.shapes, strict=True)
        return tuple(self.codec.of_shape(shape) if name in self.names else None for name, shape in shaped)

    def encode(self, v: Tree, key: Any) -> tuple[Any, ...]:
        """What is sent of v, for each tensor; `key`: (), or () the empty tuple for codecs that draw nothing."""
        codes = []
        for number, (codec, (_, leaf)) in enumerate(zip(self.codecs, v.items(), strict=True)):
            flat = leaf.reshape(-1)
            drawn = counted.key(key, "uplink", number) if self.codec.random else key
            codes.append(flat if codec is None else codec.encode(flat, drawn))
        return tuple(codes)

    def decoded(self, codes: Sequence[Any], like: Tree) -> Tree:
        """The tree that codes stand for; `like`: has its layout and type."""
        sized = zip(codes, self.codecs, self.layout.sizes, strict=True)
        flat = [code if codec is None else codec.decode(code, n) for code, codec, n in sized]
        return Tree(torch.cat([part.to(like.flat.dtype) for part in flat]), self.layout)

    def sent(self, codes: Sequence[Any], like: Tree) -> Tree:
        """1 for each number that was sent, 0 for all others, in the layout and type of `like`."""
        sized = zip(codes, self.codecs, self.layout.sizes, strict=True)
        flat = [
            codec.sent(code, n) if isinstance(codec, Placed) else torch.ones_like(code, dtype=torch.bool)
            for code, codec, n in sized
        ]
        return Tree(torch.cat(flat).to(like.flat.dtype), self.layout)

    # --- clients ----------------------------------------------------------------------------------------------------
    def client_init(self, public: Public) -> Client:
        return Kept(self.method.client_init(public), () if self.memory == "none" else public.x.zeros())

    def client_begin(self, public: Public, client: Client) -> Local:
        key = torch.zeros((), dtype=torch.int64, device=public.x.flat.device) if self.codec.random else ()
        return Stepped(self.method.client_begin(public, client.method), key)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        after = self.method.client_step(public, client.method, local.method, oracle)
        return Stepped(after, oracle.key if self.codec.random else ())

    def client_steps(self, public: Public, client: Client, local: Local, steps: LocalSteps) -> Local:
        if self.codec.random:  # the key of the last step is needed
            return super().client_steps(public, client, local, steps)
        return Stepped(self.method.client_steps(public, client.method, local.method, steps), ())

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        message, kept = self.method.client_finish(public, client.method, local.method)
        v, memory, now = -message.delta, client.memory, self.method.sent_now(public)
        if self.memory == "error":
            v = memory * self.decay + v
        elif self.memory == "ef21":
            v = v - memory
        v = only(now, v, v.zeros)
        codes = self.encode(v, local.key)
        if self.memory == "none" and not self.method.follows_sent:
            return message._replace(delta=codes), Kept(kept, memory)
        known = self.decoded(codes, v)
        if self.memory == "error":
            memory = only(now, v - known, lambda: memory)
        elif self.memory == "ef21":
            known = memory = memory + known
        if self.method.follows_sent:
            kept = self.method.client_sent(public, client.method, kept, -known)
        return message._replace(delta=codes), Kept(kept, memory)

    def decode(self, public: Public, message: Message) -> Message:
        decoded = with_decoded_norm2(message._replace(delta=-self.decoded(message.delta, public.x)))
        if self.mean == "all":
            return decoded
        return decoded._replace(averaged=Placing(message.averaged, self.sent(message.delta, public.x)))

    # --- the server -------------------------------------------------------------------------------------------------
    def server_init(self, x: Tree) -> Server:
        return self._outer(self.method.server_init(x), x.zeros())

    def _inner(self, server: Server) -> Server:
        """The server's state as the method knows it."""
        return server._replace(private=server.private.method) if self.memory == "ef21" else server

    def _outer(self, server: Server, moved: Tree) -> Server:
        return server._replace(private=Following(server.private, moved)) if self.memory == "ef21" else server

    def broadcast(self, server: Server) -> Public:
        return self.method.broadcast(self._inner(server))

    def unpack(self, public: Public) -> Any:
        return self.method.unpack(public)

    def _mean(self, server: Server, mean: Message, round: Round) -> Message:
        """The mean message as the method knows it."""
        if self.memory == "ef21":
            return mean._replace(delta=server.private.moved.add(mean.delta, round.moved_share))
        if self.mean == "sent":
            placing: Placing = mean.averaged
            return mean._replace(delta=quotient(mean.delta, placing.sent), averaged=placing.method)
        return mean

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        mean = self._mean(server, mean, round)
        return self._outer(self.method.server_update(self._inner(server), mean, round), mean.delta)

    def server_metrics(self, server: Server, mean: Message, round: Round) -> dict[str, Any]:
        return self.method.server_metrics(self._inner(server), self._mean(server, mean, round), round)

    def model(self, server: Server) -> Tree:
        return self.method.model(self._inner(server))

    # --- a pass before round 1, whose gradients are sent as they are ------------------------------------------------
    @property
    def warm_start(self) -> Algorithm | None:
        return None if self.method.warm_start is None else WarmStart(self)

    def warm_started_client(self, client: Client, gradient: Tree) -> Client:
        return client._replace(method=self.method.warm_started_client(client.method, gradient))

    def warm_started_server(self, server: Server, mean: Any) -> Server:
        after = self.method.warm_started_server(self._inner(server), mean)
        return server._replace(public=after.public)

    # --- for tables -------------------------------------------------------------------------------------------------
    @property
    def report(self) -> Report:
        sized, texts, saved = [], [], 0.0
        shaped = zip(self.codecs, self.layout.names, self.layout.shapes, self.layout.sizes, strict=True)
        for codec, name, shape, n in shaped:
            if codec is not None:
                text, numbers = codec.describe(n)
                rows = shape[0] if shape else 1  # of a vector each number is one
                sized.append(Sized(Weight(name, shape, rows, n // rows), (), round(numbers)))
                texts.append(text)
                saved += n - numbers
        return Report(tuple(sized), texts, 1 - saved / sum(self.layout.sizes))


@dataclass(frozen=True)
class Coding(Compression):
    """codes of what clients have moved, of a few bits or of the largest numbers, with error feedback or EF21

    `codec`: how each tensor is coded, one of `fedfleet list codecs`; `memory`: what clients remember of what their
    codes left out: nothing (none), the error, which they add to the next message (error), or what the server knows of
    them, to which they send the difference (ef21); `decay`: the factor of the remembered error, 1 unless given;
    `mean`: over all clients (all), or in each coordinate over those that sent it (sent), for codecs that leave places
    out; `whole`: tensors whose code has no fewer bytes are sent as they are (auto), or coded too (never); `only`:
    patterns, * and ? as in file names, of the tensors that are coded; `down`: how the server codes the change of its
    model, whose error it remembers; it sends its model as it is unless given."""

    codec: Coder
    memory: Memory = "error"
    decay: float | None = None
    mean: MeanOver = "all"
    whole: Literal["auto", "never"] = "auto"
    only: tuple[str, ...] = ("*",)
    down: Coder | None = None

    def __post_init__(self) -> None:
        one_of("none", "error", "ef21", memory=self.memory)
        one_of("all", "sent", mean=self.mean)
        one_of("auto", "never", whole=self.whole)
        if self.memory != "error":
            why = f"it is error feedback's, and memory is {self.memory}"
            refuse({"decay": self.decay}, why, "leave it out, or choose memory: error")
        if self.decay is not None:
            positive_fraction(decay=self.decay)
        if self.mean == "sent" and not isinstance(self.codec, Placed):
            raise ValueError("mean: sent is for codecs that leave places out (top_k, sparse); leave it out")
        if getattr(self.down, "tiles", None) is not None:
            raise ValueError("down: tiles are for the way up, where each tensor has its shape; give size there")
        if self.mean == "sent" and self.memory == "ef21":
            raise ValueError(
                "mean: sent has no meaning with ef21, whose server adds up what all clients remember; choose mean: all"
            )

    def around(self, method: LocalMethod, layout: Layout, seed: int) -> Algorithm:
        if method.server.uses_norm2 and (self.mean == "sent" or self.memory == "ef21"):
            which = "mean: sent" if self.mean == "sent" else "memory: ef21"
            raise ValueError(
                f"{which} gives no norms of what clients moved, and the server's rule compares them with that of the "
                "mean; choose memory: error and mean: all, or another method"
            )
        matched = [name for name in layout.names if any(fnmatchcase(name, pattern) for pattern in self.only)]
        if not matched:
            raise ValueError(
                f"only: no tensor is called so, got {', '.join(self.only)}; the tensors are {', '.join(layout.names)}"
            )
        decay = 1.0 if self.decay is None else self.decay
        names = frozenset(self._smaller(self.codec, matched, layout))
        coded = Coded(method, self.codec, names, layout, self.memory, decay, self.mean)
        if self.down is None:
            return coded
        if method.needs_all:
            raise ValueError(
                "down: codes of changes are for methods whose clients begin with the server's model; leave it out"
            )
        halves = Halves(layout, self._smaller(self.down, matched, layout), whole=False)
        return CodedDownlink(coded, Downlink(halves, self.down, True, seed)) if halves.names else coded

    def _smaller(self, codec: Coder, matched: Sequence[str], layout: Layout) -> tuple[str, ...]:
        """The tensors that are coded, of those that match."""
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        pairs = [(name, math.prod(shapes[name]), codec.of_shape(shapes[name])) for name in matched]
        return tuple(name for name, n, own in pairs if self.whole == "never" or own.bytes(n) < 4 * n)


def only_coded(compression: Compression | None, why: str) -> Coding | None:
    """The compression of a method that goes with no other one; raises ValueError with the reason."""
    if isinstance(compression, Coding | None):
        return compression
    raise ValueError(f"compression: {why}, got {compression}; choose coded")
