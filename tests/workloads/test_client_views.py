"""Workloads whose clients see images in their own way, or have wrong labels at rates of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedfleet
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.data.fashion_mnist import FashionMnist
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Dirichlet
from fedfleet.workloads.problems.auc import Auc
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.problems.robust import Robust
from fedfleet.workloads.workload import Split
from fedfleet.workloads.wrappers.feature_skew import FeatureSkew, blurred, turned
from fedfleet.workloads.wrappers.label_noise import LabelNoise
from fedfleet.workloads.wrappers.poisoned import LabelFlipped


def own(split: Split) -> list[np.ndarray]:
    return np.split(split.client_index.rows, split.client_index.offsets[1:-1])


# --- images -----------------------------------------------------------------------------------------------------------
def test_quarter_turns_move_pixels_and_change_none():
    plain = Digits(Logistic(), Dirichlet(0.5)).split(0, 10)
    workload = FeatureSkew(Digits(Logistic(), Dirichlet(0.5)), rotate=(0.0, 90.0, 180.0, 270.0))
    split, angle = workload.split(0, 10), workload.differences(0, 10)["rotation, degrees"]
    assert np.unique(angle, return_counts=True)[1].tolist() == [3, 3, 2, 2]
    for client, rows in enumerate(own(split)):
        turns = np.rot90(plain.train["input"][rows], int(angle[client]) // 90, (2, 3))
        assert np.array_equal(split.train["input"][rows], turns)
    assert np.array_equal(split.test["input"], plain.test["input"])
    assert np.array_equal(split.client_index.rows, plain.client_index.rows)


def test_any_other_angle_is_close_to_quarter_turns_and_turns_back():
    """A smooth image: the interpolation of two turns by 30 degrees differs from one by 60 by the curvature, about 1 %
    of the range for waves of 16 pixels; the corners leave the image."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    image = (torch.sin(x / 5) + torch.cos(y / 7)).view(1, 1, 32, 32)
    inside = (slice(None), slice(None), slice(8, 24), slice(8, 24))
    torch.testing.assert_close(turned(image, 89.999)[inside], turned(image, 90.0)[inside], rtol=0, atol=1e-3)
    torch.testing.assert_close(
        turned(turned(image, 30.0), 30.0)[inside], turned(image, 60.0)[inside], rtol=0, atol=0.02
    )
    wide = image[..., :20]
    assert turned(wide, 90.0).shape == wide.shape
    torch.testing.assert_close(turned(wide, 179.999)[inside], turned(wide, 180.0)[inside], rtol=0, atol=1e-3)


def test_a_filter_keeps_the_mean_and_has_its_deviation():
    """The image of a point is the filter itself, cut off where less than 0.3 % of it is left."""
    point = torch.zeros(1, 1, 41, 41)
    point[0, 0, 20, 20] = 1
    seen = blurred(point, 2.0)[0, 0]
    assert float(seen.sum()) == pytest.approx(1, abs=1e-5)
    assert float((seen.sum(0) * (torch.arange(41) - 20) ** 2).sum()) == pytest.approx(4, rel=0.03)
    torch.testing.assert_close(blurred(torch.full((1, 2, 5, 9), 3.0), 1.5), torch.full((1, 2, 5, 9), 3.0))
    assert torch.equal(blurred(point, 0.0), point)


def test_brightness_of_bytes_and_test_rows_seen_by_clients():
    plain = FashionMnist(Logistic(), stand_in=96)
    workload = FeatureSkew(plain, gain=0.5, test="mixed")
    split, before, gain = workload.split(0, 4), plain.split(0, 4), workload.differences(0, 4)["gain"]
    for client, rows in enumerate(own(split)):
        wanted = np.clip(np.rint(before.train["input"][rows] * np.float32(gain[client])), 0, 255)
        assert np.array_equal(split.train["input"][rows], wanted.astype(np.uint8))
    factors = {tuple(a.reshape(-1)[:200]) == tuple(b.reshape(-1)[:200]) for a, b in
               zip(split.test["input"], before.test["input"], strict=True)}  # fmt: skip
    assert False in factors
    again = workload.split(0, 4)
    assert np.array_equal(again.test["input"], split.test["input"])


# --- labels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_wrong_labels_have_the_rates_of_their_clients(kind):
    """Ten clients of 2,000 labels: rates deviate by at most sqrt(.25 / 2000) = .0112; four of that. Of some 3,000 wrong
    labels a ninth deviates by .0057."""
    workload = LabelNoise(FashionMnist(Logistic(), stand_in=20_000), kind, 0.1, 0.6, share=0.5)
    split, rates = workload.split(0, 10), workload.rates(0, 10)
    assert (rates > 0).sum() == 5
    assert ((rates == 0) | ((rates >= 0.1) & (rates <= 0.6))).all()
    moved = (split.train["label"] - split.train["true_label"]) % 10
    found = np.array([(moved[rows] > 0).mean() for rows in own(split)])
    assert np.abs(found - rates).max() < 0.045
    kinds = np.bincount(moved, minlength=10)[1:] / (moved > 0).sum()
    if kind == "pair":
        assert kinds[0] == 1
    else:
        assert np.abs(kinds - 1 / 9).max() < 0.023


def test_reports_are_on_true_labels():
    """Every label is the next class: a model learns to be wrong, which its own rows show as its test rows do."""
    asked = {
        "workload": LabelNoise(Digits(Logistic()), "pair", 1.0, 1.0),
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
        "federation": {"clients": 5, "cohort": 5, "rounds": 5, "local": {"epochs": 2, "batch": 16}},
        "evaluate": {"held_out": 0.2},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    row = fedfleet.run(fedfleet.Experiment.model_validate(asked)).rows[-1]
    assert row["eval/clients/test_accuracy"] < 0.2
    assert row["eval/accuracy"] < 0.2


# --- together, and what is refused ------------------------------------------------------------------------------------
def test_wrappers_go_together():
    inner = FeatureSkew(Digits(Logistic(), Dirichlet(0.5)), rotate=(0.0, 45.0), gain=0.2)
    both = LabelFlipped(LabelNoise(inner), (0,))
    both.check()
    assert both.chained is not None
    assert set(both.differences(0, 6)) == {"rotation, degrees", "gain", "label noise"}
    split = both.split(0, 6)
    assert np.array_equal(split.train["input"], inner.split(0, 6).train["input"])


@pytest.mark.parametrize("problem", [Auc, Robust])
def test_min_max_problems_are_solved_over_other_rows(problem):
    """Training sees the wrong labels and turned images, and the metrics of clients' own rows are on the true labels."""
    noise = LabelNoise(FeatureSkew(Digits(Logistic()), rotate=(0.0, 90.0)), "pair", 1.0, 1.0)
    workload = problem(noise)
    workload.check()
    assert set(workload.differences(0, 6)) == {"rotation, degrees", "label noise"}
    split, inner = workload.split(0, 6), noise.split(0, 6)
    assert np.array_equal(split.train["input"], inner.train["input"])
    x = workload.init(0)
    batch = {name: torch.from_numpy(column[:200]) for name, column in split.train.items()}
    right = {name: column for name, column in batch.items() if name != "true_label"} | {"label": batch["true_label"]}
    plain, found = workload.report(x, right), workload.report(x, batch)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert not torch.equal(workload.losses(x, batch), workload.losses(x, right))
    if problem is Auc:
        wrong = (inner.train["true_label"] + 1) % 10
        assert split.train["prior"][0] == (wrong == 1).mean()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LabelNoise(Digits(), high=1.5), "high=1.5"),
        (lambda: LabelNoise(Digits(), low=0.5, high=0.4), "low=0.5, high=0.4"),
        (lambda: LabelNoise(Digits(), share=-0.1), "share=-0.1"),
        (lambda: LabelNoise(Digits(), "odd"), "kind='odd'"),
        (
            lambda: LabelNoise(Quadratic()).check(),
            "label_noise needs a workload with labels and classes",
        ),
        (lambda: FeatureSkew(Digits(), blur=-1.0), "blur=-1"),
        (lambda: FeatureSkew(Digits(), gain=1.1), "gain=1.1"),
        (lambda: FeatureSkew(Digits(), rotate=(float("nan"),)), "rotate must hold finite angles"),
        (lambda: FeatureSkew(Digits(), test="all"), "test='all'"),
        (lambda: FeatureSkew(Quadratic()).check(), r"feature_skew needs images, .* got inputs of the shape \(10,\)"),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()
