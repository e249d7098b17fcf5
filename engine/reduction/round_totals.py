"""The results of a phase, added in the order of a tree. The bits do not depend on which worker was first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .tree import PartialSum, TaskResult, TreeReducer, TreeShape, add_leaves, add_results

TIMES = ("state", "data", "reduce")
NAMES = ("loss", "steps", "gradients", "weight", *TIMES, "seconds")
"""The sums that every task of a training returns."""


class RoundTotals(NamedTuple):
    """The sums of a phase.

    `leaves`: float64 sums of the messages' leaves. `facts`: sums by name. `clients`: arrays by name with one entry per
    client. `dropped`: the clients that were left out: they failed, or `federation.without` names them. `seconds`: the
    time in which the driver added up these sums.
    """

    leaves: list[np.ndarray]
    facts: dict[str, float]
    clients: dict[str, np.ndarray]
    dropped: tuple[int, ...]
    seconds: float = 0.0

    @staticmethod
    def of_nobody(shapes: Sequence[tuple[int, ...]]) -> RoundTotals:
        """The sums of a round without clients. shapes: of the messages' leaves."""
        clients = {"id": np.zeros(0, np.int64), **{name: np.zeros(0) for name in ("loss", "norm2", "steps")}}
        return RoundTotals([np.zeros(shape) for shape in shapes], dict.fromkeys(NAMES, 0.0), clients, ())

    def record(self, count: int, train: float, workers: int) -> dict[str, float]:
        """The columns of a round. `count`: the clients in the mean; `train`, `workers`: see `time_columns`."""
        return {
            **({"train/loss": self.facts["loss"] / count} if count else {}),
            "client/count": count,
            "client/dropped": len(self.dropped),
            "client/steps": self.facts["steps"],
            "client/gradients": self.facts["gradients"],
            **time_columns(self.facts, train, workers),
            "time/sum": self.seconds,
        }

    def digests(self, sampled: np.ndarray) -> np.ndarray | None:
        """(S, DIGEST) bytes: the digests of the rows of `sampled`, in that order; zeros for dropped clients."""
        found = self.clients.get("digest")
        if found is None:
            return None
        ordered = np.zeros((len(sampled), found.shape[1]), dtype=np.uint8)
        ordered[np.searchsorted(sampled, self.clients["id"])] = found
        return ordered


def reduce_in_order(shape: TreeShape, results: Iterable[TaskResult | PartialSum]) -> RoundTotals:
    """Add the results as they arrive, in the order of the tree over the tasks."""
    numbers, leaves = TreeReducer(shape, add_results), TreeReducer(shape, add_leaves)
    seconds = 0.0
    for result in results:
        began = time.perf_counter()
        if isinstance(result, PartialSum):
            leaves.put(*result)
        else:
            if result.leaves is not None:
                leaves.put(shape.node_of(result), result.leaves)
            numbers.put(shape.node_of(result), result._replace(leaves=[]))
        seconds += time.perf_counter() - began
    began, total = time.perf_counter(), numbers.total()
    sums = [np.array(leaf) for leaf in leaves.total()]
    seconds += time.perf_counter() - began
    return RoundTotals(sums, total.facts, total.clients, total.dropped, seconds)


def time_columns(facts: dict[str, float], train: float, workers: int) -> dict[str, float]:
    """The columns time/… that say how the workers spent their time.

    `train`: the seconds that the driver waited for them; `workers`: their number.
    """
    parts = {name: facts[name] for name in TIMES}
    columns = {"train": train, "workers": facts["seconds"], **parts}
    columns |= {"compute": facts["seconds"] - sum(parts.values()), "wait": max(workers * train - facts["seconds"], 0.0)}
    return {f"time/{name}": value for name, value in columns.items()}
