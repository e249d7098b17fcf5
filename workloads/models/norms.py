"""Normalisation layers: BatchNorm (Ioffe and Szegedy 2015, arXiv:1502.03167), GroupNorm (Wu and He 2018,
arXiv:1803.08494), or none."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]

from ..stateless import Running

Norm = Literal["batch", "group", "none"]


class BatchNorm(Running):
    """BatchNorm whose running statistics the server averages.

    In training it normalises by the mean and variance of the batch, in which each example has the weight `share`, and
    moves the running statistics a tenth of the way to those of the batch (unbiased), as torch's BatchNorm does. In
    evaluation it normalises by the running statistics. It does not count batches. `affine`: whether it has weights and
    biases.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, …)."""
        if not self.training:  # also in training, where a network keeps this module in eval()
            mean, var = self.running_mean.detach(), self.running_var.detach()
            return torch.batch_norm(x, self.weight, self.bias, mean, var, False, 0.0, self.eps, False)
        alone = not (is_batchedtensor(x) or is_batchedtensor(self.running_mean))
        if alone and self.share is None and x.numel() > x.shape[1]:  # else torch divides by 0
            return self._alone(x)
        out, mean, var, count = self._even(x) if self.share is None else self._uneven(x, self.share)
        self.moved = {
            "running_mean": self.running_mean.lerp(mean, self.momentum),
            "running_var": self.running_var.lerp(var * (count / (count - 1).clamp(min=1)), self.momentum),
        }
        return out

    def _alone(self, x: Tensor) -> Tensor:
        """For a client that is not in a block, by torch's kernel, which moves copies of the running statistics in the
        pass that computes the statistics of the batch."""
        mean, var = self.running_mean.detach().clone(), self.running_var.detach().clone()
        self.moved = {"running_mean": mean, "running_var": var}
        return torch.batch_norm(x, self.weight, self.bias, mean, var, True, self.momentum, self.eps, False)

    def _even(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For examples of equal weight in a block, by torch's kernel, which is faster: (normalised x, mean (C,),
        variance (C,), how many numbers each of them is made of)."""
        out = torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps, False)
        var, mean = torch.var_mean(x.detach(), [0, *range(2, x.ndim)], correction=0)
        return out, mean, var, torch.tensor(x.numel() // x.shape[1], dtype=x.dtype)

    def _uneven(self, x: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same for examples with the weights `share`, (B,); padded examples have weight 0."""
        others, area = [0, *range(2, x.ndim)], x[0, 0].numel()
        parts = share.view(-1, *[1] * (x.ndim - 1)) / area
        mean = (parts * x).sum(others, keepdim=True)
        away = x - mean
        var = (parts * away.square()).sum(others, keepdim=True)
        out = away * (var + self.eps).rsqrt()
        if self.weight is not None and self.bias is not None:
            wide = [1, -1] + [1] * (x.ndim - 2)
            out = out * self.weight.view(wide) + self.bias.view(wide)
        return out, mean.flatten(), var.flatten(), (share > 0).sum().to(x.dtype) * area


def normalising(norm: Norm, groups: int, channels: int) -> nn.Module:
    """A normalisation layer for inputs (B, channels, …). groups: groups of channels, for norm="group"."""
    if norm == "batch":
        return BatchNorm(channels)
    if norm == "none":
        return nn.Identity()
    if norm != "group":
        raise ValueError(f"norm must be batch, group or none, got norm={norm!r}")
    if groups < 1 or channels % groups:
        raise ValueError(f"groups must divide the channels, got groups={groups}, channels={channels}")
    return nn.GroupNorm(groups, channels)
