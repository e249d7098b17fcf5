"""Counted randomness: keys differ, draws are uniform or normal, and do not depend on where they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfleet.workloads import counted


def test_keys_differ_by_purpose_client_and_round():
    clients, rounds = torch.arange(300).view(-1, 1), torch.arange(100)
    keys = [counted.key(seed, purpose, clients, rounds) for seed in (0, 1) for purpose in ("order", "noise", "init")]
    assert torch.cat([k.flatten() for k in keys]).unique().numel() == 2 * 3 * 300 * 100


def test_the_order_of_parts_matters():
    assert counted.key(1, 2) != counted.key(2, 1)
    assert counted.key("a", "b") != counted.key("ab")


def test_long_purposes_differ_after_their_beginning():
    assert counted.key("gradient noise") != counted.key("gradient scale")
    assert counted.key("p" * 500) != counted.key("p" * 501)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, 0])
def test_any_seed_gives_a_key(seed):
    assert counted.key(seed, "init").dtype == torch.int64


@pytest.mark.parametrize("make", [lambda n: counted.key(0, "a", torch.arange(n)), lambda n: counted.key(7, "b")])
def test_uniform_chi_square(make):
    """256 equal bins: chi-square has mean 255, deviation sqrt(2 * 255) = 22.6; 6 deviations are far out."""
    key = make(200)
    draws = counted.uniform(key, 200_000 // key.numel()).flatten()
    counts = torch.bincount((draws * 256).long(), minlength=256).double()
    expected = draws.numel() / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 6 * 22.6
    assert draws.min() >= 0
    assert draws.max() < 1


def test_first_draws_of_neighbouring_clients_are_uncorrelated():
    """Correlation of 40,000 pairs has deviation 1 / 200: 5 deviations."""
    draws = counted.uniform(counted.key(0, "noise", torch.arange(40_001)), 2).numpy()
    for left, right in ((draws[:-1, 0], draws[1:, 0]), (draws[:, 0], draws[:, 1])):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.025


def test_normal_moments():
    """n = 400,000: deviations of mean, variance, fourth moment are 1, sqrt 2, sqrt 96 over sqrt n; 5 of them each."""
    draws = counted.normal(counted.key(3, "noise", torch.arange(1000)), 400).flatten()
    unit = 5 / draws.numel() ** 0.5
    assert abs(float(draws.mean())) < unit
    assert abs(float(draws.var()) - 1) < 2**0.5 * unit
    assert abs(float((draws**4).mean()) - 3) < 96**0.5 * unit
    assert draws.isfinite().all()


def test_alone_equals_in_a_block_equals_under_vmap():
    ids = torch.arange(5)
    block = counted.normal(counted.key(0, "noise", ids), 7)
    mapped = torch.func.vmap(lambda i: counted.normal(counted.key(0, "noise", i), 7))(ids)
    alone = torch.stack([counted.normal(counted.key(0, "noise", int(i)), 7) for i in ids])
    assert torch.equal(block, mapped)
    assert torch.equal(block, alone)


def test_generators_repeat_and_differ():
    def draw(*parts):
        return counted.numpy_generator(*parts).random(4).tolist()

    assert draw(0, "partition") == draw(0, "partition")
    assert draw(0, "partition") != draw(1, "partition")
    assert torch.equal(
        torch.rand(3, generator=counted.generator(0, "a")), torch.rand(3, generator=counted.generator(0, "a"))
    )


@pytest.mark.parametrize("least", [0.0, 0.1, 1 / 3, 0.5, 0.9, 2**-53, 1 - 2**-53, 1e-300])
@pytest.mark.parametrize("count", [1, counted.AT_ONCE - 1, counted.AT_ONCE + 1, 3 * counted.AT_ONCE])
def test_a_comparison_has_the_bits_of_the_draws(count, least):
    """For one key, which takes a path of its own, and for several, alone and under vmap."""
    keys = counted.key(count, "any", torch.arange(5))
    drawn = counted.uniform(keys, count) >= least
    for key, expected in zip(keys, drawn, strict=True):
        assert torch.equal(counted.at_least(key, count, least), expected)
    assert torch.equal(counted.at_least(keys, count, least), drawn)
    assert torch.equal(torch.func.vmap(lambda key: counted.at_least(key, count, least))(keys), drawn)


def test_a_comparison_with_a_draw_itself_is_true():
    """The limit is a whole number of 2^-53, so an error of one unit would show here."""
    key = counted.key(0, "any", torch.tensor(1))
    for place, value in enumerate(counted.uniform(key, 100).tolist()):
        assert counted.at_least(key, 100, value)[place]
        assert not counted.at_least(key, 100, value + 2**-53)[place]
