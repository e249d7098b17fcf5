"""q-FFL: golden values, and trajectories against the slow reference. The table of `identities` has q = 0."""

import numpy as np
import pytest

from fedfleet.algorithms.parts.rules import Clip, Sgd
from fedfleet.algorithms.qffl import qffl
from tests.algorithms.driver import run
from tests.algorithms.keyed import same
from tests.algorithms.own import CASES, PROBLEMS
from tests.algorithms.problems import Quadratic, flatten, partial
from tests.reference import fairness as reference

PROBLEM = PROBLEMS["line"]
SIZES = [len(rows) for rows in PROBLEM.rows]
DIGITS = 1e-10
"""The values have at most 13 digits, of numbers of about 1, and nothing is added to their losses; absolute."""


@pytest.mark.parametrize("name", ["qffl q=1", "qffl q=0.5, weights by examples"])
def test_golden_values(name):
    """The engine's runs of both are in `tests.engine.test_own_models`; here means are plain."""
    case = CASES[name][1]
    q, weights = case.settings["q"], case.settings.get("weights", "uniform")
    path = reference.qffl(PROBLEM, SIZES, *case.timetable, 0.1, q, weights)
    for x, expected in zip(path, case.expected["x"], strict=True):
        np.testing.assert_allclose(flatten(x), expected, rtol=0, atol=DIGITS)
    if weights == "uniform":
        for model, expected in zip(run(qffl(q), PROBLEM, *case.timetable).models(), case.expected["x"], strict=True):
            np.testing.assert_allclose(model.flat, expected, rtol=0, atol=DIGITS)


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0, 3.0])
def test_trajectories(q):
    """Unequal numbers of local steps of five clients on noisy quadratics."""
    problem, (cohorts, steps) = Quadratic(), partial()
    expected = reference.qffl(problem, [1] * problem.clients, cohorts, steps, 0.05, q)
    for model, x in zip(run(qffl(q, Sgd(0.05)), problem, cohorts, steps).models(), expected, strict=True):
        same(model, x)


def test_a_rule_without_a_rate_needs_its_constant():
    with pytest.raises(ValueError, match="L must be given with a rule that has no one lr, got rule=Clip"):
        qffl(rule=Clip(Sgd(0.1), 1.0))
