"""Plain descent in one call (`LocalSteps.descend`) equals its steps one after the other, and is used only for methods
that declare it.

TOLERANCE: float32 sums in another order, as in test_fused_chain, after some steps. Tests with many steps have no ReLU,
because a unit that is active in one version and not in the other would make a difference that is much larger than
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.ditto import ditto
from fedfleet.algorithms.fedavg import Plain, fedavg
from fedfleet.algorithms.fedprox import fedprox
from fedfleet.algorithms.local import LocalMethod, PublicState
from fedfleet.algorithms.parts.own_model import OwnModel
from fedfleet.algorithms.parts.rules import Momentum, Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.scaffold import scaffold
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.clients.local_training import GATHERED_STEPS, LocalTrainer
from fedfleet.engine.kernels.contract import Kernels
from fedfleet.engine.kernels.fused_chain import Chain, FusedChain
from fedfleet.engine.kernels.torchs import Torch
from fedfleet.engine.method_form.personal import Division, Personal

from .setups import run_and_count
from .test_fused_chain import CHAINS, workload
from .test_kernels import lenet

TOLERANCE = 2e-5
KERNELS = FusedChain(), Torch()

pytestmark = pytest.mark.usefixtures("own_kernels")


class Drawn:
    """The batches of a client, of 4 rows each; every third batch has three real rows and one of padding."""

    def __init__(self, shape: tuple[int, ...], steps: int, ragged: bool) -> None:
        draw = torch.Generator().manual_seed(steps)
        self.input = torch.randn(steps, 4, *shape, generator=draw)
        self.label = torch.randint(7, (steps, 4), generator=draw)
        self.weight = torch.full((steps, 4), 0.25)
        self.ragged = ragged
        if ragged:
            self.weight[::3] = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0])
        self.asked, self.beats = 0, 0

    def __call__(self, steps: slice) -> dict[str, torch.Tensor]:
        self.asked += 1
        batches = {"input": self.input[steps], "label": self.label[steps], "key": torch.arange(len(self.label))[steps]}
        if self.ragged:
            batches["weight"] = self.weight[steps]
        return batches

    def examples(self, step: int) -> None:
        return None

    def beat(self) -> None:
        self.beats += 1


def outcome(method: Any, chain: tuple[Any, ...], kernels: Kernels, batches: Drawn, steps: int) -> Any:
    made = workload(*chain)
    x = Tree.of(made.init(3))
    server = method.server_init(x)
    own = torch.Generator().manual_seed(0)

    def noise(leaf: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.randn(leaf.shape, generator=own)  # control variates that are not 0

    public = server.public
    if isinstance(public, PublicState):
        public = public._replace(shared=pytree.tree_map(noise, public.shared))
    public = method.unpack(public)
    client = pytree.tree_map(lambda leaf: leaf + noise(leaf), method.client_init(public))
    with torch.no_grad():
        return LocalTrainer(method, made, x, kernels).train_client(public, client, steps, batches)


def with_own_head(method: Any, lr: float = 0.01) -> Any:
    layout = Tree.of(workload(*CHAINS["mlp"]).init(3)).layout
    return Personal(method, Division(layout, layout.names[-2:]), Sgd(lr))


BESIDE = {
    "ditto": ditto(0.5, Sgd(0.01), Sgd(0.02)),
    "ditto without a pull": ditto(0.0, Sgd(0.01)),
    "tuning with a pull": OwnModel(Sgd(0.01), prox=0.3),
    "a head of its own": with_own_head(fedavg(Sgd(0.01))),
    "a head of its own, scaffold": with_own_head(scaffold(Sgd(0.01))),
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", BESIDE)
def test_models_of_clients_descend_at_once(name, ragged):
    """Ditto takes two gradients in each step; the losses are those of the server's model."""
    method = BESIDE[name]
    batches = Drawn(CHAINS["mlp"][0], 5, ragged), Drawn(CHAINS["mlp"][0], 5, ragged)
    own, torchs = (outcome(method, CHAINS["mlp"], *each, 5) for each in zip(KERNELS, batches, strict=True))
    assert [each.asked for each in batches] == [1, 1]
    assert [each.beats for each in batches] == [0, 5]
    assert own.gradients == torchs.gradients == 1 + ("ditto" in name)
    torch.testing.assert_close(own.loss, torchs.loss, rtol=TOLERANCE, atol=0)
    for mine, theirs in zip(*(pytree.tree_leaves((o.message, o.client)) for o in (own, torchs)), strict=True):
        assert float((mine - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


def test_the_servers_model_of_ditto_is_that_of_fedavg_to_the_bit():
    first, second = (
        outcome(method, CHAINS["mlp"], FusedChain(), Drawn(CHAINS["mlp"][0], 5, True), 5)
        for method in (ditto(0.5, Sgd(0.01)), fedavg(Sgd(0.01)))
    )
    assert torch.equal(first.message.delta.flat, second.message.delta.flat)


@pytest.mark.parametrize("method", [fedavg(Sgd(0.01)), scaffold(Sgd(0.01))], ids=["fedavg", "scaffold"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("chain", "steps"),
    [("mlp", 1), ("mlp", 5), ("pooled first", 5), ("linear", GATHERED_STEPS + 3), ("linear", 2 * GATHERED_STEPS)],
)
def test_at_once_is_step_by_step(chain, steps, ragged, method):
    shape = CHAINS[chain][0]
    batches = Drawn(shape, steps, ragged), Drawn(shape, steps, ragged)
    own, torchs = (outcome(method, CHAINS[chain], *each, steps) for each in zip(KERNELS, batches, strict=True))
    assert [each.asked for each in batches] == [-(-steps // GATHERED_STEPS)] * 2
    assert [each.beats for each in batches] == [0, steps]  # descent was taken at once
    assert own.gradients == torchs.gradients == 1
    torch.testing.assert_close(own.loss, torchs.loss, rtol=TOLERANCE, atol=0)
    for mine, theirs in zip(*(pytree.tree_leaves((o.message, o.client)) for o in (own, torchs)), strict=True):
        assert mine.shape == theirs.shape
        assert float((mine - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
@pytest.mark.parametrize("method", [fedavg(Sgd(0.1)), scaffold(Sgd(0.1))], ids=["fedavg", "scaffold"])
def test_nothing_of_the_server_or_the_client_is_written_to(method, kernels):
    made = workload(*CHAINS["mlp"])
    x = Tree.of(made.init(3))
    public = method.server_init(x).public
    client = method.client_init(public)
    before = [leaf.clone() for leaf in pytree.tree_leaves((public, client))]
    LocalTrainer(method, made, x, kernels).train_client(public, client, 5, Drawn(CHAINS["mlp"][0], 5, False))
    assert all(torch.equal(a, b) for a, b in zip(before, pytree.tree_leaves((public, client)), strict=True))


@dataclass(frozen=True)
class Doubled(Plain):
    """An estimator that overrides the step and does not declare that it is plain descent."""

    def estimate(self, oracle: Any, y: Tree, c: Any, c_i: Any, trace: Any) -> tuple[Tree, Any]:
        return 2 * oracle(y), trace


@dataclass(frozen=True)
class Halved(Sgd):
    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        return y.add(v, -self.lr / 2), state


@dataclass(frozen=True)
class Shrunk(LocalMethod):
    def client_step(self, public: Any, client: Any, local: Any, oracle: Any) -> Any:
        after = super().client_step(public, client, local, oracle)
        return after._replace(y=0.9 * after.y)


OTHERWISE = {
    "another direction": LocalMethod(Sgd(0.1), Doubled(), Mean(1.0)),
    "another step": LocalMethod(Halved(0.1), Plain(), Mean(1.0)),
    "another method": Shrunk(Sgd(0.1), Plain(), Mean(1.0)),
    "momentum": fedavg(Momentum(0.1)),
    "a proximal term": fedprox(rule=Sgd(0.1)),
    "ditto with momentum of its own": ditto(0.5, Sgd(0.1), Momentum(0.1)),
    "a head with another rate": with_own_head(fedavg(Sgd(0.1)), 0.05),
    "the last gradient": scaffold(Sgd(0.1), control="last"),
    "the gradient at the server's model": scaffold(Sgd(0.1), control="server"),
}


@pytest.mark.parametrize("method", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_no_plain_descent_goes_step_by_step(method):
    batches = Drawn(CHAINS["mlp"][0], 4, False), Drawn(CHAINS["mlp"][0], 4, False)
    own, torchs = (outcome(method, CHAINS["mlp"], *each, 4) for each in zip(KERNELS, batches, strict=True))
    assert [each.beats for each in batches] == [4, 4]
    for mine, theirs in zip(*(pytree.tree_leaves((o.message.delta, o.client)) for o in (own, torchs)), strict=True):
        assert float((mine - theirs).norm()) <= TOLERANCE * float(theirs.norm())


def test_a_label_that_is_no_class_is_told():
    batches = Drawn(CHAINS["mlp"][0], 3, False)
    batches.label[2, 1] = 7
    with pytest.raises(IndexError, match="out of bounds: classes 0 … 6"):
        outcome(fedavg(Sgd(0.1)), CHAINS["mlp"], FusedChain(), batches, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("scaffold", {"steps": 5}),
        pytest.param("fedavg", {"epochs": 2}, marks=pytest.mark.slow),
        pytest.param("fedavg", {"steps": 5}, marks=pytest.mark.slow),
        pytest.param("scaffold", {"epochs": 2}, marks=pytest.mark.slow),
    ],
)
def test_whole_runs(name, local, ray_here, monkeypatch):
    made = lenet(kernels="chain", block=1)
    method = {"name": name, "rule": {"name": "sgd", "lr": 0.05}}
    federation = made.federation.model_copy(update={"local": type(made.federation.local)(batch=8, **local)})
    both = [
        made.model_copy(update={"method": method, "federation": federation, "engine": engine})
        for engine in (made.engine, made.engine.model_copy(update={"kernels": "torch"}))
    ]
    results, calls = zip(*(run_and_count(each, Chain, "_call", monkeypatch) for each in both), strict=True)
    assert [count > 0 for count in calls] == [True, False]
    own, torchs = (torch.cat([t.flatten() for t in result.model.values()]) for result in results)
    assert float((own - torchs).abs().max() / torchs.abs().max()) < 1e-5
    for workers in (1, 2):
        engine = made.engine.model_copy(update={"backend": "ray", "workers": workers})
        again = run(made.model_copy(update={"method": method, "federation": federation, "engine": engine}))
        assert again.model_sha256 == results[0].model_sha256
