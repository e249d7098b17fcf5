"""A phase's results, added up in one order, whichever came first: the same bits whoever ran them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cohorts.tasks import TrainingTask
from .tree import PartialSum, TaskResult, TreeReducer, TreeShape, add_leaves, add_results


class RoundTotals(NamedTuple):
    """A phase's results, added in the order of tasks."""

    leaves: list[np.ndarray]
    facts: dict[str, float]
    clients: dict[str, np.ndarray]
    dropped: tuple[int, ...]

    def record(self, count: int, train: float, workers: int) -> dict[str, float]:
        """A round's columns; count: clients that are in the mean; see `spent`."""
        return {
            "train/loss": self.facts["loss"] / count,
            "client/count": count,
            "client/dropped": len(self.dropped),
            "client/steps": self.facts["steps"],
            "client/gradients": self.facts["gradients"],
            **spent(self.facts, train, workers),
        }

    def digests(self, sampled: np.ndarray) -> np.ndarray | None:
        """(S, DIGEST), of the rows of `sampled` in that order; zeros for those that were dropped."""
        found = self.clients.get("digest")
        if found is None:
            return None
        ordered = np.zeros((len(sampled), found.shape[1]), dtype=np.uint8)
        ordered[np.searchsorted(sampled, self.clients["id"])] = found
        return ordered


def reduce_in_order(tasks: Sequence[Any], results: Iterable[TaskResult | PartialSum]) -> RoundTotals:
    """Add up as they come, in the order of the tasks' tree."""
    shape = shape_of(tasks)
    known, leaves = TreeReducer(shape, add_results), TreeReducer(shape, add_leaves)
    for result in results:
        if isinstance(result, PartialSum):
            leaves.put(*result)
            continue
        if result.leaves is not None:
            leaves.put(shape.task(result.index), result.leaves)
        known.put(shape.task(result.index), result._replace(leaves=[]))
    own, whole = [np.array(leaf) for leaf in leaves.whole()], known.whole()
    return RoundTotals(own, whole.facts, whole.clients, whole.dropped)


def shape_of(tasks: Sequence[Any]) -> TreeShape:
    """Of a phase's tree."""
    return TreeShape([len(task.task.cuts) if isinstance(task, TrainingTask) else 1 for task in tasks])


def spent(facts: dict[str, float], train: float, workers: int) -> dict[str, float]:
    """Columns of the record: where the workers' time went; `train`: seconds that the driver waited for them."""
    parts = {name: facts[name] for name in ("state", "data", "reduce")}
    columns = {"train": train, "workers": facts["seconds"], **parts}
    columns |= {"compute": facts["seconds"] - sum(parts.values()), "wait": max(workers * train - facts["seconds"], 0.0)}
    return {f"time/{name}": value for name, value in columns.items()}
