"""The settings of torch with which a device computes: deterministic kernels, and the precision of products.

They belong to a process. A run in the caller's process restores them when it ends. The processor needs none of them:
its kernels are deterministic, and it has no reduced precision unless a workload asks for it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The environment variable that fixes the memory of cuBLAS, and its values with which cuBLAS is deterministic."""
NO_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


def apply(device: torch.device, tf32: bool = False) -> Callable[[], None]:
    """Have torch compute deterministically on the device, with products in float32 or in TF32.

    Returns what restores the settings that were there before. Nothing is done for the processor. It is called before
    the first product on the device, because cuBLAS reads its environment then. A kernel without a deterministic form
    runs all the same; `kernels_without_form` finds its name.
    """
    if device.type == "cpu":
        return lambda: None
    os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    current = None
    if device.type == "cuda" and device.index is not None:  # streams and graphs are made on the current device
        current = torch.cuda.current_device()
        torch.cuda.set_device(device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    cudnn: Any = torch.backends.cudnn
    benchmark, only_deterministic = cudnn.benchmark, cudnn.deterministic
    products: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    precisions = [part.fp32_precision for part in products]
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    cudnn.benchmark, cudnn.deterministic = False, True
    for part in products:
        part.fp32_precision = "tf32" if tf32 else "ieee"

    def restore() -> None:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        cudnn.benchmark, cudnn.deterministic = benchmark, only_deterministic
        for part, precision in zip(products, precisions, strict=True):
            part.fp32_precision = precision
        if current is not None:
            torch.cuda.set_device(current)

    return restore


@contextmanager
def applied(device: torch.device, tf32: bool = False) -> Iterator[None]:
    """A context with the settings of `apply`."""
    restore = apply(device, tf32)
    try:
        yield
    finally:
        restore()


def workspace_clause() -> str:
    """What to say where the user's own value of the environment variable makes cuBLAS nondeterministic, "" else."""
    given = os.environ.get(WORKSPACE, WORKSPACES[0])
    if given in WORKSPACES:
        return ""
    return f"{WORKSPACE}={given}: products on the GPU may differ from run to run; set it to {' or '.join(WORKSPACES)}"


@contextmanager
def kernels_without_form() -> Iterator[set[str]]:
    """While it lasts, the set gets the names of kernels that ran and have no deterministic form.

    It stays empty where torch was not asked to be deterministic, as on the processor.
    """
    found: set[str] = set()
    if not torch.are_deterministic_algorithms_enabled():
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for warning in caught:
        if named := NO_FORM.search(str(warning.message)):
            found.add(named[1])
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
