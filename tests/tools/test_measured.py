"""The measured table: its grids build, what is stored comes from them, and the page shows what is stored."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml

from fedfleet.algorithms.table import METHODS
from fedfleet.engine.config.registry import Registry
from tests.algorithms.test_resting_points import HERE, IN_MOMENTA, IN_STATIONARY
from tools.site import measured

FOLDER = Path(__file__).parents[2] / "benchmarks"
GRIDS = yaml.safe_load((FOLDER / "fashion_table.yaml").read_text("utf-8"))
RUNS = json.loads(measured.RESULTS.read_text("utf-8"))["runs"]
command = runpy.run_path(str(FOLDER / "fashion_table.py"))


def test_every_minimising_method_has_a_grid():
    assert set(GRIDS) == HERE | IN_STATIONARY | IN_MOMENTA


@pytest.mark.parametrize("name", GRIDS)
def test_every_point_builds(name):
    methods = list(command["points"](name, GRIDS[name]))
    assert len({json.dumps(method) for method in methods}) == len(methods) >= 2
    for method in methods:
        Registry().build("METHODS", method, "method")


def test_what_is_stored_is_of_the_grids_and_trains():
    """The stored results are of points in the grids, and the best one trains. It may miss the mark only if all points
    of its method were run, and then the table shows that."""
    points = {name: list(command["points"](name, entry)) for name, entry in GRIDS.items()}
    for run in RUNS:
        name, level = run["method"]["name"], run["beta"]
        assert run["method"] in points[name]
        assert run["rounds"] == measured.LONG or (run["rounds"] == measured.SHORT and level == 10.0)
    for name in GRIDS:
        for level, least in command["TRAINS"].items():
            long = [r for r in RUNS if (r["method"]["name"], r["beta"], r["rounds"]) == (name, level, measured.LONG)]
            best = max((measured.reached(run) for run in long), default=1.0)
            assert best >= least or len(long) == len(points[name])


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    method = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    other = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.3}}
    sizes = {"bytes_down": 5_000_000, "bytes_up": 2_000_000, "cpu_seconds": 50.2}
    runs = [
        {"method": method, "beta": 10.0, "rounds": 25, "accuracy": [0.2, 0.3, 0.4, 0.5], **sizes},
        {"method": other, "beta": 10.0, "rounds": 25, "diverged": 7},
        {"method": method, "beta": 10.0, "rounds": 300, "accuracy": [0.1, 0.7, 0.8, 0.8, 0.8, 0.9], **sizes},
    ]
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"torch": "2", "runs": runs}), "utf-8")
    monkeypatch.setattr(measured, "RESULTS", file)
    return runs


def test_a_row(two_runs):
    """A row has the last accuracy, the mean of the last five, and the chosen point; it is empty if there is no run."""
    *_, row, blank, missing, end = measured.section(["fedavg", "stem"]).split("\n")
    assert row == "| `fedavg` | 90.0 (80.0) | rule.lr 0.1 | | | 50 | 5 | 2 |"
    assert (blank, missing, end) == ("", "Not measured: `stem`.", "")


def test_score(two_runs):
    assert measured.score(two_runs[0]) == pytest.approx(0.4)
    assert measured.score(two_runs[1]) == measured.reached(two_runs[1]) == 0.0
    collapsed = {"rounds": 300, "accuracy": [0.8, 0.8, 0.8, 0.8, 0.1]}
    assert measured.reached(collapsed) == pytest.approx(0.1)


def test_a_stored_run_is_not_run_again(two_runs):
    results = command["Results"](measured.RESULTS)
    assert results.of(two_runs[2]["method"], 10.0, 300) == two_runs[2]


def test_methods_are_in_the_table():
    assert set(GRIDS) <= set(METHODS)
