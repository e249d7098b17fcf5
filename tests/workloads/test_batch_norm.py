"""BatchNorm: torch's numbers, padding that does not count, running statistics that the server averages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import nn
from torch.func import vmap

from fedfleet.engine.api import run
from fedfleet.engine.clients.batches import stream
from fedfleet.engine.config.schema import Experiment, Local, experiment
from fedfleet.engine.method_form.batch_norm import Buffered, join_trees, split_tree
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads import counted
from fedfleet.workloads.data.table import Table
from fedfleet.workloads.models.convolutional import Cnn4, ResNet18
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.stateless import Stateless, buffers_of
from fedfleet.workloads.workload import Model
from fedfleet.workloads.wrappers.noisy import Noisy

SHAPE, CLASSES, LR = (1, 16, 16), 3, 0.1


# --- the layer --------------------------------------------------------------------------------------------------------
def test_it_is_torchs():
    torch.manual_seed(0)
    ours, torchs = Stateless(BatchNorm(4).double()), nn.BatchNorm2d(4).double()
    p = {**dict(torchs.named_parameters()), **{n: torch.rand(4, dtype=torch.float64) for n, _, _ in ours.running}}
    torchs.load_state_dict(p, strict=False)
    x = torch.randn(5, 4, 3, 2, dtype=torch.float64)
    assert torch.allclose(ours(p, x), torchs.eval()(x), rtol=1e-12, atol=1e-12)
    wanted = torchs.train()(x)
    assert torch.equal(ours(p, x, counted.key(0)), wanted)
    moved = ours.running[0][1].moved
    for name, buffer in torchs.named_buffers():
        assert name == "num_batches_tracked" or torch.equal(moved[name], buffer)
    keys = counted.key(0).expand(2)
    together = vmap(lambda p, x, key: (ours(p, x, key), ours.running[0][1].moved))
    out, moved = together({n: v.expand(2, -1) for n, v in p.items()}, x.expand(2, *x.shape), keys)
    assert torch.allclose(out[1], wanted, rtol=1e-12, atol=1e-12)
    for name, buffer in torchs.named_buffers():
        assert name == "num_batches_tracked" or torch.allclose(moved[name][1], buffer, rtol=1e-12)


def test_one_number_per_channel_has_no_variance():
    ours = Stateless(BatchNorm(4))
    p = {name: value.detach() for name, value in [*ours.module.named_parameters(), *ours.module.named_buffers()]}
    assert bool(ours(p, torch.randn(1, 4, 1, 1), counted.key(0)).isfinite().all())
    assert all(bool(value.isfinite().all()) for value in ours.running[0][1].moved.values())


def test_padding_does_not_count():
    torch.manual_seed(0)
    network = Stateless(BatchNorm(4).double())
    p = {name: value.detach() for name, value in [*network.module.named_parameters(), *network.module.named_buffers()]}
    x = torch.randn(5, 4, 3, 2, dtype=torch.float64)
    out = network(p, x[:3], counted.key(0))
    moved = dict(network.running[0][1].moved)
    share = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0, 0], dtype=torch.float64)
    assert torch.allclose(network(p, x, counted.key(0), share)[:3], out, rtol=1e-12, atol=1e-12)
    for name, value in network.running[0][1].moved.items():
        assert torch.allclose(value, moved[name], rtol=1e-12, atol=1e-15)


def test_torchs_own_layer_is_refused():
    says = r"belong to fedfleet.workloads.models.norms.BatchNorm, .* in 1; call fedfleet.convert on the network$"
    with pytest.raises(ValueError, match=says):
        buffers_of(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3)))
    assert buffers_of(nn.BatchNorm1d(3, track_running_stats=False)) == ()


@pytest.mark.parametrize("model", [Cnn4(), ResNet18(norm="batch")], ids=["cnn4", "resnet18"])
def test_norms_are_chosen(model: Any):
    counts = {}
    for norm in ("batch", "group", "none"):
        with torch.device("meta"):
            module = type(model)(norm=norm).build((3, 32, 32), 10)
        counts[norm] = sum(value.numel() for value in module.parameters()), len(buffers_of(module))
    layers = counts["batch"][1] // 2
    assert layers == {"Cnn4": 4, "ResNet18": 20}[type(model).__name__]
    assert counts["group"] == (counts["batch"][0], 0)
    assert counts["none"][1] == 0
    assert counts["none"][0] < counts["batch"][0]
    with pytest.raises(ValueError, match="norm='layer'"):
        type(model)(norm="layer").build((3, 32, 32), 10)


# --- a federation -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Small(Model):
    """A convolution, BatchNorm and a linear layer."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(shape[0], 4, 3), BatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, classes)
        )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Noise with a bright square, whose place is the class."""
    random = np.random.default_rng(0)
    (tmp_path / "data/table").mkdir(parents=True)
    for part, rows in (("train", 90), ("test", 30)):
        label = random.integers(0, CLASSES, rows)
        x = random.normal(size=(rows, *SHAPE)) + 2
        for row, c in enumerate(label):
            x[row, :, 5 * c : 5 * c + 5, 3:8] += 3
        table = pa.table({"input": list(x.reshape(rows, -1)), "label": label})
        parquet.write_table(table, tmp_path / f"data/table/{part}.parquet")
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def workload(root: Path) -> Table:
    return Table(Small(), path=str(root / "table"), reshape=SHAPE)


def plan(root: Path, method: str = "fedavg", **engine: Any) -> Experiment:
    rules = {"fedavg": {"rule": {"name": "sgd", "lr": LR}}, "fedmuon_bc": {"matrix_lr": 0.01, "vector_lr": 0.1}}
    spec = {"name": "table", "path": str(root / "table"), "reshape": list(SHAPE)}
    return experiment(
        {
            "workload": {**spec, "model": "cnn4", "partition": {"name": "dirichlet", "beta": 0.5}},
            "method": {"name": method, **rules.get(method, {})},
            "federation": {
                "clients": 6,
                "cohort": 3,
                "rounds": 3,
                "local": {"epochs": 1, "batch": 8},
                "weights": "examples",
            },
            "engine": {"backend": "local", "dtype": "float64", **engine},
            "tracking": {"uri": "none"},
        }
    )


def test_two_rounds_are_those_of_plain_torch(root: Path):
    """Two clients of unequal size with torch's BatchNorm; models and running statistics are averaged by examples."""
    ours = plan(root).model_copy(update={"workload": workload(root)})
    federation = ours.federation.model_copy(update={"clients": 2, "cohort": 2, "rounds": 2})
    run_spec = ours.model_copy(update={"federation": federation})
    result = run(run_spec)
    split = workload(root).split(0, 2)
    x = torch.from_numpy(split.train["input"]).double()
    label = torch.from_numpy(split.train["label"])
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 3)).double()
    first = {name: value.double() for name, value in workload(root).init(0).items()}
    server = {**net.state_dict(), **first}
    sizes = split.client_index.sizes
    for visit in range(2):
        drawn = stream(split.client_index, np.arange(2), np.full(2, visit), Local(epochs=1, batch=8), 0)
        states = []
        for client in range(2):
            net.load_state_dict(server)
            optimiser = torch.optim.SGD(net.parameters(), LR)
            for k in range(int(drawn.steps[client])):
                rows = drawn.rows[client, k]
                if drawn.weight is not None:
                    rows = rows[drawn.weight[client, k] > 0]
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), label[rows]).backward()
                optimiser.step()
            states.append({name: value.clone() for name, value in net.state_dict().items()})
        server = {
            name: sum(s[name] * int(n) for s, n in zip(states, sizes, strict=True)) / sizes.sum() for name in server
        }
        server["1.num_batches_tracked"] = torch.tensor(0)
    assert set(result.model) == set(first)
    for name, value in result.model.items():  # some dozens of float64 operations for each number
        assert torch.allclose(value, server[name], rtol=1e-9, atol=1e-12), name
    net.load_state_dict(server)
    test = torch.from_numpy(split.test["input"]).double()
    right = (net.eval()(test).argmax(1).numpy() == split.test["label"]).mean()
    assert result.metrics["eval/accuracy"] == pytest.approx(right, abs=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "scaffold_vr", "fedmuon_bc"])
def test_alone_equals_together(root: Path, method: str):
    """Unequal clients in one block, so that some batches are padded and some clients finish early."""
    alone, together = (
        run(plan(root, method, block=block).model_copy(update={"workload": workload(root)})) for block in (1, 3)
    )
    for name, value in alone.model.items():  # 15 steps of float64; Muon's rule takes roots of small differences
        assert torch.allclose(value, together.model[name], rtol=1e-6, atol=1e-9), name
    assert float(alone.model["1.running_mean"].abs().max()) > 0.01


@pytest.mark.long
def test_on_ray_with_a_break_the_same_bits(root: Path, ray_here: None):
    local = run(plan(root, "scaffold"))
    for workers in (1, 2):
        assert run(plan(root, "scaffold", backend="ray", workers=workers)).model_sha256 == local.model_sha256


def test_bytes_are_counted_apart(root: Path):
    """480 channels, a mean and a variance each; float64."""
    record = run(plan(root)).rows[0]
    run_spec = RunSpec.of("x", plan(root))
    own = sum(
        value.numel() for name, value in run_spec.workload.init(0).items() if name not in run_spec.workload.buffers
    )
    assert record["comm/bytes_buffers_down"] == record["comm/bytes_buffers_up"] == 3 * 2 * 480 * 8
    assert record["comm/bytes_down"] == record["comm/bytes_up"] == 3 * own * 8
    assert "comm/bytes_buffers_down" not in run(plan(root).model_copy(update={"workload": "digits"})).rows[0]


def test_methods_see_parameters_only(root: Path):
    run_spec = RunSpec.of("x", plan(root, "scaffold"))
    method, x = run_spec.method(), run_spec.initial_model()
    assert isinstance(method, Buffered)
    forms = StateSpec(method, x)
    own, buffers = split_tree(x, len(run_spec.workload.buffers))
    assert list(buffers) == list(run_spec.workload.buffers)
    assert forms.server.public.method.x.layout == own.layout
    assert forms.kept == own.flat.numel() * 8
    again = join_trees(own, buffers)
    assert torch.equal(again.flat, x.flat)
    assert again.layout == x.layout


def test_noise_leaves_running_statistics_alone(root: Path):
    plain = workload(root)
    noisy = Noisy(plain, scale=1.0)
    batch = {"input": torch.rand(4, *SHAPE), "label": torch.tensor([0, 1, 2, 0]), "key": counted.key(0)}
    moves = []
    for one in (plain, noisy):
        p = {name: value.requires_grad_() for name, value in one.init(0).items()}
        gradients = torch.autograd.grad(one.losses(p, batch).mean(), list(p.values()))
        moves.append(dict(zip(p, gradients, strict=True)))
    for name in plain.buffers:
        assert torch.equal(moves[0][name], moves[1][name])
        assert float(moves[0][name].abs().max()) > 0
    assert not torch.equal(moves[0]["0.weight"], moves[1]["0.weight"])


# --- what server rules do, and do not do, with running statistics -----------------------------------------------------
def ended(root: Path, method: dict[str, Any], rounds: int = 1, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weights, running statistics) of the model that a run ends with. more: of the federation, and `systems`."""
    ours, systems = plan(root).plain(), more.pop("systems", None)
    federation = {**ours["federation"], "rounds": rounds, **more}
    changed = {"federation": federation, "method": method, "workload": workload(root), "systems": systems}
    model = run(experiment({**ours, **changed})).model
    buffers = workload(root).buffers
    assert buffers
    return {n: v for n, v in model.items() if n not in buffers}, {n: v for n, v in model.items() if n in buffers}


SERVERS: dict[str, dict[str, Any]] = {
    "over all": {"name": "fedavg", "over": "all"},
    "a step size": {"name": "fedavg", "server_lr": 0.3},
    "momentum": {"name": "fedavgm", "server_lr": 0.7},
    "a preconditioner": {"name": "fedadam"},
    "extrapolation": {"name": "fedexp", "floor": False, "evaluate": "last"},
    "the mean of two iterates": {"name": "fedexp", "floor": False, "evaluate": "last_two"},
}


@pytest.mark.parametrize("name", SERVERS)
def test_statistics_are_the_cohorts_average_under_every_server_rule(root: Path, name: str):
    """In round 1 the clients do what those of FedAvg do, so the statistics must be equal, and the weights must
    differ."""
    plain, wanted = ended(root, {"name": "fedavg"})
    weights, statistics = ended(root, SERVERS[name])
    for key, value in wanted.items():
        assert torch.equal(statistics[key], value), key
    assert any(not torch.equal(weights[key], value) for key, value in plain.items())


def test_statistics_are_an_average_whatever_the_weights_are_divided_by(root: Path):
    """The coins of round 1 give another number of clients than the three that are expected."""
    (weights, found), (plain, wanted) = (
        ended(root, {"name": "fedavg"}, sampler={"name": "poisson", "divisor": divisor})
        for divisor in ("expected", "realised")
    )
    assert any(not torch.allclose(weights[name], value) for name, value in plain.items())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("buffer", [1, 3])
def test_asynchronous_statistics_are_what_the_clients_of_an_update_measured(root: Path, buffer: int):
    """Weights that stay where they are: the statistics do not depend on the version that changes are counted from, and
    variances are means of variances. A change from an old version that was added to the newest one could be below 0."""
    still = {"name": "fedavg", "rule": {"name": "sgd", "lr": 1e-300}}
    found = []
    for base in ("download", "current"):
        pace = {"name": "buffered", "buffer": buffer, "base": base}
        more = {"pace": pace, "local": {"steps": 20, "batch": 8}, "systems": {"devices": {"name": "lognormal"}}}
        found.append(ended(root, still, 8, **more)[1])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-14)
        assert "var" not in name or float(value.min()) > 0


def test_over_all_moves_the_weights_by_the_share_that_was_sampled(root: Path):
    """Three clients of six take part: the weights go half as far as those of FedAvg."""
    start = {name: value.double() for name, value in workload(root).init(0).items()}
    (plain, _), (damped, _) = ended(root, {"name": "fedavg"}), ended(root, SERVERS["over all"])
    for name, value in damped.items():
        torch.testing.assert_close(value, (start[name] + plain[name]) / 2, rtol=1e-12, atol=1e-14)


def test_over_all_is_a_mean_over_all_clients_whatever_the_sampler_divides_by(root: Path):
    """With a coin for each client, the sum of the displacements is divided by the six clients, too."""
    start = {name: value.double() for name, value in workload(root).init(0).items()}
    coins = {"sampler": {"name": "poisson"}, "weights": "uniform"}
    (plain, _), (damped, _) = (ended(root, {"name": "fedavg", "over": over}, **coins) for over in ("cohort", "all"))
    for name, value in damped.items():
        torch.testing.assert_close(value, (start[name] + plain[name]) / 2, rtol=1e-12, atol=1e-14)


def test_the_mean_of_two_iterates_has_the_newest_statistics(root: Path):
    spec = {"name": "fedexp", "evaluate": "last"}
    (second, newest), (first, older) = ended(root, spec, 2), ended(root, spec, 1)
    weights, statistics = ended(root, {**spec, "evaluate": "last_two"}, 2)
    for name, value in weights.items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2, rtol=1e-12, atol=1e-14)
    for name, value in statistics.items():
        assert torch.equal(value, newest[name])
        assert not torch.equal(value, older[name])
