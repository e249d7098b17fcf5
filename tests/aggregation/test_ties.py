"""Of equal candidates the lower position of a row wins: the engine, in float64 and from inner products, against exact
arithmetic on small whole numbers, with many copies and many ties."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fedfleet.algorithms.aggregation.messages import distances2, merged, product
from tests.aggregation.rules import decision
from tests.reference import exact_ties

BEFORE: dict[str, list[Any]] = {"alone": [], "after nnm": ["nnm"]}


def drawn(seed: int) -> tuple[np.ndarray, int]:
    """(rows of small whole numbers, every second time with copies; f)."""
    random = np.random.default_rng(seed)
    count = int(random.integers(7, 12))
    x = random.integers(-3, 4, size=(count, int(random.integers(1, 4)))).astype(float)
    if seed % 2:
        x[random.integers(0, count, count // 2)] = x[random.integers(0, count, count // 2)]
    return x, int(random.integers(1, (count - 3) // 4 + 1))


def exactly(x: np.ndarray, f: int, before: list[Any]) -> Any:
    rows = [[Fraction(int(value)) for value in row] for row in x]
    return exact_ties.nnm(rows, f) if before else rows


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("name", ["krum", "multi_krum", "mda", "bulyan"])
def test_ties_are_decided_by_position(name: str, before: list[Any]):
    for seed in range(60):
        x, f = drawn(seed)
        rows = exactly(x, f, before)
        decided = decision(x, {"name": name, "f": f, "before": [{"name": part, "f": f} for part in before]})
        if name == "bulyan":
            assert decided.messages.step is not None
            assert decided.messages.step.argmax(axis=1).tolist() == exact_ties.bulyan(rows, f), seed
            continue
        keep = {"krum": 1, "multi_krum": len(x) - f}.get(name)
        expected = exact_ties.krum_order(rows, f)[:keep] if keep else exact_ties.mda(rows, f)
        assert decided.weights is not None
        assert set(np.flatnonzero(decided.weights).tolist()) == set(expected), seed


def test_copies_are_equally_far_from_every_other_row():
    """Also where rounding has made their inner products differ, as in a matrix product that treats places differently:
    here by one unit in the last place."""
    x = np.random.default_rng(0).normal(size=(8, 5))
    x[[3, 6]] = x[1]
    gram = product(x, x.T)
    for row in (3, 6):
        gram[row] = np.nextafter(gram[row], np.inf)
        gram[:, row] = gram[row]
    found = distances2(gram)
    assert np.array_equal(found, found.T)
    assert np.array_equal(found[1], found[3])
    assert np.array_equal(found[1], found[6])


def test_values_are_merged_with_the_least_and_not_in_chains():
    """0, 1, 2, 3 with errors of 0.5 each: 1 may be 0, but 2 may not, although it may be 1."""
    values = np.array([3.0, 1.0, 0.0, 2.0])
    assert merged(values, np.full(4, 0.5)).tolist() == [2, 0, 0, 2]
    assert merged(values, np.zeros(4)).tolist() == values.tolist()
