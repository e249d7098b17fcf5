"""torchvision, made importable beside a torch that its extension was not built for.

torchvision's wheels are CUDA builds. Beside a CPU-only torch their C++ extension cannot be loaded, and the import fails
where it registers fake kernels for `torchvision::nms` and `torchvision::qnms`, which only the extension defines. Only
the Python parts are used here (data sets, transforms, models), so where the extension cannot be loaded the schemas of
these two operators are declared before the first import. They get no kernel: calling them still fails.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _folders() -> list[str]:
    """Where torchvision is installed; finding it does not import it."""
    spec = find_spec("torchvision")
    if spec is None:
        raise ValueError(
            "torchvision must be installed for this data set or model, got no such module; run: pip install torchvision"
        )
    return list(spec.submodule_search_locations or [])


def _extension_loads(folders: list[str]) -> bool:
    extension = PathFinder.find_spec("_C", folders)
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)
    except (ImportError, OSError):
        return False
    return True


def _declare_operators() -> None:
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SCHEMA)


def _importable() -> None:
    if "torchvision" not in sys.modules and not _extension_loads(_folders()):
        _declare_operators()


@cache
def torchvision_datasets() -> ModuleType:
    """The module `torchvision.datasets`."""
    _importable()
    from torchvision import datasets

    return datasets


@cache
def torchvision_models() -> ModuleType:
    """The module `torchvision.models`."""
    _importable()
    from torchvision import models

    return models
