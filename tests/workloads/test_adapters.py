"""LoRA: golden values, the low-rank path against merged weights, the network that a workload trains, and refusals."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from fedfleet.workloads import counted
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.adapters import Lora, adapted_in
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.pair import Pair
from fedfleet.workloads.stateless import Stateless, parameters_of

GOLDEN = json.loads((Path(__file__).parents[1] / "reference/adapters.json").read_text())["adapters"]
"""Values of an implementation in numpy that knows none of this code."""


def wave(shape: tuple[int, ...], number: int, size: float = 0.3) -> Tensor:
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return (size * torch.sin(1 + 0.7 * number + 0.37 * places)).view(shape)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(torch.as_tensor(found).detach().numpy(), np.asarray(wanted), rtol=1e-9, atol=1e-12)


class Conv1D(nn.Module):
    """GPT-2's layer, by the names by which it is recognised."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def adapted(module: nn.Module, **settings: Any) -> Any:
    """The module in float64 with an adapter, inside of a network as `0`."""
    network = nn.Sequential(module.double())
    Lora(**{"targets": ("0",), "rank": 2, "alpha": 4.0, **settings}).adapt(network)
    return network


def test_the_formulas_have_the_golden_values():
    network = adapted(nn.Linear(4, 3, bias=False))
    p = {"0.weight": wave((3, 4), 0), "0.lora_a": wave((2, 4), 1), "0.lora_b": wave((3, 2), 2)}
    p = {name: value.requires_grad_(name != "0.weight") for name, value in p.items()}
    out = functional_call(network, p, (wave((2, 4), 3, 1.0),))
    assert network[0].lora_scale == GOLDEN["scale"]
    assert adapted(nn.Linear(4, 3), stabilised=True)[0].lora_scale == pytest.approx(
        GOLDEN["scale_stabilised"], rel=1e-15
    )
    close(out, GOLDEN["output"])
    close(Lora().merged(network, p)["0.weight"] - p["0.weight"], GOLDEN["change"])
    # the gradient at the weight is G, so that the loss is its inner product with the change
    (pair,) = Lora().pairs(network)
    (pair.change(p, (3, 4)) * wave((3, 4), 4, 1.0)).sum().backward()
    close(p["0.lora_a"].grad, GOLDEN["gradient_a"])
    close(p["0.lora_b"].grad, GOLDEN["gradient_b"])
    # from B = 0 a step of size 0.1 moves B alone, and W by -0.1 s^2 G A^T A
    begun = {**p, "0.lora_b": torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)}
    (pair.change(begun, (3, 4)) * wave((3, 4), 4, 1.0)).sum().backward()
    assert begun["0.lora_b"].grad is not None
    stepped = {**p, "0.lora_b": -0.1 * begun["0.lora_b"].grad}
    close(pair.change(stepped, (3, 4)), GOLDEN["first_step_change_from_b_0"])


def test_changes_of_stored_weights_have_the_golden_values():
    def change(shape: tuple[int, ...], a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
        return Pair("w", "a", "b", GOLDEN["scale"], transposed).change({"a": a, "b": b}, shape)

    close(change((4, 3), wave((2, 4), 1), wave((3, 2), 2), True), GOLDEN["conv1d_change"])
    close(change((5, 3), wave((2, 5), 7), wave((3, 2), 8), True), GOLDEN["embedding_change"])
    conv = change((4, 2, 3, 3), wave((2, 2, 3, 3), 5), wave((4, 2, 1, 1), 6))
    close(conv[0], GOLDEN["conv_change_first_output"])


def test_parts_of_a_weight_have_the_golden_values():
    """Three parts of two rows, of which the first and the last have factors, as a linear layer and GPT-2 store them."""
    change = torch.zeros(6, 4, dtype=torch.float64)
    for rows, number in (((0, 2), 9), ((4, 6), 10)):
        factors = {"a": wave((2, 4), number), "b": wave((2, 2), number + 2)}
        one = Pair("w", "a", "b", GOLDEN["scale"], rows=rows).change(factors, (6, 4))
        stored = Pair("w", "a", "b", GOLDEN["scale"], True, rows=rows).change(factors, (4, 6))
        assert torch.equal(stored.T, one)
        change = change + one
    close(change, GOLDEN["fused_change_q_and_v_of_q_k_v"])


def test_initial_factors_have_the_golden_values():
    golden = GOLDEN["init"]
    for init in ("uniform", "gaussian"):
        drawn = Lora(targets=("0",), rank=2, init=init).initial(adapted(nn.Linear(4, 3)), 7)
        close(
            drawn["0.lora_a"],
            golden["seed_7_number_0_linear_r2_in4" if init == "uniform" else "seed_7_number_0_gaussian_r2_in4"],
        )
        assert not drawn["0.lora_b"].any()
    drawn = Lora(targets=("0",), rank=2).initial(adapted(nn.Embedding(4, 3)), 7)
    close(drawn["0.lora_b"], golden["seed_7_number_0_embedding_b_3x2"])
    assert not drawn["0.lora_a"].any()


@pytest.mark.parametrize("init", ["uniform", "gaussian"])
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 3), nn.Embedding(4, 3), nn.Conv2d(4, 3, 2)], ids=["linear", "embedding", "convolution"]
)
def test_both_factors_may_be_drawn(layer: nn.Module, init: str):
    """The factor that would be 0 has a key of its own and the scale of the other one; the other one stays."""
    lora = Lora(targets=("0",), rank=2, init=init)  # pyright: ignore[reportArgumentType]
    usual = lora.initial(adapted(deepcopy(layer)), 7)
    found = replace(lora, zero_b=False).initial(adapted(deepcopy(layer)), 7)
    zero, other = ("a", "b") if isinstance(layer, nn.Embedding) else ("b", "a")
    assert torch.equal(found[f"0.lora_{other}"], usual[f"0.lora_{other}"])
    value, key = found[f"0.lora_{zero}"], counted.key(7, "adapter", 0, zero)
    if isinstance(layer, nn.Embedding):
        expected = counted.normal(key, value.numel())
    elif init == "gaussian":
        expected = counted.normal(key, value.numel()) / 2
    else:
        expected = (2 * counted.uniform(key, value.numel()) - 1) / (4 if isinstance(layer, nn.Conv2d) else 2)
    assert torch.equal(value.flatten(), expected)


KINDS = {
    "linear": (lambda: nn.Linear(5, 4), (3, 5)),
    "transposed": (lambda: Conv1D(4, 5), (3, 5)),
    "convolution": (lambda: nn.Conv2d(3, 4, (3, 2), stride=2, padding=(2, 1), dilation=(2, 1)), (2, 3, 9, 8)),
    "reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 6, 6)),
    "embedding": (lambda: nn.Embedding(6, 4), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_beside_a_weight_gives_what_the_merged_weight_gives(kind: str):
    """For a client alone and vectorised over clients. TOLERANCE: sums of at most 20 terms of size 1 in float64."""
    make, shape = KINDS[kind]
    torch.manual_seed(0)
    plain = nn.Sequential(make().double())
    network = adapted(make(), stabilised=True)
    p = {name: torch.randn(3, *value.shape, dtype=torch.float64) for name, (value, _) in parameters_of(network).items()}
    p = {name: value if "lora" in name else value[:1].expand_as(value) for name, value in p.items()}
    x = torch.tensor([[0, 5, 2], [3, 3, 1]]) if shape is None else torch.randn(shape, dtype=torch.float64)
    call = Stateless(network)
    together = torch.func.vmap(lambda factors: call({**factors, **{n: p[n][0] for n in p if "lora" not in n}}, x))(
        {name: value for name, value in p.items() if "lora" in name}
    )
    for client in range(3):
        own = {name: value[client] for name, value in p.items()}
        whole = functional_call(plain, Lora().merged(network, own), (x,))
        torch.testing.assert_close(functional_call(network, own, (x,)), whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together[client], whole, rtol=1e-12, atol=1e-12)


def attentive() -> nn.Module:
    layers = {"q": nn.Linear(6, 6), "k": nn.Linear(6, 6), "v": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}
    return nn.Sequential(OrderedDict(embed=nn.Embedding(9, 6), block=nn.ModuleDict(layers), out=nn.Linear(6, 3)))


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("auto", ["block.q", "block.v"]),
        ("linear", ["block.q", "block.k", "block.v"]),
        ("block.k", ["block.k"]),
        (("embed", "block.?"), ["embed", "block.q", "block.k", "block.v"]),
    ],
)
def test_targets_and_what_is_trained(targets: Any, names: list[str]):
    network = attentive()
    Lora(targets=targets, rank=2, train=("out.*",)).adapt(network)
    assert [*adapted_in(network)] == names
    trained = [name for name, (value, _) in parameters_of(network).items() if value.requires_grad]
    assert trained == [*(f"{name}.lora_{factor}" for name in names for factor in "ab"), "out.weight", "out.bias"]


def test_dropout_acts_in_training_alone():
    network = adapted(nn.Linear(50, 50), dropout=0.5)
    p = {name: torch.randn_like(value) for name, value in network.named_parameters()}
    call, x = Stateless(network), torch.randn(4, 50, dtype=torch.float64)
    evaluated, trained = call(p, x), call(p, x, torch.tensor(3))
    assert torch.equal(evaluated, call(p, x))
    assert not torch.allclose(evaluated, trained)
    assert torch.equal(trained, call(p, x, torch.tensor(3)))
    plain = {**p, "0.lora_b": torch.zeros_like(p["0.lora_b"])}
    assert torch.equal(call(plain, x), call(plain, x, torch.tensor(3)))


def test_a_network_on_no_device_is_adapted_as_one_that_has_numbers():
    with torch.device("meta"):
        outline = attentive()
    lora = Lora(rank=2)
    lora.adapt(outline)
    network = initial(attentive, 0)
    lora.adapt(network)
    shapes = [
        {name: (tuple(v.shape), v.requires_grad) for name, v in each.named_parameters()} for each in (outline, network)
    ]
    assert shapes[0] == shapes[1]
    first, second = lora.initial(outline, 5), lora.initial(network, 5)
    assert all(torch.equal(first[name], second[name]) for name in first)


def tied() -> nn.Module:
    network = attentive()
    network.again = nn.Embedding(9, 6)  # pyright: ignore[reportAttributeAccessIssue]
    network.again.weight = network.embed.weight  # pyright: ignore
    return network


def test_a_weight_that_several_modules_have_is_not_merged():
    network = tied()
    Lora(targets=("embed",), rank=2).adapt(network)
    with pytest.raises(ValueError, match=r"embed\.weight belongs to several modules, of which one alone is adapted"):
        Lora().merged(network, dict(network.named_parameters()))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))


@pytest.mark.parametrize(
    ("make", "settings", "told"),
    [
        (attentive, {"targets": ("*.query",)}, r"targets: no module is called \*.query; nearest are "),
        (attentive, {"train": ("head.*",)}, r"train: no parameter is called head.\*; nearest are "),
        (
            attentive,
            {"rank": 2, "train": ("block.q.*",)},
            "train: block.q.weight is frozen beside its factors and trained; take it out of train, or its module",
        ),
        (
            attentive,
            {"targets": ("block.norm",)},
            "targets: block.norm is a LayerNorm, which has no low-rank form; choose",
        ),
        (grouped, {"targets": ("0",)}, "targets: 0 is a convolution with groups=2, which has no low-rank form; adapt"),
        (attentive, {"rank": 7}, r"rank: 1 <= rank <= 6 must hold for block.q \(6 x 6\), got 7; lower rank, or leave"),
        (
            grouped,
            {},
            r"targets: auto knows no projections of this network; give patterns, as of its linear layers \(none",
        ),
        (
            lambda: nn.Linear(2, 2),
            {"targets": "linear"},
            "targets: linear needs two linear layers, got 1; give patterns",
        ),
    ],
)
def test_what_does_not_fit_a_network_is_refused(make: Any, settings: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        Lora(**settings).adapt(make())


@pytest.mark.parametrize(
    "settings",
    [{"rank": 0}, {"alpha": 0.0}, {"alpha": math.inf}, {"dropout": 1.0}, {"init": "zeros"}],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=f"got {next(iter(settings))}="):
        Lora(**settings)


# --- peft -------------------------------------------------------------------------------------------------------------
class Several(nn.Module):
    """One layer of each kind, and a layer whose name is the end of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.q = nn.Embedding(9, 6), nn.Conv2d(1, 4, 3, padding=1), nn.Linear(6, 6)
        self.inner, self.head = nn.ModuleDict({"q": nn.Linear(6, 6)}), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.inner["q"](self.q(self.embed(x))).unsqueeze(1))
        return self.head(h.mean(2).flatten(1))


SEVERAL = Lora(targets=("embed", "conv", "q"), rank=2, alpha=6.0, stabilised=True, train=("head.*",))


def with_factors() -> tuple[nn.Module, dict[str, Tensor]]:
    """(an adapted network, random tensors of it)."""
    torch.manual_seed(0)
    network = Several()
    SEVERAL.adapt(network)
    return network, {name: torch.randn_like(value) for name, value in network.named_parameters()}


def save(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        if name.endswith(".json"):
            (folder / name).write_text(json.dumps(content))
        else:
            save_file(content, folder / name)


def test_what_is_written_is_read(tmp_path: Path):
    network, p = with_factors()
    save(tmp_path, SEVERAL.written(network, p))
    read = replace(SEVERAL, factors=str(tmp_path)).initial(network, 0)
    assert [*read] == [name for name in p if "lora" in name or name.startswith("head")]
    assert all(torch.equal(read[name], p[name]) for name in read)
    for settings, told in (
        ({"rank": 3}, "factors: r must be 3, as the settings say, got 2"),
        ({"stabilised": False}, "factors: use_rslora must be False, as the settings say, got True"),
        ({"targets": ("inner.q",)}, r"factors: inner.q.lora_a must have the shape \(2, 6\), got none"),
        ({"train": ()}, r"factors: base_model.model.head.bias in .* is of no trained module; change targets or train"),
        (
            {"factors": str(tmp_path / "none")},
            "factors must be a folder with adapter_config.json and adapter_model.safe",
        ),
    ):
        lora, other = replace(SEVERAL, **{"factors": str(tmp_path), **settings}), Several()
        lora.adapt(other)
        with pytest.raises(ValueError, match=told):
            lora.initial(other, 0)


@pytest.mark.long
def test_peft_gives_the_same_logits(tmp_path: Path):
    """From the files that are written here, and from its own. TOLERANCE: sums of float32, of up to 100 where the logits
    are less."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    network, p = with_factors()
    save(tmp_path, SEVERAL.written(network, p))
    x = torch.randint(9, (5, 4))
    plain = Several()
    plain.load_state_dict({name: value for name, value in p.items() if "lora" not in name})
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path))
        torch.testing.assert_close(theirs(x), functional_call(network, p, (x,)))
        torch.testing.assert_close(
            functional_call(Several(), SEVERAL.merged(network, p), (x,)), theirs(x), rtol=1e-4, atol=1e-3
        )
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            value.data = torch.randn_like(value)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    read = replace(SEVERAL, factors=str(tmp_path / "theirs")).initial(network, 0)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x), functional_call(network, {**p, **read}, (x,)))


def test_running_statistics_are_in_no_adapter_of_peft():
    network = nn.Sequential(nn.Linear(4, 4), BatchNorm(4))
    lora = Lora(targets="0", rank=2)
    lora.adapt(network)
    with pytest.raises(ValueError, match=r"peft's adapters have no running statistics, got 1\.running_mean"):
        lora.written(network, dict(network.named_parameters()))
