"""The codecs of the table CODECS against golden values, against slow references, and by what they promise.

Golden values come from another program, with a tolerance of 1e-9; whole numbers and places are equal. Against the
reference the tolerance is 1e-12: both compute in float64, and add up at most a hundred numbers in different orders.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedfleet.algorithms.parts.codecs import Identity, unpack_numbers
from fedfleet.algorithms.parts.coded import Coding
from fedfleet.algorithms.parts.quantisers import (
    AbsMax,
    Cast,
    E3m0,
    Largest,
    Linear,
    Natural,
    Placed,
    Qsgd,
    Sign,
    SparseChunks,
    Statistical,
)
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads import counted
from tests.reference import quantisers as reference

GOLDEN = json.loads((Path(reference.__file__).parent / "low_communication.json").read_text())
CODECS = GOLDEN["codecs"]
V, U = (np.array(CODECS[name]) for name in "vu")
KEY = counted.key("codecs")


def decoded(codec, v, key=KEY):
    v = torch.as_tensor(v)
    return codec.decode(codec.encode(v, key), len(v))


# --- golden values ----------------------------------------------------------------------------------------------------
GRIDS = {
    **{f"linear_{bits}": (Linear(bits), lambda u, b=bits: reference.linear(V, b), 0) for bits in (1, 2, 4, 8)},
    **{f"statistical_{b}": (Statistical(b), lambda u, b=b: reference.statistical(V, b), 0) for b in (2, 4, 8)},
    **{f"absmax_{b}": (AbsMax(b), lambda u, b=b: reference.absmax(V, b), 2 ** (b - 1) - 1) for b in (2, 4, 8)},
    **{f"qsgd_{b}": (Qsgd(b, None), lambda u, b=b: reference.qsgd(V, b, u), 2 ** (b - 1) - 1) for b in (2, 4, 8)},
    "sign": (Sign(), lambda u: reference.sign(V), 0),
    "natural": (Natural(), lambda u: reference.natural(V, u), 0),
    "e3m0": (E3m0(), lambda u: reference.e3m0(V), 0),
}
"""Name -> codec, reference from uniform numbers, and the number that stands for 0."""


@pytest.mark.parametrize("name", GRIDS)
def test_golden_values_of_grids(name):
    codec, slow, zero = GRIDS[name]
    numbers, floats = codec.quantise(torch.tensor(V)[None], torch.tensor(U)[None])
    for found in (codec.restore(numbers, floats)[0].numpy(), slow(U)):
        np.testing.assert_allclose(found, CODECS[name]["decoded"], rtol=1e-9, atol=1e-15)
    if "codes" in CODECS[name]:
        codes = numbers[0] % 8 if name == "e3m0" else numbers[0] - zero  # the magnitude without the sign
        assert codes.tolist() == CODECS[name]["codes"]
    if not codec.random:
        np.testing.assert_array_equal(decoded(codec, V), codec.restore(numbers, floats)[0])


def test_golden_values_of_chunks():
    golden, codec = CODECS["sparse_chunk4_density.5_2bit"], SparseChunks(4, 0.5, 2)
    code = codec.encode(torch.tensor(V), KEY)
    assert codec.places(code, 11).tolist() == reference.sparse_places(V, 4, 0.5) == golden["places"]
    assert unpack_numbers(code.values.numbers, 6, 2).tolist() == golden["codes"]
    for found in (codec.decode(code, 11), reference.sparse(V, 4, 0.5, 2)):
        np.testing.assert_allclose(found, golden["decoded"], rtol=1e-9)
    assert codec.sent(code, 11).nonzero()[:, 0].tolist() == golden["places"]


def test_statistical_is_not_odd():
    for found in (decoded(Statistical(2), -V), reference.statistical(-V, 2)):
        np.testing.assert_allclose(found, CODECS["negated_statistical_2"]["decoded"], rtol=1e-9)


# --- the reference ----------------------------------------------------------------------------------------------------
SLOW = [
    (Linear(3, 5), lambda v, u: reference.in_groups(lambda part, _: reference.linear(part, 3), v, 5)),
    (Linear(16), lambda v, u: reference.linear(v, 16)),
    (Statistical(3, 7), lambda v, u: reference.in_groups(lambda part, _: reference.statistical(part, 3), v, 7)),
    (AbsMax(5, 8), lambda v, u: reference.in_groups(lambda part, _: reference.absmax(part, 5), v, 8)),
    (Sign(3), lambda v, u: reference.in_groups(lambda part, _: reference.sign(part), v, 3)),
    (Qsgd(4, 6), lambda v, u: reference.in_groups(lambda part, draw: reference.qsgd(part, 4, draw), v, 6, u)),
    (Natural(), reference.natural),
    (E3m0(4), lambda v, u: reference.in_groups(lambda part, _: reference.e3m0(part), v, 4)),
    (Largest(0.3), lambda v, u: reference.top_k(v, 0.3)),
    (SparseChunks(8, 0.25, 3), lambda v, u: reference.sparse(v, 8, 0.25, 3)),
    (SparseChunks(8, 0.25, 0), lambda v, u: reference.sparse(v, 8, 0.25, 0)),
]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100])
@pytest.mark.parametrize(("codec", "slow"), SLOW, ids=[str(codec) for codec, _ in SLOW])
def test_codecs_do_what_the_reference_does(codec, slow, n):
    v = counted.normal(counted.key("v", n), n)
    expected = slow(v.numpy(), counted.uniform(KEY, n).numpy())
    np.testing.assert_allclose(decoded(codec, v), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(6, 8), (7, 8), (4, 3, 2), (12,), (1, 1), (128, 130)])
@pytest.mark.parametrize(("tiles", "bits"), [(4, 2), (4, 0), (64, 2)])
def test_tiles_do_what_the_reference_does(shape: tuple[int, ...], tiles: int, bits: int):
    """The reference cuts the matrix in loops, codes the tiles one after the other as chunks, and puts them back."""
    first, *rest = shape
    m, n = (first, math.prod(rest)) if rest else (1, first)
    h, w = (max(d for d in range(1, tiles + 1) if side % d == 0) for side in (m, n))
    places = [
        (row + i) * n + column + j
        for row in range(0, m, h)
        for column in range(0, n, w)
        for i in range(h)
        for j in range(w)
    ]
    v = counted.normal(counted.key("v", *shape), m * n)
    expected = np.zeros(m * n)
    expected[places] = reference.sparse(v.numpy()[places], h * w, 0.25, bits)
    codec = SparseChunks(density=0.25, bits=bits, tiles=tiles).of_shape(shape)
    code = codec.encode(v, KEY)
    np.testing.assert_allclose(codec.decode(code, m * n), expected, rtol=1e-12, atol=1e-14)
    assert isinstance(codec, Placed)
    sent = np.zeros(m * n, dtype=bool)
    sent[np.array(places)[reference.sparse_places(v.numpy()[places], h * w, 0.25)]] = True
    assert codec.sent(code, m * n).tolist() == sent.tolist()
    leaves = pytree.tree_leaves(codec.encode(v.float(), KEY))
    assert codec.bytes(m * n) == sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def test_tiles_of_full_size_cost_what_chunks_cost():
    """And one tile is the flat tensor."""
    tiled = SparseChunks(tiles=64)
    assert tiled.of_shape((128, 192)).bytes(128 * 192) == SparseChunks().bytes(128 * 192)
    v = counted.normal(counted.key("v"), 4096)
    for one, other in zip(tiled.of_shape((64, 64)).encode(v, KEY), SparseChunks().encode(v, KEY), strict=True):
        for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="tiles >= 1 must hold, and size is that of chunks without tiles, got tiles=0"):
        SparseChunks(tiles=0)
    with pytest.raises(ValueError, match="got tiles=8, size=64; leave one of them out"):
        SparseChunks(64, tiles=8)
    with pytest.raises(ValueError, match="down: tiles are for the way up"):
        Coding(SparseChunks(), down=SparseChunks(tiles=8))


def test_of_equal_magnitudes_the_first_are_sent():
    v = [1.0, -2.0, 2.0, -1.0, 2.0, 0.0]
    np.testing.assert_array_equal(decoded(Largest(0.34), v), [0, -2, 2, 0, 0, 0])
    np.testing.assert_array_equal(decoded(SparseChunks(3, 0.34, 0), v), [0, -2, 0, 0, 2, 0])


# --- bytes ------------------------------------------------------------------------------------------------------------
ALL = [codec for codec, _ in SLOW] + [Identity(), Cast(), Cast("float16"), Largest(0.01), SparseChunks(), Qsgd(8)]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 4095, 4096, 4097])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_counted_bytes_are_those_of_the_code(codec, n):
    code = codec.encode(counted.normal(counted.key("v"), n).float(), KEY)
    assert sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(code)) == codec.bytes(n)


NAMED = {
    "identity": Identity(),
    "bfloat16": Cast(),
    "linear_8": Linear(8),
    **{f"statistical_{bits}": Statistical(bits) for bits in (8, 4, 2)},
    "absmax_8": AbsMax(8),
    "absmax_8_per_256": AbsMax(8, 256),
    "sign": Sign(),
    "sign_per_1024": Sign(1024),
    "qsgd_8_per_512": Qsgd(8),
    "natural": Natural(),
    "e3m0": E3m0(),
    "top_k_.01": Largest(0.01),
    "sparse_4096_1/64_2bit": SparseChunks(),
    "sparse_4096_1/64_float": SparseChunks(bits=0),
    "sparse_4096_1/32_2bit": SparseChunks(density=1 / 32),
}
SETTINGS = {
    "identity": ("identity", {}),
    "bfloat16": ("cast", {}),
    "linear_8": ("linear", {"bits": 8}),
    **{f"statistical_{bits}": ("statistical", {"bits": bits}) for bits in (8, 4, 2)},
    "absmax_8": ("absmax", {"bits": 8}),
    "absmax_8_per_256": ("absmax", {"bits": 8, "per": 256}),
    "sign": ("sign", {}),
    "sign_per_1024": ("sign", {"per": 1024}),
    "qsgd_8_per_512": ("qsgd", {"bits": 8, "per": 512}),
    "natural": ("natural", {}),
    "e3m0": ("e3m0", {}),
    "top_k_.01": ("top_k", {"ratio": 0.01}),
    "sparse_4096_1/64_2bit": ("sparse", {"size": 4096, "density": 1 / 64, "bits": 2}),
    "sparse_4096_1/64_float": ("sparse", {"size": 4096, "density": 1 / 64, "bits": 0}),
    "sparse_4096_1/32_2bit": ("sparse", {"size": 4096, "density": 1 / 32, "bits": 2}),
}


@pytest.mark.parametrize("row", GOLDEN["bytes"], ids=lambda row: str(row["n"]))
def test_golden_bytes(row):
    n = row["n"]
    golden = {name: row[name] for name in NAMED}
    assert {name: codec.bytes(n) for name, codec in NAMED.items()} == golden
    if n <= 10_000:  # the reference goes from number to number
        assert {name: reference.sizes(kind, n, **more) for name, (kind, more) in SETTINGS.items()} == golden


# --- what all codecs promise ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_block_decodes_as_each_client_alone(codec):
    v, keys = counted.normal(counted.key("v", torch.arange(3)), 50).float(), counted.key("k", torch.arange(3))
    block = vmap(lambda each, key: codec.decode(codec.encode(each, key), 50).float())(v, keys)
    torch.testing.assert_close(
        block, torch.stack([decoded(codec, *pair).float() for pair in zip(v, keys, strict=True)])
    )


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_zeros_are_zeros(codec):
    for n in (1, 2, 9, 4097):
        assert not decoded(codec, torch.zeros(n)).any()


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_numbers_that_are_finite_stay_finite(codec):
    for v in ([3.0], [2.5] * 9, [1e-45, -1e-39, 0.0], [1e38, 5e37, -2e37, 0.0]):
        assert decoded(codec, torch.tensor(v)).isfinite().all(), v


@pytest.mark.parametrize("to", ["bfloat16", "float16"])
def test_a_number_beyond_a_type_of_two_bytes_is_sent_as_its_largest(to):
    """What is not finite stays so, and a run that diverges is known as one."""
    most, beyond = torch.finfo(getattr(torch, to)).max, torch.finfo(torch.float32).max
    found = decoded(Cast(to), torch.tensor([beyond, -beyond, math.inf, -math.inf, math.nan, 1.0])).tolist()
    assert found[:4] == [most, -most, math.inf, -math.inf]
    assert math.isnan(found[4])
    assert found[5] == 1


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_the_largest_floats_become_no_nan(codec):
    """Also where a norm, or a sum, is larger than all floats."""
    most = torch.finfo(torch.float32).max
    for v in ([most], [-most], [most] * 9, [most, -most], [most, -most, 0.0, 1.0] * 3):
        assert not decoded(codec, torch.tensor(v)).isnan().any(), v


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_run_that_diverges_is_seen_to(codec):
    for broken in (torch.nan, torch.inf, -torch.inf):
        v = torch.ones(9)
        v[4] = broken
        assert not decoded(codec, v).isfinite().all(), broken


@pytest.mark.parametrize("codec", [Qsgd(3, 4), Natural()], ids=str)
def test_unbiased(codec):
    """The mean of 20,000 draws is within five standard errors of the vector."""
    v = counted.normal(counted.key("v"), 9)
    draws = vmap(lambda key: decoded(codec, v, key))(counted.key("draw", torch.arange(20_000)))
    error = draws.std(0) / 20_000**0.5
    assert ((draws.mean(0) - v).abs() <= 5 * error + 1e-12).all()
    assert (error[:8] > 0).all()  # the last number is a group of its own for one of them, and exact


@pytest.mark.parametrize(("bits", "error"), [(8, 0.018), (4, 0.11), (2, 0.43)])
def test_errors_of_statistical_codes_of_normal_numbers(bits, error):
    v = counted.normal(counted.key("normal"), 20_000)
    assert float((decoded(Statistical(bits), v) - v).norm() / v.norm()) == pytest.approx(error, rel=0.15)


# --- settings that are refused ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"name": "statistical", "bits": 1},
            "2 <= bits <= 8 must hold for statistical, got bits=1, which would send the mean alone; choose sign",
        ),
        ({"name": "linear", "bits": 17}, "1 <= bits <= 16 must hold for linear, got bits=17"),
        ({"name": "absmax", "bits": 1}, "2 <= bits <= 16 must hold for absmax, got bits=1; choose sign"),
        ({"name": "qsgd", "bits": 9}, "2 <= bits <= 8 must hold for qsgd, got bits=9"),
        ({"name": "sparse", "bits": 1}, "2 <= bits <= 8 must hold for sparse, or bits=0 for floats, got bits=1"),
        ({"name": "sign", "per": 0}, "per >= 1 must hold, got per=0; leave it out for one group"),
        ({"name": "top_k", "ratio": 0.0}, r"0 < ratio <= 1 must hold, got ratio=0\.0"),
        ({"name": "cast", "to": "int8"}, "to .*'bfloat16' or 'float16', got 'int8'"),
    ],
)
def test_refused_in_a_sentence(spec, said):
    with pytest.raises(ConfigError, match=f"^method.compression.codec.*{said}$"):
        Registry().build("CODECS", spec, "method.compression.codec")
