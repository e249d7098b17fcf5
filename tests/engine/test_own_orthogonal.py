"""Newton-Schulz iterations of the compiled kernels agree with those of the method, for one client and for a block.
TOLERANCE as in test_kernels; but Polar Express multiplies small singular values, and their rounding errors, by up to 8
in each iteration."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch.func import vmap

from fedfleet.algorithms.parts.muon import NewtonSchulz, Spectral, Svd, lmo
from fedfleet.algorithms.parts.orthogonal import SCHEMES, newton_schulz, newton_schulz_plainly
from fedfleet.algorithms.parts.rules import Momentum, Sgd
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.kernels import operators
from fedfleet.engine.kernels.operators import Native

from .test_kernels import lenet

TOLERANCE = {scheme: 1e-4 if "polar" in scheme else 2e-5 for scheme in SCHEMES}
SHAPES = [(1, 5), (7, 7), (6, 25), (10, 84), (84, 120), (66, 65), (120, 401), (133, 64)]

pytestmark = pytest.mark.usefixtures("own_kernels")


@pytest.mark.parametrize("iterations", [0, 1, 4, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_are_torchs(shape, scheme, iterations):
    m = torch.randn(3, *shape, generator=torch.Generator().manual_seed(sum(shape)))
    expected = newton_schulz(m.double(), scheme, iterations)
    with Native().around_steps():
        alone = torch.stack([newton_schulz(one, scheme, iterations) for one in m])
        block = vmap(lambda one: newton_schulz(one, scheme, iterations))(m)
    for own in (alone, block):
        assert float((own - expected).abs().max() / expected.abs().max()) < TOLERANCE[scheme]


@pytest.mark.parametrize("shape", [(30, 2100), (1030, 1041), (1041, 1030)])
def test_long_sums_are_added_in_parts(shape, compiled):
    """Products have up to 1,024 terms at a time, see orthogonal.h. Some or all sums have more here."""
    m = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = newton_schulz(m.double(), "classic", 5)
    with Native().around_steps():
        own = newton_schulz(m, "classic", 5)
    assert compiled == [True]
    assert float((own - expected).abs().max() / expected.abs().max()) < TOLERANCE["classic"]


def of_kind(kind: str, rows: int, columns: int) -> torch.Tensor:
    """A matrix whose singular values are alike, fall by four powers of ten, are mostly zero, or with one that is much
    larger than the others; or of which one or three rows are not zero, as of a layer with dead units."""
    draw = torch.Generator().manual_seed(rows + columns)
    if kind == "alike":
        return torch.randn(rows, columns, generator=draw)
    if kind == "one large":
        return torch.rand(rows, columns, generator=draw)
    if kind.endswith("rows"):
        return torch.randn(rows, columns, generator=draw) * (torch.arange(rows) < int(kind[0])).unsqueeze(1)
    u, v = (torch.randn(side, min(rows, columns), generator=draw) for side in (rows, columns))
    if kind == "low rank":
        return u[:, :5] @ v[:, :5].mT
    return torch.linalg.qr(u).Q * torch.logspace(0, -4, u.shape[1]) @ torch.linalg.qr(v).Q.mT


def with_rounding(m: torch.Tensor, scheme: str, counts: tuple[int, ...], unit: float) -> dict[int, torch.Tensor]:
    """For each count of iterations three results in float64: the exact one, and two of iterations whose products have
    random errors as large as those of rounding, on whatever processor. m: (rows, columns) with rows <= columns.

    A number that is rounded has an error of up to `unit` times itself, and of that over sqrt(3) on average. A product
    sums L terms in float32, of unit e, one after the other. Its partial sums are at most as large as the result, if all
    terms have one sign, and about as large as the root of the sum of their squares, if the signs are random. The L
    errors of such sums add up to e sqrt(L / 3) times both. From one iteration to the next, errors grow as they do."""
    draw, chosen = torch.Generator().manual_seed(0), SCHEMES[scheme]

    def rounded(exact: torch.Tensor, size: torch.Tensor, length: int) -> torch.Tensor:
        spread = (size + exact.abs()) * (2.0**-24 * (length / 3) ** 0.5) + exact.abs() * (unit / 3**0.5)
        return exact + spread * torch.cat(
            [torch.zeros(1, *exact.shape[1:]), torch.randn(2, *exact.shape[1:], generator=draw)]
        )

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return rounded(a @ b, (a.square() @ b.square()).sqrt(), b.shape[-2])

    norm = m.double().norm().expand(3, 1, 1)
    x = m.double() / chosen.divisor(rounded(norm, norm, m.numel()))
    x = rounded(x, x.abs(), 1)
    found = {}
    for k, (a, b, c) in enumerate(chosen.coefficients(max(counts)), 1):
        gram = product(x, x.mT)
        gram = gram.tril() + gram.tril(-1).mT
        x = a * x + product(b * gram + c * product(gram, gram), x)
        if k in counts:
            found[k] = x
    return found


@pytest.mark.parametrize(
    ("dtype", "unit", "times"),
    [
        # Where one singular value is not zero, the error is one random number. It is below four standard deviations.
        (None, 2.0**-24, 4),
        # There, the same few numbers are rounded to bfloat16 in each of 15 products, and the errors may have one sign.
        # Together they are sqrt(15) times as large as random ones, and each may be sqrt(3) times the average.
        (torch.bfloat16, 2.0**-9, 7),
    ],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(6, 25), (16, 150), (40, 64), (84, 120), (120, 84), (120, 400), (150, 150)])
def test_rounding_errors_are_those_of_the_arithmetic(shape, scheme, dtype, unit, times):
    """They are compared with what the lengths of sums, the iterations and the units of rounding give, and not with
    torch's errors: these depend on the processor, and are zero by chance for some matrices."""
    for kind in ("alike", "falling", "low rank", "one large", "1 rows", "3 rows"):
        m = of_kind(kind, *shape)
        tall = m.shape[0] > m.shape[1]
        for iterations, (exact, *others) in with_rounding(m.mT if tall else m, scheme, (1, 2, 5, 10), unit).items():
            with Native().around_steps():
                own = newton_schulz(m, scheme, iterations, dtype)
            error = float(((own.mT if tall else own) - exact).norm())
            assert error < times * max(float((other - exact).norm()) for other in others), (kind, iterations)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every question to the compiled kernels so far, whether they computed the result."""
    answers = []

    def iterated(*given):
        result = found(*given)
        answers.append(result is not None)
        return result

    found = operators.iterated
    monkeypatch.setattr(operators, "iterated", iterated)
    return answers


def test_they_are_used_inside_only_and_for_matrices_in_float32_only(compiled):
    m = torch.randn(20, 31)
    expected = newton_schulz(m, "jordan", 5)
    assert compiled == []
    with Native().around_steps():
        newton_schulz(m, "jordan", 5)
        assert compiled == [True]
        assert torch.equal(
            newton_schulz(m.double(), "jordan", 5), newton_schulz_plainly(m.double(), "jordan", 5, torch.float64)
        )
        half = m.to(torch.bfloat16)
        assert torch.equal(newton_schulz(half, "jordan", 5), newton_schulz_plainly(half, "jordan", 5))
        assert compiled == [True, False, False]
    assert torch.equal(newton_schulz(m, "jordan", 5), expected)
    assert compiled == [True, False, False]


def test_numbers_below_the_smallest_normal_one_take_no_longer_and_stay_torchs_outside():
    """Rows of tiny numbers, such as the momentum of dead units. They had taken ten times as long as others."""
    m = torch.randn(120, 400, generator=torch.Generator().manual_seed(0))
    tiny = m * torch.logspace(0, -38, 120).unsqueeze(1)
    expected = newton_schulz(tiny.double(), "classic", 5)

    def seconds(x):
        times = []
        for _ in range(9):
            began = time.process_time()
            newton_schulz(x, "classic", 5)
            times.append(time.process_time() - began)
        return min(times)

    with Native().around_steps():
        own = newton_schulz(tiny, "classic", 5)
        assert seconds(tiny) < 3 * seconds(m)
    assert float((own - expected).abs().max() / expected.abs().max()) < TOLERANCE["classic"]
    assert float(torch.tensor(1e-38) * 0.1) > 0


def tree(*leaves: torch.Tensor) -> Tree:
    return Tree.of({name: leaf for name, leaf in zip("abcdefghi", leaves, strict=False)})


def some_leaves(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((40, 64), (40,), (96, 33), (), (8, 3, 5, 5), (40, 64), (0,), (0, 5000))
    return [torch.randn(shape, generator=draw) for shape in shapes]


@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"scale": "none", "matrix_lr": 1}, {"aux": ("c", "f")}, {"weight_decay": 0.1, "scale": "jordan"}]
)
def test_a_step_in_one_call_is_the_step(options, dtype, monkeypatch):
    """Tall matrices, convolutions, two matrices of a shape, a scalar, tensors without entries; matrices that count as
    vectors; a decay."""
    options = {"matrix_lr": 0.1, "vector_lr": 0.01, **options}
    decay = options.pop("weight_decay", 0.0)
    rule = lmo(ball=NewtonSchulz(dtype=dtype), **options)
    assert isinstance(rule, Spectral)
    rule = dataclasses.replace(rule, weight_decay=decay)
    y, v = tree(*some_leaves(0)), tree(*some_leaves(1))
    expected, _ = rule.step(y, v, rule.init(y))
    calls = []
    found = operators.iterated
    monkeypatch.setattr(operators, "iterated", lambda *given: calls.append(given) or found(*given))
    with Native().around_steps():
        own, _ = rule.step(y, v, rule.init(y))
    assert len(calls) == 1
    for name, leaf in expected.items():
        if leaf.numel():
            assert float((own[name] - leaf).abs().max()) < (2e-5 if dtype == "same" else 0.02) * float(leaf.abs().max())


class Reversed(Sgd):
    """Says nothing of `plain_lr`."""

    def step(self, y, v, state):
        return y.add(v, self.lr), state


class Doubled(NewtonSchulz):
    def orthogonal(self, m):
        return 2 * super().orthogonal(m)


@pytest.mark.parametrize(
    "rule",
    [
        Spectral(vector_rule=Momentum(0.1)),
        Spectral(vector_rule=Reversed(0.1)),
        Spectral(ball=Doubled()),
        Spectral(ball=NewtonSchulz(iterations=0)),
        Spectral(ball=Svd()),
    ],
    ids=["a rule with a state", "a rule of one's own", "a ball of one's own", "no iterations", "svd"],
)
def test_other_steps_are_not_taken_in_one_call(rule):
    y, v = tree(*some_leaves(0)[:6]), tree(*some_leaves(1)[:6])
    expected, _ = rule.step(y, v, rule.init(y))
    with Native().around_steps():
        own, _ = rule.step(y, v, rule.init(y))
    for name, leaf in expected.items():
        if leaf.numel():
            assert float((own[name] - leaf).abs().max()) < 2e-5 * float(leaf.abs().max())


def test_matrices_that_take_much_memory_are_torchs(monkeypatch, compiled):
    m = torch.randn(20, 31)
    expected = newton_schulz(m, "jordan", 5)
    monkeypatch.setitem(operators.LARGEST_MATRIX, torch.float32, m.numel() - 1)
    with Native().around_steps():
        assert torch.equal(newton_schulz(m, "jordan", 5), expected)
    assert compiled == [False]


def muon(**engine):
    made = lenet(**engine)
    method = {"name": "fedmuon_bc", "matrix_lr": 0.01, "vector_lr": 0.05}
    return type(made).model_validate({**made.model_dump(), "method": method})


def test_a_run_with_own_kernels_is_the_run_with_torchs():
    own, torchs = (run(muon(kernels=kernels)).model for kernels in ("chain", "torch"))
    for name, value in torchs.items():
        # At a kink of max pooling a rounding error changes the gradient of an example: 4e-5 was measured.
        assert float((own[name] - value).abs().max() / value.abs().max()) < 1e-3
