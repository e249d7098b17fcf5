"""Models of clients: golden values of their states, of the server's model and of what clients are evaluated with."""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.apfl import apfl
from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.ditto import Ditto, ditto
from fedfleet.algorithms.fedadam import fedadam
from fedfleet.algorithms.fedadmm import fedadmm
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.feddyn import feddyn
from fedfleet.algorithms.flora import flora
from fedfleet.algorithms.local_only import local_only
from fedfleet.algorithms.parts.rules import Adam, Sgd
from fedfleet.algorithms.parts.turns import Turns
from fedfleet.algorithms.per_fedavg import per_fedavg
from fedfleet.algorithms.pfedme import pfedme
from fedfleet.algorithms.qffl import qffl
from fedfleet.algorithms.scaffold import scaffold
from fedfleet.algorithms.streaming_diloco import streaming_diloco
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.method_form.batch_norm import Buffered
from fedfleet.engine.method_form.personal import Division, Personal
from fedfleet.engine.method_form.state_spec import StateSpec
from tests.algorithms.driver import arrays, run, tree
from tests.algorithms.own import CASES, PROBLEMS, Problem
from tests.algorithms.problems import unflatten

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
    if case.method == "local_only":
        return local_only(rule)
    more = {name: value for name, value in settings.items() if name not in ("lr", "lr_personal")}
    own = {"ditto": ditto, "pfedme": pfedme, "apfl": apfl}[case.method]
    return own(rule=rule, personal_rule=Sgd(settings["lr_personal"]), **more)


METHODS = ("partial", "local_only", "ditto", "pfedme", "apfl")
PLAIN = [name for name, (_, case) in CASES.items() if "weights" not in case.settings and case.method in METHODS]


@pytest.mark.parametrize("name", PLAIN)
def test_golden_values(name):
    where, case = CASES[name]
    problem = PROBLEMS[where]
    result = run(method_of(name), problem, *case.timetable)
    for model, expected in zip(result.models(), case.expected["x"], strict=True):
        np.testing.assert_allclose(model.flat, expected, rtol=0, atol=DIGITS)
    models = result.own_models()
    np.testing.assert_allclose(torch.stack([y.flat for y in models]), case.expected["models"], rtol=0, atol=DIGITS)
    found = [problem.loss(i, arrays(model)) for i, model in enumerate(models)]
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


# --- identities -------------------------------------------------------------------------------------------------------
ROUNDED = 1e-12
"""Where two ways to the same number round differently: 1e-16, grown by some hundred operations on numbers near 1."""


def on_line(method):
    """A run of golden cohorts on the small regression."""
    return run(method, PROBLEMS["line"], *CASES["ditto"][1].timetable)


def flat(trees):
    return torch.stack([each.flat for each in trees])


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_the_servers_model_of_ditto_is_that_of_fedavg(lam):
    assert torch.equal(flat(on_line(ditto(lam)).models()), flat(on_line(fedavg()).models()))


@pytest.mark.parametrize(
    "base", [scaffold(Sgd(0.1)), fedadam(Sgd(0.1)), feddyn(Sgd(0.1), 0.5)], ids=["scaffold", "fedadam", "feddyn"]
)
def test_ditto_around_a_method_has_its_model(base):
    found = on_line(ditto(0.0, personal_rule=Sgd(0.1), start="initial", base=base))
    assert torch.equal(flat(found.models()), flat(on_line(base).models()))
    assert torch.equal(flat(found.own_models()), flat(on_line(local_only()).own_models()))


def test_ditto_sends_what_its_method_sends():
    """The bytes that a method counts by itself, here those of the fragments that are exchanged."""
    x = tree({"first": np.ones((2, 3)), "last": np.ones(2)})
    base = streaming_diloco(layers=1).build(RunContext(3, 3, 4, 2, layout=x.layout))
    around = ditto(personal_rule=Sgd(0.1), base=base)
    assert isinstance(around, Ditto)
    for round in (1, 2, 3):
        assert StateSpec(around, x).traffic(around, round) == StateSpec(base, x).traffic(base, round)


def test_ditto_moves_one_side_and_then_the_other():
    """With a split of [3, 1] and 4 steps v takes three and y one; batches are all alike."""
    cohorts, _ = CASES["ditto"][1].timetable

    def of(method, count):
        return run(method, PROBLEMS["line"], cohorts, {(r, i): count for r in range(3) for i in range(3)})

    found = of(ditto(0.0, start="initial", split=(3, 1)), 4)
    assert torch.equal(flat(found.models()), flat(of(fedavg(), 1).models()))
    assert torch.equal(flat(found.own_models()), flat(of(local_only(), 3).own_models()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base": ditto()}, "got Ditto, which gives clients models of their own"),
        ({"base": qffl()}, "got QFedAvg, which lets clients make something of their own of the broadcast"),
        ({"base": scaffold(start="gradient")}, "which begins with a pass over all clients"),
        ({"base": fedadmm()}, "got FedAdmm, which sends no changes of a model"),
        ({"base": flora()}, "base must leave the weights beside adapters as they are"),
        ({"base": fedavg(), "rule": Sgd(0.2)}, "rule has no effect here"),
        ({"base": fedavg(), "personal_rule": None}, "personal_rule must be given with base"),
        ({"split": (0, 4)}, r"split must be two whole numbers of 1 or more, got \[0, 4\]"),
    ],
)
def test_what_ditto_does_not_go_around(given, message):
    with pytest.raises(ValueError, match=message):
        ditto(**{"personal_rule": Sgd(0.1), **given})


def test_ditto_without_a_pull_is_local_training():
    own, alone = (flat(on_line(method).own_models()) for method in (ditto(0.0, start="initial"), local_only()))
    assert torch.equal(own, alone)


def test_pfedme_with_one_exact_inner_step_is_fedavg():
    """theta = w - g / lam, so that w moves by lr lam (w - theta) = lr g."""
    exact = pfedme(lam=4.0, inner_steps=1, rule=Sgd(0.1), personal_rule=Sgd(0.25))
    found, expected = (flat(on_line(method).models()) for method in (exact, fedavg(Sgd(0.1))))
    torch.testing.assert_close(found, expected, rtol=ROUNDED, atol=ROUNDED)


@pytest.mark.parametrize(("alpha", "other"), [(0.0, fedavg()), (1.0, local_only())])
def test_apfl_with_a_share_that_stays(alpha, other):
    found, expected = on_line(apfl(alpha, update="never", start="initial")), on_line(other)
    assert torch.equal(flat(found.own_models()), flat(expected.own_models()))
    assert torch.equal(flat(found.models()), flat(on_line(fedavg()).models()))


def test_apfl_needs_a_step_size_of_its_share():
    with pytest.raises(ValueError, match="lr_alpha must be given with a rule like adam"):
        apfl(rule=Adam(0.1))
    with pytest.raises(ValueError, match="0 <= alpha <= 1 must hold"):
        apfl(alpha=1.5)


def meta(problem, i, y, lr, variant, delta):
    """The direction of one meta step of client i at y (P,), whose batches are all rows of the client."""

    def g(at):
        return tree(problem.gradient(i, unflatten(at, problem.shapes), 0, 0)).flat.numpy()

    outer = g(y - lr * g(y))
    if variant == "fo":
        return outer
    return outer - lr * (g(y + delta * outer) - g(y - delta * outer)) / (2 * delta)


@pytest.mark.parametrize(("variant", "group"), [("fo", 2), ("hf", 3)])
@pytest.mark.parametrize("batches", ["own", "same"])
def test_per_fedavg_takes_groups_of_batches(variant, group, batches):
    """Two meta steps of a slow version, whose batches are all alike; a step that is left over moves nothing."""
    problem, lr, delta = PROBLEMS["net"], 0.2, 0.01
    y = np.array(problem.at)
    for _ in range(2):
        y = y - 0.1 * meta(problem, 1, y, lr, variant, delta)
    given = {"delta": delta} if variant == "hf" else {}
    made = per_fedavg(lr, Sgd(0.1), variant, batches=batches, **given).build(RunContext(1, 3, 1, None))
    steps = [2 * group, 2 * group + 1] if batches == "own" else [2]
    for count in steps:
        (model,) = run(made, problem, [[1]], {(0, 1): count}).models()
        np.testing.assert_allclose(model.flat, y, rtol=0, atol=ROUNDED)


def test_per_fedavg_needs_whole_groups():
    with pytest.raises(ValueError, match="variant hf takes batches in groups of 3, got 10 local steps; choose 9 or 12"):
        per_fedavg(variant="hf").build(RunContext(1, 3, 1, 10))
