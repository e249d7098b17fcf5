"""Tensors of the model that stay with the client: which ones settings mean, runs, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedfleet.engine import Result, resume, run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Diverged, Interrupted
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.partitions.standard import Iid
from tests.engine.setups import Built, driver_here, next_round, states_of
from tests.faults.runs import Watch, interrupt

HEAD = {"tensors": "head"}


def network() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 6), BatchNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.GroupNorm(2, 6)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(6, 10))


NORMED = Digits(Built(network), Iid())
ALL = {
    *(f"{layer}.{name}" for layer in (1, 2, 4, 5, 7) for name in ("weight", "bias")),
    *("2.running_mean", "2.running_var"),
}


def small(personal: Any = None, method: Any = "fedavg", workload: Any = None, **more: Any) -> Experiment:
    data = {
        "workload": workload or {"name": "digits", "model": {"name": "mlp", "hidden": [8]}},
        "method": method,
        "federation": {"clients": 12, "cohort": 5, "rounds": 4, "local": {"steps": 4, "batch": 8}},
        "engine": {"backend": "local", "block": 2, "dtype": "float64"},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
        **more,
    }
    return experiment(data if personal is None else {**data, "personal": personal})


def spec_of(*given: Any, **more: Any) -> RunSpec:
    return RunSpec.of("test", small(*given, **more))


# --- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("form", "layers"),
    [
        ("head", "7.weight 7.bias"),
        ("norm", "2.weight 2.bias 5.weight 5.bias 2.running_mean 2.running_var"),
        ("norm_parameters", "2.weight 2.bias 5.weight 5.bias"),
        ("statistics", "2.running_mean 2.running_var"),
        ({"first": 1}, "1.weight 1.bias 2.weight 2.bias 2.running_mean 2.running_var"),
        ({"last": 2}, "4.weight 4.bias 5.weight 5.bias 7.weight 7.bias"),
        (["4.*", "*.running_var"], "4.weight 4.bias 2.running_var"),
    ],
)
def test_the_names_of_groups(form: Any, layers: str):
    assert spec_of({"tensors": form}, workload=NORMED).kept_apart.personal == tuple(layers.split())


def test_the_body_is_what_the_head_is_not():
    head, body = (set(spec_of({"tensors": form}, workload=NORMED).kept_apart.personal) for form in ("head", "body"))
    assert not head & body
    assert head | body == ALL


# --- runs -------------------------------------------------------------------------------------------------------------
def test_shared_tensors_alone_are_sent():
    plain, personal = (spec_of(each) for each in (None, HEAD))
    plain, personal = (StateSpec(each.method(), each.initial_model()) for each in (plain, personal))
    head = 8 * (8 * 10 + 10)
    assert (plain.down, plain.up) == (personal.down + head, personal.up + head)
    assert personal.kept == head


def test_running_statistics_count_where_they_are_sent():
    spec = spec_of({"tensors": ["2.running_mean"]}, workload=NORMED)
    assert StateSpec(spec.method(), spec.initial_model()).buffers == 8 * 6


RUNS: dict[str, dict[str, Any]] = {
    "fedper": {"personal": HEAD},
    "fedrep": {"personal": {**HEAD, "split": [3, 1], "rule": {"name": "momentum", "lr": 0.1}, "carry": "keep"}},
    "fedbn": {"personal": {"tensors": "norm"}, "workload": NORMED},
    "statistics": {"personal": {"tensors": "statistics"}, "workload": NORMED},
    "scaffold": {"personal": HEAD, "method": "scaffold"},
    "alone": {"method": "local_only", "workload": NORMED},
    "frozen": {"personal": {"frozen": "head"}},
}


QUICK = {"fedrep", "fedbn"}
runs = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)


def states(made: Experiment) -> list[torch.Tensor]:
    """What each client keeps at the end, flat."""
    with driver_here(made) as driver:
        for _ in range(made.federation.rounds):
            next_round(driver)
        kept = states_of(driver)
    return [torch.cat([leaf.reshape(-1) for leaf in torch.utils._pytree.tree_leaves(each)]) for each in kept]


@runs
def test_blocks_give_the_clients_alone(name: str):
    """TOLERANCE: in float64 a block adds up in another order; an error in a formula makes a difference of 1e-3."""
    made = small(**RUNS[name])
    single = made.model_copy(update={"engine": made.engine.model_copy(update={"block": 1})})
    for first, second in zip(states(made), states(single), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)
    first, second = run(made), run(single)
    for tensor, value in first.model.items():
        torch.testing.assert_close(value, second.model[tensor], rtol=1e-9, atol=1e-9)


def last(result: Result) -> dict[str, Any]:
    return {name: value for name, value in result.rows[-1].items() if not name.startswith("time/")}


@runs
def test_a_run_that_is_resumed_has_the_same_bits(name: str, tmp_path):
    made = small(**RUNS[name])
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r2=interrupt)])
    whole, resumed = run(made), resume(made, tmp_path / "run")
    assert resumed.model_sha256 == whole.model_sha256
    assert last(resumed) == last(whole)


@pytest.mark.long
def test_workers_give_the_bits_of_one_process():
    made = small(**RUNS["fedrep"])
    engine = {**made.engine.model_dump(), "backend": "ray", "workers": 2, "cpus": 0.5}
    spread = small(**RUNS["fedrep"], engine=engine)
    first, second = run(spread), run(made)
    assert first.model_sha256 == second.model_sha256
    assert first.rows[-1]["client/personal_norm2"] == second.rows[-1]["client/personal_norm2"]


def test_frozen_tensors_stay():
    spec = spec_of({"frozen": "head"})
    before, after = {**spec.frozen, **dict(spec.initial_model().items())}, run(spec.experiment).model
    stayed = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert stayed == set(spec.frozen)
    assert len(stayed) == 2


def test_the_servers_model_has_the_personal_tensors_before_round_1():
    spec = spec_of(HEAD)
    before, after = dict(spec.initial_model().items()), run(spec.experiment).model
    assert {name for name, value in after.items() if torch.equal(value, before[name])} == {*spec.kept_apart.personal}


def test_heads_of_their_own_begin_at_x0_and_move():
    kept = states(small(HEAD))
    assert len(kept) > 5
    assert len({tuple(each.tolist()) for each in kept}) == len(kept)
    assert all(np.isfinite(each.numpy()).all() for each in kept)


def test_a_schedule_of_the_personal_rule():
    rate = {"schedule": "piecewise", "values": [0.1, 1e-9], "at": [1, 3]}
    made = small({**HEAD, "rule": {"name": "sgd", "lr": rate}})
    moved = [row["client/personal_norm2"] for row in run(made).rows]
    assert [value > 1e-9 for value in moved] == [True, True, False, False]


def test_personal_tensors_that_are_not_finite_end_the_run():
    with pytest.raises(Diverged, match="personal tensors of some client are not finite"):
        run(small(method={"name": "local_only", "rule": {"name": "sgd", "lr": 1e300}}))


# --- what is refused --------------------------------------------------------------------------------------------------
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"personal": {"tensors": ["fc9.*"]}}, r"personal.tensors: every pattern must name a tensor, got fc9.\*"),
    ({"personal": {"tensors": "all"}}, "personal.tensors: some parameter must be shared, got all 4 of fedavg's"),
    ({"personal": {**HEAD, "frozen": ["*bias"]}}, "personal.frozen: no tensor may be personal and frozen, got"),
    ({"personal": {"tensors": "norm"}}, "personal.tensors: norm needs normalisation layers, got mlp, which has none"),
    ({"personal": {"tensors": {"first": 2}}}, "personal.tensors: 1 <= n < 2 layers must hold, got first: 2"),
    ({"personal": {**HEAD, "split": [0, 4]}}, r"personal.split: must be together, or two whole .*, got \[0, 4\]"),
    ({"personal": {"frozen": "head", "split": [1, 1]}}, "personal.split: needs personal tensors"),
    ({"personal": {"tensors": "tail"}}, "personal.tensors: must be head, body, .* got 'tail'"),
    ({"personal": {**HEAD, "rule": "sgdd"}}, "personal.rule.name: no rule is called sgdd; did you mean sgd"),
    ({"personal": HEAD, "method": "fafed"}, "personal.rule: same needs a method with the one option rule, got fafed"),
    ({"personal": HEAD, "method": "local_only"}, "personal: does not go with a method that gives clients whole models"),
    ({"personal": HEAD, "engine": {"state_dtype": "bfloat16"}}, "engine.state_dtype: bfloat16 would round"),
    ({"personal": {}}, "personal.tensors: some tensor must be personal or frozen"),
    ({"personal": {**HEAD, "order": "shared"}}, "personal.order: says which part of a split is first"),
]


@pytest.mark.parametrize(("keys", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_refused(keys: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        run(small(**keys))


def test_a_split_that_leaves_one_side_no_step_is_refused():
    sentence = "personal.split: both parts must get a step, got [10, 1] with 4 local steps; choose [1, 1], or 11 steps"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run(small({**HEAD, "split": [10, 1]}))
