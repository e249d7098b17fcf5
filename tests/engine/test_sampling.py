from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from fedfleet.engine import resume, run
from fedfleet.engine.cohorts.samplers import Binomial, Turns, sample
from fedfleet.engine.cohorts.tasks import (
    FEWEST_TASKS,
    MOST_TASKS,
    block_ends,
    plan_tasks,
    steps_of,
    task_edges,
)
from fedfleet.engine.config.schema import Federation, Local
from fedfleet.engine.errors import ConfigError, Interrupted

from ..faults.runs import Watch, interrupt
from .setups import digits


def test_a_cohort_is_distinct_ascending_and_counted():
    drawn = [sample(0, r, 50, 10) for r in range(1, 201)]
    assert all(len(set(c.tolist())) == 10 and (np.diff(c) > 0).all() for c in drawn)
    assert np.array_equal(drawn[3], sample(0, 4, 50, 10))
    assert not np.array_equal(drawn[3], sample(1, 4, 50, 10))
    # 2000 draws, 40 expected for each client with standard deviation 5.7; the tolerance is 5 of these
    counts = np.bincount(np.concatenate(drawn), minlength=50)
    assert counts.min() > 11
    assert counts.max() < 69


def federation(**keys):
    return Federation.model_validate(keys)


def test_binomial_cohorts_are_independent_coins():
    drawn = [Binomial().cohort(0, r, 50, 10) for r in range(1, 2001)]
    assert all((np.diff(c) > 0).all() for c in drawn)
    sizes = np.array([len(c) for c in drawn])
    error = 4 / 2000**0.5  # four standard errors, times the standard deviation of what is averaged
    assert abs(sizes.mean() - 10) < error * 8**0.5
    assert abs(sizes.var() - 8) < error * 8 * 2**0.5
    taken = np.zeros((2000, 50))
    for row, cohort in zip(taken, drawn, strict=True):
        row[cohort] = 1
    together = (taken[:, :-1] * taken[:, 1:]).mean(0)
    assert np.abs(together - 0.04).max() < 5 * (0.04 * 0.96 / 2000) ** 0.5
    assert np.array_equal(drawn[3], Binomial().cohort(0, 4, 50, 10))
    assert federation(clients=50, cohort=10, sampler="binomial").largest_cohort == 50


def test_small_binomial_cohorts_may_be_empty():
    sizes = [len(Binomial().cohort(0, r, 3, 1)) for r in range(1, 1001)]
    assert abs(sizes.count(0) / 1000 - 8 / 27) < 4 * (8 / 27 * 19 / 27 / 1000) ** 0.5


@pytest.mark.parametrize(("clients", "cohort", "separation"), [(12, 3, 4), (50, 4, 7), (10, 1, 10), (9, 9, 1)])
def test_turns_are_kept_apart(clients, cohort, separation):
    plan = federation(clients=clients, cohort=cohort, sampler={"name": "turns", "separation": separation})
    last, sizes = {}, []
    for r in range(1, 40 * separation + 1):
        drawn = Turns(separation).cohort(0, r, clients, cohort)
        sizes.append(len(drawn))
        assert (np.diff(drawn) > 0).all()
        assert len(drawn) <= plan.largest_cohort
        for client in drawn.tolist():
            assert (r - last.get(client, r)) % separation == 0
            last[client] = r
        if cohort * separation == clients and r == separation:
            assert sorted(last) == list(range(clients))
    assert abs(np.mean(sizes) - cohort) < 4 * (cohort / len(sizes)) ** 0.5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"sampler": "turns"},
            "sampler: turns needs the rounds from one turn of a client to its next, a whole number from 1; write {name",
        ),
        ({"sampler": {"name": "turns", "separation": "3"}}, "sampler: turns needs the rounds"),
        (
            {"sampler": {"name": "turns", "separation": 10}, "cohort": 54, "clients": 539},
            "sampler.separation: cohort * separation <= clients must hold, got 10 with clients=539; lower it, or fed",
        ),
    ],
)
def test_settings_of_samplers_that_do_not_fit(keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Federation(**keys)


SOME_ARE_EMPTY = {"clients": 4, "cohort": 1, "rounds": 8, "local": {"steps": 2, "batch": 4}, "sampler": "binomial"}


def with_empty_rounds(**engine):
    found = digits("scaffold", {"steps": 2, "batch": 4}, **engine)
    often = found.evaluate.model_copy(update={"every": 1})
    return found.model_copy(update={"federation": federation(**SOME_ARE_EMPTY), "evaluate": often})


def test_a_round_without_clients_is_a_round():
    result = run(with_empty_rounds())
    counts = [row["client/count"] for row in result.rows]
    assert len(result.rows) == 8
    assert 0 in counts[1:]
    for before, row in pairwise(result.rows):
        if row["client/count"] == 0:
            assert "train/loss" not in row
            assert row["comm/bytes_up"] == row["client/steps"] == 0
            assert row["eval/loss"] == before["eval/loss"]


@pytest.mark.long
def test_runs_with_empty_rounds_are_resumed_on_workers(tmp_path, ray_here):
    whole = run(with_empty_rounds(backend="ray", workers=2))
    assert whole.model_sha256 == run(with_empty_rounds()).model_sha256
    with pytest.raises(Interrupted):
        run(with_empty_rounds(), tmp_path / "run", [Watch(r4=interrupt)])
    assert resume(with_empty_rounds(), tmp_path / "run").model_sha256 == whole.model_sha256


def test_a_cohort_does_not_cost_the_population():
    import tracemalloc

    tracemalloc.start()
    sample(0, 1, 10_000_000, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # bytes; one int64 per client would be 80 MB


@pytest.mark.parametrize("block", [1, 3, 7, 100])
@pytest.mark.parametrize("size", [1, 9, 100])
def test_a_plan_has_every_client_once_the_longest_first(size, block):
    clients = np.sort(np.random.default_rng(0).choice(1000, size, replace=False))
    sizes = np.random.default_rng(1).integers(1, 200, size)
    local = Local(epochs=1, batch=10)
    tasks = plan_tasks(clients, sizes, local, block)
    assert [task.index for task in tasks] == list(range(len(tasks)))
    order = np.concatenate([task.clients for task in tasks])
    assert sorted(order.tolist()) == clients.tolist()
    steps = dict(zip(clients.tolist(), steps_of(sizes, local).tolist(), strict=True))
    lengths = [steps[int(c)] for c in order]
    assert lengths == sorted(lengths, reverse=True)
    for task in tasks:
        widths = np.diff([0, *task.cuts])
        assert widths.max() <= block
        assert task.cuts[-1] == len(task.clients)


@pytest.mark.parametrize(("size", "block"), [(20, 16), (100, 1), (101, 3), (7, 9), (640, 4)])
def test_blocks_of_a_cohort_are_of_one_size_but_for_a_client(size, block):
    tasks = plan_tasks(np.arange(size), np.ones(size, dtype=int), Local(steps=1), block)
    blocks = [part.tolist() for task in tasks for part in np.split(task.clients, task.cuts[:-1])]
    assert blocks == [part.tolist() for part in np.array_split(np.arange(size), -(-size // block))]


@pytest.mark.parametrize(("clients", "block"), [(1, 1), (7, 3), (20, 16), (99, 10), (100, 10), (5, 100)])
def test_the_first_blocks_have_the_clients_left_over(clients, block):
    """As NumPy splits an array."""
    parts = np.array_split(np.arange(clients), -(-clients // block))
    assert block_ends(clients, block) == [0, *np.cumsum([len(part) for part in parts]).tolist()]


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 100, 1000, 5000])
def test_tasks_shrink_towards_the_end(blocks):
    edges = task_edges(blocks)
    assert edges[0] == 0
    assert edges[-1] == blocks
    assert len(edges) - 1 <= max(FEWEST_TASKS, min(MOST_TASKS, blocks // 8))
    widths = np.diff(edges)
    assert (widths > 0).all()
    assert widths[0] <= max(1, round(0.14 * blocks))
    assert widths[-1] <= max(2, round(0.02 * blocks))
