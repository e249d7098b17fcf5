"""Recurrent networks over sequences of vectors. The cells are written step by step, because torch's fused recurrent
modules do not vectorise.

A stack has the same parameters as torch's modules, by name, shape and distribution (`weight_ih_l0`, …, uniform within
1 / sqrt(hidden)), and computes the same numbers; a test compares them. Sequences may have different lengths: the mask
`real`, (B, T) bool, is false at padded places. Texts are mostly padding (those of SST-2 have 9 words on average, and 64
places). The engine may have a client that is not in a block pass over padded places, see PASS_OVER.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.nn.utils.rnn import pack_padded_sequence

from ..workload import PASS_OVER, Model
from .convolutional import Dropout
from .derivatives import first_derivatives_only


class Stack(nn.Module):
    """Layers of recurrent cells: inputs (B, T, width) -> outputs of the last layer (B, T, hidden). `gates`: the number
    of linear maps in a cell, 1 for tanh and 4 for LSTM."""

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
        """The next state of a cell; its first entry is the output h, (B, hidden). drive: (B, gates * hidden), the sum
        of the linear maps of the input and of h. state: the last state."""
        raise NotImplementedError

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """The initial state of a cell, zeros, for inputs x (B, T, ...)."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Tensor]:
        """All parameters, in the order in which torch's own functions take them."""
        return [value for value in self._parameters.values() if value is not None]

    def packed(self, x: Tensor, running: Tensor) -> Tensor:
        """`forward` without padded places, for a client that is not in a block.

        x: (places, width), the first places of all sequences, from the longest one to the shortest, then the second
        ones of all that have one, and so on; the result has this order, too. running: (T,), how many sequences have a
        first place, a second one, and so on.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            w_in, w, b_in, b = (
                getattr(self, f"{n}_l{layer}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            drives = x @ w_in.T + (b_in + b)  # (B, T, gates * hidden), for all places at once
            state, out = self.start(x), []
            for drive in drives.unbind(1):
                state = self.cell(drive + state[0] @ w.T, state)
                out.append(state[0])
            x = torch.stack(out, 1)
        return x


class PackedTanh(torch.autograd.Function):
    """The outputs h <- tanh(drive + w h) of a layer at all places, (places, hidden), from `drives` of this shape and w
    (hidden, hidden). The places are ordered as in `Stack.packed`; `running` is a list.

    The gradient in w is one product over all places. Autograd would compute one of the size of w for each of the T
    steps, and add them up.
    """

    @staticmethod
    def forward(drives: Tensor, w: Tensor, running: list[int]) -> Tensor:
        steps = drives.split(running)
        outputs = [steps[0].tanh()]
        for drive in steps[1:]:
            outputs.append(torch.addmm(drive, outputs[-1][: len(drive)], w.T).tanh_())
        return torch.cat(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, w, ctx.running = inputs
        ctx.save_for_backward(output, w)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        output, w = ctx.saved_tensors
        outputs, of_drives = output.split(ctx.running), grads[0].clone(memory_format=torch.contiguous_format)
        steps = of_drives.split(ctx.running)
        for k in reversed(range(len(steps))):
            if k + 1 < len(steps):
                steps[k][: len(steps[k + 1])].addmm_(steps[k + 1], w)
            steps[k].mul_(1 - outputs[k].square())
        if len(steps) == 1:
            return of_drives, torch.zeros_like(w), None
        before = torch.cat([h[: len(step)] for h, step in zip(outputs, steps[1:], strict=False)])
        return of_drives, of_drives[len(steps[0]) :].T @ before, None


class PackedMax(torch.autograd.Function):
    """(B, hidden): the largest entries of h over the places of each sequence, from the longest one to the shortest. h,
    running: as in `PackedTanh`. Equal entries share the gradient, as in `Tensor.amax`."""

    @staticmethod
    def forward(h: Tensor, running: list[int]) -> Tensor:
        first, *others = h.split(running)
        top = first.clone()
        for step in others:
            torch.maximum(top[: len(step)], step, out=top[: len(step)])
        return top

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        h, ctx.running = inputs
        ctx.save_for_backward(h, output)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        h, top = ctx.saved_tensors
        hits = [step == top[: len(step)] for step in h.split(ctx.running)]
        count = torch.zeros_like(top)
        for hit in hits:
            count[: len(hit)].add_(hit)
        share = grads[0] / count
        return torch.cat([torch.where(hit, share[: len(hit)], 0.0) for hit in hits]), None


class Tanh(Stack):
    """Cells h <- tanh(drive). State: h."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__(width, hidden, layers, gates=1)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(x.shape[0], self.hidden),)

    def packed(self, x: Tensor, running: Tensor) -> Tensor:
        """Not by torch's own function, which adds up the gradient in the weights place by place."""
        for w_in, w, b_in, b in zip(*[iter(self.weights)] * 4, strict=True):
            x = PackedTanh.apply(torch.nn.functional.linear(x, w_in, b_in + b), w, running.tolist())
        return x

    def cell(self, drive: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (drive.tanh(),)


class Lstm4(Stack):
    """LSTM cells. State: h, c. The order of the gates is that of torch: input, forget, cell, output."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__(width, hidden, layers, gates=4)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        zeros = x.new_zeros(x.shape[0], self.hidden)
        return zeros, zeros

    def cell(self, drive: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        i, f, g, o = drive.chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def packed(self, x: Tensor, running: Tensor) -> Tensor:
        start = x.new_zeros(self.layers, int(running[0]), self.hidden)
        return torch.lstm(x, running, (start, start), self.weights, True, self.layers, 0.0, False, False)[0]

    def forward(self, x: Tensor) -> Tensor:
        """For a client that is not in a block, torch's own function on the processor. It does not run under vmap."""
        if x.device.type != "cpu" or any(map(is_batchedtensor, (x, *self.weights))):
            return super().forward(x)
        start = x.new_zeros(self.layers, x.shape[0], self.hidden)
        return torch.lstm(x, (start, start), self.weights, True, self.layers, 0.0, False, False, True)[0]


def lengths_of(real: Tensor, tensors: Sequence[Tensor]) -> Tensor | None:
    """(B,): the lengths of the sequences of a batch, where padding may be passed over and this pays: real, (B, T) bool,
    is true at the first places of each sequence, at one or more of them, and at most at nine tenths of all places.

    None where this is not so, and where values cannot be known: under vmap and on other devices than the processor.
    tensors: all others that the answer is for.
    """
    if not PASS_OVER.get():
        return None
    if any(each.device.type != "cpu" or is_batchedtensor(each) for each in (real, *tensors)) or not real.numel():
        return None
    lengths = real.sum(1)
    first = torch.arange(real.shape[1]) < lengths.unsqueeze(1)
    pays = (first == real).all() & (lengths.min() > 0) & (10 * lengths.sum() <= 9 * real.numel())
    return lengths if pays.item() else None


class Reader(nn.Module):
    """A stack, pooling over its T outputs ("max" or "last"), dropout and one linear layer: (B, T, width) -> logits."""

    def __init__(self, stack: Stack, classes: int, pool: str, rate: float) -> None:
        super().__init__()
        self.stack, self.pool, self.drop = stack, pool, Dropout(rate)
        self.out = nn.Linear(stack.hidden, classes)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        lengths = None if real is None else lengths_of(real, (x, *self.stack.weights))
        if lengths is not None:
            return self.out(self.drop(self._read(x, lengths)))
        h = self.stack(x)
        if real is None:
            taken = h.amax(1) if self.pool == "max" else h[:, -1]
        elif self.pool == "max":
            taken = torch.where(real.unsqueeze(-1), h, torch.full_like(h, -torch.inf)).amax(1)
        else:
            last = (real.sum(1) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, h.shape[2])
            taken = h.gather(1, last).squeeze(1)
        return self.out(self.drop(taken))

    def _read(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(B, hidden): what pooling takes of the outputs, for sequences of these lengths (B,)."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        running, order = packed.batch_sizes, packed.sorted_indices
        h = self.stack.packed(packed.data, running)
        if self.pool == "max":
            taken = PackedMax.apply(h, running.tolist())
        else:
            starts = running.cumsum(0) - running
            taken = h[starts[lengths[order] - 1] + torch.arange(len(lengths))]
        return taken[packed.unsorted_indices]


@dataclass(frozen=True)
class Recurrent(Model):
    """A recurrent network for sequences. `hidden`: width of a cell. `layers`: layers of cells. `pool`: how the outputs
    over time become one vector, "max" (entrywise) or "last". `dropout`: rate before the linear layer."""

    hidden: int
    layers: int = 2
    pool: Literal["max", "last"] = "last"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.layers < 1:
            raise ValueError(f"hidden, layers >= 1 must hold, got hidden={self.hidden}, layers={self.layers}")

    def stack(self, width: int) -> Stack:
        """The cells, for inputs (B, T, width)."""
        raise NotImplementedError

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 2:
            raise ValueError(f"recurrent models need inputs (length, width), got shape={shape}; choose a text workload")
        return Reader(self.stack(shape[1]), classes, self.pool, self.dropout)


@dataclass(frozen=True)
class Rnn(Recurrent):
    """Tanh cells, the maximum over time, one linear layer. Zhang and Gao 2025: 300 -> 4096 -> 2 in two layers, with
    51,585,026 parameters."""

    hidden: int = 4096
    layers: int = 2
    pool: Literal["max", "last"] = "max"

    def stack(self, width: int) -> Stack:
        return Tanh(width, self.hidden, self.layers)


@dataclass(frozen=True)
class Lstm(Recurrent):
    """LSTM cells, the last output, one linear layer. Takakura et al. 2025, table 4: its number of parameters,
    1,052,672, is that of two layers, although the text says one. With an embedding of 79 x 256 and 79 classes there are
    1,093,199 parameters."""

    hidden: int = 256
    layers: int = 2

    def stack(self, width: int) -> Stack:
        return Lstm4(width, self.hidden, self.layers)
