"""Whole runs of the engine against implementations that share no code with it, see `tests.reference.literal`.

TOLERANCE: float64 over a few rounds, sums in another order, and factors that are sent by another library's
decomposition, whose signs and bases do not matter to their product.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedfleet.algorithms.fedmuon_ma import fedmuon_ma
from fedfleet.algorithms.parts.muon import Svd
from fedfleet.engine.api import run
from tests.algorithms.driver import run as play
from tests.algorithms.problems import Quadratic, everyone
from tests.engine.test_client_weights import linear, rows_of, softmax_gradient, whole_batches
from tests.reference import literal

TOLERANCE = {"rtol": 1e-8, "atol": 1e-10}
CLIENTS, STEPS = 4, 3


def test_the_first_round_of_fedmuon_ma_is_line_1_and_then_steps():
    """The engine gives a client K batches in every round. In round 1, line 1 uses the first batch, so that K - 1 steps
    are left. With tau = K - 1 in round 1 and tau = K afterwards, the paper's algorithm takes the same batches and must
    have the same models."""
    problem = Quadratic(clients=CLIENTS)
    taus = [STEPS - 1, STEPS, STEPS]
    wanted = literal.fedmuon_ma(problem.gradient, problem.start, CLIENTS, taus, 0.05, 0.1, 0.3)
    method = fedmuon_ma(0.05, 0.1, 0.3, ball=Svd())
    for ours, theirs in zip(play(method, problem, *everyone(CLIENTS, 3, STEPS)).models(), wanted, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, **TOLERANCE)
    literally = literal.fedmuon_ma(problem.gradient, problem.start, CLIENTS, [STEPS] * 3, 0.05, 0.1, 0.3)
    assert np.abs(literally[0]["W"] - wanted[0]["W"]).max() > 1e-3  # a step more is no rounding error


SIZES = (2, 38, 11)


@pytest.mark.parametrize("ratio", [None, 0.5], ids=["whole", "truncated"])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_a_server_that_measures_norms_over_a_codec(weights: str, ratio: float | None):
    """FedExP with FedHM's decompositions: the norms are those of the products, and the means have the clients'
    weights."""
    method = {"name": "fedexp", "floor": False, "evaluate": "last", "epsilon": 0.01, "rule": {"name": "sgd", "lr": 0.3}}
    if ratio is not None:
        method["compression"] = {"name": "decomposition", "ratio": ratio, "layers": "all"}
    workload = linear(SIZES)
    result = run(whole_batches(method, workload, len(SIZES), weights))
    start = {name: value.double().numpy() for name, value in workload.init(0).items()}
    (w,) = (name for name, value in start.items() if value.ndim == 2)
    (b,) = (name for name, value in start.items() if value.ndim == 1)
    # The largest rank whose numbers, with the vector's, are at most the ratio of the model's, and 0.001 of it more.
    m, n = start[w].shape
    ranks = [r for r in range(1, min(m, n)) if (r * (m + n) + m) <= ((ratio or 0) + 0.001) * (m * n + m)]
    given = (2, 38, 11) if weights == "examples" else (1, 1, 1)
    gradients = [lambda w, b, part=part: softmax_gradient(w, b, *part) for part in rows_of(SIZES)]
    path, sizes = literal.fedexp(
        gradients, start[w], start[b], np.array(given) / sum(given), 2, 2, 0.3, 0.01, ranks[-1] if ratio else None
    )
    np.testing.assert_allclose(result.model[w], path[-1][0], **TOLERANCE)
    np.testing.assert_allclose(result.model[b], path[-1][1], **TOLERANCE)
    np.testing.assert_allclose([row["server/lr"] for row in result.rows], sizes, rtol=1e-8)
