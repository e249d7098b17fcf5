"""Forks: without a change they have the parent's bits, with one they are the run that would have changed then."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

import fedfleet
from fedfleet.engine.config.differences import fork_changes
from fedfleet.engine.config.schedules import SCHEDULES
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.records.lineage import lineage_of
from fedfleet.engine.state.checkpoint import checkpointed_rounds
from fedfleet.tune.forking import client_numbers, prepared
from fedfleet.tune.run_report import write_run_report
from fedfleet.tune.tracking.run_header import fork_tags
from tests.faults.runs import Watch, checkpoint_file, interrupt, plan, rule, same, setting, small, untimed
from tests.tune.commands import invoke, shell

ALL = {"every": 1, "keep": 9}
ROUND, ROUNDS = 3, 6
ASYNCHRONOUS = {"pace": {"name": "buffered", "buffer": 3}}
NOISY = {"clip": 0.5, "noise": 1.0, "delta": 1e-2}
SCAFFOLD = {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}}


def data(**more: Any) -> dict[str, Any]:
    """The configuration of a run with 12 clients, 4 of them in each round, whose rounds can all be forked."""
    made = {
        "workload": {"name": "digits", "model": {"name": "logistic"}},
        "method": SCAFFOLD,
        "federation": {"clients": 12, "cohort": 4, "rounds": ROUNDS, "local": {"steps": 2, "batch": 8}},
        "engine": {"backend": "local", "block": 2, "kernels": "torch", "keep_state": True},
        "evaluate": {"every": 2, "batch": 500},
        "checkpoint": ALL,
        "tracking": {"uri": "none"},
    }
    return {**made, **more, "federation": {**made["federation"], **more.get("federation", {})}}


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> fedfleet.Result:
    return fedfleet.run(experiment(data()), tmp_path_factory.mktemp("parent") / "out")


def alone(made: dict[str, Any]) -> fedfleet.Result:
    """The result of a run without a folder."""
    return fedfleet.run(experiment({**made, "checkpoint": {}, "tracking": {"uri": "none"}}))


def rows_of(result: fedfleet.Result) -> list[dict[str, float]]:
    return untimed(list(result.rows))


# --- no change --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [0, ROUND, pytest.param(ROUNDS - 1, marks=pytest.mark.long)])
def test_without_a_change_a_fork_has_the_parents_bits(number, parent, tmp_path):
    fork = fedfleet.fork(parent, number, out=tmp_path / "fork")
    same(fork, parent)
    assert fork.run_id != parent.run_id


KINDS: dict[str, dict[str, Any]] = {
    "clients keep momenta": {"method": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "keep"}},
    "no client states": {"method": {"name": "fedadam", "rule": {"name": "sgd", "lr": 0.1}}},
    "attack": {"aggregate": {"name": "centred_clipping"}, "attack": {"name": "ipm", "share": 0.25}},
    "fleet": {"systems": {}, "federation": {"sampler": {"name": "power_of_choice", "d": 6, "loss": "last"}}},
    "asynchronous": {"systems": {"devices": {"name": "lognormal", "sigma": 1.0}}, "federation": ASYNCHRONOUS},
    "narrow states": {"engine": {**data()["engine"], "state_dtype": "bfloat16"}},
}


RARE = ("no client states", "narrow states", "attack")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.long] if k in RARE else []) for k in KINDS])
def test_every_kind_of_run_with_a_change_that_has_no_effect(kind, tmp_path):
    whole = fedfleet.run(experiment(data(**KINDS[kind])), tmp_path / "parent")
    lr = KINDS[kind].get("method", SCAFFOLD)["rule"]["lr"]
    same(fedfleet.fork(whole, ROUND, f"method.rule.lr={{schedule: constant, start: {lr}}}", tmp_path / "fork"), whole)
    assert "is that before round 1" not in (tmp_path / "fork" / "run.log").read_text()


def test_a_fork_of_a_fork(parent, tmp_path):
    fedfleet.fork(parent, 2, out=tmp_path / "one")
    second = fedfleet.fork(tmp_path / "one", 4, out=tmp_path / "two")
    same(second, parent)
    lineage = lineage_of(tmp_path / "two")
    assert lineage is not None
    assert [lineage.round, lineage.before and lineage.before.round] == [4, 2]
    assert len(list((tmp_path / "two" / "state").glob("shared-*"))) == 2
    shutil.rmtree(tmp_path / "one")
    same(fedfleet.fork(tmp_path / "two", 5, out=tmp_path / "three"), parent)


# --- changes ----------------------------------------------------------------------------------------------------------
def test_another_number_from_a_round_on_is_a_schedule_that_changes_then(parent, tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "two_values", lambda now, first, then: first if now.t <= ROUND else then)
    lr = {"schedule": "two_values", "first": 0.1, "then": 0.02}
    whole = alone(data(method={"name": "scaffold", "rule": {"name": "sgd", "lr": lr}}))
    fork = fedfleet.fork(parent, ROUND, "method.rule.lr=0.02", tmp_path / "fork")
    same(fork, whole)
    assert rows_of(fork)[:ROUND] == rows_of(parent)[:ROUND]
    assert fork.model_sha256 != parent.model_sha256


def test_an_attack_from_a_round_on(parent, tmp_path):
    attack = {"name": "drop", "share": 0.25}
    whole = alone(data(attack={**attack, "rounds": f"{ROUND + 1}-{ROUNDS}"}))
    fork = fedfleet.fork(parent, ROUND, f"attack={json.dumps(attack)}", tmp_path / "fork")
    assert fork.model_sha256 == whole.model_sha256 != parent.model_sha256


def test_another_rule_of_the_server_begins_with_a_fresh_private_state(tmp_path):
    plain = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    whole = fedfleet.run(experiment(data(method=plain)), tmp_path / "parent")
    adam = "method={name: fedadam, rule: {name: sgd, lr: 0.1}}"
    fork = fedfleet.fork(whole, ROUND, adam, tmp_path / "fork")
    assert "the state of the server's rule is that before round 1" in (tmp_path / "fork" / "run.log").read_text()
    assert rows_of(fork)[:ROUND] == rows_of(whole)[:ROUND]
    assert fork.model_sha256 != whole.model_sha256
    back = fedfleet.fork(fork, ROUND + 1, f"method={json.dumps(plain)}", tmp_path / "back")
    assert len(back.rows) == ROUNDS


@pytest.mark.parametrize(
    ("before", "after"), [("fedadagrad", "fedadam"), ("feddu_adagrad", "fedadagrad"), ("fedadam", "fedavgm")]
)
def test_another_rule_under_the_mean_of_two_iterates_begins_anew_too(before, after, tmp_path):
    made = data(method={"name": before, "evaluate": "last_two"})
    parent = fedfleet.run(experiment(made), tmp_path / "parent")
    fedfleet.fork(parent, ROUND, f"method={{name: {after}, evaluate: last_two}}", tmp_path / "fork")
    assert "the state of the server's rule is that before round 1" in (tmp_path / "fork" / "run.log").read_text()


NETWORK = {"name": "digits", "model": {"name": "mlp", "hidden": [32, 32]}}


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ({"name": "fedmud_f"}, "method.a=2.0"),
        ({"name": "fedmud_f", "reset": 2}, "method.reset=1"),
        ({"name": "fedmud_bkd_aad", "reset": 0}, "method.a=2.0"),
    ],
)
def test_drawn_factors_that_would_stand_for_others_are_multiplied_out(method, change, tmp_path):
    """The fork begins with the parent's model, and stays there with steps of no length."""
    made = data(workload=NETWORK, method={**method, "ratio": 0.8})
    parent = fedfleet.run(experiment(made), tmp_path / "parent")
    fork = fedfleet.fork(parent, ROUND, [change, "method.rule={name: sgd, lr: 1e-30}"], tmp_path / "fork")
    wanted = alone({**made, "federation": {**made["federation"], "rounds": ROUND}})
    for name, tensor in wanted.model.items():
        torch.testing.assert_close(fork.model[name], tensor, rtol=0, atol=1e-20)
    assert "the state of the method is that before round 1" in (tmp_path / "fork" / "run.log").read_text()


def test_a_method_that_cannot_begin_from_a_model_is_refused(tmp_path):
    """Factors in place of the weights begin at random."""
    parent = fedfleet.run(experiment(data(workload=NETWORK, method="fedavg")), tmp_path / "parent")
    with pytest.raises(ConfigError, match="must begin from the parent's model in a fork, but fedlmt begins"):
        fedfleet.fork(parent, ROUND, "method={name: fedlmt, ratio: 0.8}", tmp_path / "fork")


def test_a_sampler_whose_state_has_grown_goes_on(tmp_path):
    """Oort's history grows from round to round. The change is too small to make other losses matter for the draws."""
    oort = data(federation={"clients": 30, "sampler": "oort"}, tracking={"uri": "none", "clients": True})
    whole = fedfleet.run(experiment(oort), tmp_path / "parent")
    fork = fedfleet.fork(whole, ROUND, "method.rule.lr=0.1000001", tmp_path / "fork")
    assert "is that before round 1" not in (tmp_path / "fork" / "run.log").read_text()
    assert ids(tmp_path / "fork") == ids(tmp_path / "parent")[ROUND:]
    assert fork.model_sha256 != whole.model_sha256


def test_another_sampler_begins_anew(tmp_path):
    oort = data(federation={"sampler": "oort"})
    fedfleet.run(experiment(oort), tmp_path / "parent")
    fedfleet.fork(tmp_path / "parent", ROUND, "federation.sampler={name: cyclic}", tmp_path / "fork")
    assert "the state of federation.sampler is that before round 1" in (tmp_path / "fork" / "run.log").read_text()


def test_more_rounds_and_objects_of_python(tmp_path):
    from fedfleet.algorithms.fedavg import fedavg
    from fedfleet.algorithms.parts.rules import Sgd

    made = experiment(data(method=fedavg(Sgd(0.1))))
    whole = fedfleet.run(made, tmp_path / "parent")
    longer = made.model_copy(update={"federation": made.federation.model_copy(update={"rounds": ROUNDS + 2})})
    fork = fedfleet.fork(whole, ROUND, longer, tmp_path / "fork")
    assert rows_of(fork)[: ROUNDS - 1] == rows_of(whole)[:-1]  # the last round is evaluated in any case
    assert len(fork.rows) == ROUNDS + 2


# --- without a client -------------------------------------------------------------------------------------------------
def failing(folder: Path, **more: Any) -> dict[str, Any]:
    return {**setting(folder, checkpoint=ALL, keep_state=True, on_failure="drop"), **more}


def ids(folder: Path) -> list[list[int]]:
    """The clients of every round of a run with `tracking.clients`."""
    return [pq.read_table(file)["id"].to_pylist() for file in sorted((folder / "clients").glob("*.parquet"))]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_a_client_is_a_run_that_the_client_failed_in(asynchronous, tmp_path):
    more = KINDS["asynchronous"] if asynchronous else {}
    made = failing(tmp_path / "faults")
    made = {**made, **more, "federation": {**made["federation"], **more.get("federation", {})}}
    made["tracking"]["clients"] = True
    whole = fedfleet.run(experiment(made), tmp_path / "parent")
    first, last = (ids(tmp_path / "parent")[number][0] for number in (0, -1))
    plan(tmp_path / "faults", rule(first, "raise"), rule(last, "raise"))
    expected = alone(made)
    plan(tmp_path / "faults")
    fork = fedfleet.fork(whole, 0, out=tmp_path / "fork", without_clients={first, last})
    assert fork.model_sha256 == expected.model_sha256 != whole.model_sha256
    assert rows_of(fork)[0]["client/count"] == rows_of(expected)[0]["client/count"]


def test_a_round_of_nobody_changes_nothing(tmp_path):
    alone = data(method="fedavg", federation={"cohort": 1})
    whole = fedfleet.run(experiment({**alone, "tracking": {"uri": "none", "clients": True}}), tmp_path / "parent")
    drawn = [number for (number,) in ids(tmp_path / "parent")]
    assert len(drawn) == ROUNDS
    others = sorted({*range(12)} - {drawn[0]})
    fork = fedfleet.fork(whole, 1, out=tmp_path / "fork", without_clients=others)
    counts = [row["client/count"] for row in fork.rows]
    assert counts == [1, *[float(client == drawn[0]) for client in drawn[1:]]]


@pytest.mark.parametrize("method", ["fedadam", "feddu_adam"])
def test_the_server_waits_in_a_round_of_nobody(method, tmp_path):
    """Its momentum does not move the model, which is that of the last client that took part."""
    alone = data(method=method, federation={"cohort": 1})
    made = experiment({**alone, "evaluate": {"every": 1}, "tracking": {"uri": "none", "clients": True}})
    whole = fedfleet.run(made, tmp_path / "parent")
    drawn = [number for (number,) in ids(tmp_path / "parent")]
    fork = fedfleet.fork(whole, 1, out=tmp_path / "fork", without_clients=sorted({*range(12)} - {drawn[0]}))
    losses = [row["eval/loss"] for row in fork.rows]
    assert 0 in [row["client/count"] for row in fork.rows]
    for before, now, row in zip(losses, losses[1:], fork.rows[1:], strict=False):
        assert (before == now) == (row["client/count"] == 0)


def test_a_client_stays_away_from_the_round_on(parent, tmp_path):
    done = invoke(
        "fork", str(parent.directory), "--round", "3", "--without-client", "1,2", "--out", str(tmp_path / "f")
    )
    assert done.exit_code == 0, done.output
    config = yaml.safe_load((tmp_path / "f" / "config.yaml").read_text())
    assert config["federation"]["without"] == [1, 2]
    rows = rows_of(fedfleet.Result.load(tmp_path / "f"))
    assert rows[:ROUND] == rows_of(parent)[:ROUND]
    assert sum(row["client/dropped"] for row in rows) > 0


# --- rows -------------------------------------------------------------------------------------------------------------
def blocks(folder: Path) -> int:
    """Bytes on the disk, of files that have no other name."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink < 2)


def test_states_are_shared_and_outlive_the_parent(tmp_path):
    whole = fedfleet.run(experiment(data()), tmp_path / "parent")
    with pytest.raises(Interrupted):
        fedfleet.fork(whole, ROUND, out=tmp_path / "fork", observers=[Watch(r4=interrupt)])
    linked = list((tmp_path / "fork" / "state" / "shared-0").iterdir())
    assert all(path.stat().st_nlink == 2 for path in linked)
    assert len(linked) == 16
    shutil.rmtree(tmp_path / "parent")
    same(fedfleet.resume(tmp_path / "fork"), whole)


def test_a_parent_that_is_resumed_spares_the_rows_of_a_fork(tmp_path):
    made = experiment(
        data(checkpoint={"every": 1, "keep": 1, "last": False}, engine={**data()["engine"], "keep_state": False})
    )
    whole = alone(data())
    with pytest.raises(Interrupted):
        fedfleet.run(made, tmp_path / "parent", [Watch(r2=interrupt)])
    with pytest.raises(Interrupted):
        fedfleet.fork(tmp_path / "parent", 2, out=tmp_path / "fork", observers=[Watch(r3=interrupt)])
    same(fedfleet.resume(tmp_path / "parent"), whole)
    assert not (tmp_path / "parent" / "state").exists()
    same(fedfleet.resume(tmp_path / "fork"), whole)
    assert not (tmp_path / "fork" / "state").exists()


def test_a_parent_that_is_running_spares_them_too(tmp_path):
    made = experiment(data(federation={"rounds": 12}, checkpoint={"every": 1, "keep": 1}))
    parent, fork = tmp_path / "parent", tmp_path / "fork"
    newest = lambda: prepared(parent, checkpointed_rounds(parent)[-1], (), fork)  # noqa: E731
    whole = fedfleet.run(made, parent, [Watch(r4=newest)])
    assert not set(checkpointed_rounds(parent)) & set(checkpointed_rounds(fork))
    same(fedfleet.resume(fork), whole)


def test_files_that_cannot_be_linked_are_copied_and_the_log_says_so(parent, tmp_path, monkeypatch):
    def refuse(*paths: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    fork = fedfleet.fork(parent, ROUND, out=tmp_path / "fork")
    same(fork, parent)
    log = (tmp_path / "fork" / "run.log").read_text()
    assert "are copied from" in log
    assert os.strerror(errno.EXDEV) in log
    monkeypatch.undo()
    same(fedfleet.fork(fork, 4, out=tmp_path / "next"), parent)


def test_a_parent_that_cannot_be_marked_is_copied(parent, tmp_path, monkeypatch):
    def refuse(self: Path, **how: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "touch", refuse)
    prepared(parent.directory, ROUND, (), tmp_path / "fork")
    assert f"are copied from {parent.directory}" in (tmp_path / "fork" / "run.log").read_text()
    assert not list((tmp_path / "fork" / "state").glob("shared-*"))


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("seed=3", "seed must stay as it is in a fork: the clients' data and all draws"),
        ("federation.clients=20", "federation.clients must stay"),
        ("evaluate.held_out=0.2", "evaluate.held_out must stay"),
        ("engine.dtype=float64", "engine.dtype must stay as it is in a fork: the states"),
        ("engine.block=4", "engine.block must stay as it is in a fork: a fork keeps the execution plan"),
        ("systems={}", "systems must stay as it is in a fork: the virtual clock"),
        ("privacy={clip: 1.0, noise: 0}", "privacy.clip must stay as it is in a fork: epsilon"),
        ("method=fedavg", "method: clients must keep states of the same shape"),
        ("workload.model={name: mlp, hidden: [8]}", "workload: the model must keep its tensors"),
        ("workload.partition={name: dirichlet, beta: 0.5}", "workload: the clients must keep their rows"),
        ("federation.rounds=3", "federation.rounds > 3 must hold"),
        (
            "federation.without=[99]",
            "without: clients have the numbers from 0 to clients - 1, got .99. with clients=12",
        ),
        ("method.rule.rate=1", "rate"),
    ],
)
def test_what_a_fork_must_not_change(change, why, parent, tmp_path):
    with pytest.raises(ConfigError, match=r"\b" + why.replace("'", ".")):
        prepared(parent.directory, ROUND, change, tmp_path / "fork")
    assert not list(tmp_path.iterdir())


def test_settings_of_an_asynchronous_run_and_of_a_private_one():
    plain = experiment(data(**KINDS["asynchronous"])).plain()
    for section, key, value in (("systems", "dropout", 0.5), ("federation", "cohort", 5)):
        with pytest.raises(ConfigError, match=f"{section}.{key} must stay .*: the timeline of an asynchronous run"):
            fork_changes(plain, {**plain, section: {**plain[section], key: value}})
    weights = {**plain["federation"], "pace": {**plain["federation"]["pace"], "mix": 0.5}}
    assert fork_changes(plain, {**plain, "federation": weights}) == ["federation.pace.mix was 1.0, is 0.5"]
    private = {**plain, "privacy": {"clip": 0.5}}
    with pytest.raises(ConfigError, match=r"federation\.cohort must stay as it is in a fork: epsilon is accounted"):
        fork_changes(private, {**private, "federation": {**plain["federation"], "cohort": 5}})


def test_rounds_without_a_checkpoint_name_those_that_have_one(parent, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        prepared(parent.directory, ROUND, (), tmp_path / "file" / "fork")
    (tmp_path / "file").unlink()
    done = invoke("fork", str(parent.directory), "--round", "17", "--out", str(tmp_path / "f"))
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert "has no checkpoint of round 17; it has those of 3, 4, 5, 6, and round 0 needs none" in line
    assert "checkpoint.every=N checkpoint.keep=M engine.keep_state=true" in line
    assert not list(tmp_path.iterdir())


def test_folders_that_are_taken_or_damaged(parent, tmp_path):
    for wrong, place in (("already holds a run", parent.directory), ("new or empty", tmp_path)):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=wrong):
            prepared(parent.directory, ROUND, (), place)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    shutil.copytree(parent.directory, tmp_path / "copy")
    checkpoint_file(tmp_path / "copy" / "checkpoints", 3, "server.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"round-000003 is damaged .*it has those of 1, 2, 4, 5"):
        prepared(tmp_path / "copy", ROUND, (), tmp_path / "fork")
    shutil.rmtree(tmp_path / "copy" / "state")
    with pytest.raises(ConfigError, match="does not hold the client states"):
        prepared(tmp_path / "copy", 4, (), tmp_path / "fork")
    assert not (tmp_path / "fork").exists()
    with pytest.raises(ConfigError, match="numbers of clients as in 3,7, got '3;7'"):
        client_numbers(["3;7"])
    with pytest.raises(ConfigError, match="run has no folder"):
        fedfleet.fork(fedfleet.Result("x", parent.experiment, parent.rows, parent.model, 0.0), 1)


# --- what is told of a fork -------------------------------------------------------------------------------------------
def test_lineage_in_files_reports_and_tags(parent, tmp_path):
    fedfleet.fork(parent, ROUND, "method.rule.lr=0.02", tmp_path / "fork")
    told = f"fork of run {parent.run_id} after round 3: method.rule.lr was 0.1, is 0.02"
    assert told in (tmp_path / "fork" / "run.log").read_text()
    shown = invoke("show", str(tmp_path / "fork"))
    assert shown.stdout.splitlines()[0] == f"# {told}", shown.output
    assert told in write_run_report(tmp_path / "fork", tmp_path / "fork" / "report.html").read_text()
    assert fork_tags(tmp_path / "fork") == {
        "fedfleet.fork.run_id": parent.run_id,
        "fedfleet.fork.round": "3",
        "fedfleet.fork.changes": "method.rule.lr was 0.1, is 0.02",
    }
    assert fork_tags(parent.directory) == fork_tags(None) == {}


def test_a_private_fork_says_what_its_epsilon_does_not_cover(tmp_path):
    pytest.importorskip("dp_accounting")
    private = data(privacy=NOISY, federation={"sampler": "binomial", "rounds": 4})
    whole = fedfleet.run(experiment(private), tmp_path / "parent")
    fork = fedfleet.fork(whole, 2, out=tmp_path / "fork")
    same(fork, whole)
    assert fork.rows[-1]["privacy/epsilon"] > fork.rows[1]["privacy/epsilon"]
    with pytest.raises(ConfigError, match=r"federation\.sampler must stay as it is in a fork: epsilon .*, got uniform"):
        prepared(tmp_path / "parent", 2, "federation.sampler=uniform", tmp_path / "other")
    assert "epsilon is that of this run alone" in (tmp_path / "fork" / "run.log").read_text()


@pytest.mark.parametrize("noise", [{"schedule": "cosine", "start": 2.0, "end": 1.0}, "auto"])
def test_noise_that_depends_on_the_number_of_rounds_is_not_forked_with_another_one(noise: Any, tmp_path: Path):
    """Epsilon is computed from the noise of all rounds, also of those before the fork."""
    pytest.importorskip("dp_accounting")
    target = {"epsilon": 8.0} if noise == "auto" else {}
    private = data(privacy={**NOISY, "noise": noise, **target}, federation={"sampler": "binomial", "rounds": 3})
    whole = fedfleet.run(experiment(private), tmp_path / "parent")
    with pytest.raises(ConfigError, match=r"federation\.rounds must stay 3 in a fork, got 6: the noise depends on"):
        prepared(tmp_path / "parent", 2, "federation.rounds=6", tmp_path / "fork")
    same(fedfleet.fork(whole, 2, out=tmp_path / "fork"), whole)


PRIVATE_TURNS = {"clients": 12, "cohort": 4, "sampler": {"name": "turns", "separation": 3}, "rounds": 3}


def private_turns(mechanism: str, **more: Any) -> dict[str, Any]:
    """The configuration of a private run of three rounds whose clients take turns."""
    method = more.pop("method", {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}})
    privacy = {**NOISY, "delta": 1e-3, "mechanism": mechanism}
    return data(method=method, privacy=privacy, federation={**PRIVATE_TURNS, **more})


@pytest.mark.parametrize("rounds", [4, 9])
def test_noise_goes_on_where_a_longer_fork_reaches_another_level_of_the_tree(rounds, tmp_path):
    """The fork adds the noise of a run that was so long from the beginning."""
    pytest.importorskip("dp_accounting")
    whole = alone(private_turns("tree", rounds=rounds))
    fedfleet.run(experiment(private_turns("tree")), tmp_path / "parent")
    fork = fedfleet.fork(tmp_path / "parent", 2, f"federation.rounds={rounds}", tmp_path / "fork")
    assert fork.model_sha256 == whole.model_sha256
    assert "is that before round 1" not in (tmp_path / "fork" / "run.log").read_text()


def test_a_shorter_fork_of_a_private_run_keeps_the_noise_too(tmp_path):
    pytest.importorskip("dp_accounting")
    short = alone(private_turns("tree"))
    fedfleet.run(experiment(private_turns("tree", rounds=4)), tmp_path / "parent")
    fork = fedfleet.fork(tmp_path / "parent", 2, "federation.rounds=3", tmp_path / "fork")
    assert fork.model_sha256 == short.model_sha256


def test_noise_that_goes_on_needs_messages_of_the_same_shape(tmp_path):
    pytest.importorskip("dp_accounting")
    momentum = {"name": "fedavg", "rule": {"name": "momentum", "lr": 0.1}}
    fedfleet.run(experiment(private_turns("tree", method=momentum)), tmp_path / "parent")
    with pytest.raises(ConfigError, match="method: clients must send messages of the same shape in a fork whose noise"):
        prepared(tmp_path / "parent", 2, "method.carry=average", tmp_path / "fork")


# --- Ray, and processes that die --------------------------------------------------------------------------------------
@pytest.mark.long
def test_on_ray_with_other_workers_and_a_kill(tmp_path, ray_here):
    made = small(tmp_path / "faults", checkpoint=ALL, keep_state=True)
    whole = fedfleet.run(made, tmp_path / "parent")
    plan(tmp_path / "faults", rule(-1, "kill", 30, 1))  # a worker dies
    fork = fedfleet.fork(whole, ROUND, ["engine.backend=ray", "engine.workers=2"], tmp_path / "fork")
    same(fork, whole)


@pytest.mark.long
def test_a_fork_that_is_killed_is_resumed(parent, tmp_path):
    (tmp_path / "killing.py").write_text(
        "import os, signal, sys, fedfleet\n"
        "def kill(record):\n"
        "    if record['round'] == 5:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "fedfleet.fork(sys.argv[1], 3, out=sys.argv[2], observers=[kill])\n"
    )
    killed = [sys.executable, str(tmp_path / "killing.py"), str(parent.directory), str(tmp_path / "fork")]
    assert subprocess.run(killed, timeout=500).returncode == -signal.SIGKILL
    done = shell(tmp_path, "resume", "fork", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["model_sha256"] == parent.model_sha256
