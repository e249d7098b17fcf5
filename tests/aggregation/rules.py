"""Rules of aggregation applied to rows in memory, without workers: the engine's decision, and the answer that numpy
computes from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfleet.algorithms.aggregation.contract import Aggregator, Before, Decision, Rows, product
from fedfleet.engine.aggregation.defence import transformed
from fedfleet.engine.aggregation.sorting import sort_columns
from fedfleet.engine.config.registry import Registry
from fedfleet.workloads import counted

REGISTRY = Registry()


def built(spec: Any) -> Aggregator:
    return REGISTRY.build("AGGREGATORS", spec, "aggregate")


def rows_of(x: np.ndarray, f: int, further: np.ndarray | None = None) -> Rows:
    """What a rule knows of the rows of x, (S, P). further: a further row, (P,)."""
    full = x if further is None else np.vstack([x, further])
    key = counted.key(0, "aggregate", 1)
    return Rows(len(x), x.shape[1], f, np.ones(len(x)), np.square(x).sum(1), 1, key, product(full, full.T))


def matrix(x: np.ndarray, spec: Any) -> np.ndarray:
    """(S', S): what a pre-aggregation makes of the rows."""
    part: Before = REGISTRY.build("PREAGGREGATORS", spec, "before")
    return part.matrix(rows_of(x, part.faults(0)))


def decision(x: np.ndarray, spec: Any, further: np.ndarray | None = None, state: Any = None) -> tuple[Decision, Any]:
    """(the rule's decision, (S', P) the rows that it decides on, with the further row)."""
    rule = built(spec)
    f = rule.faults if isinstance(rule.faults, int) else 0
    rows = rows_of(x, f, further)
    y = x
    for part in rule.before:
        step = part.matrix(rows._replace(f=part.faults(f)))
        rows, y = transformed(rows, step, part.scales), step @ y
    if "values" in rule.reads:
        rows = rows._replace(values=y[:, rule.places(rows)])
    if "signs" in rule.reads:
        seen = y[:, rule.window(rows)]
        rows = rows._replace(signs=np.stack([(seen > 0).mean(1), (seen == 0).mean(1), (seen < 0).mean(1)], axis=1))
    state = rule.init(x.shape[1]) if state is None else state
    return rule.decide(rows, state), y if further is None else np.vstack([y, further])


def answer(x: np.ndarray, spec: Any, further: np.ndarray | None = None, state: Any = None) -> np.ndarray:
    """(P,) float64: the rule's answer for the rows of x."""
    rule = built(spec)
    decided, y = decision(x, spec, further, state)
    if decided.weights is not None:
        return decided.weights @ y
    chosen = y if decided.chosen is None else y[decided.chosen]
    f = rule.faults if isinstance(rule.faults, int) else 0
    return rule.columns(sort_columns(chosen.copy()), f) * decided.scale
