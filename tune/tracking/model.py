"""The final model of a run as a model of MLflow, which `mlflow.pytorch.load_model` loads without this package.

The model is the network alone, in evaluation mode, from inputs as the data set has them to logits. It is exported as a
graph (torch.export), so that loading it executes no pickle and needs none of the user's classes. Nothing is unpickled
here either: the tensors come from the run itself, or from a file in safetensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...engine.run_spec import RunSpec
from ...workloads.classification import Classification
from ...workloads.problems.minimax import OverClassification
from ...workloads.workload import Workload
from ...workloads.wrappers.wrapped import Wrapped

ROWS = 2
"""Rows of the input example. The exporter would take a single row to mean that there is never another number."""


WithNetwork = Classification | OverClassification


class Predictor(nn.Module):
    """The network of a workload with fixed tensors: inputs (B, *shape) -> logits (B, classes)."""

    def __init__(self, workload: WithNetwork, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.workload = copy.deepcopy(workload)  # without the network that a run may be using
        self.names = {f"tensor_{i}": name for i, name in enumerate(tensors)}
        for own, name in self.names.items():
            self.register_buffer(own, tensors[name].detach().cpu().clone())

    def forward(self, input: Tensor) -> Tensor:
        p = {name: self.get_buffer(own) for own, name in self.names.items()}
        return self.workload.logits(p, {"input": input})


def with_network(workload: Workload) -> WithNetwork | None:
    """The workload that has the network, perhaps inside of others; None if there is none, as for a quadratic."""
    while isinstance(workload, Wrapped):
        workload = workload.of
    return workload if isinstance(workload, WithNetwork) else None


def example(workload: WithNetwork) -> np.ndarray:
    """(2, *shape): the first inputs of the test set. If the data are not on this machine: zeros of the same type."""
    base = workload.base if isinstance(workload, OverClassification) else workload
    try:
        _, test = base.load()
        return np.ascontiguousarray(test["input"][:ROWS])
    except (OSError, ValueError):
        length = getattr(base, "length", None)
        return np.zeros((ROWS, *base.shape), np.float32) if length is None else np.zeros((ROWS, length), np.int32)


def save(run_spec: RunSpec, tensors: Mapping[str, Tensor], folder: Path) -> Any:
    """Export the model into a new folder in MLflow's format; returns the mlflow.models.Model.

    Raises whatever torch raises for a network that cannot be exported.
    """
    from mlflow import pytorch  # pyright: ignore[reportPrivateImportUsage] loaded on first use
    from mlflow.models import Model, infer_signature

    workload = with_network(run_spec.workload)
    assert workload is not None  # see `run.model_of`
    predictor, inputs = Predictor(workload, tensors).eval(), example(workload)
    with torch.no_grad():
        outputs = predictor(torch.from_numpy(inputs.copy()))
    described = Model()
    pytorch.save_model(
        predictor,
        str(folder),
        mlflow_model=described,
        signature=infer_signature(inputs, outputs.numpy()),
        input_example=inputs,
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "numpy")],
        serialization_format="pt2",
    )
    return described
