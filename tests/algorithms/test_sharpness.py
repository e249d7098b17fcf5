"""FedSAM, FedASAM, MoFedSAM and FedCM: golden values, and trajectories against the slow reference.

Tolerances as in `test_trajectories`. The table of `identities` has what they are the same as.
"""

import pytest

from fedfleet.algorithms.fedcm import fedcm
from fedfleet.algorithms.fedsam import fedsam
from fedfleet.algorithms.mofedsam import mofedsam
from fedfleet.algorithms.parts.rules import Momentum, Sgd
from tests.algorithms.driver import run
from tests.algorithms.golden import CASES, PROBLEM, equal
from tests.algorithms.test_momenta import COHORTS, PROBLEMS, STEPS, agree, slow
from tests.reference import drift as reference
from tests.reference import rules

GOLDEN = {
    "fedsam": fedsam(Sgd(0.1), 0.5),
    "fedasam": fedsam(Sgd(0.1), 0.5, "asam", 0.01),
    "mofedsam": mofedsam(Sgd(0.1), 0.1, 0.5),
    "fedcm": fedcm(Sgd(0.1), 0.1),
}
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    case = CASES[name]
    settings = {key: value for key, value in case.settings.items() if key != "lr"}
    path = case.slow(reference.fedsam, rules.Sgd(case.settings["lr"]), **settings)
    result = run(GOLDEN[name], PROBLEM, *case.timetable)
    for model, x, expected in zip(result.models(), path.x, case.expected["x"], strict=True):
        equal(x, expected)
        equal(model, expected)
    equal(path.shared[-1]["momentum"], case.expected["G"])
    if "beta" in settings:
        equal(result.servers[-1].public.momentum, case.expected["G"])


@problems
@pytest.mark.parametrize(("kind", "eta"), [("sam", None), ("asam", 0.3)])
@pytest.mark.parametrize(
    ("fast", "plain"), [(Sgd(0.1), rules.Sgd(0.1)), (Momentum(0.03, 0.8), rules.Momentum(0.03, 0.8))]
)
def test_fedsam(problem, fast, plain, kind, eta):
    result = run(fedsam(fast, 0.4, kind, eta, 0.7), problem, COHORTS, STEPS)
    more = {} if eta is None else {"eta": eta}
    agree(result, slow(reference.fedsam, problem, plain, 0.4, server_lr=0.7, kind=kind, **more), {}, None)


@problems
@pytest.mark.parametrize(
    ("fast", "plain"), [(Sgd(0.1), rules.Sgd(0.1)), (Momentum(0.03, 0.8), rules.Momentum(0.03, 0.8))]
)
@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_with_a_shared_momentum(problem, rho, fast, plain):
    """Unequal numbers of local steps; with `momentum` as the rule clients send the mean of their directions."""
    method = mofedsam(fast, 0.3, rho, 0.8) if rho else fedcm(fast, 0.3, 0.8)
    expected = slow(reference.fedsam, problem, plain, rho, 0.3, 0.8)
    agree(run(method, problem, COHORTS, STEPS), expected, {"momentum": lambda public: public.momentum}, None)
