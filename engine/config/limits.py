"""Checks of what a machine can provide, before it is needed: memory for the model, and writable folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError, type_and_first_line
from ..memory import bounded_address_space, is_out_of_memory
from ..user_code import location_clause
from .schema import part_name


def physical_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_size(outline: nn.Module) -> None:
    """Raise ConfigError if a network does not fit into this machine's memory. outline: see `Workload.outline`.

    The tensors are only measured here, not allocated. An allocation would succeed at first, since the kernel promises
    more memory than there is, and the process would be killed later.
    """
    parameters = list(outline.parameters())
    count = sum(each.numel() for each in parameters)
    size, memory = sum(each.numel() * each.element_size() for each in parameters), physical_memory()
    if size > memory:
        raise ConfigError(
            f"workload.model: the model must fit into memory, got {count:,} parameters, {size / 1e9:,.0f} GB, where "
            f"this machine has {memory / 1e9:,.0f} GB; choose a smaller one"
        )


@contextmanager
def building_model(workload: Any) -> Iterator[None]:
    """For code that builds a model: raises ConfigError if there is not enough memory for the model.

    workload: as the experiment gives it. The address space is bounded meanwhile. Without the bound the kernel would
    kill the process.
    """
    try:
        with bounded_address_space():
            yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"workload: the model of {part_name(workload)} cannot be allocated ({type_and_first_line(error)})"
            f"{location_clause(error)}, got {workload}; choose a smaller model"
        ) from error


def check_folder(key: str, path: str | Path) -> None:
    """Raise ConfigError unless files can be created in this folder, which may not exist yet.

    Nothing is left behind. `key`: the configuration key that the message names.
    """
    try:
        folder = Path(path).expanduser().absolute()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryDirectory(prefix=".fedfleet-", dir=existing) as trial:
            # Creates the same names below a writable folder, so that a name that is too long is found here.
            (Path(trial) / folder.relative_to(existing)).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{key}: no folder can be made here ({reason}), got {str(path)!r}; choose another") from error
