"""Rows that drift: a client trains on a window of its rows that moves from round to round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedfleet
from fedfleet.engine.records.partition_file import partition_digest, read_partition, write_partition
from fedfleet.workloads.client_index import ClientIndex, Drift
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.partitions.drifting import Drifting
from fedfleet.workloads.partitions.standard import Dirichlet, Iid

DRIFTING = {"name": "drifting", "of": {"name": "dirichlet", "beta": 0.5}, "window": 0.4, "move": 0.07}


def asked(partition: Any = DRIFTING, **more: Any) -> fedfleet.Experiment:
    federation = {"clients": 20, "cohort": 5, "rounds": 6, "local": {"epochs": 1, "batch": 8}}
    return fedfleet.Experiment.model_validate(
        {
            "workload": {"name": "digits", "partition": partition},
            "method": "scaffold",
            "federation": {**federation, **more.pop("federation", {})},
            "engine": {"backend": "local", **more.pop("engine", {})},
            "tracking": {"uri": "none"},
            **more,
        }
    )


def own(index: ClientIndex) -> list[list[int]]:
    return [rows.tolist() for rows in np.split(index.rows, index.offsets[1:-1])]


def test_windows_by_hand():
    """Ten rows and three: half of them is five and two (1.5, rounded to even). 0.2 of ten are two rows a round, of
    three 0.6, which makes a step in the rounds 3, 5 and 6 (1.2, 2.4, 3.0)."""
    index = ClientIndex(np.array([0, 10, 13]), np.arange(13), drift=Drift(0.5, 0.2)).in_windows()
    assert index.sizes.tolist() == [5, 2]
    assert own(index) == own(index.at(1)) == [[0, 1, 2, 3, 4], [10, 11]]
    assert own(index.at(2)) == [[2, 3, 4, 5, 6], [10, 11]]
    assert own(index.at(3)) == [[4, 5, 6, 7, 8], [11, 12]]
    assert own(index.at(5)) == [[8, 9, 0, 1, 2], [12, 10]]
    assert own(index.at(6)) == [[0, 1, 2, 3, 4], [10, 11]]
    assert own(index.at(4).at(6)) == own(index.at(6))
    assert np.array_equal(index.whole.rows, np.arange(13))


def test_labels_move_on():
    """Sorted by label, a window of a tenth has few labels, and after half of the way others."""
    labels = np.tile(np.arange(10), 100)
    index = Drifting(Iid(), 0.1, 0.05).deal(labels, 5, 0).in_windows()
    early, late = (own(index.at(round)) for round in (1, 11))
    for before, after in zip(early, late, strict=True):
        assert len(set(labels[before])) <= 3
        assert not set(labels[before]) & set(labels[after])
    assert len({min(labels[rows]) for rows in early}) > 1  # clients start at places of their own
    first = Drifting(Iid(), 0.1, 0.05, start="first").deal(labels, 5, 0).in_windows()
    assert {labels[rows].min() for rows in own(first)} == {0}
    given = Drifting(Iid(), 0.1, 0.05, "given", "first").deal(labels, 5, 0).in_windows()
    assert all(rows == sorted(rows) for rows in own(given))


def test_a_window_of_all_rows_that_stays_is_no_drift():
    whole = {**DRIFTING, "window": 1.0, "move": 0.0, "order": "random", "start": "first"}
    assert fedfleet.run(asked(whole)).model_sha256 == fedfleet.run(asked(DRIFTING["of"])).model_sha256


PACE = {"pace": {"name": "buffered", "buffer": 3}}
SYSTEMS = {"devices": {"name": "lognormal", "sigma": 1.0}}
KINDS = {"rounds": {}, "asynchronous": {"federation": PACE, "systems": SYSTEMS}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_rows_of_its_rounds(kind: str, tmp_path: Path):
    whole = fedfleet.run(asked(**dict(KINDS[kind])), tmp_path / "whole")
    with fedfleet.rounds(asked(**dict(KINDS[kind])), tmp_path / "half") as rounds:
        for row in rounds:
            if row["round"] == 3:
                break
    assert fedfleet.resume(tmp_path / "half").model_sha256 == whole.model_sha256


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_workers_change_no_bit(kind: str, ray_here: None):
    alone = fedfleet.run(asked(**dict(KINDS[kind])))
    for workers in (1, 2):
        there = fedfleet.run(asked(**dict(KINDS[kind]), engine={"backend": "ray", "workers": workers}))
        assert there.model_sha256 == alone.model_sha256


def test_rows_apart_do_not_drift_and_evaluations_see_all_others():
    """Held-out rows and rows for validation are set aside first. The clients' own rows are evaluated in whole: with a
    step of 0 the model is the same in every round, and so are the columns."""
    apart = {"every": 1, "held_out": 0.2, "validation": 0.2, "fairness": True}
    still = {"name": "fedavg", "rule": {"name": "sgd", "lr": 1e-30}}
    rows = fedfleet.run(asked(evaluate=apart, method=still)).rows
    for name in ("eval/clients/loss", "eval/clients/test_loss", "eval/validation_loss"):
        assert len({row[name] for row in rows}) == 1


def test_samplers_that_ask_for_losses():
    power = {"sampler": {"name": "power_of_choice", "d": 10}}
    assert len(fedfleet.run(asked(federation=power)).rows) == 6


def test_the_file_has_all_rows(tmp_path: Path):
    index = Digits(partition=Drifting(Dirichlet(0.5))).split(0, 10).client_index.in_windows()
    write_partition(index, tmp_path)
    assert np.array_equal(read_partition(tmp_path).rows, index.whole.rows)
    assert '"drift"' in (tmp_path / "partition.json").read_text()
    other = index._replace(drift=Drift(0.3, 0.5, index.whole))
    assert len({partition_digest(each) for each in (index, other, index.whole._replace(drift=None))}) == 3


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Drifting(window=0.0), "window=0.0"),
        (lambda: Drifting(Iid()).deal(np.zeros((9, 2)), 3, 0), "order=value needs one label a row"),
        (lambda: Drifting(move=-0.1), "move=-0.1"),
        (lambda: Drifting(order="odd"), "order='odd'"),  # pyright: ignore[reportArgumentType]
        (lambda: Drifting(start="odd"), "start='odd'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_settings(build: Any, words: str):
    with pytest.raises(ValueError, match=words):
        build()
