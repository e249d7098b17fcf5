"""Models of clients: golden values of their states, of the server's model and of what clients are evaluated with."""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.local_only import local_only
from fedfleet.algorithms.parts.rules import Adam, Sgd
from fedfleet.algorithms.scaffold import scaffold
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.method_form.batch_norm import Buffered
from fedfleet.engine.method_form.personal import Division, Personal, Turns
from tests.algorithms.driver import run
from tests.algorithms.own import CASES, PROBLEMS, Problem

DIGITS = 1e-10
"""The values have at most 13 digits, of numbers of about 1; absolute."""


def with_personal(problem: Problem, names: list[str], method, **more):
    """A method with these personal tensors, and the model's running statistics beside it."""
    division = Division(problem.layout, tuple(names), sum(name in names for name in problem.statistics))
    count = len(problem.statistics) - division.statistics
    inner = Buffered(method, count) if count else method
    return Personal(inner, division, **{"rule": method.rule, **more}) if names else inner


def method_of(name: str):
    problem, case = CASES[name]
    settings = case.settings
    rule = Sgd(settings["lr"])
    if case.method == "partial":
        more = {"rule": Sgd(settings["lr_personal"])} if "lr_personal" in settings else {}
        more |= {"turns": Turns(*settings["split"])} if "split" in settings else {}
        return with_personal(PROBLEMS[problem], settings["personal"], fedavg(rule), **more)
    return local_only(rule)


PLAIN = [name for name, (_, case) in CASES.items() if "weights" not in case.settings]


@pytest.mark.parametrize("name", [name for name in PLAIN if CASES[name][1].method in ("partial", "local_only")])
def test_golden_values(name):
    where, case = CASES[name]
    problem = PROBLEMS[where]
    result = run(method_of(name), problem, *case.timetable)
    for model, expected in zip(result.models(), case.expected["x"], strict=True):
        np.testing.assert_allclose(model.flat, expected, rtol=0, atol=DIGITS)
    models = [model.flat for model in result.own_models()]
    np.testing.assert_allclose(torch.stack(models), case.expected["models"], rtol=0, atol=DIGITS)
    found = [problem.loss(i, model) for i, model in enumerate(models)]
    np.testing.assert_allclose(found, case.expected["losses"], rtol=0, atol=DIGITS)


def test_the_side_that_has_its_turn_later_begins_where_it_was():
    """A split with the shared side first has the same body as two steps in which the head stays."""
    problem, case = PROBLEMS["net"], CASES["fedrep [3, 2]"][1]
    names = case.settings["personal"]
    late = with_personal(problem, names, fedavg(Sgd(0.1)), turns=Turns(3, 2, "shared"))
    result = run(late, problem, [[0]], {(0, 0): 5})
    body = with_personal(problem, names, fedavg(Sgd(0.1)), rule=Sgd(1e-300))
    before = run(body, problem, [[0]], {(0, 0): 2})
    torch.testing.assert_close(result.models()[0].flat, before.models()[0].flat, rtol=0, atol=0)
    assert not torch.equal(result.clients[0][0].personal.flat, before.clients[0][0].personal.flat)


@pytest.mark.parametrize(("parts", "steps"), [((1, 1), 2), ((10, 1), 11), ((1, 3), 2), ((3, 2), 3)])
@pytest.mark.parametrize("first", ["personal", "shared"])
def test_the_fewest_steps_of_a_split(parts, steps, first):
    turns = Turns(*parts, first) if first == "personal" else Turns(*parts[::-1], first)
    assert turns.least_steps() == steps
    for count in (steps - 1, steps, 30):
        sides = [turns.is_personal(torch.tensor(k / count, dtype=torch.float64)) for k in range(count)]
        assert (len(set(map(bool, sides))) == 2) == (count >= steps)
        assert bool(sides[0]) == (first == "personal")
    assert sum(side == sides[0] for side in sides) == -(-30 * parts[0] // sum(parts))


def test_statistics_of_clients_change_no_parameter():
    """Training does not read running statistics: whether they are personal or averaged, the parameters of all rounds
    are the same to the bit."""
    problem, case = PROBLEMS["norm"], CASES["fedbn"][1]
    own, averaged = (
        run(with_personal(problem, list(names), fedavg(Sgd(0.1))), problem, *case.timetable)
        for names in (problem.statistics, ())
    )
    for one, other in zip(own.models(), averaged.models(), strict=True):
        for name in set(problem.shapes) - set(problem.statistics):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_the_state_of_the_personal_rule_is_kept_or_reset():
    """With carry: keep, K steps in each of two visits of a client that is alone are those of 2K steps in one, if the
    shared side does not move."""
    problem = PROBLEMS["net"]
    names = ["out.weight", "out.bias"]
    still = fedavg(Sgd(1e-300))
    kept, reset = (with_personal(problem, names, still, rule=Adam(0.05), keep=keep) for keep in (True, False))
    once = run(reset, problem, [[0]], {(0, 0): 6}).clients[-1][0].personal.flat
    visits = [[0], [0]], {(0, 0): 3, (1, 0): 3}
    torch.testing.assert_close(run(kept, problem, *visits).clients[-1][0].personal.flat, once, rtol=1e-14, atol=1e-14)
    assert not torch.allclose(run(reset, problem, *visits).clients[-1][0].personal.flat, once, atol=1e-6)


@pytest.mark.parametrize("names", [["fc1.weight"], ["fc1.bias", "out.bias"], ["out.weight", "out.bias"]])
def test_trees_are_divided_and_joined(names):
    problem = PROBLEMS["net"]
    division = Division(problem.layout, tuple(names))
    flat = torch.arange(9.0)
    whole = division.join(*division.split(Tree(flat, problem.layout)))
    assert torch.equal(whole.flat, flat)
    shared, personal = division.split(whole)
    assert list(personal) == names
    assert list(shared) == [name for name in problem.shapes if name not in names]
    assert all(torch.equal(part[name], whole[name]) for part in (shared, personal) for name in part)


def test_a_method_with_states_sees_shared_tensors_alone():
    problem = PROBLEMS["net"]
    method = with_personal(problem, ["out.weight", "out.bias"], scaffold(Sgd(0.1)))
    result = run(method, problem, [[0, 1], [1, 2]], {(r, i): 2 for r in range(2) for i in range(3)})
    assert list(result.clients[-1][1].method.own) == ["fc1.weight", "fc1.bias"]
