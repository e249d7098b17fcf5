"""The slow reference of the low-rank methods: identities that follow from its equations alone.

TOLERANCE as in `keyed`. DIFFERENCE: central differences of width 1e-6 of values near 1 are off by 1e-10 for rounding
and by 1e-12 times a third derivative for curvature; 1e-6 is far above both.
"""

from fractions import Fraction

import numpy as np
import pytest

from tests.algorithms.keyed import COHORTS, LAYERS, PROBLEM, STEPS, TOLERANCE, play, same, same_paths, uniform
from tests.algorithms.problems import SHAPES, Quadratic, everyone, flatten, unflatten
from tests.reference import codecs, compression, lowrank, methods, ranks, rules
from tests.reference.kronecker import Blocks

DIFFERENCE = 1e-6
RATIO = Fraction(1, 32)


DRAW = uniform(-0.7, 0.7)


def matrices(rank=2, reshape="raw"):
    return {layer: lowrank.Matrix(rank, reshape) for layer in LAYERS}


def kroneckers(layout="stacked"):
    return {layer: Blocks(4, 2, layout) for layer in LAYERS}


FORMS = {
    "matrix, raw": lowrank.Matrix(2),
    "matrix, permuted": lowrank.Matrix(2, "permuted"),
    "blocks": Blocks(3, 2),
    "blocks, permuted": Blocks(2, 3, reshape="permuted"),
    "grid": Blocks(4, 2, "grid"),
    "hadamard matrix": lowrank.HadamardMatrix(2),
    "hadamard tensor": lowrank.HadamardTensor(2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (5, 4)])
def test_back_is_the_derivative(form, shape):
    if form == "hadamard tensor" and len(shape) == 2:
        shape = (3, 2, 1, 3)
    if form == "blocks, permuted" and len(shape) == 2:
        shape = (2, 1, 3, 3)
    form, rng = FORMS[form], np.random.default_rng(0)
    sizes = form.shapes(shape)
    point, way = (unflatten(rng.normal(size=500), sizes) for _ in range(2))
    g = rng.normal(size=shape)

    def value(step):
        return (g * form.product(*(point[name] + step * way[name] for name in sizes), shape)).sum()

    slope = sum((b * way[name]).sum() for name, b in zip(sizes, form.back(g, *point.values()), strict=True))
    assert slope == pytest.approx((value(1e-6) - value(-1e-6)) / 2e-6, rel=DIFFERENCE, abs=DIFFERENCE)


def test_permuted_product_is_a_row_convolution_then_a_column_convolution():
    """V as a 1 x 3 convolution i -> r, then U as a 3 x 1 convolution r -> o; raw and permuted are not the same."""
    rng, shape = np.random.default_rng(1), (4, 2, 3, 3)
    u, v, image = rng.normal(size=(12, 2)), rng.normal(size=(6, 2)), rng.normal(size=(2, 5, 6))

    def convolve(image, w):
        o, _, kh, kw = w.shape
        out = np.zeros((o, image.shape[1] - kh + 1, image.shape[2] - kw + 1))
        for y, x in np.ndindex(*out.shape[1:]):
            out[:, y, x] = (w * image[:, y : y + kh, x : x + kw]).sum((1, 2, 3))
        return out

    row = np.transpose(v.reshape(2, 3, 2), (2, 0, 1))[:, :, None, :]
    column = np.transpose(u.reshape(4, 3, 2), (0, 2, 1))[:, :, :, None]
    whole = lowrank.Matrix(2, "permuted").product(u, v, shape)
    np.testing.assert_allclose(convolve(convolve(image, row), column), convolve(image, whole), atol=TOLERANCE)
    assert not np.allclose(whole, lowrank.Matrix(2).product(u, v, shape))


@pytest.mark.parametrize("reshape", ["raw", "permuted"])
def test_fedmud_from_zero_without_reset_is_fedlmt(reshape):
    """L1."""
    start = {name: value * (name not in LAYERS) for name, value in PROBLEM.start.items()}
    arguments = (PROBLEM.gradient, start, PROBLEM.clients, COHORTS, STEPS, rules.Sgd(0.05), matrices(2, reshape), DRAW)
    mud = compression.fedmud(*arguments, reset=len(COHORTS) + 1, init="random")
    same_paths(mud.x, compression.fedlmt(*arguments).x)


COUPLED = [("mud", False), ("aad", True), ("frozen", True)]


@pytest.mark.parametrize("forms", [matrices(), kroneckers(), kroneckers("grid")], ids=["matrix", "blocks", "grid"])
@pytest.mark.parametrize(("couple", "exact"), COUPLED)
def test_mean_of_factors_against_mean_of_changes(couple, exact, forms):
    """L2, with unequal weights; plain products differ by the covariance of the factors."""
    path = play(compression.fedmud, forms, DRAW, couple=couple, weights=lambda r, i: i + 1)
    _, fixed = compression.redraw(DRAW, 0, PROBLEM.start, forms, couple, "zero")
    parts = [(i + 1) / sum(j + 1 for j in COHORTS[0]) for i in COHORTS[0]]
    for layer, form in forms.items():
        shape = SHAPES[layer]
        each = [compression.change(layer, form, shape, couple, p, fixed) for p in path.clients[0]]
        mean = sum(w * c for w, c in zip(parts, each, strict=True))
        of_mean = compression.change(layer, form, shape, couple, path.trained[0], fixed)
        error = np.zeros(shape)
        if not exact:
            error = compression.aggregation_error(path.clients[0], parts, layer, form, shape)
            assert np.abs(error).max() > 1e-5
        np.testing.assert_allclose(mean - of_mean, error, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("couple", ["mud", "aad", "frozen"])
def test_merge_leaves_the_model(couple):
    """L3: W after a merge is the model before it; between merges W does not change."""
    path = play(compression.fedmud, matrices(), DRAW, couple=couple, reset=2)
    for r in range(len(COHORTS)):
        if r % 2:
            same(path.frozen[r], path.x[r], LAYERS)
        else:
            same(path.frozen[r], PROBLEM.start if r == 0 else path.frozen[r - 1], LAYERS)
            assert not np.allclose(path.frozen[r]["W"], path.x[r]["W"])


def test_one_block_is_the_kronecker_product():
    """L4; in addition, rank(U (x) V) = rank U rank V."""
    rng = np.random.default_rng(2)
    u, v = rng.normal(size=(1, 3, 3)), rng.normal(size=(1, 3, 3))
    u[0] = np.outer(u[0, 0], u[0, 1]) + np.outer(u[0, 1], u[0, 0])
    for layout in ("stacked", "grid"):
        w = Blocks(1, 3, layout).product(u, v, (9, 9))
        entries = [[u[0, a // 3, b // 3] * v[0, a % 3, b % 3] for b in range(9)] for a in range(9)]
        np.testing.assert_allclose(w, entries, atol=TOLERANCE)
        assert np.linalg.matrix_rank(w) == 2 * 3
        assert sum(np.prod(s) for s in Blocks(1, 3, layout).shapes((9, 9)).values()) == 2 * 9


def test_layouts_of_blocks():
    """Stacked: row 0 of the matrix is the start of block 0. Grid: it goes on in block 1 after z^2 entries."""
    rng = np.random.default_rng(5)
    u, v = rng.normal(size=(4, 2, 2)), rng.normal(size=(4, 2, 2))
    block = [np.kron(u[b], v[b]) for b in range(4)]
    stacked, grid = (Blocks(4, 2, layout).product(u, v, (8, 8)) for layout in ("stacked", "grid"))
    np.testing.assert_array_equal(stacked[:2].reshape(4, 4), block[0])
    np.testing.assert_array_equal(grid, np.block([block[:2], block[2:]]))
    cut = Blocks(4, 2, "grid").product(u, v, (6, 9))
    np.testing.assert_array_equal(cut.reshape(-1), grid.reshape(-1)[:54])


def orthogonal(r, i, layer, name, shape):
    return np.linalg.qr(DRAW(r, i, layer, name, shape))[0]


class Square:
    """A problem with square matrices and a vector; the gradients of the matrices are multiplied by `times`."""

    def __init__(self, times=1.0):
        self.inner, self.times, self.clients = Quadratic(small=True), times, 5
        self.start = self.inner.start

    def gradient(self, i, x, r, k):
        g = self.inner.gradient(i, x, r, k)
        return g | {"W": self.times * g["W"]}


@pytest.mark.parametrize(("couple", "times"), [("frozen", 1.0), ("aad", 2.0)])
@pytest.mark.parametrize("reset", [1, 4])
def test_square_orthogonal_factors_are_plain_sgd(couple, times, reset):
    """L5: d(change) = -lr U~ U~^T G, and -lr (G V~ V~^T + U~ U~^T G) for both together."""
    path = play(compression.fedmud, {"W": lowrank.Matrix(2)}, orthogonal, problem=Square(), couple=couple, reset=reset)
    same_paths(path.x, play(methods.fedavg, problem=Square(times)).x)


@pytest.mark.parametrize("forms", [matrices(), kroneckers()], ids=["matrix", "blocks"])
@pytest.mark.parametrize("couple", ["aad", "frozen"])
def test_only_rate_times_width_squared_counts(couple, forms):
    """L6: factors with 3 times the spread and a ninth of the rate. The vector b, for which only the rate matters, is
    kept fixed."""

    class Held(Quadratic):
        def gradient(self, i, x, r, k):
            return super().gradient(i, x, r, k) | {"b": np.zeros(3)}

    narrow = play(compression.fedmud, forms, DRAW, couple=couple, problem=Held())
    wide = play(compression.fedmud, forms, uniform(-2.1, 2.1), couple=couple, problem=Held(), rule=rules.Sgd(0.05 / 9))
    same_paths(narrow.x, wide.x)


def test_frobenius_decay_is_the_derivative():
    rng, shapes = np.random.default_rng(6), {"W": (3, 4), "kernel": (2, 3, 2, 2)}
    forms = {name: lowrank.Matrix(2, "permuted") for name in shapes}
    sizes = {f"{name}.{f}": size for name in shapes for f, size in forms[name].shapes(shapes[name]).items()}
    p, way = (unflatten(rng.normal(size=200), sizes) for _ in range(2))
    zero = {name: np.zeros(shape) for name, shape in shapes.items()}
    g = compression.direct_back(p, zero, shapes, forms, 0.3)

    def decay(step):
        x = compression.direct({key: p[key] + step * way[key] for key in p}, shapes, forms)
        return 0.3 * sum((w * w).sum() for w in x.values())

    slope = sum((g[key] * way[key]).sum() for key in p)
    assert slope == pytest.approx((decay(1e-6) - decay(-1e-6)) / 2e-6, rel=DIFFERENCE)


def test_fedhm_without_steps_truncates():
    """L7: full rank keeps W; with rank 1 the difference has exactly the other singular values."""
    still = (COHORTS, dict.fromkeys(STEPS, 0))
    for layer, least in {"W": 3, "V": 3, "U": 3, "kernel": 4}.items():
        form = lowrank.Matrix(least, "permuted")
        same(play(compression.fedhm, {layer: form}, where=still).x[-1], PROBLEM.start)
        cut = play(compression.fedhm, {layer: lowrank.Matrix(1, "permuted")}, where=still).x[-1]
        lost = lowrank.matrix(PROBLEM.start[layer] - cut[layer], "permuted")
        values = np.linalg.svd(lowrank.matrix(PROBLEM.start[layer], "permuted"), compute_uv=False)
        assert np.linalg.norm(lost) == pytest.approx(np.linalg.norm(values[1:]), rel=TOLERANCE)


def test_fedhm_averages_products():
    path = play(compression.fedhm, matrices(2, "permuted"), weights=lambda r, i: i + 1)
    total = sum(i + 1 for i in COHORTS[0])
    products = [lowrank.Matrix(2, "permuted").product(p["W.U"], p["W.V"], (3, 4)) for p in path.clients[0]]
    mean = sum((i + 1) / total * w for i, w in zip(COHORTS[0], products, strict=True))
    np.testing.assert_allclose(path.x[0]["W"], mean, rtol=TOLERANCE)


def test_fedpara_with_ones_is_low_rank():
    """L8: if X2 Y2^T is all ones, the weight is X1 Y1^T; also the ranks and the numbers of parameters."""
    rng, shape = np.random.default_rng(3), (10, 12)
    form = lowrank.HadamardMatrix(2)
    x1, y1, x2, y2 = unflatten(rng.normal(size=500), form.shapes(shape)).values()
    half_x, half_y = np.full((10, 2), 0.5), np.ones((12, 2))
    np.testing.assert_allclose(form.product(x1, y1, half_x, half_y, shape), x1 @ y1.T, rtol=TOLERANCE)
    assert np.linalg.matrix_rank(form.product(x1, y1, x2, y2, shape)) == 4
    tensor = lowrank.HadamardTensor(36).shapes((256, 256, 3, 3))
    assert ranks.para_rank((256, 256, 3, 3), Fraction(1, 10)) == 36
    assert sum(np.prod(size) for size in tensor.values()) == 60192 == ranks.para_sent(0.1)((256, 256, 3, 3))
    assert ranks.para_rank((64, 32, 3, 3), RATIO, guarantee=True) == 8
    assert ranks.para_sent(RATIO, guarantee=True)((64, 32, 3, 3)) / 18432 == pytest.approx(0.146, abs=5e-4)


def test_fedpara_descends():
    forms = {"W": lowrank.HadamardMatrix(2), "kernel": lowrank.HadamardTensor(2)}
    problem, rounds = Quadratic(noise=0.0), 40
    path = play(compression.fedpara, forms, uniform(-1.0, 1.0), problem=problem, where=everyone(5, rounds, 3))

    def loss(x):
        return sum((flatten(x) - a) @ h @ (flatten(x) - a) for h, a in problem.parts)

    losses = [loss(x) for x in path.x]
    assert losses[-1] < 0.7 * losses[0]


def test_bytes_of_a_fedmud_message():
    """L13: four bytes for each parameter that the real ratio counts."""
    path = play(compression.fedmud, matrices(), DRAW)
    sent = sum(2 * sum(lowrank.sides(SHAPES[layer])) for layer in LAYERS) + 3
    assert all(len(codecs.pack_values(p)) == 4 * sent for p in [*path.clients[0], path.trained[0]])
