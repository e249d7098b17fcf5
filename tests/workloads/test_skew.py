"""Partitions by prior, labels, sizes, natural clients and positives: documented effects, the same for equal seeds."""

from __future__ import annotations

import numpy as np
import pytest

from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.partitions.natural import Domains, Natural
from fedfleet.workloads.partitions.sizes import LogNormal, PowerLaw, Quantity
from fedfleet.workloads.partitions.skew import DirichletPrior, Labels, PositiveRatio

EVEN = np.tile(np.arange(10), 500)
BINARY = (np.arange(4000) % 2).astype(np.int64)


def own(parts: ClientIndex) -> list[np.ndarray]:
    return np.split(parts.rows, parts.offsets[1:-1])


def shares(parts: ClientIndex, labels: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[rows], minlength=10) / len(rows) for rows in own(parts)])


@pytest.mark.parametrize(
    "rule",
    [
        *(DirichletPrior(), DirichletPrior(0.01), DirichletPrior(0.1, LogNormal(2.0)), Labels(2)),
        *(Labels(2, "niid_bench"), Quantity(), LogNormal(), PowerLaw()),
    ],
    ids=str,
)
@pytest.mark.parametrize("clients", [1, 10, 100])
def test_every_row_is_dealt_once(rule, clients):
    """All rows are dealt, except by `Labels` with a single client: then all rows of its labels."""
    parts = rule.deal(EVEN, clients, 0)
    wanted = np.arange(len(EVEN))
    if isinstance(rule, Labels) and clients == 1:
        wanted = np.flatnonzero(np.isin(EVEN, EVEN[parts.rows]))
    assert np.array_equal(np.sort(parts.rows), wanted)
    assert len(parts.sizes) == clients
    assert parts.sizes.min() > 0


@pytest.mark.parametrize(
    "rule",
    [
        DirichletPrior(),
        Labels(2),
        Labels(2, "niid_bench"),
        Quantity(),
        LogNormal(),
        PowerLaw(),
        Natural(),
        PositiveRatio((0.05,)),
    ],
    ids=str,
)
def test_the_seed_decides(rule):
    first, again, other = (rule.deal(EVEN, 7, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.rows, again.rows)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.rows, other.rows)


@pytest.mark.parametrize("clients", [7, 100])
def test_priors_give_equal_sizes(clients):
    sizes = DirichletPrior(0.1).deal(EVEN, clients, 0).sizes
    assert sizes.max() - sizes.min() <= 1


def test_prior_shares_have_the_variance_of_the_distribution():
    """100,000 rows for 50 clients of 20: nothing runs out. A share of Dirichlet(beta 1_10) has variance
    .1 * .9 / (10 beta + 1), the empirical one of 20 picks more by (E s(1-s)) / 20. For beta = .3: .0225 + .00339.
    The mean over 500 entries deviates by some 8 %."""
    labels = np.tile(np.arange(10), 10_000)
    chosen = DirichletPrior(0.3)
    counts = []
    for seed in range(4):
        parts = chosen.deal(labels[:1000], 50, seed)
        counts.append(shares(parts, labels))
    assert np.mean([one.mean() for one in counts]) == pytest.approx(0.1)
    assert np.mean([one.var() for one in counts]) == pytest.approx(0.0225 + 0.00339, rel=0.15)


def test_smaller_beta_is_more_skewed():
    spread = [shares(DirichletPrior(beta).deal(EVEN, 10, 0), EVEN).var() for beta in (0.05, 0.5, 5.0, 500.0)]
    assert spread == sorted(spread, reverse=True)


def test_least_used_labels_serve_equally_many():
    """100 clients of 3 labels of 10: every label serves 30; the first clients have 012, 345, 678, then 9 and 01."""
    parts = Labels(3).deal(EVEN, 100, 0)
    has = shares(parts, EVEN) > 0
    assert has.sum(1).tolist() == [3] * 100
    assert has.sum(0).tolist() == [30] * 10
    assert [np.flatnonzero(one).tolist() for one in has[:4]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9]]
    counts = shares(parts, EVEN) * parts.sizes[:, None]
    assert set(np.round(counts[has]).astype(int)) == {16, 17}  # 500 over 30


def test_niid_bench_labels():
    has = shares(Labels(3, "niid_bench").deal(EVEN, 100, 0), EVEN) > 0
    assert has.sum(1).tolist() == [3] * 100
    assert all(has[client, client % 10] for client in range(100))
    assert has.sum(0).std() > 0


def test_sizes_have_the_variance_of_the_distribution():
    """Shares of Dirichlet(beta 1_N), N = 20, beta = .5: variance (1/N)(1 - 1/N) / (N beta + 1) = .0475 / 11."""
    labels = np.zeros(20_000, dtype=np.int64)
    sizes = np.array([Quantity(0.5).deal(labels, 20, seed).sizes / 20_000 for seed in range(100)])
    assert sizes.var() == pytest.approx(0.0475 / 11, rel=0.15)
    assert Quantity(0.01, minimum=30).deal(EVEN, 100, 0).sizes.min() >= 30


def test_natural_clients_keep_their_own():
    owners = np.repeat(np.arange(30), np.arange(1, 31))
    parts = Natural(minimum=5).deal(owners, 20, 0)
    whose = [np.unique(owners[rows]).tolist() for rows in own(parts)]
    assert all(len(one) == 1 for one in whose)
    assert len({one[0] for one in whose}) == 20
    assert all(len(rows) == one[0] + 1 >= 5 for rows, one in zip(own(parts), whose, strict=True))
    merged = Natural(rest="merge").deal(owners, 7, 0)
    assert np.array_equal(np.sort(merged.rows), np.arange(len(owners)))
    met = [set(owners[rows].tolist()) for rows in own(merged)]
    assert sum(map(len, met)) == 30
    with pytest.raises(ValueError, match="clients=27 and 26 natural clients; lower"):
        Natural(minimum=5).deal(owners, 27, 0)


def test_positives_overall():
    """2,000 negatives at ratio .1 keep floor(.1 / .9 * 2000) = 222 positives."""
    parts = PositiveRatio((0.1,)).deal(BINARY, 8, 0)
    assert BINARY[parts.rows].sum() == 222
    assert len(parts.rows) == len(set(parts.rows.tolist())) == 2222
    assert parts.sizes.max() - parts.sizes.min() <= 1


def test_positives_of_each_client():
    ratios = (0.05, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25)
    for ratio, rows in zip(ratios, own(PositiveRatio(ratios).deal(BINARY, 8, 0)), strict=True):
        negatives = (BINARY[rows] == 0).sum()
        assert BINARY[rows].sum() == int(ratio / (1 - ratio) * negatives + 1e-9)
        assert abs(BINARY[rows].mean() - ratio) < 1 / 200


@pytest.mark.parametrize(
    ("deal", "words"),
    [
        (lambda: PositiveRatio((0.1, 0.2)).deal(BINARY, 3, 0), "got 2 for 3 clients"),
        (lambda: PositiveRatio((0.9,)).deal(BINARY, 3, 0), "18000 to keep of 2000"),
        (lambda: PositiveRatio((1.0,)), "ratios"),
        (lambda: PositiveRatio(()), "ratios"),
        (lambda: Labels(11).deal(EVEN, 3, 0), "per_client=11, labels=10"),
        (lambda: Labels(0), "per_client=0"),
        (lambda: Labels(1, "other"), "assign='other'"),  # pyright: ignore[reportArgumentType]
        (lambda: DirichletPrior(0.0), "beta=0"),
        (lambda: DirichletPrior().deal(EVEN[:3], 4, 0), "rows=3, clients=4"),
        (lambda: Quantity(-1.0), "beta=-1"),
        (lambda: Quantity(minimum=0), "minimum=0"),
        (lambda: LogNormal(0.0), "sigma=0.0; for equal sizes choose iid"),
        (lambda: PowerLaw(np.inf), "exponent=inf"),
        (lambda: DirichletPrior(sizes=Natural()), "choose quantity, lognormal or power_law"),
        (lambda: Domains().deal(EVEN, 9, 0), "clients=9 and 10 values of 'client'; raise federation.clients"),
        (lambda: Natural(0), "minimum=0"),
        (lambda: Natural(rest="keep"), "rest='keep'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_dealt(deal, words):
    with pytest.raises(ValueError, match=words):
        deal()


def test_a_power_law_gives_each_rank_its_share():
    """100,000 rows in proportion to 1, 1/2, …, 1/50, each rounded at two cuts."""
    sizes = np.sort(PowerLaw().deal(np.zeros(100_000), 50, 0).sizes)[::-1]
    wanted = 1 / np.arange(1, 51) / np.sum(1 / np.arange(1, 51)) * 100_000
    assert np.abs(sizes - wanted).max() <= 1


def test_logarithms_of_sizes_have_the_standard_deviation_sigma():
    """Over 400 clients the estimate deviates by sigma / sqrt(800), 3.5 %; here by less than four times that."""
    sizes = LogNormal(0.7).deal(np.zeros(1_000_000), 400, 1).sizes
    assert np.log(sizes).std() == pytest.approx(0.7, rel=0.15)


def test_labels_and_sizes_are_skewed_together():
    """The sizes are those of the law alone, and few labels are at each client."""
    law = LogNormal(1.0, minimum=20)
    parts = DirichletPrior(0.05, law).deal(EVEN, 20, 3)
    assert np.array_equal(parts.sizes, law.deal(EVEN, 20, 3).sizes)
    assert np.mean(shares(parts, EVEN).max(1)) > 0.6


def test_every_client_has_one_domain():
    domains = np.repeat([7, 2, 5], [600, 300, 100])
    parts = Domains().deal(domains, 8, 0)
    assert np.array_equal(np.sort(parts.rows), np.arange(1000))
    assert [set(domains[rows]) for rows in own(parts)] == [{2}, {5}, {7}, {2}, {5}, {7}, {2}, {5}]
    assert parts.sizes.tolist() == [100, 34, 300, 100, 33, 300, 100, 33]


def test_natural_clients_by_another_column():
    from fedfleet.workloads.data.digits import Digits

    split = Digits(partition=Natural(by="label")).split(0, 10)
    labels = [set(split.train["label"][rows].tolist()) for rows in own(split.client_index)]
    assert sorted(labels, key=min) == [{c} for c in range(10)]
    with pytest.raises(ValueError, match=r"must have a column 'client', got the columns input, label"):
        Digits(partition=Domains()).split(0, 10)
