"""Rules of aggregation on the golden values of published tests, as the specification of the rules lists them."""

from typing import Any

import numpy as np
import pytest

from tests.aggregation.rules import answer, applied

A = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
B = np.array([[1.0, 2, 3], [-1, 4, -1], [2, 2, 3], [3, 1, 3]])
C = np.array([0.0, 1, 3, 7, 12, 20, 1000])[:, None]
EXACT_MEDIAN = {"name": "geometric_median", "tol": 1e-13}


def rule(name: str, f: int | None = None, **arguments: Any) -> dict[str, Any]:
    return {"name": name, **({} if f is None else {"f": f}), **arguments}


VALUES = [
    *((A, rule(name), (4, 5, 6)) for name in ("mean", "median", "geometric_median")),
    *((A, rule(name, 1), (4, 5, 6)) for name in ("trimmed_mean", "caf")),
    *((A, rule(name, 1), (2.5, 3.5, 4.5)) for name in ("meamed", "multi_krum", "mda")),
    (A, rule("krum", 1), (1, 2, 3)),
    (B, rule("mean"), (1.25, 2.25, 2)),
    (B, rule("median"), (1.5, 2, 3)),
    (B, rule("trimmed_mean", 1), (1.5, 2, 3)),
    *((B, rule(name, 1), (2, 5 / 3, 3)) for name in ("meamed", "multi_krum", "mda")),
    (B, rule("krum", 1), (2, 2, 3)),
    (B, rule("krum", 1, neighbours="n-f-2"), (1, 2, 3)),
    (B, EXACT_MEDIAN, (1.87752559, 1.96494193, 2.90948873)),
    (B, rule("clipped_clustering"), (1.95961691, 1.65320564, 2.95961691)),
    (C, rule("median"), (7,)),
    (C, EXACT_MEDIAN, (7,)),
    (C, rule("trimmed_mean", 1), (8.6,)),
    (C, rule("trimmed_mean", 2), (22 / 3,)),
    (C, rule("meamed", 1), (43 / 6,)),
    (C, rule("meamed", 2), (4.6,)),
    (C, rule("krum", 1), (7,)),
    (C, rule("krum", 1, neighbours="n-f-2"), (3,)),
    (C, rule("multi_krum", 1, keep=6), (43 / 6,)),
    (C, rule("multi_krum", 1, keep=4, neighbours="n-f-2"), (2.75,)),
    (C, rule("mda", 1), (43 / 6,)),
    (C, rule("mda", 2), (4.6,)),
    (C, rule("bulyan", 1), (4 / 3,)),
    (C, rule("bulyan", 1, neighbours="n-f-1"), (4 / 3,)),
    (C, rule("median", before=[{"name": "nnm", "f": 2}]), (4.6,)),
    (C, rule("mean", before=[{"name": "clip", "c": 10.0}]), (41 / 7,)),
    (np.array([[0.0, 0], [1, 0], [0, 1]]), EXACT_MEDIAN, ((3 - 3**0.5) / 6,) * 2),
    (np.array([[0, 0], [3, 0], [-1, 0.1], [-1, -0.1], [-1, 0]]), EXACT_MEDIAN, (-0.94226497, 0)),
    (B, rule("dnc", 1), (2, 5 / 3, 3)),
    (np.array([[1.0, -1, 0], [2, -3, 1], [-1, 0, -1]]), rule("sign_vote", scale=1.0), (1, -1, 0)),
    (
        np.outer([1, 1.1, 1.2, 1.3, -1, 0.01, 40], [1.0] * 7 + [-1] * 3),
        rule("signguard", share=1.0),
        (*[1.075] * 7, *[-1.075] * 3),
    ),
    (np.array([[0.2], [0.7], [1.0]]), rule("krum", 1), (0.7,)),
    (np.array([[0.2], [0.5], [1.0]]), rule("multi_krum", 1, keep=2), (0.35,)),
    (np.array([0.5, 1, 2, 100])[:, None], rule("trimmed_mean", 1), (1.5,)),
]


@pytest.mark.parametrize(("rows", "spec", "expected"), VALUES)
def test_rule(rows: np.ndarray, spec: dict[str, Any], expected: tuple[float, ...]):
    """The rule agrees with the published numbers to 1e-8, the precision in which they are printed."""
    np.testing.assert_allclose(answer(rows, spec), expected, rtol=0, atol=1e-8)


EXTRA = [
    (A, rule("centred_clipping", tau=100.0), (0, 0, 0), (4, 5, 6)),
    (C, rule("centred_clipping", tau=5.0), (0,), (24 / 7,)),
    (C, rule("centred_clipping", tau=5.0, iterations=3), (0,), (5.96209913,)),
    (np.array([[2.0, 0], [1, 1], [-3, 0], [0, 5], [3, 4]]), rule("fltrust"), (1, 0), (0.80620456, 0.42477444)),
]


@pytest.mark.parametrize(("rows", "spec", "extra", "expected"), EXTRA)
def test_rule_with_an_extra_vector(rows: np.ndarray, spec: dict[str, Any], extra: Any, expected: Any):
    np.testing.assert_allclose(answer(rows, spec, np.array(extra, dtype=float)), expected, rtol=0, atol=1e-8)


def test_geometric_median_is_a_row_exactly():
    assert (answer(A, "geometric_median") == A[1]).all()


MATRICES = [
    (A, rule("nnm", 1), [[2.5, 3.5, 4.5], [2.5, 3.5, 4.5], [5.5, 6.5, 7.5]]),
    (
        A,
        rule("clip", c=2.0),
        [
            [0.53452248, 1.06904497, 1.60356745],
            [0.91168461, 1.13960576, 1.36752692],
            [1.00514142, 1.14873305, 1.29232469],
        ],
    ),
    (A, rule("arc", 1), [[1, 2, 3], [4, 5, 6], [4.41004009, 5.04004582, 5.67005155]]),
    (C, rule("nnm", 2), np.array([4.6] * 4 + [8.6] * 2 + [208.4])[:, None]),
    (C, rule("arc", 2), np.array([0.0, 1, 3, 7, 12, 12, 12])[:, None]),
]


@pytest.mark.parametrize(("rows", "spec", "expected"), MATRICES)
def test_before(rows: np.ndarray, spec: dict[str, Any], expected: Any):
    np.testing.assert_allclose(applied(rows, spec), expected, rtol=0, atol=1e-8)
