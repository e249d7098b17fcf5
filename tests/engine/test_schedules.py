"""Schedules: their closed forms, and the method of each round has the numbers of that round."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import Round
from fedfleet.algorithms.ditto import Ditto
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.table import RULES
from fedfleet.engine import resume, run
from fedfleet.engine.config.over_steps import rule_numbers, scheduled
from fedfleet.engine.config.registry import Registry, signature
from fedfleet.engine.config.registry import resolve as resolve_entry
from fedfleet.engine.config.schedules import has_schedule, numbers_over_steps, resolve
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.run_spec import rule_of
from fedfleet.engine.runs.prepare import prepare
from tests.algorithms import driver
from tests.reference import low_communication as slow

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
        ({"schedule": "linear", "start": 1.0, "end": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        ({"schedule": "linear", "start": 1.0, "warmup": 2}, [0.5, 1.0, 1.0, 0.5]),
        ({"schedule": "wsd", "start": 1.0, "decay": 2, "end": 0.2}, [1.0, 1.0, 1.0, 0.6]),
        ({"schedule": "step", "start": 1.0, "milestones": [1, 3], "gamma": 0.5}, [1.0, 0.5, 0.5, 0.25]),
        ({"schedule": "piecewise", "at": [2, 4], "values": [1.0, 0.2]}, [1.0, 1.0, 0.6, 0.2]),
        ({"schedule": "constant", "start": 0.3, "warmup": 3}, [0.1, 0.2, 0.3, 0.3]),
        ({"schedule": "linear", "start": 1.0, "length": 2}, [1.0, 0.5, 0.5, 0.5]),
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
        (
            {"schedule": "linear", "start": 0.1, "over": "step"},
            "u.over must be one of rounds, steps, visit, got 'step'",
        ),
        ({"schedule": "linear", "start": 0.1, "over": "steps"}, "u.over must be rounds here, got steps"),
        ({"schedule": "linear", "start": 0.1, "offset": -1}, "offset is for schedules over steps, got offset=-1"),
        ({"schedule": "linear", "start": 0.1, "warmup": 4}, "0 <= warmup < 4 must hold.*got warmup=4"),
        ({"schedule": "wsd", "start": 0.1, "warmup": 2, "decay": 3}, "1 <= decay <= 2 must hold.*got decay=3"),
        ({"schedule": "wsd", "start": 0.1, "decay": 3, "shape": "cubic"}, "wsd: .*cubic"),
        ({"schedule": "piecewise", "at": [2, 1], "values": [1, 2]}, "at needs rising times"),
        ({"schedule": "piecewise", "at": [1, 2], "values": [1, 2], "warmup": 1}, "warmup has no effect here"),
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
            run(quadratic(method, {"dim": 6}, PLAN), out, [Watch(r2=interrupt)])
        return resume(quadratic(method, {"dim": 6}, {**PLAN, "rounds": 4}), out)

    assert len(prolonged({"name": "stem", "schedule": "stem"}, tmp_path / "own").rows) == 4
    with pytest.raises(ConfigError, match=r"method\.lr goes over all rounds, and would have had"):
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


# --- over local steps -------------------------------------------------------------------------------------------------
GOLDEN = json.loads((Path(slow.__file__).parent / "low_communication.json").read_text())
OVER_STEPS = {
    "linear": {"schedule": "linear", "end": 0.1},
    "cosine": {"schedule": "cosine", "end": 0.1},
    "wsd_linear": {"schedule": "wsd", "end": 0.1, "decay": 5},
    "wsd_cosine": {"schedule": "wsd", "end": 0.1, "decay": 5, "shape": "cosine"},
    "wsd_sqrt": {"schedule": "wsd", "decay": 5, "shape": "sqrt"},
    "step_after_8_and_16_gamma_.1": {"schedule": "step", "milestones": [8, 16], "gamma": 0.1},
}


@pytest.mark.parametrize("name", OVER_STEPS)
def test_golden_values_over_steps(name):
    """20 steps, in one round or in five of four steps; the first four warm up."""
    spec = {**OVER_STEPS[name], "start": 1.0, "warmup": 4, "over": "steps"}
    whole = numbers_over_steps(spec, 1, 1, 20, "lr")
    parts = [number for r in range(1, 6) for number in numbers_over_steps(spec, r, 5, 4, "lr")]
    more = {"warmup": 4, "floor": spec.get("end", 0.0), "decay": 5, "milestones": (8, 16)}
    reference = [slow.factor(name.split("_after")[0], step, 20, **more) for step in range(1, 21)]
    for found in (whole, parts, reference):
        assert found == pytest.approx(GOLDEN["schedules"][name], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", OVER_STEPS)
def test_an_offset_gives_each_step_the_number_of_another(name):
    """As the schedulers of torch and transformers: the first step has the number of t = 0, 0 in a warm-up."""
    spec = {**OVER_STEPS[name], "start": 1.0, "over": "steps"}
    for warmup in (0, 4):
        plain = numbers_over_steps({**spec, "warmup": warmup}, 1, 1, 20, "lr")
        later = numbers_over_steps({**spec, "warmup": warmup, "offset": -1}, 2, 4, 5, "lr")
        first = numbers_over_steps({**spec, "warmup": warmup, "offset": -1}, 1, 4, 5, "lr")
        assert (first + later)[1:] == plain[:9]
        assert first[0] == (0.0 if warmup else 1.0)


def test_golden_values_of_diloco_with_a_schedule_over_steps():
    golden = GOLDEN["diloco"]
    h, c = np.array(golden["h"]), np.array(golden["c"])

    class Problem:
        def gradient(self, i, x, r, k):
            return {"x": h[i] * (x["x"] - c[i])}

    cosine = {"schedule": "cosine", "start": 0.3, "end": 0.03, "warmup": 2, "over": "steps"}
    rule = {"name": "adamw", "lr": cosine, "betas": [0.9, 0.95], "eps": 0.5, "weight_decay": 0.1}
    spec = {"name": "diloco", "rule": {"name": "clip", "rule": rule, "radius": 1.0}}

    def method(r):
        return scheduled(spec, lambda plain: Registry().build("METHODS", plain, "method"), r, 3, 3)

    server = method(1).server_init(driver.tree({"x": np.zeros(4)}))
    clients = [method(1).client_init(server.public) for _ in range(2)]
    reference = slow.diloco(
        lambda i, x: h[i] * (x - c[i]), np.zeros(4), 2, 3, 3, slow.AdamW(0.3), 0.7, 0.9,
        factor=lambda step: slow.factor("cosine", step, 9, 2, 0.1),
    )  # fmt: skip
    for r, (row, (x, _)) in enumerate(zip(golden["cosine_warmup2_floor.1_T9"], reference, strict=True)):
        oracles = lambda i, r=r: [driver.Step(Problem(), (i, r, k), k / 3) for k in range(3)]  # noqa: E731
        server = driver.play(method(r + 1), server, clients, [0, 1], (Round(r + 1, 3, 2, 2), oracles))
        np.testing.assert_allclose(server.public.x["x"], row["x"], rtol=1e-9)
        np.testing.assert_allclose(x, row["x"], rtol=1e-9)


WALK = """
from dataclasses import dataclass
from typing import Any
from fedfleet.algorithms.local import Rule
from fedfleet.algorithms.parts.groups import Number

@dataclass(frozen=True)
class Walk(Rule):
    lr: Number = 0.1

    def step(self, y, v, state):
        return y.add(y.zeros()._with(y.flat * 0 + 1), -self.lr), state

RULES = {"walk": Walk}
"""


def walking(tmp_path: Path, lr: object, rounds: int, steps: int, **engine: object):
    """A run whose clients step along (1, …, 1), so that |y - x|^2 is dim times the square of the sum of the rates."""
    (tmp_path / "plugin.py").write_text(WALK)
    plan = {"clients": 3, "cohort": 2, "rounds": rounds, "local": {"steps": steps, "batch": 1}}
    made = quadratic({"name": "fedavg", "rule": {"name": "walk", "lr": lr}}, {"dim": 6}, plan, **engine)
    return made.model_copy(update={"plugins": (str(tmp_path / "plugin.py"),)})


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize(("rounds", "steps"), [(12, 1), (3, 4)])
def test_the_rates_that_the_rule_sees(tmp_path, rounds, steps, block):
    """Also after the run was interrupted and resumed, and the same in every block."""
    lr = {"schedule": "cosine", "start": 0.3, "end": 0.03, "warmup": 2, "over": "steps"}
    made = walking(tmp_path, lr, rounds, steps, block=block)
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r2=interrupt)])
    rows = resume(made, tmp_path / "run").rows
    rates = [0.3 * slow.factor("cosine", step, 12, 2, 0.1) for step in range(1, 13)]
    moved = [6 * sum(rates[r * steps : (r + 1) * steps]) ** 2 for r in range(rounds)]
    assert [row["client/norm2"] for row in rows] == pytest.approx(moved, rel=1e-9)


def test_a_rule_on_the_server_has_the_numbers_of_the_last_step():
    """Data-parallel training with one step per round: the step of round t has the number of step t, 0 in the last."""
    lr = {"schedule": "linear", "start": 0.3, "over": "steps"}
    plan = {"clients": 3, "cohort": 3, "rounds": 4, "local": {"steps": 1, "batch": 1}}
    rows = run(quadratic({"name": "data_parallel", "rule": {"name": "sgd", "lr": lr}}, {"dim": 6}, plan)).rows
    assert [row["server/lr"] for row in rows] == pytest.approx([0.3 * (1 - t / 4) for t in range(1, 5)], abs=1e-12)


def test_groups_of_tensors_may_have_schedules_of_their_own(tmp_path):
    """The rule steps along (1, …, 1). All tensors are in both groups, and have the schedule of the first,
    which is that of the rule alone."""
    lr = {"schedule": "linear", "start": 0.2, "over": "steps"}
    made = walking(tmp_path, lr, 2, 3)
    groups = [{"match": ["*"], "lr": lr}, {"match": ["*"], "lr": 7}]
    both = {"name": "fedavg", "rule": {"name": "groups", "rule": {"name": "walk", "lr": 0.7}, "groups": groups}}
    other = run(made.model_copy(update={"method": both}))
    assert other.model_sha256 == run(made).model_sha256


def test_a_visit_begins_anew_in_every_round(tmp_path):
    lr = {"schedule": "step", "start": 0.2, "milestones": [1], "gamma": 0.5, "over": "visit"}
    rows = run(walking(tmp_path, lr, 3, 3)).rows
    assert [row["client/norm2"] for row in rows] == pytest.approx([6 * (0.2 + 0.1 + 0.1) ** 2] * 3, rel=1e-9)


def personal_digits(lr: object, steps: int, rounds: int, plugin: str = "", **more: Any) -> dict[str, Any]:
    """FedAvg on digits, with a bias of ten numbers that each client has for itself."""
    rule = {"name": "walk", "lr": lr} if plugin else {"name": "momentum", "lr": lr, "mu": 0.5}
    return {
        "workload": {"name": "digits", "model": "logistic"},
        "method": {"name": "fedavg", "rule": rule},
        "federation": {"clients": 4, "cohort": 3, "rounds": rounds, "local": {"steps": steps, "batch": 4}},
        "personal": {"tensors": ["*bias"], **more},
        "evaluate": {"clients": {"own": True}, "held_out": 0.2},
        "engine": {"backend": "local", "dtype": "float64", "kernels": "torch"},
        "plugins": [plugin] if plugin else [],
        "tracking": {"uri": "none"},
    }


@pytest.mark.parametrize("carry", ["reset", "keep"])
def test_personal_tensors_follow_the_schedule_of_the_methods_rule(carry):
    """With one step per round, start decay^t over steps is (start decay) decay^(t - 1) over rounds."""
    schedule = {"schedule": "exponential", "decay": 0.5}
    over_steps = run(experiment(personal_digits({**schedule, "start": 0.2, "over": "steps"}, 1, 3, carry=carry)))
    over_rounds = run(experiment(personal_digits({**schedule, "start": 0.1}, 1, 3, carry=carry)))
    for name, value in over_steps.model.items():
        torch.testing.assert_close(value, over_rounds.model[name], rtol=1e-12, atol=1e-12)
    for column in ("eval/own/test_loss", "client/personal_norm2"):
        values = [[row[column] for row in each.rows if column in row] for each in (over_steps, over_rounds)]
        assert values[0], column
        assert values[0] == pytest.approx(values[1], rel=1e-12), column


@pytest.mark.parametrize(("block", "more"), [(1, {}), (3, {}), (3, {"split": [2, 1]})])
def test_the_rates_that_the_rule_of_personal_tensors_sees(tmp_path, block, more):
    """It steps along (1, …, 1), so that what ten numbers moved says the sum of its rates in a visit."""
    (tmp_path / "plugin.py").write_text(WALK)
    lr = {"schedule": "linear", "start": 0.3, "warmup": 2, "over": "steps"}
    made = personal_digits(lr, 3, 2, str(tmp_path / "plugin.py"), **more)
    made["engine"]["block"] = block
    rows = run(experiment(made)).rows
    rates = [0.15, 0.3, 0.225, 0.15, 0.075, 0.0]
    counted = slice(None, 2) if more else slice(None)
    expected = [10 * sum(rates[first : first + 3][counted]) ** 2 for first in (0, 3)]
    assert [row["client/personal_norm2"] for row in rows] == pytest.approx(expected, rel=1e-12)


def test_personal_tensors_follow_no_schedule_of_another_rule():
    """Of a method in a method, each has a rule of its own."""
    lr = {"schedule": "linear", "start": 0.3, "over": "steps"}
    base = {"name": "fedavg", "rule": {"name": "sgd", "lr": lr}}
    method = scheduled(base, lambda plain: Ditto(Registry().build("METHODS", plain, "method"), Sgd(0.1)), 1, 3, 3)
    own, inner = rule_of(method.method), method.method.method.rule
    assert own == Sgd(0.1)
    assert rule_numbers(method, own) is None
    (row,) = rule_numbers(method, inner).rows.items()
    assert row == (("lr",), pytest.approx([0.3 * (1 - t / 9) for t in (1, 2, 3)], rel=1e-12))


MORE = {"biclip": {"d": 0.01, "u": 0.5}, "groups": {"groups": [{"match": ["*bias*"], "lr": 0.3}]}}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_may_have_a_schedule_over_steps(rule):
    """With one step per round, start decay^t over steps is (start decay) decay^(t - 1) over rounds."""
    rate = next(name for name in ("lr", "matrix_lr", "rule") if name in signature(resolve_entry(RULES[rule]))[1])

    def trained(lr):
        spec = {"name": rule, **MORE.get(rule, {}), rate: {"name": "sgd", "lr": lr} if rate == "rule" else lr}
        plan = {"clients": 3, "cohort": 2, "rounds": 3, "local": {"steps": 1, "batch": 4}}
        method = {"name": "fedavg", "rule": spec}
        data = {
            "workload": {"name": "digits", "model": "logistic"},
            "method": method,
            "federation": plan,
            "engine": {"backend": "local", "dtype": "float64", "kernels": "torch"},
            "tracking": {"uri": "none"},
        }
        return run(experiment(data)).model

    over_steps = trained({"schedule": "exponential", "start": 0.2, "decay": 0.5, "over": "steps"})
    over_rounds = trained({"schedule": "exponential", "start": 0.1, "decay": 0.5})
    for name, value in over_steps.items():
        torch.testing.assert_close(value, over_rounds[name], rtol=1e-12, atol=1e-12)


LINEAR = {"schedule": "linear", "start": 0.1, "over": "steps"}


@pytest.mark.parametrize(
    ("method", "federation", "said"),
    [
        (
            {"name": "fedavg", "rule": {"name": "sgd", "lr": LINEAR}},
            {"local": {"epochs": 1}},
            "a schedule over steps needs the same number of steps of all clients, got 1; give federation.local.steps",
        ),
        (
            {"name": "fedavg", "rule": {"name": "sgd", "lr": LINEAR}},
            {"pace": {"name": "buffered", "buffer": 2}},
            "a schedule over steps counts the steps of all clients together.*give over: rounds",
        ),
        ({"name": "fedavg", "server_lr": LINEAR}, {}, r"method\.server_lr: .* numbers of the local rule alone"),
        ({"name": "fedexp", "evaluate": "last_two", "epsilon": LINEAR}, {}, r"method\.epsilon: .* local rule alone"),
        ({"name": "fedavg_m", "beta": LINEAR}, {}, r"method\.beta: .* numbers of the local rule alone"),
        *(
            ({"name": name, "rule": {"name": "sgd", "lr": LINEAR}}, {}, r"method\.rule\.lr: .* used elsewhere")
            for name in ("fedavg_m", "mofedsam", "mifa")
        ),
        (
            {"name": "fedavg", "rule": {"name": "sgd", "lr": {**LINEAR, "warmup": 10}}},
            {},
            r"method\.rule\.lr: schedule linear: 0 <= warmup < 6 must hold, the length of the schedule, got warmup=10",
        ),
    ],
    ids=["epochs", "asynchronous", "server", "last two", "momentum", "fedavg_m", "mofedsam", "mifa", "warm-up"],
)
def test_schedules_over_steps_are_refused_where_they_have_no_meaning(method, federation, said):
    given = {
        "workload": "quadratic",
        "method": method,
        "federation": {**PLAN, **federation},
        "tracking": {"uri": "none"},
    }
    with pytest.raises(ConfigError, match=said):
        prepare(experiment({**given, **({"systems": {}} if "pace" in federation else {})}), "refused")
