"""Quadratic saddles: gradients and reports against numpy, the known solution, heterogeneity and copies."""

import numpy as np
import pytest
import torch

from fedfleet.workloads import counted
from fedfleet.workloads.problems.saddle import Saddle
from fedfleet.workloads.wrappers import noise
from fedfleet.workloads.wrappers.noisy import Noisy

TOLERANCE = 1e-10
"""float64, sums of some 50 products of numbers below 10, one solution of a 10 x 10 system of condition 10."""


def batch(columns, row=slice(None)):
    return {name: torch.from_numpy(np.ascontiguousarray(column[row])) for name, column in columns.items()}


def at(workload, seed):
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy(rng.normal(size=tuple(v.shape))) for name, v in workload.init(0).items()}


def descent(workload, p, rows):
    """The gradient of the mean loss, name -> tensor."""
    p = {name: value.clone().requires_grad_() for name, value in p.items()}
    loss = workload.losses(p, rows).mean()
    return dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))


@pytest.mark.parametrize("copies", [1, 3])
def test_the_gradient_is_the_field(copies):
    """Of each client, J_i ((u, v) - (p_i, q_i)), over the root of `copies` in each copy: down in both groups."""
    workload = Saddle(dim=4, copies=copies)
    system, rows = workload.system(5, 6), workload.split(5, 6).train
    p = at(workload, 1)
    z = np.concatenate([p[name].sum(0).numpy() for name in ("primal.x", "dual.y")]) / copies**0.5
    for i in range(6):
        found = descent(workload, p, batch(rows, slice(i, i + 1)))
        wanted = system.fields[i] @ (z - system.own[i]) / copies**0.5
        for name, part in (("primal.x", wanted[:4]), ("dual.y", wanted[4:])):
            np.testing.assert_allclose(found[name], np.tile(part, (copies, 1)), rtol=TOLERANCE, atol=TOLERANCE)


def test_the_solution_and_the_report():
    """The mean gradient is zero at the solution; the report at another point agrees with the definitions."""
    workload = Saddle(dim=4, heterogeneity=2.0)
    system, split = workload.system(5, 6), workload.split(5, 6)
    z = system.solution
    p = {"primal.x": torch.from_numpy(z[None, :4]), "dual.y": torch.from_numpy(z[None, 4:])}
    for gradient in descent(workload, p, batch(split.train)).values():
        np.testing.assert_allclose(gradient, 0, atol=TOLERANCE)
    other = at(workload, 2)
    w = np.concatenate([other[name][0].numpy() for name in ("primal.x", "dual.y")])
    report = {name: float(value) for name, value in workload.report(other, batch(split.test)).items()}
    assert report["loss"] == pytest.approx(system.objective(w), rel=1e-9)
    assert report["loss"] == pytest.approx(float(workload.losses(other, batch(split.train)).mean()), rel=1e-9)
    assert report["distance"] == pytest.approx(np.linalg.norm(w - z), rel=1e-9)
    gradient = system.fields.mean(0) @ (w - z)
    assert report["gradient_norm2"] == pytest.approx(gradient @ gradient, rel=1e-9)
    best_v = z[4:] + np.linalg.solve(system.g.mean(0), system.b.T @ (w - z)[:4])
    best_u = z[:4] - np.linalg.solve(system.h.mean(0), system.b @ (w - z)[4:])
    gap = system.objective(np.append(w[:4], best_v)) - system.objective(np.append(best_u, w[4:]))
    assert report["gap"] == pytest.approx(gap, rel=1e-9)
    assert gap > 0


@pytest.mark.parametrize("copies", [1, 3])
def test_the_gradient_of_the_maximum(copies):
    """Central differences of max over v of F(u, v) in numpy, which are exact but for rounding, for it is quadratic."""
    workload = Saddle(dim=4, copies=copies)
    system, split, p = workload.system(5, 6), workload.split(5, 6), at(workload, 2)
    u, field, z = p["primal.x"].sum(0).numpy() / copies**0.5, system.fields.mean(0), system.solution

    def phi(u):
        v = z[4:] - np.linalg.solve(field[4:, 4:], field[4:, :4] @ (u - z[:4]))
        return system.objective(np.concatenate([u, v]))

    slopes = [(phi(u + step) - phi(u - step)) / 2 for step in np.eye(4)]
    found = float(workload.report(p, batch(split.test))["phi_gradient_norm2"])
    assert found == pytest.approx(np.square(slopes).sum(), rel=1e-9)


def test_condition_and_coupling():
    """Eigenvalues of every H_i and G_i run from 1 to 1 / condition; singular values of B are the coupling."""
    system = Saddle(dim=4, condition=50.0, coupling=0.3).system(0, 3)
    for matrix in (*system.h, *system.g):
        np.testing.assert_allclose(np.linalg.eigvalsh(matrix)[[0, -1]], [1 / 50, 1], rtol=1e-9)
    np.testing.assert_allclose(np.linalg.svd(system.b)[1], 0.3, rtol=1e-9)


def test_heterogeneity():
    """Without heterogeneity all clients have the saddle of the mean. A client does not depend on the number of
    clients."""
    alike = Saddle(heterogeneity=0.0).system(3, 5)
    np.testing.assert_allclose(alike.own, np.tile(alike.solution, (5, 1)), atol=TOLERANCE)
    few, many = Saddle().system(3, 5), Saddle().system(3, 9)
    assert np.ptp(few.own, axis=0).min() > 0.1
    np.testing.assert_array_equal(few.h, many.h[:5])
    np.testing.assert_array_equal(few.own, many.own[:5])


def test_copies_are_flat_directions():
    """With copies F is neither strongly convex nor strongly concave, but gradient and distance keep their ratio."""
    workload = Saddle(dim=3, copies=2)
    split = workload.split(0, 4)
    p = at(workload, 0)
    shift = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    moved = {name: value + shift for name, value in p.items()}
    for name, value in workload.report(p, batch(split.test)).items():
        torch.testing.assert_close(value, workload.report(moved, batch(split.test))[name], rtol=1e-9, atol=1e-9)


def test_noise_on_both_groups():
    """With the workload noisy around it, gradients differ by `scale` times one draw, also for the dual; values are
    equal."""
    plain = Saddle(dim=4)
    noisy = Noisy(plain, "pareto", 1.3, 0.5)
    rows = {**batch(plain.split(0, 3).train, slice(0, 1)), "key": torch.tensor(7)}
    p = at(plain, 0)
    quiet, loud = descent(plain, p, rows), descent(noisy, p, rows)
    xi = noise.draw("pareto", 1.3, counted.key(rows["key"], "gradient noise"), 8).view(2, 1, 4)
    for name, drawn in zip(("primal.x", "dual.y"), xi, strict=True):
        torch.testing.assert_close(loud[name] - quiet[name], 0.5 * drawn, rtol=1e-9, atol=1e-9)
    assert torch.equal(noisy.losses(p, rows), plain.losses(p, rows))


@pytest.mark.parametrize(("settings", "said"), [({"condition": 0.5}, "1 <= condition"), ({"copies": 0}, "1 <= copies")])
def test_settings_that_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Saddle(**settings)
