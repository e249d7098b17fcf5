"""Partitions: every row has one client, equal seeds agree, every client has the minimum, the skew is as documented."""

from __future__ import annotations

import numpy as np
import pytest

from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.partitions.standard import Dirichlet, Iid, Shards, repaired

RULES = [Iid(), Dirichlet(0.1), Dirichlet(0.1, cap=True), Dirichlet(100.0, minimum=5), Shards(2), Shards(3)]


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return Digits().load()[0]["label"]


def labels_of(parts: ClientIndex, labels: np.ndarray) -> list[np.ndarray]:
    return [labels[rows] for rows in np.split(parts.rows, parts.offsets[1:-1])]


def label_entropy(parts: ClientIndex, labels: np.ndarray) -> float:
    """The mean entropy of the clients' labels in nats; log 10 = 2.30 if every client has all labels equally often."""
    shares = [np.bincount(own, minlength=10) / len(own) for own in labels_of(parts, labels)]
    return float(np.mean([-(s[s > 0] * np.log(s[s > 0])).sum() for s in shares]))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("clients", [1, 10, 100])
def test_every_row_is_dealt_once(rule, clients, digits):
    parts = rule.deal(digits, clients, seed=0)
    assert np.array_equal(np.sort(parts.rows), np.arange(len(digits)))
    assert len(parts.sizes) == clients
    assert parts.offsets.dtype == parts.rows.dtype == np.int64


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_seed_decides(rule, digits):
    first, again, other = (rule.deal(digits, 20, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.rows, again.rows)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.rows, other.rows)


def test_iid_parts_are_equal():
    assert sorted(Iid().deal(np.zeros(103), 10, 0).sizes) == [10] * 7 + [11] * 3


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize(
    ("beta", "clients", "minimum"), [(0.1, 100, 1), (0.1, 100, 10), (0.001, 100, 14), (0.3, 721, 2)]
)
def test_dirichlet_holds_the_minimum(beta, clients, minimum, cap, digits):
    """It also works where redrawing would not end: 14 rows for each of 100 clients, of 1,442 rows in all."""
    for seed in range(3):
        assert Dirichlet(beta, minimum, cap).deal(digits, clients, seed).sizes.min() >= minimum


def test_repair_leaves_a_good_draw_alone_and_takes_from_the_largest(digits):
    free = Dirichlet(100.0, 1).deal(digits, 10, 0)
    assert free.sizes.min() >= 50
    assert np.array_equal(Dirichlet(100.0, 50).deal(digits, 10, 0).rows, free.rows)
    hands = repaired(ClientIndex.of([np.arange(5), np.array([], dtype=np.int64), np.arange(5, 9)]), 2)
    # Sizes 5, 0, 4: the first client gives a row; then 4, 1, 4: the first of equals gives again.
    assert hands.offsets.tolist() == [0, 3, 5, 9]
    assert hands.rows.tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8]


def test_repair_takes_each_row_from_the_client_that_is_largest_at_that_moment():
    """Against the definition, one row after the other, on random sizes."""
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes, minimum = random.integers(0, 9, 12), int(random.integers(1, 4))
        if sizes.sum() < 12 * minimum:
            continue
        hands = [list(rows) for rows in np.split(random.permutation(int(sizes.sum())), np.cumsum(sizes)[:-1])]
        repaired_hands = repaired(ClientIndex.of([np.array(hand, dtype=np.int64) for hand in hands]), minimum)
        missing = [(i, minimum - len(hand)) for i, hand in enumerate(hands) if len(hand) < minimum]
        for client, count in missing:
            added = []
            for _ in range(count):
                largest = max(range(12), key=lambda i: (len(hands[i]), -i))
                added.append(hands[largest].pop())
            hands[client] += added
        assert repaired_hands.rows.tolist() == [row for hand in hands for row in hand]


def test_dirichlet_skew_grows_as_beta_falls(digits):
    entropies = [label_entropy(Dirichlet(beta).deal(digits, 10, 0), digits) for beta in (0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert entropies == sorted(entropies)
    assert entropies[0] < 0.7
    assert entropies[-1] > 2.25


def test_dirichlet_class_shares_have_the_mean_and_variance_of_the_distribution():
    """A share of Dirichlet(beta 1_N) has mean 1/N, variance (1/N)(1 - 1/N)/(N beta + 1): 0.16 / 2.5 = 0.064 for N = 5,
    beta 0.3. Shares of 2,000 classes; the variance's deviation is below 0.064 * sqrt(6 / 2000) = 0.0035: 4 of them."""
    labels = np.repeat(np.arange(2000), 50)
    parts = Dirichlet(0.3).deal(labels, 5, 0)
    shares = np.array([np.bincount(own, minlength=2000) / 50 for own in labels_of(parts, labels)])
    assert abs(shares.mean() - 0.2) < 1e-12
    assert abs(shares.var() - 0.064) < 0.014


def test_cap_shuts_out_clients_that_are_full(digits):
    """A client can exceed n / N by at most one class, because it was below n / N before it got this class."""
    sizes = Dirichlet(0.05, cap=True).deal(digits, 10, 0).sizes
    assert sizes.max() < len(digits) / 10 + np.bincount(digits).max()
    assert Dirichlet(0.05).deal(digits, 10, 0).sizes.std() > sizes.std()


def test_shards_give_few_labels(digits):
    """100 rows per class and 10 clients give 20 shards of 50, none of which spans two classes."""
    even = np.tile(np.arange(10), 100)
    assert max(len(set(own)) for own in labels_of(Shards(2).deal(even, 10, 0), even)) <= 2
    for per_client in (1, 2, 3):
        met = [set(own) for own in labels_of(Shards(per_client).deal(digits, 20, 0), digits)]
        assert max(map(len, met)) <= 2 * per_client  # a shard is shorter than a class: it spans one border at most
        borders = sum(len(own) - per_client for own in met if len(own) > per_client)
        assert borders <= 9


@pytest.mark.parametrize(
    ("rule", "clients", "words"),
    [
        (Iid(), 11, "rows=10, clients=11"),
        (Iid(), 0, "clients=0"),
        (Dirichlet(0.1, minimum=3), 4, "rows=10, clients=4"),
        (Shards(4), 3, "rows=10, clients=3"),
    ],
    ids=str,
)
def test_too_many_clients(rule, clients, words):
    with pytest.raises(ValueError, match=words):
        rule.deal(np.zeros(10, dtype=np.int64), clients, 0)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Dirichlet(0.0), "beta=0"),
        (lambda: Dirichlet(float("nan")), "beta=nan"),
        (lambda: Dirichlet(1.0, minimum=0), "minimum=0"),
        (lambda: Shards(0), "per_client=0"),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()
