"""torchvision can be imported with any torch, and is not imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedfleet.workloads.files import vision


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_imported_only_when_called():
    names = ["data.cifar", "data.digits", "data.fashion_mnist", "data.svhn", "models.convolutional", "models.small"]
    code = f"""
import sys, torch
{"; ".join("import fedfleet.workloads." + name for name in names)}
from fedfleet.workloads.files import vision
print("torchvision" in sys.modules)
print(hasattr(torch.ops.torchvision, "nms"))
print(vision.torchvision_datasets().FashionMNIST.__name__, hasattr(torch.ops.torchvision, "qnms"))
"""
    assert run(code).split() == ["False", "False", "FashionMNIST", "True"]


def test_a_plug_in_imports_it_as_any_module():
    code = """
import sys
import fedfleet.workloads
print("torch" in sys.modules)
from torchvision.models import resnet18
print(resnet18.__name__, len([each for each in sys.meta_path if type(each).__name__ == "BeforeTorchvision"]))
"""
    assert run(code).split() == ["False", "resnet18", "0"]


def test_without_torchvision(monkeypatch):
    monkeypatch.setattr(vision, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchvision"):
        vision._folders()
