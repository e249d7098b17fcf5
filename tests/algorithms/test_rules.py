"""Local rules: they have the bits of torch.optim, many clients at once give the same as one at a time, layer scales,
and settings that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfleet.algorithms.parts.muon import NewtonSchulz, Spectral, Svd, as_matrix, lmo, muon
from fedfleet.algorithms.parts.rules import Adam, Averaged, Clip, Momentum, Normalised, Sgd, adamw
from fedfleet.algorithms.parts.split import Group, grouped
from fedfleet.algorithms.tree import Tree
from tests.algorithms.problems import SHAPES
from tests.reference import low_communication

torch.set_num_threads(1)
TORCH = {"jordan": "original", "moonlight": "match_rms_adamw"}


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def random_tree(seed):
    return Tree.of({name: draw(*shape, seed=(seed, n)) for n, (name, shape) in enumerate(SHAPES.items())})


def walk(rule, x, gradients):
    state = rule.init(x)
    for g in gradients:
        x, state = rule.step(x, g, state)
    return x


def torch_walk(optimiser, leaves, gradients):
    for g in gradients:
        for name, leaf in leaves.items():
            leaf.grad = g[name].clone()
        optimiser.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", TORCH)
def test_muon_has_the_bits_of_torch(scale, weight_decay, nesterov):
    """Five steps on square, wide and tall matrices, with float32 parameters and bfloat16 iterations, have the bits of
    torch."""
    shapes = {"square": (16, 16), "wide": (8, 24), "tall": (24, 8)}
    x = Tree.of({name: draw(*shape, seed=n).float() for n, (name, shape) in enumerate(shapes.items())})
    gradients = [x.map(lambda _, leaf, s=s: draw(*leaf.shape, seed=s).float()) for s in range(10, 15)]
    ball = NewtonSchulz(5, "jordan", "bfloat16")
    ours = walk(muon(0.02, 0.1, 0.95, nesterov, ball, scale, weight_decay), x, gradients)
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in x.items()}
    settings = {"lr": 0.02, "weight_decay": weight_decay, "nesterov": nesterov, "adjust_lr_fn": TORCH[scale]}
    torch_walk(torch.optim.Muon(leaves.values(), momentum=0.95, **settings), leaves, gradients)
    for name, leaf in leaves.items():
        assert torch.equal(ours[name], leaf), f"{name}: {(ours[name] - leaf).abs().max()}"
        assert (ours[name] - x[name]).abs().max() > 1e-3


TORCH_RULES = {
    "sgd": (Sgd(0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (Momentum(0.1, 0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (Momentum(0.1, 0.9, True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam(0.01), torch.optim.Adam, {"lr": 0.01}),
    "adamw": (adamw(0.01), torch.optim.AdamW, {"lr": 0.01}),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", TORCH_RULES)
def test_rules_are_torchs(name, dtype, tolerance):
    """Twenty steps agree with torch's. Tolerances: rounding in float64; in float32, 20 roundings of 6e-8, and Adam's 1
    - 0.999^t, which is 1e-3 at first and has a relative error of 1e-5, so that a step of 0.01 has an error of 1e-7."""
    rule, optimiser, settings = TORCH_RULES[name]
    x, gradients = random_tree(0).to(dtype), [random_tree(s).to(dtype) for s in range(1, 21)]
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in x.items()}
    torch_walk(optimiser(leaves.values(), **settings), leaves, gradients)
    ours = walk(rule, x, gradients)
    for leaf_name, leaf in leaves.items():
        torch.testing.assert_close(ours[leaf_name], leaf.data, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("no_decay", [(), ("V", "ker*")])
def test_decay_on_matrices_is_that_of_groups_of_parameters(no_decay):
    """torch's way to let vectors, and tensors with these names, alone."""
    x, gradients = random_tree(0), [random_tree(s) for s in range(1, 21)]
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in x.items()}
    kept = {"b", "V", "kernel"} if no_decay else {"b"}
    groups = [
        {"params": [leaf for name, leaf in leaves.items() if (name in kept) == decayless], "weight_decay": decay}
        for decayless, decay in ((False, 0.3), (True, 0.0))
    ]
    torch_walk(torch.optim.AdamW(groups, lr=0.01), leaves, gradients)
    ours = walk(adamw(0.01, weight_decay=0.3, decay_on="matrices", no_decay=no_decay), x, gradients)
    for name, leaf in leaves.items():
        torch.testing.assert_close(ours[name], leaf.data, rtol=1e-13, atol=1e-13)


def test_groups_are_those_of_torch():
    """A tensor has the numbers of the first group that it matches; the others have those of the rule."""
    x, gradients = random_tree(0), [random_tree(s) for s in range(1, 21)]
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in x.items()}
    own = {"kernel": {"lr": 0.03}, "b": {"lr": 0.02, "weight_decay": 0.0}}
    groups = [{"params": [leaf], **own.get(name, {})} for name, leaf in leaves.items()]
    torch_walk(torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3), leaves, gradients)
    first = Group(("ker*",), 0.03), Group(("b", "kernel"), 0.02, 0.0)
    ours = walk(grouped(adamw(0.01, weight_decay=0.3), first), x, gradients)
    for name, leaf in leaves.items():
        torch.testing.assert_close(ours[name], leaf.data, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((), "groups must have at least one group"),
        ((Group(("*",)),), "groups.0 changes nothing; give it lr or weight_decay"),
        ((Group(("*",), 0.1), Group((), 0.1)), "groups.1.match must have at least one pattern"),
        ((Group(("*",), 0.1, 0.2),), "groups.0.weight_decay: sgd has no such number"),
    ],
)
def test_groups_without_a_meaning_are_refused(groups, said):
    with pytest.raises(ValueError, match=said):
        grouped(Sgd(0.1), groups)


def test_golden_values_of_decay_on_matrices():
    """The first two numbers are a matrix and the others a vector; the step sizes follow a cosine after a warm-up."""
    golden = json.loads((Path(low_communication.__file__).parent / "low_communication.json").read_text())
    h, c = (torch.tensor(golden["diloco"][name][0], dtype=torch.float64) for name in "hc")
    y = Tree.of({"matrix": torch.full((1, 2), 2.0).double(), "vector": torch.full((2,), 2.0).double()})
    state = None
    for step, expected in enumerate(golden["adamw_decay_on_the_first_two_cosine_warmup2_T5_y0_all_2"], 1):
        lr = 0.3 * low_communication.factor("cosine", step, 5, 2, 0.1)
        rule = Clip(adamw(lr, (0.9, 0.95), 0.5, 0.1, "matrices"), 1.0)
        y, state = rule.step(y, Tree(h * (y.flat - c), y.layout), rule.init(y) if state is None else state)
        torch.testing.assert_close(y.flat, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"no_decay": ("*embed*",)}, "no_decay has no effect here, .* all tensors decay"),
        ({"decay_on": "vectors"}, "decay_on must be all or matrices, got 'vectors'"),
    ],
)
def test_decay_is_refused_where_it_can_have_no_effect(given, said):
    with pytest.raises(ValueError, match=said):
        adamw(**given)


RULES = {
    "sgd": Sgd(0.1),
    "adamw, matrices": adamw(0.1, weight_decay=0.2, decay_on="matrices"),
    "momentum": Momentum(0.1),
    "nesterov": Momentum(0.1, nesterov=True),
    "adam": Adam(0.1),
    "adamw": adamw(0.1, weight_decay=0.2),
    "averaged": Averaged(Sgd(0.1)),
    "normalised": Normalised(0.1),
    "clip": Clip(Momentum(0.1), 5.0),
    "muon": muon(0.1, 0.1),
    "muon, adam on vectors": muon(0.1, Adam(0.1), ball=NewtonSchulz(6, "polar_express"), weight_decay=0.1),
    "lmo spectral": lmo("spectral", 0.1),
    "lmo svd": lmo("spectral", 0.1, ball=Svd()),
    "lmo euclidean": lmo("euclidean", 0.1),
    "lmo max": lmo("max", 0.1),
    "groups": Clip(grouped(Momentum(0.1), (Group(("W", "b"), 0.3), Group(("ker*",), 0.2))), 5.0),
    "groups of all tensors": grouped(adamw(0.1, weight_decay=0.2), (Group(("*",), 0.2, 0.0),)),
}


@pytest.mark.parametrize("name", RULES)
def test_many_clients_at_once_equal_one_at_a_time(name):
    """Three steps under vmap, with the same x for all clients, equal those of one client at a time. The tolerance of
    1e-12 is float64 rounding in another order, times the slope of the iterations at 0 on these well-conditioned
    matrices."""
    rule, x, clients = RULES[name], random_tree(0), 4
    gradients = [[random_tree(10 * i + k) for k in range(1, 4)] for i in range(clients)]

    def trip(flats):
        return walk(rule, x, [Tree(flat, x.layout) for flat in flats]).flat

    together = torch.func.vmap(trip)(torch.stack([torch.stack([g.flat for g in own]) for own in gradients]))
    alone = torch.stack([walk(rule, x, own).flat for own in gradients])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_state_keeps_structure_shapes_and_types(name):
    rule, x = RULES[name], random_tree(0).to(torch.float32)
    before = rule.init(x)
    y, after = rule.step(x, random_tree(1).to(torch.float32), before)
    leaves, structure = torch.utils._pytree.tree_flatten(before)
    next_leaves, next_structure = torch.utils._pytree.tree_flatten(after)
    assert structure == next_structure
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in next_leaves]
    assert (y.flat.dtype, y.layout) == (x.flat.dtype, x.layout)


@pytest.mark.parametrize("name", RULES)
def test_a_zero_direction_does_not_move(name):
    """A zero direction gives neither a move nor NaN, except for weight decay."""
    rule, x = RULES[name], random_tree(0)
    if name not in ("adamw", "adamw, matrices", "muon, adam on vectors"):
        assert torch.equal(walk(rule, x, [x.zeros()] * 2).flat, x.flat)
    assert walk(rule, x, [x.zeros()]).flat.isfinite().all()


@pytest.mark.parametrize("scale", ["none", "jordan", "moonlight", "spectral"])
def test_scale_of_the_flattened_matrix(scale):
    """With the exact polar factor, the step of a (2, 3, 2, 2) kernel is that of its 2 x 12 matrix."""
    factor = {"none": 1.0, "jordan": 1.0, "moonlight": 0.2 * 12**0.5, "spectral": (2 / 12) ** 0.5}[scale]
    v = draw(2, 3, 2, 2)
    moved = walk(Spectral(1.0, ball=Svd(), scale=scale), Tree.of({"w": torch.zeros_like(v)}), [Tree.of({"w": v})])
    singular = torch.linalg.svdvals(moved["w"].reshape(2, 12))
    torch.testing.assert_close(singular, torch.full((2,), factor, dtype=v.dtype), rtol=1e-12, atol=0)
    assert as_matrix((2, 3, 2, 2)) == (2, 12)
    assert as_matrix((3,)) is None
    assert as_matrix(()) is None


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (2, 3, 2, 2)], ids=str)
def test_moonlight_gives_an_rms_of_one_fifth(shape):
    v = Tree.of({"w": draw(*shape)})
    moved = walk(lmo("spectral", 1.0, ball=Svd()), v.zeros(), [v])["w"]
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2, rel=1e-12)
    close = walk(lmo("spectral", 1.0, ball=NewtonSchulz(8, "polar_express")), v.zeros(), [v])["w"]
    assert float(close.square().mean().sqrt()) == pytest.approx(0.2, rel=1e-2)


def test_norms_that_see_one_vector():
    """A step with norm euclidean has length lr over all leaves together; with norm max, each number moves by lr."""
    x, v = random_tree(0), random_tree(1)
    assert float((walk(lmo("euclidean", 0.3), x, [v]) - x).norm()) == pytest.approx(0.3, rel=1e-12)
    step = walk(lmo("max", 0.3), x, [v]).flat - x.flat
    torch.testing.assert_close(step, -0.3 * v.flat.sign(), rtol=1e-12, atol=1e-12)


def test_clip_leaves_short_directions():
    x, v = random_tree(0), random_tree(1)
    assert torch.equal(walk(Clip(Sgd(0.1), 1e9), x, [v]).flat, walk(Sgd(0.1), x, [v]).flat)
    assert float((walk(Clip(Sgd(1.0), 2.0), x, [v]) - x).norm()) == pytest.approx(2.0, rel=1e-12)
