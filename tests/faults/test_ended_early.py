"""Runs that end before their last round, by a metric or by their caller, and the best model that a run keeps."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import fedfleet
from fedfleet.engine import Observer, Result, resume, run
from fedfleet.engine.api import rounds
from fedfleet.engine.config.schema import EarlyStop, Experiment, experiment
from fedfleet.engine.errors import ConfigError, FedFleetError, Interrupted
from fedfleet.engine.records.best_model import Best
from fedfleet.engine.records.metrics import Metric, why_stop
from fedfleet.engine.runs.result import model_digest
from fedfleet.engine.runs.saved_files import load_model

from .runs import Watch, asynchronous, interrupt, rounds_with_checkpoints, same, setting, small, untimed

ACCURACY = Metric("eval/accuracy", "max")
NAN = math.nan


def stops_after(stop: EarlyStop, values: list[float], metric: Metric = ACCURACY) -> int:
    """The number of evaluations after which a run with these values ends, 0 if it does not; one in every second
    round."""
    measured = [(2 * place, value) for place, value in enumerate(values, 1)]
    ends = (place for place in range(1, len(values) + 1) if why_stop(stop, metric, measured[:place], 2 * place))
    return next(ends, 0)


@pytest.mark.parametrize(
    ("stop", "values", "after"),
    [
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.3, 0.4], 4),  # an equal value is not better
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.31, 0.2, 0.2], 6),
        ({"patience": 2, "margin": 0.1}, [0.1, 0.15, 0.25, 0.3, 0.3], 5),  # 0.25 is better than 0.1 by more than 0.1
        ({"patience": 2, "after": 9}, [0.3, 0.2, 0.2, 0.2, 0.2], 5),
        ({"patience": 2}, [NAN, 0.1, NAN, NAN], 4),
        ({"patience": 2}, [NAN, NAN], 2),
        ({"target": 0.3}, [0.1, 0.3], 2),
        ({"target": 0.3}, [NAN, 0.29], 0),
        ({"target": 0.3, "patience": 1}, [0.1, 0.1, 0.4], 2),
    ],
)
def test_when_a_run_ends(stop: dict[str, Any], values: list[float], after: int):
    assert stops_after(EarlyStop(**stop), values) == after
    least = {**stop, "target": -stop["target"]} if "target" in stop else stop
    assert stops_after(EarlyStop(**least), [-value for value in values], Metric("eval/loss", "min")) == after


def watched(folder: Path, stop: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """The plain data of the small run with an evaluation in every round, a best model, and an early end."""
    data = {**setting(folder, rounds=12, checkpoint={"every": 2, "keep": 1, "best": "eval/loss"}), **more}
    return data | {"evaluate": {"every": 1, "batch": 100, **({"stop": stop} if stop else {})}}


LOSS: dict[str, Any] = {"metric": "eval/loss", "target": 2.2}


def check_best(result: Result) -> Best:
    """The best model, after a check that it is that of the first round with the least loss, and that the file has
    it."""
    best, losses = result.best, [row["eval/loss"] for row in result.rows]
    assert best is not None
    assert (best.metric, best.mode, best.round, best.value) == (
        "eval/loss",
        "min",
        losses.index(min(losses)) + 1,
        min(losses),
    )
    assert result.directory is not None
    assert model_digest(load_model(result.directory / "best.safetensors")) == model_digest(dict(best.model))
    assert result.evaluate(model=best.model)["eval/loss"] == pytest.approx(best.value, rel=1e-5)
    return best


def test_a_run_ends_by_its_metric_and_keeps_its_best_model(tmp_path):
    data = watched(tmp_path, None)
    whole = run(experiment(data), tmp_path / "whole")
    losses = [row["eval/loss"] for row in whole.rows]
    target = sorted(losses)[len(losses) // 2]
    reached = next(place for place, loss in enumerate(losses, 1) if loss <= target)
    assert reached < 12
    made = experiment(watched(tmp_path, {"metric": "eval/loss", "target": target}))
    result = run(made, tmp_path / "out")
    assert untimed(list(result.rows)) == untimed(whole.rows[:reached])
    assert result.stopped == f"eval/loss has reached {target:g} with {losses[reached - 1]:.6g}"
    for each in (whole, result, loaded := Result.load(tmp_path / "out")):
        check_best(each)
    assert (loaded.stopped, loaded.summary()) == (result.stopped, result.summary())
    best = check_best(result)
    assert model_digest(dict(best.model)) == run(shorter(made, best.round), tmp_path / "short").model_sha256
    assert f"stopped after round {reached} of 12: {result.stopped}" in (tmp_path / "out" / "run.log").read_text()
    assert rounds_with_checkpoints(tmp_path / "out") == [reached]
    with pytest.raises(ConfigError, match=f"the run is complete after round {reached}; to make it longer: fedfleet"):
        resume(made, tmp_path / "out")


def shorter(made: Experiment, count: int) -> Experiment:
    federation = made.federation.model_copy(update={"rounds": count})
    return made.model_copy(update={"federation": federation})


@pytest.mark.long
def test_an_interrupted_run_ends_after_the_same_round_with_the_same_best_model(tmp_path):
    stop = {"metric": "eval/accuracy", "patience": 2, "margin": 0.2}
    data = watched(tmp_path, stop)
    whole = run(experiment(data), tmp_path / "whole")
    assert len(whole.rows) < 12
    for end in range(1, len(whole.rows)):
        with pytest.raises(Interrupted):
            (run if end == 1 else resume)(experiment(data), tmp_path / "out", [Watch(**{f"r{end}": interrupt})])
    result = resume(experiment(data), tmp_path / "out")
    same(result, whole)
    assert result.stopped == whole.stopped
    assert check_best(result).facts == check_best(whole).facts


def killed_after(data: dict[str, Any], out: str, number: int) -> None:
    run(experiment(data), out, [Watch(**{f"r{number}": lambda: os.kill(os.getpid(), signal.SIGKILL)})])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rounds", "asynchronous"])
def test_a_killed_run_ends_after_the_same_round_with_the_same_best_model(kind, tmp_path):
    """It is killed after the last round of whose model the file has the best, which is later than the checkpoint."""
    more = asynchronous(tmp_path, 12) if kind == "asynchronous" else {}
    more = {key: value for key, value in more.items() if key in ("federation", "systems")}
    data = watched(tmp_path, {"metric": "eval/accuracy", "patience": 3}, **more)
    whole = run(experiment(data), tmp_path / "whole")
    ended = len(whole.rows)
    at = next(number for number in range(ended - 1, 1, -1) if number % 2)
    process = multiprocessing.get_context("spawn").Process(target=killed_after, args=(data, str(tmp_path / "out"), at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    result = resume(experiment(data), tmp_path / "out")
    same(result, whole)
    assert result.stopped == whole.stopped
    assert check_best(result).facts == check_best(whole).facts


# --- by the caller ----------------------------------------------------------------------------------------------------
class Steering(Observer):
    steers = True

    def record(self, record: dict[str, float]) -> None:
        if record["round"] == 3 and "eval/loss" not in record:
            self.model = self.under_way.model
            self.under_way.stop("three are enough")


BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.long)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_observer_may_ask_for_the_model_and_end_the_run(backend, tmp_path, request):
    """After a round that would not be evaluated; what is left is the run of three rounds."""
    if backend == "ray":
        request.getfixturevalue("ray_here")
    expected = run(small(tmp_path, rounds=3))
    made, steering = small(tmp_path, backend=backend, workers=1), Steering()
    result = run(made, tmp_path / "out", [steering])
    same(result, expected)
    assert result.stopped == "three are enough"
    assert model_digest(steering.model) == expected.model_sha256
    assert Result.load(tmp_path / "out").stopped == result.stopped


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_iterator_ends_the_run_after_the_round_that_it_has_given(backend, tmp_path, request):
    if backend == "ray":
        request.getfixturevalue("ray_here")
    expected = run(small(tmp_path, rounds=3))
    going = rounds(small(tmp_path, backend=backend, workers=1), tmp_path / "out")
    with pytest.raises(FedFleetError, match="no round that it could end after"):
        going.stop()
    for record in going:
        if record["round"] == 3:
            break
    assert model_digest(going.model) == expected.model_sha256
    result = going.stop("seen enough")
    same(result, expected)
    assert going.result is result
    assert result.stopped == "seen enough"
    assert model_digest(going.model) == expected.model_sha256


def test_a_function_of_two_arguments_may_end_the_run(tmp_path):
    def enough(record, under_way):
        if record["round"] == 2:
            under_way.stop()

    def told(record, seen=[]):  # noqa: B006 what has a default is not given
        seen.append(record)

    made = small(tmp_path)
    result = fedfleet.run(made, observers=[enough, told], progress=False)
    assert len(result.rows) == 2
    assert result.stopped == "its caller has ended it"


def test_an_observer_that_is_not_waited_for_may_do_neither(tmp_path):
    class Quiet(Observer):
        def record(self, record: dict[str, float]) -> None:
            self.under_way.stop()

    with pytest.raises(FedFleetError, match="steers must be True"):
        run(small(tmp_path), observers=[Quiet()])


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "evaluate",
            {"stop": {}},
            r"^evaluate\.stop\.patience: is missing, and so is target, got .*; give one of them",
        ),
        ("evaluate", {"stop": {"patience": 0}}, r"^evaluate\.stop\.patience must be greater than or equal to 1, got 0"),
        (
            "evaluate",
            {"stop": {"target": 1, "margin": 1}},
            r"^evaluate\.stop\.margin: has a meaning for patience alone",
        ),
        (
            "evaluate",
            {"stop": {"patience": 1, "metric": "eval/acuracy"}},
            r"^evaluate\.stop\.metric: no run will record",
        ),
        ("checkpoint", {"best": "accuracy"}, r"^checkpoint\.best\.metric: no run will record accuracy"),
        ("checkpoint", {"best": {"best": "max"}}, r"^checkpoint\.best\.metric is missing"),
    ],
)
def test_what_is_refused(key, value, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        run(experiment({**setting(tmp_path), key: value}))
