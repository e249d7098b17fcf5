"""Where every method comes to rest on noiseless heterogeneous quadratics, or around which point it must go on moving.

All of three clients take part in every round, with K = 3 steps. The resting point is computed here as the fixed point
of one round, which is written in numpy in the paper's letters and solved by scipy, independently of the trajectory.
Methods whose local steps have a fixed length cannot rest: they stay within a few such lengths of the point, and ten
times nearer with a tenth of the length. `test_stationary` and `test_momenta` have the methods that are not in this
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from scipy.optimize import root

from fedfleet.algorithms.adagrad_biclip import adagrad_biclip
from fedfleet.algorithms.adam_biclip import adam_biclip
from fedfleet.algorithms.avg_biclip import avg_biclip
from fedfleet.algorithms.bi2clip import bi2clip
from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.diloco import diloco
from fedfleet.algorithms.fafed import fafed
from fedfleet.algorithms.fedadagrad import fedadagrad
from fedfleet.algorithms.fedadam import fedadam
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedavgm import fedavgm
from fedfleet.algorithms.feddu_adagrad import feddu_adagrad
from fedfleet.algorithms.feddu_adam import feddu_adam
from fedfleet.algorithms.fedexp import fedexp
from fedfleet.algorithms.fedexp_m import fedexp_m
from fedfleet.algorithms.fedmuon_ma import fedmuon_ma
from fedfleet.algorithms.fedprox import fedprox
from fedfleet.algorithms.fedyogi import fedyogi
from fedfleet.algorithms.local_sgdm import local_sgdm
from fedfleet.algorithms.muloco import muloco
from fedfleet.algorithms.padamfed import padamfed
from fedfleet.algorithms.padamfed_vr import padamfed_vr
from fedfleet.algorithms.parts.biclip import BiClip
from fedfleet.algorithms.parts.muon import NewtonSchulz
from fedfleet.algorithms.parts.muon_adamw import muon_adamw
from fedfleet.algorithms.parts.rules import Adam, Normalised, Sgd
from fedfleet.algorithms.rmsprop_biclip import rmsprop_biclip
from fedfleet.algorithms.stem import stem
from fedfleet.algorithms.table import METHODS
from tests.algorithms.driver import run
from tests.algorithms.problems import Line, Quadratic, everyone

PROBLEM = Quadratic(clients=3, noise=0.0, small=True)
N, K, LR, MU, PULL = 3, 3, 0.1, 0.5, 5.0
CUT = 0.3
"""BiClip's upper threshold. It is smaller than some entries of the gradients at the resting point, so that it has an
effect there."""


def gradients(y):
    """(N, d): each client's gradient at its own point; y: (N, d)."""
    return np.stack([h @ (point - a) for (h, a), point in zip(PROBLEM.parts, y, strict=True)])


def everywhere(x):
    return np.tile(x, (N, 1))


# --- one round of each kind of local work, deterministic: state -> next state -----------------------------------------
def plain(x):
    y = everywhere(x)
    for _ in range(K):
        y = y - LR * gradients(y)
    return y.mean(0)


def prox(x):
    y = everywhere(x)
    for _ in range(K):
        y = y - LR * (gradients(y) + PULL * (y - x))
    return y.mean(0)


def clipped(x):
    y = everywhere(x)
    for _ in range(K):
        y = y - LR * np.clip(gradients(y), -CUT, CUT)
    return y.mean(0)


def averaged_momenta(z):
    """LocalSGDM: z = (x, u)."""
    y, u = (everywhere(part) for part in np.split(z, 2))
    for _ in range(K):
        u = MU * u + gradients(y)
        y = y - LR * u
    return np.concatenate([y.mean(0), u.mean(0)])


def storm(z):
    """STEM with a = MU: z = (x, d, p_1, p_2, p_3)."""
    x, d, *p = np.split(z, 2 + N)
    y, d, p = everywhere(x), everywhere(d), np.stack(p)
    for _ in range(K):
        d = gradients(y) + (1 - MU) * (d - gradients(p))
        p, y = y, y - LR * d
    return np.concatenate([y.mean(0), d.mean(0), *p])


def preconditioned_storm(z):
    """FAFED with alpha = beta = MU, rho = 1: z = (x, m, v, p_1, p_2, p_3). The last step has the new v and m."""
    x, m, v, *p = np.split(z, 3 + N)
    y, m, second, p = everywhere(x), everywhere(m), everywhere(v), np.stack(p)
    for k in range(K):
        g = gradients(y)
        m, second = g + (1 - MU) * (m - gradients(p)), MU * second + (1 - MU) * g**2
        p = y
        if k < K - 1:
            y = y - LR * m / (np.sqrt(v) + 1)
    m, v = m.mean(0), second.mean(0)
    return np.concatenate([y.mean(0) - LR * m / (np.sqrt(v) + 1), m, v, *p])


def rest(round_of, parts=1):
    """(d,): x of the fixed point of a round. The state has `parts` vectors, of which x is the first; some rounds are
    made first, so that the solver starts near the fixed point."""
    z = np.full(parts * PROBLEM.size, 0.5)
    for _ in range(30):
        z = round_of(z)
    found = root(lambda z: round_of(z) - z, z, tol=1e-14)
    assert np.abs(round_of(found.x) - found.x).max() < 1e-12
    return found.x[: PROBLEM.size]


BICLIP = BiClip(LR, u=CUT)
PLAIN, PROX, CLIPPED = rest(plain), rest(prox), rest(clipped)
RESTS = {
    "fedprox": (fedprox(PULL, Sgd(LR)), PROX),
    "local_sgdm": (local_sgdm(LR, MU), rest(averaged_momenta, 2)),
    "stem": (stem(LR, MU), rest(storm, 2 + N)),
    "fafed": (fafed(LR, MU, MU, 1.0), rest(preconditioned_storm, 3 + N)),
    # Whatever the server does with the mean displacement, it rests where the displacement is 0, at FedAvg's point.
    "fedavgm": (fedavgm(Sgd(LR), beta=MU), PLAIN),
    "fedadagrad": (fedadagrad(Sgd(LR), 1.0, tau=0.1), PLAIN),
    "fedadam": (fedadam(Sgd(LR), 0.1, (MU, 0.9), tau=0.1), PLAIN),
    "fedyogi": (fedyogi(Sgd(LR), 0.1, (MU, 0.9), tau=0.1), PLAIN),
    "diloco": (diloco(Sgd(LR), 0.7, MU), PLAIN),
    # Where clients disagree, the steps of FedExP and FedDuA are long, A / (2 epsilon) at rest: epsilon must be as large
    # as A.
    "fedexp": (fedexp(Sgd(LR), epsilon=0.3), PLAIN),
    "fedexp_m": (fedexp_m(Sgd(LR), 0.3, MU), PLAIN),
    "feddu_adagrad": (feddu_adagrad(Sgd(LR), epsilon=0.01, epsilon_g=0.5), PLAIN),
    "feddu_adam": (feddu_adam(Sgd(LR), (MU, 0.9), epsilon=0.3, epsilon_g=1.0), PLAIN),
    "avg_biclip": (avg_biclip(BICLIP), CLIPPED),
    "adagrad_biclip": (adagrad_biclip(BICLIP, 1.0, tau=0.1), CLIPPED),
    "rmsprop_biclip": (rmsprop_biclip(BICLIP, 0.1, 0.9, tau=0.1), CLIPPED),
    "adam_biclip": (adam_biclip(BICLIP, 0.1, (MU, 0.9), tau=0.1), CLIPPED),
    "bi2clip": (bi2clip(BICLIP, server_u=0.05), CLIPPED),
}


def ends(method, rounds, problem=PROBLEM):
    return run(method, problem, *everyone(problem.clients, rounds, K))


@pytest.mark.parametrize("name", RESTS)
def test_rests_at_its_point(name):
    """Convergence is linear, and the slowest method is within 1e-11 after 200 rounds. The point is not the optimum."""
    method, point = RESTS[name]
    x = ends(method, 250).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, point, rtol=0, atol=1e-10)
    assert np.linalg.norm(point - PROBLEM.optimum) > 1e-3


def test_the_points_differ():
    points = {method: point for method, (_, point) in RESTS.items()}
    points["fedavg"] = PLAIN
    for one, other in (("fedavg", "fedprox"), ("fedavg", "local_sgdm"), ("fedavg", "avg_biclip"), ("stem", "fafed")):
        assert np.linalg.norm(points[one] - points[other]) > 1e-3, (one, other)


AGREEING = {
    "fedavgm": fedavgm(Sgd(LR), beta=MU, local="scaffold"),
    "fedexp": fedexp(Sgd(LR), local="scaffold"),
    "fedexp_m": fedexp_m(Sgd(LR), 0.0, MU, local="scaffold"),
    "feddu_adagrad": feddu_adagrad(Sgd(LR), local="scaffold"),
    "feddu_adam": feddu_adam(Sgd(LR), (MU, 0.5), local="scaffold"),
}


@pytest.mark.parametrize("name", AGREEING)
def test_with_scaffolds_local_work_the_server_rules_reach_the_optimum(name):
    """The clients agree at the optimum, so the steps of FedExP and FedDuA, which depend on A / |delta|, shrink with the
    distance."""
    x = ends(AGREEING[name], 300).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, PROBLEM.optimum, rtol=0, atol=1e-6)


# --- steps of a fixed length ------------------------------------------------------------------------------------------
def farthest(method, rounds, problem, point):
    """The largest distance from the point over the last tenth of the rounds."""
    models = ends(method, rounds, problem).models()[-rounds // 10 :]
    return max(float(np.linalg.norm(x.flat.numpy() - point)) for x in models)


@pytest.mark.parametrize("build", [padamfed, padamfed_vr])
def test_padamfed_circles_the_optimum(build):
    """A client moves by at most K lr in a round. With a tenth of the step size the model ends ten times nearer,
    whatever the clients' optima are: there is no bias except that of the step size."""
    ends_near(lambda lr, rounds: build(lr=lr, beta=0.5, server_lr=1.0).build(RunContext(N, N, rounds, K)))


def test_fedmuon_ma_circles_the_optimum():
    """The same for Muon's steps on the 2 x 2 matrix, of Frobenius norm sqrt(2) lr; steps of the vector are normalised
    too. The iterations are the classic ones, which converge; Jordan's leave singular values between 0.68 and 1.13,
    which is a bias of its own."""
    ends_near(lambda lr, rounds: fedmuon_ma(lr, Normalised(lr), beta=0.5, ball=NewtonSchulz(scheme="classic")))


def ends_near(build):
    for lr, rounds in ((0.05, 80), (0.005, 250)):
        assert farthest(build(lr, rounds), rounds, PROBLEM, PROBLEM.optimum) < K * lr


def test_normalised_steps_without_a_correction_have_a_bias_that_stays():
    """The point where the mean of normalised gradients is zero is not the point where the mean of gradients is zero,
    however short the steps are."""
    for lr, rounds in ((0.05, 80), (0.005, 250)):
        assert farthest(fedavg(Normalised(lr)), rounds, PROBLEM, PROBLEM.optimum) > 0.3


@dataclass(frozen=True)
class Alike(Quadratic):
    """A problem in which all clients have the function of the first one."""

    @cached_property
    def parts(self):
        return [super().parts[0]] * self.clients


@pytest.mark.parametrize(("lr", "rounds"), [(0.05, 80), (0.005, 250)])
def test_muloco_of_like_clients_circles_the_optimum(lr, rounds):
    """Outer momentum mu makes a step 1 / (1 - mu) times as long, which is 2 K lr, on matrices (of norm sqrt(2)) and
    vectors."""
    problem = Alike(clients=3, noise=0.0, small=True)
    inner = muon_adamw(lr, mu=0.5, weight_decay=0.0, rest=Normalised(lr))
    assert farthest(muloco(inner, 1.0, 0.5), rounds, problem, problem.optimum) < 2 * K * lr


class Matrix(Line):
    """The problem `Line` with x as a matrix of one entry."""

    @property
    def start(self):
        return {"X": np.array([[self.at]])}

    def gradient(self, i, x, r, k):
        return {"X": self.h[i] * (x["X"] - self.a[i])}


@pytest.mark.parametrize(
    "method", [diloco(Adam(0.1)), muloco(muon_adamw(0.1, weight_decay=0.0))], ids=["diloco", "muloco"]
)
def test_uncorrected_inner_optimisers_never_leave_the_counterexample(method):
    """Takezawa et al. 2025, Theorem 1: F_1 = x^2/2, F_2 = (x + 4)^2/2 from -1, one step. Adam's and Muon's steps on
    gradients -1 and 3 have one length and opposite signs, so the mean displacement is 0; the optimum is -2."""
    models = run(method, Matrix((1.0, 1.0), (0.0, -4.0), -1.0), *everyone(2, 100, 1)).models()
    assert max(abs(float(x.flat) + 1) for x in models) < 1e-6  # Adam's eps of 1e-8 next to gradients of 1 and 3


# --- is there a method without such a test? ---------------------------------------------------------------------------
HERE = {*RESTS, "padamfed", "padamfed_vr", "fedmuon_ma", "muloco"}
IN_STATIONARY = {"fedavg", "scaffold", "local_muon", "fedmuon_bc"}
IN_MOMENTA = {"fedavg_m", "fedavg_vr", "scaffold_m", "scaffold_vr"}


def test_every_method_is_covered():
    covered = HERE | IN_STATIONARY | IN_MOMENTA
    assert covered <= set(METHODS)
    files = {METHODS[name].build.split(":")[0] for name in covered}
    of_these_files = {name for name, recipe in METHODS.items() if recipe.build.split(":")[0] in files}
    assert of_these_files == covered
