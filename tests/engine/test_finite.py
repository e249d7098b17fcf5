"""Settings that are infinite or NaN are refused, and the message of a run that diverges names the cause that it can
see."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.parts.biclip import BiClip
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.engine.api import run
from fedfleet.engine.config.schedules import resolve
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Diverged
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.wrappers.noisy import Noisy

SGD = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}


def plan(workload: Any = "digits", method: Any = SGD, steps: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "workload": workload,
        "method": method,
        "federation": {"clients": 10, "cohort": 5, "rounds": 3, "local": {"steps": steps, "batch": 8}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
        **more,
    }


def started(data: dict[str, Any]) -> None:
    run_spec = RunSpec.of("test", experiment(data))
    _ = run_spec.workload
    run_spec.method()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": "BAD"}}}, r"method.rule.lr"),
    ({"method": {"name": "fedavg", "server_lr": "BAD"}}, r"method.server_lr"),
    ({"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": {"schedule": "cosine", "start": "BAD"}}}}, "rule.lr"),
    ({"method": {"name": "fed_sgda_m", "lr": {"primal": "BAD", "dual": 0.1}}}, r"method.lr.primal"),
    ({"workload": {"name": "noisy", "of": "digits", "scale": "BAD"}}, r"workload.scale"),
    ({"workload": {"name": "quadratic", "heterogeneity": "BAD"}}, r"workload.heterogeneity"),
    ({"workload": {"name": "digits", "partition": {"name": "dirichlet", "beta": "BAD"}}}, r"workload.partition.beta"),
    ({"workload": {"name": "mnist", "model": {"name": "femnist_cnn", "dropout": [0.1, "BAD"]}}}, r"dropout\[1\]"),
    ({"engine": {"cpus": "BAD"}}, r"engine.cpus"),
    ({"engine": {"patience": "BAD"}}, r"engine.patience"),
    ({"engine": {"workers": [{"count": 1, "gpus": "BAD"}]}}, r"engine.workers.0.gpus"),
    ({"evaluate": {"held_out": "BAD"}}, r"evaluate.held_out"),
]


def put(value: Any, bad: Any) -> Any:
    """The same data with `bad` in place of "BAD"."""
    if isinstance(value, dict):
        return {key: put(inner, bad) for key, inner in value.items()}
    if isinstance(value, list):
        return [put(inner, bad) for inner in value]
    return bad if value == "BAD" else value


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, "inf", "nan"])
@pytest.mark.parametrize(("change", "key"), WRONG, ids=[key for _, key in WRONG])
def test_infinite_settings_are_refused_wherever_they_are(change, key, bad):
    with pytest.raises(ConfigError, match=rf"{key}.* must be .*, got .*(inf|nan)"):
        started({**plan(), **put(change, bad)})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"method": fedavg(Sgd(math.inf))}, "method.rule.lr"),
        ({"workload": Quadratic(start=math.inf)}, "workload.start"),
        ({"workload": Noisy(Quadratic(start=math.nan))}, "workload.of.start"),
    ],
    ids=["rule", "workload", "inner"],
)
def test_parts_that_are_already_built_are_looked_at_too(change, key):
    with pytest.raises(ConfigError, match=rf"{key} must be a finite number, got (nan|inf)"):
        started({**plan(), **change})


def test_a_threshold_may_be_infinite():
    for method in ({"name": "fedavg", "rule": {"name": "biclip", "u": math.inf}}, fedavg(BiClip(0.1, 0.0, math.inf))):
        started(plan(method=method))
    with pytest.raises(ConfigError, match=r"method.rule.u must be a finite number, got nan"):
        started(plan(method={"name": "fedavg", "rule": {"name": "biclip", "u": math.nan}}))


def test_a_schedule_that_overflows_is_told():
    steep = {"name": "sgd", "lr": {"schedule": "exponential", "start": 0.1, "decay": 1e200}}
    with pytest.raises(ConfigError, match=r"method.rule.lr: schedule exponential"):
        resolve({"name": "fedavg", "rule": steep}, 3, 3, "method")


# --- what a run that diverges says ------------------------------------------------------------------------------------
def diverged(data: dict[str, Any]) -> str:
    with pytest.raises(Diverged) as found:
        run(Experiment.model_validate(data))
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.round, again.remedy) == (str(found.value), found.value.round, found.value.remedy)
    return str(found.value)


def test_steps_that_are_too_long():
    said = diverged(plan(method={"name": "fedavg", "rule": {"name": "sgd", "lr": 1e30}}))
    assert said.endswith("; lower the step size")
    assert "server's step" not in said


def test_a_server_that_steps_too_far():
    said = diverged(plan(method={**SGD, "server_lr": 1e12}))
    assert said.endswith(
        "every client's message is finite, the server's step made the model large; lower the server's step size"
    )


@dataclass(frozen=True)
class Lossy(Digits):
    """A workload whose loss is NaN for rows with some labels."""

    bad: tuple[int, ...] = ()

    def losses(self, p: Any, batch: Any) -> torch.Tensor:
        losses = super().losses(p, batch)
        wrong = torch.stack([batch["label"] == label for label in self.bad]).any(0)
        return losses * torch.where(wrong, torch.nan, 1.0)


def test_a_loss_that_is_no_number_at_the_first_model():
    said = diverged(plan(Lossy(bad=tuple(range(10))), steps=1))
    assert "the loss is not finite at the model that the round began with" in said
    assert said.endswith("look at the workload's loss, its inputs and the initial weights")


def test_a_few_clients_whose_rows_are_wrong():
    from fedfleet.workloads.partitions.standard import Shards

    workload = Lossy(bad=(3,), partition=Shards(1))
    data = plan(workload)
    data["federation"] |= {"cohort": 10}
    split = workload.split(0, 10)
    parts = split.client_index
    wrong = [i for i in range(10) if 3 in split.train["label"][parts.rows[parts.offsets[i] : parts.offsets[i + 1]]]]
    assert 0 < len(wrong) <= 5
    said = diverged(data)
    assert f"{len(wrong)} of 10 clients are not finite (client {', '.join(map(str, wrong))})" in said
    assert said.endswith("look at the rows of these clients, or lower the step size")


@dataclass(frozen=True)
class Unreported(Digits):
    def report(self, p: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": super().report(p, batch)["loss"] * torch.nan}


def test_a_report_that_is_no_number_is_told_in_the_log(tmp_path: Path):
    result = run(Experiment.model_validate(plan(Unreported())), tmp_path / "out")
    assert np.isnan(result.metrics["eval/loss"])
    assert "eval/loss: not a number, though the model is finite" in (tmp_path / "out/run.log").read_text()
