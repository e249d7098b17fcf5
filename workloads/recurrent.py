"""Recurrent networks over sequences of vectors, their cells written as steps: torch's fused ones do not vectorise.

A stack has torch's own parameters, by name, shape and distribution (`weight_ih_l0`, …, uniform in 1 / sqrt(hidden)),
and its numbers: a test compares them. Rows of one batch may end early: `real` (B, T) says which places count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .base import Model
from .convolutional import Dropout


class Stack(nn.Module):
    """`layers` of tanh or LSTM cells, `gates` x hidden wide: (B, T, width) -> the last layer's (B, T, hidden)."""

    def __init__(self, width: int, hidden: int, layers: int, gates: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        bound = hidden**-0.5
        for layer in range(layers):
            shapes = {"weight_ih": (width if layer == 0 else hidden,), "weight_hh": (hidden,), "bias_ih": ()}
            for name, rest in {**shapes, "bias_hh": ()}.items():
                first = torch.empty(gates * hidden, *rest).uniform_(-bound, bound)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(first))

    def cell(self, drive: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The next state from the cell's summed inputs (B, gates x hidden); h is its first."""
        raise NotImplementedError

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            w_in, w, b_in, b = (
                getattr(self, f"{n}_l{layer}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            drives = x @ w_in.T + (b_in + b)  # of all places at once
            state, out = self.start(x), []
            for drive in drives.unbind(1):
                state = self.cell(drive + state[0] @ w.T, state)
                out.append(state[0])
            x = torch.stack(out, 1)
        return x


class Tanh(Stack):
    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__(width, hidden, layers, gates=1)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(x.shape[0], self.hidden),)

    def cell(self, drive: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (drive.tanh(),)


class Lstm4(Stack):
    """State: h, c. Gates in torch's order: input, forget, cell, output."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__(width, hidden, layers, gates=4)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        zeros = x.new_zeros(x.shape[0], self.hidden)
        return zeros, zeros

    def cell(self, drive: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        i, f, g, o = drive.chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Reader(nn.Module):
    """A stack, what is taken of its T outputs, dropout, one linear layer."""

    def __init__(self, stack: Stack, classes: int, pool: str, rate: float) -> None:
        super().__init__()
        self.stack, self.pool, self.drop = stack, pool, Dropout(rate)
        self.out = nn.Linear(stack.hidden, classes)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        h = self.stack(x)
        if real is None:
            real = torch.ones_like(h[..., 0], dtype=torch.bool)
        if self.pool == "max":
            taken = torch.where(real.unsqueeze(-1), h, torch.full_like(h, -torch.inf)).amax(1)
        else:
            last = (real.sum(1) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, h.shape[2])
            taken = h.gather(1, last).squeeze(1)
        return self.out(self.drop(taken))


@dataclass(frozen=True)
class Recurrent(Model):
    """`pool`: what is read of the outputs, the largest of each or the last."""

    hidden: int
    layers: int = 2
    pool: Literal["max", "last"] = "last"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.layers < 1:
            raise ValueError(f"hidden, layers >= 1 must hold, got hidden={self.hidden}, layers={self.layers}")

    def stack(self, width: int) -> Stack:
        raise NotImplementedError

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 2:
            raise ValueError(f"recurrent models need inputs (length, width), got shape={shape}; choose a text workload")
        return Reader(self.stack(shape[1]), classes, self.pool, self.dropout)


@dataclass(frozen=True)
class Rnn(Recurrent):
    """Tanh cells, the largest output of each over time, one linear layer: Zhang and Gao 2025, 300 -> 4096 -> 2 in two
    layers: 51,585,026 parameters."""

    hidden: int = 4096
    layers: int = 2
    pool: Literal["max", "last"] = "max"

    def stack(self, width: int) -> Stack:
        return Tanh(width, self.hidden, self.layers)


@dataclass(frozen=True)
class Lstm(Recurrent):
    """LSTM cells, the last output, one linear layer. Takakura et al. 2025, table 4, whose count 1,052,672 is that of
    two layers though the text says one; with an embedding of 79 x 256 and 79 classes 1,093,199 parameters."""

    hidden: int = 256
    layers: int = 2

    def stack(self, width: int) -> Stack:
        return Lstm4(width, self.hidden, self.layers)
