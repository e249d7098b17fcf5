"""Whole trajectories of the min-max methods equal the slow reference: cohorts of three of five, unequal local steps.

TOLERANCE: float64 rounds at 1e-16; 6 rounds of up to 4 steps add about 1e3 roundings of values near 1, and one SVD or
Newton-Schulz step of an ill-conditioned matrix may amplify them by up to 5e2 each: 1e-9 is above that and far below
the effect of any change of a formula. Newton-Schulz: the reference divides by |M| + 1e-7 at first, the method by the
larger of both; |M| is near 1, so that steps of 0.1 differ by 1e-8 each, 24 of them by less than 1e-6.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.fed_nsgda_m import fed_nsgda_m
from fedfleet.algorithms.fed_sgda_clip import fed_sgda_clip
from fedfleet.algorithms.fed_sgda_m import fed_sgda_m
from fedfleet.algorithms.fedmuon_da import fedmuon_da
from fedfleet.algorithms.fess_gda import fess_gda
from fedfleet.algorithms.local_sgda import local_sgda
from fedfleet.algorithms.local_sgdam import local_sgdam
from fedfleet.algorithms.parts.groups import PerGroup, both
from fedfleet.algorithms.parts.muon import NewtonSchulz, Svd
from fedfleet.algorithms.sagda import sagda
from tests.algorithms.driver import arrays, run
from tests.algorithms.problems import partial
from tests.algorithms.saddles import Saddle
from tests.reference import minimax, minimax_corrected

TOLERANCE = 1e-9
COHORTS, STEPS = partial()
EQUAL = dict.fromkeys(STEPS, 3)
SADDLE = Saddle()


@dataclass(frozen=True)
class Descent:
    """The saddle as a workload has it: the sign of the dual's gradient is reversed."""

    of: Saddle = SADDLE

    @property
    def clients(self):
        return self.of.clients

    @property
    def start(self):
        return self.of.start

    def gradient(self, i, z, r, k):
        return self.of.descent(i, z, r, k)


LR, SERVER, GAMMA = PerGroup(0.02, 0.1), PerGroup(0.8, 1.3), PerGroup(0.05, 0.2)
BETA = PerGroup(0.3, 0.7)
PAIRS = {"lr": both(LR), "server_lr": both(SERVER)}


def slow(method, steps=STEPS, **settings):
    return method(SADDLE.gradient, SADDLE.start, SADDLE.clients, COHORTS, steps, **settings)


def same(tree, expected, within=TOLERANCE):
    for name, value in arrays(tree).items():
        np.testing.assert_allclose(value, expected[name], rtol=within, atol=within, err_msg=name)


def models(method, expected, steps=STEPS, within=TOLERANCE):
    """Run the method; check that its models are those of the reference, and that they move."""
    fast = run(method, Descent(), COHORTS, steps)
    for model, point in zip(fast.models(), expected.x, strict=True):
        same(model, point, within)
    for name in ("primal.W", "dual.w"):
        assert not np.allclose(expected.x[0][name], expected.x[-1][name], atol=1e-4), f"{name} did not move"
    return fast


def test_local_sgda():
    models(local_sgda(LR, SERVER), slow(minimax.local_sgda, **PAIRS))


@pytest.mark.parametrize("start", ["gradient", "zeros"])
def test_local_sgdam(start):
    """The method's lr and beta are the products alpha lr and alpha b of the paper."""
    expected = slow(minimax.local_sgdam, lr=both(LR), alpha=0.5, b=(0.6, 1.4), start=start)
    fast = models(local_sgdam(LR * 0.5, BETA, start), expected)
    for server, shared in zip(fast.servers, expected.shared, strict=True):
        same(server.public.m, minimax.flip(shared["direction"]))


@pytest.mark.parametrize("start", ["gradient", "zeros"])
def test_fed_sgda_m(start):
    expected = slow(minimax.fed_sgda_m, lr=both(LR), a=both(BETA), start=start)
    fast = models(fed_sgda_m(LR, BETA, start), expected)
    for server, shared in zip(fast.servers, expected.shared, strict=True):
        same(server.public.m, minimax.flip(shared["estimator"]))


def test_sagda():
    expected = slow(minimax.sagda, **PAIRS)
    fast = models(sagda(LR, SERVER), expected)
    for server, shared in zip(fast.servers, expected.shared, strict=True):
        same(server.public.shared, minimax.flip(shared["control"]))
    for clients, own in zip(fast.clients, expected.own, strict=True):
        for client, v in zip(clients, own, strict=True):
            same(client.own, minimax.flip(v))


@pytest.mark.parametrize("rho", [0.0, 2.0])
def test_fess_gda(rho):
    """All clients take three steps, because the pull is scaled by the configured number of steps."""
    expected = slow(minimax.fess_gda, EQUAL, rho=rho, beta=0.4, **PAIRS)
    fast = models(fess_gda(LR, SERVER, rho, 0.4 if rho else None).build(RunContext(3, 5, 6, 3)), expected, EQUAL)
    for server, shared in zip(fast.servers, expected.shared, strict=True):
        for name, centre in shared["centre"].items() if rho else ():
            np.testing.assert_allclose(server.private[name], centre, rtol=TOLERANCE, atol=TOLERANCE)


FROZEN = {
    "fed_nsgda_m": (fed_nsgda_m, {}, {}),
    "fedmuon_da": (fedmuon_da, {"ball": Svd()}, {"scheme": "svd"}),
    "fedmuon_da, Newton-Schulz": (fedmuon_da, {"ball": NewtonSchulz(5, "jordan")}, {"scheme": "jordan"}),
    "fed_sgda_clip": (fed_sgda_clip, {"radius": 0.7}, {"tau": (0.7, 0.7)}),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gamma", [None, GAMMA], ids=["mean", "gamma"])
@pytest.mark.parametrize("method", FROZEN)
def test_frozen_momentum(method, gamma, fused):
    """This includes T14: the reference forms u_k from h, h_i and u, or from h_i and c as the clients of the fast
    version do."""
    make, own, there = FROZEN[method]
    reference = getattr(minimax_corrected, make.__name__)
    pair = None if gamma is None else both(gamma)
    expected = slow(reference, lr=both(LR), gamma=pair, beta=both(BETA), fused=fused, **there)
    within = 1e-6 if "Newton" in method else TOLERANCE
    fast = models(make(LR, gamma, BETA, **own), expected, within=within)
    for server, shared in zip(fast.servers, expected.shared, strict=True):
        same(server.private.h, minimax.flip(shared["control"]), within)
        same(server.private.u, minimax.flip(shared["momentum"]), within)
    for clients, own_controls in zip(fast.clients, expected.own, strict=True):
        for client, h in zip(clients, own_controls, strict=True):
            same(client, minimax.flip(h), within)


@pytest.mark.parametrize("method", ["fed_nsgda_m", "fedmuon_da"])
def test_sizes_of_the_theorems(method):
    make, own, there = FROZEN[method]
    sizes = minimax_corrected.theorem_sizes(3, 3, 64, 4.0)
    expected = slow(getattr(minimax_corrected, make.__name__), EQUAL, **sizes, **there)
    fast = make(parameter_free=True, condition=4.0, **own).build(RunContext(3, 5, 64, 3))
    models(fast, expected, EQUAL)
    recorded = fast.server_metrics(None, None, None)
    assert [recorded["lr"], recorded["lr_dual"]] == pytest.approx(sizes["gamma"])
