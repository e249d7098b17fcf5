"""Records of single clients, which are written only if the configuration asks for them."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.per_client import write_clients

from .setups import EPOCHS, digits


def asked(**engine):
    made = digits("scaffold", EPOCHS, rounds=3, **engine)
    return made.model_copy(update={"tracking": made.tracking.model_copy(update={"clients": True})})


@pytest.mark.parametrize("block", [1, 4])
def test_a_row_a_client_that_adds_up_to_the_record(tmp_path, block):
    result = run(asked(block=block), tmp_path / "run")
    files = sorted((tmp_path / "run" / "clients").iterdir())
    assert [f.name for f in files] == [f"round-{n:06d}.parquet" for n in (1, 2, 3)]
    for file, row in zip(files, result.rows, strict=True):
        table = pq.read_table(file).to_pydict()
        assert table["id"] == sorted(set(table["id"]))
        assert len(table["id"]) == row["client/count"]
        assert sum(table["steps"]) == row["client/steps"]
        assert np.mean(table["loss"]) == pytest.approx(row["train/loss"], rel=1e-6)  # float32 sums
        assert np.mean(table["norm2"]) == pytest.approx(row["client/norm2"], rel=1e-5)


def test_unasked_there_is_none(tmp_path):
    run(digits("scaffold", EPOCHS, rounds=1), tmp_path / "run")
    assert not (tmp_path / "run" / "clients").exists()


def test_it_needs_a_folder():
    with pytest.raises(ConfigError, match=r"tracking\.clients"):
        run(asked())


# --- visits on a virtual clock ----------------------------------------------------------------------------------------
FLEET = {"devices": {"name": "lognormal", "sigma": 1.0}, "dropout": 0.2}
VISIT = ("selected", "status", "start", "arrival", "duration", "compute", "version", "staleness")


def visits_of(tmp_path, pace, systems=None, **federation):
    """(the records of a run, the columns of the clients of each round)."""
    base = asked()
    federation = {"rounds": 6, "clients": 30, "cohort": 9, "local": EPOCHS, "pace": pace, **federation}
    made = experiment({**base.plain(), "federation": federation, "systems": systems or FLEET})
    result = run(made, tmp_path / "run")
    files = sorted((tmp_path / "run" / "clients").iterdir())
    return result.rows, [pq.read_table(file) for file in files]


def test_every_client_that_was_selected_has_a_row(tmp_path):
    rows, tables = visits_of(tmp_path, {"select": 1.4, "deadline": 8, "stragglers": "drop"})
    found, begin = set(), 0.0
    for row, table in zip(rows, tables, strict=True):
        status, loss = (table[name].to_numpy(zero_copy_only=False) for name in ("status", "loss"))
        found |= set(status.tolist())
        assert table.column_names == ["round", "id", "loss", "norm2", "steps", *VISIT]
        assert len(table) == row["client/selected"] == 13
        assert [(status == i).sum() for i in range(5)] == [
            *(row[f"client/{name}"] for name in ("count", "late", "lost")), 0, 0,
        ]  # fmt: skip
        assert (np.isnan(loss) == (status != 0)).all()
        assert sum(table["selected"].to_pylist()) == 9
        start, arrival, duration = (table[name].to_numpy() for name in ("start", "arrival", "duration"))
        assert start == pytest.approx(begin)
        assert (arrival <= start + duration + 1e-9).all()
        assert arrival[status == 0] == pytest.approx((start + duration)[status == 0])
        assert (table["compute"].to_numpy() < duration).all()
        assert arrival[status == 0].max() <= row["system/clock"] + 1e-9
        assert set(table["version"].to_pylist()) == {row["round"] - 1}
        begin = row["system/clock"]
    assert found == {0, 1, 2}


def test_the_visits_of_an_update(tmp_path):
    pace = {"name": "buffered", "buffer": 3, "staleness": 2}
    systems = {**FLEET, "availability": {"name": "bernoulli", "p": 0.7, "slot": 10}}
    rows, tables = visits_of(tmp_path, pace, systems, rounds=20)
    assert {status for table in tables for status in table["status"].to_pylist()} == {0, 2, 3}
    for row, table in zip(rows, tables, strict=True):
        status, staleness = (np.array(table[name].to_pylist()) for name in ("status", "staleness"))
        assert (status == 0).sum() == row["client/count"] == 3
        assert (status == 2).sum() == row["client/lost"]
        assert (status == 3).sum() == row["async/discarded"]
        assert staleness[status == 0].mean() == pytest.approx(row["async/staleness"])
        assert (staleness[status == 3] > 2).all()
        assert (table["version"].to_numpy() + staleness <= row["round"] - 1).all()
        wasted = (table["arrival"].to_numpy() - table["start"].to_numpy())[status != 0].sum()
        assert row["system/wasted"] == pytest.approx(wasted)
        assert 0 <= row["client/eligible"] <= 30
        assert row["comm/bytes_down"] % row["client/selected"] == 0 if row["client/selected"] else True
    assert sum(row["client/eligible"] for row in rows) / len(rows) == pytest.approx(21, abs=3)


def test_a_client_that_failed_has_a_row_of_its_own(tmp_path):
    visits = {"id": np.array([4, 2, 7]), "status": np.array([0, 0, 1])}
    clients = {"id": np.array([2]), "loss": np.array([0.5]), "norm2": np.array([1.0]), "steps": np.array([3])}
    write_clients(str(tmp_path), 1, clients, visits)
    table = pq.read_table(tmp_path / "clients" / "round-000001.parquet").to_pydict()
    assert table["id"] == [2, 4, 7]
    assert table["status"] == [0, 4, 1]
    assert table["loss"] == [0.5, None, None]
