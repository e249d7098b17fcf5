"""Frozen tensors of a narrower type: kept so in memory, cast up where they are used, and refused where they cannot be.

A network with frozen parameters in bfloat16 computes what it does with the same numbers in float32: these are exact.
TOLERANCE: where values are not equal, a bias is added after the product and not in it, in float32: some units of 2^-24
of sums of at most 100 terms, so 1e-5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fedfleet.engine import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.models.gpt import Gpt
from fedfleet.workloads.models.narrow import HALF, Narrow, NarrowLinear
from fedfleet.workloads.stateless import Stateless, parameters_of

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


class Kinds(nn.Module):
    """Layers whose own parameters are read by them or by the module around them: (B, T) tokens -> (B, T, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # reads the weight of its own linear layer
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.shift = nn.ParameterList([nn.Parameter(torch.randn(8))])
        self.out, self.trained = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x)) + self.shift[0]
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.convolution(h.transpose(1, 2)).transpose(1, 2)
        return F.linear(self.trained(self.out(h)), self.embed.weight)


def kinds() -> nn.Module:
    network = Kinds()
    for name, value in network.named_parameters():
        value.requires_grad_(name.startswith("trained"))
    return network


def adapted(fused: bool = False) -> nn.Module:
    network = Gpt(width=8, depth=1, heads=2, tied=not fused).build((5,), 7)
    Lora(targets=("*.q", "*.up", "embed.tokens"), rank=2).adapt(network)
    return network


def parametrised() -> nn.Module:
    """Layers whose weights are no parameters of their own."""
    layers = weight_norm(nn.Embedding(7, 8)), weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


NETWORKS = {"kinds": kinds, "adapted": adapted, "head": lambda: adapted(True), "parametrised": parametrised}
TOKENS = torch.randint(0, 7, (2, 3, 5), generator=torch.Generator().manual_seed(1))


def divided(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(trained tensors, frozen ones in bfloat16, the same numbers in float32)."""
    found = parameters_of(network)
    generator = torch.Generator().manual_seed(2)
    trained = {
        name: value.detach() + 0.1 * torch.randn(value.shape, generator=generator)
        for name, (value, _) in found.items()
        if value.requires_grad
    }
    half = {name: value.detach().bfloat16() for name, (value, _) in found.items() if not value.requires_grad}
    return trained, half, {name: value.float() for name, value in half.items()}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_computes_with_the_same_numbers(kind: str):
    """Output and gradients, for a client alone and for two at once; nothing stays behind in the narrow type."""
    trained, half, single = divided(initial(NETWORKS[kind], 0))
    assert half
    key = torch.tensor(3)
    outcomes = []
    for frozen in (single, half):
        network = Stateless(initial(NETWORKS[kind], 0))
        leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
        out = network({**leaves, **frozen}, TOKENS[0], key)
        assert out.dtype == torch.float32
        alone = torch.autograd.grad(out.square().sum(), [*leaves.values()])
        points = {name: torch.stack([value, 1.5 * value]).requires_grad_() for name, value in trained.items()}
        together = vmap(lambda own, x, network=network, frozen=frozen: network({**own, **frozen}, x, key))(
            points, TOKENS
        )
        of_both = torch.autograd.grad(together.square().sum(), [*points.values()])
        narrow = [part for part in network.module.modules() if isinstance(part, Narrow)]
        assert bool(narrow) == (frozen is half)
        outcomes.append([out, *alone, together, *of_both])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)


def test_weights_that_are_kept_for_the_backward_pass_are_narrow():
    """Otherwise a base would be there in both types after all."""
    kept: list[Tensor] = []
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for name, value in network.named_parameters():
        value.requires_grad_(name.startswith("0"))
    trained, half, _ = divided(network)
    leaves = {name: value.requires_grad_() for name, value in trained.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        Stateless(network)({**leaves, **half}, torch.ones(1, 8))
    assert type(network[1]) is NarrowLinear
    assert half["1.weight"].data_ptr() in {value.data_ptr() for value in kept}
    assert not any(value.shape == (8, 8) and value.dtype == torch.float32 and not value.requires_grad for value in kept)


def test_second_derivatives_pass_through_a_narrow_weight():
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    for name, value in network.named_parameters():
        value.requires_grad_(name.startswith("0"))
    trained, half, single = divided(network)
    found = []
    for frozen in (single, half):
        function, weight = Stateless(network), trained["0.weight"].clone().requires_grad_()
        out = function({"0.weight": weight, "0.bias": trained["0.bias"], **frozen}, torch.ones(3, 4)).sum()
        (first,) = torch.autograd.grad(out, weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(found[1], found[0], **CLOSE)


# --- runs -------------------------------------------------------------------------------------------------------------
def texts(folder: Path, engine: Any = None, adapter: Any = None, **more: Any) -> Experiment:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("It was the best of times, it was the worst of times. " * 20)
    workload = {
        "name": "characters",
        "path": str(text),
        "length": 8,
        "model": {"name": "gpt", "width": 16, "depth": 1, "heads": 2},
        "adapter": adapter or {"name": "lora", "targets": ["*.q", "*.v", "*.up"], "rank": 2},
    }
    data = {
        "workload": workload,
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
        "federation": {"clients": 4, "cohort": 3, "rounds": 2, "local": {"steps": 2, "batch": 4}},
        "engine": {"backend": "local", **(engine or {})},
        "evaluate": {"every": 1},
        "tracking": {"uri": "none"},
    }
    return experiment({**data, **more})


def rounded(asked: Experiment) -> dict[str, Tensor]:
    """The model before round 1 whose frozen tensors have been rounded to bfloat16."""
    spec = RunSpec.of("id", asked)
    return {**dict(spec.initial_model().items()), **{n: v.bfloat16().float() for n, v in spec.frozen.items()}}


@pytest.mark.parametrize("block", [1, 3])
def test_a_run_with_a_narrow_base_is_one_with_its_numbers(block: int, tmp_path: Path):
    """It trains and evaluates as with a base that was rounded before; frozen.json says what is kept."""
    plain = texts(tmp_path, {"block": block})
    before = run(plain, tmp_path / "plain", initial_model=rounded(plain))
    after = run(texts(tmp_path, {"block": block, "base": "bfloat16"}), tmp_path / "half")
    for name, value in before.model.items():
        torch.testing.assert_close(after.model[name].float(), value, **CLOSE)
    for one, other in zip(before.rows, after.rows, strict=True):
        assert other["eval/loss"] == pytest.approx(one["eval/loss"], rel=1e-5)
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
    single, half = (json.loads((tmp_path / name / "frozen.json").read_text()) for name in ("plain", "half"))
    assert (single["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert half["bytes"] * 2 == single["bytes"] > 0
    assert {after.model[name].dtype for name in half["tensors"]} == {torch.bfloat16}


def test_merged_weights_keep_changes_that_16_bits_would_round_away(tmp_path: Path):
    asked = texts(tmp_path, {"base": "bfloat16"})
    network = RunSpec.of("id", asked).workload.outline
    assert isinstance(network, nn.Module)
    result = run(asked)
    lora = Lora(targets=("*.q", "*.v", "*.up"), rank=2)
    merged = lora.merged(network, result.model)
    pairs = lora.pairs(network)
    for pair in pairs:
        weight = result.model[pair.weight]
        change = pair.change({name: result.model[name].double() for name in (pair.a, pair.b)}, weight.shape)
        assert torch.equal(merged[pair.weight], (weight.double() + change).float())
        assert not torch.equal(merged[pair.weight], merged[pair.weight].bfloat16().float())
    assert {merged[name].dtype for name in merged.keys() - {pair.weight for pair in pairs}} == {torch.bfloat16}


def test_a_workload_around_another_one_has_its_base_unless_it_computes_with_it(tmp_path: Path):
    """Flipped gradients are those of the inner losses, and a penalty reads all tensors."""
    inner = texts(tmp_path).workload
    flipped = {"name": "gradients_flipped", "of": inner, "clients": [0]}
    result = run(texts(tmp_path, {"base": "bfloat16"}, workload=flipped), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "frozen.json").read_text())["dtype"] == "bfloat16"
    assert result.model["embed.tokens.weight"].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"engine\.base: is for frozen tensors that a network casts up, and this"):
        run(texts(tmp_path, {"base": "bfloat16"}, workload={"name": "regularised", "of": inner}))


def test_a_run_in_bfloat16_keeps_its_base_so(tmp_path: Path):
    """Its first losses are those of float32 to 1e-2: bfloat16 has 8 bits, and a loss is a mean over many places."""
    found = {}
    for precision in ("same", "bfloat16"):
        asked = texts(tmp_path, {"precision": precision})
        found[precision] = run(asked, tmp_path / precision).rows
        assert {value.dtype for value in RunSpec.of("id", asked).frozen.values()} == {
            torch.float32 if precision == "same" else torch.bfloat16
        }
    first, half = (found[precision][0] for precision in ("same", "bfloat16"))
    for column in ("train/loss", "eval/loss"):
        assert half[column] == pytest.approx(first[column], rel=1e-2)
        assert half[column] != first[column]


@pytest.mark.long
def test_workers_share_a_narrow_base(tmp_path: Path, ray_here: None):
    """What they read from the object store has the bits that the driver had, and a run on Ray is one in process."""
    from fedfleet.engine.backends.ray.arrow_columns import put, shared

    there = {str(dtype): torch.linspace(-3, 3, 7).to(dtype) for dtype in (*HALF, torch.float32, torch.float64)} | {
        "whole": torch.arange(-3, 4, dtype=torch.int16),
        "bits": torch.tensor([True, False]),
    }
    for name, value in shared(put(there)).items():
        assert value.dtype == there[name].dtype
        assert torch.equal(value, there[name])
    engine = {"base": "bfloat16", "block": 3, "kernels": "torch"}
    here = run(texts(tmp_path, engine))
    on_ray = run(texts(tmp_path, {**engine, "backend": "ray", "workers": 2}))
    assert here.model_sha256 == on_ray.model_sha256


@pytest.mark.parametrize(
    ("engine", "more", "told"),
    [
        (
            {"base": "bfloat16", "precision": "bfloat16"},
            {},
            r"engine.base: is for same; with bfloat16, frozen tensors are in bfloat16",
        ),
        (
            {"base": "float16"},
            {"adapter": {"name": "lora", "targets": ["*.q"], "rank": 2, "train": ["norm.*"]}},
            r"engine.base: float16 has too few digits for weights that change, and these do.*norm.weight",
        ),
        (
            {"base": "float16"},
            {"method": "fedex_lora"},
            r"engine.base: float16 has too few digits for weights that change, and these do.*q.weight",
        ),
        (
            {"base": "bfloat16"},
            {"workload": {"name": "digits", "model": {"name": "mlp", "hidden": [4]}}},
            r"engine.base: is for frozen tensors that a network casts up, and this workload has none",
        ),
        (
            {"base": "bfloat16"},
            {"personal": {"frozen": ["*.q.lora_a"]}},
            r"engine.base: is for tensors that an adapter or the model freezes",
        ),
    ],
    ids=["bfloat16 passes", "own tensors", "server's changes", "nothing frozen", "frozen by the run"],
)
def test_what_has_no_base_of_another_type(engine: dict, more: dict, told: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=told):
        run(texts(tmp_path, engine, **more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_base_in_float16_is_trained_around(tmp_path: Path):
    asked = texts(tmp_path, {"base": "float16"})
    assert {value.dtype for value in RunSpec.of("id", asked).frozen.values()} == {torch.float16}
    result = run(asked)
    assert result.rows[-1]["train/loss"] < result.rows[0]["train/loss"]
