"""Workers whose environment cannot run clients: they are given up, no client counts as failed, and the bits are the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment

from ..tune.commands import error_in, shell
from .conftest import STORE, ended

PLUGIN = str(Path(__file__).parents[1] / "faults" / "unfit.py")
NO_COMPILER = {"CXX": "/no/such/compiler"}


@pytest.fixture
def unfit(cluster):
    """unfit(environment, nodes): replaces the second node of the cluster by nodes that have these environment
    variables."""

    def make(environment: dict[str, str], nodes: int = 1, **options: Any) -> None:
        (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
        cluster.remove_node(second)
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, object_store_memory=STORE, env_vars=environment, **options)

    return make


def setting(**engine: Any) -> dict[str, Any]:
    return {
        "plugins": [PLUGIN],
        "workload": {"name": "unfit", "model": {"name": "mlp", "hidden": [16]}},
        "method": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 30, "cohort": 9, "rounds": 4, "local": {"steps": 3, "batch": 16}},
        "engine": {"block": 4, **engine},
        "tracking": {"uri": "none"},
    }


def alone(data: dict[str, Any]) -> str:
    """The digest of the model of the same run in this process."""
    engine = {key: value for key, value in data["engine"].items() if key in ("block", "kernels")}
    return run(experiment({**data, "engine": {**engine, "backend": "local"}})).model_sha256


def logged(folder: Path) -> str:
    log = (folder / "run.log").read_text()
    assert "failed on" not in log, log
    assert "goes on without" not in log, log
    return log


@pytest.mark.parametrize("on_failure", ["fail", pytest.param("drop", marks=pytest.mark.slow)])
def test_workers_without_a_compiler(on_failure, unfit, cluster, start, tmp_path, own_kernels):
    """One worker has a compiler, and two have none: no client fails, and none is dropped."""
    unfit(NO_COMPILER, 2)
    data = setting(backend="ray", workers=3, cpus=1, kernels="native", on_failure=on_failure)
    result = ended(start(data))
    assert result["model_sha256"] == alone(data)
    log = logged(tmp_path / "out")
    assert log.count("is given up, it cannot run clients: NoKernels: no C++ compiler") == 2
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    said = shell(tmp_path, "doctor", "run.yaml", "--address", cluster.address, timeout=500)
    assert said.returncode == 1
    assert said.stdout.count("engine.kernels=native: no C++ compiler: none of /no/such/compiler is here; worker") == 2
    assert said.stdout.count("has kernels for its processor") == 1


WAYS = {
    "import": "ModuleNotFoundError: No module named 'a_package_that_is_not_here'",
    "package": "ModuleNotFoundError: No module named 'another_package_that_is_not_here'",
    "memory": "MemoryError: no room for the model",
    "model": "RuntimeError: the model cannot be built here",
    "killed": "ActorDiedError",
}


@pytest.mark.parametrize("way", ["package", *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS if w != "package")])
def test_a_worker_that_is_unfit(way, unfit, start, tmp_path):
    unfit({"FF_UNFIT": way})
    data = setting(backend="ray", workers=2, cpus=1, on_failure="drop")
    result = ended(start(data))
    assert result["model_sha256"] == alone(data)
    log = logged(tmp_path / "out")
    assert WAYS[way] in log
    assert log.count("is given up") == 1


def test_where_no_worker_is_left_the_run_ends_with_a_sentence(unfit, start, tmp_path):
    unfit({"FF_UNFIT": "model"}, 2, labels={"kind": "unfit"})
    process = start(setting(backend="ray", workers=[{"count": 2, "cpus": 1, "labels": {"kind": "unfit"}}]))
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    line = error_in(said)
    assert line.startswith("error: no worker is left that can run clients, the last: ")
    assert line.endswith("RuntimeError: the model cannot be built here")
    assert "Traceback" not in said


def test_a_plan_that_nobody_asked_for_is_one_that_all_machines_can_have(unfit, start, tmp_path, own_kernels):
    """The run is long enough to be measured, and this machine can build native kernels, but another machine cannot: all
    workers use torch's kernels."""
    unfit(NO_COMPILER)
    data = setting(backend="ray", workers=2, cpus=1)
    data["engine"]["block"] = "auto"
    data["federation"] |= {"clients": 30, "cohort": 30, "rounds": 10, "local": {"steps": 70, "batch": 4}}
    result = ended(start(data))
    log = logged(tmp_path / "out")
    (line,) = [line for line in log.splitlines() if "plan: blocks of" in line]
    assert "torch kernels (measured" in line
    assert "no compiled kernels, which not every machine can have: node " in line
    assert "no C++ compiler: none of /no/such/compiler is here" in line
    assert "is given up" not in log
    assert result["rounds"] == 10


@pytest.mark.parametrize(
    "way", ["memory", "killed", *(pytest.param(way, marks=pytest.mark.slow) for way in ("package", "model"))]
)
def test_one_worker_of_a_machine_is_given_up_and_not_replaced(way, tmp_path, ray_here):
    """The other worker of the machine goes on. If a process of a worker dies while it starts, another one is tried, at
    most three in all."""
    (tmp_path / "unfit").write_text(way)
    data = setting(backend="ray", workers=2, cpus=0.5)
    data["workload"]["folder"] = str(tmp_path)
    result = run(experiment(data), tmp_path / "out")
    assert result.model_sha256 == alone({**data, "workload": {**data["workload"], "folder": ""}})
    log = logged(tmp_path / "out")
    assert log.count("is given up") == (0 if way == "killed" else 1), log
    assert WAYS[way] in log or way == "killed", log
