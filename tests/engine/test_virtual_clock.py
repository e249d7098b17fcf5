"""Rounds in virtual time: who is used, how long a round takes, resuming, and identities with runs without a clock."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.fleet.planner import arrivals
from fedfleet.engine.fleet.visits import VisitTimes
from fedfleet.engine.runs.prepare import prepare
from tests.faults.runs import Watch, interrupt

FLEET = {
    "devices": {"name": "lognormal", "sigma": 1.0, "jitter": 0.2},
    "availability": {"name": "sessions", "length": 60, "pause": 30, "spread": 0.5},
    "dropout": 0.1,
    "work": {"name": "uniform", "p": 0.5},
}


def digits(plan=None, systems=None, method="fedavg", **more):
    return experiment(
        {
            "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [4]}},
            "method": method,
            "federation": {
                "clients": 20,
                "cohort": 6,
                "rounds": 5,
                "local": {"steps": 4, "batch": 8},
                **(plan or {}),
            },
            "engine": {"backend": "local", "block": 2, "kernels": "torch"},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
            **({} if systems is None else {"systems": systems}),
            **more,
        }
    )


def visits(*durations, lost=None):
    """The visits that take these seconds, all of them computing."""
    zeros = np.zeros(len(durations))
    gone = np.full(len(durations), np.inf) if lost is None else np.array(lost, dtype=float)
    return VisitTimes(np.full(len(durations), 5), zeros, np.array(durations, dtype=float), zeros, gone)


# --- one round --------------------------------------------------------------------------------------------------------
def test_a_round_by_hand():
    """Four clients of 3.5, 5, 8 and 14 s."""
    four, ids, nobody = visits(3.5, 5, 8, 14), np.arange(4), np.zeros(4, bool)
    used, length = arrivals(four, ids, np.array([False, False, True, True]), 2, np.inf)
    assert (sorted(used.tolist()), length) == ([0, 1], 5.0)
    assert arrivals(four, ids, nobody, 4, np.inf)[1] == 14.0
    used, length = arrivals(four, ids, nobody, 4, 6.0)
    assert (sorted(used.tolist()), length) == ([0, 1], 6.0)
    used, length = arrivals(visits(4, 3, 2, 1), ids, nobody, 2, np.inf)
    assert (used.tolist(), length) == ([3, 2], 2.0)


def test_clients_of_equal_speed_come_before_spares():
    used, _ = arrivals(visits(1, 1, 1, 1), np.array([7, 3, 1, 0]), np.array([False, False, True, True]), 2, np.inf)
    assert sorted(used.tolist()) == [0, 1]


def test_losses_are_noticed_or_waited_for():
    lost = visits(3, 9, lost=[np.inf, 4])
    assert arrivals(lost, np.arange(2), np.zeros(2, bool), 2, np.inf) == (pytest.approx([0]), 4.0)
    assert arrivals(lost, np.arange(2), np.zeros(2, bool), 2, 20.0)[1] == 20.0


# --- identities -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plain():
    return run(digits()).model_sha256


EQUAL = {"devices": "equal"}


@pytest.mark.parametrize(
    ("plan", "systems"),
    [
        ({}, {}),
        ({}, {"devices": {"name": "lognormal", "sigma": 2}, "work": {"name": "uniform", "p": 0}}),
        ({"pace": {"deadline": 1e9, "stragglers": "drop"}}, {}),
        ({"pace": {"deadline": 1e9, "stragglers": "partial"}}, {}),
        ({"pace": {"select": 1.5}}, EQUAL),
    ],
)
def test_a_clock_that_cuts_nobody_off_changes_no_bit(plan, systems, plain):
    result = run(digits(plan, systems))
    assert result.model_sha256 == plain
    clock = [row["system/clock"] for row in result.rows]
    assert (np.diff([0, *clock]) > 0).all()
    assert all(row["client/late"] == row["client/selected"] - 6 for row in result.rows)


def test_the_round_takes_as_long_as_its_slowest_client():
    rows = run(digits(systems=EQUAL)).rows
    down, up = (8 * rows[0][f"comm/bytes_{way}"] / 6 / 1000 for way in ("down", "up"))
    assert rows[0]["system/seconds"] == pytest.approx(down / 6100 + up / 3050 + 3 * 80 * 4 * 8 / 1000)
    assert rows[-1]["system/clock"] == pytest.approx(sum(row["system/seconds"] for row in rows))


def test_compression_shortens_virtual_time():
    slow = {"devices": {"name": "equal", "compute": 1e-9, "down": 100, "up": 100}}
    coded = {
        "name": "fedavg",
        "compression": {"name": "sparsification", "ratio": 0.05, "layers": "all"},
    }
    seconds = [run(digits(systems=slow, method=method)).rows[-1]["system/clock"] for method in ("fedavg", coded)]
    rows = run(digits(systems=slow, method=coded)).rows
    expected = sum(8 * (row["comm/bytes_down"] + row["comm/bytes_up"]) / 6 / 1000 / 100 for row in rows)
    assert seconds[1] == pytest.approx(expected)
    assert seconds[1] < 0.5 * seconds[0]


def test_what_is_not_used_is_counted(tmp_path):
    """used + late + lost = selected; the downloads of all selected are counted, and the uploads of those used."""
    rows = run(digits({"pace": {"select": 1.5, "deadline": 20, "stragglers": "drop"}, "rounds": 20}, FLEET)).rows
    assert {row["client/lost"] > 0 for row in rows} == {True, False}
    for row in rows:
        assert row["client/count"] + row["client/late"] + row["client/lost"] == row["client/selected"]
        assert row["comm/bytes_down"] * row["client/count"] == row["comm/bytes_up"] * row["client/selected"]
        wasted = row["client/selected"] - row["client/count"]
        assert row["comm/bytes_wasted"] == wasted * row["comm/bytes_down"] / row["client/selected"]
        assert row["system/seconds"] <= 20 + row["system/waited"] + 1e-9


def test_a_deadline_cuts_work_short():
    rows = run(digits({"pace": {"deadline": 10, "stragglers": "partial"}}, {})).rows
    assert any(row["client/steps"] < 4 * row["client/count"] for row in rows)
    assert all(row["system/seconds"] <= 10 for row in rows)


def test_a_round_with_too_few_clients_is_empty():
    pace = {"deadline": 1e-3, "stragglers": "drop", "least": 2}
    result = run(digits({"pace": pace}, {}))
    assert [row["client/count"] for row in result.rows] == [0] * 5
    assert result.rows[-1]["system/clock"] == pytest.approx(5e-3)


def test_a_round_waits_for_clients(tmp_path):
    nights = pa.table({"client": np.arange(20), "from": np.arange(20) * 10.0, "to": np.full(20, 1e6)})
    pq.write_table(nights, tmp_path / "a.parquet")
    trace = {"name": "trace", "file": str(tmp_path / "a.parquet"), "assign": "number"}
    rows = run(digits({"pace": {"least": 6}, "rounds": 1}, {"availability": trace})).rows
    assert rows[0]["system/waited"] == 50.0
    assert rows[0]["client/eligible"] == rows[0]["client/count"] == 6


def test_evaluations_on_a_grid_of_virtual_seconds():
    result = run(digits({"rounds": 20}, {}, evaluate={"seconds": 100}))
    clock = np.array([row["system/clock"] for row in result.rows])
    evaluated = np.array(["eval/accuracy" in row for row in result.rows])
    passed = np.diff(np.r_[0, clock] // 100) > 0
    passed[-1] = True
    assert (evaluated == passed).all()


# --- one and many workers, and resuming -------------------------------------------------------------------------------
SAMPLERS = [
    {"name": "separated", "rounds": 2},
    "cyclic",
    {"name": "power_of_choice", "d": 10, "loss": "last"},
    {"name": "agnostic", "by": "lambda", "gamma": 0.1, "floor": 0.001},
    "oort",
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s if isinstance(s, str) else s["name"])
def test_a_run_is_resumed_to_the_same_bits(sampler, tmp_path):
    plan = {"sampler": sampler, "pace": {"deadline": 15, "stragglers": "partial"}}
    made = digits(plan, FLEET, "scaffold")
    whole = run(made)
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r3=interrupt)])
    again = resume(made, tmp_path / "run")
    assert again.model_sha256 == whole.model_sha256
    for a, b in zip(whole.rows, again.rows, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith("time/")} == pytest.approx(
            {k: v for k, v in b.items() if not k.startswith("time/")}, abs=0, nan_ok=True
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampler", "select"),
    [
        ("oort", 1.5),
        pytest.param("uniform", 1.5, marks=pytest.mark.slow),
        pytest.param({"name": "power_of_choice", "d": 10}, 1.0, marks=pytest.mark.slow),
    ],
)
def test_one_and_two_workers_give_the_same_bits(sampler, select, ray_here):
    made = digits({"sampler": sampler, "pace": {"select": select, "deadline": 15, "stragglers": "partial"}}, FLEET)
    alone = run(made).model_sha256
    for workers in (1, 2):
        engine = made.engine.model_copy(update={"backend": "ray", "workers": workers})
        assert run(made.model_copy(update={"engine": engine})).model_sha256 == alone


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "keys", "message"),
    [
        (
            {"pace": {"select": 4}},
            {"systems": {}},
            "federation.pace.select: so many clients cannot be selected, got 4.0 with clients=20",
        ),
        ({}, {"systems": {"devices": "mobile"}}, "systems.devices.name: no kind of devices is called mobile"),
        ({"pace": {"deadline": 0, "stragglers": "drop"}}, {"systems": {}}, "federation.pace.deadline must be greater"),
        ({}, {"systems": {"dropout": 1.0}}, "systems.dropout must be less than 1, got 1.0"),
        ({}, {"systems": {"interrupt": "maybe"}}, "systems.interrupt must be 'session', 'end' or 'never', got 'maybe'"),
        ({"sampler": {"name": "oort", "penalty": -1}}, {}, "federation.sampler: penalty >= 0 must hold, got -1.0"),
        (
            {"pace": {"name": "buffered", "select": 1.3}},
            {"systems": {}},
            "federation.pace.select is not a key of an asynchronous pace; did you mean",
        ),
        ({}, {"systems": {"devices": {"name": "lognormal", "sigma": 500}}}, "systems.devices: sigma <= 50 must hold"),
        (
            {},
            {"systems": {"devices": {"name": "drawn", "down": {"name": "zipf", "most": 10**18}}}},
            "systems.devices.down: 1 <= most <= 10,000,000 must hold",
        ),
        (
            {},
            {"systems": {"availability": {"name": "bernoulli", "p": 0.5, "slot": 1e-300}}},
            "systems.availability: slot >= 0.001 must hold, got 1e-300",
        ),
    ],
)
def test_mistakes_are_one_sentence(plan, keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(digits(plan, **keys), "test")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("plan", "systems", "message"),
    [
        (
            {"pace": {"deadline": 1e-6, "stragglers": "drop"}},
            {},
            "federation.pace.deadline: no client can answer in time, since the fastest one needs",
        ),
        (
            {},
            {"devices": {"name": "drawn", "compute": {"name": "equal", "value": 1e308}}},
            "systems: every visit must have a finite duration, got inf virtual seconds",
        ),
        (  # again and again somebody is online, but never six at one time
            {"pace": {"least": 6}},
            {"availability": {"name": "bernoulli", "p": 0.02, "slot": 1}},
            "systems: 6 clients must be online at one time with enough memory, got no such time from second 0 on",
        ),
        (
            {"pace": {"name": "buffered", "buffer": 2, "deadline": 1e-3}},
            {},
            "federation.pace: no update will come after update 0, because 100 clients in a row were lost or too stale",
        ),
        (
            {"pace": {"name": "buffered", "buffer": 2, "starts": "rate"}},
            {"availability": {"name": "bernoulli", "p": 0}},
            "federation.pace: no client is in flight after update 0 (second 0), and none will come",
        ),
    ],
)
def test_runs_that_cannot_go_on_end(plan, systems, message, monkeypatch):
    monkeypatch.setattr("fedfleet.engine.fleet.visits.MOST_MOVES", 50)
    monkeypatch.setattr("fedfleet.engine.fleet.timeline.MOST_MISSED", 100)
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(digits(plan, systems))


def test_a_run_without_any_client_says_so(tmp_path):
    systems = {"devices": {"name": "equal", "compute": 1e6}}
    result = run(digits({"pace": {"deadline": 60, "stragglers": "drop"}}, systems), tmp_path / "run")
    assert not result.rows.column("client/count")[0].any()
    assert "no client took part in any round" in (tmp_path / "run" / "run.log").read_text()


def test_nobody_is_ever_online():
    made = digits({"pace": {"least": 6}}, {"availability": {"name": "bernoulli", "p": 0.0}})
    with pytest.raises(ConfigError, match=r"^systems: 6 clients must be online at one time"):
        run(made)
