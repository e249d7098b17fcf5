"""Imports torchvision even if its extension was built for another torch.

The wheels of torchvision are CUDA builds. With a CPU-only torch their C++ extension cannot be loaded, and the import of
torchvision fails where it registers fake kernels for the operators `torchvision::nms` and `torchvision::qnms`, which
only the extension defines. Only the Python parts are used here (data sets and models). Therefore, if the extension
cannot be loaded, the schemas of these two operators are declared before the first import. They get no kernel, so that
calling them still fails.
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
    """The folders of torchvision, found without importing it. ValueError if it is not installed."""
    spec = find_spec("torchvision")
    if spec is None:
        raise ValueError(
            "torchvision must be installed for this data set or model, got no such module; run: pip install torchvision"
        )
    return list(spec.submodule_search_locations or [])


def _extension_loads(folders: list[str]) -> bool:
    """Load the C++ extension, and say whether that worked."""
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


def _make_importable() -> None:
    if "torchvision" not in sys.modules and not _extension_loads(_folders()):
        _declare_operators()


@cache
def torchvision_datasets() -> ModuleType:
    """The module `torchvision.datasets`."""
    _make_importable()
    from torchvision import datasets

    return datasets


@cache
def torchvision_models() -> ModuleType:
    """The module `torchvision.models`."""
    _make_importable()
    from torchvision import models

    return models
