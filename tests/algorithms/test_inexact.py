"""kappa and p of theorem 3 of Takezawa et al. 2025: against numpy and the formula, by hand, and lemma 12 itself.

ROUNDING: float64, of a few operations on singular values that numpy finds by another program.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedmuon_bc import CorrectedMomentum, fedmuon_bc
from fedfleet.algorithms.local import LocalMethod
from fedfleet.algorithms.parts.inexact import Inexact, least_share, order
from fedfleet.algorithms.parts.muon import NewtonSchulz, Schatten, Spectral, Svd
from fedfleet.algorithms.parts.orthogonal import newton_schulz
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.engine.api import run
from fedfleet.engine.config.schema import experiment
from tests.algorithms.driver import Step, tree, visit
from tests.algorithms.problems import SHAPES, Quadratic

ROUNDING = 1e-12
torch.set_num_threads(1)


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def slow_kappa(matrices):
    """The minimum over the matrices of s_j / sqrt(sum s_j^2), s_j > 0."""
    spectra = [np.linalg.svd(m, compute_uv=False) for m in matrices]
    return min(float(s[s > 1e-12 * s[0]].min() / math.sqrt(sum(s * s))) for s in spectra)


def slow_order(kappa, T):
    return 1 + math.log(1 - (1 - kappa) ** (1.5**T)) / math.log(kappa)


def test_kappa_by_hand():
    """diag(3, 4): 3/5. diag(3, 4, 0) has the same, since zeros do not count. A matrix of rank one, or 0, has 1."""
    diagonal = lambda *s: torch.diag(torch.tensor(s, dtype=torch.float64))  # noqa: E731
    assert float(least_share(diagonal(3, 4))) == pytest.approx(3 / 5, rel=1e-15)
    assert float(least_share(diagonal(3, 4, 0))) == pytest.approx(3 / 5, rel=1e-15)
    assert float(least_share(torch.stack([diagonal(1, 1), diagonal(3, -4)]))) == pytest.approx(3 / 5, rel=1e-15)
    assert float(least_share(draw(4, 1) @ draw(1, 3, seed=1))) == pytest.approx(1, rel=ROUNDING)
    assert float(least_share(torch.zeros(3, 2))) == 1


@pytest.mark.parametrize("scale", [1e-30, 1e20, 1e37])
def test_kappa_of_matrices_whose_squares_are_no_floats(scale):
    """diag(3, 4) at any scale: 3/5, to some roundings of float32."""
    assert float(least_share(scale * torch.diag(torch.tensor([3.0, 4.0])))) == pytest.approx(3 / 5, rel=1e-6)


def test_the_order_by_hand():
    """kappa = 3/4: for T = 0 p = 1 + log(3/4) / log(3/4); for T = 1 p = 1 + log(7/8) / log(3/4), as (1/4)^1.5 = 1/8."""
    kappa = torch.tensor(0.75, dtype=torch.float64)
    assert float(order(kappa, 0)) == 2
    assert float(order(kappa, 1)) == pytest.approx(1 + math.log(7 / 8) / math.log(3 / 4), rel=1e-15)
    assert float(order(kappa, math.inf)) == 1
    assert order(torch.tensor([1.0, 1.0]), 0).tolist() == [2, 2]
    assert order(torch.tensor([1.0, 1.0]), 3).tolist() == [1, 1]


@pytest.mark.parametrize("kappa", [0.9, 0.5, 0.1, 1e-3])
def test_the_order_falls_from_2_to_1(kappa):
    """Remark 3; and the printed formula, which loses digits to 1 - (1 - kappa)^(1.5^T) where kappa is small."""
    found = [float(order(torch.tensor(kappa, dtype=torch.float64), T)) for T in range(11)]
    assert found[0] == 2
    assert all(more < less or more == 1 for less, more in pairwise(found))
    assert found == pytest.approx([slow_order(kappa, T) for T in range(11)], rel=1e-12)


@pytest.mark.parametrize("iterations", range(8))
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_lemma_12(iterations, spread):
    """<G, G^(T)> >= |G|_p for Newton-Schulz steps of matrices whose singular values are exp(spread * normal)."""
    for seed in range(20):
        (u, _, v), s = torch.linalg.svd(draw(4, 6, seed=seed), full_matrices=False), draw(4, seed=100 + seed)
        g = u @ torch.diag((spread * s).exp()) @ v
        p = float(order(least_share(g), iterations))
        norm = np.linalg.norm(np.linalg.svd(g.numpy(), compute_uv=False), p)
        assert float((g * newton_schulz(g, "classic", iterations)).sum()) >= norm * (1 - 1e-9)


@dataclass(frozen=True)
class Kept(CorrectedMomentum):
    """Keeps every direction."""

    directions: list = field(default_factory=list)

    def estimate(self, oracle, y, c, c_i, trace):
        found, trace = super().estimate(oracle, y, c, c_i, trace)
        self.directions.append({name: value.numpy() for name, value in found.items()})
        return found, trace


@pytest.mark.parametrize(
    ("ball", "T"), [(NewtonSchulz(2), 2), (Svd(), math.inf), (NewtonSchulz(scheme="jordan"), None), (Schatten(), None)]
)
def test_a_client_s_facts_are_those_of_its_directions(ball, T):
    """Three local steps on tensors of several shapes, of which U counts as no matrix, nor the vector; the kernel is a
    matrix of 2 x 12."""
    problem, estimator = Quadratic(), Kept(0.4)
    method = LocalMethod(Inexact(Spectral(0.1, ball=ball, aux=("U",))), estimator, Mean(1.0, "all"))
    public = method.server_init(tree(problem.start)).public
    message, _ = visit(method, public, method.client_init(public), [Step(problem, (1, 0, k), k / 3) for k in range(3)])
    met = [d[name].reshape(SHAPES[name][0], -1) for d in estimator.directions for name in ("W", "V", "kernel")]
    assert len(met) == 9
    kappa = slow_kappa(met)
    assert float(message.facts["kappa"]) == pytest.approx(kappa, rel=ROUNDING)
    if T is None:
        assert message.facts.keys() == {"kappa", "norm2"}
    else:
        expected = 1.0 if math.isinf(T) else slow_order(kappa, T)
        assert float(message.facts["schatten_order"]) == pytest.approx(expected, rel=ROUNDING)


def test_without_matrices_nothing_is_measured():
    rule = Inexact(Spectral())
    state = rule.step(tree({"b": np.ones(3)}), tree({"b": np.ones(3)}), rule.init(tree({"b": np.ones(3)})))[1]
    assert all(math.isnan(float(value)) for value in rule.facts(state).values())


def recorded(block, method, clients=3):
    return run(
        experiment(
            {
                "workload": {"name": "quadratic", "dim": 4, "columns": 3, "noise": 0.3, "schatten": 1.5},
                "method": {"name": "fedmuon_bc", "scale": "none", "start": "gradient"} | method,
                "federation": {
                    "clients": clients,
                    "cohort": clients,
                    "rounds": 3,
                    "local": {"steps": 2, "batch": 1},
                },
                "engine": {"backend": "local", "dtype": "float64", "block": block},
                "evaluate": {"every": 1},
                "tracking": {"uri": "none"},
            }
        )
    )


def test_a_run_records_kappa_and_the_order():
    """Alone and in blocks; the model is the same to the bit as without. For T = 0 the order is 2."""
    settings = {"ball": {"name": "newton_schulz", "iterations": 2}}
    alone, together = (recorded(block, {"kappa": True, **settings}) for block in (1, 3))
    for one, other in zip(alone.rows, together.rows, strict=True):
        assert 0 < one["client/kappa"] < 2**-0.5  # of two singular values or more one has at most half of the squares
        assert 1 < one["client/schatten_order"] < 2
        for name in ("client/kappa", "client/schatten_order"):
            assert one[name] == pytest.approx(other[name], rel=1e-9)
        assert one["eval/gradient_schatten_norm"] <= one["eval/gradient_trace_norm"]
    plain = recorded(3, settings)
    assert torch.equal(together.model["x"], plain.model["x"])
    assert "client/kappa" not in plain.rows[0]
    none = recorded(3, {"kappa": True, "ball": {"name": "newton_schulz", "iterations": 0}})
    assert [row["client/schatten_order"] for row in none.rows] == [2, 2, 2]


def test_one_client_s_order_follows_from_its_kappa():
    rows = recorded(1, {"kappa": True, "ball": {"name": "newton_schulz", "iterations": 5}}, clients=1).rows
    for row in rows:
        assert row["client/schatten_order"] == pytest.approx(slow_order(row["client/kappa"], 5), rel=1e-9)


def test_a_norm_without_matrices_is_refused():
    with pytest.raises(
        ValueError, match="kappa has no effect here, got kappa=True: norm=max takes no step by matrices"
    ):
        fedmuon_bc(norm="max", kappa=True)
