"""AUC maximisation: the objective and its gradient against slow float64 ones, its closed forms (T1), priors, whose sign
is turned, and what is reported.

TOLERANCE: float64, some 50 examples, values near 1: 1e-12 leaves a factor of 100 over the roundings.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.func import vmap

from fedfleet.engine.config.registry import Registry
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.skew import PositiveRatio
from fedfleet.workloads.partitions.standard import Dirichlet
from fedfleet.workloads.problems.auc import Auc, optimum, priors
from fedfleet.workloads.problems.minimax import reversed_dual
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.wrappers.poisoned import GradientsFlipped
from tests.reference import auc as slow

TOLERANCE = 1e-12
NAMES = ("primal.w1", "primal.w2", "dual.w3")
RATIOS = (0.05, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25)


@dataclass(frozen=True)
class Scored(Auc):
    """AUC without a network: the scores are tensors of the model, one for each example."""

    of: Digits = Digits()

    def scores(self, p, batch):
        return p["primal.h"]


@dataclass(frozen=True)
class Case:
    prior: float
    share: float = 0.3
    examples: int = 50

    @property
    def h(self):
        return np.random.default_rng(1).normal(size=self.examples)

    @property
    def positive(self):
        return np.arange(self.examples) < self.share * self.examples

    @property
    def batch(self):
        return {
            "label": torch.from_numpy(self.positive.astype(np.int64)),
            "prior": torch.full((self.examples,), self.prior, dtype=torch.float64),
        }


def point(h, w):
    return {
        "primal.h": torch.from_numpy(np.asarray(h)),
        **{name: torch.tensor(float(v), dtype=torch.float64) for name, v in zip(NAMES, w, strict=True)},
    }


def mean(case, w, h=None):
    return float(Scored().objectives(point(case.h if h is None else h, w), case.batch).mean())


CASES = [Case(0.3), Case(0.1), Case(0.05, 0.5)]
W = (0.3, -0.4, 0.7)


@pytest.mark.parametrize("case", CASES)
def test_the_objective_and_its_gradient(case):
    """`losses` has the value of the objective; the sign of its gradient is reversed for the dual."""
    p = {name: value.requires_grad_() for name, value in point(case.h, W).items()}
    loss = Scored().losses(p, case.batch).mean()
    assert float(loss.detach()) == pytest.approx(slow.loss(case.h, case.positive, W, case.prior), rel=TOLERANCE)
    gradients = dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))
    dh, dw = slow.gradient(case.h, case.positive, W, case.prior)
    np.testing.assert_allclose(gradients["primal.h"], dh, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose([float(gradients[n]) for n in NAMES], dw * (1, 1, -1), rtol=TOLERANCE, atol=TOLERANCE)


def test_turning_the_sign_keeps_the_value():
    """Values are equal to the bit, also in float32; under vmap the gradients are those of one client at a time."""
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reversed_dual({"dual.w": v})["dual.w"], v)
    case = CASES[0]
    one = {name: torch.stack([value, 2 * value]).requires_grad_() for name, value in point(case.h, W).items()}
    losses = vmap(lambda p: Scored().losses(p, case.batch).mean())(one)
    together = torch.autograd.grad(losses.sum(), list(one.values()))
    for i in range(2):
        alone = {name: value[i].detach().requires_grad_() for name, value in one.items()}
        each = torch.autograd.grad(Scored().losses(alone, case.batch).mean(), list(alone.values()))
        for a, b in zip(together, each, strict=True):
            torch.testing.assert_close(a[i], b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_t1_the_three_numbers(case):
    """At `optimum` the gradient in w1, w2, w3 is zero, also if the share in the data is not pi; F is concave in w3."""
    w = optimum(case.h, case.positive, case.prior)
    np.testing.assert_allclose(w, slow.saddle(case.h, case.positive, case.prior), rtol=TOLERANCE)
    p = {name: value.requires_grad_() for name, value in point(case.h, w).items()}
    loss = Scored().objectives(p, case.batch).mean()
    gradients = torch.autograd.grad(loss, [p[name] for name in NAMES])
    np.testing.assert_allclose([float(g) for g in gradients], 0, atol=TOLERANCE)
    for place, curvature in enumerate(slow.curvatures(case.positive, case.prior)):
        there = np.array(w)
        there[place] += 0.5
        assert mean(case, there) - mean(case, w) == pytest.approx(curvature / 8, rel=1e-9)


def test_t1_the_value():
    """min max F is pi (1 - pi) (V+ + V- + (1 + m- - m+)^2 - 1), and the mean of the square loss over pairs."""
    case = CASES[0]
    best = mean(case, optimum(case.h, case.positive, case.prior))
    assert best == pytest.approx(slow.value(case.h, case.positive), rel=TOLERANCE)
    assert best == pytest.approx(slow.pairwise(case.h, case.positive), rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_t1_aucm(case):
    """F(w3) + pi (1 - pi) is Yuan et al.'s loss at alpha = 1 + w3, margin 1, where the data's share is pi. Else the
    margin's term stands as it is: the identity is pointwise in the variables."""
    w1, w2, w3 = W
    other = slow.aucm(case.h, case.positive, w1, w2, 1 + w3, case.prior)
    assert mean(case, W) + case.prior * (1 - case.prior) == pytest.approx(other, rel=TOLERANCE)


# --- data -------------------------------------------------------------------------------------------------------------
def made(prior="global", partition=None, **settings):
    return Auc(Digits(Logistic(), partition or PositiveRatio((0.05, 0.08, 0.1), positive=3)), 3, prior, **settings)


def shares(split):
    positive = split.train["label"] == 3
    own = [positive[rows].mean() for rows in np.split(split.client_index.rows, split.client_index.offsets[1:-1])]
    return np.array(own), positive[split.client_index.rows].mean()


def test_pi_is_that_of_all_clients_together():
    split = made().split(0, 3)
    _, pooled = shares(split)
    assert set(split.train["prior"]) == set(split.test["prior"]) == {pooled}


def test_pi_is_each_clients_own():
    split = made("local").split(0, 3)
    own, pooled = shares(split)
    index = split.client_index
    for i in range(3):
        rows = index.rows[index.offsets[i] : index.offsets[i + 1]]
        assert set(split.train["prior"][rows]) == {own[i]}
    assert set(split.test["prior"]) == {pooled}


def test_pooled_share_of_the_papers_ratios():
    """0.13039 for equal numbers of negatives, not the ratios' mean of 0.125: 10,000 even labels leave some 625
    negatives a client, whose numbers differ by 4 %, and so does a ratio's weight: 5e-3 is above that."""
    labels = np.random.default_rng(0).integers(0, 2, 10_000)
    own, pooled = priors(labels == 1, PositiveRatio(RATIOS).deal(labels, 8, 0))
    np.testing.assert_allclose(own, RATIOS, atol=2e-3)
    assert slow.pooled_prior(RATIOS) == pytest.approx(0.13039, abs=1e-5)
    assert pooled == pytest.approx(0.13039, abs=5e-3)


def test_one_class_alone_is_refused():
    class Alone(Dirichlet):
        def deal(self, labels, clients, seed):
            return ClientIndex.of([np.flatnonzero(labels == 3), np.flatnonzero(labels != 3)])

    workload = made("local", partition=Alone(1.0))
    with pytest.raises(ValueError, match="both classes must occur where pi is taken, got a share of 1 positives in"):
        workload.split(0, 2)
    assert replace(workload, prior="global").split(0, 2).test["prior"][0] < 1


def test_a_client_without_rows_has_no_share():
    """The engine refuses it in its own sentence; here it must not end in an IndexError, nor borrow another's row."""
    own, pooled = priors(np.array([True, False, True]), ClientIndex(np.array([0, 1, 1, 3, 3]), np.arange(3)))
    np.testing.assert_array_equal(own, [1, np.nan, 0.5, np.nan])
    assert pooled == 2 / 3


@pytest.mark.parametrize("positive", [True, False])
def test_a_test_set_of_one_class_has_no_auc(positive):
    columns = {"score": np.arange(3.0), "positive": np.full(3, positive)}
    assert made().summary({"w1": 0.0, "w2": 0.0, "w3": 0.0}, columns) == {}


REFUSED = [
    ({"of": Digits(Logistic()), "positive": 10}, "0 <= positive < 10 must hold, got positive=10"),
    ({"positive": 4}, "positive must be the same as in the partition, got 4 and 3"),
    ({"score": "rank"}, "score must be one of softmax, sigmoid, logit, got 'rank'"),
    ({"prior": "batch"}, "prior must be one of global, local, got 'batch'"),
    ({"of": Quadratic()}, "of must be a classification workload, or one with other rows around it"),
    ({"of": GradientsFlipped(Digits())}, "got GradientsFlipped"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_settings_that_are_refused(change, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        replace(made(), **change).check()


def test_by_name():
    built = Registry().build("WORKLOADS", {"name": "auc", "of": {"name": "digits", "model": "logistic"}}, "workload")
    assert built == Auc(Digits(Logistic()))
    with pytest.raises(ConfigError, match=r"workload: of must be a classification workload, or .* got Saddle"):
        Registry().build("WORKLOADS", {"name": "auc", "of": "saddle"}, "workload")


@pytest.mark.parametrize("name", ["sentiment140", "yelp", "sst2"])
def test_the_papers_sets(name, data_root):
    """Each client has its ratio, to the rounding down of a count, one row of 120 and more; pi is the pooled one, as the
    numbers of negatives are nearly equal: within 5 %, which is sqrt(1 / 400)."""
    rare = {"name": "positive_ratio", "ratios": list(RATIOS)}
    text = {"name": name, "data_root": data_root, "model": {"name": "rnn", "hidden": 4, "layers": 1}, "partition": rare}
    workload = Registry().build("WORKLOADS", {"name": "auc", "of": text}, "workload")
    split = workload.split(0, 8)
    own, pooled = priors(split.train["label"] == 1, split.client_index)
    assert split.client_index.sizes.min() > 120
    np.testing.assert_allclose(own, RATIOS, atol=1 / 120)
    assert pooled == split.test["prior"][0] == pytest.approx(0.13039, rel=0.05)
    assert 0.3 < (split.test["label"] == 1).mean() < 0.9, "the test set is as it was"


# --- the report -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "logit"])
def test_report(score):
    """AUC and the three numbers against scikit-learn and the closed form, over the whole test set."""
    workload = made(score=score)
    split = workload.split(0, 3)
    p = {name: value.double() for name, value in workload.init(0).items()}
    p |= {"primal.w1": torch.tensor(0.5).double(), "dual.w3": torch.tensor(-0.25).double()}
    batch = {name: torch.from_numpy(column) for name, column in split.test.items()}
    report = {name: column.numpy() for name, column in workload.report(p, batch).items()}
    means = {name: column.mean() for name, column in report.items() if name not in workload.whole}
    found = workload.summary(means, {name: report[name] for name in workload.whole})
    logits = workload.logits(p, batch)
    h = {"softmax": logits.softmax(-1)[:, 3], "sigmoid": logits[:, 3].sigmoid(), "logit": logits[:, 3]}[score].numpy()
    positive = split.test["label"] == 3
    assert found["auc"] == pytest.approx(roc_auc_score(positive, h), rel=TOLERANCE)
    wanted = np.abs(np.array([0.5, 0.0, -0.25]) - slow.saddle(h, positive)).max()
    assert found["w_gap"] == pytest.approx(wanted, rel=1e-9)
    assert means["loss"] == pytest.approx(slow.loss(h, positive, (0.5, 0.0, -0.25), batch["prior"][0].item()), rel=1e-9)
