"""Runs that are complete and are made longer: they have the bits of a run that was longer from the beginning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedfleet
from fedfleet.engine import Result, resume, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted

from ..tune.commands import error_in, invoke
from .runs import Watch, asynchronous, interrupt, rounds_with_checkpoints, same, setting, untimed

SHORT, LONG = 5, 9
"""Round 5 is evaluated only because the run ends with it."""
LOGS = ("run.log", "environment.json", "plan.json")
"""Files that say who has been there."""
PRIVATE = {"clip": 1.0, "noise": 1.0, "delta": 1e-3}


def data(kind: str, folder: Path, rounds: int = SHORT, **more: Any) -> dict[str, Any]:
    """The plain data of a run of this kind, which keeps its best model."""
    made = asynchronous(folder, rounds) if kind == "asynchronous" else setting(folder, "scaffold", rounds)
    made["checkpoint"] = {"best": "eval/loss"}
    if kind == "stateless":
        made["method"] = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    if kind == "tree":
        made["method"] = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
        made["federation"]["sampler"] = {"name": "turns", "separation": 3}
        made["privacy"] = PRIVATE | {"mechanism": "tree"}
    return made | more


def files(folder: Path) -> dict[str, bytes]:
    """The files in a run's folder, but LOGS."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return {name: content for name, content in found.items() if name not in LOGS}


@pytest.mark.parametrize(
    "kind",
    ["scaffold", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("stateless", "asynchronous", "tree"))],
)
def test_a_longer_run(kind, tmp_path):
    out = tmp_path / "out"
    short = run(experiment(data(kind, tmp_path)), out)
    assert "eval/loss" in short.rows[SHORT - 1]
    whole = run(experiment(data(kind, tmp_path, LONG)), tmp_path / "whole")
    assert "eval/loss" not in whole.rows[SHORT - 1]
    longer = fedfleet.resume(out, rounds=LONG, progress=False)
    same(longer, whole)
    loaded = Result.load(out)
    assert loaded.best is not None
    assert whole.best is not None
    assert loaded.best.facts == whole.best.facts
    assert repr(loaded.best).endswith(f"value={whole.best.value!r}, model=<{len(whole.best.model)} tensors>)")
    assert loaded.summary() == longer.summary()
    assert yaml.safe_load((out / "config.yaml").read_text())["federation"]["rounds"] == LONG
    assert "the run was complete, and is made longer: federation.rounds=9" in (out / "run.log").read_text()
    assert rounds_with_checkpoints(out) == [LONG]


@pytest.mark.long
def test_it_is_an_unfinished_run_until_its_end(tmp_path):
    """A run that is made longer, is interrupted, and goes on; and one that died before it could write its result."""
    out = tmp_path / "out"
    run(experiment(data("scaffold", tmp_path)), out)
    with pytest.raises(Interrupted):
        resume(out, observers=[Watch(r7=interrupt)], rounds=LONG)
    assert not (out / "result.json").exists()
    with pytest.raises(ConfigError, match="the run has not finished"):
        Result.load(out)
    whole = run(experiment(data("scaffold", tmp_path, LONG)), tmp_path / "whole")
    same(resume(out), whole)
    (out / "result.json").unlink()
    shutil.copytree(out, tmp_path / "copy")
    same(resume(out), whole)
    assert untimed(list(Result.load(out).rows)) == untimed(list(whole.rows))
    with pytest.raises(ConfigError, match=r"federation\.rounds >= 9 must hold to go on, got 8"):
        resume(tmp_path / "copy", rounds=8)


@pytest.mark.long
def test_on_ray(tmp_path, ray_here):
    out, engine = tmp_path / "out", {"backend": "ray", "workers": 2, "block": 4, "cpus": 0.5}
    run(experiment(data("scaffold", tmp_path, engine=engine)), out)
    longer = resume(experiment(data("scaffold", tmp_path, LONG, engine=engine)), out)
    same(longer, run(experiment(data("scaffold", tmp_path, LONG))))


@pytest.mark.long
def test_a_run_that_ended_early_goes_on(tmp_path):
    """Without its evaluate.stop, and after its caller ended it; in round 3, which is not evaluated otherwise."""
    whole = run(experiment(data("scaffold", tmp_path, SHORT)), tmp_path / "whole")
    stop = {"metric": "train/loss", "patience": 1, "margin": 100, "after": 3}
    made = data("scaffold", tmp_path, evaluate={"every": 2, "batch": 100, "stop": stop})
    out = tmp_path / "out"
    assert len(run(experiment(made), out).rows) == 3
    with pytest.raises(ConfigError, match=r"^evaluate\.stop: the run would end at once after round 3, because train"):
        resume(out, rounds=LONG)
    with pytest.raises(ConfigError, match=r"^evaluate\.stop: the run would end at once after round 3"):
        fedfleet.fork(out, 3, out=tmp_path / "fork")
    fork = fedfleet.fork(out, 3, "evaluate.stop=null", out=tmp_path / "fork")
    same(fork, whole)
    done = invoke("resume", str(out), "evaluate.stop=null", "--json")
    assert done.exit_code == 0
    same(Result.load(out), whole)

    def enough(record, going):
        if record["round"] == 3:
            going.stop()

    run(experiment(data("scaffold", tmp_path)), tmp_path / "ended", [enough])
    with pytest.raises(ConfigError, match="the run is complete after round 3; to make it longer"):
        resume(tmp_path / "ended")
    same(resume(tmp_path / "ended", rounds=SHORT), whole)


# --- schedules --------------------------------------------------------------------------------------------------------
COSINE = {"schedule": "cosine", "start": 0.1, "end": 0.01}


def with_rate(rate: Any, folder: Path, rounds: int = SHORT, **more: Any) -> dict[str, Any]:
    return data("scaffold", folder, rounds, method={"name": "scaffold", "rule": {"name": "sgd", "lr": rate}}, **more)


def test_a_schedule_over_all_rounds_is_refused_and_one_with_a_length_goes_on(tmp_path):
    out = tmp_path / "out"
    run(experiment(with_rate(COSINE, tmp_path)), out)
    before = files(out)
    done = invoke("resume", str(out), "federation.rounds=9")
    assert done.exit_code == 2
    assert (
        "method.rule.lr goes over all rounds, and would have had other numbers in the 5 rounds that were made if "
        "federation.rounds had been 9 instead of 5 (with method.rule.lr.length=5 they stay"
    ) in error_in(done.stderr)
    assert files(out) == before
    done = invoke("resume", str(out), "federation.rounds=9", "method.rule.lr.length=5")
    assert done.exit_code == 0
    same(Result.load(out), run(experiment(with_rate(COSINE | {"length": SHORT}, tmp_path, LONG)), tmp_path / "whole"))


@pytest.mark.long
@pytest.mark.parametrize(
    "rate",
    [
        {"schedule": "step", "start": 0.1, "milestones": [3, 7]},
        {"schedule": "exponential", "start": 0.1, "decay": 0.9},
        {"schedule": "cosine", "start": 0.1, "over": "visit"},
        {"schedule": "wsd", "start": 0.1, "decay": 2, "length": 7},
    ],
)
def test_a_schedule_whose_numbers_stay_goes_on(rate, tmp_path):
    run(experiment(with_rate(rate, tmp_path)), tmp_path / "out")
    longer = resume(tmp_path / "out", rounds=LONG)
    same(longer, run(experiment(with_rate(rate, tmp_path, LONG)), tmp_path / "whole"))


@pytest.mark.long
def test_the_rest_of_a_schedule_may_be_another_one(tmp_path):
    """After 3 of 5 rounds, with a fall at the end that has not begun; the run is that of its new configuration."""
    wsd = {"schedule": "wsd", "start": 0.1, "decay": 2}
    with pytest.raises(Interrupted):
        run(experiment(with_rate(wsd, tmp_path)), tmp_path / "out", [Watch(r3=interrupt)])
    whole = run(experiment(with_rate(wsd, tmp_path, LONG)), tmp_path / "whole")
    same(resume(experiment(with_rate(wsd, tmp_path, LONG)), tmp_path / "out"), whole)


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"method": {"name": "padamfed"}},
            r"^federation\.rounds must stay 5 to resume, got 9: the method's own settings follow from it",
        ),
        pytest.param(
            {
                "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
                "privacy": PRIVATE | {"noise": "auto", "epsilon": 8.0},
            },
            r"^federation\.rounds must stay 5 to resume, got 9: the noise \(privacy\.noise, privacy\.mechanism\)",
            marks=pytest.mark.long,
        ),
        ({"checkpoint": {"last": False}}, "has not kept the state of its end.*checkpoint.last=true"),
    ],
)
def test_what_is_refused_leaves_the_folder_as_it_was(more, told, tmp_path):
    out = tmp_path / "out"
    run(experiment(data("scaffold", tmp_path, **more)), out)
    before = files(out)
    with pytest.raises(ConfigError, match=told):
        resume(out, rounds=LONG)
    assert files(out) == before


@pytest.mark.long
def test_fewer_rounds_and_a_damaged_state_leave_the_folder_as_it_was(tmp_path):
    out = tmp_path / "out"
    run(experiment(data("scaffold", tmp_path)), out)
    with pytest.raises(ConfigError, match=r"federation\.rounds >= 6 must hold to go on, got 5"):
        resume(out, rounds=SHORT)
    for state in (out / "state").iterdir():
        state.write_bytes(state.read_bytes()[:100])
    before = files(out)
    with pytest.raises(ConfigError, match="has no checkpoint to resume from"):
        resume(out, rounds=LONG)
    assert files(out) == before
    assert len(Result.load(out).rows) == SHORT


def test_what_is_kept_is_small(tmp_path, monkeypatch):
    from fedfleet.engine.state import folders

    monkeypatch.setattr(folders, "LAST_BYTES", 1000)
    run(experiment(data("scaffold", tmp_path)), tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert not (tmp_path / "out" / "state").exists()
