"""Runs with low-rank adapters: golden values of two rounds, identities, bytes, and which tensors a run has."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as tensors_of

from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.objectives import Numbers
from fedfleet.workloads.workload import Batch, Columns, Model, Params, Partition
from tests.engine.setups import driver_here, next_round, states_of
from tests.faults.runs import Watch, interrupt
from tests.workloads.test_adapters import close, wave

REFERENCE = json.loads((Path(__file__).parents[1] / "reference/adapters.json").read_text())
GOLDEN = REFERENCE["low_rank"]
FULL = REFERENCE["full_fine_tuning"]
SHARES = 1, 3
"""The clients' weights 1/4 and 3/4: the second has each of its rows three times."""
TRAINED = {"0.lora_a": wave((2, 4), 7, 0.5), "0.lora_b": torch.zeros(3, 2, dtype=torch.float64)}
BEFORE = {**TRAINED, "0.weight": wave((3, 4), 9)}


@dataclass(frozen=True)
class OneLayer(Model):
    width: int

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width, bias=False))


@dataclass(frozen=True)
class Shares(Partition):
    by_class = False

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        sizes = [5 * share for share in SHARES]
        return ClientIndex(np.cumsum([0, *sizes]), np.arange(sum(sizes)))


@dataclass(frozen=True)
class Waves(Classification):
    """Regression on rows given by sines: half the squared distance of the outputs."""

    model: OneLayer = OneLayer(3)
    partition: Partition = Shares()
    classes = 1
    shape = (4,)
    whole = ()  # pyright: ignore[reportAssignmentType]

    @property
    def objective(self) -> Numbers:
        return Numbers(self.model.width)

    def load(self) -> tuple[Columns, Columns]:
        rows = [
            {"input": wave((5, 4), i, 1.0).numpy(), "label": wave((5, self.model.width), 5 + i, 1.0).numpy()}
            for i, share in enumerate(SHARES)
            for _ in range(share)
        ]
        train = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
        return train, {name: column[:5] for name, column in train.items()}

    def losses(self, p: Params, batch: Batch) -> Tensor:
        return (self.logits(p, batch) - batch["label"]).square().sum(-1) / 2

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return {"loss": self.losses(p, batch)}

    def summary(self, means: Any, columns: Any) -> dict[str, float]:
        return {}


LORA = Lora(targets=("0",), rank=2, alpha=4.0)


def waves(adapter: Lora | None = LORA, rounds: int = 2, width: int = 3, **more: Any) -> Experiment:
    data = {
        "workload": Waves(OneLayer(width), adapter=adapter),
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.3}},
        "federation": {
            "clients": 2, "cohort": 2, "rounds": rounds, "weights": "examples", "local": {"steps": 4, "batch": 15},
        },
        "engine": {"backend": "local", "dtype": "float64", "block": 1},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }  # fmt: skip
    return experiment({**data, **more})


def trained(made: Experiment, before: dict[str, Tensor] = BEFORE) -> dict[str, Tensor]:
    return run(made, initial_model=before).model


def weight(made: Experiment, p: dict[str, Tensor]) -> Tensor:
    """The weight with the change of its factors."""
    network = RunSpec.of("x", made).workload.outline
    assert network is not None
    return Lora().merged(network, p)["0.weight"]


# --- golden values ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("block", [1, 2])
def test_fedavg_of_the_factors(rounds: int, block: int):
    made = waves(rounds=rounds, engine={"backend": "local", "dtype": "float64", "block": block})
    p, golden = trained(made), GOLDEN["lora"]["rounds"][rounds - 1]
    close(p["0.lora_a"], golden["a"])
    close(p["0.lora_b"], golden["b"])
    close(weight(made, p), golden["merged"])
    assert torch.equal(p["0.weight"], BEFORE["0.weight"])


@pytest.mark.parametrize("rounds", [1, 2])
def test_ffa_lora_is_a_frozen_a(rounds: int):
    made = waves(rounds=rounds, personal={"frozen": ["*.lora_a"]})
    p, golden = trained(made), GOLDEN["ffa"]["rounds"][rounds - 1]
    assert torch.equal(p["0.lora_a"], TRAINED["0.lora_a"])
    close(p["0.lora_b"], golden["b"])
    close(weight(made, p), golden["merged"])


def test_fedsa_lora_is_a_personal_b():
    made = waves(personal={"tensors": ["*.lora_b"]})
    spec = RunSpec.of("x", made, initial_model=BEFORE)
    with driver_here(made, initial_model=BEFORE) as driver:
        for golden in GOLDEN["fedsa"]["rounds"]:
            next_round(driver)
            close(driver.tensors()["0.lora_a"], golden["a"])
            for client, (own, b) in enumerate(zip(states_of(driver), golden["b"], strict=True)):
                close(own.personal["0.lora_b"], b)
                p = {**BEFORE, "0.lora_a": driver.tensors()["0.lora_a"], "0.lora_b": own.personal["0.lora_b"]}
                rows = {name: torch.from_numpy(column)[5 * client :][:5] for name, column in spec.split().train.items()}
                close(spec.workload.losses(p, rows).mean(), golden["personal_loss"][client])


@pytest.mark.parametrize("rounds", [1, 2])
def test_without_an_adapter_the_weight_is_trained(rounds: int):
    close(trained(waves(None, rounds=rounds), {"0.weight": BEFORE["0.weight"]})["0.weight"], FULL[rounds - 1])


# --- identities -------------------------------------------------------------------------------------------------------
def test_a_frozen_identity_of_full_rank_is_full_training():
    """r = n, A = I, s = 1: descent on B is descent on W, with any server. TOLERANCE: eight steps in float64."""
    method = {"name": "fedavgm", "rule": {"name": "sgd", "lr": 0.3}, "server_lr": 0.7, "beta": 0.5}
    whole = waves(None, width=4, method=method)
    part = waves(Lora(targets=("0",), rank=4, alpha=4.0), width=4, method=method, personal={"frozen": ["*.lora_a"]})
    w = wave((4, 4), 9)
    factors = {"0.lora_a": torch.eye(4, dtype=torch.float64), "0.lora_b": torch.zeros_like(w)}
    close(weight(part, trained(part, {"0.weight": w, **factors})), trained(whole, {"0.weight": w})["0.weight"])


def test_scales_and_rates_trade():
    """From B = 0 with a frozen A, (alpha, rate) matters through s^2 rate alone."""
    frozen, fast = {"frozen": ["*.lora_a"]}, {"name": "fedavg", "rule": {"name": "sgd", "lr": 1.2}}
    first = waves(personal=frozen)
    second = waves(Lora(targets=("0",), rank=2, alpha=2.0), method=fast, personal=frozen)
    close(weight(first, trained(first)), weight(second, trained(second)))


# --- runs -------------------------------------------------------------------------------------------------------------
def digits(adapter: Any = None, **more: Any) -> Experiment:
    lora = {"name": "lora", "targets": ["fc1", "fc2"], "rank": 3, "train": ["out.*"]}
    data = {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [16, 12]}, "adapter": adapter or lora},
        "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}, "carry": "keep"},
        "federation": {"clients": 12, "cohort": 5, "rounds": 3, "local": {"steps": 4, "batch": 8}},
        "engine": {"backend": "local", "block": 2, "dtype": "float64"},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }
    return experiment({**data, **more})


def test_rows_and_messages_have_the_factors_alone():
    spec = RunSpec.of("x", digits())
    state, numbers = StateSpec(spec.method(), spec.initial_model()), 3 * (64 + 16) + 3 * (16 + 12) + 12 * 10 + 10
    assert sum(spec.layout.sizes) == numbers
    assert (state.down, state.up) == (8 * numbers, 8 * numbers)
    assert state.kept == 8 * (2 * numbers + 1)  # two moments and a counter
    assert {*spec.frozen} == {f"fc{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}


def test_frozen_tensors_are_built_once(monkeypatch: pytest.MonkeyPatch):
    """Also where they are first asked for one by one, as files alone could give them."""
    spec, calls, real = RunSpec.of("x", digits()), [], Classification.frozen
    monkeypatch.setattr(Classification, "frozen", lambda self, seed: calls.append(seed) or real(self, seed))
    one_by_one, found = spec.frozen_one_by_one, spec.frozen
    assert spec.frozen_facts["tensors"] == [*one_by_one] == [*found]
    assert all(one_by_one[name] is value for name, value in found.items())
    assert len(calls) == 1


def test_a_new_adapter_changes_nothing():
    """The network is the one that is drawn without it, from the same seed."""
    made = digits(federation={"clients": 12, "cohort": 5, "rounds": 1, "local": {"steps": 1, "batch": 8}})
    spec = RunSpec.of("x", made)
    plain = RunSpec.of(
        "x", made.model_copy(update={"workload": {"name": "digits", "model": {"name": "mlp", "hidden": [16, 12]}}})
    )
    p = {**dict(spec.initial_model().items()), **spec.frozen}
    assert all(torch.equal(value, p[name]) for name, value in plain.initial_model().items())
    columns = {name: torch.from_numpy(column[:9]) for name, column in spec.split().test.items()}
    with_adapter, without = (
        spec.workload.report(p, columns),
        plain.workload.report(dict(plain.initial_model().items()), columns),
    )
    assert torch.equal(with_adapter["loss"], without["loss"])


@pytest.mark.long
def test_the_weights_of_a_run_are_adapted_by_another(tmp_path):
    """`weights` takes the model of the first run, but for a last layer of another shape."""
    base = {"name": "digits", "model": {"name": "mlp", "hidden": [16, 12]}}
    before = run(digits().model_copy(update={"workload": base}), tmp_path / "base").model
    lora = {"name": "lora", "targets": ["fc?"], "rank": 2, "weights": str(tmp_path / "base/model.safetensors")}
    after = run(digits(lora), tmp_path / "run").model
    for name, value in before.items():
        assert torch.equal(after[name], value.float().double())
    assert "frozen weights" in (tmp_path / "run/environment.json").read_text()
    save_file({"fc1.weight": torch.zeros(16, 64)}, tmp_path / "part.safetensors")
    with pytest.raises(ConfigError, match=r"weights must be those of this network, got no such tensor for fc1\.bias"):
        run(digits({**lora, "weights": str(tmp_path / "part.safetensors")}))


def test_weights_of_a_file_are_read_one_by_one(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """No network is built for them, unless the file lacks the last layer; their numbers are those that it had."""
    lora = {"name": "lora", "targets": ["fc1"], "rank": 2, "weights": str(tmp_path / "base.safetensors")}
    plain: Any = RunSpec.of("id", digits({"name": "lora", "targets": ["fc1"], "rank": 2})).workload
    tensors = plain.frozen(3)
    save_file(tensors, tmp_path / "base.safetensors")
    spec = RunSpec.of("id", digits(lora))
    workload: Any = spec.workload
    built = initial(workload.build_converted, 5)
    with monkeypatch.context() as patch:
        patch.setattr(type(workload), "build_converted", lambda _: pytest.fail("a network is built"))
        found = spec.frozen
        assert spec.frozen_facts["tensors"] == [*found]
    assert {*found} == {*tensors}
    for name, value in found.items():
        assert torch.equal(value, tensors[name].double())
        assert torch.equal(value, built.get_parameter(name).double())
    save_file({**tensors, "out.weight": torch.zeros(3, 3)}, tmp_path / "base.safetensors")
    drawn = RunSpec.of("id", digits(lora)).frozen
    assert torch.equal(drawn["fc1.weight"], tensors["fc1.weight"].double())
    assert drawn["out.weight"].shape == tensors["out.weight"].shape


@pytest.mark.long
def test_a_run_that_is_resumed_has_the_same_bits(tmp_path):
    with pytest.raises(Interrupted):
        run(digits(), tmp_path / "run", [Watch(r2=interrupt)])
    assert resume(digits(), tmp_path / "run").model_sha256 == run(digits()).model_sha256


@pytest.mark.parametrize(
    ("more", "told"),
    [
        *(
            (
                {"method": method},
                "the compression factors weights that an adapter has factored already, as fc1.weight; leave one of",
            )
            for method in ("fedmud", "fedpara", "fedhm", {"name": "fedavg", "compression": "updates"})
        ),
        (
            {"personal": {"tensors": ["*.lora_b"]}, "evaluate": {"clients": {"own": False}}},
            r"evaluate.clients.own: the server has no model without the factors of clients: fc1\.lora_b, got false "
            r"with personal\.tensors=\['\*\.lora_b'\]; leave it out, so that",
        ),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(more: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=told):
        run(digits(**more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_codes_of_factors_are_sent():
    """The compression coded changes messages, not weights, so that it goes with adapters."""
    method = {"name": "fedavg", "compression": {"name": "coded", "codec": {"name": "linear", "bits": 4}}}
    assert (
        0
        < run(digits(method=method)).rows[-1]["comm/bytes_up"]
        < run(digits(method="fedavg")).rows[-1]["comm/bytes_up"]
    )


def test_nothing_that_is_sent_or_written_has_the_base(tmp_path: Path):
    """A base of 4 MB and 50 clients: what workers get once, what they get for each round, and all files
    of the run are small, but for the model at the end, which has all tensors. What is trained are 8 kB."""
    workload = {"name": "digits", "model": {"name": "mlp", "hidden": [1000, 1000]}, "partition": "iid"}
    lora = {"name": "lora", "targets": "fc2", "rank": 1}
    federation = {"clients": 50, "cohort": 8, "rounds": 1, "local": {"steps": 1, "batch": 4}}
    made = digits(federation=federation, checkpoint={"every": 1}, engine={"backend": "local", "keep_state": True})
    made = made.model_copy(update={"workload": {**workload, "adapter": lora}})
    result = run(made, tmp_path / "run")
    base, trained = (sum(v.nbytes for n, v in result.model.items() if ("lora" in n) is lora) for lora in (False, True))
    assert base > 4e6
    assert trained == 4 * 2 * 1000
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert sizes.pop("model.safetensors") > base
    assert max(sizes.values()) < 1e6
    given = RunSpec.of("x", made, initial_model=result.model)
    assert len(pickle.dumps(given.without_frozen())) < trained + 1e5 < base < len(pickle.dumps(given))
    with driver_here(made.model_copy(update={"checkpoint": digits().checkpoint})) as driver:
        update = driver.planner.update(1, driver.plan_state, driver.visits, lambda *_: np.zeros(0))
        assert sum(len(task.clients) for task in update.tasks) == 8
        sent = pickle.dumps((update.tasks, tensors_of(driver.method.broadcast(driver.server))))
    assert len(sent) < trained + 1e5
