"""Adapters of clients with different ranks: rounds of a reference, padding, bytes, what is kept, and refusals."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedfleet import fork
from fedfleet.algorithms.contract import Known, Viewer
from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.fedex_lora import fedex_lora
from fedfleet.algorithms.parts.exact_mean import OfAdapters
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.engine import resume, run
from fedfleet.engine.clients.local_training import OwnViews
from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.show import traffic
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.workload import Model
from tests.engine.setups import driver_here, next_round, states_of
from tests.engine.test_adapters import SHARES, Waves, digits, trained, waves
from tests.engine.test_exact_mean import Alone, Waved
from tests.faults.runs import Watch, interrupt
from tests.reference.adapter_ranks import Ranks
from tests.workloads.test_adapters import close, wave

W, A, B = wave((3, 4), 9), wave((2, 4), 7, 0.5), wave((3, 2), 3)
START = {"0.weight": W, "0.lora_a": A, "0.lora_b": B}
METHODS = {
    "fedavg": {"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}},
    "ffa": {"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}, "personal": {"frozen": ["*.lora_a"]}},
    "fedsa": {"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}, "personal": {"tensors": ["*.lora_b"]}},
    "flora": {"method": OfAdapters(Waved(Sgd(0.1), Plain(), Mean()), "flora")},
    "fedex": {"method": fedex_lora(Sgd(0.1))},
}
ALPHAS = {"one-scale": ("2r", (2.0, 2.0)), "two-scales": (4.0, (2.0, 4.0))}


def lora(**settings: Any) -> Lora:
    return Lora(**{"targets": ("0",), "ranks": (2, 1), "alpha": "2r", **settings})


def reference(scales: tuple[float, float]) -> Ranks:
    rows = [(wave((5, 4), i, 1.0).numpy(), wave((5, 3), 5 + i, 1.0).numpy()) for i in range(2)]
    shares = [share / sum(SHARES) for share in SHARES]
    return Ranks(rows, (2, 1), scales, shares, 0.1, 4, lambda t: (wave((2, 4), 6 + t, 0.5).numpy(), np.zeros((3, 2))))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_factors_of_their_own_size(name: str, block: int, alpha: str):
    """Two clients of ranks 2 and 1. TOLERANCE of `close`: 1e-9, float64, some hundred operations on numbers near 1."""
    given, scales = ALPHAS[alpha]
    engine = {"backend": "local", "dtype": "float64", "block": block, "kernels": "torch"}
    made = waves(lora(alpha=given), engine=engine, **METHODS[name])
    slow, (w, a, b) = reference(scales), (value.numpy() for value in (W, A, B))
    with driver_here(made, initial_model=START) as driver:
        for number in (1, 2):
            next_round(driver)
            w, a, b = slow.round(name, number, w, a, b)
            p = {**START, **dict(driver.tensors().items())}
            close(p["0.weight"], w)
            close(p["0.lora_a"], a)
            close(p["0.lora_b"], b)
        for client, own in enumerate(states_of(driver) if name == "fedsa" else ()):
            rank = 2 - client
            close(own.personal["0.lora_b"][:, :rank], slow.own_b[client])
            assert not own.personal["0.lora_b"][:, rank:].any()


def one_client(adapter: Lora, rule: Any) -> Experiment:
    federation = {"clients": 1, "cohort": 1, "rounds": 3, "local": {"steps": 4, "batch": 5}}
    workload = Waves(partition=Alone(), adapter=adapter)
    return waves(workload=workload, method={"name": "fedavg", "rule": rule, "carry": "keep"}, federation=federation)


RULES = [
    {"name": "momentum", "lr": 0.1, "nesterov": True},
    {"name": "adamw", "lr": 0.03, "weight_decay": 0.2},
]


@pytest.mark.parametrize("alpha", ["2r", 4.0])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
def test_padding_changes_nothing(rule: Any, alpha: Any):
    """A client of rank 1 among factors of rank 2 is one of rank 1, and its further row and column are 0 to the bit.
    TOLERANCE of `close`: sums of float64 in another order."""
    padded = trained(one_client(lora(ranks=(1, 2), alpha=alpha), rule), START)
    small = {"0.weight": W, "0.lora_a": A[:1], "0.lora_b": B[:, :1]}
    alone = trained(one_client(Lora(targets=("0",), rank=1, alpha=alpha), rule), small)
    close(padded["0.lora_a"][:1], alone["0.lora_a"])
    close(padded["0.lora_b"][:, :1], alone["0.lora_b"])
    assert not padded["0.lora_a"][1:].any()
    assert not padded["0.lora_b"][:, 1:].any()


def test_muon_keeps_what_is_zero():
    """Its steps depend on the shapes of matrices, so that only the zeros are those of a smaller rank."""
    p = trained(one_client(lora(ranks=(1, 2)), {"name": "muon", "lr": 0.1}), START)
    assert not p["0.lora_a"][1:].any()
    assert not p["0.lora_b"][:, 1:].any()
    assert not torch.equal(p["0.lora_a"][:1], A[:1])


def test_equal_ranks_are_one_rank():
    """To the last bits: x - x is added and taken away. TOLERANCE of `close`: float64."""
    for name in ("fedavg", "fedex"):
        same, one = (
            trained(waves(each, **METHODS[name]), START) for each in (lora(ranks=(2,)), lora(rank=2, ranks=()))
        )
        for tensor, value in one.items():
            close(same[tensor], value)


# --- runs -------------------------------------------------------------------------------------------------------------
RANKS = [6, 3, 2, 1]
SPEC = {"name": "lora", "targets": ["fc1", "fc2"], "ranks": RANKS, "alpha": 8, "train": ["out.*"]}
ADAMW = {"name": "adamw", "lr": 0.01}
PER_RANK, REST = (16 + 64, 12 + 16), 12 * 10 + 10
"""Numbers of the factors of the targets for each rank, and of the last layer, which is trained as it is."""
RUNS = {
    "fedavg": {"method": {"name": "fedavg", "rule": ADAMW, "carry": "keep"}},
    "ffa": {"method": {"name": "fedavg", "rule": ADAMW}, "personal": {"frozen": ["*.lora_a"]}},
    "fedsa": {"method": {"name": "fedavg", "rule": ADAMW}, "personal": {"tensors": ["*.lora_b"]}},
    "flora": {"method": {"name": "flora", "rule": ADAMW}},
    "fedex_lora": {"method": {"name": "fedex_lora", "rule": ADAMW, "carry": "average"}},
}


def made(name: str, **more: Any) -> Experiment:
    return digits(SPEC, **{**RUNS[name], **more})


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_those_of_the_ranks(name: str):
    """Clients send and receive factors of their own rank, and those of the last cohort of its ranks."""
    result, each = run(made(name)), {"ffa": 16 + 12, "fedsa": 64 + 16}.get(name, sum(PER_RANK))
    ranks = [round(5 * row["client/rank"]) for row in result.rows]  # their sum over the cohort
    assert len({*ranks}) > 1
    for number, row in enumerate(result.rows):
        own = each * ranks[number] + 5 * REST
        moments = 2 * own + 5 if name == "fedex_lora" else 0  # of AdamW, and its counter
        assert row["comm/bytes_up"] == 8 * (own + moments)
        down = 5 * REST if name == "flora" else own + moments
        if number and name in ("flora", "fedex_lora"):
            dense = (16 * 64, 12 * 16)
            down += 5 * sum(min(mn, ranks[number - 1] * one) for mn, one in zip(dense, PER_RANK, strict=True))
        assert row["comm/bytes_down"] == 8 * down


@dataclass(frozen=True)
class Normalised(Model):
    """The network of `RUNS` with BatchNorm behind its first layer."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        layers = {"flat": nn.Flatten(), "fc1": nn.Linear(64, 16), "norm": nn.BatchNorm1d(16, affine=False)}
        return nn.Sequential(OrderedDict(**layers, fc2=nn.Linear(16, 12), relu=nn.ReLU(), out=nn.Linear(12, classes)))


@pytest.mark.parametrize("name", ["fedavg", "fedsa", "flora"])
def test_running_statistics_go_along_and_are_counted_by_themselves(name: str):
    workload, own = Digits(Normalised(), adapter=Lora(("fc1", "fc2"), ranks=(6, 3, 2, 1), train=("out.*",))), {}
    if name == "fedsa":
        own = {"evaluate": {"held_out": 0.2, "clients": {"own": True, "statistics": "training"}}}
    rows = run(made(name, workload=workload, **own)).rows
    each = 64 + 16 if name == "fedsa" else sum(PER_RANK)
    for row in rows:
        assert row["comm/bytes_up"] == 8 * (each * round(5 * row["client/rank"]) + 5 * REST)
        assert row["comm/bytes_buffers_up"] == 8 * 5 * 2 * 16


def test_weights_beside_factors_are_not_copied_for_clients():
    """A method's server changes them, and clients have them already."""
    around: Any = RunSpec.of("x", made("flora")).method()
    public = around.broadcast(around.server_init(RunSpec.of("x", made("flora")).initial_model()))
    seen = around.view(public, Viewer(torch.tensor(3), torch.tensor(1.0)), torch.zeros(0))
    cut = around.cut(seen.whole, seen)
    assert cut.weights.value is public.weights.value
    assert not cut.x["fc1.lora_a"][1:].any()
    assert cut.x["fc1.lora_a"][0].any()


def test_show_has_the_mean_of_the_clients():
    spec = RunSpec.of("x", made("fedavg"))
    assert f"up {8 * (sum(PER_RANK) * 3 + REST):,} B" in traffic(spec, spec.initial_model())


def test_what_clients_know_is_in_memory_once():
    known = torch.ones(3)
    views = [(Known(known), torch.tensor(float(number))) for number in range(4)]
    state = OwnViews.of(views).state
    assert state[0].value.data_ptr() == known.data_ptr()
    assert state[0].value.shape == (4, 3)
    assert state[1].tolist() == [0, 1, 2, 3]
    assert OwnViews.of([(Known(known + number),) for number in range(2)]).state[0].value.tolist() == [[1] * 3, [2] * 3]


@pytest.mark.long
def test_runs_go_on_to_the_same_bits(tmp_path: Path):
    """Also their bytes, which depend on the cohort of the round before."""
    engine = {"backend": "local", "block": 2, "dtype": "float64", "keep_state": True}
    flora = made("flora", engine=engine, checkpoint={"every": 1, "keep": 3})
    whole = run(flora, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(flora, tmp_path / "run", [Watch(r2=interrupt)])
    resumed = resume(flora, tmp_path / "run")
    assert resumed.model_sha256 == whole.model_sha256
    columns = ("comm/bytes_down", "comm/bytes_up")
    assert [[row[key] for key in columns] for row in resumed.rows] == [
        [row[key] for key in columns] for row in whole.rows
    ]
    assert fork(whole, 2, out=tmp_path / "fork").model_sha256 == whole.model_sha256


def test_models_of_clients_have_their_ranks(tmp_path: Path):
    """The network has the scale of rank 6, 8 / 6; a client of rank 3 has 8 / 3, so that its B counts twice."""
    engine = {"backend": "local", "block": 2, "dtype": "float64", "keep_state": True}
    federation = {"clients": 12, "cohort": 12, "rounds": 1, "local": {"steps": 4, "batch": 8}}
    result = run(made("fedsa", engine=engine, federation=federation), tmp_path / "run")
    model, server = result.client_model(1), result.model
    (state,) = [own for client, own in enumerate(states_in(result)) if client == 1]
    assert torch.equal(model["fc1.lora_a"][:3], server["fc1.lora_a"][:3])
    assert not model["fc1.lora_a"][3:].any()
    torch.testing.assert_close(model["fc1.lora_b"], 2 * state["fc1.lora_b"], rtol=1e-15, atol=0)


def states_in(result: Any) -> list[dict[str, Tensor]]:
    """The personal tensors of all clients, as they are kept."""
    states = result.client_states()
    own = [states._row_files.read_one(int(row)) for row in states._snapshot.row]
    return [dict(each.personal.items()) for each in own]


REFUSED = [
    ({"method": "scaffold"}, r"workload.adapter.ranks: does not go with scaffold, because its clients keep something"),
    ({"method": "ditto"}, r"workload.adapter.ranks: does not go with ditto, because its clients do more than"),
    (
        {"method": "fedavg", "privacy": {"clip": 1.0, "noise": 1.0, "delta": 0.01}},
        "fedavg has no private form: messages have minus the server's factors",
    ),
    (
        {"method": {"name": "fedavg", "compression": {"name": "coded", "codec": "sign"}}},
        "workload.adapter.ranks: does not go with method.compression, whose codes have one size for all clients; leave",
    ),
    ({"systems": {}}, "workload.adapter.ranks: the virtual clock has one size of messages for all clients"),
    (
        {"evaluate": {"clients": {"adapt": {"steps": 2}}}},
        "workload.adapter.ranks: would train with one rank for all",
    ),
    ({"adapter": {**SPEC, "rank": 4}}, r"give rank or ranks, got rank=4 with ranks=\[6, 3, 2, 1\]; leave rank out"),
    ({"adapter": {**SPEC, "ranks": [2, 0]}}, r"ranks must be 1 or more, got ranks=\[2, 0\]; raise them"),
    ({"adapter": {**SPEC, "alpha": "2x"}}, "alpha must be a number, or as 2r a multiple of the rank, got alpha='2x'"),
    (
        {"adapter": {**SPEC, "ranks": [2, 20]}},
        r"ranks: 1 <= rank <= 16 must hold for fc1 \(16 x 64\), got 20; lower ranks, or leave the module out",
    ),
]


@pytest.mark.parametrize(("more", "told"), REFUSED)
def test_what_has_no_meaning_is_refused(more: dict[str, Any], told: str, tmp_path: Path):
    adapter = more.pop("adapter", SPEC)
    with pytest.raises(ConfigError, match=told):
        run(digits(adapter, **more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_exported_adapter_has_the_largest_rank():
    """And its scale: the factors of clients with fewer rows are parts of the same ones."""
    spec = RunSpec.of("x", digits({**SPEC, "alpha": "2r", "train": []}))
    p = {**dict(spec.initial_model().items()), **spec.frozen}
    workload: Any = spec.workload
    written = workload.adapter.written(workload.outline, p)
    config = written["adapter_config.json"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (6, 12, False)
    assert written["adapter_model.safetensors"]["base_model.model.fc1.lora_A.weight"].shape == (6, 64)
