"""Copies between the processor's memory and a device, which never make the processor wait more often than necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def to_host(tensors: Sequence[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
    """Begin to copy float tensors of a device to the processor's memory, in one transfer. Returns what waits for it and
    gives the copies, in float64."""
    flat = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
    shapes, sizes = [tensor.shape for tensor in tensors], [tensor.numel() for tensor in tensors]
    if device.type == "cuda":
        copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        copy.copy_(flat, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        wait = copied.synchronize
    else:
        copy, wait = flat.cpu(), None

    def arrived() -> list[Tensor]:
        if wait is not None:
            wait()
        return [part.view(shape) for part, shape in zip(copy.split(sizes), shapes, strict=True)]

    return arrived


def number(value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """(): a number, made on the device without a copy."""
    if device.type == "cpu":
        return torch.tensor(value, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)
