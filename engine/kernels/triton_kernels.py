"""Convolutions and maximum pooling of a block of clients by programs of our own for GPUs, in Triton.

Libraries for GPUs compute the convolution of clients with weights of their own group by group, and as batched products
(`block_convolutions.py`) it needs columns that are many times as large as the images. The programs read the images
where they lie, and all clients are in one launch. Triton comes with torch's packages for CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]

from .block_convolutions import Pair, pair
from .contract import Run
from .cuda_graph import Graph
from .replacements import Replacements

SHARE = 1024
"""So many places of a client's images are summed up by one program in the gradient of a weight, and the sums of the
programs by torch."""
BLOCK = 512
"""The numbers that one program for maximum pooling computes."""
WINDOW = 255
"""The largest window, whose places are numbered by bytes."""
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Triton(Graph):
    """Convolutions and maximum pooling of a block are programs in Triton, and its steps are replayed from a CUDA
    graph."""

    name: ClassVar[str] = "triton"
    needs_proof: ClassVar[bool] = True

    def why_not(self, run: Run) -> str:
        return super().why_not(run) or ("" if has_triton() else "written in Triton, and the package triton is not here")

    def is_promising(self, run: Run) -> bool:
        """Where the model has weights (O, I, k, l)."""
        return super().is_promising(run) and any(len(shape) == 4 for shape in run.layout.shapes)

    def around_losses(self) -> AbstractContextManager[Any]:
        return Replacements({torch.conv2d: convolution, torch.max_pool2d: pooling})


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def programs() -> Any:
    """The programs, whose module needs Triton."""
    from . import triton_programs

    return triton_programs


# --- convolutions -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution or of pooling, along both axes. size: of a weight or a window."""

    size: Pair
    steps: Pair
    padding: Pair
    apart: Pair

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the programs."""
        names = ("KL", ("SH", "SW"), ("PH", "PW"), ("DH", "DW"))
        pairs = (self.size, self.steps, self.padding, self.apart)
        return {name: value for both, own in zip(names, pairs, strict=True) for name, value in zip(both, own)}  # noqa: B905

    def results(self, images: tuple[int, ...]) -> Pair:
        """(h, w) of the results for images of these sides."""
        spans = [apart * (size - 1) for apart, size in zip(self.apart, self.size, strict=True)]
        height, width = (
            (side + 2 * padding - span - 1) // step + 1
            for side, padding, span, step in zip(images, self.padding, spans, self.steps, strict=True)
        )
        return height, width


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """`torch.conv2d` of clients with weights of their own; None leaves all others to torch."""
    if input.ndim != 4 or not is_batchedtensor(weight) or weight.dtype not in DTYPES or input.dtype != weight.dtype:
        return None
    size, apart = (int(weight.shape[2]), int(weight.shape[3])), pair(dilation)
    if padding == "same":
        spans = [d * (k - 1) for d, k in zip(apart, size, strict=True)]
        if any(span % 2 for span in spans):
            return None
        padding = [span // 2 for span in spans]
    geometry = Geometry(size, pair(stride), pair(0 if padding == "valid" else padding), apart)
    return ConvolutionOfOne.apply(input, weight, bias, geometry, groups)


class ConvolutionOfOne(torch.autograd.Function):
    """A convolution under vmap, which gives it to `ConvolutionOfAll`."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, groups: int) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Tensor, int]:
        tensors = [with_clients(info.batch_size, tensor, dim) for tensor, dim in zip(given[:3], in_dims, strict=False)]
        return ConvolutionOfAll.apply(*tensors, *given[3:]), 0


def with_clients(clients: int, tensor: Tensor | None, dim: int | None) -> Tensor | None:
    """A tensor with the clients' axis first. dim: where it is, None if all clients have the same."""
    if tensor is None:
        return None
    return tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class ConvolutionOfAll(torch.autograd.Function):
    """The convolutions of all clients: images (C, B, I, H, W), weights (C, O, I / G, k, l), biases (C, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, groups: int) -> Tensor:
        x, w = x.contiguous(), each_contiguous(w)
        bias = None if bias is None else each_contiguous(bias)
        clients, examples, _, *sides = x.shape
        y = x.new_empty(clients, examples, w.shape[1], *geometry.results(tuple(sides)))
        sizes, constants = sizes_of(x, y, groups, geometry)
        outputs, taps = constants["OG"], constants["IG"] * constants["K"] * constants["L"]
        tile = tile_of(outputs, taps)
        grid = (clients * groups * -(-y[0, :, 0].numel() // tile["BM"]), -(-outputs // tile["BN"]))
        biases = (w, 0) if bias is None else (bias, bias.stride(0))
        programs().outputs[grid](
            x, w, biases[0], y, w.stride(0), biases[1], *sizes, **constants, BIASED=bias is not None,
            PRECISION=precision(x), **tile,
        )  # fmt: skip
        ctx.save_for_backward(x, w)
        ctx.given = geometry, groups
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        x, w = ctx.saved_tensors
        gy = slopes[0].contiguous()
        gx = input_gradients(x, w, gy, *ctx.given) if ctx.needs_input_grad[0] else None
        gw = weight_gradients(x, w, gy, *ctx.given) if ctx.needs_input_grad[1] else None
        gb = gy.sum((1, 3, 4)) if ctx.needs_input_grad[2] else None
        return gx, gw, gb, None, None


def each_contiguous(tensor: Tensor) -> Tensor:
    """A tensor whose rows along the first axis are contiguous each, as the views of flat models are."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def precision(x: Tensor) -> str:
    """The precision of products of float32, see `engine.precision`."""
    return "tf32" if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def sizes_of(x: Tensor, y: Tensor, groups: int, geometry: Geometry) -> tuple[list[int], dict[str, int]]:
    """(B, H, W, h, w; the constants of the programs) for images and results with the clients' axis first."""
    channels = {"G": groups, "IG": x.shape[2] // groups, "OG": y.shape[2] // groups}
    return [x.shape[1], *x.shape[3:], *y.shape[3:]], {**channels, **geometry.constants}


def tile_of(columns: int, depth: int) -> dict[str, int]:
    """The sizes of the tiles of a product with so many columns, whose sums have so many summands."""
    wide = 16 if columns <= 16 else 32 if columns <= 32 else 64
    return {"BM": 128, "BN": wide, "BK": 16 if depth <= 16 else 32, "num_warps": 4 if wide < 64 else 8}


def input_gradients(x: Tensor, w: Tensor, gy: Tensor, geometry: Geometry, groups: int) -> Tensor:
    """The gradient in the images, from that in the results (C, B, O, h, w)."""
    gx = torch.empty_like(x)
    sizes, constants = sizes_of(x, gy, groups, geometry)
    inputs, taps = constants["IG"], constants["OG"] * constants["K"] * constants["L"]
    tile = tile_of(inputs, taps)
    grid = (len(x) * groups * -(-x[0, :, 0].numel() // tile["BM"]), -(-inputs // tile["BN"]))
    programs().input_gradients[grid](gy, w, gx, w.stride(0), *sizes, **constants, PRECISION=precision(x), **tile)
    return gx


def weight_gradients(x: Tensor, w: Tensor, gy: Tensor, geometry: Geometry, groups: int) -> Tensor:
    """The gradient in the weights."""
    sizes, constants = sizes_of(x, gy, groups, geometry)
    outputs, taps = constants["OG"], constants["IG"] * constants["K"] * constants["L"]
    count = -(-gy[0, :, 0].numel() // SHARE)
    parts = x.new_empty((count, len(x), gy.shape[2], taps), dtype=torch.float32)
    tile = {"BM": 16 if outputs <= 16 else 32, "BN": 32 if taps <= 32 else 64, "BK": 32, "num_warps": 4}
    grid = (len(x) * groups * -(-outputs // tile["BM"]), -(-taps // tile["BN"]), count)
    programs().weight_gradients[grid](
        x, gy, parts, len(x), *sizes, SHARE, **constants, PRECISION=precision(x), **tile
    )  # fmt: skip
    return parts.sum(0).to(w.dtype).view(w.shape)


# --- maximum pooling --------------------------------------------------------------------------------------------------
def pooling(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor | None:
    """`torch.max_pool2d` of clients; None leaves all others to torch."""
    size = pair(kernel_size)
    if input.ndim != 4 or not is_batchedtensor(input) or input.dtype not in DTYPES or ceil_mode:
        return None
    if size[0] * size[1] > WINDOW:
        return None
    return PoolingOfOne.apply(input, Geometry(size, pair(stride or kernel_size), pair(padding), pair(dilation)))


class PoolingOfOne(torch.autograd.Function):
    """Maximum pooling under vmap, which gives it to `PoolingOfAll`."""

    @staticmethod
    def forward(input: Tensor, geometry: Geometry) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, input: Tensor, geometry: Geometry) -> tuple[Tensor, int]:
        return PoolingOfAll.apply(input.movedim(in_dims[0], 0), geometry), 0


class PoolingOfAll(torch.autograd.Function):
    """Maximum pooling of images (…, H, W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-2], *geometry.results(tuple(x.shape[-2:])))
        which = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        count = x.shape[:-2].numel()
        programs().largest[(-(-y.numel() // BLOCK),)](
            x, y, which, count, *x.shape[-2:], *y.shape[-2:], **geometry.constants, BLOCK=BLOCK
        )
        ctx.save_for_backward(which)
        ctx.given = geometry, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (which,), (geometry, shape) = ctx.saved_tensors, ctx.given
        gx = slopes[0].new_empty(shape)
        programs().largest_gradients[(-(-gx.numel() // BLOCK),)](
            slopes[0].contiguous(), which, gx, shape[:-2].numel(), *shape[-2:], *which.shape[-2:],
            **geometry.constants, BLOCK=BLOCK,
        )  # fmt: skip
        return gx, None
