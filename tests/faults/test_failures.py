"""Clients, workers and evaluations that fail: the message names the cause, failed tasks are run again, and the records
stay."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils import _pytree as pytree

from fedfleet.algorithms.contract import Round
from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast, TrainingTask, plan_tasks
from fedfleet.engine.config.schema import Evaluate, experiment
from fedfleet.engine.errors import ClientFailed, Diverged, EvaluationFailed, WorkersLost
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.runs.prepare import new_run_id, prepare
from fedfleet.engine.runs.result import model_digest
from fedfleet.engine.state.checkpoint import checkpoints_in
from fedfleet.engine.state.row_table import RowTable
from fedfleet.tune.executor.requested_run import RequestedRun
from fedfleet.tune.executor.source import RunReport, RunRequest

from ..tune.commands import error_in, invoke, shell
from .faulty import ANYONE
from .runs import CLIENTS, STEPS, Watch, cohort_of, plan, rule, same, setting, small, visitor

EVERY = {"every": 1, "keep": 20}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Block size -> the result of the undisturbed run."""
    folder = tmp_path_factory.mktemp("none")
    return {block: run(small(folder, block=block)) for block in (1, 4)}


def of_round(number: int, apart: int = 0) -> tuple[int, int]:
    """(a client of this round, the number of calls of its loss before its second one in this round)."""
    client, before = visitor(number, apart)
    return client, before + 1


@pytest.mark.long
def test_what_ray_says_of_a_dead_worker_does_not_mix_with_the_result(tmp_path):
    client, skip = of_round(2)
    plan(tmp_path / "faults", rule(client, "kill", skip, 1))
    done = shell(tmp_path, *command(tmp_path, backend="ray", workers=2), "--json")
    assert (done.returncode, json.loads(done.stdout)["rounds"]) == (0, 6), done.stderr
    assert "another one starts" in (tmp_path / "out" / "run.log").read_text()


# --- on_failure: fail -------------------------------------------------------------------------------------------------
def command(folder: Path, **engine: Any) -> list[str]:
    (folder / "run.yaml").write_text(yaml.safe_dump(setting(folder / "faults", **engine)))
    return ["run", str(folder / "run.yaml"), "--out", str(folder / "out")]


@pytest.mark.parametrize(("block", "clients"), [(4, 1), (1, 1), (4, 2)], ids=["in a block", "alone", "two"])
def test_a_client_that_fails_is_named_and_the_run_can_go_on_once_it_is_repaired(block, clients, tmp_path, expected):
    guilty = [of_round(4)] if clients == 1 else [(client, 1) for client in sorted(newest(4))][:2]
    plan(tmp_path / "faults", *[rule(client, "raise", skip) for client, skip in guilty])
    done = invoke(*command(tmp_path, block=block))
    assert done.exit_code == 1
    line = error_in(done.stderr)
    names = ", ".join(str(client) for client, _ in guilty)
    assert f"client{'s' if clients > 1 else ''} {names} failed on" in line
    assert "is broken (" in line  # the plug-in's line follows
    assert "); see the setting engine.on_failure" in line
    assert "Traceback" not in done.output
    number = int(line.partition("round ")[2].partition(":")[0])
    assert checkpoints_in(tmp_path / "out").read(number - 1).round == number - 1
    plan(tmp_path / "faults")
    same(resume(small(tmp_path / "faults", block=block), tmp_path / "out"), expected[block])


def newest(number: int) -> set[int]:
    """The clients of this round that did not take part in any round before."""
    return set(cohort_of(number).tolist()) - {c for r in range(1, number) for c in cohort_of(r).tolist()}


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.long)])
def test_the_error_is_typed(backend, tmp_path, request):
    if backend == "ray":
        request.getfixturevalue("ray_here")
    chosen = sorted(newest(2))[:2]
    plan(tmp_path, *[rule(client, "raise", 1) for client in chosen])
    with pytest.raises(ClientFailed) as caught:
        run(small(tmp_path, backend=backend, workers=2))
    assert caught.value.clients == tuple(chosen)
    assert caught.value.round == 2
    assert "is broken" in caught.value.cause


# --- on_failure: drop -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_dropped_client_is_left_out_of_the_mean(backend, tmp_path, request):
    """The round is computed again by hand: a worker of the test runs the same tasks without that client."""
    if backend == "ray":
        request.getfixturevalue("ray_here")
    client = int(cohort_of(1)[4])
    plan(tmp_path, rule(client, "raise", 1))
    watch = Watch()
    chosen = small(tmp_path, rounds=1, backend=backend, workers=2, on_failure="drop")
    result = run(chosen, observers=[watch])
    assert result.rows[0]["client/dropped"] == 1
    assert result.rows[0]["client/count"] == len(cohort_of(1)) - 1
    assert any(f"goes on without {client}, which failed alone" in text for text in watch.told)
    plan(tmp_path)
    assert result.model_sha256 == model_digest(by_hand(chosen, client))


class Told(RequestedRun):
    """A run of a study that tells this test how it has ended."""

    def send(self, report: RunReport) -> None:
        self.ended = report.status


@pytest.mark.parametrize("on_failure", ["drop", "fail"])
def test_errors_of_clients_do_not_keep_the_data_of_a_run(on_failure, tmp_path):
    """An exception has the variables of the functions that it came through, and the garbage collector may find them
    late. A run that drops clients has many of them, and a study many runs that fail."""
    plan(tmp_path, rule(int(cohort_of(1)[4]), "raise", 1))
    chosen = small(tmp_path, rounds=1, on_failure=on_failure)
    told = Told(RunRequest("run", chosen.plain(), str(tmp_path / "run")))
    gc.collect()
    earlier = workers()  # of fixtures of other tests
    gc.disable()
    try:
        told.execute()
        assert told.ended == ("finished" if on_failure == "drop" else "failed")
        assert workers() == earlier
    finally:
        gc.enable()


def workers() -> set[int]:
    """The ids of the workers in this process."""
    return {id(found) for found in gc.get_objects() if type(found) is Worker}


def by_hand(chosen: Any, without: int) -> dict[str, Any]:
    run_spec = prepare(chosen, new_run_id())
    split, method, x = run_spec.split(), run_spec.method(), run_spec.initial_model()
    state_spec, server, sampled = StateSpec(method, x), method.server_init(x), cohort_of(1)
    table = RowTable(state_spec.client, CLIENTS, CLIENTS)
    try:
        worker = Worker(run_spec, Data.of(split.train, split.test, split.client_index), table.layout, lambda: None)
        sizes = np.diff(split.client_index.offsets)[sampled]
        tasks = plan_tasks(sampled, sizes, chosen.federation.local, 4)
        _, fresh = table.reserve(sampled)
        leaves, weight = [], 0.0
        for task in tasks:
            count = len(task.clients)
            none, rows = np.zeros(count, dtype=np.int64), fresh[np.searchsorted(sampled, task.clients)]
            work = TrainingTask(task, 1, False, none, np.ones(count), none - 1, rows, none)
            rest = np.flatnonzero(task.clients != without)
            shared = Broadcast(1, [leaf.numpy() for leaf in pytree.tree_leaves(server.public)])
            sums = worker.train(work.subset(rest) if len(rest) < count else work, shared)
            leaves = [a + b for a, b in zip(leaves, sums.leaves, strict=True)] if leaves else sums.leaves
            weight += sums.facts["weight"]
        with torch.no_grad():
            mean = state_spec.mean([torch.as_tensor(leaf) for leaf in leaves], len(sampled) - 1, weight)
            server = method.server_update(server, mean, Round(1, 1, len(sampled) - 1, CLIENTS))
        return dict(method.model(server).items())
    finally:
        table.remove()


def test_a_dropped_client_keeps_its_state_and_its_place_in_its_stream(tmp_path):
    client, number = next(
        (c, r) for r in range(3, 7) for c in cohort_of(r).tolist() if any(c in cohort_of(b) for b in range(1, r))
    )
    before = sum(client in cohort_of(r) for r in range(1, number))
    plan(tmp_path / "faults", rule(client, "raise", before * STEPS))
    chosen = small(tmp_path / "faults", checkpoint=EVERY, on_failure="drop", keep_state=True, rounds=number + 1)
    result = run(chosen, tmp_path / "out")
    assert [row["client/dropped"] for row in result.rows[:number]] == [0] * (number - 1) + [1]
    log = (tmp_path / "out" / "run.log").read_text()
    assert f"round {number}: goes on without {client}, which failed alone: RuntimeError: client {client} is" in log
    old, new = map(checkpoints_in(tmp_path / "out").read, (number - 1, number))
    assert old.visits[client] == new.visits[client] == before
    assert (old.digest[client] == new.digest[client]).all()
    assert old.row[client] == new.row[client] >= 0
    others = np.setdiff1d(cohort_of(number), [client])
    assert (new.visits[others] == old.visits[others] + 1).all()


def test_a_client_with_two_jobs_in_one_task_is_dropped_from_both(tmp_path):
    """`once: false` gives clients several visits from one version of the model."""
    data = setting(tmp_path, rounds=4, block=1, on_failure="drop")
    data["method"] = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    pace = {"name": "buffered", "buffer": 12, "once": False}
    data["federation"] |= {"clients": 6, "cohort": 4, "pace": pace}
    data["systems"] = {"devices": {"name": "lognormal", "sigma": 1.0}}
    plan(tmp_path, rule(0, "raise"))
    found = run(experiment(data))
    assert max(row["client/dropped"] for row in found.rows) > 1
    plan(tmp_path)
    data["federation"]["without"] = [0]
    wanted = run(experiment(data))
    assert found.model_sha256 == wanted.model_sha256
    for name in ("client/count", "client/dropped"):
        assert [row[name] for row in found.rows] == [row[name] for row in wanted.rows]


def test_a_cohort_of_which_nobody_is_left_ends_the_run(tmp_path):
    plan(tmp_path, *[rule(client, "raise") for client in cohort_of(1)])
    with pytest.raises(ClientFailed, match=r"round 1: clients .* no client of the cohort is left"):
        run(small(tmp_path, on_failure="drop"))


# --- bad luck ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("block", [1, 4])
def test_a_client_that_fails_at_first_costs_retries_and_nothing_else(block, times, tmp_path, expected):
    client, skip = of_round(3)
    plan(tmp_path, rule(client, "raise", skip, times))
    watch = Watch()
    same(run(small(tmp_path, block=block), observers=[watch]), expected[block])
    assert len([text for text in watch.told if f"client {client} is broken" in text]) == times


@pytest.mark.long
def test_the_same_on_ray(tmp_path, expected, ray_here):
    client, skip = of_round(3)
    plan(tmp_path, rule(client, "raise", skip, 1))
    same(run(small(tmp_path, backend="ray", workers=2)), expected[4])


@pytest.mark.long
def test_blocks_that_are_too_large_are_run_in_halves_on_either_backend(tmp_path, ray_here):
    plan(tmp_path, rule(2, "crowd"))
    first, second = (run(small(tmp_path, rounds=3, **engine)) for engine in ({}, {"backend": "ray", "workers": 2}))
    same(second, first)
    assert [row["client/count"] for row in first.rows] == [9, 9, 9]


# --- workers
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("exit", marks=pytest.mark.slow), "kill"])
def test_a_client_that_ends_its_worker_every_time_is_found(kind, tmp_path, ray_here):
    client, skip = of_round(2)
    plan(tmp_path, rule(client, kind, skip))
    with pytest.raises(ClientFailed) as caught:
        run(small(tmp_path, backend="ray", workers=2))
    assert caught.value.clients == (client,)
    assert "the worker died" in caught.value.cause
    assert "where memory runs out: then, a block has 4 clients, and the model of workload faulty" in caught.value.cause


@pytest.mark.parametrize(
    ("kind", "where"),
    [("sleep", "asleep_in_the_client"), pytest.param("loop", "going_round_in_circles", marks=pytest.mark.slow)],
)
def test_a_worker_that_is_stuck_is_replaced_and_its_stack_shown(kind, where, tmp_path, expected, ray_here):
    client, skip = of_round(3)
    plan(tmp_path / "faults", rule(client, kind, skip, 1))
    same(run(small(tmp_path / "faults", backend="ray", workers=2, patience=6), tmp_path / "out"), expected[4])
    log = (tmp_path / "out" / "run.log").read_text()
    assert "has taken no step for 6 s; its stack:" in log
    assert f"in {where}" in log
    assert log.count("another one starts") == 1


@pytest.mark.long
def test_workers_that_cannot_start_end_the_run(tmp_path, ray_here):
    plan(tmp_path, rule(0, "start"))
    with pytest.raises(WorkersLost, match=r"no worker is left that can run clients, the last: .*no worker can start"):
        run(small(tmp_path, backend="ray", workers=2))


# --- evaluation, divergence -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.long)])
def test_an_evaluation_that_fails(backend, tmp_path, expected, request):
    if backend == "ray":
        request.getfixturevalue("ray_here")
    faults, out = tmp_path / "faults", tmp_path / "out"
    with pytest.raises(EvaluationFailed, match=r"evaluation of test rows \d+ to \d+ failed on .*the report is broken"):
        run(
            small(faults, backend=backend, workers=2),
            out,
            [Watch(r3=lambda: plan(faults, rule(0, "evaluate")))],
        )
    plan(faults)
    same(resume(small(faults), out), expected[4])


def test_one_of_more_slices_than_the_board_has_slots_fails_once(tmp_path, ray_here):
    """There are 178 slices and 128 slots: a slice that is tried again must not get the slot of one that is being
    evaluated."""
    slices = {"evaluate": Evaluate(every=2, batch=2)}
    expected = run(small(tmp_path, rounds=2).model_copy(update=slices))
    plan(tmp_path, rule(ANYONE, "raise", 2 * 3 * STEPS + 5, 1))
    watch = Watch()
    chosen = small(tmp_path, rounds=2, backend="ray", workers=1).model_copy(update=slices)
    same(run(chosen, observers=[watch]), expected)
    assert len([text for text in watch.told if text.startswith("evaluation of test rows")]) == 1


def test_a_loss_that_is_not_a_number(tmp_path):
    client, skip = of_round(4)
    plan(tmp_path / "faults", rule(client, "nan", skip))
    chosen = small(tmp_path / "faults", checkpoint=EVERY)
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    chosen = chosen.model_copy(update={"tracking": chosen.tracking.model_copy(update={"uri": uri})})
    with pytest.raises(Diverged) as caught:
        run(chosen, tmp_path / "out")
    assert caught.value.round == 4
    assert f"client {client} moved inf" in str(caught.value)
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("round-*"))
    assert kept == ["round-000001.json", "round-000002.json", "round-000003.json"]
    from mlflow import MlflowClient

    client_of = MlflowClient(uri)
    (tracked,) = client_of.search_runs([e.experiment_id for e in client_of.search_experiments()])
    assert tracked.info.status == "FAILED"
    assert tracked.data.tags["status"] == "diverged"
