"""Compiled kernels that replace operators of torch in whatever a workload computes.

`native_operators` is a context in which a compiled kernel computes `conv2d` (square, stride 1, not grouped, float32 on
the CPU) and, in evaluations, 2 x 2 max pooling. All other operators, and all operators outside of the context, are
torch's. torch computes the convolution of a block as a grouped convolution, which is slow on CPUs. The compiled one
takes the same time per client in a block as for a client alone. Convolutions agree with torch's within rounding, and
pooling to the bit. In this context recurrent networks pass over the padded places of texts, for a client that is not in
a block.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ...algorithms.parts.orthogonal import EPS, FASTER, SCHEMES, Faster, How, Part, Scheme, newton_schulz_plainly
from ...workloads.models.derivatives import first_derivatives_only
from ...workloads.workload import PASS_OVER
from .contract import Kernels, Run
from .library import NoKernels, call, check_status, library, pointer
from .replacements import Replacements, padding_of, scalar_of, supported, supported_alone

SIDES = (1, 2, 3, 4, 5, 7)
"""Sides of the square convolution kernels that native.h has."""


class Conv(torch.autograd.Function):
    """The convolution of x (B, I, h, w) with weight (O, I, K, K), plus bias (O,); all contiguous.

    In a block, all have the axis of the clients first.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        *_, examples, inputs, height, width = x.shape
        outputs, side = weight.shape[-4], weight.shape[-1]
        grown = 2 * padding - side + 1
        y = x.new_empty(*x.shape[:-3], outputs, height + grown, width + grown)
        sizes = (examples, inputs, outputs, height, width, padding, side)
        call("conv_forward", (x, weight, bias, y), client_count(weight), *sizes, 0)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.padding = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient, padding = grads[0].contiguous(), ctx.padding
        *_, examples, inputs, height, width = x.shape
        outputs, side = weight.shape[-4], weight.shape[-1]
        of_weight = torch.empty_like(weight)
        of_bias = weight.new_empty(weight.shape[:-3]) if ctx.biased else None
        sizes = (examples, inputs, outputs, height, width, padding, side)
        call("conv_weights", (x, gradient, of_weight, of_bias), client_count(weight), *sizes)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x, rest = torch.empty_like(x), side - 1 - padding
            sizes = (examples, outputs, inputs, *gradient.shape[-2:], rest, side)
            call("conv_forward", (gradient, weight, None, of_x), client_count(weight), *sizes, 1)
        return of_x, of_weight, of_bias, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> tuple[Tensor, int]:
        x, weight, bias = (
            clients_first(t, dim, info.batch_size) for t, dim in zip((x, weight, bias), dims, strict=False)
        )
        if weight.ndim == 5:
            return Conv.apply(x, weight, bias, padding), 0
        merged = [None if t is None else t.flatten(0, 1) for t in (x, weight, bias)]  # merges the axes of nested vmaps
        return Conv.apply(*merged, padding).unflatten(0, weight.shape[:2]), 0


def client_count(weight: Tensor) -> int:
    """The number of clients that the weights of a convolution are for."""
    return weight.shape[0] if weight.ndim == 5 else 1


def clients_first(tensor: Any, dim: int | None, size: int) -> Any:
    """A contiguous tensor with the axis of the `size` clients first. `dim`: where it is, None if there is none."""
    if tensor is None:
        return None
    moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.contiguous()


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor | None:
    """torch.conv2d, or None if torch has to compute it."""
    side, around = scalar_of(tuple(weight.shape[-2:])), padding_of(*args, **kwargs)
    if side not in SIDES or around is None or not 0 <= around < side or not supported(input, weight, bias):
        return None
    if input.ndim != 4 or min(input.shape) < 1 or min(input.shape[-2:]) + 2 * around < side:
        return None
    if weight.ndim != 4 or weight.shape[1] != input.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None  # torch raises an error that says what is wrong
    return Conv.apply(input.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), around)


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """torch.max_pool2d of squares of 2 x 2 where no gradient is asked for, to the same bits; else None. Torch notes the
    places of the maxima in any case, which takes several times as long."""
    settings = (kernel_size, kernel_size if stride in (None, []) else stride, padding, dilation)
    if tuple(map(scalar_of, settings)) != (2, 2, 0, 1) or ceil_mode or return_indices:
        return None
    if input.ndim != 4 or min(input.shape) < 1 or min(input.shape[-2:]) < 2 or not supported_alone(input):
        return None
    if not input.is_contiguous() or (torch.is_grad_enabled() and input.requires_grad):
        return None
    examples, channels, height, width = input.shape
    y = input.new_empty(examples, channels, height // 2, width // 2)
    call("max_pool", (input, y), examples * channels, height, width)
    return y


LARGEST_MATRIX = {torch.float32: 1 << 22, torch.bfloat16: 600_000}
"""The dtype in which Newton-Schulz iterations are asked for -> the most numbers of a matrix. Larger matrices, and other
dtypes, are left to torch. The compiled iterations need the memory of twelve matrices, 200 MB at most. On processors
with AMX, torch has faster products of bfloat16 (benchmarks/RESULTS.md, "Newton-Schulz iterations")."""


def floats(*numbers: float) -> Any:
    """Some numbers as an array of C's float."""
    return (ctypes.c_float * len(numbers))(*numbers)


@functools.lru_cache
def iterations_of(scheme: Scheme, iterations: int) -> tuple[Any, ...]:
    """(coefficients of all iterations, what matrices are divided by first), as orthogonal.h takes them."""
    triples = floats(*(number for triple in scheme.coefficients(iterations) for number in triple))
    return triples, floats(scheme.cushion, scheme.eps, EPS)


@functools.lru_cache
def numbers_of(parts: tuple[Part, ...]) -> tuple[Any, Any, int]:
    """(places and factors of some parts, as orthogonal.h takes them, the numbers in the largest matrix)."""
    places = [number for part in parts for number in part[:3]]
    factors = floats(*(number for part in parts for number in part[3:]))
    largest = max((part.rows * part.cols for part in parts), default=0)
    return (ctypes.c_int64 * len(places))(*places), factors, largest


def iterated(v: Tensor, y: Tensor | None, parts: tuple[Part, ...], how: How) -> Tensor | None:
    """Newton-Schulz iterations by the compiled kernels (`orthogonal.Faster`), None if torch has to compute them, as for
    a backward pass. Sums are of float32. Where bfloat16 is asked for, and the processor has products of it, factors may
    be rounded to it."""
    tensors, (scheme, iterations, dtype) = (v,) if y is None else (v, y), how
    places, factors, largest = numbers_of(parts)
    if not v.numel() or not iterations or largest > LARGEST_MATRIX.get(dtype or torch.float32, 0):
        return None
    if not supported_alone(*tensors) or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return None
    v, y = v.contiguous(), None if y is None else y.contiguous()
    found = torch.empty(v.shape, dtype=v.dtype)
    sizes = (len(parts), iterations, dtype == torch.bfloat16)
    arrays = (*map(pointer, (v, y, found)), places, factors, *iterations_of(SCHEMES[scheme], iterations))
    check_status(library().newton_schulz(*arrays, *map(ctypes.c_int64, sizes)))
    return found


REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: conv2d,
    torch.max_pool2d: max_pool2d,
    F.max_pool2d: max_pool2d,  # torch hands a call of it to `Replacements` by this name
}


@contextmanager
def native_operators() -> Iterator[None]:
    """A context in which calls of the functions in REPLACEMENTS are replaced if that is possible, and in which
    recurrent networks pass over padded places."""
    before = PASS_OVER.set(True)
    try:
        with Replacements(REPLACEMENTS):
            yield
    finally:
        PASS_OVER.reset(before)


AT_ONCE = 4
"""The largest number of tensors that `add_up` adds in one pass."""
PIECE = 1 << 14
"""torch adds up so many entries at a time, since copies of so many in float64 stay in the processor's caches."""


def add_up(total: Tensor, parts: Sequence[Tensor], more: bool, compiled: bool) -> None:
    """Set `total` (float64) to (a + b) + (c + d), the sum of up to AT_ONCE parts; plus its old content if `more`.

    compiled: by the library, to the same bits.
    """
    own = compiled and all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
    own = own and total.is_contiguous() and all(part.numel() == total.numel() for part in parts)
    if own and total.device.type == "cpu" and all(part.device == total.device for part in parts):
        call("add_up", (*parts, *[None] * (AT_ONCE - len(parts)), total), len(parts), more, total.numel())
        return
    placed = [part.to(total.device) for part in parts]
    if total.device.type == "cpu" and total.is_contiguous() and all(part.shape == total.shape for part in placed):
        pieces = (tensor.reshape(-1).split(PIECE) for tensor in (total, *placed))
        for piece, *of_parts in zip(*pieces, strict=True):
            _add_plainly(piece, of_parts, more)
    else:
        _add_plainly(total, placed, more)


def _add_plainly(total: Tensor, parts: Sequence[Tensor], more: bool) -> None:
    """`add_up` by torch."""
    a, *others = parts
    first = a.to(total.dtype, copy=True) if more else total.copy_(a)
    if len(others) == AT_ONCE - 1:
        others[1:] = [others[1].to(total.dtype, copy=True).add_(others[2])]
    for other in others:
        first.add_(other)
    if more:
        total.add_(first)


def in_bfloat16(v: Tensor, y: Tensor | None, parts: tuple[Part, ...], how: How) -> Tensor | None:
    """Newton-Schulz iterations in bfloat16 (`orthogonal.Faster`), which tensor cores of GPUs multiply. All matrices of
    a shape, of all clients of a block, are in one batched product; a whole step is not one call."""
    scheme, iterations, _ = how
    return newton_schulz_plainly(v, scheme, iterations, torch.bfloat16) if y is None and iterations else None


@contextmanager
def orthogonalised_by(kernels: Faster) -> Iterator[None]:
    """A context in which these kernels compute the Newton-Schulz iterations of methods."""
    token = FASTER.set(kernels)
    try:
        yield
    finally:
        FASTER.reset(token)


class Native(Kernels):
    """Compiled kernels in the place of operators of torch, and for Newton-Schulz iterations."""

    name: ClassVar[str] = "native"
    compiled: ClassVar[bool] = True

    def why_not(self, run: Run) -> str:
        if run.device.type != "cpu" or run.dtype != torch.float32:
            dtype = str(run.dtype).removeprefix("torch.")
            return f"for float32 on processors, not for device={run.device.type}, dtype={dtype}"
        library()
        return ""

    def is_promising(self, run: Run) -> bool:
        try:
            return not Native.why_not(self, run)
        except NoKernels:
            return False

    def around_losses(self) -> AbstractContextManager[Any]:
        return native_operators()

    def around_steps(self) -> AbstractContextManager[Any]:
        return orthogonalised_by(iterated)
