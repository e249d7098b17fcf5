"""The orthogonalisation operator: its properties, and agreement with the numpy reference.

CLOSE: float64 rounding, amplified by at most the slope of a scheme at 0, which is 2e5 for `jordan` after ten iterations
and 2e4 for `polar_express`.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedfleet.algorithms.parts.muon import Schatten
from fedfleet.algorithms.parts.orthogonal import SCHEMES, newton_schulz, schatten, svd
from tests.reference import newton_schulz as reference

SHAPES = [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1)]
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
SCHEME = pytest.mark.parametrize("scheme", SCHEMES)
ITERATIONS = pytest.mark.parametrize("iterations", range(11))
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
torch.set_num_threads(1)


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def rotation(n, seed):
    return torch.linalg.qr(draw(n, n, seed=seed))[0]


def operators(iterations=5):
    """name -> function that orthogonalises, including the exact one."""
    made = {scheme: lambda m, s=scheme: newton_schulz(m, s, iterations) for scheme in SCHEMES}
    return {**made, "svd": svd}


OPERATOR = pytest.mark.parametrize("name", operators())


@SHAPE
@SCHEME
@ITERATIONS
def test_equals_the_reference(scheme, iterations, shape):
    m = draw(*shape)
    expected = reference.orthogonalise(m.numpy(), scheme, iterations)
    torch.testing.assert_close(newton_schulz(m, scheme, iterations), torch.from_numpy(expected), **CLOSE)


@SCHEME
@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-7, 1e-9])
def test_a_small_matrix_is_divided_as_the_scheme_s_source_has_it(scheme, size):
    """On small matrices the guard against division by zero has an effect: Polar Express adds it to the norm, torch uses
    it as a lower bound."""
    m = draw(4, 7)
    m = m * (size / m.norm())
    expected = reference.orthogonalise(m.numpy(), scheme, 5)
    torch.testing.assert_close(newton_schulz(m, scheme, 5), torch.from_numpy(expected), **CLOSE)
    stacked = torch.stack([m, -m])  # the same on three axes, and under vmap
    for out in (newton_schulz(stacked, scheme, 5), torch.func.vmap(lambda a: newton_schulz(a, scheme, 5))(stacked)):
        torch.testing.assert_close(out[0], torch.from_numpy(expected), **CLOSE)


@SCHEME
def test_the_clamp_agrees_with_an_added_eps(scheme):
    """The formula as printed divides by |M| + 1e-7: a relative change of 1e-7 / |M|, amplified by a slope <= 5e2."""
    m = draw(4, 7)
    expected = reference.orthogonalise(m.numpy(), scheme, 5, eps=1e-7)
    torch.testing.assert_close(newton_schulz(m, scheme, 5), torch.from_numpy(expected), rtol=0, atol=5e-5)


@SHAPE
def test_svd_equals_the_reference(shape):
    m = draw(*shape)
    torch.testing.assert_close(svd(m), torch.from_numpy(reference.svd(m.numpy())), **CLOSE)


def test_svd_drops_what_is_below_1e_7_of_the_largest():
    u, v = rotation(4, 1), rotation(6, 2)[:, :4]
    m = u @ torch.diag(torch.tensor([1.0, 0.5, 1e-6, 1e-9], dtype=torch.float64)) @ v.T
    torch.testing.assert_close(svd(m), u[:, :3] @ v[:, :3].T, rtol=0, atol=1e-8)  # 1e-16 / 1e-6 per singular vector


@pytest.mark.parametrize(
    ("scheme", "safety", "cushion"), [("polar_express", 0.0, None), ("polar_express_5", 0.02, 0.02)]
)
def test_tables_come_from_the_generator(scheme, safety, cushion):
    """The relative tolerance is 1e-13, but 1e-10 and 1e-8 for the raw rows 7 and 8, whose intervals are very short."""
    table = np.array(SCHEMES[scheme].triples)
    if scheme == "polar_express":  # the table in use is divided for safety, all but its last row
        table[:-1] *= 1.01 ** np.array([1, 3, 5])
    built = np.array(reference.generate(len(table), cushion=cushion or reference.CUSHION, safety=safety))
    bound = np.array([1e-13] * 6 + [1e-10, 1e-8])[: len(table), None]
    assert (np.abs(built / table - 1) < bound).all()


@SCHEME
@ITERATIONS
def test_coefficients_repeat_the_last(scheme, iterations):
    ours = np.array(SCHEMES[scheme].coefficients(iterations)).reshape(-1, 3)
    expected = np.array(reference.coefficients(scheme, iterations)).reshape(-1, 3)
    np.testing.assert_allclose(ours, expected, rtol=1e-15)


@SHAPE
@OPERATOR
@pytest.mark.parametrize("factor", [1e-4, 3.0, 1e6])
def test_homogeneous(name, shape, factor, monkeypatch):
    """orth(a M) = orth(M) for a > 0, as long as |a M| is above the clamp and nothing is added to it."""
    if name in SCHEMES:
        monkeypatch.setitem(SCHEMES, name, dataclasses.replace(SCHEMES[name], eps=0.0))
    orth, m = operators()[name], draw(*shape)
    torch.testing.assert_close(orth(factor * m), orth(m), **CLOSE)


@SHAPE
@OPERATOR
def test_transposed(name, shape):
    orth, m = operators()[name], draw(*shape)
    torch.testing.assert_close(orth(m.mT), orth(m).mT, **CLOSE)


@SHAPE
@OPERATOR
def test_odd(name, shape):
    orth, m = operators()[name], draw(*shape)
    torch.testing.assert_close(orth(-m), -orth(m), **CLOSE)


@SHAPE
@OPERATOR
def test_orthogonally_equivariant(name, shape):
    orth, m, q, r = operators()[name], draw(*shape), rotation(shape[0], 3), rotation(shape[1], 4)
    torch.testing.assert_close(orth(q @ m @ r.mT), q @ orth(m) @ r.mT, **CLOSE)


@SHAPE
@SCHEME
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("iterations", [0, 5, 10])
def test_zero_maps_to_zero(scheme, shape, dtype, iterations):
    zero = torch.zeros(shape)
    assert torch.equal(newton_schulz(zero, scheme, iterations, dtype), zero)
    assert torch.equal(svd(zero), zero)


@SHAPE
@SCHEME
def test_no_iteration_normalises(scheme, shape):
    """Without iterations the result is M divided by |M|, or by 1.01 |M| + 1e-7 and 1.02 |M| + 1e-6 in the two forms of
    Polar Express."""
    m = draw(*shape)
    expected = m / reference.divisor(float(m.norm()), scheme)
    torch.testing.assert_close(newton_schulz(m, scheme, 0), expected, **CLOSE)


@SHAPE
@ITERATIONS
def test_classic_never_exceeds_spectral_norm_one(iterations, shape):
    for seed in range(5):
        norm = torch.linalg.matrix_norm(newton_schulz(draw(*shape, seed=seed), "classic", iterations), 2)
        assert float(norm) <= 1 + 1e-14


def test_orthogonal_input_starts_at_one_over_root_n():
    q = rotation(6, 7)
    torch.testing.assert_close(newton_schulz(q, "classic", 0), q / 6**0.5, **CLOSE)
    one = torch.tensor(6**-0.5, dtype=torch.float64)
    for triple in reference.coefficients("jordan", 5):
        one = reference.apply(triple, one)
    torch.testing.assert_close(newton_schulz(q, "jordan", 5), one * q, **CLOSE)


@pytest.mark.parametrize(("dtype", "least"), [(None, 0.96), (torch.bfloat16, 0.95)])
@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)], ids=str)
def test_jordan_points_along_the_exact_factor(shape, dtype, least):
    """If all singular values are above 0.01 |M|, they end in [0.68, 1.14], which is an angle of at most arccos(0.96) to
    equal ones."""
    rank, rng = min(shape), np.random.default_rng(8)
    for seed in range(5):
        s = torch.from_numpy(rng.uniform(0.05, 1.0, rank))
        assert s.min() / s.norm() >= 0.01
        m = rotation(shape[0], seed)[:, :rank] @ torch.diag(s) @ rotation(shape[1], seed + 50)[:, :rank].T
        out, exact = newton_schulz(m, "jordan", 5, dtype), svd(m)
        assert float((out * exact).sum() / out.norm() / exact.norm()) >= least


@SHAPE
@OPERATOR
def test_together_equals_alone(name, shape):
    """A stack of matrices, vmap, and vmap over stacks (clients x layers) give the same as one matrix at a time."""
    orth, m = operators()[name], draw(4, 3, *shape)
    alone = torch.stack([torch.stack([orth(layer) for layer in client]) for client in m])
    torch.testing.assert_close(orth(m), alone, **CLOSE)
    torch.testing.assert_close(torch.func.vmap(orth)(m), alone, **CLOSE)
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(orth))(m), alone, **CLOSE)
    torch.testing.assert_close(torch.func.vmap(orth, in_dims=1, out_dims=1)(m), alone, **CLOSE)


@SHAPE
def test_the_callers_tensor_is_left_alone(shape):
    m, dim = draw(*shape).float(), draw(*shape).float()
    for iterations in (0, 5):
        out = newton_schulz(m, "jordan", iterations, torch.bfloat16)
        assert out.dtype == m.dtype
        assert torch.equal(m, dim)
        assert out.data_ptr() != m.data_ptr()


# --- other norms ------------------------------------------------------------------------------------------------------
@SHAPE
@pytest.mark.parametrize("order", [1.0, 1.2, 2.0, 5.0, math.inf])
def test_steps_for_schattens_norms(order, shape):
    """D has the norm 1, and <D, M> is the dual norm of M, the most that it can be; singular values by numpy."""
    dual = {1.0: math.inf, math.inf: 1.0}.get(order) or order / (order - 1)
    many = draw(2, *shape)
    for m, d in zip(many, schatten(many, order), strict=True):
        singular = [np.linalg.svd(one.numpy(), compute_uv=False) for one in (m, d)]
        assert np.linalg.norm(singular[1], order) == pytest.approx(1, abs=1e-12)
        assert float((d * m).sum()) == pytest.approx(np.linalg.norm(singular[0], dual), rel=1e-12)


def test_named_norms_among_schattens():
    m = draw(5, 3)
    u, _, vh = np.linalg.svd(m.numpy())
    torch.testing.assert_close(schatten(m, 1.0), torch.from_numpy(np.outer(u[:, 0], vh[0])), **CLOSE)
    torch.testing.assert_close(schatten(m, 2.0), m / m.norm(), **CLOSE)
    assert torch.equal(schatten(m, math.inf), svd(m))
    for order in (1.0, 1.5, math.inf):
        assert torch.equal(schatten(torch.zeros(3, 2), order), torch.zeros(3, 2))
    assert float(torch.linalg.svdvals(schatten(torch.eye(2), 1.0)).sum()) == pytest.approx(1)


@pytest.mark.parametrize("order", [0.5, math.nan])
def test_what_is_no_norm_is_refused(order):
    with pytest.raises(ValueError, match="order >= 1 must hold, got order="):
        Schatten(order)
