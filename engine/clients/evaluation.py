"""Evaluation of a model: the metrics on the test set, and their distribution over the clients.

The configuration and the data alone determine the tasks, and the rows of a task are in the order of the data set.
Therefore the metrics do not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ...workloads.workload import Params, Workload
from ..config.schema import Evaluate
from ..errors import EvaluationFailed
from ..reduction.tree import RoundTotals
from ..user_code import plugin_errors
from .local_training import shares_of

Columns = Mapping[str, Tensor]
Metrics = tuple[dict[str, float], dict[str, np.ndarray]]
"""(sums over the rows of a task, arrays with one entry per row or per client)"""

WORST = 10
"""One in this many clients counts as worst off, but at least one client does."""


class TestSlice(NamedTuple):
    """A task: evaluate the test rows [begin, end)."""

    index: int
    begin: int
    end: int
    validation: bool = False  # of the rows for validation in the order of their clients, and not of the test set
    branch: None = None  # as a TrainingTask has

    @property
    def description(self) -> str:
        return f"evaluation of {'validation' if self.validation else 'test'} rows {self.begin} to {self.end}"

    def rows(self, train: Columns, test: Columns, client_index: ClientIndex) -> dict[str, Tensor]:
        """The columns of its rows. train, test: all columns; client_index: of the run."""
        if not self.validation:
            return {name: column[self.begin : self.end] for name, column in test.items()}
        assert client_index.validation is not None  # otherwise there is no such task
        rows = torch.from_numpy(client_index.validation.rows[self.begin : self.end])
        return {name: column.index_select(0, rows) for name, column in train.items()}


class ClientGroup(NamedTuple):
    """A task: evaluate on the rows of the clients [begin, end)."""

    index: int
    begin: int
    end: int
    kind: Literal["training", "held", "validation"] = "training"  # which of their rows
    branch: None = None  # as a TrainingTask has

    @property
    def description(self) -> str:
        where = {"training": "", "held": ", on rows that they hold out", "validation": ", on rows for validation"}
        return f"evaluation of clients {self.begin} to {self.end}{where[self.kind]}"


class LossProbe(NamedTuple):
    """A task: the mean training loss of the model on rows of each of some clients. rows: how many rows of each, drawn
    for this round; None for all."""

    index: int
    clients: np.ndarray  # (c,)
    rows: int | None
    round: int
    branch: None = None  # as a TrainingTask has

    @property
    def description(self) -> str:
        return f"the losses of clients {', '.join(map(str, self.clients))}"


EvaluationTask = TestSlice | ClientGroup | LossProbe


def loss_probes(
    client_index: ClientIndex, clients: np.ndarray, rows: int | None, round: int, size: int
) -> list[LossProbe]:
    """The tasks that find the losses of these clients (c,), in their order: about `size` rows each."""
    counts = client_index.sizes_of(clients)
    counts = counts if rows is None else np.minimum(counts, rows)
    group = np.cumsum(counts) // size
    parts = np.split(clients, np.flatnonzero(np.diff(group)) + 1)
    return [LossProbe(i, part, rows, round) for i, part in enumerate(parts)]


def probe_losses(
    workload: Workload, p: Params, train: Columns, client_index: ClientIndex, task: LossProbe, seed: int,
    device: torch.device,
) -> Metrics:  # fmt: skip
    """F_i(x): the mean of the losses that each client trains on, (c,), over its rows. seed: of the run."""
    found = []
    for client in task.clients.tolist():
        rows = client_index.rows[client_index.offsets[client] : client_index.offsets[client + 1]]
        if task.rows is not None and task.rows < len(rows):
            draw = counted.numpy_generator(seed, "probe", task.round, client)
            rows = np.sort(draw.choice(rows, task.rows, replace=False))
        batch = {name: column.index_select(0, torch.from_numpy(rows)).to(device) for name, column in train.items()}
        batch["key"] = counted.key(seed, "probe", task.round, client).to(device)
        losses = workload.losses(p, batch).double()
        shares = shares_of(workload, batch, losses.dtype)
        found.append(float(losses.mean() if shares is None else (losses * shares).sum()))
    return {}, {"loss": np.array(found)}


def slices(rows: int, size: int, validation: bool = False) -> list[TestSlice]:
    """The tasks that evaluate a test set with this number of rows, `size` rows each, or all rows for validation."""
    return [TestSlice(i, begin, min(begin + size, rows), validation) for i, begin in enumerate(range(0, rows, size))]


def client_groups(
    client_index: ClientIndex, size: int, kind: Literal["training", "held", "validation"] = "training"
) -> list[ClientGroup]:
    """The tasks that evaluate on the rows of all clients.

    A task has consecutive clients with at most `size` rows in total, or one client with more. kind: which rows of the
    clients `client_index` has.
    """
    cuts = [0]
    while cuts[-1] < len(client_index.sizes):
        most = client_index.offsets[cuts[-1]] + size
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(client_index.offsets, most, "right")) - 1))
    return [ClientGroup(i, *cut, kind) for i, cut in enumerate(pairwise(cuts))]


def reports(workload: Workload, models: Sequence[Params], batch: Columns) -> list[dict[str, Tensor]]:
    """The workload's report of each model on a batch. Raises ValueError for a column that is not one number per row,
    whose sum over the test set would be divided by another number."""
    rows, found = len(next(iter(batch.values()))), [workload.report(p, batch) for p in models]
    for name, column in (each for report in found for each in report.items()):
        if tuple(column.shape) != (rows,):
            raise ValueError(
                f"the workload's report must have one number per example, ({rows},) for this batch, got {name} "
                f"with {tuple(column.shape)}; leave out the mean over the batch"
            )
    return found


def evaluate_test_rows(
    workload: Workload, models: Sequence[Params], rows: Columns, task: TestSlice, device: torch.device
) -> list[Metrics]:
    """For each model, the sums of the report's columns over some test rows, and the columns that the workload needs
    unsummed. rows: the columns of the task's rows."""
    batch = {name: column.to(device) for name, column in rows.items()}
    found, weights = [], workload.row_weights(batch)
    total = task.end - task.begin if weights is None else weights.sum(dtype=torch.float64)
    for report in reports(workload, models, batch):
        whole = {name: report[name].cpu().numpy() for name in workload.whole}
        summed = {name: column for name, column in report.items() if name not in whole}
        if weights is not None:
            summed = {name: column.double() * weights for name, column in summed.items()}
        sums = {name: float(column.sum(dtype=torch.float64)) for name, column in summed.items()}
        found.append(({**sums, "weights": float(total)}, whole))
    return found


def evaluate_clients(
    workload: Workload, models: Sequence[Params], train: Columns, client_index: ClientIndex, task: ClientGroup,
    size: int, device: torch.device,
) -> list[Metrics]:  # fmt: skip
    """For each model, the means of the report's columns over the rows of each client, (c,). Clients without rows of the
    task's kind are omitted.

    size: the number of rows in a batch.
    """
    # There is one, or there would be no such task. Rows that drift are all looked at, so that rounds can be compared.
    client_index = client_index.whole if task.kind == "training" else getattr(client_index, task.kind)
    starts = client_index.offsets[task.begin : task.end + 1]
    rows, sizes = torch.from_numpy(client_index.rows[starts[0] : starts[-1]]), np.diff(starts)
    columns: list[dict[str, list[np.ndarray]]] = [{} for _ in models]
    weights: list[np.ndarray] = []
    for batch_rows in rows.split(size) if len(rows) else ():
        batch = {name: column.index_select(0, batch_rows).to(device) for name, column in train.items()}
        if (counted_rows := workload.row_weights(batch)) is not None:
            weights.append(counted_rows.double().cpu().numpy())
        for own, report in zip(columns, reports(workload, models, batch), strict=True):
            for name, column in report.items():
                if name not in workload.whole:
                    own.setdefault(name, []).append(column.double().cpu().numpy())
    first_rows = (starts[:-1] - starts[0])[sizes > 0]

    def sums(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, first_rows)

    def means(values: list[np.ndarray]) -> np.ndarray:
        if not weights:
            return sums(np.concatenate(values)) / sizes[sizes > 0]
        of_rows = np.concatenate(weights)
        return sums(np.concatenate(values) * of_rows) / np.maximum(sums(of_rows), 1)

    return [({}, {name: means(values) for name, values in own.items()}) for own in columns]


def evaluations(
    workload: Workload, evaluate: Evaluate, test_rows: int, client_index: ClientIndex
) -> Iterator[tuple[Sequence[Any], Callable[[RoundTotals], dict[str, float]]]]:
    """(the tasks of a phase, what makes columns of a round's record from their results) for each phase of an
    evaluation.

    evaluate: the section of the configuration. test_rows: the size of the test set.
    """
    if evaluate.server:
        yield slices(test_rows, evaluate.batch), partial(report_columns, workload)
    if evaluate.fairness:
        groups = client_groups(client_index.whole, evaluate.batch)
        yield groups, lambda totals: client_columns(workload, totals.clients)
    held, validation = client_index.held, client_index.validation
    if held is not None:
        groups = client_groups(held, evaluate.batch, "held")
        yield groups, lambda totals: client_columns(workload, totals.clients, "test_")
    if validation is not None:
        own = slices(len(validation.rows), evaluate.batch, validation=True)
        yield own, partial(report_columns, workload, prefix="validation_")
    if validation is not None and held is not None:  # settings are then chosen as they are tested
        groups = client_groups(validation, evaluate.batch, "validation")
        yield groups, lambda totals: client_columns(workload, totals.clients, "validation_")


def report_columns(workload: Workload, totals: RoundTotals, prefix: str = "") -> dict[str, float]:
    """The columns of the test set, or of the rows for validation. totals: sums over all of its rows, and the columns
    that were not summed."""
    facts = totals.facts
    means = {name: value / max(facts["weights"], 1) for name, value in facts.items() if name != "weights"}
    with plugin_errors("the workload's summary raised", EvaluationFailed):
        more = workload.summary(means, totals.clients)
    return {f"eval/{prefix}{name}": value for name, value in {**means, **more}.items()}


def client_columns(workload: Workload, clients: Mapping[str, np.ndarray], prefix: str = "") -> dict[str, float]:
    """For each metric (N,): its mean over all clients, and its mean over the tenth of the clients with the worst."""
    record = {}
    for name, values in clients.items():
        ordered = np.sort(values)
        if name in workload.lower:
            ordered = ordered[::-1]
        record[f"eval/clients/{prefix}{name}"] = float(values.mean())
        record[f"eval/clients/{prefix}{name}_worst"] = float(ordered[: -(-len(ordered) // WORST)].mean())
    return record
