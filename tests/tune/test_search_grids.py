"""The papers' grids: every key is an argument of its method, and every value is allowed."""

from __future__ import annotations

import pytest

from fedfleet.algorithms.contract import Algorithm
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.ranges import decided, points, ranges
from fedfleet.tune.search.paper_grids import COMPRESSED, GRIDS, choose, decades, with_grid
from fedfleet.tune.search.plan import plan

ALL = [(method, paper) for method, papers in GRIDS.items() for paper in papers]

RATIO = {m for m, values in COMPRESSED.items() if m != "fedbat"}
"""Methods with a compression ratio, whose default is too small for the model here."""


def data(method: str, **federation: int) -> dict:
    return {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [16, 16]}},
        "method": {"name": method, "ratio": 0.9} if method in RATIO else method,
        "federation": {"clients": 10, "cohort": 5, "rounds": 2, **federation},
        "name": "here",
    }


@pytest.mark.parametrize(("method", "paper"), ALL)
def test_every_point_builds_its_method(method: str, paper: str):
    """Each point is validated like an experiment, which checks names and types; every value of a grid is in some
    point."""
    made = with_grid(data(method), paper)
    found = ranges(made)
    assert {r.key.removeprefix("method.") for r in found} == set(GRIDS[method][paper].values)
    every = list(points(found))
    longest = max(len(r.values) for r in found)
    chosen = [{r.key: r.values[i % len(r.values)] for r in found} for i in range(longest)]
    assert all(point in every for point in chosen)
    for point in chosen:
        built = RunSpec.of("", experiment(decided(made, point))).method()
        assert isinstance(built, Algorithm)


@pytest.mark.parametrize(("method", "paper"), ALL)
def test_it_is_a_search(method: str, paper: str):
    made = plan(with_grid(data(method), paper))
    assert made.sampler == "grid"
    size = 1
    for values in GRIDS[method][paper].values.values():
        assert len(set(values)) == len(values)
        size *= len(values)
    assert made.trials == size


def test_table_1_of_fedmuon():
    """Takezawa et al. 2025, table 1: two step sizes for Muon's matrices, two for vectors; three for FedAvg and
    SCAFFOLD."""
    assert plan(with_grid(data("fedmuon_bc"))).trials == 4
    assert plan(with_grid(data("local_muon"))).trials == 4
    assert list(GRIDS["scaffold"]["fedmuon_bc"].values["rule.lr"]) == [0.1, 0.01, 0.001]
    assert with_grid(data("scaffold"))["method"]["rule"]["name"] == "momentum"


def test_g3_of_feddua():
    """Takakura et al. 2025, G.3: half-decades, which differ between tasks and are chosen by the workload."""
    assert decades(-2, 0) == (0.01, 0.03162, 0.1, 0.3162, 1.0)
    assert choose("fedadam", "cifar10").values["server_lr"] == decades(-4, -2)
    assert choose("fedadam", "shakespeare").values["server_lr"] == decades(-3, -1)
    assert choose("fedadam", "linear").values["server_lr"] == decades(-2, 0)
    assert choose("feddu_adam", "linear").values["epsilon_g"] == (0.0,)
    assert choose("fedavg", "cifar10").values["rule.lr"] == decades(-2, 0)
    assert choose("fedavg", "digits").values["rule.lr"] == (0.1, 0.01, 0.001)


def test_the_files_rule_stays():
    made = data("fedavg") | {"method": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.5}, "server_lr": 2.0}}
    method = with_grid(made, "fedmuon_bc")["method"]
    assert method["rule"] == {"name": "adam", "lr": {"search": "grid", "values": [0.1, 0.01, 0.001]}}
    assert method["server_lr"] == 2.0
    assert made["method"]["rule"] == {"name": "adam", "lr": 0.5}


@pytest.mark.parametrize(
    ("method", "paper", "told"),
    [
        ("stem", "auto", "no paper gives a grid for stem"),
        ("fedavg", "fedmuon_ma", "fedmuon_ma has no grid for fedavg"),
    ],
)
def test_what_there_is_not(method: str, paper: str, told: str):
    with pytest.raises(ConfigError, match=told):
        with_grid(data(method), paper)
