"""The points at which methods come to rest on small noiseless heterogeneous problems, against closed forms and by
hand."""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedmuon_bc import fedmuon_bc
from fedfleet.algorithms.local_muon import local_muon
from fedfleet.algorithms.parts.rules import Momentum, Sgd
from fedfleet.algorithms.scaffold import scaffold
from tests.algorithms.driver import run
from tests.algorithms.problems import Line, Quadratic, everyone, partial, unflatten

QUADRATIC = Quadratic(clients=3, noise=0.0, small=True)
LR = 0.1
ROUNDS = 300  # the slowest case here is at 1e-11 after 150 rounds and at rounding, 1e-15, after 250


def biased_point(problem, counts):
    """FedAvg's fixed point with local SGD of step LR and K_i steps.

    y <- y - LR H_i (y - a_i) makes y_K - a_i = P_i (x - a_i), P_i = (I - LR H_i)^K_i. At the fixed point the mean of
    y_K - x = (P_i - I)(x - a_i) is 0, a linear system in x.
    """
    eye = np.eye(problem.size)
    left = [eye - np.linalg.matrix_power(eye - LR * h, k) for (h, _), k in zip(problem.parts, counts, strict=True)]
    return np.linalg.solve(sum(left), sum(m @ a for m, (_, a) in zip(left, problem.parts, strict=True)))


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 3, 5]])
def test_fedavg_rests_at_its_biased_point(counts):
    x = run(fedavg(Sgd(LR)), QUADRATIC, *everyone(3, ROUNDS, counts)).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, biased_point(QUADRATIC, counts), rtol=0, atol=1e-13)
    assert np.linalg.norm(x - QUADRATIC.optimum) > 0.02


@pytest.mark.parametrize("rule", [Sgd(LR), Momentum(LR / 4, 0.8)], ids=["sgd", "momentum"])
@pytest.mark.parametrize("control", ["mean", "last"])
@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 3, 5]])
def test_scaffold_reaches_the_optimum(counts, control, rule):
    """Convergence is linear down to rounding, although the clients have different optima and numbers of steps."""
    x = run(scaffold(rule, control=control), QUADRATIC, *everyone(3, ROUNDS, counts)).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, QUADRATIC.optimum, rtol=0, atol=1e-13)


def test_scaffold_reaches_the_optimum_with_two_of_three_clients():
    cohorts, steps = partial(clients=3, sampled=2, rounds=ROUNDS)
    x = run(scaffold(Sgd(LR)), QUADRATIC, cohorts, steps).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, QUADRATIC.optimum, rtol=0, atol=1e-13)


class Resting(Quadratic):
    """A problem that starts at its optimum, so that the warm start gives c_i = grad F_i(x*) and c = 0."""

    @property
    def start(self):
        return unflatten(self.optimum, self.shapes)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("lr", [0.01, 0.3])
def test_scaffold_stays_at_the_stationary_point(lr, steps):
    """All corrected gradients are 0 there up to 1e-15; FedAvg leaves the point as soon as it takes two local steps."""
    problem = Resting(clients=3, noise=0.0, small=True)
    timetable = everyone(3, 5, steps)
    stays = run(scaffold(Sgd(lr), start="gradient"), problem, *timetable).models()[-1].flat.numpy()
    np.testing.assert_allclose(stays, problem.optimum, rtol=0, atol=1e-13)
    leaves = run(fedavg(Sgd(lr)), problem, *timetable).models()[-1].flat.numpy()
    assert (np.linalg.norm(leaves - problem.optimum) > 1e-5) == (steps > 1)


# Two clients in one dimension: F_1 = x^2/2, F_2 = (x + a)^2/2, from x0 = -a/4. The optimum is -a/2. Theorem 1 of
# Takezawa et al. 2025: at x0 the gradients are -a/4 and 3a/4, so LocalMuon's clients take steps +lr and -lr, which
# cancel.
A = 4.0
TWO = Line(h=(1.0, 1.0), a=(0.0, -A), at=-A / 4)


def positions(method, rounds):
    return torch.stack([model.flat for model in run(method, TWO, *everyone(2, rounds, 1)).models()]).flatten()


@pytest.mark.parametrize("lr", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 1.0])
def test_local_muon_never_moves_on_the_counterexample(alpha, lr):
    """Both steps have length lr up to one rounding of x0 +- lr, 2e-16 per round, so that 300 rounds move x by less than
    1e-13."""
    x = positions(local_muon(lr, alpha=alpha, norm="euclidean"), 300)
    assert (x + A / 4).abs().max() < 1e-13


@pytest.mark.parametrize("lr", [0.01, 0.1])
@pytest.mark.parametrize(("alpha", "cycle"), [(1.0, 1), (0.5, 1), (0.1, 2), (0.05, 5)])
def test_fedmuon_circles_the_optimum_of_the_counterexample(alpha, cycle, lr):
    """It reaches the optimum in a/4 / lr rounds, and then its distance is never more than `cycle` step sizes, plus 1 %:
    a direction that should be 0 may be 1e-15, and then moves by 1e-15 / eps = 1e-3 step sizes.
    """
    method = fedmuon_bc(lr, alpha=alpha, norm="euclidean", start="gradient")
    x = positions(method, 1000)
    assert (x[500:] + A / 2).abs().max() <= 1.01 * cycle * lr
    assert (x[500:] + A / 2).abs().max() > 0.1 * lr, "a normalised step cannot rest"


# By hand: F_1 = x^2/2, F_2 = (x - 2)^2, so g_1 = x, g_2 = 2 (x - 2). All numbers are dyadic: equality is exact.
HAND = Line(h=(1.0, 2.0), a=(0.0, 2.0), at=1.0)


def numbers(trees):
    return [float(tree.flat) for tree in trees]


def test_scaffold_by_hand():
    """Two clients, two local steps, lr = 1/2, two rounds.

    round 1, c = c_1 = c_2 = 0, x = 1
      client 1: g = 1, y = 1/2; g = 1/2, y = 1/4          c_1 = 3/4     delta -3/4
      client 2: g = -2, y = 2; g = 0, y = 2               c_2 = -1      delta 1
      x = 1 + 1/8 = 9/8; c = (3/4 - 1)/2 = -1/8
    round 2, corrections c - c_1 = -7/8, c - c_2 = 7/8
      client 1: g = 9/8, d = 1/4, y = 1; g = 1, d = 1/8, y = 15/16              c_1 = 17/16    delta -3/16
      client 2: g = -7/4, d = -7/8, y = 25/16; g = -7/8, d = 0, y = 25/16       c_2 = -21/16   delta 7/16
      x = 9/8 + 1/8 = 5/4; c = -1/8 + (5/16 - 5/16)/2 = -1/8
    """
    result = run(scaffold(Sgd(0.5)), HAND, *everyone(2, 2, 2))
    assert numbers(result.models()) == [9 / 8, 5 / 4]
    assert numbers(server.public.shared for server in result.servers) == [-1 / 8, -1 / 8]
    assert [numbers(client.own for client in clients) for clients in result.clients] == [
        [3 / 4, -1],
        [17 / 16, -21 / 16],
    ]


def test_fedavg_by_hand():
    """Round 1 is that of SCAFFOLD. Round 2 starts from 9/8: client 1 halves it twice, to 9/32; client 2 goes to 2; x =
    73/64."""
    assert numbers(run(fedavg(Sgd(0.5)), HAND, *everyone(2, 2, 2)).models()) == [9 / 8, 73 / 64]


def test_fedmuon_by_hand():
    """Signs (the max norm), lr = 1/2, alpha = 1/2, the gradient start: m_1 = 1, m_2 = -2, c = -1/2, x = 1.

    client 1: g = 1,   m = 1,    d = 1 - 1 - 1/2 = -1/2,     y = 3/2
              g = 3/2, m = 5/4,  d = 5/4 - 1 - 1/2 = -1/4,   y = 2       c_1 = 5/4    delta 1
    client 2: g = -2,  m = -2,   d = -2 + 2 - 1/2 = -1/2,    y = 3/2
              g = -1,  m = -3/2, d = -3/2 + 2 - 1/2 = 0,     y = 3/2     c_2 = -3/2   delta 1/2
    x = 1 + 3/4; c = -1/2 + (1/4 + 1/2)/2 = -1/8
    """
    method = fedmuon_bc(0.5, alpha=0.5, norm="max", start="gradient")
    result = run(method, HAND, *everyone(2, 1, 2))
    assert numbers(result.models()) == [7 / 4]
    assert numbers([result.servers[0].public.shared]) == [-1 / 8]
    assert numbers(client.own for client in result.clients[0]) == [5 / 4, -3 / 2]
