"""IFCA and CFL: golden values; IFCA against the slow reference; CFL's cuts. The table of `identities` has k = 1."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.cfl import Clusters, cfl, cosines, halves
from fedfleet.algorithms.contract import RunContext, Viewer
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.ifca import Ifca, ifca
from fedfleet.algorithms.local import LocalMethod
from fedfleet.algorithms.parts.rules import Sgd
from tests.algorithms.driver import arrays, run, tree
from tests.algorithms.keyed import same
from tests.algorithms.own import CASES, PROBLEMS
from tests.algorithms.problems import Quadratic, flatten, partial, unflatten
from tests.reference import clusters as reference

DIGITS = 1e-10
"""The values have at most 13 digits, of numbers of about 1; absolute."""


@dataclass(frozen=True)
class Given(Ifca):
    """`given`: the models before round 1, as flat lists."""

    given: tuple[tuple[float, ...], ...] = ()

    def starts(self, x):
        return tuple(x._with(torch.tensor(flat, dtype=x.flat.dtype)) for flat in self.given)


def with_starts(starts):
    method = fedavg(Sgd(0.1))
    assert isinstance(method, LocalMethod)
    return Given(method, len(starts), 1.0, given=tuple(map(tuple, starts)))


def test_golden_values():
    problem, case = CASES["ifca"]
    problem, starts = PROBLEMS[problem], case.settings["starts"]
    models = [unflatten(np.array(flat, dtype=float), problem.shapes) for flat in starts]
    path, chosen, own = reference.ifca(problem, models, *case.timetable, 0.1)
    assert (chosen, own) == (case.expected["chosen"], case.expected["own"])
    result = run(with_starts(starts), problem, *case.timetable)
    for server, slow, expected in zip(result.servers, path, case.expected["x"], strict=True):
        for x, other, golden in zip(server.public, slow, expected, strict=True):
            np.testing.assert_allclose(flatten(other), golden, rtol=0, atol=DIGITS)
            np.testing.assert_allclose(x.flat, golden, rtol=0, atol=DIGITS)
    for model, golden in zip(result.own_models(), case.expected["models"], strict=True):
        np.testing.assert_allclose(model.flat, golden, rtol=0, atol=DIGITS)


@pytest.mark.parametrize("spread", [0.2, 0.5])
def test_trajectories(spread):
    """Three models of five clients on noisy quadratics, with unequal numbers of local steps."""
    problem, (cohorts, steps) = Quadratic(), partial()
    method = ifca(3, Sgd(0.05), spread).build(RunContext(3, 5, 6, None, 4))
    starts = [arrays(x) for x in method.starts(tree(problem.start))]
    path, chosen, _ = reference.ifca(problem, starts, cohorts, steps, 0.05)
    assert len({j for choices in chosen for j in choices}) > 1
    for server, expected in zip(run(method, problem, cohorts, steps).servers, path, strict=True):
        for x, other in zip(server.public, expected, strict=True):
            same(x, other)


def test_models_are_drawn_by_the_workload():
    drawn = {seed: tree({"w": np.full(3, float(seed % 1000))}) for seed in range(3)}

    def model(seed):
        return drawn.setdefault(seed, tree({"w": np.full(3, float(seed % 1000))}))

    context = RunContext(2, 4, 3, 1, 1, drawn=model)
    first, *others = ifca(3).build(context).starts(drawn[1])
    assert first is drawn[1]
    assert {float(x.flat[0]) for x in others} <= {float(x.flat[0]) for x in drawn.values()}
    assert len({float(x.flat[0]) for x in (first, *others)}) == 3
    assert torch.equal(ifca(3).build(context).starts(first)[2].flat, others[1].flat)
    with pytest.raises(ValueError, match="the same model for every seed; give spread"):
        ifca().build(RunContext(2, 4, 3, 1, 1, drawn=lambda seed: first))


def test_models_begin_as_far_apart_as_asked():
    """The numbers that are added have the deviation of `spread` times the root mean square of each tensor."""
    x = tree({"big": np.full(20_000, 3.0), "zero": np.zeros(5)})
    first, second = ifca(2, spread=0.5).build(RunContext(1, 1, 1, 1, 7)).starts(x)
    assert first is x
    added = second - x
    assert float(added["big"].std()) == pytest.approx(1.5, rel=0.03)  # five deviations of the estimate
    assert not added["zero"].any()


# --- CFL --------------------------------------------------------------------------------------------------------------
def test_golden_values_of_cfl():
    problem, case = CASES["cfl"]
    problem, settings = PROBLEMS[problem], {**case.settings}
    method = cfl(Sgd(settings.pop("lr")), **settings).build(RunContext(5, 5, 3, case.K))
    result = run(method, problem, *case.timetable)
    for server, models, clusters in zip(result.servers, case.expected["x"], case.expected["clusters"], strict=True):
        for x, golden in zip(server.public.models, models, strict=False):
            np.testing.assert_allclose(x.flat, golden, rtol=0, atol=DIGITS)
        assert [(server.public.of == c).nonzero().flatten().tolist() for c in range(len(clusters))] == clusters
    for model, golden in zip(result.own_models(), case.expected["models"], strict=True):
        np.testing.assert_allclose(model.flat, golden, rtol=0, atol=DIGITS)


GIVEN = [
    ([[1, 0.9, 0.1, 0.2, 0.3], [0.9, 1, 0.6, 0.2, 0.1], [0.1, 0.6, 1, 0.5, 0.4], [0.2, 0.2, 0.5, 1, 0.8],
      [0.3, 0.1, 0.4, 0.8, 1]], ([0, 1, 2], [3, 4]), ([0, 1], [2, 3, 4])),
    ([[1, 0.8, -0.5, -0.4], [0.8, 1, -0.3, -0.6], [-0.5, -0.3, 1, 0.7], [-0.4, -0.6, 0.7, 1]],
     ([0, 1], [2, 3]), ([0, 1], [2, 3])),
]  # fmt: skip
"""Similarities, and the parts by single and by complete linkage."""


@pytest.mark.parametrize(("similarity", "single", "complete"), GIVEN, ids=["chain", "two pairs"])
def test_golden_cuts(similarity, single, complete):
    cuts: Any = (("single", single), ("complete", complete))
    for linkage, expected in cuts:
        found = halves(np.array(similarity), linkage)
        assert tuple(part.tolist() for part in found) == expected


@pytest.mark.parametrize("seed", range(10))
def test_single_linkage_is_the_cut_with_the_smallest_largest_similarity(seed):
    """Among all 2^(n - 1) - 1 cuts of seven vectors."""
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(7, 3))
    similarity, everyone = cosines(vectors @ vectors.T), set(range(7))

    def across(part):
        return similarity[np.ix_(sorted(part), sorted(everyone - part))].max()

    cuts = [{0, *rest} for size in range(6) for rest in combinations(range(1, 7), size)]
    part, _ = halves(similarity.copy(), "single")
    assert {*part.tolist()} == min(cuts, key=across)


def slow_halves(similarity, linkage):
    """By the definition: of all pairs of parts, the most similar one is joined, of equals the first in order."""
    join = max if linkage == "single" else min
    parts = [[i] for i in range(len(similarity))]
    while len(parts) > 2:
        pairs = list(combinations(range(len(parts)), 2))
        found = [join(similarity[i, j] for i in parts[a] for j in parts[b]) for a, b in pairs]
        a, b = pairs[int(np.argmax(found))]
        parts[a] += parts.pop(b)
    return tuple(sorted(part) for part in parts)


@pytest.mark.parametrize("linkage", ["single", "complete"])
@pytest.mark.parametrize("digits", [0, 1, 9])
def test_cuts_are_those_of_the_definition(linkage: Any, digits: int):
    """Also where many similarities are equal."""
    for seed in range(12):
        random = np.random.default_rng(seed)
        vectors = random.normal(size=(int(random.integers(2, 15)), 3))
        similarity = np.round(cosines(vectors @ vectors.T), digits)
        similarity = np.maximum(similarity, similarity.T)
        expected = slow_halves(similarity, linkage)
        assert tuple(part.tolist() for part in halves(similarity, linkage)) == expected


def test_clients_of_a_cluster_share_its_model():
    """So that an evaluation of many clients has each model in memory once."""
    method = cfl(most=3).build(RunContext(4, 4, 3, 1))
    x = tree({"w": np.arange(3.0)})
    public = Clusters((x, x + x, x.zeros()), torch.tensor([0, 1, 1, 0]))
    views = [method.view(public, Viewer(torch.tensor(i), torch.tensor(1.0)), torch.zeros(0)) for i in range(5)]
    models = [method.client_model(x, view, ()) for view in views]
    assert [model.flat.data_ptr() for model in models[:2]] == [one.flat.data_ptr() for one in public.models[:2]]
    assert [model is models[0] for model in models] == [
        True,
        False,
        False,
        True,
        True,
    ]  # the last is new


def test_equally_similar_parts_are_joined_by_their_smallest_members():
    """Of four vectors that are alike, the first three are joined; a vector that is 0 is like no other."""
    for first, second in (halves(np.ones((4, 4)), "single"), halves(np.ones((4, 4)), "complete")):
        assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3])
    assert not cosines(np.zeros((2, 2))).any()


@pytest.mark.parametrize(
    ("most", "least", "after", "expected"), [(1, 2, 1, 1), (8, 5, 1, 1), (8, 2, 3, 1), (2, 2, 1, 2)]
)
def test_what_keeps_a_cluster_whole(most, least, after, expected):
    """There are `most` clusters already, no more than `least` clients, or no round behind `after`."""
    problem, case = CASES["cfl"]
    method = cfl(Sgd(0.1), eps1=0.9, eps2=0.5, most=most, least=least, after=after).build(RunContext(5, 5, 3, 2))
    result = run(method, PROBLEMS[problem], *case.timetable)
    assert int(result.servers[-1].public.of.max()) + 1 == expected
