"""The bound on a client's message: it agrees with the reference, and holds exactly at its limits."""

import math

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedfleet.algorithms.contract import Message, Round, Server
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.local import Averaged, Sent
from fedfleet.algorithms.privacy.clipping import Clipped, WithBound, WithCount, group_names
from fedfleet.algorithms.tree import Layout, Tree
from tests.reference import privacy

LAYOUT = Layout(("w", "b"), ((7, 9), (5,)))
SIZE = 68


@pytest.fixture(scope="module")
def method():
    from fedfleet.algorithms.parts.rules import Sgd

    return fedavg(rule=Sgd(lr=0.1))


def message(delta, control=None):
    sent = () if control is None else Tree(control, LAYOUT)
    return Message(Tree(delta, LAYOUT), Sent(sent), {"norm2": delta @ delta}, Averaged(()))


def whole(decoded):
    """All parts of a decoded message as one float64 vector."""
    parts = [decoded.delta.flat]
    if isinstance(decoded.sent.estimator, Tree):
        parts.append(decoded.sent.estimator.flat)
    return torch.cat(parts).double()


def draws(count, dtype=torch.float32, size=SIZE):
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-6, 6, count, dtype=torch.float64)[:, None]
    return (sizes * torch.randn(count, size, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1e-3, 3.0, 1e5])
def test_no_message_is_longer_than_the_bound(method, dtype, bound):
    clipped = Clipped(method, bound)
    for delta in draws(60, dtype):
        out = clipped.decode((), message(delta)).delta.flat
        assert float(torch.linalg.vector_norm(out.double())) <= bound
        before = float(torch.linalg.vector_norm(delta.double()))
        if before <= bound:
            assert torch.equal(out, delta)
        else:
            torch.testing.assert_close(out, delta * (bound / before), rtol=1e-6, atol=0)


def test_the_bound_just_below_a_norm(method):
    for delta in draws(40):
        size = float(torch.linalg.vector_norm(delta.double()))
        assert torch.equal(Clipped(method, size).decode((), message(delta)).delta.flat, delta)
        below = math.nextafter(size, 0)
        out = Clipped(method, below).decode((), message(delta)).delta.flat
        assert float(torch.linalg.vector_norm(out.double())) <= below


def test_joint_clipping_is_that_of_the_reference(method):
    both = draws(30, torch.float64, 2 * SIZE)
    for scales in ({}, {"estimator": 0.25}, {"delta": 3.0, "estimator": 2.0}):
        clipped = Clipped(method, 0.5, scales=tuple(scales.items()))
        for row in both:
            delta, control = row[:SIZE], row[SIZE:]
            decoded = clipped.decode((), message(delta, control))
            groups = {"delta": delta.numpy(), "estimator": control.numpy()}
            expected, size = privacy.clipped(groups, 0.5, scales)
            np.testing.assert_allclose(decoded.delta.flat, expected["delta"], rtol=1e-12)
            np.testing.assert_allclose(decoded.sent.estimator.flat, expected["estimator"], rtol=1e-12)
            assert float(decoded.facts["clipped"]) == (size > 0.5)


def test_shares_are_those_of_the_reference(method):
    shares = {"delta": 3.0, "estimator": 4.0}
    clipped = Clipped(method, 2.0, shares=tuple(shares.items()))
    for row in draws(30, torch.float64, 2 * SIZE):
        delta, control = row[:SIZE], row[SIZE:]
        decoded = clipped.decode((), message(delta, control))
        expected = privacy.clipped_by_shares({"delta": delta.numpy(), "estimator": control.numpy()}, 2.0, shares)
        np.testing.assert_allclose(decoded.delta.flat, expected["delta"], rtol=1e-12)
        np.testing.assert_allclose(decoded.sent.estimator.flat, expected["estimator"], rtol=1e-12)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("shares", [(), (("delta", 1.0), ("estimator", 1.0))])
def test_a_message_that_is_not_finite_becomes_zeros(method, broken, shares):
    delta, control = torch.ones(SIZE), torch.ones(SIZE)
    control[3] = broken
    decoded = Clipped(method, 1e-3, shares=shares).decode((), message(delta, control))
    assert not whole(decoded).any()
    assert float(decoded.facts["nonfinite"]) == 1
    assert float(decoded.facts["clipped"]) == 0


def test_tiny_messages_keep_their_bits(method):
    for size in (0.0, 1e-38, 1e-45):
        delta = torch.full((SIZE,), size)
        decoded = Clipped(method, 1e-20 if size else 1.0).decode((), message(delta))
        assert torch.equal(decoded.delta.flat, delta)
        assert float(decoded.facts["nonfinite"]) == 0


def test_an_infinite_bound_keeps_all_bits(method):
    for delta in draws(10):
        assert torch.equal(Clipped(method, math.inf).decode((), message(delta)).delta.flat, delta)


def test_clients_of_a_block_are_clipped_each_by_itself(method):
    rows = draws(20)
    rows[4, 2] = math.nan
    clipped = Clipped(method, 0.3)
    together = vmap(lambda delta: clipped.decode((), message(delta)))(rows)
    for i, delta in enumerate(rows):
        alone = clipped.decode((), message(delta))
        assert float(torch.linalg.vector_norm(together.delta.flat[i].double())) <= 0.3
        # The norm, the factor and the products are rounded, and the factor may be a unit less: a few times 1.2e-7.
        torch.testing.assert_close(together.delta.flat[i], alone.delta.flat, rtol=1e-6, atol=0)
        assert float(together.facts["clipped"][i]) == float(alone.facts["clipped"])


def test_a_bound_that_is_sent_counts_who_is_within_it(method):
    clipped = Clipped(method, 0.1, adaptive=True)
    x = Tree(torch.zeros(SIZE), LAYOUT)
    server = clipped.server_init(x)
    assert float(server.public.bound) == pytest.approx(0.1)
    for size, within in ((0.01, 0.5), (50.0, -0.5), (math.nan, -0.5)):
        delta = torch.zeros(SIZE)
        delta[0] = size
        encoded = message(delta)
        decoded = clipped.decode(server.public, encoded._replace(sent=WithCount(encoded.sent, torch.zeros(()))))
        assert float(decoded.sent.within) == within
        assert not float(decoded.delta.norm()) > float(server.public.bound)
    mean = decoded._replace(sent=decoded.sent._replace(within=torch.tensor(0.25)))
    after = clipped.server_update(server, mean, Round(1, 5, 3, 9))
    assert float(after.public.bound) == 0.25
    assert isinstance(clipped.broadcast(after), WithBound)


def test_server_rules_do_not_see_facts(method):
    mean = Message((), Sent(()), {"norm2": torch.tensor(3.0), "clipped": torch.tensor(1.0)})
    assert all(math.isnan(float(value)) for value in Clipped(method, 1.0)._mean_of_method(mean).facts.values())
    assert Clipped(method, 1.0)._server_of_method(Server(1)) == Server(1)


def test_groups_are_named_after_what_is_sent():
    assert group_names(message(torch.ones(SIZE))) == ["delta"]
    assert group_names(message(torch.ones(SIZE), torch.ones(SIZE))) == ["delta", "estimator"]
