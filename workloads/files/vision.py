"""Imports torchvision even if its extension was built for another torch.

The wheels of torchvision are CUDA builds. With a CPU-only torch their C++ extension cannot be loaded, and the import of
torchvision fails where it registers fake kernels for the operators `torchvision::nms` and `torchvision::qnms`, which
only the extension defines. Its Python parts (data sets and models) work all the same. Therefore, if the extension
cannot be loaded, the schemas of these two operators are declared before the first import, whoever makes it, such as a
plug-in. They get no kernel, so that calling them still fails. This module does not import torch before that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

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
    import torch

    extension = PathFinder.find_spec("_C", folders)
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)
    except (ImportError, OSError):
        return False
    return True


def _declare_operators() -> None:
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SCHEMA)


class BeforeTorchvision(MetaPathFinder):
    """Makes torchvision importable when it is imported for the first time. It finds no module itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            with suppress(ValueError):  # it is not installed, as the import says
                if not _extension_loads(_folders()):
                    _declare_operators()


@cache
def torchvision_datasets() -> ModuleType:
    """The module `torchvision.datasets`."""
    _folders()
    from torchvision import datasets

    return datasets


@cache
def torchvision_models() -> ModuleType:
    """The module `torchvision.models`."""
    _folders()
    from torchvision import models

    return models
