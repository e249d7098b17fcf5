"""The distributions of gradient noise, wrong labels, synthetic data, AUC."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedfleet.workloads import counted
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.data.fashion_mnist import FashionMnist
from fedfleet.workloads.data.sentiment import Sst2
from fedfleet.workloads.metrics import auc
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Dirichlet
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.problems.regression import Linear, Synthetic
from fedfleet.workloads.wrappers import noise
from fedfleet.workloads.wrappers.noisy import Noisy, flipped, noisier

N = 100_000
LAWS = [("gaussian", 1.0), ("student_t", 1.5), ("student_t", 5.0), ("pareto", 1.2), ("pareto", 3.0)]
LAWS += [("stable", 2.0), ("stable", 1.0), ("stable", 1.5), ("stable", 0.7)]


def distance(sorted_draws: np.ndarray, cdf: np.ndarray) -> float:
    """Kolmogorov's distance: the largest gap between the empirical and the true distribution function."""
    n = len(sorted_draws)
    return float(max(np.max(np.arange(1, n + 1) / n - cdf), np.max(cdf - np.arange(n) / n)))


def true_cdf(law: str, tail: float, x: np.ndarray) -> np.ndarray:
    from scipy import stats

    if law == "pareto":
        return 0.5 + np.sign(x) * (1 - (1 + np.abs(x)) ** -tail) / 2
    return {
        "gaussian": lambda: stats.norm.cdf(x),
        "student_t": lambda: stats.t.cdf(x, tail),
        "stable": lambda: stats.norm.cdf(x, scale=math.sqrt(2)) if tail == 2 else stats.cauchy.cdf(x),
    }[law]()


@pytest.mark.parametrize(("law", "tail"), [one for one in LAWS if one[0] != "stable" or one[1] in (1.0, 2.0)])
def test_distributions(law, tail):
    """Kolmogorov's distance times root n exceeds 1.95 in one of a thousand such tests; the keys are fixed."""
    x = np.sort(noise.draw(law, tail, counted.key(7, "test"), N).numpy())
    assert distance(x, true_cdf(law, tail, x)) < 1.95 / math.sqrt(N)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.2, 1.5, 1.8, 2.0])
def test_stable_draws_have_the_characteristic_function(alpha):
    """The mean of cos(t x) is exp(-|t|^alpha), its deviation below sqrt(1 / 2 N) = .0022: five of them."""
    x = noise.draw("stable", alpha, counted.key(3), N)
    for t in (0.1, 0.5, 1.0, 2.0):
        assert abs(float((t * x).cos().mean()) - math.exp(-(t**alpha))) < 0.011
        assert abs(float((t * x).sin().mean())) < 0.011


@pytest.mark.parametrize(("law", "tail"), [("student_t", 1.5), ("pareto", 1.5), ("stable", 1.5)])
def test_tail_index_by_hill(law, tail):
    """Hill's estimate from the largest 500 of 100,000 has deviation tail / sqrt(500) = 4.5 %, and a bias below that."""
    x = noise.draw(law, tail, counted.key(5), N).abs().sort(descending=True).values[:501].log()
    assert 1 / float((x[:500] - x[500]).mean()) == pytest.approx(tail, rel=0.2)


@pytest.mark.parametrize(("law", "tail"), LAWS)
def test_draws_are_finite_and_the_same_alone_and_together(law, tail):
    keys = counted.key(0, torch.arange(5))
    alone = torch.stack([noise.draw(law, tail, key, 1000) for key in keys])
    assert alone.isfinite().all()
    for together in (noise.draw(law, tail, keys, 1000), vmap(lambda key: noise.draw(law, tail, key, 1000))(keys)):
        # A processor's vector and scalar forms of pow and cos differ in their last bits.
        assert torch.allclose(together, alone, rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("law", "tail", "words"), [("cauchy", 1.0, "law='cauchy'"), ("stable", 2.1, "tail <= 2"), ("pareto", 0.0, "tail=0")]
)
def test_bad_laws(law, tail, words):
    with pytest.raises(ValueError, match=words):
        noise.check(law, tail)


# --- the workload that wraps another ----------------------------------------------------------------------------------
def gradient(workload, p, batch):
    leaf = {name: value.clone().requires_grad_() for name, value in p.items()}
    loss = workload.losses(leaf, batch).mean()
    return loss.item(), torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(leaf.values()))])


def test_noise_is_added_to_the_gradient_and_not_to_the_loss():
    plain = Digits(Logistic())
    noisy = Noisy(plain, "student_t", 1.5, scale=0.3)
    p = {name: value.double() for name, value in plain.init(0).items()}
    train = plain.load()[0]
    batch = {name: torch.from_numpy(rows[:8]) for name, rows in train.items()} | {"key": counted.key(0, "step")}
    (loss, g), (same, h) = gradient(plain, p, batch), gradient(noisy, p, batch)
    assert loss == pytest.approx(same, rel=1e-12)
    xi = noise.draw("student_t", 1.5, counted.key(batch["key"], "gradient noise"), len(g))
    assert torch.allclose(h - g, 0.3 * xi, rtol=1e-9, atol=1e-12)
    assert torch.equal(gradient(noisy, p, batch)[1], h)
    assert not torch.equal(gradient(noisy, p, {**batch, "key": counted.key(1, "step")})[1], h)


def test_flipped_labels():
    """50,000 labels, a fifth flipped: deviation .0018; each other class gets a ninth of them."""
    labels = np.arange(50_000) % 10
    wrong = flipped(labels, 10, 0.2, 0)
    assert abs((wrong != labels).mean() - 0.2) < 0.008
    shift = np.bincount((wrong - labels) % 10, minlength=10)[1:] / (wrong != labels).sum()
    assert np.abs(shift - 1 / 9).max() < 0.015
    assert (flipped(labels, 10, 1.0, 0) != labels).all()
    plain, other = Digits().split(0, 10), Noisy(Digits(), flips=0.5).split(0, 10)
    assert np.array_equal(plain.test["label"], other.test["label"])
    assert (plain.train["label"] != other.train["label"]).mean() == pytest.approx(0.5, abs=0.07)


def test_inputs_are_noisier_the_higher_the_clients_number():
    """48 rows of 784 bytes: the deviation's own is 1 / sqrt(2 x 37,632) = .4 %."""
    workload = Noisy(FashionMnist(Logistic(), stand_in=96), features=0.2)
    split = workload.split(0, 4)
    own = [split.train["noise"][rows] for rows in np.split(split.client_index.rows, split.client_index.offsets[1:-1])]
    assert [np.unique(level).tolist() for level in own] == [[pytest.approx(0.05 * i)] for i in (1, 2, 3, 4)]
    assert "noise" not in split.test
    batch = {name: torch.from_numpy(rows[:48]) for name, rows in split.train.items()} | {"key": counted.key(3)}
    xi = (noisier(batch) - batch["input"].float() / 255) / batch["noise"].view(-1, 1, 1, 1)
    assert float(xi.std()) == pytest.approx(1, abs=0.02)
    assert abs(float(xi.mean())) < 0.03
    short = {name: rows if name == "key" else rows[:7] for name, rows in batch.items()}
    assert torch.equal(noisier(short), noisier(batch)[:7])
    keys = counted.key(0, torch.arange(3))
    together = vmap(lambda key: noisier({**short, "key": key}))(keys)
    for client, key in enumerate(keys):
        # Vector and scalar forms of cos differ. Values are sums of float32 below 5, whose unit of rounding is 5e-7.
        assert torch.allclose(together[client], noisier({**short, "key": key}), rtol=1e-6, atol=1e-6)
    assert not torch.equal(together[0], together[1])
    p = workload.init(0)
    assert not torch.equal(workload.losses(p, batch), workload.of.losses(p, batch))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Noisy(Digits(), features=-0.1), "features=-0.1"),
        (lambda: Noisy(Sst2(stand_in=20), features=0.1).split(0, 2), "features needs inputs that are numbers"),
        (lambda: Noisy(Quadratic(), features=0.1).split(0, 2), "features needs inputs"),
        (lambda: Noisy(Digits(), scale=-1.0), "scale=-1"),
        (lambda: Noisy(Digits(), flips=1.5), "flips=1.5"),
        (lambda: Noisy(Quadratic(), flips=0.5).split(0, 3), "flips needs a workload with labels"),
        (lambda: Linear(dim=0), "dim=0"),
        (lambda: Synthetic(alpha=-1.0), "alpha=-1"),
        (lambda: Synthetic(partition=Dirichlet()), "makes the data of each client itself"),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()


# --- synthetic data ---------------------------------------------------------------------------------------------------
def test_linear_interpolates():
    """600 equations of rank 600 in 1,000 unknowns: the least-squares residual is 0."""
    split = Linear().split(0, 20)
    x, y = split.train["x"], split.train["y"]
    assert x.shape == (600, 1000)
    theta, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    assert rank == 600
    assert np.abs(x @ theta - y).max() < 1e-8
    assert (x**2).mean(0)[[0, 9]] == pytest.approx([1, 10**-1.1], rel=0.2)  # deviation sqrt(2 / 600) = 6 %
    assert np.array_equal(Linear().split(0, 30).train["x"][:600], x)
    p = {"theta": torch.from_numpy(theta)}
    test = {name: torch.from_numpy(rows) for name, rows in split.test.items()}
    assert float(Linear().report(p, test)["loss"].mean()) < 1e-16


def test_rows_of_linear_regression_may_have_solutions_of_their_own():
    """The inputs are the same ones. A common solution of 1,000 rows in 3 unknowns is exact. Solutions of their own
    leave |x|^2 standard normal squares, 1 + 2^-1.1 + 3^-1.1 = 1.77 on average; the standard deviation of one is about
    4, that of the mean 0.13."""
    one, own = (Linear(3, 1000, solutions=kind).split(0, 2).train for kind in ("client", "row"))
    assert np.array_equal(one["x"], own["x"])
    x = one["x"][:1000]
    for data, expected in ((one, 0.0), (own, 1.77)):
        y = data["y"][:1000]
        left = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        assert np.mean(left**2) == pytest.approx(expected, abs=0.5 if expected else 1e-20)
    with pytest.raises(ValueError, match="solutions must be client or row"):
        Linear(solutions="rows")  # pyright: ignore[reportArgumentType]


def spread(workload: Synthetic) -> float:
    """How much the shares of the labels differ between clients."""
    split = workload.split(0, 20)
    own = [np.bincount(rows, minlength=10) / len(rows) for rows in split.train["label"].reshape(20, -1)]
    return float(np.std(own, axis=0).sum())


def test_logistic_clients_are_as_unlike_as_asked():
    same, apart = spread(Synthetic(iid=True)), spread(Synthetic())
    assert same < 0.6 * apart
    assert Synthetic(rows=40).split(0, 3).test["input"].shape == (30, 60)
    Synthetic().check()


def test_auc_is_scikit_learns():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    for ties in (3, 10**9):
        scores, positive = rng.integers(0, ties, 500) / ties, rng.random(500) < 0.1
        assert auc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)
    assert auc(np.array([0.0, 1.0]), np.array([False, True])) == 1
    with pytest.raises(ValueError, match="0 positives and 2 negatives"):
        auc(np.zeros(2), np.zeros(2, dtype=bool))
