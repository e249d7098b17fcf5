"""The driver's time and memory for a round depend on the size of the cohort, not on the number of clients."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.clients.batches import stream
from fedfleet.engine.cohorts.samplers import sample
from fedfleet.engine.cohorts.tasks import TrainingTask, plan_tasks
from fedfleet.engine.config.schema import Experiment, Local, experiment
from fedfleet.engine.records.history import History
from fedfleet.engine.records.parquet import to_table
from fedfleet.engine.state.row_files import DIGEST, RowFiles, paths
from fedfleet.engine.state.row_table import RowTable
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.partitions.natural import Natural
from fedfleet.workloads.partitions.sizes import Quantity
from fedfleet.workloads.partitions.skew import Labels
from fedfleet.workloads.partitions.standard import Dirichlet, Iid, Shards
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.workload import Split

from .setups import STEPS, digits, driver_here, next_round

COHORT, LOCAL = 200, Local(steps=2, batch=4)
SAMPLE = (torch.zeros(3),)


class Federation:
    """All objects of the driver whose length is the number of clients."""

    def __init__(self, clients: int, folder: str) -> None:
        self.clients, self.number = clients, 0
        self.parts = ClientIndex.equal(np.arange(3 * clients), clients)
        self.table = RowTable(SAMPLE, clients, COHORT, folder, digests=True)
        self.visits = np.zeros(clients, dtype=np.int64)

    def round(self) -> list[TrainingTask]:
        """The driver's work in one round, without workers. Returns the tasks."""
        self.number += 1
        sampled = sample(0, self.number, self.clients, COHORT)
        tasks = plan_tasks(sampled, self.parts.sizes_of(sampled), LOCAL, 10)
        read, write = self.table.reserve(sampled)
        works = []
        for task in tasks:
            at = np.searchsorted(sampled, task.clients)
            columns = (self.visits[task.clients], np.ones(len(at)), read[at], write[at], at)
            works.append(TrainingTask(task, self.number, False, *columns))
            stream(self.parts, task.clients, columns[0], LOCAL, 0)
        self.table.commit(np.zeros((COHORT, DIGEST), dtype=np.uint8))
        self.visits[sampled] += 1
        return works


@pytest.fixture
def federations(tmp_path):
    made = {clients: Federation(clients, str(tmp_path / f"state{clients}")) for clients in (1_000, 1_000_000)}
    yield made
    for federation in made.values():
        federation.table.remove()


def peak(federation: Federation) -> int:
    """The largest number of bytes that Python and numpy have allocated at one time during a round."""
    tracemalloc.start()
    try:
        federation.round()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_rounds_memory_is_the_cohorts(federations):
    """The smallest array with an entry for each of a million clients is one megabyte of flags; a round allocates less
    than that."""
    few, many = (min(peak(federation) for _ in range(3)) for federation in federations.values())
    assert many < 2 * few + 200_000, (few, many)
    assert many < 1_000_000


def test_a_rounds_time_is_the_cohorts(federations):
    """The two are measured alternately, and the fastest of several measurements counts. Work that depends on N would
    take a thousand times as long, so a factor of 3 is a wide margin."""
    seconds = {clients: np.inf for clients in federations}
    for _ in range(15):
        for clients, federation in federations.items():
            started = time.process_time()
            federation.round()
            seconds[clients] = min(seconds[clients], time.process_time() - started)
    few, many = seconds.values()
    assert many < 3 * few, (few, many)


class Many(Quadratic):
    """Two unknowns and a row of three numbers for each client, made without a loop over clients."""

    def split(self, seed: int, clients: int) -> Split:
        a = np.broadcast_to(np.eye(2), (clients, 2, 2))
        b = np.random.default_rng(0).standard_normal((clients, 2))
        return (
            super()
            .split(seed, 2)
            ._replace(train={"a": a, "b": b}, client_index=ClientIndex.equal(np.arange(clients), clients))
        )

    def init(self, seed: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(2, dtype=torch.float64)}


def scaffold(clients: int, cohort: int, store: Path) -> Experiment:
    federation = {"clients": clients, "cohort": cohort, "rounds": 9, "local": {"steps": 2, "batch": 1}}
    engine = {"backend": "local", "store": str(store), "kernels": "torch", "block": 10}
    spec = {"workload": Many(dim=2), "federation": federation, "engine": engine, "evaluate": {"every": 0}}
    return experiment({**spec, "method": "scaffold", "tracking": {"uri": "none"}})


def test_a_run_of_a_million_clients_keeps_states_of_those_it_met(tmp_path):
    """Its rounds allocate no more than those of 1,000 clients, where a million flags would be a megabyte; and the files
    of states have blocks on the disk for the rows of the clients that took part, and no others."""
    cohort, peaks = 20, {}
    for clients in (1_000, 1_000_000):
        with driver_here(scaffold(clients, cohort, tmp_path)) as driver:
            next_round(driver)
            tracemalloc.start()
            next_round(driver)
            tracemalloc.reset_peak()
            next_round(driver)
            peaks[clients] = tracemalloc.get_traced_memory()[1]
            met = int((driver.table.row >= 0).sum())
            assert 2 * cohort < met <= 3 * cohort
            assert met == driver.visits.astype(bool).sum()
            blocks = [os.stat(path).st_blocks * 512 for path in paths(driver.table.layout.folder)]
            assert 0 < sum(blocks) < 100 * 2**12
        tracemalloc.stop()
    assert peaks[1_000_000] < peaks[1_000] + 500_000, peaks


@pytest.mark.parametrize(
    "partition", [Shards(2), Dirichlet(0.3), Labels(2), Quantity(0.5), Natural()], ids=lambda made: type(made).__name__
)
def test_partitions_make_no_object_per_client(partition):
    """A list with an array for each of 30,000 clients would take a further 100 bytes for each."""
    clients, labels = 30_000, np.arange(60_000) % 10
    if isinstance(partition, Natural):
        labels = np.arange(60_000) % clients
    partition.deal(labels[:100], 10, 1)  # numpy imports some of its modules when they are used first
    tracemalloc.start()
    try:
        index = partition.deal(labels, clients, 1)
        blocks = sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename"))
    finally:
        tracemalloc.stop()
    assert len(index.sizes) == clients
    assert index.sizes.min() >= 1
    assert blocks < clients / 10


def test_a_hundred_thousand_clients_are_two_arrays():
    labels = np.arange(250_000) % 10
    tracemalloc.start()
    try:
        parts = Iid().deal(labels, 100_000, seed=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parts.sizes.min() == 2
    assert parts.sizes.max() == 3
    assert (np.sort(parts.rows) == np.arange(len(labels))).all()
    assert peak < 5 * (parts.offsets.nbytes + parts.rows.nbytes)  # an object a client would be 10 MB and more


@pytest.mark.parametrize(("rows", "clients"), [(10, 10), (10, 3), (7, 4), (100, 1)])
def test_equal_parts_are_numpys(rows, clients):
    rows = np.random.default_rng(0).permutation(rows)
    ours, theirs = ClientIndex.equal(rows, clients), ClientIndex.of(np.array_split(rows, clients))
    assert (ours.offsets == theirs.offsets).all()
    assert (ours.rows == theirs.rows).all()
    some = np.arange(clients)[::2]
    assert (ours.sizes_of(some) == ours.sizes[some]).all()


def test_time_of_states_is_reading_and_writing(tmp_path, monkeypatch):
    """9 clients in blocks of 4 make 3 tasks of one block each, so that 3 reads and 3 writes per round are slowed down;
    in round 1 nothing is read yet."""
    pause = 0.01
    for name in ("read", "write"):
        plain = getattr(RowFiles, name)

        def slow(*given, plain=plain):
            time.sleep(pause)
            return plain(*given)

        monkeypatch.setattr(RowFiles, name, slow)
    experiment = digits("scaffold", STEPS)
    for out in (None, tmp_path / "run"):
        first, *later = run(experiment, out).rows
        assert 3 * pause <= first["time/state"] <= first["time/workers"]
        assert all(3 * pause < row["time/state"] <= row["time/workers"] for row in later)
        assert later[-1]["time/state"] >= 4 * pause  # one or two blocks may be all newcomers


def test_a_method_without_states_takes_no_time_for_them():
    rows = run(digits("fedavg", STEPS)).rows
    assert min(row["time/state"] / row["time/workers"] for row in rows) < 1 / 2  # other work may interrupt a round


def test_packed_records_are_the_records():
    rows = [{"round": 1, "a": 0.5}, {"round": 2, "a": float("nan"), "b": -1.0}, {"round": 3, "b": 2.0}]
    history = History(rows)
    kept = history.frozen()
    history.append({"c": 1.0})
    assert repr(list(kept)) == repr([{name: float(value) for name, value in row.items()} for row in rows])
    assert len(kept) == 3
    assert list(history)[-1] == {"c": 1.0}
    table = to_table(kept)
    assert table["round"].to_pylist() == [1, 2, 3]
    assert table["a"].null_count == 1
    assert table["b"].to_pylist() == [None, -1.0, 2.0]
    assert repr(to_table(rows).to_pylist()) == repr(table.to_pylist())
