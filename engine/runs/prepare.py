"""Makes a run of an experiment, after all checks that need no data."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...algorithms.tree import Tree
from ..accelerators import settings
from ..config.schema import Experiment
from ..errors import ConfigError
from ..fleet.asynchronous import check_pending
from ..fleet.visits import check_fleet
from ..method_form.state_spec import StateSpec, byte_count
from ..records.metrics import refuse_test_metric
from ..run_spec import RUN_ID, RunSpec, check_patterns
from ..storage.expanded import check_folder
from ..user_code import plugin_errors
from ..workload.model import building_model
from .built_conflicts import Built, check_conflicts
from .expected_columns import check_column
from .needs import check_needs, check_rows


def new_run_id() -> str:
    """A new id: the time (UTC) and six random digits."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def prepare(
    experiment: Experiment,
    run_id: str,
    directory: Path | None = None,
    resume: bool = False,
    initial_model: Mapping[str, Any] | None = None,
) -> RunSpec:
    """The specification of a run. Raises ConfigError for an invalid configuration, before anything starts.

    directory: the run's folder, None for a run without files. resume: whether the run continues an earlier one.
    initial_model: name -> tensor or array, the model before round 1; None for the workload's own.
    """
    with settings.applied(threads=experiment.engine.threads):
        return _prepare(experiment, run_id, directory, resume, initial_model)


def _prepare(
    experiment: Experiment,
    run_id: str,
    directory: Path | None,
    resume: bool,
    initial_model: Mapping[str, Any] | None,
) -> RunSpec:
    """The same, with the settings of torch that a run has."""
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run_id must be letters, digits, dots, dashes and underscores, got {run_id!r}; change it")
    experiment.check()
    run_spec = RunSpec.of(run_id, experiment, str(directory) if directory else None, resume, initial_model)
    workload, engine = run_spec.workload, experiment.engine
    with plugin_errors("workload", settings=experiment.workload):
        workload.check()
        run_spec = replace(run_spec, data_facts=workload.facts_of_data())
    with plugin_errors("workload", settings=experiment.workload):
        check_needs(run_spec)
    x, built = run_spec.checked_initial_model(), Built(run_spec)
    with plugin_errors("method", settings=experiment.method), building_model(experiment.workload):
        check_privacy(built, x)
        check_conflicts(built)
        check_patterns(built.method, run_spec.layout.names, experiment.method)
        check_rows(run_spec, byte_count(built.state_spec.client))
    run_spec.stage_plan.check(run_spec.last_round)
    run_spec.adaptations(built.method)
    check_fleet(experiment, run_spec.registry, built.state_spec)
    if experiment.is_asynchronous and engine.pending is not None:
        check_pending(experiment.federation, built.state_spec, engine.pending)
    if engine.store and not engine.address:
        check_folder("engine.store", engine.store)
    check_device(run_spec)
    check_metrics(experiment)
    _ = run_spec.layout  # messages about memory that ran out have the model's size, and no model can be built then
    return run_spec


def check_metrics(experiment: Experiment) -> None:
    """Raise ConfigError if no round will record a metric by which the run ends early or keeps its best model, or if it
    is of test rows where there are rows for validation."""
    stop, best = experiment.evaluate.stop, experiment.checkpoint.best
    wanted = {"evaluate.stop.metric": stop and stop.metric, "checkpoint.best.metric": best and best.metric}
    for key, metric in wanted.items():
        if metric is not None:
            if experiment.evaluate.validation:
                refuse_test_metric(key, metric)
            check_column(metric, key, [experiment])


def check_device(run_spec: RunSpec) -> None:
    """Raise ConfigError if the GPUs that this process sees cannot be those of the run.

    CUDA_VISIBLE_DEVICES says which GPUs a process sees. On a running cluster, its nodes know what they have.
    """
    engine, device = run_spec.experiment.engine, run_spec.device
    if device.type != "cuda" or engine.address:
        return
    if not torch.cuda.is_available():
        gpus = max(group.gpus for group in engine.groups())
        raise ConfigError(f"engine.device={engine.device}, gpus={gpus:g} a worker: no CUDA device is here; use cpu")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"engine.device={engine.device}: this process sees {count} GPUs, numbered from 0; use cuda:0")
    on_ray = run_spec.backend.name == "ray"
    asked = sum(group.count * group.gpus for group in engine.groups()) if on_ray else engine.gpus
    if asked > count:
        raise ConfigError(
            f"engine.gpus: the workers reserve {asked:g} GPUs, and this process sees {count} (CUDA_VISIBLE_DEVICES); "
            "lower engine.gpus, which may be a fraction, or engine.workers"
        )


def check_privacy(built: Built, x: Tree) -> None:
    """Raise ConfigError for a private run whose method, model or budget does not fit. x: the initial model."""
    run_spec, privacy = built.run_spec, built.run_spec.privacy
    if privacy is None:
        return
    method = privacy.unwrapped(built.method)
    privacy.check_method(method, run_spec.shared_statistics)
    privacy.check_message(StateSpec(method, x).message)
    privacy.check_spending()
