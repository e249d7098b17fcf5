"""The final model of a run as a model of MLflow: its tensors, or a graph, which `mlflow.pytorch.load_model` loads
without this package.

The graph is the network alone, in evaluation mode, from inputs as the data set has them to logits. It is exported by
torch.export, so that loading it executes no pickle and needs none of the user's classes. Nothing is unpickled here
either: the tensors come from the run itself, or from a file in safetensors. To export a graph takes longer than some
runs, so that it is written only for those who ask for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...engine.config.schema import Experiment
from ...engine.run_spec import RunSpec
from ...engine.runs.saved_files import load_model, save_model
from ...workloads.classification import Classification
from ...workloads.problems.minimax import OverClassification
from ...workloads.workload import Workload
from ...workloads.wrappers.wrapped import Wrapped
from .from_folder import TENSORS, copied, described
from .stores import load_mlflow

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


def model_of(
    run_spec: RunSpec, tensors: Callable[[], Mapping[str, Tensor]], run: Path | None = None
) -> Callable[[Path], Any] | None:
    """The function that writes the final model of a run into a new folder in MLflow's format and returns the
    mlflow.models.Model; None if the model is not to be logged, or if there is to be a graph and the workload has no
    network. tensors: returns those of the model. run: the folder of the run, which has them in its file TENSORS, or
    None. The function raises whatever torch raises for a network that cannot be exported."""
    form = run_spec.experiment.tracking.model
    if not form:
        return None
    if form != "graph":
        if run is not None:
            return partial(copied, run)
        return lambda folder: write_tensors(tensors(), list(run_spec.frozen), folder)
    workload = with_network(run_spec.workload)
    return None if workload is None else lambda folder: export(workload, tensors(), folder)


def kept_model(run: Path, experiment: Callable[[], Experiment]) -> Callable[[Path], Any] | None:
    """Exports the final model in the folder of a run; None if the folder has none. experiment: returns that of the
    run."""
    file = run / TENSORS
    if not file.is_file():
        return None
    return model_of(RunSpec.of("model", experiment()), lambda: load_model(file), run)


def write_tensors(tensors: Mapping[str, Tensor], frozen: Sequence[str], folder: Path) -> Any:
    """See `model_of`: the tensors, in a file like that of the run's folder."""
    folder.mkdir()
    save_model(dict(tensors), folder / TENSORS, frozen)
    return described(folder)


def export(workload: WithNetwork, tensors: Mapping[str, Tensor], folder: Path) -> Any:
    """See `model_of`: the network as a graph."""
    mlflow = load_mlflow()
    predictor, inputs = Predictor(workload, tensors).eval(), example(workload)
    with torch.no_grad():
        outputs = predictor(torch.from_numpy(inputs.copy()))
    model = mlflow.models.Model()
    mlflow.pytorch.save_model(
        predictor,
        str(folder),
        mlflow_model=model,
        signature=mlflow.models.infer_signature(inputs, outputs.numpy()),
        input_example=inputs,
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "numpy")],
        serialization_format="pt2",
    )
    return model
