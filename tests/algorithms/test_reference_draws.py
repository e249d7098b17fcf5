"""The factors that compressed methods draw have the distributions that the references state.

Each factor of at least 600 entries is compared in mean, in variance and by the Kolmogorov-Smirnov distance to the
stated distribution. The tolerances are those of five standard errors, so that a right draw is refused once in a million
times and a variance that is wrong by a factor of 1.4 never passes.
"""

import math

import pytest
import torch

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.fedlmt import fedlmt
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.fedmud_aad import fedmud_aad
from fedfleet.algorithms.fedmud_bkd import fedmud_bkd
from fedfleet.algorithms.fedmud_f import fedmud_f
from fedfleet.algorithms.fedpara import fedpara
from fedfleet.algorithms.tree import Tree
from tests.reference import draws, lowrank

SHAPES = {
    "first": (40, 1, 3, 3),
    "wide": (256, 64, 3, 3),
    "flat": (64, 48, 1, 5),
    "narrow": (64, 256, 3, 3),
    "dense": (120, 400),
    "last": (10, 120),
}
RATIO = 0.2


def build(method):
    x = Tree.of({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    return method.build(RunContext(3, 5, 6, None, 7, x.layout)), x


def drawn(method):
    """{weight: {factor: its entries (n,)}} of the factors that are random in round 1."""
    algorithm, x = build(method)
    public = algorithm.server_init(x).public
    unpacked = algorithm.unpack(public)
    found = {}
    for name, value in [*unpacked.method.x.items(), *unpacked.fixed.items()]:
        weight, _, factor = name.partition(".")
        if factor and bool(value.any()):
            found.setdefault(weight, {})[factor] = value
    return found


def cdf_distance(values, cdf):
    """The largest distance between the empirical distribution function and `cdf`."""
    values = values.flatten().double().sort().values
    places = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    wanted = cdf(values)
    return max(float((wanted - places[:-1]).max()), float((places[1:] - wanted).max()))


def check(values, deviation, cdf, kurtosis):
    """cdf: of the stated distribution; kurtosis: its fourth moment over the variance squared."""
    n = values.numel()
    assert n >= 600
    assert abs(float(values.mean())) < 5 * deviation / math.sqrt(n)
    assert abs(float(values.square().mean()) / deviation**2 - 1) < 5 * math.sqrt((kurtosis - 1) / n)
    assert cdf_distance(values, cdf) < 2.6 / math.sqrt(n)


def normal(deviation):
    return lambda x: torch.special.ndtr(x / deviation)


@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
def test_fedlmt_draws_as_torch_draws_the_two_layers(mode):
    found, checked = drawn(fedlmt(ratio=RATIO, draw=mode)), 0
    assert sorted(found) == sorted(set(SHAPES) - {"first", "last"})
    for weight, factors in found.items():
        rank = factors["u"].shape[1]
        for factor, (entries, deviation) in draws.of_layers(SHAPES[weight], rank, mode).items():
            assert factors[factor].numel() == entries
            check(factors[factor], deviation, normal(deviation), 3.0)
            checked += 1
    assert checked == 8


@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
def test_fedlmt_layers_together_are_the_weight(mode):
    """Two convolutions of torch with the weights V and U map an image as one convolution with W = U V^T does."""
    algorithm, x = build(fedlmt(ratio=RATIO, draw=mode))
    server = algorithm.server_init(x)
    unpacked, model = algorithm.unpack(server.public), algorithm.model(server)
    image = torch.randn(2, 64, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, v = unpacked.method.x["wide.u"], unpacked.method.x["wide.v"]
    o, i, h, w = SHAPES["wide"]
    first, second = (layer.double() for layer in draws.two_layers(SHAPES["wide"], u.shape[1]))
    first.weight.data = v.mT.reshape(-1, i, 1, w)
    second.weight.data = u.reshape(o, h, -1, 1).permute(0, 2, 1, 3)
    torch.testing.assert_close(
        second(first(image)).detach(), torch.nn.functional.conv2d(image, model["wide"]), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("form", ["tensor", "matrix"])
@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
def test_fedpara_draws_as_torch_counts_parameters(form, mode):
    found, checked = drawn(fedpara(ratio=RATIO, draw=mode, form=form)), 0
    names = {"X": "u", "Y": "v", "T": "core", "O": "u", "I": "v"}
    for weight, factors in found.items():
        rank = factors["u1"].shape[1 if form == "matrix" or len(SHAPES[weight]) == 2 else 0]
        kind = lowrank.HadamardTensor if form == "tensor" and len(SHAPES[weight]) == 4 else lowrank.HadamardMatrix
        shapes = {names[k[0]] + k[1]: shape for k, shape in kind(rank).shapes(SHAPES[weight]).items()}
        assert {k: tuple(v.shape) for k, v in factors.items()} == shapes
        for factor, (entries, deviation) in draws.of_parameters(shapes, mode).items():
            if entries >= 600:
                check(factors[factor], deviation, normal(deviation), 3.0)
                checked += 1
    assert checked >= 10


@pytest.mark.parametrize("method", [fedlmt, fedpara, fedmud, fedmud_bkd, fedmud_aad, fedmud_f])
def test_uniform_draws(method):
    """Every random factor of every method is U(-a, a) by default, and no two factors are alike."""
    a, pieces = 0.3, []
    for factors in drawn(method(ratio=RATIO, a=a)).values():
        for values in factors.values():
            assert float(values.abs().max()) <= a
            pieces.append(values.flatten())
            if values.numel() >= 600:
                check(values, a / math.sqrt(3), lambda x: (x + a) / (2 * a), 9 / 5)
    firsts = [tuple(piece[:4].tolist()) for piece in pieces]
    assert len(set(firsts)) == len(firsts) >= 4
