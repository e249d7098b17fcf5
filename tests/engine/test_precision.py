"""Forward and backward passes in bfloat16: states stay float32, gradients are correct to the 8 bits of bfloat16, and
training reaches the same accuracy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.clients.local_training import Gradient, LocalTrainer
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import LeNet, Mlp

from .setups import METHODS, STEPS, digits


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=pytest.mark.long if m == "local_muon" else ()) for m in METHODS]
)
def test_training_gets_as_far(method):
    same, half = (run(digits(method, STEPS, rounds=30, precision=precision)) for precision in ("same", "bfloat16"))
    assert all(value.dtype == torch.float32 for value in half.model.values())
    assert any(bool((value != value.bfloat16()).any()) for value in half.model.values())  # the state is not rounded
    assert half.model_sha256 != same.model_sha256
    assert half.metrics["eval/accuracy"] > same.metrics["eval/accuracy"] - 0.05


@pytest.mark.long
@pytest.mark.parametrize("block", [1, 4])
def test_steps_below_the_resolution_of_bfloat16_are_not_lost(block):
    """Weights, states and what is remembered of codes are float32. A step of 1e-6 times a sign is lost in the 8 bits of
    bfloat16 for all weights above 3e-4, and a run moves as one in float32 does, but for the roundings of gradients."""
    method = {
        **{"name": "diloco", "rule": {"name": "adamw", "lr": 1e-6}},
        "compression": {"name": "coded", "codec": {"name": "absmax", "bits": 8}},
    }
    runs = [
        run(digits(method, {"steps": 3, "batch": 4, "accumulate": 4}, precision=precision, block=block))
        for precision in ("same", "bfloat16")
    ]
    first = prepare(runs[0].experiment, "first").initial_model()
    same, half = (Tree.of(result.model) - first for result in runs)
    assert float((half - same).norm() / same.norm()) < 0.1
    assert runs[0].rows[0]["train/loss"] == pytest.approx(runs[1].rows[0]["train/loss"], rel=1e-2)


@pytest.mark.parametrize("model", [Mlp((32,)), LeNet()])
def test_gradients_are_float32s_within_bfloat16s_rounding(model):
    """The tolerance is 10 % of the gradient's norm: there are many roundings of 2^-8, and some of them change which
    entry of a pooling window is the largest. A wrong gradient would differ by 100 %."""

    class Images(Digits):
        shape = (1, 28, 28)

    workload = Images(model)
    x = Tree.of(workload.init(0))
    random = torch.Generator().manual_seed(0)
    batch = {"input": torch.randn(16, 1, 28, 28, generator=random), "label": torch.arange(16) % 10}
    trainer = [LocalTrainer(fedavg(Sgd(0.1)), workload, x, precision=precision) for precision in (None, torch.bfloat16)]
    full, half = (Gradient.forward(x.flat, trip, x.layout, tuple(batch), *batch.values()) for trip in trainer)
    assert half[0].dtype == half[1].dtype == torch.float32
    assert 0 < float((half[0] - full[0]).norm() / full[0].norm()) < 0.1
    assert float((half[1] - full[1]).abs()) < 0.05


class Words(nn.Module):
    """Texts as numbers of words, which is how tables hold them, too: as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(600, 4), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x.long()).mean(1))


class Texts(Digits):
    shape = (5,)

    def build(self) -> nn.Module:
        return Words()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_an_embedding_reads_the_rows_that_it_is_given(dtype):
    """bfloat16 has no odd number above 256, so that 301 would be read as 300."""
    workload, ids = Texts(Mlp(())), torch.tensor([[3, 257, 301, 511, 599]])
    x = Tree.of(workload.init(0))
    batch = {"input": ids.to(dtype), "label": torch.tensor([1])}
    trainer = LocalTrainer(fedavg(Sgd(0.1)), workload, x, precision=torch.bfloat16)
    gradient, _ = Gradient.forward(x.flat, trainer, x.layout, tuple(batch), *batch.values())
    rows = Tree(gradient, x.layout)["embed.weight"].abs().sum(1)
    assert rows.nonzero().flatten().tolist() == ids[0].tolist()


@pytest.mark.long
def test_language_models_have_the_losses_of_float32(tmp_path):
    """Within 1e-2 in the first two rounds. Norms, the softmax of attention and the losses are float32."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 40, encoding="utf-8")
    rows = [
        run(
            experiment(
                {
                    "workload": {
                        **{"name": "characters", "path": str(tmp_path / "text.txt"), "length": 16},
                        "model": {"name": "gpt", "width": 32, "depth": 2, "heads": 2},
                    },
                    "method": {"name": "diloco", "rule": {"name": "adamw", "lr": 0.003}},
                    "federation": {"clients": 2, "cohort": 2, "rounds": 2, "local": {"steps": 4, "batch": 8}},
                    "engine": {"backend": "local", "precision": precision},
                    "tracking": {"uri": "none"},
                }
            )
        ).rows
        for precision in ("same", "bfloat16")
    ]
    for same, half in zip(*rows, strict=True):
        assert same["train/loss"] != half["train/loss"]
        assert half["train/loss"] == pytest.approx(same["train/loss"], rel=1e-2)


def test_refused_where_it_makes_no_sense():
    with pytest.raises(
        ConfigError, match=r"engine.precision: bfloat16 and tf32 are for float32, got bfloat16 with dtype="
    ):
        digits("fedavg", STEPS, precision="bfloat16", dtype="float64")
    made = digits("fedavg", STEPS, precision="bfloat16").model_copy(update={"workload": {"name": "quadratic"}})
    with pytest.raises(ConfigError, match=r"engine.precision: bfloat16 is for classification .*; choose same"):
        prepare(made, "run")
