"""Evaluation of the model of a finished run, in the calling process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..clients.evaluation import TestSlice, evaluate_clients, evaluate_test_rows, evaluations
from ..clients.modules import evaluating
from ..clients.worker import Data
from ..cohorts.tasks import tree_shape
from ..config.schema import Experiment
from ..errors import ConfigError
from ..reduction.tree import TaskResult, reduce_in_order
from ..run_spec import RunSpec
from ..user_code import plugin_errors


def evaluate(
    experiment: Experiment, model: Mapping[str, Tensor], test: Mapping[str, Any] | None, clients: bool
) -> dict[str, float]:
    """The columns eval/… of a model; see `Result.evaluate`."""
    run_spec = RunSpec.of("evaluation", experiment)
    if run_spec.device.type == "cuda" and not torch.cuda.is_available():
        run_spec = run_spec.on_cpu()
    with run_spec.computing(), torch.no_grad():
        return _evaluate(run_spec, model, test, clients)


def _evaluate(
    run_spec: RunSpec, model: Mapping[str, Tensor], test: Mapping[str, Any] | None, clients: bool
) -> dict[str, float]:
    experiment = run_spec.experiment
    split, settings = run_spec.split(), experiment.evaluate.model_copy(update={"fairness": clients, "server": True})
    rows = split.test if test is None else test_columns(test, split.test)
    data = Data.of(split.train, rows, split.client_index)
    client_index = split.client_index if clients else split.client_index._replace(held=None, validation=None)
    p = {name: tensor.to(run_spec.device) for name, tensor in model.items()}
    workload, device = run_spec.workload, run_spec.device

    def metrics(task: Any) -> TaskResult:
        if isinstance(task, TestSlice):
            own = task.rows(data.train, data.test, data.client_index)
            (found,) = evaluate_test_rows(workload, [p], own, task, device)
        else:
            batch, index = settings.batch, data.client_index
            (found,) = evaluate_clients(workload, [p], data.train, index, task, batch, device)
        return TaskResult(task.index, [], *found)

    record, test_rows = dict[str, float](), len(next(iter(rows.values())))
    with evaluating(), plugin_errors("workload", settings=experiment.workload):
        for tasks, columns in evaluations(workload, settings, test_rows, client_index):
            record |= columns(reduce_in_order(tree_shape(tasks), map(metrics, tasks)))
    return record


def test_columns(given: Mapping[str, Any], own: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of a user's test rows, with the types of the workload's `own`. Raises ConfigError if they do not fit."""
    if set(given) != set(own):
        raise ConfigError(f"test must have the columns {', '.join(sorted(own))}, got {', '.join(map(str, given))}")
    columns = {}
    for name, wanted in own.items():
        value = given[name].detach().cpu().numpy() if isinstance(given[name], Tensor) else np.asarray(given[name])
        if value.shape[1:] != wanted.shape[1:] or value.ndim != wanted.ndim:
            shape = ", ".join(["n", *map(str, wanted.shape[1:])])
            raise ConfigError(f"test: {name} must have the shape ({shape}), got {value.shape}")
        columns[name] = value.astype(wanted.dtype, copy=False)
    if len({len(column) for column in columns.values()}) != 1 or not all(map(len, columns.values())):
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise ConfigError(f"test must have the same number of rows in all columns, at least one, got {lengths}")
    return columns
