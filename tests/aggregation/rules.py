"""Rules of aggregation applied to rows in memory, without workers: the rule's answer, as numpy computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedfleet.algorithms.aggregation.contract import Aggregator, Before
from fedfleet.algorithms.aggregation.messages import Answer, Messages, Stored, product
from fedfleet.engine.aggregation.passes import sort_columns
from fedfleet.engine.config.registry import Registry
from fedfleet.workloads import counted

REGISTRY = Registry()


def built(spec: Any) -> Aggregator:
    return REGISTRY.build("AGGREGATORS", spec, "aggregate")


@dataclass(frozen=True, eq=False, kw_only=True)
class InMemory(Stored):
    """x: (S + E, P), the messages and the extra vectors behind them."""

    x: np.ndarray

    def gram(self) -> np.ndarray:
        return product(self.x, self.x.T)

    def values(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        x = self.x[: len(self.norms2)]
        return (x if matrix is None else matrix @ x)[:, places]

    def signs(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        x = self.values(places, matrix)
        return np.stack([(x > 0).sum(1), (x == 0).sum(1), (x < 0).sum(1)], axis=1)


def stored(x: np.ndarray, full: np.ndarray, *purpose: Any) -> dict[str, Any]:
    """Arguments of `Messages` for the rows of x, (S, P). full: (S + E, P), with the extra vectors behind them."""
    rows = InMemory(norms2=np.square(x).sum(1), has_gram=True, x=full)
    return {"stored": rows, "length": x.shape[1], "round": 1, "key": counted.key(0, *purpose)}


def messages(x: np.ndarray, f: int, extra: np.ndarray | None = None, state: Any = ()) -> Messages:
    """The rows of x, (S, P), as the messages of a round. extra: an extra vector, (P,)."""
    full = x if extra is None else np.vstack([x, extra])
    return Messages(**stored(x, full, "aggregate", 1), weights=np.ones(len(x)), f=f, state=state)


def everywhere(x: Messages) -> np.ndarray:
    """(S, P): the vectors themselves."""
    return x.at(np.arange(x.length))


def applied(x: np.ndarray, spec: Any) -> np.ndarray:
    """(S', P): what a pre-aggregation makes of the rows."""
    part: Before = REGISTRY.build("PREAGGREGATORS", spec, "before")
    return everywhere(part.apply(messages(x, part.faults(0))))


def decision(x: np.ndarray, spec: Any, extra: np.ndarray | None = None, state: Any = None) -> Answer:
    """The rule's answer, before it is computed."""
    rule = built(spec)
    f = rule.faults if isinstance(rule.faults, int) else 0
    mixed = messages(x, f, extra, rule.init(x.shape[1]) if state is None else state)
    for part in rule.before:
        mixed = replace(part.apply(replace(mixed, f=part.faults(f))), f=f)
    return rule.aggregate(mixed)


def answer(x: np.ndarray, spec: Any, extra: np.ndarray | None = None, state: Any = None) -> np.ndarray:
    """(P,) float64: the rule's answer for the rows of x."""
    found = decision(x, spec, extra, state)
    rows = everywhere(found.messages)
    if found.weights is not None:
        return found.weights @ (rows if extra is None else np.vstack([rows, extra]))
    return built(spec).columns(sort_columns(rows.copy()), found.messages.f) * found.scale
