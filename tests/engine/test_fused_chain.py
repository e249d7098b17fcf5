"""A chain of layers in one native call gives torch's loss and gradient: for one client, for a block, and in whole runs.

TOLERANCE: float32 sums in another order, relative to the largest entry of a tensor, as in test_kernels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.clients.local_training import Gradient, LocalTrainer
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.kernels.fused_chain import Chain, FusedChain, chain_or_none
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.partitions.standard import Iid
from fedfleet.workloads.workload import Model

from .setups import STEPS, digits, run_and_count
from .test_kernels import lenet

TOLERANCE = 1e-5

pytestmark = pytest.mark.usefixtures("own_kernels")


@dataclass(frozen=True)
class Fixed(Model):
    """A model that returns the given modules for all inputs."""

    layers: tuple[nn.Module, ...]

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(*self.layers)


def workload(shape: tuple[int, ...], *layers: nn.Module, normalised: bool = False) -> Classification:
    class Made(Classification):
        def load(self) -> Any:
            raise AssertionError("not asked for")

    Made.shape, Made.classes = shape, 7
    if normalised:
        Made.mean, Made.std = (0.3,) * shape[0], (0.5,) * shape[0]
    return Made(
        Fixed(tuple(copy.deepcopy(layer) for layer in layers)), Iid()
    )  # a module keeps tensors of its last call


def conv(*sizes: int, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(*sizes, **more)


def chains() -> dict[str, tuple[Any, ...]]:
    """name -> (shape of an input, layers), with the same weights in every process.

    They have all tile widths, odd sizes, rows longer than a vector, all sides of kernels, with and without ReLU and
    pooling. Batches of 13, 16 and 29 examples fill enough lanes of vectors for batched.h, smaller ones do not.
    """
    torch.manual_seed(0)
    return {
        "linear": ((5,), nn.Linear(5, 7)),
        "mlp": ((3, 5, 7), nn.Flatten(), nn.Linear(105, 66), nn.ReLU(), nn.Linear(66, 7, bias=False)),
        "wide": ((1, 41, 50), nn.Flatten(), nn.Linear(2050, 13), nn.ReLU(), nn.Linear(13, 7)),
        "pooled first": (
            (2, 13, 11),
            *(conv(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), conv(5, 9, 2), nn.Flatten(), nn.Linear(180, 7)),
        ),
        "unpooled": (
            (1, 9, 40),
            conv(1, 6, 5, padding=2),
            nn.ReLU(),
            conv(6, 4, 1, bias=False),
            nn.Flatten(),
            nn.Linear(1440, 7),
        ),
        "pool alone": ((3, 17, 36), conv(3, 2, 7, padding=3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 7)),
        "nested": ((1, 8, 8), nn.Sequential(conv(1, 3, 4), nn.ReLU()), nn.Sequential(nn.Flatten(), nn.Linear(75, 7))),
    }


with torch.random.fork_rng():
    CHAINS = chains()


def both(made: Classification) -> tuple[Tree, LocalTrainer, LocalTrainer]:
    x = Tree.of(made.init(3))
    method = fedavg()
    own = LocalTrainer(method, made, x, FusedChain())
    assert own.chain is not None
    return x, LocalTrainer(method, made, x), own


def batch_of(made: Classification, clients: int, examples: int, weighted: bool = False) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(examples)
    batch = {
        "input": torch.randn(clients, examples, *made.shape, generator=draw),
        "label": torch.randint(made.classes, (clients, examples), generator=draw),
        "key": torch.arange(clients),
    }
    if weighted:
        share = torch.rand(clients, examples, generator=draw)
        share[0, 1:2] = 0
        batch["weight"] = share / share.sum(-1, keepdim=True)
    return batch


def at(
    trainer: LocalTrainer, x: Tree, flat: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return Gradient.forward(flat, trainer, x.layout, tuple(batch), *batch.values())


def apart(x: Tree, first: torch.Tensor, second: torch.Tensor) -> float:
    pairs = zip(Tree(first, x.layout).views(), Tree(second, x.layout).views(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("examples", [1, 4, 13, 16, 29])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_loss_and_gradient_are_torchs(chain, examples, weighted):
    made = workload(*chain)
    x, torchs, own = both(made)
    points = x.flat + 0.01 * torch.randn(3, len(x.flat), generator=torch.Generator().manual_seed(1))
    batch = batch_of(made, 3, examples, weighted)
    gradients, losses = torch.func.vmap(
        lambda flat, columns: Gradient.apply(flat, own, x.layout, tuple(columns), *columns.values())
    )(points, batch)
    for i in range(3):
        mine = {name: column[i] for name, column in batch.items()}
        expected, loss = at(torchs, x, points[i], mine)
        alone, alone_loss = at(own, x, points[i], mine)
        assert torch.equal(alone, gradients[i])
        assert torch.equal(alone_loss, losses[i])
        assert apart(x, alone, expected) < TOLERANCE
        assert float((alone_loss - loss).abs()) < TOLERANCE * max(1.0, float(loss))


def test_bytes_are_normalised_as_the_workload_says():
    made = workload(*CHAINS["nested"], normalised=True)
    x, torchs, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, 6).items()}
    batch["input"] = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, *made.shape), dtype=np.uint8))
    assert apart(x, at(own, x, x.flat, batch)[0], at(torchs, x, x.flat, batch)[0]) < TOLERANCE


def test_what_is_no_number_stays_none():
    """NaN stays NaN, so that a run that diverges is recognised."""
    made = workload(*CHAINS["unpooled"])
    x, _, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, 4).items()}
    batch["input"][2, 0, 3, 3] = torch.nan
    gradient, loss = at(own, x, x.flat, batch)
    assert loss.isnan()
    assert gradient.isnan().any()


@pytest.mark.parametrize("label", [-1, 7])
def test_a_label_that_is_no_class_is_told(label):
    made = workload(*CHAINS["linear"])
    x, _, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, 4).items()}
    batch["label"][2] = label
    with pytest.raises(IndexError, match="out of bounds: classes 0 … 6"):
        at(own, x, x.flat, batch)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integer_type_are_the_same_labels(dtype):
    """Labels of any integer type give the same result, also with torch's kernels, for one client and for a block."""
    made = workload(*CHAINS["mlp"])
    x, torchs, own = both(made)
    block = batch_of(made, 2, 6)
    block["label"] %= 2
    other = {**block, "label": block["label"].to(dtype)}
    for trainer in (torchs, own):
        for i in range(2):
            alone, same = ({name: column[i] for name, column in batch.items()} for batch in (block, other))
            for a, b in zip(at(trainer, x, x.flat, alone), at(trainer, x, x.flat, same), strict=True):
                assert torch.equal(a, b)
        together = torch.func.vmap(
            lambda flat, columns, trainer=trainer: Gradient.apply(
                flat, trainer, x.layout, tuple(columns), *columns.values()
            )
        )
        points = x.flat.expand(2, -1)
        assert torch.equal(together(points, block)[0], together(points, other)[0])


@pytest.mark.parametrize(("label", "kernels"), [(-1, "chain"), (7, "chain"), (-100, "chain"), (-100, "torch")])
def test_a_label_that_is_no_class_is_an_error_by_all_kernels_alike(label, kernels):
    """By default torch's cross-entropy ignores rows of label -100, and only outside of vmap; here all kernels refuse
    it."""
    made = workload(*CHAINS["linear"])
    x, torchs, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, 4).items()}
    batch["label"][2] = label
    with pytest.raises(IndexError, match="out of bounds"):
        at(own if kernels == "chain" else torchs, x, x.flat, batch)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_strides_do_not_matter(chain):
    made = workload(*chain)
    x, _, own = both(made)
    assert own.chain is not None
    batch = batch_of(made, 3, 5, weighted=True)
    strided = {name: torch.stack([column, column], -1)[..., 0] for name, column in batch.items()}
    points = torch.stack([x.flat, 0.9 * x.flat, 1.1 * x.flat])
    turned = points.T.contiguous().T
    assert not turned.is_contiguous()
    for a, b in zip(own.chain.gradient(points, batch), own.chain.gradient(turned, strided), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(own.chain.outputs(points, batch), own.chain.outputs(turned, strided))
    totals = torch.zeros(2, len(x.flat))
    first, _ = own.chain.descend(points[1], batch, 0.1, points[2], totals[0], (0.2, points[0]))
    second, _ = own.chain.descend(turned[1], strided, 0.1, turned[2], totals[1], (0.2, turned[0]))
    assert torch.equal(first, second)
    assert torch.equal(*totals)


@pytest.mark.parametrize("examples", [1, 6, 13])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_outputs_are_those_of_the_network(chain, examples):
    made = workload(*chain)
    x, _, own = both(made)
    assert own.chain is not None
    batch, points = batch_of(made, 2, examples), torch.stack([x.flat, 0.5 * x.flat])
    found = own.chain.outputs(points, batch)
    for point, own_batch, of_client in zip(points, range(2), found, strict=True):
        alone = {name: column[own_batch] for name, column in batch.items()}
        expected = made.logits(dict(Tree(point, x.layout).items()), alone)
        torch.testing.assert_close(of_client, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


def test_no_example_has_no_loss_and_no_gradient():
    made = workload(*CHAINS["unpooled"])
    x, torchs, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, 0).items()}
    for trainer in (torchs, own):
        gradient, loss = at(trainer, x, x.flat, batch)
        assert not gradient.nan_to_num(0.0).any()
        assert loss.isnan()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["input", "weights", "bias of the last layer"])
@pytest.mark.parametrize("examples", [4, 13])
@pytest.mark.parametrize("chain", ["linear", "mlp", "pooled first", "unpooled"])
def test_what_is_not_finite_goes_where_torch_has_it_go(chain, examples, where, value):
    made = workload(*CHAINS[chain])
    x, torchs, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, examples).items()}
    point = x.flat.clone()
    if where == "input":
        batch["input"].view(examples, -1)[2, 3] = value
    else:
        point[0 if where == "weights" else -1] = value
    (own_gradient, own_loss), (gradient, loss) = (at(trainer, x, point, batch) for trainer in (own, torchs))
    assert own_loss.isfinite() == loss.isfinite()
    assert own_loss.isnan() == loss.isnan()
    assert own_gradient.isfinite().all() == gradient.isfinite().all()


MISFITS = {
    "smaller inputs": lambda batch: {"input": batch["input"][..., :4, :4]},
    "inputs for fewer": lambda batch: {"input": batch["input"][1:]},
    "flat inputs": lambda batch: {"input": batch["input"].flatten(1)},
    "double inputs": lambda batch: {"input": batch["input"].flatten(1)[:, ::2]},
    "labels that are fractions": lambda batch: {"label": batch["label"] + 0.5},
    "labels of another shape": lambda batch: {"label": batch["label"].view(2, 3)},
    "fewer shares": lambda batch: {"weight": torch.ones(5) / 5},
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_columns_that_do_not_fit_are_never_read(misfit):
    made = workload(*CHAINS["nested"])
    x, _, own = both(made)
    batch = {name: column[0] for name, column in batch_of(made, 1, 6).items()}
    with pytest.raises(RuntimeError, match="must be"):
        at(own, x, x.flat, {**batch, **misfit(batch)})
    with pytest.raises(RuntimeError, match="must be"):
        at(own, x, x.flat[1:], batch)
    with pytest.raises(RuntimeError, match="must be"):
        at(own, x, x.flat.double(), batch)


UNFIT = {
    "stride": ((1, 9, 9), conv(1, 2, 3, stride=2), nn.Flatten(), nn.Linear(32, 7)),
    "groups": ((2, 9, 9), conv(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(98, 7)),
    "dilation": ((1, 9, 9), conv(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(50, 7)),
    "reflection": ((1, 9, 9), conv(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(162, 7)),
    "windows of 3": ((1, 9, 9), conv(1, 2, 4), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 7)),
    "windows that overlap": ((1, 9, 9), conv(1, 2, 2), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(98, 7)),
    "another module": ((5,), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 7)),
    "relu at the end": ((5,), nn.Linear(5, 7), nn.ReLU()),
    "relu first": ((5,), nn.ReLU(), nn.Linear(5, 7)),
    "pool twice": ((1, 9, 9), conv(1, 2, 2), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 7)),
    "linear on rows": ((3, 5), nn.Linear(5, 7), nn.Flatten(), nn.Linear(21, 7)),
    "no layer": ((7,), nn.Flatten()),
}


@pytest.mark.parametrize("chain", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_no_chain(chain):
    made = workload(*chain)
    layout = Tree.of(made.init(0) or {"none": torch.zeros(1)}).layout
    assert chain_or_none(made, layout) is None


def test_a_workload_with_losses_of_its_own_is_no_chain():
    class Other(type(workload(*CHAINS["linear"]))):
        def losses(self, p: Any, batch: Any) -> torch.Tensor:
            return 2 * super().losses(p, batch)

    made = workload(*CHAINS["linear"])
    other = Other(made.model, made.partition)
    assert chain_or_none(other, Tree.of(other.init(0)).layout) is None


@pytest.mark.long
def test_a_run_by_chain_is_the_run_by_torch(ray_here, monkeypatch):
    made = [lenet(kernels=kernels, block=block) for kernels, block in (("chain", 2), ("chain", 1), ("torch", 2))]
    results, calls = zip(*(run_and_count(each, Chain, "_call", monkeypatch) for each in made), strict=True)
    assert [count > 0 for count in calls] == [True, True, False]
    own, alone, torchs = (torch.cat([t.flatten() for t in result.model.values()]) for result in results)
    for other in (own, alone):
        assert float((other - torchs).abs().max() / torchs.abs().max()) < TOLERANCE
    for workers in (1, 2):
        assert run(lenet("ray", workers, kernels="chain")).model_sha256 == results[0].model_sha256


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"precision": "bfloat16"}, "precision=same"), ({"dtype": "float64"}, "float32 on processors")],
)
def test_where_it_cannot_be_had(change, sentence):
    with pytest.raises(ConfigError, match=f"engine.kernels: .*{sentence}.*choose"):
        prepare(lenet(kernels="chain", **change), "run")


def test_a_network_that_is_no_chain_is_told():
    other = digits("fedavg", STEPS, kernels="chain").model_copy(
        update={"workload": {"name": "regularised", "of": "digits"}}
    )
    with pytest.raises(ConfigError, match=r"engine.kernels: .*they are for cross-entropy .*choose"):
        prepare(other, "run")
