"""What a model is worth: the report of the test set, and how it is spread over the clients.

Tasks are cut by the configuration and the data alone, and their rows come in the order of the set: the numbers do not
depend on workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...workloads.base import ClientIndex, Params, Workload
from ..config.schema import Evaluate
from ..errors import EvaluationFailed
from ..user_code import plugin_errors

Columns = Mapping[str, Tensor]
Found = tuple[dict[str, float], dict[str, np.ndarray]]
"""A task's sums over its rows, and what is not summed, a number a row or a client."""

WORST = 10
"""One in so many clients are the worst off, at least one."""


class TestSlice(NamedTuple):
    """Test rows [begin, end) to evaluate."""

    index: int
    begin: int
    end: int
    branch: None = None  # as a TrainingTask has

    @property
    def description(self) -> str:
        return f"evaluation of test rows {self.begin} to {self.end}"


class ClientGroup(NamedTuple):
    """Clients [begin, end), on whose rows to evaluate: training rows, or those that they hold out."""

    index: int
    begin: int
    end: int
    held: bool = False
    branch: None = None  # as a TrainingTask has

    @property
    def description(self) -> str:
        return f"evaluation of clients {self.begin} to {self.end}{', on rows that they hold out' * self.held}"


def slices(rows: int, size: int) -> list[TestSlice]:
    return [TestSlice(i, at, min(at + size, rows)) for i, at in enumerate(range(0, rows, size))]


def groups(client_index: ClientIndex, size: int, held: bool = False) -> list[ClientGroup]:
    """Consecutive clients with `size` rows or fewer in all, or one that has more; held: parts are the rows held out."""
    cuts = [0]
    while cuts[-1] < len(client_index.sizes):
        most = client_index.offsets[cuts[-1]] + size
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(client_index.offsets, most, "right")) - 1))
    return [ClientGroup(i, *cut, held) for i, cut in enumerate(pairwise(cuts))]


def of_rows(workload: Workload, p: Params, test: Columns, part: TestSlice, device: torch.device) -> Found:
    """The report's sums over test rows, and the columns of it that are to be seen whole."""
    batch = {name: column[part.begin : part.end].to(device) for name, column in test.items()}
    report = workload.report(p, batch)
    whole = {name: report[name].cpu().numpy() for name in workload.whole}
    sums = {name: float(c.sum(dtype=torch.float64)) for name, c in report.items() if name not in whole}
    return {**sums, "examples": float(part.end - part.begin)}, whole


def of_clients(
    workload: Workload,
    p: Params,
    train: Columns,
    client_index: ClientIndex,
    part: ClientGroup,
    size: int,
    device: torch.device,
) -> Found:
    """Each client's means of the report over its own rows, (c,); a client that holds out no row is left out."""
    if part.held:
        assert client_index.held is not None  # else there is no such task
        client_index = client_index.held
    starts = client_index.offsets[part.begin : part.end + 1]
    rows, sizes = torch.from_numpy(client_index.rows[starts[0] : starts[-1]]), np.diff(starts)
    found: dict[str, list[np.ndarray]] = {}
    for some in rows.split(size) if len(rows) else ():
        batch = {name: column.index_select(0, some).to(device) for name, column in train.items()}
        for name, column in workload.report(p, batch).items():
            if name not in workload.whole:
                found.setdefault(name, []).append(column.double().cpu().numpy())
    at = (starts[:-1] - starts[0])[sizes > 0]
    return {}, {name: np.add.reduceat(np.concatenate(values), at) / sizes[sizes > 0] for name, values in found.items()}


def measured(
    workload: Workload, asked: Evaluate, data: tuple[int, ClientIndex], run: Callable[[list[Any]], Any]
) -> dict[str, float]:
    """The record's columns. data: test rows and who has which training rows; run: tasks -> their `RoundTotals`."""
    rows, client_index = data
    found = run(slices(rows, asked.batch))
    record = summed_up(workload, found.facts, found.clients)
    if asked.fairness:
        record |= spread(workload, run(groups(client_index, asked.batch)).clients)
    if client_index.held is not None:
        record |= spread(workload, run(groups(client_index.held, asked.batch, held=True)).clients, "test_")
    return record


def summed_up(workload: Workload, facts: Mapping[str, float], whole: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The record's columns of a test set, from sums over all of its rows and whole columns."""
    means = {name: value / facts["examples"] for name, value in facts.items() if name != "examples"}
    with plugin_errors("the workload's summary raised", EvaluationFailed):
        more = workload.summary(means, whole)
    return {f"eval/{name}": value for name, value in {**means, **more}.items()}


def spread(workload: Workload, clients: Mapping[str, np.ndarray], prefix: str = "") -> dict[str, float]:
    """Of each metric (N,), the mean over all clients, and over the tenth that is worst off in it."""
    record = {}
    for name, values in clients.items():
        ordered = np.sort(values)
        if name in workload.lower:
            ordered = ordered[::-1]
        record[f"eval/clients/{prefix}{name}"] = float(values.mean())
        record[f"eval/clients/{prefix}{name}_worst"] = float(ordered[: -(-len(ordered) // WORST)].mean())
    return record
