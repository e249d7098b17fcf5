"""What a machine cannot have: a model larger than its memory, a folder where none can be made. Told before it
is tried.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from ...workloads.base import Classification, Workload
from ..errors import ConfigError


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_size(workload: Workload) -> None:
    """ConfigError where the network of a classification does not fit into this machine's memory.

    Its tensors are only sized here. Allocating them would succeed at first, since the kernel promises more memory than
    there is, and end with the process being killed.
    """
    if not isinstance(workload, Classification):
        return
    with torch.device("meta"):
        parameters = list(workload.build().parameters())
    count = sum(each.numel() for each in parameters)
    size, there = sum(each.numel() * each.element_size() for each in parameters), memory()
    if size > there:
        raise ConfigError(
            f"workload.model: the model must fit into memory, got {count:,} parameters, {size / 1e9:,.0f} GB, where "
            f"this machine has {there / 1e9:,.0f} GB; choose a smaller one"
        )


def check_folder(key: str, path: str | Path) -> None:
    """ConfigError unless files can be made in this folder, or in a new one of this name. Nothing is left behind."""
    try:
        folder = Path(path).expanduser().absolute()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is a file")
        with tempfile.TemporaryDirectory(prefix=".fedfleet-", dir=there) as made:
            # The same names below a folder that can be written to: too long a name is met here.
            (Path(made) / folder.relative_to(there)).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{key}: no folder can be made here ({reason}), got {str(path)!r}; choose another") from error
