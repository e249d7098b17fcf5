"""Which device a run gets where the experiment leaves it open."""

from __future__ import annotations

from typing import Any

import torch

from ..config.schema import Engine

CPU_KERNELS = ("channels_last", "native", "attention", "chain")
"""Kernels of the table KERNELS that are for processors."""


def on_this_machine(engine: Engine) -> Engine:
    """The settings of a run that starts here: `device: auto` is a GPU if this process sees one, and workers that train
    on GPUs share those that it sees, unless they reserve some.

    A cluster and explicit groups of workers say themselves what they have.
    """
    wants = engine.device == "auto" and engine.kernels not in CPU_KERNELS
    if engine.address or engine.on_gpus() or not (wants or engine.device == "cuda"):
        return engine
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count or isinstance(engine.workers, tuple):
        return engine
    update: dict[str, Any] = {"device": "cuda"}
    if engine.backend == "ray" or (engine.backend == "auto" and engine.asks_for_ray()):
        workers = count if engine.workers == "auto" else engine.workers
        update |= {"workers": workers, "gpus": share_of_a_gpu(workers, count)}
    return engine.model_copy(update=update)


def share_of_a_gpu(workers: int, gpus: int) -> float:
    """The share of a GPU that each of some workers reserves, so that all of them fit: a share lies on one GPU."""
    return int(10_000 / -(-workers // gpus)) / 10_000


def device_line(engine: Engine, device: torch.device) -> str:
    """What the log says of the device that trains."""
    if device.type == "cuda" and torch.cuda.is_available():
        return f"device: {device}, {torch.cuda.get_device_properties(device).name}"
    why = ", as engine.device=auto finds no GPU" if engine.device == "auto" else ""
    return f"device: {device}{why}"
