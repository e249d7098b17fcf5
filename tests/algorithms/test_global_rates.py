"""The global learning rate in the record is the one that each method's paper defines, and a broadcast is made with the
settings of its own round.

References: `tests.reference.server_adaptive`, whose servers have a rate, and `variance_reduced`. TOLERANCE as there.
"""

import copy

import numpy as np
import pytest

from fedfleet.algorithms.contract import Message, Round
from fedfleet.algorithms.fafed import fafed
from fedfleet.algorithms.fed_nsgda_m import fed_nsgda_m
from fedfleet.algorithms.fedadagrad import Adagrad
from fedfleet.algorithms.fedadam import AdamServer
from fedfleet.algorithms.fedavg_m import fedavg_m
from fedfleet.algorithms.fedavg_vr import fedavg_vr
from fedfleet.algorithms.fedavgm import ServerMomentum
from fedfleet.algorithms.feddu_adagrad import DoublyAdaptiveAdagrad
from fedfleet.algorithms.feddu_adam import DoublyAdaptiveAdam
from fedfleet.algorithms.fedexp import Extrapolated
from fedfleet.algorithms.fedexp_m import ExtrapolatedMomentum
from fedfleet.algorithms.fedyogi import Yogi
from fedfleet.algorithms.parts.adapted import LastTwo
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.scaffold_m import scaffold_m
from fedfleet.algorithms.scaffold_vr import scaffold_vr
from fedfleet.engine.method_form.state_spec import StateSpec
from tests.algorithms.driver import Step, arrays, play, tree
from tests.algorithms.problems import Quadratic, partial
from tests.reference import server_adaptive as reference
from tests.reference.variance_reduced import shared_momentum

TOLERANCE = 1e-9
SERVERS = {
    "fedavgm": (ServerMomentum(0.7, 0.6), reference.FedAvgM(0.7, 0.6)),
    "fedadagrad": (Adagrad(0.2, (0.0, 0.0)), reference.FedOpt("adagrad", 0.2, 0.0, 0.0, 1e-3)),
    "fedadam": (AdamServer(0.1), reference.FedOpt("adam", 0.1, 0.9, 0.99, 1e-3)),
    "fedyogi": (Yogi(0.1), reference.FedOpt("yogi", 0.1, 0.9, 0.99, 1e-3)),
    "fedexp": (Extrapolated(1e-3), reference.FedExP(1e-3)),
    "fedexp without floor": (Extrapolated(0.1, False), reference.FedExP(0.1, floor=False)),
    "fedexp_m": (ExtrapolatedMomentum(1e-2, 0.8), reference.FedExPM(1e-2, 0.8)),
    "feddu_adagrad": (DoublyAdaptiveAdagrad(1e-9, 0.05), reference.FedDuAdagrad(1e-9, 0.05)),
    "feddu_adam": (DoublyAdaptiveAdam(1e-9, 0.02, (0.8, 0.95)), reference.FedDuAdam(0.8, 0.95, 1e-9, 0.02)),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["last", "last_two"])
@pytest.mark.parametrize("name", SERVERS)
def test_rates_are_the_papers(name, wrapped):
    rule, slow = SERVERS[name]
    rule = LastTwo(rule) if wrapped else rule
    random, shapes = np.random.default_rng(5), {"W": (3, 4), "b": (3,)}
    draw = lambda scale: {n: scale * random.normal(size=s) for n, s in shapes.items()}  # noqa: E731
    x = draw(1.0)
    fast, state = tree(x), rule.init(tree(x))
    slow = copy.deepcopy(slow)  # it keeps a state, and is used for both parameters
    for number in range(1, 6):
        deltas = [draw(0.3) for _ in range(4)]
        trees = [tree(d) for d in deltas]
        mean = sum(trees[1:], trees[0]) / 4
        norm2 = sum(each.norm2() for each in trees) / 4
        arguments = (fast, mean, norm2, state, Round(number, 5, 4, 4))
        rate = float(rule.rate(*arguments))
        fast, state = rule.step(*arguments)
        x = slow.step(x, deltas)
        assert rate == pytest.approx(slow.rate, rel=TOLERANCE)
        for leaf, value in x.items():
            np.testing.assert_allclose(fast[leaf], value, rtol=TOLERANCE, atol=TOLERANCE)


SHARED_MOMENTUM = {"fedavg_m": fedavg_m, "fedavg_vr": fedavg_vr, "scaffold_m": scaffold_m, "scaffold_vr": scaffold_vr}


def by_rounds(methods, problem, cohorts, steps):
    """The models and rates of the fast version, with a separate method for each round, as schedules produce them."""
    server = methods[0].server_init(tree(problem.start))
    clients = [methods[0].client_init(methods[0].broadcast(server)) for _ in range(problem.clients)]
    models = []
    for r, (method, cohort) in enumerate(zip(methods, cohorts, strict=True)):
        of = lambda i, r=r: [Step(problem, (i, r, k), k / steps[r, i]) for k in range(steps[r, i])]  # noqa: E731
        where = Round(r + 1, len(cohorts), len(cohort), problem.clients)
        server = play(method, server, clients, cohort, (where, of))
        models.append(arrays(method.model(server)))
    return models


@pytest.mark.parametrize("name", SHARED_MOMENTUM)
def test_what_goes_down_has_the_rounds_own_beta(name):
    """One vector is sent in place of G and c. It is mixed with the beta of the round in which it is sent, not of the
    round before."""
    problem, (cohorts, steps) = Quadratic(), partial()
    betas = [0.9, 0.6, 0.4, 0.3, 0.2, 0.1]
    models = by_rounds([SHARED_MOMENTUM[name](Sgd(0.1), beta) for beta in betas], problem, cohorts, steps)
    slow = shared_momentum(problem.gradient, problem.start, problem.clients, cohorts, steps, name, 0.1, betas)
    for model, x in zip(models, slow.x, strict=True):
        for leaf, value in x.items():
            np.testing.assert_allclose(model[leaf], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_fed_nsgda_m_mixes_when_it_sends():
    """c = beta h + (1 - beta) u has the beta of the round in which clients use it."""
    x = tree(Quadratic().start)
    before, after = fed_nsgda_m(beta=0.9), fed_nsgda_m(beta=0.2)
    server = before.server_init(x)
    ones = x.zeros() + tree({name: np.ones_like(value) for name, value in Quadratic().start.items()})
    server = before.server_update(server, Message(x.zeros(), ones, {"norm2": x.flat.sum()}), Round(1, 2, 5, 5))
    h, u = 1.0, 0.9
    np.testing.assert_allclose(after.broadcast(server).c.flat, 0.2 * h + 0.8 * u, rtol=TOLERANCE)


def test_fafed_sends_no_mean_point():
    """The mean of the clients' last points is x + mean(y - x), which the server has; see `test_variance_reduced`."""
    x = tree(Quadratic().start)
    assert StateSpec(fafed(previous="server"), x).up == StateSpec(fafed(), x).up == 3 * 8 * len(x.flat)


@pytest.mark.parametrize(("name", "down"), [("scaffold_m", 2), ("scaffold_vr", 3), ("fedavg_m", 2), ("fedavg_vr", 3)])
def test_trees_down(name, down):
    x = tree(Quadratic().start)
    assert StateSpec(SHARED_MOMENTUM[name](), x).down == down * 8 * len(x.flat)
