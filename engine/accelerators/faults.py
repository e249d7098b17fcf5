"""Errors after which a process can do nothing more with its device."""

from __future__ import annotations

import torch

from ..memory import is_out_of_memory

LOST_MESSAGES = (
    "CUDA error:",
    "CUDA driver error:",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_EXECUTION_FAILED",
)
"""Parts of the messages of libraries whose device does not work any more."""


def is_device_lost(error: BaseException) -> bool:
    """Whether an exception says that the device failed under this process: it is gone, or a kernel ended irregularly.

    Every later call on the device raises the same exception, in this process but not in another one.
    """
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_MESSAGES)
    )
