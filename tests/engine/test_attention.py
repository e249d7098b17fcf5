"""Attention in one compiled call: values and gradients are those of torch's operations, for one client and for a block,
and runs take it only after a proof.

TOLERANCE: float32 sums in another order, relative to the largest entry, as in test_kernels.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedfleet.engine import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.kernels import attention
from fedfleet.engine.kernels.attention import OneCallAttention
from fedfleet.engine.planning import execution_plan
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.models.attention import attended

from .test_kernels import apart, drawn, gradients

TOLERANCE = 1e-5
SIZES = [(2, 1, 1, 3), (2, 2, 7, 5), (3, 1, 37, 16), (2, 4, 64, 32), (2, 3, 100, 24), (1, 2, 130, 64)]
"""(sequences, heads, places, width): odd sizes, whole vectors, more places than a tile has."""

pytestmark = pytest.mark.usefixtures("own_kernels")


def causal(places: int) -> Tensor:
    return torch.ones(places, places, dtype=torch.bool).triu(1)


def scattered(*shape: int) -> Tensor:
    """Masks (…, T, T) in which every place sees itself, and about half of the others."""
    return (drawn(*shape) > 0) & ~torch.eye(shape[-1], dtype=torch.bool)


def first_alone(places: int) -> Tensor:
    """The mask in which every place sees the first one, so that nobody sees the others."""
    return (torch.arange(places) > 0).expand(places, places)


def definition(*given: Tensor) -> Tensor:
    """(B, T, H d) from q, k, v (B, T, H, d) and what is unseen, head by head and place by place, in float64."""
    q, k, v = (each.double() for each in given[:3])
    unseen = given[3]
    sequences, places, heads, width = q.shape
    found = [
        torch.softmax(k[n, seen, h] @ q[n, i, h] / math.sqrt(width), 0) @ v[n, seen, h]
        for n in range(sequences)
        for i in range(places)
        for h in range(heads)
        for seen in [~(unseen[n, 0, i] if unseen.ndim == 4 else unseen[i])]
    ]
    return torch.stack(found).view(sequences, places, heads * width)


def of_projections(*given: Tensor, drop: nn.Module = nn.Identity()) -> Tensor:
    """What a layer gets from q, k, v (B, T, H, d) and what is unseen."""
    q, k, v = (each.transpose(1, 2) for each in given[:3])
    return attended(q, k, v, given[3], drop)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the compiled functions that have been called."""
    found, real = list[str](), attention.call
    monkeypatch.setattr(attention, "call", lambda name, *given: (found.append(name), real(name, *given)))
    return found


@pytest.mark.parametrize("mask", ["causal", "first alone", "one for all", "one each"])
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_is_the_definition(sizes: tuple[int, ...], mask: str, calls: list[str]):
    sequences, heads, places, width = sizes
    tensors = [drawn(sequences, places, heads, width + i)[..., :width] for i in range(3)]
    masks = {
        "causal": causal(places),
        "first alone": first_alone(places),
        "one for all": scattered(places, places),
        "one each": scattered(sequences, 1, places, places),
    }
    expected = gradients(lambda *given: definition(*given, masks[mask]), *tensors)
    plain = gradients(lambda *given: of_projections(*given, masks[mask]), *tensors)
    with OneCallAttention().around_losses():
        found = gradients(lambda *given: of_projections(*given, masks[mask]), *tensors)
    assert calls == ["attention", "attention_back"]
    for own, torchs, value in zip(found, plain, expected, strict=True):
        assert own.shape == value.shape
        assert apart(torchs, value) < TOLERANCE
        assert apart(own, value) < TOLERANCE


@pytest.mark.parametrize("shared", ["mask", "mask and keys", "nothing"])
def test_a_block_is_its_clients(shared: str, calls: list[str]):
    """Keys that clients share are those of a frozen layer whose inputs are shared. No gradient in keys is asked for, as
    in the first layer of a network with adapters."""
    q, k, v = drawn(3, 2, 20, 2, 8), drawn(3, 2, 20, 2, 9)[..., :8], drawn(3, 2, 20, 2, 10)[..., 2:]
    k, unseen = (k[0] if shared == "mask and keys" else k), causal(20)
    if shared == "nothing":
        unseen = scattered(3, 2, 1, 20, 20)
    leaves = [each.clone().requires_grad_(each is not k) for each in (q, k, v)]
    dims = (0, 0 if k.ndim == 5 else None, 0, 0 if unseen.ndim == 5 else None)
    with OneCallAttention().around_losses():
        y = vmap(of_projections, dims)(*leaves, unseen)
        found = [y, *torch.autograd.grad(y.square().sum(), [leaves[0], leaves[2]])]
    assert calls == ["attention", "attention_back"]
    for client in range(3):
        own = [each[client] if dim == 0 else each for each, dim in zip((q, k, v, unseen), dims, strict=True)]
        value, of_q, _, of_v = gradients(lambda *given, mask=own[3]: definition(*given, mask), *own[:3])
        for each, expected in zip(found, (value, of_q, of_v), strict=True):
            assert apart(each[client].detach(), expected) < TOLERANCE


def test_what_is_not_finite_stays_so():
    for value in (math.nan, math.inf):
        q, k, v = drawn(1, 9, 1, 4), drawn(1, 9, 1, 5)[..., :4], drawn(1, 9, 1, 4)
        q[0, 3, 0, 1] = value
        expected = of_projections(q, k, v, causal(9))
        with OneCallAttention().around_losses():
            found = of_projections(q, k, v, causal(9))
        assert torch.equal(found.isfinite(), expected.isfinite())
        assert not found.isfinite().all()


def test_a_place_that_sees_nothing_has_no_mean():
    q, k, v = (drawn(1, 9, 1, 4 + i)[..., :4] for i in range(3))
    for row in (0, 8):
        unseen = causal(9)
        unseen[row] = True
        with OneCallAttention().around_losses():
            found = of_projections(q, k, v, unseen)
        assert found.isnan().any(-1)[0].nonzero().flatten().tolist() == [row]


def test_others_are_left_to_torch(calls: list[str]):
    """float64, dropout of weights, fewer places of keys than of queries, and masks that torch repeats for sequences or
    places, or that heads have of their own."""
    q, k, v = (drawn(2, 6, 2, 4 + i)[..., :4] for i in range(3))
    double = [each.double() for each in (q, k, v)]
    with OneCallAttention().around_losses():
        assert torch.equal(of_projections(*double, causal(6)), of_projections(*double, causal(6)))
        of_projections(q, k, v, causal(6), drop=nn.Dropout(0.5))
        of_projections(q, k[:, :4], v[:, :4], torch.zeros(6, 4, dtype=torch.bool))
        for shape in ((1, 1, 6, 6), (2, 2, 6, 6), (1, 2, 6, 6), (2, 1, 1, 6), (1, 6), (6, 1)):
            of_projections(q, k, v, torch.zeros(shape, dtype=torch.bool))
    assert not calls


def test_a_second_derivative_is_refused():
    x = drawn(1, 4, 1, 4).requires_grad_()
    with OneCallAttention().around_losses():
        y = of_projections(x, x, x, causal(4))
    with pytest.raises(RuntimeError, match=r"choose engine\.kernels=torch"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# --- runs -------------------------------------------------------------------------------------------------------------
def adapted(folder: Path, adapter: bool = True, **engine: Any) -> Experiment:
    (folder / "text.txt").write_text("a client has rows of its own and the server has the mean of them " * 60)
    lora = {"adapter": {"name": "lora", "targets": ["*.q", "*.v"], "rank": 2, "alpha": 4}}
    return experiment(
        {
            "workload": {
                "name": "characters",
                "path": str(folder / "text.txt"),
                "length": 24,
                "model": {"name": "gpt", "width": 16, "depth": 2, "heads": 2},
                **(lora if adapter else {}),
            },
            "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}},
            "federation": {"clients": 4, "cohort": 4, "rounds": 2, "local": {"steps": 3, "batch": 4}},
            "engine": {"backend": "local", "block": 2, **engine},
            "tracking": {"uri": "none"},
        }
    )


def test_a_run_with_adapters_is_that_with_torchs_kernels(tmp_path: Path, calls: list[str]):
    """The tolerance is that of AdamW, which may turn a rounding error of a gradient near 0 into a part of a step of
    0.01; sums of 24 steps stay far below it."""
    models = {}
    for kernels in ("torch", "attention"):
        result = run(adapted(tmp_path, kernels=kernels), out=tmp_path / kernels)
        plan = json.loads((tmp_path / kernels / "plan.json").read_text())
        assert (plan["block"], plan["kernels"]) == (2, kernels)
        models[kernels] = result.model
        assert bool(calls) == (kernels == "attention")
    for name, value in models["torch"].items():
        torch.testing.assert_close(models["attention"][name], value, rtol=0, atol=1e-4)


def test_a_measurement_tries_it_only_with_adapters(tmp_path: Path):
    def tried(adapter: bool) -> set[str]:
        run_spec = RunSpec.of("run", adapted(tmp_path, adapter, block="auto"))
        return {plan.kernels for plan in execution_plan.candidates(run_spec)}

    assert "attention" in tried(True)
    assert "native" not in tried(True)
    assert "attention" not in tried(False)


def test_wrong_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gradients that are a thousandth too large."""
    real = attention.call

    def wrong(name: str, tensors: Any, *sizes: int) -> None:
        real(name, tensors, *sizes)
        if name == "attention_back":
            tensors[6].mul_(1.001)

    monkeypatch.setattr(attention, "call", wrong)
    with pytest.raises(ConfigError, match=r"engine\.kernels=attention must compute what torch's .*; choose torch"):
        run(adapted(tmp_path, kernels="attention"), out=tmp_path / "run")
