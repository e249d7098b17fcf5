"""`fedfleet.convert`: what takes the place of torch's modules computes the same, draws from keys, and is told; what has
no counterpart is refused."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfleet
from fedfleet.workloads import counted
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.convert import convert
from fedfleet.workloads.models.dropout import Dropout
from fedfleet.workloads.models.published import Torchvision
from fedfleet.workloads.stateless import Stateless
from fedfleet.workloads.workload import Model

EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""float64, and sums of at most a few hundred products in another order."""


class Words(nn.Module):
    """The eight lines of a digit as words: a TransformerEncoder of torch as it is."""

    def __init__(self, rate: float = 0.2, first: bool = True, classes: int = 10) -> None:
        super().__init__()
        self.up, self.first = nn.Linear(8, 16), first
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=rate, batch_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x.squeeze(1))
        x = self.encoder(x if self.first else x.transpose(0, 1))
        return self.out(x.mean(1 if self.first else 0))


class Images(nn.Module):
    """Convolutions of torch with all that a federated run cannot train as it is."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.ops import StochasticDepth  # after the project, which makes mixed builds importable

        norms = nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), nn.BatchNorm2d(4, affine=False)
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), norms[0], nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Conv2d(4, 4, 3), norms[1]
        )
        self.depth, self.drop, self.out = StochasticDepth(0.2, "row"), nn.Dropout(0.4), nn.Linear(64, 10)
        self.again = self.drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.out(self.again(self.drop((x + self.depth(x)).flatten(1))))


def tensors(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in [*net.named_parameters(), *net.named_buffers()]}


@pytest.mark.parametrize("make", [Images, Words], ids=lambda kind: kind.__name__)
def test_it_evaluates_as_torch_does_and_keeps_the_names(make: Any):
    net = make().double()
    net.train()(torch.randn(4, 1, 8, 8, dtype=torch.float64))  # moves the running statistics
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        own, expected = tensors(net), net.eval()(x)
    converted, changes = fedfleet.convert(net)
    assert {name for name in own if "num_batches" not in name} == set(tensors(converted))
    with torch.no_grad():
        assert torch.equal(Stateless(converted)(tensors(converted), x), expected)
    assert changes
    assert not fedfleet.convert(converted).changes


def test_it_says_what_it_did():
    converted = fedfleet.convert(Images())
    assert [str(change) for change in converted.changes] == [
        "body.1: BatchNorm2d -> fedfleet's BatchNorm",
        "body.2: ReLU(inplace=True) -> inplace=False",
        "body.3: Dropout2d -> fedfleet's Dropout",
        "body.5: BatchNorm2d -> fedfleet's BatchNorm",
        "depth: StochasticDepth -> fedfleet's Dropout",
        "drop: Dropout -> fedfleet's Dropout",
    ]
    assert "2 BatchNorm2d -> fedfleet's BatchNorm (body.1, …); 1 ReLU(inplace=True)" in converted.summary
    assert converted.module.again is converted.module.drop  # one module in two places stays one


def test_batch_norm_trains_as_torchs():
    """Outputs, gradients and new running statistics, with torch's own eps, momentum and affine."""
    theirs = nn.Sequential(*Images().body[:2], *Images().body[4:]).double()
    ours = Stateless(fedfleet.convert(copy.deepcopy(theirs)).module)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    p = {name: value.requires_grad_(value.is_floating_point()) for name, value in tensors(ours.module).items()}
    out, expected = ours(p, x, torch.tensor(1)), theirs(x)
    assert torch.allclose(out, expected, **EXACT)
    expected.square().sum().backward()
    names = [name for name, _ in theirs.named_parameters()]
    for name, found in zip(names, torch.autograd.grad(out.square().sum(), [p[name] for name in names]), strict=True):
        assert torch.allclose(found, theirs.get_parameter(name).grad, **EXACT), name  # pyright: ignore
    for _, part, leaf in ours.running:
        name = next(name for name, each in ours.module.named_modules() if each is part)
        assert torch.allclose(part.moved[leaf], theirs.get_buffer(f"{name}.{leaf}"), **EXACT)


def test_group_norm_has_no_running_statistics():
    converted = fedfleet.convert(Images(), norm="group", groups=3)
    assert not list(converted.module.buffers())
    norm = converted.module.body[1]
    assert (type(norm), norm.num_groups, norm.eps) == (nn.GroupNorm, 1, 1e-3)  # of 4 channels, 3 groups fit once


CASES = [
    {},
    {"batch_first": False},
    {"bias": False},
    {"kdim": 6, "vdim": 4},
    {"attn_mask": torch.rand(2, 7) < 0.3},
    {"attn_mask": torch.randn(3 * 2, 2, 7, dtype=torch.float64)},
    {"key_padding_mask": torch.tensor([[False] * 5 + [True] * 2] * 3)},
    {"average_attn_weights": False},
    {"need_weights": False},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
def test_attention_is_torchs(case: dict[str, Any]):
    """With draws that drop nothing, and, at a rate of a half, by the weights that it returns."""
    case = {"batch_first": True, **case}
    made = {name: case.pop(name) for name in ("batch_first", "bias", "kdim", "vdim") if name in case}
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, dropout=1e-15, **made).double()
    shapes = (3, 2, 8), (3, 7, made.get("kdim", 8)), (3, 7, made.get("vdim", 8))
    given = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    given = given if made["batch_first"] else [each.transpose(0, 1) for each in given]
    ours = fedfleet.convert(copy.deepcopy(theirs)).module.train()
    ours.drop.key = torch.tensor(5)
    expected, weights = theirs(*given, **case)
    out, own_weights = ours(*given, **case)
    assert torch.allclose(out, expected, **EXACT)
    assert (weights is None) == (own_weights is None)
    if weights is None:
        return
    assert torch.allclose(own_weights, weights, **EXACT)
    ours.drop.rate = 0.5
    case["average_attn_weights"] = False
    dropped, whole = ours(*given, **case)[1], theirs(*given, **case)[1]
    assert set((dropped / whole).nan_to_num(0).round(decimals=9).unique().tolist()) <= {0.0, 2.0}


def test_draws_for_a_row_do_not_depend_on_the_rows_behind_it():
    """Blocks pad short batches, also where torch's transformers have the words first."""
    for first in (True, False):
        net = Stateless(fedfleet.convert(Words(first=first)).module)
        x, p, key = torch.randn(5, 1, 8, 8), tensors(net.module), counted.key(3)
        assert torch.allclose(net(p, x, key)[:3], net(p, x[:3], key), rtol=1e-5, atol=1e-6)
        assert not torch.equal(net(p, x, key), net(p, x, counted.key(4)))


def test_stochastic_depth_drops_whole_rows():
    drop = Stateless(Dropout(0.5, rows=True))
    kept = drop({}, torch.ones(64, 3, 2), torch.tensor(7))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(kept, kept[:, :1, :1].expand_as(kept))


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


REFUSED = [
    (lambda: nn.LSTM(3, 4, 2, dropout=0.1), r"module 0 \(LSTM\) draws its dropout between layers.*stack modules"),
    (lambda: nn.BatchNorm1d(3, momentum=None), r"module 0 \(BatchNorm1d\) has momentum=None"),
    (lambda: OwnNorm(3), r"module 0 \(OwnNorm\) has a forward of its own"),
    (lambda: nn.InstanceNorm1d(3, track_running_stats=True), r"\(InstanceNorm1d\) has running statistics"),
    (lambda: nn.AlphaDropout(0.2), r"\(AlphaDropout\) draws from torch's global generator; use nn.Dropout or"),
    (nn.RReLU, r"\(RReLU\) draws from torch's global generator"),
    (lambda: nn.MultiheadAttention(4, 2, 0.1, add_zero_attn=True), r"\(MultiheadAttention\) has dropout beside"),
    (lambda: nn.Dropout(1.0), r"\(Dropout\) 0 <= dropout < 1 must hold, got dropout=1.0"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(make: Any, says: str):
    with pytest.raises(ValueError, match=says):
        fedfleet.convert(nn.Sequential(make()))


@pytest.mark.parametrize("settings", [{"norm": "layer"}, {"groups": 0}], ids=str)
def test_settings_are_checked(settings: Any):
    with pytest.raises(ValueError, match=next(iter(settings))):
        fedfleet.convert(nn.Identity(), **settings)


# --- runs -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reads(Model):
    """`Words` with this rate of dropout."""

    rate: float = 0.2

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return Words(self.rate, classes=classes)


class Log(fedfleet.Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, text: str) -> None:
        self.lines.append(text)


def run(model: Model, log: Log, **engine: Any) -> fedfleet.Result:
    return fedfleet.run(
        fedfleet.Experiment(
            workload=Digits(model=model),
            method="fedavg",
            federation={"clients": 20, "cohort": 4, "rounds": 1, "local": {"steps": 2, "batch": 8}},
            engine={"backend": "local", "kernels": "torch", **engine},
            tracking={"uri": "none"},
        ),
        observers=[log],
        progress=False,
    )


def test_a_transformer_of_torch_trains_alone_and_in_blocks():
    """Its gradients are proven before round 1. Both give the same within float64's rounding, with the same draws."""
    log = Log()
    alone, block = (run(Reads(), log, block=size, dtype="float64") for size in (1, 4))
    for name, value in alone.model.items():
        assert torch.allclose(block.model[name], value, **EXACT), name
    assert any("converted: 2 MultiheadAttention -> fedfleet's Attention" in line for line in log.lines)


def test_torch_asks_no_user_to_file_an_issue(caplog: pytest.LogCaptureFixture):
    """Attention without dropout has no rule for vmap; the logger has torch's warning where it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Reads(rate=0.0), Log(), block=4)
    with caplog.at_level(logging.DEBUG, logger="fedfleet.vmap"):
        run(Reads(rate=0.0), Log(), block=4)
    assert any("Please file us an issue" in record.message for record in caplog.records)


@pytest.mark.long
@pytest.mark.usefixtures("ray_here")
def test_networks_of_torch_have_the_same_bits_here_and_on_two_workers():
    """torchvision's resnet18 and a TransformerEncoder with dropout, as they are."""
    for model in (Torchvision("resnet18"), Reads()):
        digests = set()
        for engine in ({"backend": "local"}, {"backend": "ray", "workers": 2}):
            result = fedfleet.run(
                fedfleet.Experiment(
                    workload=Digits(model=model),
                    method="fedavg",
                    federation={"clients": 40, "cohort": 2, "rounds": 1, "local": {"steps": 1, "batch": 8}},
                    engine={"kernels": "torch", **engine},
                    tracking={"uri": "none"},
                ),
                progress=False,
            )
            digests.add(result.model_sha256)
        assert len(digests) == 1, model


def test_a_converted_network_needs_no_collector_of_garbage():
    """Processes of studies look for garbage seldom, and each would keep several networks until then."""
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    kept = weakref.ref(network)
    gc.disable()
    try:
        convert(network)
        del network
        assert kept() is None
    finally:
        gc.enable()
