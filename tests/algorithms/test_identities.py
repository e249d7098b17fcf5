"""The table of identities, and settings under which a method equals a formula.

Both sides must be exactly equal if they do the same operations in the same order, and are within ROUNDING elsewhere,
see `identities`.
"""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedmuon_bc import fedmuon_bc
from fedfleet.algorithms.fedmuon_ma import fedmuon_ma
from fedfleet.algorithms.local_muon import local_muon
from fedfleet.algorithms.parts.muon import Identity
from fedfleet.algorithms.parts.rules import Adam, Averaged, Momentum, Sgd
from fedfleet.algorithms.scaffold import scaffold
from tests.algorithms.driver import arrays, run, tree
from tests.algorithms.identities import ROUNDING, TABLE, built
from tests.algorithms.paths import Compare
from tests.algorithms.problems import Quadratic, everyone, partial

NOISY = Quadratic()
STARTS = pytest.mark.parametrize("start", ["zeros", "gradient"])
SAME = Compare(NOISY, ROUNDING)
paths, close, equal = SAME.paths, SAME.close, SAME.equal


@pytest.mark.parametrize("build", [local_muon, fedmuon_bc, fedmuon_ma], ids=lambda build: build.__name__)
def test_matrices_by_name_take_the_vectors_rule(build):
    """With one matrix in `aux`, only that one differs from a step in which all of them are orthogonalised."""
    one, other = (run(build(0.05, 0.1, aux=aux, scale="none"), NOISY, *everyone(5, 1, 1)) for aux in (("W",), ()))
    if build is not fedmuon_ma:  # whose first step only estimates
        x, y = one.models()[0], other.models()[0]
        far = {name: float((x[name] - y[name]).abs().max()) for name in x}  # products of one or two matrices at a time
        assert far.pop("W") > 1e-3 > ROUNDING > max(far.values())


def test_local_muon_without_lmo_is_fedavg_with_kept_averaged_momentum():
    muonless = local_muon(0.1, 0.1, alpha=0.25, ball=Identity(), scale="none")
    equal(muonless, fedavg(Averaged(Sgd(0.1), mu=0.75, nesterov=False), carry="keep", over="all"))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_two_names_of_one_method(row):
    compare = Compare(row.where.problem, row.where.rounding)
    same = compare.equal if row.exact else compare.close
    same(built(row.one, row.where), built(row.other, row.where), timetable=row.where.timetable)
    if row.apart is not None:
        methods = (built(row.one, row.apart), built(row.other, row.apart))
        compare.unlike(*methods, row.apart.problem, row.apart.timetable)


class Twins(Quadratic):
    """A problem in which every client is client 0, with the same noise."""

    def gradient(self, i, x, r, k):
        return super().gradient(0, x, r, k)


def test_identical_clients_share_one_momentum():
    """The correction cancels between equal clients with equal batches: FedMuon equals LocalMuon, and both equal
    Muon."""
    fast, slow = fedmuon_bc(0.02, 0.1), local_muon(0.02, 0.1)
    together, alone = paths(fast, slow, Twins(clients=3), everyone(3, 6, 2))
    single = paths(fast, slow, Twins(clients=1), everyone(1, 6, 2))[1]
    torch.testing.assert_close(together, alone, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(alone, single, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("settings", [{"rule": Adam()}, {"rule": Momentum(), "carry": "keep"}])
def test_controls_by_displacement_need_momentum_from_zero(settings):
    with pytest.raises(ValueError, match="control=literal needs the rule sgd or momentum and carry=reset, got"):
        scaffold(control="literal", **settings)


def test_minibatch_sgd_is_fedavg_of_one_step_with_everyone():
    """K = 1, S = N: one step of size server_lr * lr along the mean of the clients' gradients."""
    x = tree(NOISY.start)
    for r in range(6):
        gradients = [tree(NOISY.gradient(i, arrays(x), r, 0)).flat for i in range(5)]
        x = x.add(type(x)(torch.stack(gradients).mean(0), x.layout), -0.7 * 0.1)
    result = run(fedavg(Sgd(0.1), server_lr=0.7), NOISY, *everyone(5, 6, 1))
    torch.testing.assert_close(result.models()[-1].flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("rule", [Sgd(0.1), Adam(0.03)], ids=["sgd", "adam"])
def test_equal_clients_are_one_client(rule):
    """All three clients have the same function and noise, so the mean of their models is the model of each."""

    class Same(Quadratic):
        def gradient(self, i, x, r, k):
            return super().gradient(0, x, r, k)

    alone = run(fedavg(rule), Same(clients=1), *everyone(1, 5, 3)).models()[-1]
    all_three = run(fedavg(rule), Same(clients=3), *everyone(3, 5, 3)).models()[-1]
    torch.testing.assert_close(all_three.flat, alone.flat, rtol=ROUNDING, atol=ROUNDING)


def test_fedavg_of_one_client_is_sgd():
    problem, x = Quadratic(clients=1, noise=0.0), tree(Quadratic(clients=1).start)
    cohorts, steps = everyone(1, 5, 3)
    for _ in range(15):
        x = x - 0.1 * tree(problem.gradient(0, {name: leaf.numpy() for name, leaf in x.items()}, 0, 0))
    torch.testing.assert_close(
        run(fedavg(Sgd(0.1)), problem, cohorts, steps).models()[-1].flat, x.flat, rtol=ROUNDING, atol=ROUNDING
    )


CONTROLLED = {
    "scaffold": lambda start: scaffold(Sgd(0.1), start=start),
    "scaffold last": lambda start: scaffold(Momentum(0.05), control="last", start=start),
    "scaffold all": lambda start: scaffold(Adam(0.05), start=start, over="all"),
    "fedmuon": lambda start: fedmuon_bc(0.05, 0.1, start=start),
}


@STARTS
@pytest.mark.parametrize("method", CONTROLLED)
def test_c_is_the_mean_of_all_c_i(method, start):
    result = run(CONTROLLED[method](start), NOISY, *partial(rounds=12))
    for server, clients in zip(result.servers, result.clients, strict=True):
        own = torch.stack([client.own.flat for client in clients]).mean(0)
        torch.testing.assert_close(server.public.shared.flat, own, rtol=ROUNDING, atol=ROUNDING)


def test_scaffold_control_is_the_papers_option_two():
    """c_i - c + (x - y_K) / (K lr) is the mean raw gradient; a cohort of one shows y_K as the next x."""
    cohorts, steps = [[i] for i in (0, 3, 1, 0, 4, 3, 0)], {(r, i): 1 + (r + i) % 4 for r in range(7) for i in range(5)}
    result = run(scaffold(Sgd(0.1)), NOISY, cohorts, steps)
    for r in range(1, 7):
        i, before, after = cohorts[r][0], result.servers[r - 1].public, result.servers[r].public
        c_i = result.clients[r - 1][i].own
        printed = c_i - before.shared + (before.x - after.x) / (steps[r, i] * 0.1)
        torch.testing.assert_close(result.clients[r][i].own.flat, printed.flat, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", [fedmuon_bc, local_muon], ids=lambda method: method.__name__)
@pytest.mark.parametrize("norm", ["spectral", "max", "euclidean"])
def test_the_start_is_every_clients_gradient(method, norm):
    """The warm start covers all clients: c_i = grad F_i(x0) for each, c is their mean, and x does not change."""
    result = run(
        method(0.01, 0.1 if norm == "spectral" else None, norm=norm, start="gradient"), NOISY, [[0]], {(0, 0): 1}
    )
    gradients = [tree(NOISY.gradient(i, NOISY.start, -1, 0)).flat for i in range(5)]
    for i in range(1, 5):
        assert torch.equal(result.clients[0][i].own.flat, gradients[i])
    moved = (result.models()[0].flat - tree(NOISY.start).flat).abs().max()
    assert 0 < moved < 0.1 * max(1.0, float(np.max(np.abs(gradients))))
