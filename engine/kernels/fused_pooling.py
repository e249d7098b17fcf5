"""Batch normalisation, ReLU and 2 x 2 max pooling in one pass over the images, whose channels are last in memory.

torch does one after the other, and each reads and writes all images. When a network normalises, it is not known yet
what follows. So `batch_norm` computes the moments of the batch, which need a pass of their own anyway, and returns a
`Normalised` instead of numbers. ReLU leaves a note on it, pooling computes it together with both, and every other
operation gets the numbers that torch would have given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ...workloads.models.derivatives import first_derivatives_only
from .library import call
from .replacements import pools_two_by_two, supported_alone


class Normalise(torch.autograd.Function):
    """x (N, C, h, w) normalised by moments of the batch that are known, by torch's kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt())
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        of_moments = (mean, inverse, True, ctx.eps, ctx.needs_input_grad[:3])
        found = torch.ops.aten.native_batch_norm_backward(grads[0], x, weight, None, None, *of_moments)
        return *found, None, None, None


class NormaliseAndPool(torch.autograd.Function):
    """The largest numbers of 2 x 2 pixels of the ReLU of what `Normalise` gives, by a compiled kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        inverse = (variance + eps).rsqrt()
        scale = weight * inverse
        images, channels, height, width = x.shape
        shape = (images, channels, height // 2, width // 2)
        y = torch.empty(shape, memory_format=torch.channels_last)
        code = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
        tensors = (x, scale, torch.addcmul(bias, mean, scale, value=-1), y, code)
        call("pooled_forward", tensors, images, height, width, channels)
        ctx.save_for_backward(x, code, mean, inverse, weight)
        return y

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, code, mean, inverse, weight = ctx.saved_tensors
        gradient = grads[0].contiguous(memory_format=torch.channels_last)
        found = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        images, channels, height, width = x.shape
        tensors = (x, gradient, code, mean, inverse, weight, *found)
        call("pooled_backward", tensors, images, height, width, channels)
        return *found, None, None, None


class Normalised(Tensor):
    """What batch normalisation gives, and ReLU after it if `rectified`. It has its numbers when an operation of torch
    needs them.

    given: the arguments of `Normalise`. versions: of its tensors when the images were normalised; an operation that
    changes one of them in place before the numbers are computed would change these, too.
    """

    given: tuple[Any, ...]
    rectified: bool
    versions: list[int]
    with_gradient: bool
    numbers: Tensor | None

    @staticmethod
    def of(given: tuple[Any, ...], rectified: bool, versions: list[int], with_gradient: bool) -> Normalised:
        """with_gradient: whether gradients were recorded when the images were normalised."""
        x = given[0]
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            Normalised, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        made.given, made.rectified, made.versions, made.with_gradient = given, rectified, versions, with_gradient
        made.numbers = None
        return made

    def computed(self, function: type[torch.autograd.Function]) -> Tensor:
        """What `Normalise` or `NormaliseAndPool` gives."""
        if versions_of(self.given) != self.versions:
            raise RuntimeError(
                "images, or what normalises them, were changed in place after their normalisation; choose "
                "engine.kernels=torch"
            )
        with torch.set_grad_enabled(self.with_gradient):
            return function.apply(*self.given)

    def relu(self, inplace: bool = False) -> Normalised:
        if inplace:
            self.rectified = True
        if self.rectified:
            return self
        return Normalised.of(self.given, True, self.versions, self.with_gradient)

    def plain(self) -> Tensor:
        """The numbers as an ordinary tensor."""
        if self.numbers is None:
            self.numbers = self.computed(Normalise)
            if self.rectified:
                with torch.set_grad_enabled(self.with_gradient):
                    self.numbers = torch.relu(self.numbers)
        return self.numbers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Normalised):
            if func in KNOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **given)
            # Numbers that were computed may have been changed since. Without gradients, torch would cut them off here.
            if first.numbers is None and torch.is_grad_enabled() == first.with_gradient:
                if func in RELUS and len(args) == 1:
                    return first.relu(**given)
                if (
                    func in POOLS
                    and first.rectified
                    and pools_two_by_two(*args[1:], **given)
                    and min(first.shape[2:]) > 1
                ):
                    return first.computed(NormaliseAndPool)
        return func(*plain(args), **plain(given))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """For operations that are called without Python's functions of torch."""
        return func(*plain(args), **plain(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler has to pass over this class, see `Tape`."""
        return False


def plain(tree: Any) -> Any:
    """The same arguments, with ordinary tensors."""
    return pytree.tree_map(lambda leaf: leaf.plain() if isinstance(leaf, Normalised) else leaf, tree)


KNOWN = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
}
"""Functions whose results are known without the numbers."""
RELUS = {torch.relu, F.relu, Tensor.relu}
POOLS = {torch.max_pool2d, F.max_pool2d}


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """F.batch_norm, or None if torch has to compute it. It moves the running statistics at once.

    Images are also normalised by the running statistics, as in evaluations, where no gradient is recorded.
    """
    x = input
    if x.ndim != 4 or weight is None or bias is None or isinstance(x, Normalised):
        return None
    tensors = [each for each in (x, weight, bias, running_mean, running_var) if each is not None]
    if not supported_alone(*tensors) or not all(map(is_dense, tensors)):
        return None
    pixels = x.numel() // x.shape[1]
    if pixels < 2 or any(each.shape != weight.shape for each in tensors[1:]) or len(weight) != x.shape[1]:
        return None  # torch raises an error that says what is wrong
    if training:
        mean, variance = moments(x, pixels, running_mean, running_var, momentum)
    elif running_mean is not None and running_var is not None and not torch.is_grad_enabled():
        mean, variance = running_mean, running_var
    else:
        return None
    given = (x, weight, bias, mean, variance, eps)
    return Normalised.of(given, rectified=False, versions=versions_of(given), with_gradient=torch.is_grad_enabled())


def versions_of(given: tuple[Any, ...]) -> list[int]:
    """How often each tensor of these arguments has been changed in place."""
    return [each._version for each in given if isinstance(each, Tensor)]


@torch.no_grad()
def moments(
    x: Tensor, pixels: int, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """(mean, variance) of each channel of images x (N, C, h, w), by which the running statistics, (C,) or None, are
    moved. pixels: N h w."""
    mean, variance = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    call("channel_moments", (x, mean, variance), pixels, x.shape[1])
    for running, new in ((running_mean, mean), (running_var, variance * (pixels / (pixels - 1)))):
        if running is not None:
            running.lerp_(new, momentum)
    return mean, variance


def torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor | None:
    """torch.batch_norm, as `batch_norm`."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def is_dense(tensor: Tensor) -> bool:
    """Whether images have their channels last in memory, or another tensor is contiguous."""
    images = tensor.ndim == 4
    return tensor.is_contiguous(memory_format=torch.channels_last if images else torch.contiguous_format)
