"""Clients that are evaluated and never trained with (`federation.unseen`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import fedfleet
from fedfleet.engine import Result, run
from fedfleet.engine.clients.own_models import evaluated_clients
from fedfleet.engine.config.schema import Federation
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.metrics import better
from fedfleet.engine.records.partition_file import read_partition, write_partition
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.workload.split import seen_and_unseen
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.partitions.natural import Natural
from fedfleet.workloads.partitions.standard import Iid
from tests.engine.setups import Built
from tests.engine.test_personal import HEAD, network, small, spec_of

FEDERATION = {"clients": 12, "cohort": 5, "rounds": 3, "local": {"steps": 4, "batch": 8}, "unseen": 4}
GIVEN: dict[str, Any] = {
    "federation": FEDERATION,
    "evaluate": {"every": 0, "held_out": 0.25, "clients": {"adapt": {"steps": 2}}},
}


@pytest.mark.parametrize(("unseen", "count"), [(None, 0), (4, 4), (0.25, 4), (0.2, 3), (0.01, 1), ([3, 15, 0, 1], 4)])
def test_who_is_unseen(unseen: Any, count: int):
    federation = Federation.model_validate({**FEDERATION, "unseen": unseen})
    seen, apart = seen_and_unseen(federation, 5)
    assert (federation.clients, federation.all_clients) == (12, 12 + count)
    assert np.array_equal(np.sort(np.concatenate([seen, apart])), np.arange(12 + count))
    assert len(apart) == count
    if isinstance(unseen, list):
        assert apart.tolist() == sorted(unseen)


def test_their_rows_are_those_of_the_partition():
    whole = RunSpec.of("whole", small(HEAD, **{**GIVEN, "federation": {**FEDERATION, "clients": 16, "unseen": None}}))
    parts, index = RunSpec.of("parts", small(HEAD, **GIVEN)), whole.split().client_index
    found = parts.split().client_index
    assert found.unseen is not None
    for clients, part in zip(seen_and_unseen(parts.experiment.federation, 0), (found, found.unseen), strict=True):
        for own, expected in ((part, index), (part.held, index.held)):
            assert own is not None
            assert expected is not None
            for place, client in enumerate(clients.tolist()):
                rows, wanted = (it.rows[slice(*it.offsets[i : i + 2])] for it, i in ((own, place), (expected, client)))
                assert np.array_equal(rows, wanted)
    rows = [found.rows, found.unseen.rows]
    assert np.array_equal(found.everyone.rows, np.concatenate(rows))
    assert np.array_equal(found.everyone.sizes, np.concatenate([found.sizes, found.unseen.sizes]))


class Changed(Digits):
    """Unseen clients have other images."""

    def split(self, seed: int, clients: int):
        split = super().split(seed, clients)
        _, unseen = seen_and_unseen(Federation.model_validate(FEDERATION), seed)
        images = split.train["input"].copy()
        images[split.client_index.of_clients(unseen).rows] += 100.0
        return split._replace(train={**split.train, "input": images})


def numbers(result: Result, unseen: bool) -> dict[str, float]:
    return {
        name: value
        for name, value in result.rows[-1].items()
        if name.startswith("eval/unseen/") == unseen and not name.startswith("time/") and not name.endswith("_gap")
    }


def test_their_rows_change_no_bit_of_training():
    first, second = (run(small(HEAD, workload=kind(Built(network), Iid()), **GIVEN)) for kind in (Digits, Changed))
    assert first.model_sha256 == second.model_sha256
    assert numbers(first, unseen=False) == numbers(second, unseen=False)
    one, other = (numbers(result, unseen=True) for result in (first, second))
    assert one.keys() == other.keys()
    assert one["eval/unseen/own/test_loss"] != other["eval/unseen/own/test_loss"]


class OfWriters(Digits):
    """Its rows are of 16 writers in turns."""

    def load(self):
        train, test = super().load()
        return {**train, "client": np.arange(len(train["label"])) % 16}, test


def test_the_table_names_natural_clients(tmp_path: Path):
    """Seen ones and unseen ones, whose order is drawn. Clients without natural ones have no name."""
    workload = OfWriters(Built(network), Natural())
    run(small(HEAD, workload=workload, **GIVEN), tmp_path / "run")
    names = pq.read_table(tmp_path / "run" / "clients.parquet")["name"].to_pylist()
    index, (train, _) = spec_of(HEAD, workload=workload, **GIVEN).split().client_index.everyone, workload.load()
    assert names == [str(train["client"][index.rows[begin]]) for begin in index.offsets[:-1]]
    assert {*names} == set(map(str, range(16)))
    assert names != sorted(names, key=int)
    run(small(HEAD, workload=OfWriters(Built(network), Iid()), **GIVEN), tmp_path / "iid")
    assert pq.read_table(tmp_path / "iid" / "clients.parquet")["name"].null_count == 16


def test_columns_and_table(tmp_path: Path):
    row = run(small(HEAD, **GIVEN), tmp_path / "run").rows[-1]
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pydict()
    assert table["population"] == ["seen"] * 12 + ["unseen"] * 4
    assert table["visits"][12:] == [0] * 4
    assert sum(table["visits"]) == 15
    for model in ("own", "adapted"):
        rows, values = (np.array(table[name]) for name in ("rows_test", f"{model}_test_accuracy"))
        means = [np.average(values[part], weights=rows[part]) for part in (slice(12), slice(12, 16))]
        weighted = [row[f"eval/{who}{model}/test_accuracy_weighted"] for who in ("", "unseen/")]
        assert weighted == pytest.approx(means, rel=1e-12)
        assert row[f"eval/{model}/test_accuracy_gap"] == pytest.approx(means[0] - means[1], rel=1e-9)
    assert not any(name.startswith("eval/unseen/server/") for name in row)  # its head is not trained


def test_which_gaps_are_better():
    assert better("eval/own/test_accuracy_gap") == "min"
    assert better("eval/unseen/adapted/test_accuracy_worst") == better("eval/own/test_loss_gap") == "max"


def test_a_sample_has_both_kinds():
    assert evaluated_clients(12, 0, 1, 4).tolist() == list(range(16))
    sample = evaluated_clients(12, 8, 1, 4)
    assert (len(sample), int((sample >= 12).sum())) == (8, 2)
    assert evaluated_clients(12, 100, 1, 4).tolist() == list(range(16))
    assert np.array_equal(evaluated_clients(12, 0.5, 1, 4)[:6], evaluated_clients(12, 0.5, 1))


def test_byzantine_clients_are_those_that_are_trained_with():
    attack = {"name": "label_flip", "clients": [0, 5]}
    honest = RunSpec.of("honest", small(**GIVEN)).split()
    poisoned = RunSpec.of("poisoned", small(**GIVEN, attack=attack)).split()
    changed = np.flatnonzero(honest.train["label"] != poisoned.train["label"])
    own = honest.client_index.of_clients(np.array([0, 5]))
    assert own.held is not None
    assert len(changed)
    assert set(changed) <= {*own.rows, *own.held.rows}


def test_the_file_of_the_partition(tmp_path: Path):
    index = RunSpec.of("parts", small(HEAD, **GIVEN)).split().client_index
    write_partition(index, tmp_path)
    assert np.array_equal(read_partition(tmp_path).rows, index.everyone.rows)
    assert '"unseen": 4' in (tmp_path / "partition.json").read_text()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"unseen": 1.5}, "federation.unseen: must be a whole number of 1 or more, a fraction below 1, or a list"),
        ({"unseen": [3, 3]}, "federation.unseen: a list must have the number of a client at least, and none twice"),
        ({"unseen": [3, 14]}, r"federation.unseen: the partition has the clients .*, got \[3, 14\] with clients=12"),
        ({"cohort": 13}, "federation.cohort: cohort <= clients must hold, got 13 with clients=12"),
    ],
)
def test_refused(keys: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        run(small(HEAD, federation={**FEDERATION, **keys}))


@pytest.mark.long
def test_workers_and_forks(tmp_path: Path):
    kept = {"backend": "local", "dtype": "float64", "block": 2, "keep_state": True}
    run(small(HEAD, **GIVEN, checkpoint={"every": 1}, engine=kept), tmp_path / "one")
    run(small(HEAD, **GIVEN, engine={**kept, "backend": "ray", "workers": 2, "cpus": 0.5}), tmp_path / "two")
    fedfleet.fork(tmp_path / "one", 2, out=tmp_path / "fork", progress=False)
    tables = [(tmp_path / name / "clients.parquet").read_bytes() for name in ("one", "two", "fork")]
    assert len(set(tables)) == 1
    with pytest.raises(ConfigError, match=r"federation\.unseen must stay"):
        fedfleet.fork(tmp_path / "one", 2, "federation.unseen=3", tmp_path / "other", progress=False)
