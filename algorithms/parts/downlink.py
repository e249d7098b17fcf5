"""The way down for methods that compress a part of the model: the server sends the change of the compressed half.

    all parties hold x_hat;  the server has x, makes q = C(x - x_hat), sends q;  x_hat <- x_hat + q

With feedback what q lacks stays in x - x_hat and is sent later, as in EF21-P; without feedback it is forgotten, x <-
x_hat. The other half of the model is sent as it is. Clients follow all broadcasts, also those that are not sampled, so
that the x_hat before q is `Known`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...workloads import counted
from ..contract import Known
from ..tree import Layout, Tree
from .codecs import Codec
from .matrices import Sized, Weight
from .reparameterisation import Report


@dataclass(frozen=True)
class Halves:
    """The model in two halves. `names`: the compressed tensors; `whole`: whether they are encoded as one vector, or
    each tensor as a vector of its own."""

    layout: Layout
    names: tuple[str, ...]
    whole: bool = True

    @property
    def sizes(self) -> list[int]:
        """The lengths of the vectors that are encoded."""
        sizes = self.layout.pick(self.names).sizes
        return [sum(sizes)] if self.whole else sizes

    def split(self, x: Tree) -> tuple[Tensor, Tensor]:
        """(compressed, rest): all compressed tensors end to end, (c,), and all others, (P - c,)."""
        return self._flat(x, True), self._flat(x, False)

    def _flat(self, x: Tree, compressed: bool) -> Tensor:
        return torch.cat([x.flat[:0], *(t.reshape(-1) for n, t in x.items() if (n in self.names) == compressed)])

    def join(self, compressed: Tensor, rest: Tensor) -> Tree:
        """The inverse of `split`."""
        inside = iter(compressed.split(self.layout.pick(self.names).sizes))
        outside = iter(rest.split([s for n, s in self._sizes() if n not in self.names]))
        return Tree(torch.cat([next(inside if n in self.names else outside) for n in self.layout.names]), self.layout)

    def _sizes(self) -> Iterable[tuple[str, int]]:
        return zip(self.layout.names, self.layout.sizes, strict=True)

    def report(self, codec: Codec, weights: Iterable[Weight]) -> Report:
        """What becomes of each compressed weight on the way up."""
        total, sent = sum(self.layout.sizes), sum(codec.describe(n)[1] for n in self.sizes)
        described = [(w, *codec.describe(w.numbers)) for w in weights]
        sized = tuple(Sized(w, (), round(numbers)) for w, _, numbers in described)
        return Report(sized, [text for _, text, _ in described], 1 - (sum(self.sizes) - sent) / total)

    def encode(self, codec: Codec, v: Tensor, key: Tensor) -> tuple[Any, ...]:
        """The codes of the compressed half v, (c,)."""
        parts = enumerate(v.split(self.sizes))
        return tuple(codec.encode(part, counted.key(key, number)) for number, part in parts)

    def decode(self, codec: Codec, codes: Iterable[Any]) -> Tensor:
        """The compressed half, (c,), that the codes stand for."""
        return torch.cat([codec.decode(code, n) for code, n in zip(codes, self.sizes, strict=True)])


class Change(NamedTuple):
    """What is sent down."""

    codes: Any  # of the compressed half's change; () where the model is sent as it is
    rest: Tensor  # the other half, or the whole model


@dataclass(frozen=True)
class Downlink:
    """The server's side and the clients' side of the way down. `codec`: of the compressed half, None sends x as it is;
    `feedback`: whether the server keeps what the code lost."""

    halves: Halves
    codec: Codec | None
    feedback: bool
    seed: int

    def first(self, x: Tree) -> tuple[Change, Known]:
        """(what is sent before round 1, what is known before): nothing has changed yet."""
        if self.codec is None:
            return Change((), x.flat), Known(())
        inside, rest = self.halves.split(x)
        return Change(self._encode(self.codec, torch.zeros_like(inside), 1), rest), Known(inside)

    def _encode(self, codec: Codec, v: Tensor, turn: int) -> tuple[Any, ...]:
        return self.halves.encode(codec, v, counted.key(self.seed, "downlink", turn).to(v.device))

    def follow(self, change: Change, known: Known) -> Tree:
        """x_hat after the broadcast; `known`: its compressed half before."""
        if self.codec is None:
            return Tree(change.rest, self.halves.layout)
        return self.halves.join(known.value + self.halves.decode(self.codec, change.codes), change.rest)

    def next(self, x: Tree, x_hat: Tree, turn: int) -> tuple[Change, Known, Tree]:
        """(what is sent before round `turn`, what clients know until then, the server's next x)."""
        if self.codec is None:
            return Change((), x.flat), Known(()), x
        (inside, rest), (held, _) = self.halves.split(x), self.halves.split(x_hat)
        change, known = Change(self._encode(self.codec, inside - held, turn), rest), Known(held)
        return change, known, x if self.feedback else self.follow(change, known)
