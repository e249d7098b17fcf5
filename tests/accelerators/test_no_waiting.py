"""Local training of every method never makes the processor wait for the device: no value of a tensor is asked for, and
nothing is copied between them. `test_gpu.py` has the same on a CUDA device, where torch itself reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fedfleet.algorithms.tree import Tree
from fedfleet.engine.accelerators.transfer import to_device
from fedfleet.engine.clients import local_training
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.kernels.block_convolutions import Products
from fedfleet.engine.kernels.streams import Streams
from fedfleet.engine.method_form.state_spec import some_view
from fedfleet.engine.reduction.accumulator import Accumulator
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.models.convolutional import Dropout
from fedfleet.workloads.workload import Model
from tests.methods import ON_ANY_MODEL as METHODS

from ..test_conformance import Few, few
from .checker import META, NoCopies, Waits, on_meta

CLIENTS, BATCH, STEPS = 3, 4, torch.tensor([3, 2, 1])


@dataclass(frozen=True)
class Convolutions(Model):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        features = [nn.Unflatten(-1, (1, 8, 8)), nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(nn.Flatten(), *features, nn.Flatten(), Dropout(0.5), nn.Linear(18, classes))


@dataclass(frozen=True)
class Normalised(Few):
    """With a mean and a standard deviation of each channel, as images of three colours have them."""

    model: Model = Convolutions()
    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.25,)


class MetaBatches:
    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __call__(self, steps: slice) -> dict[str, torch.Tensor]:
        return {name: column[steps] for name, column in self.columns.items()}

    def examples(self, step: int) -> int:
        return BATCH - 1

    def beat(self) -> None:
        """No worker watches."""


def columns(lead: int, short: bool) -> dict[str, torch.Tensor]:
    found = {
        "input": torch.zeros(lead, BATCH, *Few.shape, dtype=torch.uint8, device=META),
        "label": torch.zeros(lead, BATCH, dtype=torch.int64, device=META),
        "key": torch.zeros(lead, dtype=torch.int64, device=META),
    }
    return {**found, "weight": torch.zeros(lead, BATCH, device=META)} if short else found


@pytest.fixture
def trainers(monkeypatch):
    def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        with _disable_current_modes():  # a copy from pinned memory, for which nobody waits
            return to_device(tensor, device)

    monkeypatch.setattr(local_training, "to_device", pinned)

    def make(method: str, workload: Any) -> list[tuple[LocalTrainer, Any, Any]]:
        run_spec = RunSpec.of("run", few(method, workload))
        x = run_spec.initial_model()
        found = []
        for algorithm in filter(None, (run_spec.method().warm_start, run_spec.method())):
            public = algorithm.unpack(algorithm.broadcast(run_spec.method().server_init(x)))
            client = algorithm.client_init(public)
            public = some_view(algorithm, public, client)
            found.append((LocalTrainer(algorithm, run_spec.workload, x.to(META)), on_meta(public), on_meta(client)))
        return found

    return make


@pytest.mark.parametrize("method", METHODS)
def test_no_method_waits(method, trainers):
    for trainer, public, client in trainers(method, Few()):
        block = pytree.tree_map(lambda leaf: leaf.expand(CLIENTS, *leaf.shape), client)
        for short in (False, True):
            total = Accumulator(trainer.state_spec, [CLIENTS, CLIENTS + 1], device=META)
            with torch.no_grad(), NoCopies() as watched:
                result = trainer.train_block(public, block, STEPS, lambda k, short=short: columns(CLIENTS, short))
                total.add_block(result, STEPS.numpy(), torch.ones(CLIENTS).numpy())
                total.end_block()
                alone = trainer.train_client(public, client, 3, MetaBatches(columns(3, short)))
                total.add_one(alone, STEPS[:1].numpy(), torch.ones(1).numpy(), only=True)
                total.end_block()
            assert watched.calls > 50
            assert result.loss.shape == (CLIENTS,)
            leaves = [leaf for leaf in pytree.tree_leaves((result, alone)) if isinstance(leaf, torch.Tensor)]
            assert {leaf.device for leaf in leaves} == {META}


@pytest.mark.parametrize("kernels", [Products(), Streams()], ids=str)
def test_no_kernels_for_gpus_wait(kernels, trainers):
    ((trainer, public, client),) = trainers("scaffold", Normalised())
    own = LocalTrainer(trainer.algorithm, trainer.workload, trainer.x, kernels)
    block = pytree.tree_map(lambda leaf: leaf.expand(CLIENTS, *leaf.shape), client)
    with torch.no_grad(), NoCopies() as watched:
        result = own.train_block(public, block, STEPS, lambda k: columns(CLIENTS, True))
    assert watched.calls > 50
    assert {leaf.device for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)} == {META}


def test_no_layer_waits(trainers):
    for trainer, public, client in trainers("fedavg", Normalised()):
        with torch.no_grad(), NoCopies():
            block = pytree.tree_map(lambda leaf: leaf.expand(CLIENTS, *leaf.shape), client)
            trainer.train_block(public, block, STEPS, lambda k: columns(CLIENTS, True))


@dataclass(frozen=True)
class Wrong(Few):
    """`how`: the way in which its losses make the processor wait."""

    how: str = ""

    def losses(self, p, batch):
        losses = super().losses(p, batch)
        if losses.device != META:
            return losses
        if self.how == "item":
            return losses * float(torch.zeros((), device=META))
        if self.how == "branch":
            return losses if torch.zeros((), device=META) > 0 else 2 * losses
        if self.how == "copy":
            return losses * torch.tensor([2.0]).to(META)
        if self.how == "back":
            return losses * torch.zeros(1, device=META).cpu().to(META)
        if self.how == "index":
            return losses * torch.zeros(3, device=META)[torch.zeros(3, dtype=torch.bool, device=META)].sum()
        return losses * torch.zeros(2, device=META).nonzero().sum()


@pytest.mark.parametrize("how", ["item", "branch", "copy", "back", "index", "nonzero"])
def test_the_check_finds_what_waits(how, trainers):
    ((trainer, public, client),) = trainers("fedavg", Wrong(how=how))
    with torch.no_grad(), NoCopies(), pytest.raises((Waits, RuntimeError, NotImplementedError)):
        trainer.train_client(public, client, 1, MetaBatches(columns(1, False)))


def test_where_a_tree_is():
    assert Tree.of({"a": torch.zeros(2)}).to(META).flat.device == META
