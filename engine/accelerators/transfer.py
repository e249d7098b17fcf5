"""Copies between the processor's memory and a device, which never make the processor wait more often than necessary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The processor does not wait for a copy to a CUDA device: such copies are made from
    pinned memory, which torch's allocator keeps until they are done."""
    if device.type == "cpu" or tensor.device.type == device.type:
        return tensor
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """float64 copies of float tensors in the processor's memory, made in one transfer."""
    flat = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def number(value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """(): a number, made on the device without a copy."""
    if device.type == "cpu":
        return torch.tensor(value, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)
