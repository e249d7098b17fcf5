"""Quadratics: the optimum is right, the report is exact, the noise is as documented, alone and in a block."""

import math

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from fedfleet.workloads import counted
from fedfleet.workloads.problems.quadratic import Quadratic

CLIENTS = 7


def columns(rows) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(values)) for name, values in rows.items()}


def objective(workload: Quadratic, x: torch.Tensor, clients: int = CLIENTS) -> torch.Tensor:
    """The mean over clients, one example after the other; the report computes it in closed form."""
    batch = columns(workload.split(0, clients).train)
    return workload.losses({"x": x}, {**batch, "key": counted.key(0)}).mean()


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e4])
@pytest.mark.parametrize("dim", [1, 2, 10])
def test_the_optimum_is_stationary(dim, condition):
    """The system is solved to about condition * 1e-16, gradients are smaller by the curvature."""
    workload = Quadratic(dim, condition=condition)
    x = torch.from_numpy(workload.optimum(0, CLIENTS)).requires_grad_()
    (gradient,) = torch.autograd.grad(objective(workload, x), x)
    assert gradient.abs().max() < 1e-12


def test_the_report_is_exact():
    workload = Quadratic(5, noise=0.0)
    x = torch.linspace(-3, 2, 5, dtype=torch.float64).requires_grad_()
    value = objective(workload, x)
    (gradient,) = torch.autograd.grad(value, x)
    value, x = value.detach(), x.detach()
    optimum = torch.from_numpy(workload.optimum(0, CLIENTS))
    report = {k: float(v) for k, v in workload.report({"x": x}, columns(workload.split(0, CLIENTS).test)).items()}
    assert report["loss"] == pytest.approx(float(value), rel=1e-12)
    assert report["excess"] == pytest.approx(float(value - objective(workload, optimum)), rel=1e-12)
    assert report["distance"] == pytest.approx(float((x - optimum).norm()), rel=1e-12)
    assert report["gradient_norm2"] == pytest.approx(float(gradient.square().sum()), rel=1e-12)


def test_a_matrix_is_its_columns():
    """Losses are sums over the columns, each with its own b_i; the report's trace norm is numpy's."""
    workload = Quadratic(4, columns=3)
    system = workload.system(0, CLIENTS)
    x = torch.linspace(-3, 2, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    value = objective(workload, x)
    by_column = [((system.a @ x.detach().numpy()[:, j] - system.b[:, :, j]) ** 2).sum(-1) / 2 for j in range(3)]
    assert float(value.detach()) == pytest.approx(np.sum(by_column, axis=0).mean(), rel=1e-12)
    gradient = torch.autograd.grad(value, x)[0].numpy()
    report = {
        k: float(v) for k, v in workload.report({"x": x.detach()}, columns(workload.split(0, CLIENTS).test)).items()
    }
    assert report["loss"] == pytest.approx(float(value.detach()), rel=1e-12)
    assert report["gradient_norm2"] == pytest.approx((gradient**2).sum(), rel=1e-12)
    assert report["gradient_trace_norm"] == pytest.approx(np.linalg.norm(gradient, "nuc"), rel=1e-12)
    for order, name in ((1, "nuc"), (2, "fro"), (math.inf, 2)):
        found = Quadratic(4, columns=3, schatten=order).report(
            {"x": x.detach()}, columns(workload.split(0, CLIENTS).test)
        )
        assert float(found["gradient_schatten_norm"]) == pytest.approx(np.linalg.norm(gradient, name), rel=1e-12)
    squares = np.linalg.eigvalsh(gradient.T @ gradient)  # of the singular values
    for order in (1.3, 1.5, 3.0):
        found = Quadratic(4, columns=3, schatten=order).report(
            {"x": x.detach()}, columns(workload.split(0, CLIENTS).test)
        )
        assert float(found["gradient_schatten_norm"]) == pytest.approx(
            (squares ** (order / 2)).sum() ** (1 / order), rel=1e-9
        )
    for bad, told in (({"columns": 3, "schatten": 0.5}, "schatten >= 1"), ({"schatten": 2.0}, "set columns")):
        with pytest.raises(ValueError, match=told):
            Quadratic(4, **bad)
    best = torch.from_numpy(workload.optimum(0, CLIENTS)).requires_grad_()
    assert torch.autograd.grad(objective(workload, best), best)[0].abs().max() < 1e-12
    assert report["distance"] == pytest.approx(float((x - best).norm().detach()), rel=1e-12)


@pytest.mark.parametrize(
    ("order", "norm"),
    [(1.0, 7.0), (1.5, (3 * 3**0.5 + 8) ** (2 / 3)), (2.0, 5.0), (3.0, 91 ** (1 / 3)), (math.inf, 4.0)],
)
def test_schattens_norms_by_hand(order, norm):
    """Singular values 3 and 4: 3 + 4, (3^1.5 + 4^1.5)^(2/3), (9 + 16)^(1/2), (27 + 64)^(1/3), 4."""
    x = torch.tensor([[0.0, -4.0], [3.0, 0.0]], dtype=torch.float64)
    batch = columns({"hessian": np.eye(2)[None], "optimum": np.zeros((1, 2, 2)), "floor": np.zeros(1)})
    report = Quadratic(2, columns=2, schatten=order).report({"x": x}, batch)
    assert float(report["gradient_schatten_norm"]) == pytest.approx(norm, rel=1e-15)
    assert float(report["gradient_trace_norm"]) == pytest.approx(7.0, rel=1e-15)


def test_every_entry_of_a_matrix_has_noise_of_its_own():
    workload = Quadratic(4, noise=1.0, columns=3)
    batch = {"a": torch.eye(4).expand(2, 4, 4), "b": torch.zeros(2, 4, 3), "key": counted.key(0)}
    x = torch.zeros(4, 3)
    drawn = gradient_of(workload, x, batch)
    assert drawn.unique().numel() == 12
    torch.testing.assert_close(drawn.flatten(), workload._xi(batch, x).mean(0))


def test_curvatures_span_the_condition_number_in_different_directions():
    a = Quadratic(4, condition=50.0).system(0, 3).a
    hessians = np.einsum("nki,nkj->nij", a, a)
    for spectrum in np.linalg.eigvalsh(hessians):
        assert spectrum == pytest.approx([1 / 50, 50 ** (-2 / 3), 50 ** (-1 / 3), 1], rel=1e-10)
    assert np.abs(hessians[0] - hessians[1]).max() > 0.1


def test_without_heterogeneity_all_clients_share_the_optimum():
    workload = Quadratic(heterogeneity=0.0)
    assert float(objective(workload, torch.from_numpy(workload.optimum(0, CLIENTS)))) < 1e-24


def test_a_client_is_the_same_among_few_and_many():
    few, many = Quadratic().system(3, 2), Quadratic().system(3, 50)
    assert np.array_equal(few.a, many.a[:2])
    assert np.array_equal(few.b, many.b[:2])
    assert not np.array_equal(few.b, Quadratic().system(4, 2).b)


def test_the_counterexample():
    """f1 = x^2/2, f2 = (x + 4)^2/2 at x = -1: losses 1/2 and 9/2, gradients -1 and 3, optimum -2, F = 2.5 there 2."""
    workload = Quadratic(preset="counterexample")
    split = workload.split(0, 2)
    x = workload.init(0)["x"]
    assert x.tolist() == [-1.0]
    losses = workload.losses({"x": x}, {**columns(split.train), "key": counted.key(0)})
    assert losses.tolist() == [0.5, 4.5]
    report = workload.report({"x": x}, columns(split.test))
    assert {k: v.item() for k, v in report.items()} == {
        "loss": 2.5,
        "excess": 0.5,
        "distance": 1.0,
        "gradient_norm2": 1.0,
    }
    with pytest.raises(ValueError, match=r"clients=3; set federation.clients=2"):
        workload.split(0, 3)


def gradient_of(workload: Quadratic, x: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return grad(lambda x: workload.losses({"x": x}, batch).mean())(x)


def test_gradient_noise_has_mean_zero_and_the_stated_deviation():
    """20,000 draws of 3 entries, n = 60,000; 5 deviations: noise / sqrt(n), noise / sqrt(2n)."""
    noisy, clean = Quadratic(3, noise=0.7), Quadratic(3)
    batch = columns({name: rows[:1] for name, rows in noisy.split(0, CLIENTS).train.items()})
    x, keys = torch.ones(3, dtype=torch.float64), counted.key(0, "step", torch.arange(20_000))
    drawn = vmap(lambda key: gradient_of(noisy, x, {**batch, "key": key}))(keys)
    noise = (drawn - gradient_of(clean, x, {**batch, "key": keys[0]})).flatten()
    assert abs(float(noise.mean())) < 5 * 0.7 / 60_000**0.5
    assert abs(float(noise.std()) - 0.7) < 5 * 0.7 / 120_000**0.5


def test_noise_is_the_same_alone_and_in_a_block_and_in_a_padded_batch():
    """Bit for bit in the draws; gradients to the rounding of 4-term sums."""
    workload = Quadratic(4, noise=1.0)
    train = columns(workload.split(0, CLIENTS).train)
    keys = counted.key(0, "step", torch.arange(CLIENTS))
    x = torch.ones(4, dtype=torch.float64)
    block = vmap(lambda a, b, key: gradient_of(workload, x, {"a": a[None], "b": b[None], "key": key}))
    together = block(train["a"], train["b"], keys)
    for i in range(CLIENTS):
        one = {"a": train["a"][i : i + 1], "b": train["b"][i : i + 1], "key": keys[i]}
        assert torch.allclose(gradient_of(workload, x, one), together[i], rtol=1e-14, atol=1e-14)
        padded = {"a": one["a"].expand(5, 4, 4), "b": one["b"].expand(5, 4), "key": keys[i]}
        assert torch.equal(workload._xi(padded, x)[:1], workload._xi(one, x))


def test_examples_of_one_batch_have_noise_of_their_own():
    workload = Quadratic(4, noise=1.0)
    batch = {"b": torch.zeros(3, 4), "key": counted.key(0)}
    assert workload._xi(batch, torch.zeros(4)).unique().numel() == 12


def test_start_and_dtype():
    assert Quadratic(3, start=0.1).init(0)["x"].tolist() == [0.1] * 3
    assert (
        Quadratic(3, noise=1.0)
        .losses({"x": torch.zeros(3)}, {**columns(Quadratic(3).split(0, 2).train), "key": counted.key(0)})
        .dtype
        == torch.float32
    )


@pytest.mark.parametrize(
    "settings", [{"dim": 0}, {"heterogeneity": -1.0}, {"condition": 0.5}, {"noise": float("nan")}, {"preset": "other"}]
)
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        Quadratic(**settings)
