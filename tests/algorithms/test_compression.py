"""Identities of the methods that compress: special cases in which they equal other methods, and invariants.

Equal to rounding means 1e-9 here, see `keyed.TOLERANCE`.
"""

from dataclasses import dataclass

import pytest
import torch

from fedfleet.algorithms.contract import Round, RunContext
from fedfleet.algorithms.ef21_p import Sparsification, ef21_p
from fedfleet.algorithms.fedavg import Plain, fedavg
from fedfleet.algorithms.fedbat import Binarisation
from fedfleet.algorithms.fedhm import fedhm
from fedfleet.algorithms.fedlmt import fedlmt
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.fedmud_aad import fedmud_aad
from fedfleet.algorithms.fedmud_bkd import fedmud_bkd
from fedfleet.algorithms.fedmud_bkd_aad import fedmud_bkd_aad
from fedfleet.algorithms.fedmud_bkd_f import fedmud_bkd_f
from fedfleet.algorithms.fedmud_f import fedmud_f
from fedfleet.algorithms.fedpara import fedpara
from fedfleet.algorithms.local import LocalMethod, Rule
from fedfleet.algorithms.parts import factors
from fedfleet.algorithms.parts.codecs import Signs, TopK, pack, pack_places, share, unpack, unpack_places
from fedfleet.algorithms.parts.compression import Budget, Compressed, Factoring
from fedfleet.algorithms.parts.matrices import Sized, Weight, compressible, fit, real_ratio
from fedfleet.algorithms.parts.products import Kronecker, LowRank
from fedfleet.algorithms.parts.reparameterisation import Factored, Reparameterised
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.tree import Layout, Tree
from fedfleet.workloads import counted
from fedfleet.workloads.models.convolutional import Cnn4, Cnn10
from tests.algorithms.compressed import COHORTS, PROBLEM, STEPS, build, trained
from tests.algorithms.driver import run, tree
from tests.algorithms.problems import Quadratic

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
RULE = Sgd(0.05)
PLAIN = LocalMethod(RULE, Plain(), Mean())
FACTORED = [fedmud, fedmud_bkd, fedmud_aad, fedmud_bkd_aad, fedmud_f, fedmud_bkd_f]


def made(recipe, **settings):
    return build(recipe(RULE, **{"ratio": 0.8, "layers": "all", "nearest": True, **settings}))


def same_models(left, right, names=None):
    for a, b in zip(left, right, strict=True):
        for name in a if names is None else names:
            torch.testing.assert_close(a[name], b[name], **TIGHT, msg=name)
    assert (left[-1] - left[0]).norm() > 1e-3, "nothing moved"


# --- L1: FedMUD and FedLMT ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FromZero(Quadratic):
    """A problem whose weights start at zero, while its vector does not."""

    @property
    def start(self):
        return {name: value * (value.ndim == 1) for name, value in super().start.items()}


def test_fedmud_from_zero_that_never_resets_with_both_factors_random_is_fedlmt():
    form, budget = factors.BothRandom(LowRank(), "permuted"), Budget(0.8, "all", True)
    ours = build(Compressed(PLAIN, Factoring(form, budget, based=True, reset=0, spread=0.7)))
    lmt = build(fedlmt(RULE, 0.8, 0.7, layers="all", nearest=True))
    problem = FromZero()
    same_models(run(ours, problem, COHORTS, STEPS).models(), run(lmt, problem, COHORTS, STEPS).models())


# --- L2: the mean of factors and the mean of weights ----------------------------------------------------------------
def some_z(space, count):
    """Random variables."""
    z = space.start(tree(PROBLEM.start), 0)
    return [Tree(counted.normal(counted.key("z", i), len(z.flat)), z.layout) for i in range(count)]


@pytest.mark.parametrize("recipe", FACTORED)
def test_aggregation(recipe):
    """The mean of the factors makes the mean of the updates for linear forms; for others the two differ by the
    covariance of the factors."""
    space = made(recipe).space
    zs, parts = some_z(space, 3), [0.5, 0.3, 0.2]
    fixed = space.fixed(0, zs[0].flat)
    mean = sum((z * w for z, w in zip(zs, parts, strict=True)), zs[0].zeros())
    for sized in space.sized:
        name = sized.weight.name
        apart = [space.weights(z, fixed)[name] * w for z, w in zip(zs, parts, strict=True)]
        missed = torch.stack(apart).sum(0) - space.weights(mean, fixed)[name]
        if isinstance(space.form, factors.Pair):
            product, shape = space.form.product, sized.weight.shape
            du, dv = ([z[f"{name}.{f}"] - mean[f"{name}.{f}"] for z in zs] for f in "uv")
            expected = sum(
                w * product.of(u, v, sized.weight).view(shape) for w, u, v in zip(parts, du, dv, strict=True)
            )
            assert missed.abs().max() > 1e-3
            torch.testing.assert_close(missed, expected, **TIGHT)
        else:
            torch.testing.assert_close(missed, torch.zeros_like(missed), **TIGHT)


# --- L3: merging ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", FACTORED)
def test_merging_leaves_the_model(recipe):
    """The model from the old base and the averaged factors equals the model from the new base and the new factors."""
    method = made(recipe)
    space = method.space
    path = trained(recipe(RULE, ratio=0.8, layers="all", nearest=True))
    for turn, server in enumerate(path.servers, 1):
        z, base = server.public.method.x, server.public.base.value
        before = space.lift(z, space.fixed(turn - 1, z.flat), base)
        unpacked = method.unpack(server.public)
        after = space.lift(unpacked.method.x, unpacked.fixed, unpacked.base)
        assert torch.equal(before.flat, after.flat)
        assert not torch.equal(unpacked.base.flat, base.flat)


@pytest.mark.parametrize("recipe", FACTORED)
def test_a_round_without_clients_is_no_update(recipe):
    """Which factors are merged depends on the updates before, and not on the numbers of their rounds."""
    method = made(recipe)
    start = method.server_init(tree(PROBLEM.start))
    public = method.unpack(method.broadcast(start))
    client = method.client_init(public)
    message, _ = method.client_finish(public, client, method.client_begin(public, client))

    def model(*numbers):
        server = start
        for number, z in zip(numbers, some_z(method.space, len(numbers)), strict=True):
            server = method.server_update(server, message._replace(delta=z), Round(number, 9, 3, 5))
        return method.model(server).flat

    assert torch.equal(model(1, 2), model(2, 5))


# --- L4: Kronecker blocks -------------------------------------------------------------------------------------------
def test_one_block_is_a_kronecker_product():
    weight, product = Weight("w", (9, 9), 9, 9), Kronecker()
    u, v = (counted.normal(counted.key(name), 9).view(1, 3, 3) for name in "uv")
    torch.testing.assert_close(product.of(u, v, weight), torch.kron(u[0], v[0]))
    low = torch.outer(u[0, 0], u[0, 1]).unsqueeze(0)
    assert torch.linalg.matrix_rank(product.of(u, v, weight)) == 9
    assert torch.linalg.matrix_rank(product.of(low, v, weight)) == 3  # 1 * 3
    assert product.size(weight, 0.1, 2) == (1, 3)
    assert sum(torch.Size(s).numel() for s in product.shapes(weight, (5, 4))) == 2 * 5 * 4**2


def test_blocks_have_full_rank_where_a_product_of_two_matrices_has_not():
    weight = Weight("w", (64, 64), 64, 64)
    for product, rank in ((LowRank(), 4), (Kronecker(), 64)):
        size = product.size(weight, 1 / 8, 2)
        u, v = (
            counted.normal(counted.key(name), torch.Size(shape).numel()).view(shape)
            for name, shape in zip("uv", product.shapes(weight, size), strict=True)
        )
        assert torch.linalg.matrix_rank(product.of(u, v, weight)) == rank


# --- L5: square orthogonal fixed factors ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Orthogonal(Factored):
    def fixed(self, turn, like):
        return {name: torch.linalg.qr(value).Q for name, value in super().fixed(turn, like).items()}


@dataclass(frozen=True)
class Twice(Rule):
    """A rule whose steps are twice as long on matrices."""

    def step(self, y, v, state):
        return y.map(lambda name, leaf: leaf - 0.05 * (1 + (leaf.ndim > 1)) * v[name]), state


def orthogonal(form, problem):
    layout = tree(problem.start).layout
    sized = tuple(Sized(w, (w.rows,), 0) for w in compressible(layout, "all"))
    return Reparameterised(PLAIN, Orthogonal(layout, sized, form, "uniform", 1.0, 0), True, 1)


def test_f_with_a_square_orthogonal_factor_is_fedavg():
    ours = run(orthogonal(factors.Frozen(), PROBLEM), PROBLEM, COHORTS, STEPS)
    same_models(ours.models(), run(fedavg(RULE), PROBLEM, COHORTS, STEPS).models())


def test_aad_with_square_orthogonal_factors_is_fedavg_at_twice_the_rate():
    problem = Quadratic(small=True)  # its matrix is square
    ours = run(orthogonal(factors.Anchored(), problem), problem, COHORTS, STEPS)
    same_models(ours.models(), run(fedavg(Twice()), problem, COHORTS, STEPS).models())


# --- L6: step size and spread ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Matrices(Quadratic):
    @property
    def shapes(self):
        return {"W": (3, 4), "V": (4, 3)}


@pytest.mark.parametrize("recipe", FACTORED[2:])
def test_only_lr_times_the_squared_spread_counts(recipe):
    problem, settings = Matrices(), {"ratio": 0.9, "layers": "all", "nearest": True}
    layout = tree(problem.start).layout
    one, other = (build(recipe(Sgd(0.05 / c**2), a=0.5 * c, **settings), layout) for c in (1, 3))
    same_models(*(run(method, problem, COHORTS, STEPS).models() for method in (one, other)))


# --- L7: truncated decompositions -----------------------------------------------------------------------------------
def test_fedhm_of_full_rank_without_steps_changes_nothing():
    method = build(fedhm(RULE, 1.0, layers="all", nearest=True), tree(Whole().start).layout)
    resting = run(method, Whole(), COHORTS, dict.fromkeys(STEPS, 0))
    torch.testing.assert_close(resting.models()[-1].flat, tree(Whole().start).flat, **TIGHT)


@dataclass(frozen=True)
class Whole(Quadratic):
    """A problem in which ratio 1 gives full rank: ceil(m n / (m + n)) is 1 = min(m, n)."""

    @property
    def shapes(self):
        return {"W": (1, 5), "V": (4, 1), "b": (3,)}


def test_fedhm_sends_the_best_approximation():
    method = made(fedhm, ratio=0.5)
    x = tree(PROBLEM.start)
    truncated = method.space.lift(method.server_init(x).public.method.x, {})
    for sized in method.space.sized:
        assert sized.size[0] < min(sized.weight.rows, sized.weight.cols)
        error = (truncated[sized.weight.name] - x[sized.weight.name]).norm()
        whole = x[sized.weight.name]
        whole = whole.permute(0, 2, 1, 3) if whole.ndim == 4 else whole
        singular = torch.linalg.svdvals(whole.reshape(sized.weight.rows, sized.weight.cols))
        torch.testing.assert_close(error, singular[sized.size[0] :].norm(), **TIGHT)


# --- L8: FedPara ------------------------------------------------------------------------------------------------------
def test_fedpara_counts():
    big = Weight("w", (256, 256, 3, 3), 768, 768)
    assert factors.TensorHadamard().sized(big, 0.1).sent == 60_192
    assert factors.TensorHadamard().size(big, 0.1) == (36,)
    flat = Weight("w", (30, 50), 30, 50)
    rank = factors.Hadamard().size(flat, 0.5)[0]
    assert factors.TensorHadamard().sized(flat, 0.5).sent == 2 * rank * (30 + 50) <= 0.5 * 1500


def test_fedpara_with_ones_is_low_rank_and_its_rank_is_at_most_squared():
    weight, form = Weight("w", (12, 15), 12, 15), factors.Hadamard(LowRank(), "raw")
    f = {k: counted.normal(counted.key(k), n * 3).view(n, 3) for k, n in (("u1", 12), ("v1", 15))}
    ones = {"u2": torch.ones(12, 1, dtype=torch.float64), "v2": torch.ones(15, 1, dtype=torch.float64)}
    torch.testing.assert_close(form.weight(weight, f | ones), f["u1"] @ f["v1"].mT)
    other = {k: counted.normal(counted.key(k), n * 3).view(n, 3) for k, n in (("u2", 12), ("v2", 15))}
    assert torch.linalg.matrix_rank(form.weight(weight, f | other)) == 9


# --- L9: draws --------------------------------------------------------------------------------------------------------
def test_draws_are_shared_and_differ_by_layer_and_turn():
    one, same, other = (build(fedmud_aad(RULE, 0.8, layers="all", nearest=True), seed=s).space for s in (3, 3, 4))
    like = torch.zeros(1, dtype=torch.float64)
    a, b, c, later = one.fixed(0, like), same.fixed(0, like), other.fixed(0, like), one.fixed(1, like)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not any(torch.equal(a[k], c[k]) or torch.equal(a[k], later[k]) for k in a)
    assert not torch.equal(a["W.fixed.u"], a["U.fixed.u"])  # of one shape
    assert not torch.equal(a["W.fixed.u"], a["W.fixed.v"][:3])
    assert all(value.abs().max() <= 0.5 for value in a.values())


# --- L10: EF21-P ------------------------------------------------------------------------------------------------------
def test_ef21_p_without_compression_is_fedavg():
    whole = Compressed(PLAIN, Sparsification(up="identity", down="identity", layers="all"))
    ours = trained(whole)
    same_models(ours.models(), run(fedavg(RULE), PROBLEM, COHORTS, STEPS).models())
    for server in ours.servers:
        torch.testing.assert_close(server.private.x.flat, build(whole).unpack(server.public).x.flat, **TIGHT)


def test_what_is_missing_contracts():
    """After the broadcast, |x - x_hat|^2 is at most 1 - k / d times its value before."""
    method = build(ef21_p(RULE, 0.2, layers="all"))
    halves, share_of = method.halves, 0.0
    for server in trained(ef21_p(RULE, 0.2, layers="all")).servers:
        (x, _), x_hat = halves.split(server.private.x), halves.split(method.unpack(server.public).x)[0]
        before = (x - server.public.known.value).square().sum()
        share_of = share(0.2, len(x)) / len(x)
        assert (x - x_hat).square().sum() <= (1 - share_of) * before * (1 + 1e-12)
    assert 0.15 < share_of <= 0.2


def test_errors_are_remembered():
    """memory: error. The sum of a client's messages and its error equals the sum of its displacements."""
    method = build(ef21_p(RULE, 0.3, "error", layers="all"))
    server = method.server_init(tree(PROBLEM.start))
    x = method.unpack(server.public)
    client, moved, sent = method.client_init(x), 0.0, 0.0
    for k in range(5):
        local = method.client_step(x, client, method.client_begin(x, client), Asked(gradient(k), 0.0, k))
        message, client = method.client_finish(x, client, local)
        moved = moved + method.halves.split(local.method.y - x.x)[0]
        sent = sent + method.halves.split(method.decode(x, message).delta)[0]
    assert client.abs().max() > 1e-3
    torch.testing.assert_close(sent + client, moved, **TIGHT)


def test_codes_are_what_they_encode():
    for n in (1, 2, 7, 8, 9, 64, 65):
        bits = (counted.uniform(counted.key("bits"), n) < 0.5).to(torch.uint8)
        assert len(pack(bits)) == -(-n // 8)
        assert torch.equal(unpack(pack(bits), n), bits)
        places = torch.randperm(n)[: max(1, n // 2)]
        assert torch.equal(unpack_places(pack_places(places, n), len(places), n), places)
    v = counted.normal(counted.key("v"), 100)
    kept = TopK(0.1).decode(TopK(0.1).encode(v, counted.key(0)), 100)
    largest = v.abs().argsort(descending=True)[:10]
    assert torch.equal(kept.nonzero()[:, 0].sort().values, largest.sort().values)
    assert torch.equal(kept[largest], v[largest])


# --- L11: FedBAT ------------------------------------------------------------------------------------------------------
def test_signs_are_unbiased_inside_and_saturate_outside():
    """The mean of 20,000 draws of +-alpha has a standard deviation of at most alpha / 141; the tolerance is five of
    these."""
    u = torch.linspace(-2, 2, 9, dtype=torch.float64)
    alpha = u.abs().mean()
    draws = torch.vmap(lambda key: Signs().decode(Signs().encode(u, key), 9))(counted.key("s", torch.arange(20_000)))
    assert torch.equal(draws.abs(), alpha.expand_as(draws))
    torch.testing.assert_close(draws.mean(0), u.clamp(-alpha, alpha), rtol=0, atol=5 * float(alpha) / 141)


def bat(**settings):
    return build(Compressed(PLAIN, Binarisation(layers="all", **settings)))


class Asked:
    """An oracle with the same gradient at every point."""

    def __init__(self, gradient, done, k=0):
        self.gradient, self.done, self.key = gradient, torch.tensor(done, dtype=torch.float64), counted.key("k", k)
        self.examples = torch.tensor(1)

    def __call__(self, y, /):
        return self.gradient


def visited(method, gradient, steps):
    x = method.unpack(method.server_init(tree(PROBLEM.start)).public)
    local = method.client_begin(x, ())
    for k in range(steps):
        local = method.client_step(x, (), local, Asked(gradient, k / steps, k))
    return x, local


def gradient(k=0):
    x = tree(PROBLEM.start)
    return Tree(counted.normal(counted.key("g", k), len(x.flat)), x.layout)


def test_theta_rests_at_a_bound_and_with_rho_0():
    """Gradients of 1 and steps of 0.05 would make scales above the upper bound of 0.05; a thousandth of them does
    not."""
    assert torch.equal(visited(bat(), gradient() * 10, 6)[1].y["binarisation"], torch.zeros(4, dtype=torch.float64))
    assert (visited(bat(), gradient() * 0.1, 6)[1].y["binarisation"] != 0).all()
    method = bat(rho=0.0)
    _, local = visited(method, gradient() * 0.1, 6)
    assert torch.equal(method.raw(local.alpha0, local.y["binarisation"]), local.alpha0)
    assert (local.alpha0 > 0).all()


def test_with_phi_1_clients_train_as_fedavgs():
    x, local = visited(bat(phi=1.0), gradient(), 5)
    plain = PLAIN.client_begin(PLAIN.server_init(x).public, PLAIN.client_init(PLAIN.server_init(x).public))
    for _ in range(5):
        plain = plain._replace(y=RULE.step(plain.y, gradient(), ())[0])
    torch.testing.assert_close(local.y.pick(x).flat, plain.y.flat, **TIGHT)


def test_binary_updates_have_one_size_a_layer():
    method = bat()
    x, local = visited(method, gradient() * 0.1, 6)
    message, _ = method.client_finish(x, (), local)
    decoded = method.decode(x, message)
    for name in ("W", "V", "U", "kernel"):
        sizes = decoded.delta[name].abs().unique()
        assert len(sizes) == 1
        assert 5e-4 <= float(sizes) <= 5e-2


# --- L12: sizes -------------------------------------------------------------------------------------------------------
TABLE = [  # model, input, classes, parameters, ranks, their ratio, blocks with side, their ratio: Li et al. 2025's code
    (Cnn4(), (1, 28, 28), 10, 390_880, [2, 3, 5], 3.04, [2, 8, 31], 10, 3.07),
    (Cnn4(), (3, 32, 32), 10, 399_136, [1, 1, 1], 3.53, [1, 1, 1], (12, 17, 24), 3.53),
    (Cnn10(), (3, 32, 32), 10, 4_719_328, [2, 2, 3, 4, 6, 8, 12, 15, 23], 3.22,
     [2, 4, 7, 14, 28, 55, 110, 219, 438], 9, 3.22),
    (Cnn10(), (3, 32, 32), 100, 4_765_408, [1, 2, 2, 3, 4, 5, 8, 10, 15], 3.14,
     [1, 2, 4, 8, 16, 31, 61, 121, 242], 10, 3.22),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=["fmnist", "svhn", "cifar10", "cifar100"])
def test_sizes_at_one_in_32(row):
    model, shape, classes, total, ranks, of_ranks, blocks, sides, of_blocks = row
    with torch.device("meta"):
        parameters = dict(model.build(shape, classes).named_parameters())
    layout = Layout(tuple(parameters), tuple(tuple(p.shape) for p in parameters.values()))
    assert sum(layout.sizes) == total
    weights = compressible(layout, "inner")
    low, kron = (fit(layout, weights, 1 / 32, f.sized, True) for f in (factors.Pair(), factors.Pair(Kronecker())))
    assert [s.size[0] for s in low] == ranks
    assert [s.size[0] for s in kron] == blocks
    assert [s.size[1] for s in kron] == (list(sides) if isinstance(sides, tuple) else [sides] * len(blocks))
    assert round(100 * real_ratio(layout, low), 2) == of_ranks
    assert round(100 * real_ratio(layout, kron), 2) == of_blocks


def test_a_ratio_out_of_reach_says_what_is_in_reach():
    layout = Layout(("a", "b", "c", "d"), ((30, 30), (10, 10), (10,), (30, 30)))
    with pytest.raises(
        ValueError, match=r"ratio=0.5 cannot be reached.*0\.9581 is the smallest.*0\.9476 of the model.*nearest"
    ):
        fit(layout, compressible(layout, "inner"), 0.5, factors.Pair().sized, False)
    (least,) = fit(layout, compressible(layout, "inner"), 0.5, factors.Pair().sized, True)
    assert least.size == (1,)
    with pytest.raises(ValueError, match="nothing to compress"):
        compressible(layout.pick(["a", "c", "d"]), "inner")


# --- what goes with what ----------------------------------------------------------------------------------------------
def test_a_method_is_planned_for_a_model():
    with pytest.raises(ValueError, match="shapes"):
        fedmud().build(RunContext(3, 5, 6, None))


@pytest.mark.parametrize(
    "recipe",
    [lambda c: fedpara(RULE, layers="all", nearest=True, a=c), lambda c: fedlmt(RULE, a=c), lambda c: fedmud(a=c)],
)
def test_spreads_are_positive(recipe):
    with pytest.raises(ValueError, match="> 0 must hold"):
        recipe(0.0)
