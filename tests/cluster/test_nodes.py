"""Runs on several nodes have the bits of a run in one process, also when nodes are lost or added."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from fedfleet import fork
from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.workloads.data.table import Table

from ..faults.runs import CLIENTS, METHODS, STEPS, asynchronous, plan, processes, rule, setting, small, visitor
from ..tune.commands import kill, until
from .conftest import COMMAND, STORE, ended

ON_TWO = {"backend": "ray", "workers": 2, "cpus": 1}


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The records without times and without the numbers of bytes between nodes."""
    table = pq.read_table(folder / "rounds.parquet").to_pylist()
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "node/")) and v is not None} for row in table]


def same(folder: Path, result: dict, expected) -> None:
    assert result["model_sha256"] == expected.model_sha256
    untimed = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in expected.rows]
    got = rows_of(folder)
    assert len(got) == len(untimed)
    for one, other in zip(got, untimed, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(list(one.values()), [other[key] for key in one])


@pytest.mark.parametrize("method", [m if m == "scaffold" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_two_nodes_give_the_bits_of_one_process(method, start, tmp_path):
    """The clients of all these methods have states, which move between nodes."""
    faults = tmp_path / "faults"
    result = ended(start(setting(faults, method, **ON_TWO, patience=60.0)))
    same(tmp_path / "out", result, run(small(faults, method)))
    assert "2 workers on 2 nodes" in (tmp_path / "out" / "run.log").read_text()


def test_an_asynchronous_run_on_two_nodes(start, tmp_path):
    """A client may begin with a state that its last visit has written on the other node, before its update."""
    faults = tmp_path / "faults"
    result = ended(start(asynchronous(faults, **ON_TWO, patience=60.0)))
    same(tmp_path / "out", result, run(experiment(asynchronous(faults))))
    assert sum(pq.read_table(tmp_path / "out" / "rounds.parquet")["node/results"].to_pylist()) > 0


def test_a_node_adds_up_what_it_has(start, tmp_path):
    """A worker adds up its sums of 130 KB where tasks share a call; in round 1 no task does."""
    data = setting(tmp_path / "faults", rounds=3, **ON_TWO)
    data["workload"]["model"]["hidden"] = [224]
    data["method"] = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    data["federation"]["cohort"], data["engine"]["block"] = 30, 2
    result = ended(start(data))
    alone = experiment({**data, "engine": {"backend": "local", "block": 2}})
    same(tmp_path / "out", result, run(alone))
    rows = pq.read_table(tmp_path / "out" / "rounds.parquet").to_pylist()
    for row in rows:
        assert 0 < row["node/sums"] <= row["node/results"] < 15
        assert row["node/bytes_sums"] == row["node/sums"] * 8 * (64 * 224 + 224 + 2240 + 10 + 1)  # and ‖delta‖²


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "attack"),
    [
        ({"name": "multi_krum", "f": 2, "before": ["nnm"]}, {"name": "optimal_alie", "share": 0.2}),
        pytest.param("fltrust", {"name": "gaussian", "share": 0.2}, marks=pytest.mark.slow),
    ],
)
def test_messages_of_two_nodes_are_aggregated(rule, attack, start, tmp_path):
    """Messages that were written on the other node are copied to the driver's node, where the passes over them are
    made."""
    data = setting(tmp_path / "faults", "scaffold", **ON_TWO, patience=60.0) | {"aggregate": rule, "attack": attack}
    result = ended(start(data))
    alone = {**data["engine"], "backend": "local"}
    same(tmp_path / "out", result, run(experiment({**data, "engine": alone})))
    assert pq.read_table(tmp_path / "out" / "rounds.parquet")["node/results"].to_pylist()[0] > 0


def test_groups_of_workers(start, tmp_path):
    """One group of workers has half a processor on each node, another one a whole processor of a node with a label."""
    groups = [{"count": 1, "cpus": 0.5}, {"count": 1, "cpus": 0.5, "labels": {"kind": "second"}}]
    result = ended(start(setting(tmp_path / "faults", backend="ray", workers=groups, placement="spread")))
    same(tmp_path / "out", result, run(small(tmp_path / "none")))
    assert "2 workers on 2 nodes" in (tmp_path / "out" / "run.log").read_text()


def test_all_workers_at_once_or_none(start, tmp_path):
    """While one run uses both nodes, a second run gives up, and a third run waits until the first is over."""
    gates = Gates(tmp_path / "faults", 2)
    first = start(setting(tmp_path / "faults", **ON_TWO), "first")
    gates.reached(0)
    elsewhere = setting(tmp_path / "none", backend="ray", workers=1, cpus=1)
    second = start({**elsewhere, "engine": {**elsewhere["engine"], "wait": 0.5}}, "second")
    _, said = second.communicate(timeout=240)
    assert second.returncode == 1
    line = said.splitlines()[-1]
    assert line.startswith("error: engine.workers: no room for 1 workers within 0.5 s (engine.wait)")
    assert "they take 1 CPU, free 0;" in line
    third = start({**elsewhere, "engine": {**elsewhere["engine"], "wait": 240}}, "third")
    log = tmp_path / "third" / "run.log"
    until(lambda: log.is_file() and "waits for room for 1 workers" in log.read_text(), "the third run to wait")
    gates.open(0)
    expected = run(small(tmp_path / "none"))
    same(tmp_path / "first", ended(first), expected)
    same(tmp_path / "third", ended(third), expected)


class Gates:
    """Points at which a run waits for the test: the second local step of a client in a round."""

    def __init__(self, faults: Path, *rounds: int) -> None:
        self.faults = faults
        plan(faults, *[gate(number) for number in rounds])

    def reached(self, number: int) -> None:
        until((self.faults / f"at-{number}").exists, "the run at its gate")

    def open(self, number: int) -> None:
        (self.faults / f"open-{number}").touch()


def gate(number: int) -> dict:
    client, before = visitor(number)
    return rule(client, "gate", before + 1, 1)


def test_a_worker_that_dies_on_another_node_costs_its_task_a_retry(start, tmp_path):
    (first, before), (second, before_second) = visitor(2), visitor(4, apart=2)
    plan(tmp_path / "faults", rule(first, "kill", before + 1, 1), rule(second, "kill", before_second + 1, 1))
    result = ended(start(setting(tmp_path / "faults", **ON_TWO)))
    log = (tmp_path / "out" / "run.log").read_text()
    assert log.count("the worker died") >= 2
    assert "is lost" not in log
    same(tmp_path / "out", result, run(small(tmp_path / "none")))


@pytest.mark.slow
def test_a_worker_that_hangs_on_another_node_is_shot(start, tmp_path):
    client, before = visitor(3)
    plan(tmp_path / "faults", rule(client, "sleep", before + 1, 1))
    result = ended(start(setting(tmp_path / "faults", **ON_TWO, patience=3.0)))
    log = (tmp_path / "out" / "run.log").read_text()
    assert "no step for 3 s" in log
    assert "asleep_in_the_client" in log
    same(tmp_path / "out", result, run(small(tmp_path / "none")))


def kill_node(cluster: Any, node: Any) -> None:
    """Kill all processes of a node at once. Workers would outlive Ray's own processes for a while, and they answer
    calls from other nodes meanwhile."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    processes = [raylet, *raylet.children(recursive=True)]
    kill(processes)
    cluster.remove_node(node, allow_graceful=False)


LOSSES = {
    "checkpointed": ({"every": 1, "keep": 2}, 4, [], ["resumes", "begins again"]),
    "rewound": ({"every": 3, "keep": 2}, 3, ["resumes after round 3"], ["begins again"]),
    "from the beginning": (None, 0, ["begins again"], ["resumes"]),
}
"""name -> (the section checkpoint, the round of the last checkpoint before the node is lost, texts that the log must
have, texts that it must not have)."""


@pytest.mark.parametrize("case", [c if c == "rewound" else pytest.param(c, marks=pytest.mark.slow) for c in LOSSES])
def test_a_lost_node(case, cluster, start, tmp_path):
    """All processes of a node are killed in the middle of round 5."""
    checkpoint, last, says, says_not = LOSSES[case]
    gates = Gates(tmp_path / "faults", 5)
    process = start(setting(tmp_path / "faults", checkpoint=checkpoint, **ON_TWO))
    gates.reached(0)
    if last:
        until((tmp_path / "out" / "checkpoints" / f"round-{last:06d}.json").exists, "the checkpoint")
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    kill_node(cluster, second)
    gates.open(0)
    result = ended(process)
    log = (tmp_path / "out" / "run.log").read_text()
    assert "is lost" in log or (case == "checkpointed" and "the worker died" in log)  # whichever Ray notices first
    assert all(text in log for text in says), log
    assert not any(text in log for text in says_not), log
    same(tmp_path / "out", result, run(small(tmp_path / "none")))


@pytest.mark.long
def test_a_node_lost_in_an_asynchronous_run(cluster, start, tmp_path):
    """All processes of a node are killed while a client trains for the second time. States and results that waited on
    the node for later updates are lost with it."""
    faults = tmp_path / "faults"
    plan(faults, *(rule(client, "gate", STEPS + 1, 1) for client in range(CLIENTS)))
    process = start(asynchronous(faults, 12, checkpoint={"every": 2, "keep": 2}, **ON_TWO))
    until(lambda: any(faults.glob("at-*")), "a client in its second visit")
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    kill_node(cluster, second)
    for number in range(CLIENTS):
        (faults / f"open-{number}").touch()
    result = ended(process)
    told = (tmp_path / "out" / "run.log").read_text()
    assert "is lost" in told or "the worker died" in told  # Ray may notice the death of the worker before the node's
    same(tmp_path / "out", result, run(experiment(asynchronous(tmp_path / "none", 12))))


@pytest.mark.long
def test_a_node_that_joins_is_used(cluster, start, tmp_path):
    gates = Gates(tmp_path / "faults", 2, 4)
    process = start(setting(tmp_path / "faults", backend="ray", workers="auto", cpus=1))
    gates.reached(0)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    gates.open(0)
    log = tmp_path / "out" / "run.log"
    gates.reached(1)
    until(lambda: len(workers_of(cluster)) == 3, "the third worker")
    gates.open(1)
    result = ended(process)
    assert "workers start on node" in log.read_text()
    same(tmp_path / "out", result, run(small(tmp_path / "none")))


GONE = """
from fedfleet.workloads.data.table import Table


class Gone(Table):
    def load(self):
        found = super().load()
        for file in self.files:
            file.unlink(missing_ok=True)
        return found


WORKLOADS = {"gone": Gone}
"""


@pytest.mark.long
def test_workers_whose_machines_have_no_file_learn_what_it_says_of_the_model(start, tmp_path, monkeypatch):
    """The driver reads the table, which is then gone. Its path is relative to where the run began."""
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    file, rows = tmp_path / "rows.csv", np.random.default_rng(0).normal(size=(200, 3))
    text = "\n".join(["a,b,label", *(",".join(map(str, row)) for row in rows)])
    file.write_text(text)
    (tmp_path / "gone.py").write_text(GONE)
    data = {
        "plugins": [str(tmp_path / "gone.py")],
        "workload": {"name": "gone", "path": "rows.csv", "task": "regression", "test_fraction": 0.2},
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 8, "cohort": 4, "rounds": 2},
        "engine": {**ON_TWO, "block": 2},
        "tracking": {"uri": "none"},
    }
    _ = Table(path=str(file), task="regression", test_fraction=0.2).facts  # the launcher has them in the cache
    result = ended(start(data))
    assert "2 workers on 2 nodes" in (tmp_path / "out" / "run.log").read_text()
    assert not file.exists()
    file.write_text(text)
    data["workload"]["path"] = str(file)
    same(tmp_path / "out", result, run(experiment({**data, "engine": {"backend": "local", "block": 2}})))


def workers_of(cluster: Any) -> list[psutil.Process]:
    """The worker processes that have started: Ray gives a process a title that says what it does."""
    return [process for node in cluster.list_all_nodes() for process in processes("WorkerProcess", raylet(node))]


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


@pytest.mark.long
def test_a_fork_on_two_nodes_of_a_run_in_one_process(cluster, tmp_path):
    """The clients of the fork begin with the states that the parent left on one machine."""
    parent = tmp_path / "parent"
    run(small(tmp_path / "none", checkpoint={"every": 1, "keep": 9}, keep_state=True), parent)
    change = "method.rule.lr=0.05"
    expected = fork(parent, 3, change, out=tmp_path / "here")
    on_two = [f"engine.{key}={value}" for key, value in ON_TWO.items()]
    arguments = ["fork", str(parent), "--round", "3", change, *on_two, "--address", cluster.address, "--json"]
    command = [*COMMAND, *arguments, "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=tmp_path) as process:
        result = ended(process)
    assert "2 workers on 2 nodes" in (tmp_path / "out" / "run.log").read_text()
    same(tmp_path / "out", result, expected)


def test_a_complete_run_on_two_nodes_is_made_longer(cluster, start, tmp_path):
    """At its end the states of clients lie on two machines."""
    expected = run(small(tmp_path / "none"), tmp_path / "here")
    ended(start(setting(tmp_path / "none", "scaffold", 3, **ON_TWO)))
    out = tmp_path / "out"
    command = [*COMMAND, "resume", str(out), f"federation.rounds={len(expected.rows)}", "--json"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=tmp_path) as process:
        result = ended(process)
    log = (out / "run.log").read_text()
    assert log.count("2 workers on 2 nodes") == 2
    assert "the run was complete, and is made longer: federation.rounds=6" in log
    same(out, result, expected)
