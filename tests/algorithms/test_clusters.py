"""IFCA: golden values, and trajectories against the slow reference. The table of `identities` has k = 1."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.ifca import Ifca, ifca
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
    return Given(fedavg(Sgd(0.1)), len(starts), 1.0, given=tuple(map(tuple, starts)))


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


def test_models_begin_as_far_apart_as_asked():
    """The numbers that are added have the deviation of `spread` times the root mean square of each tensor."""
    x = tree({"big": np.full(20_000, 3.0), "zero": np.zeros(5)})
    first, second = ifca(2, spread=0.5).build(RunContext(1, 1, 1, 1, 7)).starts(x)
    assert first is x
    added = second - x
    assert float(added["big"].std()) == pytest.approx(1.5, rel=0.03)  # five deviations of the estimate
    assert not added["zero"].any()
