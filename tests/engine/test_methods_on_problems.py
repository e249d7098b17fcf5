"""The points that methods are known to reach or to miss, in runs of the engine."""

from __future__ import annotations

import pytest
import torch

from fedfleet.engine import run

from .setups import quadratic

pytestmark = pytest.mark.long

LINE = {"preset": "counterexample"}
TWO = {"clients": 2, "cohort": 2, "rounds": 400, "local": {"steps": 1, "batch": 1}}


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_local_muon_never_leaves_the_counterexample(alpha, lr):
    """Takezawa et al. 2025, Theorem 1: from x0 = -a/4 = -1 the two clients' normalised momenta cancel, +1 and -1."""
    method = {"name": "local_muon", "norm": "euclidean", "matrix_lr": lr, "alpha": alpha}
    x = run(quadratic(method, LINE, TWO)).model["x"]
    assert float(x) == pytest.approx(-1.0, abs=1e-12)


@pytest.mark.parametrize(("alpha", "cycle"), [(1.0, 1), (0.5, 1), (0.1, 2), (0.05, 5)])
@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_fedmuon_bc_ends_in_a_cycle_around_the_optimum(alpha, cycle, lr):
    """|x - (-2)| <= cycle step sizes over the last 100 rounds; steps have length lr, so it cannot come to rest."""
    method = {"name": "fedmuon_bc", "norm": "euclidean", "matrix_lr": lr, "alpha": alpha, "start": "gradient"}
    experiment = quadratic(method, LINE, TWO)
    rows = run(experiment.model_copy(update={"evaluate": experiment.evaluate.model_copy(update={"every": 1})})).rows
    distances = [row["eval/distance"] for row in rows[-100:]]
    assert max(distances) <= cycle * lr * 1.01


MANY = {"dim": 6, "heterogeneity": 3.0, "condition": 8.0}
PLAN = {"clients": 12, "cohort": 12, "rounds": 300}
BLOCK = 12
"""All clients at once. With `auto`, runs of this length would first measure blocks, which takes longer than they do."""


def test_scaffold_reaches_the_optimum_that_fedavg_misses():
    """Noiseless quadratics with different Hessians and optima, all clients, K = 5. FedAvg stops where the mean of the
    clients' K-step displacements vanishes: x* solves mean_i (I - (I - lr H_i)^K)(x - x_i) = 0, which is not the optimum
    unless the H_i agree. Both points are computed here from the data."""
    lr, steps = 0.05, 5
    rule = {"name": "sgd", "lr": lr}
    fedavg = quadratic({"name": "fedavg", "rule": rule}, MANY, PLAN, block=BLOCK)
    scaffold = quadratic({"name": "scaffold", "rule": rule}, MANY, PLAN, block=BLOCK)
    biased, optimum = stops(fedavg, lr, steps)
    gap = float((biased - optimum).norm())
    assert gap > 1e-2
    assert torch.allclose(run(fedavg).model["x"], biased, atol=1e-8)
    assert torch.allclose(run(scaffold).model["x"], optimum, atol=1e-8)


def stops(experiment, lr: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(FedAvg's stationary point, the optimum), (d,) each, from the clients' A_i and b_i in float64."""
    from fedfleet.engine.runs.prepare import prepare

    split = prepare(experiment, "test").split()
    a, b = (torch.from_numpy(split.train[name]).to(torch.float64) for name in ("a", "b"))
    hessians = a.mT @ a
    targets = (a.mT @ b.unsqueeze(-1)).squeeze(-1)
    eye = torch.eye(hessians.shape[-1], dtype=torch.float64)
    moves = eye - torch.linalg.matrix_power(eye - lr * hessians, steps)
    own = torch.linalg.solve(hessians, targets)
    biased = torch.linalg.solve(moves.mean(0), (moves @ own.unsqueeze(-1)).squeeze(-1).mean(0))
    return biased, torch.linalg.solve(hessians.mean(0), targets.mean(0))


def test_gradient_noise_leaves_a_floor_that_falls_with_the_step():
    """SCAFFOLD with noisy gradients ends at a distance of the order of sqrt(lr). With a tenth of the step size, after
    enough rounds to forget the start, it ends nearer."""
    noisy, plan = {**MANY, "noise": 0.5}, {**PLAN, "rounds": 600}
    ends = []
    for end in (0.02, 0.002):
        rule = {"name": "sgd", "lr": {"schedule": "cosine", "start": 0.02, "end": end}}
        made = quadratic({"name": "scaffold", "rule": rule}, noisy, plan, block=BLOCK)
        ends.append(run(made).rows[-1]["eval/distance"])
    assert 1e-6 < ends[1] < ends[0] < 1.0
