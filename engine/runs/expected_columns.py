"""The columns that the record of a run will have, found by one small round, so that a misspelt name is refused at
once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from ...workloads.classification import Classification
from ...workloads.client_index import ClientIndex
from ...workloads.objectives import Classes
from ...workloads.workload import Split
from ..accelerators.settings import applied
from ..config.schema import Evaluate, Experiment
from ..errors import ConfigError, FedFleetError
from ..records.metrics import nearest_column
from ..rounds.pool import finished
from ..run_spec import ExecutionPlan, RunSpec
from .host import driver_here

ROWS = 256
"""Test rows that are evaluated, evenly spaced: metrics such as an AUC need several classes."""
OF_CLASSIFICATION = ("eval/loss", "eval/accuracy")
"""Columns of every run whose workload has the report of `Classification`."""


def columns(experiment: Experiment) -> list[str] | None:
    """The columns that `rounds.parquet` will have; None if they are unknown, because the small round itself fails.

    In the small round two clients take one local step each, on one row, and the model is evaluated on a few test rows,
    where clients adapt it by one step.
    With a rule of aggregation or an attack, which may need more messages, all clients of a cohort do so.
    """
    plan = experiment.federation
    plain = experiment.aggregate == "mean" and experiment.attack is None  # other rules need their cohort
    cohort = min(2, plan.cohort) if plain else plan.cohort
    small = plan.model_copy(update={"cohort": cohort, "local": plan.local.taking(steps=1)})
    engine = experiment.engine.model_copy(
        update={"backend": "local", "device": "cpu", "store": None, "keep_state": False, "address": None}
    )
    made = experiment.model_copy(update={"federation": small, "engine": engine, "evaluate": quick(experiment.evaluate)})
    with applied(threads=engine.threads):
        return _columns(made)


def quick(evaluate: Evaluate) -> Evaluate:
    """The same evaluations, in every round, where clients adapt their models by one step."""
    clients = evaluate.clients
    if clients is not None and clients.adaptations:
        steps = tuple(each.model_copy(update={"steps": 1, "epochs": None}) for each in clients.adaptations)
        clients = clients.model_copy(update={"adapt": steps if isinstance(clients.adapt, tuple) else steps[0]})
    return evaluate.model_copy(update={"every": 1, "clients": clients})


def _columns(made: Experiment) -> list[str] | None:
    """The columns of a run, found by its first round."""
    try:
        whole = RunSpec.of(f"columns-{secrets.token_hex(6)}", made)  # its states lie in a folder of this name
        run_spec, split = whole.with_plan(ExecutionPlan(1, "torch")), little(whole.split())
        with driver_here(run_spec, split) as driver:
            record = finished(driver.run_round({}), driver.retry.run)
        return list(dict.fromkeys([*record, "train/loss"]))  # the small round may have no client
    except FedFleetError:
        return None


def little(split: Split) -> Split:
    """The split with the first training row of each client, some of the test rows, and some of those that clients hold
    out or have for validation."""
    some = max(1, ROWS // len(split.client_index.sizes))
    client_index = little_index(split.client_index, some)
    count = len(next(iter(split.test.values())))
    chosen = np.unique(np.linspace(0, count - 1, min(ROWS, count)).astype(np.int64))
    return split._replace(test={name: column[chosen] for name, column in split.test.items()}, client_index=client_index)


def little_index(whole: ClientIndex, some: int) -> ClientIndex:
    """The index with the first training row of each client, and some of its other rows."""
    apart = {name: first_rows(index, some) for name in ("held", "validation") if (index := getattr(whole, name))}
    unseen = None if whole.unseen is None else little_index(whole.unseen, some)
    return first_rows(whole, 1)._replace(**apart, unseen=unseen)


def first_rows(index: ClientIndex, most: int) -> ClientIndex:
    """The index with the first rows of each client, at most so many."""
    sizes = np.minimum(index.sizes, most)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    places = np.arange(offsets[-1]) + np.repeat(index.offsets[:-1] - offsets[:-1], sizes)
    return ClientIndex(offsets, index.rows[places], common=index.common)


def is_plain_classification(experiment: Experiment) -> bool:
    """Whether the workload has the report of `Classification`. No data are loaded to find out."""
    workload = RunSpec.of("columns", experiment).workload
    own = getattr(type(workload), "report", None) is not Classification.report or "report" in vars(workload)
    return isinstance(workload, Classification) and isinstance(workload.objective, Classes) and not own


def check_column(name: str, key: str, experiments: list[Experiment], others: Sequence[str] = ()) -> None:
    """Raise ConfigError unless one of these experiments will record the column `name`, which `key` asks for.

    others: names that `key` allows although they are no columns of a record.
    """
    if name in others:
        return
    known: dict[str, None] = dict.fromkeys(others)
    for experiment in experiments:
        if name in OF_CLASSIFICATION and is_plain_classification(experiment):
            return
        found = columns(experiment)
        if found is None or name in found:
            return
        known.update(dict.fromkeys(found))
    if "validation_" in name and not any("validation_" in column for column in known):
        raise ConfigError(f"{key}: there are no validation rows, got {name}; set evaluate.validation")
    candidates = [column for column in known if not column.startswith("time/") or name.startswith("time/")]
    raise ConfigError(f"{key}: no run will record {name}; {nearest_column(name, candidates)}")
