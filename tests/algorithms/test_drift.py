"""FedDyn, FedDC, FedADMM and MIFA: golden values, trajectories against the slow reference, invariants, points of rest.

Tolerances as in `test_trajectories` (TOLERANCE) and `identities` (ROUNDING); the table there has what the methods are
the same as.
"""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedadmm import fedadmm
from fedfleet.algorithms.feddc import feddc
from fedfleet.algorithms.feddyn import feddyn
from fedfleet.algorithms.mifa import mifa
from fedfleet.algorithms.parts.rules import Adam, Sgd
from fedfleet.engine import run as run_experiment
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare
from tests.algorithms.driver import run, tree
from tests.algorithms.golden import CASES, PROBLEM, equal
from tests.algorithms.identities import ROUNDING
from tests.algorithms.problems import Quadratic, everyone, partial
from tests.algorithms.test_global_rates import by_rounds
from tests.algorithms.test_momenta import COHORTS, PROBLEMS, STEPS, agree, slow
from tests.reference import drift as reference
from tests.reference import rules

problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
plain_and_adam = pytest.mark.parametrize(
    ("fast", "plain"), [(Sgd(0.1), rules.Sgd(0.1)), (Adam(0.03), rules.Adam(0.03))], ids=["sgd", "adam"]
)
SMALL = Quadratic(clients=3, noise=0.0, small=True)


def same_x(result, path, case):
    for model, x, expected in zip(result.models(), path.x, case.expected["x"], strict=True):
        equal(x, expected)
        equal(model, expected)


def rows(case):
    """(client, what it keeps), of the clients that took part."""
    return [(int(i), kept) for i, kept in case.expected["rows"].items()]


def rest(method, rounds=400):
    return run(method, SMALL, *everyone(3, rounds, 4)).models()[-1].flat.numpy()


# --- FedDyn -----------------------------------------------------------------------------------------------------------
def test_golden_values_of_feddyn():
    case = CASES["feddyn"]
    path = case.slow(reference.feddyn, rules.Sgd(0.1), 0.5)
    result = run(feddyn(Sgd(0.1), 0.5), PROBLEM, *case.timetable)
    same_x(result, path, case)
    for i, kept in rows(case):
        equal(result.clients[-1][i].own.drift, kept["d"])
        equal({name: -value / 0.5 for name, value in path.own[-1][i].items()}, kept["d"])
    means = run(feddyn(Sgd(0.1), 0.5, "mean"), PROBLEM, *case.timetable).models()
    for shared, model, expected in zip(path.shared, means, case.expected["mean"], strict=True):
        equal(shared["mean"], expected)
        equal(model, expected)


def test_golden_values_with_an_alpha_for_each_client():
    case = CASES["feddyn, alpha by examples"]
    result = run(feddyn(Sgd(0.1), 0.5, alpha_by="examples"), PROBLEM, *case.timetable)
    for model, expected in zip(result.models(), case.expected["x"], strict=True):
        equal(model, expected)
    for i, kept in rows(case):
        equal(result.clients[-1][i].own.drift, kept["d"])


@problems
@plain_and_adam
def test_feddyn(problem, fast, plain):
    """The paper's gradients L_i and h are -alpha times the displacements that the clients and the server add up."""
    result, path = run(feddyn(fast, 0.4), problem, COHORTS, STEPS), slow(reference.feddyn, problem, plain, 0.4)
    agree(result, path, {}, lambda client: client.own.drift * -0.4)
    for server, shared in zip(result.servers, path.shared, strict=True):
        torch.testing.assert_close(server.private.flat * -0.4, tree(shared["h"]).flat, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [feddyn(Sgd(0.1), 0.5), feddc(Sgd(0.1), 0.5)])
def test_d_is_the_mean_of_all_d_i(method):
    result = run(method, Quadratic(), *partial(rounds=12))
    for server, clients in zip(result.servers, result.clients, strict=True):
        own = torch.stack([client.own.drift.flat for client in clients]).mean(0)
        torch.testing.assert_close(server.private.flat, own, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("method", [feddyn(Sgd(0.1), 0.5), feddc(Sgd(0.1), 0.5)])
def test_they_rest_where_all_gradients_sum_to_zero(method):
    """Linear convergence to the optimum, although the clients' optima differ."""
    np.testing.assert_allclose(rest(method), SMALL.optimum, rtol=0, atol=1e-10)


# --- FedDC ------------------------------------------------------------------------------------------------------------
def test_golden_values_of_feddc():
    case = CASES["feddc"]
    path = case.slow(reference.feddc, 0.1, 0.5)
    result = run(feddc(Sgd(0.1), 0.5), PROBLEM, *case.timetable)
    same_x(result, path, case)
    for i, kept in rows(case):
        for own in (
            result.clients[-1][i].own._asdict(),
            {"drift": path.own[-1][i]["h"], "control": path.own[-1][i]["c"]},
        ):
            equal(own["drift"], kept["h"])
            equal(own["control"], kept["c"])
    equal(result.servers[-1].public.shared, case.expected["c"])
    equal(path.shared[-1]["c"], case.expected["c"])


@problems
@pytest.mark.parametrize("control", ["mean", "none"])
def test_feddc(problem, control):
    result = run(feddc(Sgd(0.1), 0.4, control), problem, COHORTS, STEPS)
    path = slow(reference.feddc, problem, 0.1, 0.4, control)
    agree(result, path._replace(own=[[o["h"] for o in own] for own in path.own]), {}, lambda client: client.own.drift)
    if control == "mean":
        agree(
            result,
            path._replace(own=[[o["c"] for o in own] for own in path.own]),
            {"c": lambda public: public.shared},
            lambda client: client.own.control,
        )


@pytest.mark.parametrize("method", [feddyn, feddc])
def test_a_weight_of_zero_is_refused(method):
    with pytest.raises(ValueError, match=r"^alpha must be more than 0, got 0\.0; choose fedavg$"):
        method(alpha=0.0)


# --- FedADMM ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedadmm", "fedadmm, over all, message of the code"])
def test_golden_values_of_fedadmm(name):
    case = CASES[name]
    options = {key: value for key, value in case.settings.items() if key not in ("lr", "rho")}
    path = case.slow(reference.fedadmm, rules.Sgd(0.1), 0.5, **options)
    result = run(fedadmm(Sgd(0.1), 0.5, **options), PROBLEM, *case.timetable)
    same_x(result, path, case)
    for i, kept in rows(case):
        for own in (result.clients[-1][i]._asdict(), path.own[-1][i]):
            equal(own["w"], kept["w"])
            equal(own["p"], kept["p"])


@problems
@plain_and_adam
@pytest.mark.parametrize("over", ["cohort", "all"])
@pytest.mark.parametrize(("begin", "message"), [("own", "augmented"), ("server", "augmented"), ("own", "twice")])
def test_fedadmm(problem, fast, plain, over, begin, message):
    options = {"over": over, "begin": begin, "message": message}
    result = run(fedadmm(fast, 0.4, 0.7, **options), problem, COHORTS, STEPS)
    path = slow(reference.fedadmm, problem, plain, 0.4, 0.7, **options)
    for part in ("w", "p"):
        own = [[o[part] for o in own] for own in path.own]
        agree(result, path._replace(own=own), {}, lambda client, part=part: getattr(client, part))


def test_x_is_the_mean_of_the_augmented_models():
    """Over all clients, of whom those that never took part count with the model before round 1."""
    result = run(fedadmm(Sgd(0.1), 0.4, over="all"), Quadratic(), *partial(rounds=12))
    for server, clients in zip(result.servers, result.clients, strict=True):
        mean = torch.stack([(client.w.flat + client.p.flat / 0.4) for client in clients]).mean(0)
        torch.testing.assert_close(server.public.x.flat, mean, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("begin", ["own", "server"])
def test_fedadmm_rests_at_the_optimum(begin):
    np.testing.assert_allclose(rest(fedadmm(Sgd(0.1), 0.5, begin=begin)), SMALL.optimum, rtol=0, atol=1e-10)


def test_the_codes_message_with_the_papers_start_rests_elsewhere():
    x = rest(fedadmm(Sgd(0.1), 0.5, message="twice"), 800)
    assert np.linalg.norm(x - SMALL.optimum) > 1e-3


# --- MIFA -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mifa", "mifa, over those seen"])
def test_golden_values_of_mifa(name):
    case = CASES[name]
    over = case.settings.get("over", "all")
    path = case.slow(reference.mifa, 0.1, over)
    result = run(mifa(Sgd(0.1), over), PROBLEM, *case.timetable)
    same_x(result, path, case)
    for i, kept in rows(case):
        equal(path.own[-1][i], kept["G"])
        equal(result.clients[-1][i].own.update, kept["G"])


def test_golden_values_of_mifa_with_a_schedule():
    """The first round has all clients, and the step size falls."""
    case = CASES["mifa, first round of all, decaying rate"]
    case = case._replace(cohorts=[[0, 1, 2, 3], *case.cohorts[1:]])
    path = case.slow(reference.mifa, case.settings["lr"])
    models = by_rounds([mifa(Sgd(lr)) for lr in case.settings["lr"]], PROBLEM, *case.timetable)
    for model, x, expected in zip(models, path.x, case.expected["x"], strict=True):
        equal(x, expected)
        equal(model, expected)
    for i, kept in rows(case):
        equal(path.own[-1][i], kept["G"])


@problems
@pytest.mark.parametrize("over", ["all", "seen"])
def test_mifa(problem, over):
    result = run(mifa(Sgd(0.1), over), problem, COHORTS, STEPS)
    agree(result, slow(reference.mifa, problem, 0.1, over), {}, lambda client: client.own.update)


def test_the_server_has_the_mean_of_the_last_updates():
    result = run(mifa(Sgd(0.1)), Quadratic(), *partial(rounds=12))
    for server, clients in zip(result.servers, result.clients, strict=True):
        own = torch.stack([client.own.update.flat for client in clients]).mean(0)
        torch.testing.assert_close(server.private.mean.flat, own, rtol=ROUNDING, atol=ROUNDING)


def test_mifa_needs_plain_descent():
    with pytest.raises(ValueError, match=r"^rule must be plain descent, .* mifa divides .*, got adam; choose sgd$"):
        mifa(Adam())


# --- what is refused --------------------------------------------------------------------------------------------------
def asynchronous(name):
    pace = {"name": "buffered", "buffer": 2}
    asked = {"workload": "digits", "method": name, "federation": {"pace": pace, "rounds": 2}, "systems": {}}
    return experiment({**asked, "engine": {"backend": "local"}, "tracking": {"uri": "none"}})


@pytest.mark.parametrize("name", ["feddyn", "feddc", "mifa"])
def test_no_asynchronous_form(name):
    """With the versions of the model mixed, the server's sum would not be the mean of the clients' sums."""
    with pytest.raises(ConfigError, match=f"^federation.pace.name: .* no asynchronous form: .*, got .*method={name}; "):
        prepare(asynchronous(name), "refused")


def test_a_constant_of_the_broadcast_needs_no_followed_broadcasts():
    assert len(run_experiment(asynchronous("fedadmm")).rows) == 2
