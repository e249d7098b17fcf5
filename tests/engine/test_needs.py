"""Runs that cannot fit into this machine are refused before anything is built, with the sizes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.local import LocalMethod
from fedfleet.algorithms.parts.rules import adamw
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.cohorts.samplers import sample
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.method_form.state_spec import StateSpec, byte_count
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.needs import Needs, check_base, check_client, different_clients, warning
from fedfleet.engine.workload.model import physical_memory
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.stateless import parameters_of

SIZES = json.loads((Path(__file__).parents[1] / "reference/adapters.json").read_text())["sizes"]
"""Numbers and bytes of published models, by arithmetic of their shapes."""


def made(hidden: list[int], adapter: Any = None, **more: Any) -> Experiment:
    workload = {"name": "digits", "model": {"name": "mlp", "hidden": hidden}, "adapter": adapter}
    data = {
        "workload": workload,
        "method": {"name": "fedavg", "rule": "adamw", "carry": "keep"},
        "federation": {"clients": 4, "cohort": 2, "rounds": 2, "local": {"steps": 1, "batch": 8}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    return experiment({**data, **more})


def refused(asked: Experiment, folder: Path) -> str:
    began = time.process_time()
    with pytest.raises(ConfigError) as error:
        run(asked, folder / "run")
    assert time.process_time() - began < 2
    assert not (folder / "run").exists()
    return str(error.value)


def test_one_client_that_does_not_fit(tmp_path: Path):
    """A model of 0.6 of the memory, whose gradient and moments do not fit."""
    told = refused(made([int(0.6 * physical_memory() / 4 / 75)]), tmp_path)
    p = f"{0.6 * physical_memory() / 1e9:.0f}"[:1]
    assert told.startswith("workload: one client of this model needs ")
    assert f"({p}" in told
    assert told.endswith("; train adapters (workload.adapter), give engine.device, or a smaller model")


def test_a_client_that_hardly_fits_is_told_of():
    """From 80 % of the free memory on."""
    needs = Needs(base=3_000_000_000, held=0, model=1_000_000_000, at_work=3_000_000_000, row=0)
    assert warning(needs, 8_750_000_001) == ""
    told = warning(needs, 8_750_000_000)
    assert told == (
        "memory: the frozen tensors and one client need 7.0 GB, 80% of the 8.8 GB that are free, and activations come "
        "on top"
    )


def test_rows_that_do_not_fit_on_the_disk(tmp_path: Path):
    """A million states of 2 * 750,010 numbers and a counter."""
    federation = {"clients": 10**6, "cohort": 10**6, "rounds": 2, "local": {"steps": 1, "batch": 8}}
    told = refused(made([10_000], federation=federation), tmp_path)
    assert told.startswith("federation.clients: 1,000,000 clients keep 6.0 MB each between rounds, 6,000.1 GB, ")
    assert told.endswith("give carry: reset, train adapters (workload.adapter), or set engine.store to a larger disk")


@pytest.mark.parametrize(
    ("sampler", "cohort", "rounds", "expected"),
    [
        ("uniform", 20, 1, 20),
        ("uniform", 20, 5, 67),  # 100 (1 - 0.8^5) = 67.2
        ("binomial", 20, 5, 67),
        ("uniform", 100, 5, 100),
        ("cyclic", 20, 4, 80),
        ("cyclic", 20, 9, 100),
    ],
)
def test_how_many_different_clients_take_part(sampler: str, cohort: int, rounds: int, expected: int):
    plan = {"clients": 100, "cohort": cohort, "rounds": rounds, "sampler": sampler, "local": {"steps": 1, "batch": 8}}
    federation = made([4], federation=plan).federation
    assert different_clients(federation) == expected
    if sampler == "uniform":  # three deviations of a number of that many clients that are drawn or not
        drawn = {int(i) for number in range(1, rounds + 1) for i in sample(0, number, 100, cohort)}
        assert abs(len(drawn) - expected) <= 15


def test_frozen_tensors_and_weights_that_a_method_holds():
    """Their sizes alone decide, so that sizes are given which no machine has."""
    lora = {"name": "lora", "targets": ["fc1"], "rank": 2}
    spec = RunSpec.of("x", made([4], lora, method="fedex_lora", engine={"backend": "ray"}))
    with pytest.raises(ConfigError, match=r"frozen tensors need 90,000\.0 GB of shared memory, /dev/shm has"):
        check_base(spec, Needs(9 * 10**13, 0, 1, 1, 0))
    with pytest.raises(
        ConfigError, match=r"GB free; give engine.base: bfloat16, make it larger, give engine.backend: l"
    ):
        check_base(spec, Needs(9 * 10**13, 0, 1, 1, 0))
    half = RunSpec.of("x", made([4], lora, engine={"backend": "ray", "base": "bfloat16"}))
    with pytest.raises(ConfigError, match=r"GB free; make it larger, give engine.backend: local, or choose a smaller"):
        check_base(half, Needs(9 * 10**13, 0, 1, 1, 0))
    with pytest.raises(ConfigError, match=r"fedex_lora holds 500,000\.0 GB of weights and sums beside the frozen"):
        check_client(spec, Needs(0, 10**14, 1, 1, 0))


def test_needs_are_those_of_the_run_that_is_built():
    lora = {"name": "lora", "targets": ["fc1", "fc2"], "rank": 3, "train": ["out.*"]}
    for method in ({"name": "fedavg", "rule": "adamw", "carry": "keep"}, "flora", "diloco"):
        spec = RunSpec.of("x", made([16, 12], lora, method=method))
        x = spec.initial_model()
        state, found = StateSpec(spec.method(), x), Needs.of(spec)
        assert found is not None
        assert found.base == byte_count(list(spec.frozen.values()))
        half = Needs.of(RunSpec.of("x", made([16, 12], lora, method=method, engine={"base": "bfloat16"})))
        assert half is not None
        assert half.base * 2 == found.base
        assert found.held == (4 * (16 * 64 + 12 * 16) if method == "flora" else 0)
        assert found.model == byte_count(x) - found.held
        assert (found.at_work, found.row) == (state.at_work, byte_count(state.client))


CENTRED = """
from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.local import LocalMethod
from fedfleet.algorithms.parts.rules import adamw
from fedfleet.algorithms.parts.servers import Mean

class Centred(LocalMethod):
    def server_init(self, x):
        return super().server_init(x - float(x.flat.mean()))

def centred():
    "FedAvg with AdamW, from a model of mean 0"
    return Centred(adamw(), Plain(), Mean(), carry="keep")

METHODS = {"centred": centred}
"""


def test_a_method_that_cannot_be_tried_without_numbers_is_not_refused(tmp_path):
    (tmp_path / "centred.py").write_text(CENTRED)
    found = Needs.of(RunSpec.of("x", made([4], plugins=[str(tmp_path / "centred.py")], method="centred")))
    assert found is not None
    assert (found.at_work, found.row) == (found.model, 0)


class Block(nn.Module):
    """A layer of Llama 3.2 with 1 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False)
        self.k_proj, self.v_proj = nn.Linear(2048, 512, bias=False), nn.Linear(2048, 512, bias=False)
        self.up, self.gate = nn.Linear(2048, 8192, bias=False), nn.Linear(2048, 8192, bias=False)
        self.down = nn.Linear(8192, 2048, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.empty(2048)) for _ in range(2)])


def test_the_arithmetic_of_a_published_model():
    """Sizes of the guide: a model of 1.24 billion numbers on the device meta."""
    linear = ("layers.*.*_proj", "layers.*.up", "layers.*.gate", "layers.*.down")
    for targets, numbers in (("auto", SIZES["lora_r8_qv"]), (linear, SIZES["lora_r8_all_linear"])):
        with torch.device("meta"):
            layers, norm = nn.ModuleList(Block() for _ in range(16)), nn.RMSNorm(2048)
            network = nn.ModuleDict({"embed": nn.Embedding(128_256, 2048), "layers": layers, "norm": norm})
        whole = sum(value.numel() for value in network.parameters())
        assert whole == SIZES["llama_3.2_1b_numbers"]
        assert 4 * whole == SIZES["base_float32_bytes"]
        Lora(targets=targets, rank=8).adapt(network)
        x = Tree.of({n: v.detach() for n, (v, _) in parameters_of(network).items() if v.requires_grad})
        assert x.flat.numel() == numbers
        spec = StateSpec(LocalMethod(adamw(), Plain(), Mean(), "keep"), x)
        if targets == "auto":
            assert byte_count(spec.client) == SIZES["row_adamw_qv_bytes"]
            assert spec.sum_bytes - 8 == SIZES["sum_float64_qv_bytes"]
