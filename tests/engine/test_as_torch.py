"""Models as users write them, trained by the engine and by torch's own modules, autograd and optimiser: frozen and tied
parameters, parametrisations, hooks.

The engine gives parameters to modules as plain tensors, vectorises over clients, pads short batches and replaces
operators. All of that must be what `loss.backward()` and `torch.optim.SGD` do on the module itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from fedfleet import fork, resume
from fedfleet.engine import Experiment, Result, run
from fedfleet.engine.clients.batches import stream
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare
from fedfleet.engine.runs.restore import bring
from fedfleet.tune.show import describe
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.problems.auc import Auc
from fedfleet.workloads.workload import Batch, Columns, Model, Params, Partition
from fedfleet.workloads.wrappers.noisy import Noisy
from tests.engine.setups import Built
from tests.methods import ON_ANY_MODEL as METHODS
from tests.test_conformance import EVERYONE, SETTINGS

SIZES = 5, 12, 20
"""Training rows of the clients: batches of 8 are short for some of them."""
CLASSES, ROUNDS, STEPS, BATCH, LR = 3, 3, 3, 8, 0.3


# --- models -----------------------------------------------------------------------------------------------------------
class Words(nn.Module):
    """An embedding of word numbers, and a linear layer over the mean of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(8, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(tokens(x)).mean(1).tanh())


class Tied(Words):
    """The weight of the embedding is that of a decoder, too, under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(6, 8, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        scores = self.decoder(self.words(tokens(x)).mean(1))
        return self.out((scores.tanh() @ self.words.weight).tanh())


def tokens(x: Tensor) -> Tensor:
    """Word numbers from images (B, 1, 6, 6)."""
    return (x.flatten(1).abs() * 3).long().clamp(max=7)


def mlp() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def conv() -> Any:
    """Two convolutions; tanh has no kinks, where rounding could make a large difference."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, CLASSES),
    )  # fmt: skip


def without_gradient(build: Callable[[], nn.Module], *frozen: str) -> Callable[[], nn.Module]:
    """The model with these modules or parameters frozen."""

    def built() -> nn.Module:
        module = build()
        for name, value in module.named_parameters():
            if any(name == prefix or name.startswith(f"{prefix}.") for prefix in frozen):
                value.requires_grad_(False)
        return module

    return built


def parametrised(parametrise: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        module = mlp()
        parametrise(module[3])
        return module

    return built


def changed(change: Callable[[Any], Any], build: Callable[[], nn.Sequential] = mlp) -> Callable[[], nn.Module]:
    """The model after a change, such as a hook that it gets."""

    def built() -> nn.Module:
        module = build()
        change(module)
        return module

    return built


FROZEN = {
    "first layer": without_gradient(mlp, "1"),
    "last layer": without_gradient(mlp, "5"),
    "one bias": without_gradient(mlp, "3.bias"),
    "all but one bias": without_gradient(mlp, "1", "3", "5.weight"),
    "first convolution": without_gradient(conv, "0"),
    "features": without_gradient(conv, "0", "3"),
    "last convolution": without_gradient(conv, "3"),
    "head": without_gradient(conv, "7"),
    "embedding": without_gradient(Words, "words"),
    "over an embedding": without_gradient(Words, "out"),
    "tied": without_gradient(Tied, "words"),
}
TRAINED = {
    "tied": Tied,
    "weight_norm": parametrised(nn.utils.parametrizations.weight_norm),
    "forward hook": changed(lambda module: module[2].register_forward_hook(lambda _, inputs, out: out.mul(3))),
    "forward pre-hook": changed(lambda module: module[3].register_forward_pre_hook(lambda _, inputs: (3 * inputs[0],))),
}
MODELS: dict[str, Callable[[], nn.Module]] = {**{f"frozen {name}": one for name, one in FROZEN.items()}, **TRAINED}


@dataclass(frozen=True)
class Named(Model):
    """The model with this name in MODELS."""

    name: str

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return MODELS[self.name]()


@dataclass(frozen=True)
class BySize(Partition):
    """Client i has the next SIZES[i] rows."""

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        return ClientIndex.of(np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


@dataclass(frozen=True)
class Patches(Classification):
    """Random images of 6 x 6 with random labels."""

    model: Model = Named("tied")
    partition: Partition = BySize()

    classes = CLASSES
    shape = (1, 6, 6)

    def load(self) -> tuple[Columns, Columns]:
        draw = np.random.default_rng(0)

        def rows(count: int) -> Columns:
            inputs = draw.normal(size=(count, *self.shape)).astype(np.float32)
            return {"input": inputs, "label": draw.integers(0, CLASSES, count)}

        return rows(sum(SIZES)), rows(16)


def fedavg_of(model: Model, **more: Any) -> Experiment:
    """Plain FedAvg of all clients with equal weights."""
    given = {
        "workload": Patches(model),
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": LR}},
        "federation": {
            "clients": len(SIZES), "cohort": len(SIZES), "rounds": ROUNDS, "weights": "uniform",
            "local": {"steps": STEPS, "batch": BATCH},
        },
        "engine": {"backend": "local", **more.pop("engine", {})},
        "tracking": {"uri": "none"},
        **more,
    }  # fmt: skip
    return Experiment(**given)


# --- the reference ----------------------------------------------------------------------------------------------------
def by_torch(made: Experiment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors before round 1, tensors at the end) of FedAvg by torch's optimiser, on the batches of the engine."""
    spec = RunSpec.of("reference", made)
    assert isinstance(spec.workload, Classification)
    module, split = initial(spec.workload.build, made.seed).to(spec.dtype), spec.split()
    begin = {name: value.detach().clone() for name, value in module.named_parameters()}
    x, label = (torch.from_numpy(split.train[name]) for name in ("input", "label"))
    now, clients = begin, np.arange(len(SIZES))
    for number in range(ROUNDS):
        drawn = stream(split.client_index, clients, np.full(len(SIZES), number), made.federation.local, made.seed)
        assert drawn.weight is not None  # some batches are short
        after = []
        for client in clients:
            with torch.no_grad():
                for name, value in module.named_parameters():
                    value.copy_(now[name])
            trained = [value for value in module.parameters() if value.requires_grad]
            optimiser = torch.optim.SGD(trained, LR)
            for step in range(STEPS):
                rows = drawn.rows[client, step][drawn.weight[client, step] > 0]
                optimiser.zero_grad()
                F.cross_entropy(module(x[rows].to(spec.dtype)), label[rows]).backward()
                optimiser.step()
            after.append({name: value.detach().clone() for name, value in module.named_parameters()})
        now = {name: torch.stack([each[name] for each in after]).mean(0) for name in begin}
    return begin, now


SECOND = "decoder.weight"
"""The second name of a tied tensor, under which models of the engine do not have it."""
LONGEST = 8 * 36
"""The most terms in a sum of a gradient: those of a convolution's weight, over the pixels of a batch."""


def check_equal(found: Result, made: Experiment) -> None:
    """Compare with torch, relative to how far the model moved.

    Sums of n terms in another order differ by n units of rounding; ROUNDS x STEPS steps add up, and each may magnify
    the differences of those before it, for which there is a factor 16.
    """
    begin, wanted = by_torch(made)
    unit = torch.finfo(getattr(torch, made.engine.dtype)).eps / 2
    wanted.pop(SECOND, None)
    assert set(found.model) == set(wanted)
    moved = max(float((wanted[name] - begin[name]).abs().max()) for name in wanted)
    assert moved > 0.01
    for name, value in wanted.items():
        off = float((found.model[name] - value).abs().max())
        assert off <= 16 * ROUNDS * STEPS * LONGEST * unit * moved, (name, off / moved)


PLANS = {
    "torch": {"kernels": "torch", "block": 1, "dtype": "float64"},
    "torch in blocks": {"kernels": "torch", "block": 2, "dtype": "float64"},
    "one by one": {"kernels": "torch", "block": 3, "vectorise": False, "dtype": "float64"},
    "native": {"kernels": "native", "block": 1},
    "native in blocks": {"kernels": "native", "block": 2},
    "channels_last": {"kernels": "channels_last", "block": 1},
}
COMPILED = ["first layer", "first convolution", "features", "last convolution", "embedding"]
"""Frozen parts that compiled kernels meet, too."""
CASES = [
    *((plan, name) for plan in ("torch", "torch in blocks") for name in MODELS),
    *(("one by one", name) for name in ("frozen first layer", "tied")),
    *((plan, f"frozen {name}") for plan in ("native", "native in blocks") for name in COMPILED),
    *(("channels_last", f"frozen {name}") for name in COMPILED if "convolution" in name),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for weight_norm
@pytest.mark.parametrize(("plan", "name"), CASES)
def test_runs_equal_plain_torch(plan, name, request):
    if PLANS[plan]["kernels"] != "torch":
        request.getfixturevalue("own_kernels")
    made = fedavg_of(Named(name), engine=PLANS[plan])
    check_equal(run(made), made)


def test_a_tied_parameter_is_one_tensor():
    """It is in the model once, and once in messages."""
    made = fedavg_of(Named("tied"))
    result = run(made)
    assert list(result.model) == ["words.weight", "out.weight", "out.bias"]
    parameters = sum(value.numel() for value in Tied().parameters())
    assert [row["comm/bytes_up"] for row in result.rows] == [4.0 * parameters * len(SIZES)] * ROUNDS
    module = Tied()
    assert not module.load_state_dict(result.model, strict=False).unexpected_keys
    assert torch.equal(module.decoder.weight, result.model["words.weight"])


# --- frozen tensors ---------------------------------------------------------------------------------------------------
class Constant(nn.Module):
    """A linear layer whose weights are no parameters at all."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = of.weight.detach(), of.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def with_constant() -> nn.Module:
    module: Any = mlp()
    module[3] = Constant(module[3])
    return module


@pytest.mark.parametrize("method", METHODS)
def test_for_a_method_frozen_tensors_are_not_there(method):
    """To the bit, every method does what it does where the frozen layer is a constant inside of the network: states,
    messages and bytes are of the other tensors alone."""
    cohort = 3 if method in EVERYONE else 2
    federation = {"clients": 3, "cohort": cohort, "rounds": 2, "local": {"steps": 2, "batch": BATCH}}
    given = {"method": {"name": method, **SETTINGS.get(method, {})}, "federation": federation}
    frozen, constant = (
        fedavg_of(Built(make), **given, engine={"dtype": "float64", "block": 1})
        for make in (without_gradient(mlp, "3"), with_constant)
    )
    a, b = (StateSpec((spec := prepare(each, "x")).method(), spec.initial_model()) for each in (frozen, constant))
    assert (a.down, a.up, a.kept, a.model) == (b.down, b.up, b.kept, b.model)
    (of_frozen, of_constant), layer = (run(frozen), run(constant)), initial(mlp, 0).get_submodule("3")
    assert {name: value.tolist() for name, value in of_frozen.model.items() if not name.startswith("3.")} == {
        name: value.tolist() for name, value in of_constant.model.items()
    }
    assert torch.equal(of_frozen.model["3.weight"], layer.get_parameter("weight").double())
    assert of_frozen.metrics == of_constant.metrics
    for column in ("comm/bytes_down", "comm/bytes_up"):
        assert [row[column] for row in of_frozen.rows] == [row[column] for row in of_constant.rows]


def frozen_layer(**more: Any) -> Experiment:
    return fedavg_of(Named("frozen first layer"), **more)


LAYER = ["1.weight", "1.bias"]


def test_evaluations_have_the_frozen_tensors():
    """Those of the run and of its result, of the test set and of the clients' own rows."""
    made = frozen_layer(engine={"kernels": "torch", "dtype": "float64"}, evaluate={"fairness": True})
    result = run(made)
    module, (_, test) = initial(MODELS["frozen first layer"], 0).double(), Patches().load()
    module.load_state_dict(result.model)
    with torch.no_grad():
        loss = F.cross_entropy(module(torch.from_numpy(test["input"]).double()), torch.from_numpy(test["label"]))
    assert result.metrics["eval/loss"] == pytest.approx(float(loss), rel=1e-12)
    evaluated = {name: value for name, value in result.metrics.items() if name.startswith("eval/")}
    assert result.evaluate(clients=True) == evaluated
    assert Result.evaluate(result)["eval/loss"] == result.metrics["eval/loss"]


def test_the_folder_of_a_run_says_what_is_frozen(tmp_path):
    lines: list[str] = []

    class Lines:
        def event(self, text: str) -> None:
            lines.append(text)

    result = run(frozen_layer(checkpoint={"every": 1}, engine={"keep_state": True}), tmp_path / "run")
    spec = prepare(frozen_layer(), "x")
    facts = json.loads((tmp_path / "run/frozen.json").read_text())
    assert facts == spec.frozen_facts
    assert (facts["tensors"], facts["numbers"], facts["bytes"]) == (LAYER, 36 * 5 + 5, 4 * (36 * 5 + 5))
    manifest = json.loads(sorted((tmp_path / "run/checkpoints").glob("round-*.json"))[-1].read_text())
    assert manifest["frozen"] == facts
    with safe_open(tmp_path / "run/model.safetensors", "pt") as file:
        assert file.metadata()["frozen"] == ",".join(LAYER)
    loaded = Result.load(tmp_path / "run").model
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in result.model.items()
    }
    log = (tmp_path / "run/run.log").read_text()
    assert "frozen, neither trained nor sent: 1.weight, 1.bias, 185 numbers" in log


def test_a_run_without_frozen_tensors_has_no_word_of_them(tmp_path):
    run(fedavg_of(Built(mlp), checkpoint={"every": 1}, engine={"keep_state": True}), tmp_path / "run")
    assert not (tmp_path / "run/frozen.json").exists()
    assert "frozen" not in json.loads(next((tmp_path / "run/checkpoints").glob("*.json")).read_text())
    with safe_open(tmp_path / "run/model.safetensors", "pt") as file:
        assert file.metadata() is None
    assert "frozen" not in (tmp_path / "run/run.log").read_text()


def shifted(by: float) -> Callable[[], nn.Module]:
    """A model whose frozen numbers depend on `by`."""

    def built() -> nn.Module:
        module = MODELS["frozen first layer"]()
        with torch.no_grad():
            module[1].weight.add_(by)  # pyright: ignore[reportIndexIssue]
        return module

    return built


@dataclass(frozen=True)
class Other(Built):
    """Configurations show all of its networks in the same way."""

    def __repr__(self) -> str:
        return "model"


def interrupted(made: Experiment, folder: Any) -> None:
    """Run the first round in a folder, and leave a checkpoint."""
    rounds = iter((0, 0, 0, 0))

    def stop_after_one(record: Any) -> None:
        asked.append(15)

    asked: list[int] = []
    with pytest.raises(Interrupted):
        run(made, folder, [stop_after_one], stop=lambda: asked[0] if asked else next(rounds, 0))


def test_a_resumed_run_and_a_fork_go_on_with_the_frozen_tensors(tmp_path):
    given = dict(engine={"kernels": "torch", "keep_state": True}, checkpoint={"every": 1, "keep": 5})
    scaffold = {"name": "scaffold", "rule": {"name": "sgd", "lr": LR}}
    made = frozen_layer(**given, method=scaffold)
    whole = run(made, tmp_path / "whole")
    interrupted(made, tmp_path / "run")
    assert resume(made, tmp_path / "run").model_sha256 == whole.model_sha256
    for number in (0, 2):
        forked = fork(whole, number, made, out=tmp_path / f"fork-{number}")
        assert forked.model_sha256 == whole.model_sha256
        assert json.loads((tmp_path / f"fork-{number}/frozen.json").read_text())["tensors"] == LAYER


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            shifted(1.0),
            r"workload: the frozen tensors must have the numbers .* others for 1.weight, 1.bias, 185 numbers; build",
        ),
        (mlp, r"workload: the same tensors must be frozen .* got none after 1.weight, 1.bias; undo"),
    ],
)
def test_other_frozen_tensors_than_a_checkpoints_are_refused(other, told, tmp_path):
    def made(make: Callable[[], nn.Module]) -> Experiment:
        return fedavg_of(Other(make), engine={"kernels": "torch", "keep_state": True}, checkpoint={"every": 1})

    whole = run(made(shifted(0.0)), tmp_path / "whole")
    with pytest.raises(ConfigError, match=told):
        fork(whole, 2, made(other), out=tmp_path / "fork")
    assert not (tmp_path / "fork").exists()
    interrupted(made(shifted(0.0)), tmp_path / "run")
    with pytest.raises(ConfigError, match=told):
        resume(made(other), tmp_path / "run")


def test_another_machine_goes_on_from_a_copy_of_a_checkpoint(tmp_path):
    given = dict(engine={"kernels": "torch"}, checkpoint={"every": 1, "folder": str(tmp_path / "shared")})
    made = frozen_layer(**given)
    whole = run(frozen_layer(engine=given["engine"]))
    interrupted(made, tmp_path / "run")
    brought = bring(str(tmp_path / "shared"), tmp_path / "brought")
    assert json.loads((brought / "frozen.json").read_text())["tensors"] == LAYER
    assert resume(made, brought).model_sha256 == whole.model_sha256


@dataclass(frozen=True)
class Placed(Patches):
    """Notes in files of `folder` which processes build the frozen tensors, and what memory losses find them in."""

    folder: str = ""

    def frozen(self, seed: int) -> dict[str, Tensor]:
        Path(self.folder, f"built-{os.getpid()}").touch()
        return dict(super().frozen(seed))

    def losses(self, p: Params, batch: Batch) -> Tensor:
        place = p["1.weight"].data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, permissions, *_ = line.split()
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            if begin <= place < end:
                Path(self.folder, f"mapped-{os.getpid()}").write_text(permissions)
        return super().losses(p, batch)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says which memory is shared")
def test_workers_of_a_node_read_one_copy_of_the_frozen_tensors(tmp_path):
    """They are built by the launcher, for the run's folder, and by the driver. Workers find them in shared memory, also
    those of a model that the caller gives."""
    here, there = ({"kernels": "torch", "block": 1, **more} for more in ({}, {"backend": "ray", "workers": 2}))
    for name, model in (("own", None), ("given", run(frozen_layer()).model)):
        (tmp_path / name).mkdir()
        workload = Placed(Named("frozen first layer"), folder=str(tmp_path / name))
        result = run(frozen_layer(workload=workload, engine=there), initial_model=model)
        assert len([*(tmp_path / name).glob("built-*")]) <= 2
        mapped = [path.read_text() for path in (tmp_path / name).glob("mapped-*")]
        assert [permissions[3] for permissions in mapped] == ["s"] * 3  # the driver's trial and two workers
        assert result.model_sha256 == run(frozen_layer(engine=here), initial_model=model).model_sha256


@pytest.mark.parametrize("block", [1, 2])
def test_forward_passes_in_bfloat16_have_the_frozen_tensors_in_it(block):
    """Values near those in float32: bfloat16 rounds by at most 2^-9, and there are few steps."""
    engine = {"kernels": "torch", "block": block}
    narrow, wide = (run(frozen_layer(engine={**engine, "precision": each})) for each in ("bfloat16", "same"))
    for name in LAYER:
        assert narrow.model[name].dtype == torch.bfloat16
        assert torch.equal(narrow.model[name], wide.model[name].bfloat16())
    assert narrow.metrics["train/loss"] == pytest.approx(wide.metrics["train/loss"], rel=ROUNDS * STEPS * 2**-8)


def test_what_is_shown_before_a_run():
    text = describe(frozen_layer(), everything=False)
    assert "and frozen tensors  1.weight, 1.bias  185" in text
    assert "neither trained nor sent" in text
    trained = sum(value.numel() for name, value in mlp().named_parameters() if name not in LAYER)
    assert f"up {4 * trained:,} B" in text


@pytest.mark.long
def test_workers_on_ray_have_the_frozen_tensors(ray_here):
    made = frozen_layer(engine={"kernels": "torch", "block": 2})
    on_ray = frozen_layer(engine={"kernels": "torch", "block": 2, "backend": "ray", "workers": 2})
    assert run(on_ray).model_sha256 == run(made).model_sha256


def test_an_initial_model_gives_the_frozen_tensors_too():
    """As when a trained model is trained further with a frozen part."""
    first = run(fedavg_of(Built(mlp), engine={"kernels": "torch"}))
    second = run(frozen_layer(engine={"kernels": "torch"}), initial_model=first.model)
    for name, value in first.model.items():
        assert torch.equal(second.model[name], value) == (name in LAYER)
    with pytest.raises(ConfigError, match=r"initial_model must have .* 1.bias is missing; 1.weight is missing"):
        run(frozen_layer(), initial_model={name: value for name, value in first.model.items() if name not in LAYER})


def test_workloads_around_others_have_their_frozen_tensors():
    net = Patches(Named("frozen first layer"))
    noisy = run(fedavg_of(Named("tied"), workload=Noisy(net, scale=0.1)))
    assert torch.equal(noisy.model["1.weight"], net.frozen(0)["1.weight"])
    auc = run(fedavg_of(Named("tied"), workload=Auc(net)))
    assert torch.equal(auc.model["primal.net.1.weight"], net.frozen(0)["1.weight"])
    assert not torch.equal(auc.model["primal.net.3.weight"], net.init(0)["3.weight"])


def test_scales_and_shifts_of_batch_norm_may_be_frozen():
    """Its running statistics are averaged as ever."""

    def build() -> nn.Module:
        module = nn.Sequential(nn.Conv2d(1, 2, 3), BatchNorm(2), nn.Flatten(), nn.Linear(32, CLASSES))
        module[1].requires_grad_(False)
        return module

    results = [
        run(fedavg_of(Built(build), engine={"kernels": "torch", "dtype": "float64", "block": block}))
        for block in (1, 2)
    ]
    for result in results:
        assert result.model["1.weight"].tolist() == [1, 1]
        assert result.model["1.running_var"].tolist() != [1, 1]
    for name, value in results[0].model.items():
        torch.testing.assert_close(results[1].model[name], value, rtol=1e-9, atol=1e-12)


def test_frozen_whole_numbers_stay_whole_numbers():
    """A table of indices, for example."""

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(35, -1, -1), requires_grad=False)
            self.out = nn.Linear(36, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.flatten(1).index_select(1, self.order))

    result = run(fedavg_of(Built(Permuted)))
    assert torch.equal(result.model["order"], torch.arange(35, -1, -1))


def test_members_with_other_frozen_tensors_are_not_trained_as_one():
    """Blocks of members with the same shapes are trained together, and have the frozen tensors of one of them."""
    forms = []
    for seed in (0, 0, 1):
        spec = prepare(frozen_layer(seed=seed), "x")
        trainer = LocalTrainer(spec.method(), spec.workload, spec.initial_model(), frozen=spec.frozen)
        forms.append(trainer.form)
    assert forms[0] == forms[1] != forms[2]


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ConfigError, match=r"workload: all 6 parameters are frozen .*, so there is nothing to train"):
        prepare(fedavg_of(Built(without_gradient(mlp, "1", "3", "5"))), "x")


def test_chain_kernels_say_that_a_layer_is_frozen(own_kernels):
    def relu() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        module[1].requires_grad_(False)
        return module

    with pytest.raises(ConfigError, match=r"engine.kernels: .* 1.weight is frozen"):
        prepare(fedavg_of(Built(relu), engine={"kernels": "chain"}), "x")


# --- types ---------------------------------------------------------------------------------------------------------
def test_parameters_with_more_digits_than_the_run_are_told(tmp_path):
    """The type of a run is that of its configuration."""
    made = fedavg_of(Built(lambda: mlp().double()), engine={"kernels": "torch"})
    run(made, tmp_path / "run")
    told = "rounded to engine.dtype=float32, in which the run computes: 1.weight and 5 others, in float64"
    assert told in (tmp_path / "run/run.log").read_text()
    for build in (mlp, lambda: mlp().bfloat16()):
        rounds = run(fedavg_of(Built(build), engine={"kernels": "torch"}), tmp_path / str(id(build)))
        assert "rounded to" not in (tmp_path / str(id(build)) / "run.log").read_text()
        assert {value.dtype for value in rounds.model.values()} == {torch.float32}


# --- what is refused --------------------------------------------------------------------------------------------------
class Output(nn.Module):
    """A linear layer, and what is made of its input and of its logits."""

    def __init__(self, after: Callable[[Tensor], Any], before: Callable[[nn.Module, Tensor], Tensor] | None = None):
        super().__init__()
        self.out, self.after, self.before = nn.Linear(36, CLASSES), after, before
        self.register_buffer("scale", torch.ones(36, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        x = x.flatten(1)
        return self.after(self.out(x if self.before is None else self.before(self, x)))


class Narrow(nn.Module):
    """A layer that computes in bfloat16 between others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(36, 4).bfloat16(), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.flatten(1).bfloat16()).to(x.dtype))


class Counts(nn.Module):
    """A layer whose forward counts its calls in a buffer, in place or not."""

    calls: Tensor
    out: nn.Linear

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.out = nn.Linear(36, CLASSES)
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return self.out(x.flatten(1)) / self.calls


def twice() -> Any:
    """A model whose last layer is there twice."""
    module = nn.Sequential(*mlp(), nn.Linear(4, CLASSES))
    module[6].weight = module[5].weight
    return module


def in_part_of_its_memory(module: nn.Sequential) -> None:
    memory = torch.zeros(200)
    module[1].weight = nn.Parameter(memory[:180].view(5, 36))
    module[3].weight = nn.Parameter(memory[170:190].view(4, 5))


HOOK = (
    r"parameter 3.weight must have no hooks, which would not be called, got one of {}; change its gradient in forward"
)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (changed(lambda module: module[3].weight.register_hook(lambda g: 3 * g)), HOOK.format("register_hook")),
    "hook after accumulation": (
        changed(lambda module: module[3].weight.register_post_accumulate_grad_hook(lambda p: None)),
        HOOK.format("register_post_accumulate_grad_hook"),
    ),
    "sparse": (
        changed(lambda module: setattr(module, "0", nn.Sequential(nn.Flatten(), nn.Embedding(8, 1, sparse=True)))),
        r"gradients must be dense, got module 0.1 \(Embedding\) with sparse=True; leave it out",
    ),
    "complex": (
        changed(lambda module: module.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))),
        "parameters must be real, got phase in complex64; keep",
    ),
    "part of the memory": (
        changed(in_part_of_its_memory),
        "parameters 1.weight and 3.weight share memory and are not the same parameter; make them one",
    ),
    "the same memory": (
        changed(lambda module: setattr(module[5], "weight", nn.Parameter(module[5].weight.detach())), twice),
        "parameters 5.weight and 6.weight share memory and are not the same parameter; make them one",
    ),
    "tuple": (
        lambda: Output(lambda logits: (logits, logits)),
        r"must return one tensor of logits, \(B, classes\), got a tuple of Tensor, Tensor; return the logits alone, or",
    ),
    "dict": (lambda: Output(lambda logits: {"logits": logits}), "got a dict with logits; return"),
    "buffer in float64": (
        lambda: Output(lambda logits: logits, lambda module, x: x * module.get_buffer("scale")),
        r"must compute in engine.dtype=float32, got the buffer scale in float64, and torch says .*; convert",
    ),
    "parameters of two types": (Narrow, "engine.dtype=float32, got the parameter inner.weight in bfloat16, and"),
    "buffer that changes": (
        lambda: Counts(True),
        r"losses change the attribute Counts._buffers\['calls'\] \(.*, line ",
    ),
    "buffer that is replaced": (lambda: Counts(False), r"losses change the attribute Counts._buffers\['calls'\] \("),
    "spectral_norm": (
        parametrised(nn.utils.parametrizations.spectral_norm),
        r"losses change the attribute _SpectralNorm._buffers\['_u'\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_trained_in_another_way_is_told_before_round_1(what, tmp_path):
    build, told = REFUSED[what]
    with pytest.raises(ConfigError, match=f"^workload: .*{told}"):
        run(fedavg_of(Built(build), engine={"kernels": "torch"}), tmp_path / "run")
    assert not (tmp_path / "run/rounds.parquet").exists()


@pytest.mark.parametrize("around", [Noisy, Auc])
def test_it_is_told_inside_other_workloads(around):
    for what in ("hook", "tuple", "spectral_norm"):
        build, told = REFUSED[what]
        with pytest.raises(ConfigError, match=told):
            run(fedavg_of(Named("tied"), workload=around(Patches(Built(build)))))


def test_a_workload_with_its_own_losses_takes_the_output_as_it_is():
    class OwnLoss(Patches):
        def losses(self, p: Any, batch: Any) -> Tensor:
            return super().losses(p, batch)

        def logits(self, p: Any, batch: Any, key: Tensor | None = None) -> Tensor:
            first, _ = super().logits(p, batch, key)
            return first

    run(fedavg_of(Named("tied"), workload=OwnLoss(Built(lambda: Output(lambda logits: (logits, logits))))))


BACKWARD = {
    "full": lambda module: module[2].register_full_backward_hook(lambda _, inputs, outputs: (3 * inputs[0],)),
    "before": lambda module: module[2].register_full_backward_pre_hook(lambda _, outputs: (3 * outputs[0],)),
}


@pytest.mark.parametrize("kind", BACKWARD)
@pytest.mark.parametrize("engine", [{"block": 1}, {"block": 3}, {"block": 3, "vectorise": False}])
def test_backward_hooks_of_modules_are_called(kind, engine, tmp_path):
    """vmap passes over them, so clients train one after the other."""
    made = fedavg_of(Built(changed(BACKWARD[kind])), engine={"kernels": "torch", "dtype": "float64", **engine})
    check_equal(run(made, tmp_path / "run"), made)
    alone = "between a block and the module itself" in (tmp_path / "run/run.log").read_text()
    assert alone == (engine == {"block": 3})
