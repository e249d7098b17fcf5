"""A phase's results, added in the order of tasks, whichever came first: the same bits whoever ran them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .host import Sums


class Totals(NamedTuple):
    """A phase's results, added in the order of tasks."""

    leaves: list[np.ndarray]
    facts: dict[str, float]
    clients: dict[str, np.ndarray]
    dropped: tuple[int, ...]

    def record(self, count: int, train: float, hosts: int) -> dict[str, float]:
        """A round's columns; count: clients that are in the mean; see `spent`."""
        return {
            "train/loss": self.facts["loss"] / count,
            "client/count": count,
            "client/dropped": len(self.dropped),
            "client/steps": self.facts["steps"],
            "client/gradients": self.facts["gradients"],
            **spent(self.facts, train, hosts),
        }

    def digests(self, sampled: np.ndarray) -> np.ndarray | None:
        """(S, 32), of the rows of `sampled` in that order; zeros for those that were dropped."""
        found = self.clients.get("digest")
        if found is None:
            return None
        ordered = np.zeros((len(sampled), found.shape[1]), dtype=np.uint8)
        ordered[np.searchsorted(sampled, self.clients["id"])] = found
        return ordered


def in_order(results: Iterable[Sums]) -> Totals:
    """Add up as they come, each as soon as all before it are in."""
    waiting: dict[int, Sums] = {}
    leaves: list[np.ndarray] = []
    facts: dict[str, float] = {}
    clients: dict[str, list[np.ndarray]] = {}
    dropped: list[int] = []
    following = 0
    for result in results:
        waiting[result.index] = result
        while following in waiting:
            part = waiting.pop(following)
            following += 1
            leaves = add(leaves, part.leaves) if leaves else [np.array(leaf) for leaf in part.leaves]
            for name, value in part.facts.items():
                facts[name] = facts.get(name, 0.0) + value
            for name, values in part.clients.items():
                clients.setdefault(name, []).append(values)
            dropped += part.dropped
    together = {name: np.concatenate(values) for name, values in clients.items()}
    return Totals(leaves, facts, together, tuple(dropped))


def add(total: list[np.ndarray], part: list[np.ndarray]) -> list[np.ndarray]:
    """total + part, in total's memory; a part may be empty."""
    for a, b in zip(total, part, strict=False):
        np.add(a, b, out=a)
    return total


def spent(facts: dict[str, float], train: float, hosts: int) -> dict[str, float]:
    """Columns of the record: where the hosts' time went; `train`: seconds that the driver waited for them."""
    parts = {name: facts[name] for name in ("state", "data", "reduce")}
    columns = {"train": train, "hosts": facts["seconds"], **parts}
    columns |= {"compute": facts["seconds"] - sum(parts.values()), "wait": max(hosts * train - facts["seconds"], 0.0)}
    return {f"time/{name}": value for name, value in columns.items()}
