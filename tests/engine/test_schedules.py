"""Schedules: their closed forms, and the method of each round has the numbers of that round."""

from __future__ import annotations

import math

import pytest

from fedfleet.engine import resume, run
from fedfleet.engine.config.schedules import has_schedule, resolve
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted

from ..faults.runs import Watch, interrupt
from .setups import quadratic


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ({"schedule": "constant", "start": 0.3}, [0.3] * 4),
        ({"schedule": "cosine", "start": 1.0, "end": 0.2}, [0.6 + 0.4 * math.cos(math.pi * t / 4) for t in range(4)]),
        ({"schedule": "exponential", "start": 0.8, "decay": 0.5}, [0.8, 0.4, 0.2, 0.1]),
        ({"schedule": "polynomial", "start": 0.6, "power": -1.0}, [0.6, 0.3, 0.2, 0.15]),
        ({"schedule": "polynomial", "start": 0.6}, [0.6] * 4),
    ],
)
def test_closed_forms(spec, numbers):
    assert [resolve(spec, t, 4, "lr") for t in (1, 2, 3, 4)] == pytest.approx(numbers, rel=1e-14)


def test_tailopts_thresholds_fall_round_by_round():
    """With d = u every entry of a step is +- lr u_t. Each client takes one step, so |y - x|^2 = dim (lr u_t)^2."""
    falling = {"schedule": "polynomial", "start": 0.2, "power": -0.5}
    rule = {"name": "biclip", "lr": 0.1, "d": falling, "u": falling}
    plan = {"clients": 3, "cohort": 3, "rounds": 9, "local": {"steps": 1, "batch": 1}}
    rows = run(quadratic({"name": "avg_biclip", "rule": rule}, {"dim": 6}, plan)).rows
    moved = [row["client/norm2"] for row in rows]
    assert moved == pytest.approx([6 * (0.1 * 0.2) ** 2 / t for t in range(1, 10)], rel=1e-12)


def test_the_global_learning_rate_is_in_the_record():
    """FedAvg's rate is the scheduled one; FedExP's rate follows from its formula, with client/norm2 and the mean of one
    client."""
    plan = {"clients": 3, "cohort": 1, "rounds": 5, "local": {"steps": 2, "batch": 1}}
    halved = {"schedule": "exponential", "start": 0.8, "decay": 0.5}
    rows = run(quadratic({"name": "fedavg", "server_lr": halved}, {"dim": 6}, plan)).rows
    assert [row["server/lr"] for row in rows] == pytest.approx([0.8 / 2**t for t in range(5)], rel=1e-12)
    rows = run(quadratic({"name": "fedexp", "epsilon": 0.3, "floor": False}, {"dim": 6}, plan)).rows
    formula = [row["client/norm2"] / (2 * (row["client/norm2"] + 0.3)) for row in rows]
    assert [row["server/lr"] for row in rows] == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"schedule": "polynom", "start": 0.1}, "did you mean polynomial"),
        ({"schedule": "polynomial", "start": 0.1, "decay": 0.5}, "polynomial: .*decay"),
    ],
)
def test_mistakes_are_told(spec, words):
    with pytest.raises(ConfigError, match=words):
        resolve(spec, 1, 4, "method.rule.u")


# --- arguments that are called `schedule` -----------------------------------------------------------------------------
PLAN = {"clients": 3, "cohort": 2, "rounds": 3, "local": {"steps": 2, "batch": 1}}


@pytest.mark.parametrize(
    "lr", [0.1, {"schedule": "exponential", "start": 0.1, "decay": 0.5}], ids=["number", "schedule"]
)
def test_a_method_may_have_an_argument_called_schedule(lr):
    """STEM's argument `schedule`, given as a mapping from YAML, is its own decay of step sizes; its step size may
    follow a schedule of the engine."""
    method = {"name": "stem", "schedule": "stem", "lr": lr}
    decaying = run(quadratic(method, {"dim": 6}, PLAN))
    constant = run(quadratic({**method, "schedule": "constant"}, {"dim": 6}, PLAN))
    assert decaying.model_sha256 != constant.model_sha256
    assert has_schedule(method) == (lr != 0.1)


PLUGIN = """
from dataclasses import dataclass
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.parts.rules import Sgd

@dataclass(frozen=True)
class Warm(Sgd):
    schedule: str = "none"

    def step(self, y, v, state):
        return y.add(v, -self.lr * (0.5 if self.schedule == "half" else 1.0)), state

def mine(schedule: str = "whole", lr: float = 0.1):
    return fedavg(Sgd(lr * (0.5 if schedule == "half" else 1.0)))

METHODS = {"mine": mine}
RULES = {"warm": Warm}
"""


@pytest.mark.parametrize(
    ("method", "equal"),
    [
        ({"name": "mine", "schedule": "half", "lr": 0.2}, {"name": "fedavg"}),
        ({"name": "fedavg", "rule": {"name": "warm", "schedule": "half", "lr": 0.2}}, {"name": "fedavg"}),
        (
            {"name": "mine", "schedule": "half", "lr": {"schedule": "exponential", "start": 0.2, "decay": 0.5}},
            {"name": "fedavg", "rule": {"name": "sgd", "lr": {"schedule": "exponential", "start": 0.1, "decay": 0.5}}},
        ),
    ],
    ids=["method", "rule", "beside a schedule"],
)
def test_parts_of_a_plug_in_may_have_one_too(method, equal, tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    ours = quadratic(method, {"dim": 6}, PLAN).model_copy(update={"plugins": (str(tmp_path / "plugin.py"),)})
    assert run(ours).model_sha256 == run(quadratic(equal, {"dim": 6}, PLAN)).model_sha256


def test_more_rounds_are_a_difference_only_under_a_schedule(tmp_path):
    """An argument that is called `schedule` does not make a method depend on the number of rounds."""

    def prolonged(method, out):
        with pytest.raises(Interrupted):
            run(quadratic(method, {"dim": 6}, PLAN), out, [Watch(r1=interrupt)])
        return resume(quadratic(method, {"dim": 6}, {**PLAN, "rounds": 4}), out)

    assert len(prolonged({"name": "stem", "schedule": "stem"}, tmp_path / "own").rows) == 4
    with pytest.raises(ConfigError, match=r"federation\.rounds was 3, is 4"):
        prolonged({"name": "stem", "lr": {"schedule": "cosine", "start": 0.1}}, tmp_path / "ours")


def test_a_pass_before_round_1_has_the_settings_of_round_1():
    """t ** -0.5 is infinite at t = 0, where no round is."""
    lr = {"schedule": "polynomial", "start": 0.1, "power": -0.5}
    made = experiment(
        {
            "workload": {"name": "digits", "model": "logistic"},
            "method": {"name": "scaffold", "start": "gradient", "rule": {"name": "sgd", "lr": lr}},
            "federation": {"clients": 6, "cohort": 3, "rounds": 2, "local": {"steps": 2, "batch": 8}},
            "engine": {"backend": "local"},
            "tracking": {"uri": "none"},
        }
    )
    assert len(run(made).rows) == 2
