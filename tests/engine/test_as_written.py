"""What a block of clients with unequal batches computes is what plain autograd computes for each client on the module
that its user wrote. Where it is not, clients train one after the other, and the plan says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.clients.batches import stream
from fedfleet.engine.config.schema import Experiment, Local, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.planning.as_written import Forms, block_difference, may_be_ragged, padded_to
from fedfleet.engine.planning.execution_plan import candidates, in_blocks_or_alone, measurement_key
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.workloads import counted
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.models.convolutional import Dropout
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.objectives import cross_entropy
from fedfleet.workloads.problems.robust import Robust
from fedfleet.workloads.stateless import Keyed
from fedfleet.workloads.workload import Batch, Columns, Params, Partition

from .setups import Built
from .test_execution_plan import played

SIZES = (13, 8, 5, 11, 2, 8)
"""Rows of the clients: with batches of 8 there are short ones, of several sizes, in every block."""
EVEN = (8, 16, 8, 24, 8, 8)
LR, ROUNDS, BATCH, EPOCHS = 0.1, 3, 8, 1
TOLERANCE = 1e-9
"""Largest difference of the models, as a share of the movement of the run, all in float64. A step sums at most 2^12
terms, there are 9 steps, and rounding is 2^-53: 4e-12, and two orders of magnitude for what steps add to the errors of
those before them. The least mistake that the cases have is 1e-3."""


# --- networks ---------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """A network with something in its middle. `middle` gets and gives (B, 6)."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(6, 6), nn.Linear(6, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh())


class Tokens(nn.Module):
    """The mean of embeddings of the inputs as whole numbers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 5, **settings), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x.long() % 9).mean(1).tanh())


class Images(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 3, 2), norm, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x.view(-1, 1, 2, 3))).relu().flatten(1))


class Transposed(Keyed):
    """Draws for a batch in an order in which the draws of a row depend on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        if self.key is None:
            return x
        drawn = counted.uniform(self.key, x.numel()).to(x.dtype)
        return x * (0.5 + drawn.view(x.shape[1], x.shape[0]).T)


class Listed(nn.Module):
    """Computes with a weight that it has in a list beside its parameters, where the engine does not put values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.weights[0], self.first.bias).tanh())


def with_hook(h: Tensor) -> Tensor:
    """A gradient of norm 1 for the whole batch."""
    if h.requires_grad:
        h.register_hook(lambda g: g / (g.norm() + 1e-3))
    return h


def by_hand(h: Tensor) -> Tensor:
    return F.batch_norm(h, None, None, training=True)


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "nothing": lambda: Net(nn.Identity()),
    "group norm": lambda: Net(nn.GroupNorm(2, 6)),
    "weight norm": lambda: Net(weight_norm(nn.Linear(6, 6))),
    "own batch norm": lambda: Net(BatchNorm(6)),
    "images": lambda: Images(BatchNorm(3)),
    "dropout": lambda: Net(Dropout(0.3)),
    "embedding": lambda: Tokens(),
    "rows before": lambda: Net(lambda h: h.cumsum(0)),  # padding comes last
    "largest row": lambda: Net(lambda h: h - h.amax(0)),  # padding repeats a row
}
COUPLED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: Net(nn.BatchNorm1d(6, track_running_stats=False)), r"module middle \(BatchNorm1d\)"),
    "images": (lambda: Images(nn.BatchNorm2d(3, track_running_stats=False)), r"module norm \(BatchNorm2d\)"),
    "by hand": (lambda: Net(by_hand), r"module Net"),
    "mean": (lambda: Net(lambda h: h - h.mean(0)), r"module Net"),
    "spread": (lambda: Net(lambda h: h / (1 + h.std(0, keepdim=True))), r"module Net"),
    "softmax": (lambda: Net(lambda h: h + h.softmax(0)), r"module Net"),
    "order": (lambda: Net(lambda h: h + h.sort(0, descending=True).values), r"module Net"),
    "distances": (lambda: Net(lambda h: h + torch.cdist(h, h + 1).mean(1, keepdim=True)), r"module Net"),
    "attention": (lambda: Net(lambda h: h + (h @ h.T).softmax(-1) @ h), r"module Net"),
    "number": (lambda: Net(lambda h: h * len(h)), r"module Net"),
    "draws": (lambda: Net(Transposed()), r"module middle \(Transposed\)"),
    "hook": (lambda: Net(with_hook), r"the gradient of first\.\w+ differs"),
    "frequencies": (lambda: Tokens(scale_grad_by_freq=True), r"the gradient of embedding\.weight differs"),
    "padding": (lambda: Tokens(padding_idx=2), r"the gradient of embedding\.weight differs"),
}


@dataclass(frozen=True)
class Sized(Partition):
    sizes: tuple[int, ...]

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        return ClientIndex.of(np.split(np.arange(sum(self.sizes)), np.cumsum(self.sizes)[:-1]))


@dataclass(frozen=True)
class Tiny(Classification):
    classes = 3
    shape = (6,)

    def load(self) -> tuple[Columns, Columns]:
        draw = np.random.default_rng(3)
        rows = sum(self.partition.sizes)  # pyright: ignore[reportAttributeAccessIssue]
        x = draw.normal(0, 3, (rows, 6))
        columns = {"input": x, "label": (x.sum(1) > 0) + (x[:, 0] > 1).astype(np.int64)}
        return columns, {name: column[:20] for name, column in columns.items()}


@dataclass(frozen=True)
class Balanced(Tiny):
    """Losses relative to their mean over the batch."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = super().losses(p, batch)
        return losses / losses.detach().mean()


@dataclass(frozen=True)
class Contrastive(Tiny):
    """Each row is to be nearer to itself than to the other rows of the batch."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        logits = self.logits(p, batch, batch.get("key"))
        places = torch.arange(len(logits))
        return cross_entropy(logits, batch["label"]) + F.cross_entropy(logits @ logits.T, places, reduction="none")


def tiny(make: Callable[[], nn.Module], kind: type[Tiny] = Tiny, sizes: tuple[int, ...] = SIZES) -> Tiny:
    return kind(Built(make), Sized(sizes))


def made(workload: Any, **engine: Any) -> Experiment:
    return experiment(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": LR}},
            "federation": {
                "clients": len(SIZES),
                "cohort": len(SIZES),
                "rounds": ROUNDS,
                "local": {"epochs": EPOCHS, "batch": BATCH},
            },
            "engine": {"backend": "local", "dtype": "float64", **engine},
            "tracking": {"uri": "none"},
        }
    )


# --- the plain loop ---------------------------------------------------------------------------------------------------
def plainly(workload: Tiny, mean_loss: Callable[..., Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(model before, model after) all rounds of FedAvg: the module itself, torch.optim.SGD and loss.backward().

    mean_loss: (module, batch) to the loss () of a client's batch without padding.
    """
    split = workload.split(0, len(SIZES))
    begin = {name: value.double() for name, value in workload.init(0).items()}
    model, local = dict(begin), Local(epochs=EPOCHS, batch=BATCH)
    clients = np.arange(len(SIZES))
    for round in range(ROUNDS):
        drawn = stream(split.client_index, clients, np.full(len(SIZES), round), local, 0)
        models = []
        for client in clients:
            module = workload.build().double().train()
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, value in model.items():
                state[name].data.copy_(value)
            for step in range(int(drawn.steps[client])):
                weight = None if drawn.weight is None else drawn.weight[client, step] > 0
                rows = drawn.rows[client, step] if weight is None else drawn.rows[client, step][weight]
                batch = {name: torch.from_numpy(column[rows.numpy()]) for name, column in split.train.items()}
                take_step(module, mean_loss, batch, drawn.keys[client, step])
            models.append({name: value.detach().clone() for name, value in state.items() if name in model})
        model = {name: torch.stack([of[name] for of in models]).mean(0) for name in model}
    return begin, model


def take_step(module: nn.Module, mean_loss: Callable[..., Tensor], batch: dict[str, Tensor], key: Tensor) -> None:
    random = [part for part in module.modules() if isinstance(part, Keyed)]
    for number, part in enumerate(random):
        part.key = counted.key(key, "module", number)
    optimiser = torch.optim.SGD(module.parameters(), LR)
    module.zero_grad()
    mean_loss(module, batch).backward()
    optimiser.step()
    for part in module.modules():
        for name, value in getattr(part, "moved", {}).items():
            part.get_buffer(name).copy_(value)


def of_module(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch["input"]), batch["label"])


def balanced(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(module(batch["input"]), batch["label"], reduction="none")
    return (losses / losses.detach().mean()).mean()


def contrastive(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = module(batch["input"])
    return F.cross_entropy(logits, batch["label"]) + F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def off_plain(model: Any, begin: dict[str, Tensor], end: dict[str, Tensor]) -> float:
    """The largest difference from a model, as a share of its movement."""
    moved = max(float((end[name] - begin[name]).abs().max()) for name in begin)
    return max(float((torch.as_tensor(model[name]) - end[name]).abs().max()) for name in begin) / moved


def trained(workload: Any, **engine: Any) -> tuple[dict[str, Tensor], str]:
    """(the model, the log's line about the plan)."""
    result, told = played(made(workload, **engine))
    return result.model, told


CASES: list[tuple[str, Callable[[], nn.Module], type[Tiny], Callable[..., Tensor], str]] = [
    *((name, make, Tiny, of_module, "") for name, make in RIGHT.items()),
    *((name, make, Tiny, of_module, where) for name, (make, where) in COUPLED.items()),
    ("balanced", RIGHT["nothing"], Balanced, balanced, "the loss"),
    ("contrastive", RIGHT["nothing"], Contrastive, contrastive, "the loss"),
]


@pytest.mark.parametrize(("make", "kind", "mean_loss", "where"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_every_block_trains_as_a_plain_loop_does(
    make: Callable[[], nn.Module], kind: type[Tiny], mean_loss: Callable[..., Tensor], where: str
):
    workload = tiny(make, kind)
    begin, end = plainly(workload, mean_loss)
    for block in (1, 2, 4, "auto"):
        model, told = trained(workload, block=block)
        assert off_plain(model, begin, end) < TOLERANCE, block
        taken = 1 if where else len(SIZES) if block == "auto" else block
        assert told.startswith(f"plan: blocks of {taken} clients, torch kernels"), told
        if block != 1:
            assert bool(re.search(where, told)) if where else "one after the other" not in told, told
            assert "\n" not in told


@pytest.mark.parametrize("name", ["batch norm", "mean", "distances", "number"])
def test_rows_may_be_coupled_where_no_batch_is_padded(name: str):
    """Then a block computes what the module does, and nothing is to change."""
    workload = tiny(COUPLED[name][0], sizes=EVEN)
    begin, end = plainly(workload, of_module)
    model, told = trained(workload, block=4)
    assert off_plain(model, begin, end) < TOLERANCE
    assert told.startswith("plan: blocks of 4 clients, torch kernels (too short a run to measure)")


def test_another_gradient_in_a_block_counts_without_padding_too():
    workload = tiny(COUPLED["padding"][0], sizes=EVEN)
    begin, end = plainly(workload, of_module)
    model, told = trained(workload, block=4)
    assert off_plain(model, begin, end) < TOLERANCE
    assert told.startswith("plan: blocks of 1 clients")


def test_a_parameter_that_the_engine_does_not_reach_is_refused():
    """The engine would train another weight than the one with which the module computes."""
    with pytest.raises(
        ConfigError, match=r"^workload: the gradient of first\.weight differs by .* between the engine and"
    ):
        run(made(tiny(Listed), dtype="float32"))


@pytest.mark.parametrize("name", ["nothing", "dropout", "own batch norm", "batch norm", "mean"])
def test_minimax(name: str):
    """The forms are compared through what a loss computes around the network, and with draws."""
    make = (RIGHT | {name: made for name, (made, _) in COUPLED.items()})[name]
    alone, block = (trained(Robust(tiny(make)), block=block) for block in (1, 4))
    moved = max(float(value.abs().max()) for value in alone[0].values())
    assert max(float((alone[0][n] - block[0][n]).abs().max()) for n in alone[0]) < TOLERANCE * moved
    assert block[1].startswith(f"plan: blocks of {1 if name in COUPLED else 4} clients")


# --- code that does not compute in float64 ----------------------------------------------------------------------------
class InFloat32(nn.Module):
    """Computes in float32, whatever it is given."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(6, 6), nn.Linear(6, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
        return F.linear(self.middle(h).tanh(), self.last.weight.float(), self.last.bias.float())


class NeedsFloat32(Net):
    """Raises an exception for float64."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first.weight.dtype != torch.float32:
            raise TypeError("float32 is needed")
        return super().forward(x)


@pytest.mark.parametrize("net", [InFloat32, NeedsFloat32])
@pytest.mark.parametrize(("middle", "right"), [(nn.Identity, True), (lambda: lambda h: h - h.mean(0), False)])
def test_code_that_computes_in_float32(net: Any, middle: Callable[[], Any], right: bool):
    told = trained(tiny(lambda: net(middle())), block=4, dtype="float32")[1]
    assert told.startswith(f"plan: blocks of {4 if right else 1} clients, torch kernels"), told


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("name", ["nothing", "mean"])
def test_other_kernels_train_as_a_plain_loop_does(name: str):
    """In float32. A step adds errors of about 2^7 roundings of its sums, there are 9 steps, and the run moves the
    weights by a tenth of their size: 2^7 * 9 * 10 * 2^-24 = 7e-4. The mistake in blocks is 0.01."""
    make = COUPLED[name][0] if name in COUPLED else RIGHT[name]
    workload = tiny(make)
    begin, end = plainly(workload, of_module)
    model, told = trained(workload, block=4, kernels="native", dtype="float32")
    assert off_plain({n: value.double() for n, value in model.items()}, begin, end) < 7e-4
    assert told.startswith(f"plan: blocks of {1 if name in COUPLED else 4} clients, native kernels"), told


# --- which batches there are ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [SIZES, EVEN, (5,) * 6, (9,) * 6, (8, 8, 8, 8, 8, 4), (1,) * 6])
def test_runs_with_padding_are_known(sizes: tuple[int, ...]):
    index = ClientIndex.of(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    found = set()
    for visit in range(4):
        drawn = stream(index, np.arange(6), np.full(6, visit), Local(epochs=1, batch=BATCH), 0)
        rows = drawn.rows.shape[2] if drawn.weight is None else (drawn.weight > 0).sum(-1)
        for client in range(6):
            for step in range(int(drawn.steps[client])):
                found.add(rows if isinstance(rows, int) else int(rows[client, step]))
    assert may_be_ragged(index, BATCH) == (len(found) > 1)


def test_padded_as_in_a_round():
    """The batch with which blocks are compared is padded as those of a round are."""
    workload = tiny(RIGHT["nothing"])
    split = workload.split(0, len(SIZES))
    drawn = stream(split.client_index, np.array([0, 2]), np.zeros(2), Local(steps=1, batch=BATCH), 0)
    assert drawn.weight is not None
    short = {"input": torch.from_numpy(split.train["input"][drawn.rows[1, 0, :5].numpy()]), "key": drawn.keys[1, 0]}
    padded = padded_to(BATCH, short)
    assert torch.equal(padded["weight"], drawn.weight[1, 0])
    assert torch.equal(padded["input"], torch.from_numpy(split.train["input"][drawn.rows[1, 0].numpy()]))


# --- modules that change ----------------------------------------------------------------------------------------------
class Counts(nn.Module):
    """Changes what it computes after some calls, which a recording of its operations would never do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(x) if self.calls < 1000 else 2 * self.last(x)


CALLS = 0


class CountsOutside(nn.Module):
    """Counts in a variable of its module of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return self.last(x) * (1 + CALLS // 1000)


class Averages(nn.Module):
    """Keeps a mean of its inputs, which a later call may use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.last(x)


class Caches(nn.Module):
    """Keeps what follows from the inputs of its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last = None, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.detach(), len(x))
        return self.last(x)


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (Counts, "Counts.calls"),
        (CountsOutside, "test_as_written.CALLS"),
        (Averages, r"Averages._buffers\['mean'\]"),
    ],
)
def test_a_module_that_changes_from_call_to_call_is_refused(make: Callable[[], nn.Module], attribute: str):
    with pytest.raises(
        ConfigError, match=rf"^workload: losses change the attribute {attribute} \(.*, line \d+ in forward"
    ):
        run(made(tiny(make), block=1))


def test_a_module_may_keep_its_last_call():
    assert len(run(made(tiny(Caches), block=4)).rows) == ROUNDS


def test_a_run_that_began_in_blocks_goes_on_right(tmp_path: Path):
    """Its checkpoint says so, from a time when blocks were not compared."""
    workload = tiny(COUPLED["mean"][0])
    run_spec = RunSpec.of("run", made(workload), str(tmp_path), resume=True)
    plan, how = in_blocks_or_alone(run_spec, run_spec.split(), ExecutionPlan(4, "torch"), "as the run began")
    assert plan == (1, "torch")
    assert how.startswith("as the run began; clients train one after the other, not in blocks of 4, which takes longer")


def test_what_is_measured_has_no_blocks():
    """A plan of a measurement is kept for all models of the same shapes, of which others may train in blocks."""
    long = {"rounds": 10_000}
    specs = []
    for name in ("nothing", "mean"):
        make = COUPLED[name][0] if name in COUPLED else RIGHT[name]
        asked = made(tiny(make))
        specs.append(
            RunSpec.of("run", asked.model_copy(update={"federation": asked.federation.model_copy(update=long)}))
        )
    blocks, keys = [], []
    for run_spec in specs:
        split = run_spec.split()
        blocks.append({plan.block for plan in candidates(run_spec, split)})
        keys.append(measurement_key(run_spec, split))
    assert len(blocks[0]) > 1
    assert blocks[1] == {1}
    assert keys[0] != keys[1]


# --- plain autograd on the module -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Twice(Tiny):
    """Calls the network twice, with the same tensors."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        return super().losses(p, batch) + super().losses(p, {**batch, "input": -batch["input"]})


@dataclass(frozen=True)
class Doubled(Tiny):
    """Calls the network with tensors that it computes, beside a term of the tensors themselves."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        decay = sum(value.square().sum() for value in p.values())
        return super().losses({name: 2 * value for name, value in p.items()}, batch) + 0.1 * decay


@dataclass(frozen=True)
class Moved(Tiny):
    """Calls the network with several sets of tensors, as a module with parameters of its own cannot be called."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        return super().losses(p, batch) + super().losses({name: value + 0.1 for name, value in p.items()}, batch)


def forms_of(workload: Tiny) -> tuple[Forms, Batch]:
    split = workload.split(0, len(SIZES))
    batch = {name: torch.from_numpy(column[:5]) for name, column in split.train.items()}
    return Forms(RunSpec.of("run", made(workload))), {**batch, "key": counted.key(0, "batch")}


@pytest.mark.parametrize(("kind", "kept"), [(Tiny, True), (Twice, True), (Doubled, True), (Moved, False)])
def test_gradients_of_the_module_reach_the_model(kind: type[Tiny], kept: bool):
    """What a loss does around the network is differentiated too. Where a module as it was written has no such form, the
    engine's form for one client is taken."""
    forms, batch = forms_of(tiny(RIGHT["dropout"], kind))
    point = forms.x.flat + 0.1
    plain, own = forms.plain(point, batch), forms.alone(point, batch)
    assert (forms.as_written is not None) == kept
    assert float((plain[0] - own[0]).abs().max()) < 1e-12 * float(own[0].abs().max())  # the order of a few sums
    assert float((plain[1] - own[1]).abs()) < 1e-12


def test_hooks_of_parameters_and_sparse_gradients_are_those_of_the_module():
    def make() -> nn.Module:
        net = Tokens(sparse=True)
        net.last.weight.register_hook(lambda g: 3 * g)
        return net

    forms, batch = forms_of(tiny(make))
    usual, _ = forms_of(tiny(RIGHT["embedding"]))
    hooked, expected = (Tree(f.plain(f.x.flat, batch)[0], f.layout)["last.weight"] for f in (forms, usual))
    assert forms.as_written is not None
    assert torch.equal(hooked, 3 * expected)
    whole, other = (Tree(f.plain(f.x.flat, batch)[0], f.layout)["embedding.weight"] for f in (forms, usual))
    assert float((whole - other).abs().max()) < 1e-15


def test_a_workload_that_cannot_be_copied_is_compared_by_the_form_for_one_client():
    @dataclass(frozen=True)
    class Locked(Tiny):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    for make, block in ((RIGHT["nothing"], 4), (COUPLED["mean"][0], 1)):
        assert trained(tiny(make, Locked), block=4)[1].startswith(f"plan: blocks of {block} clients")


class Scaled(nn.Module):
    """Has a positive parameter, beside which there are models without a loss. limit: what is below it raises."""

    def __init__(self, middle: Callable[[Tensor], Tensor], raises: bool) -> None:
        super().__init__()
        self.net, self.scale, self.raises = Net(middle), nn.Parameter(torch.full((6,), 1e-3)), raises

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            torch.linalg.cholesky(self.scale.diag())
        return self.net(x * self.scale.log())


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(("middle", "right"), [(nn.Identity(), True), (lambda h: h - h.mean(0), False)])
def test_models_that_have_no_loss_beside_the_initial_one(middle: Any, right: bool, raises: bool):
    """Then the initial model is the one at which forms are compared."""
    run_spec = RunSpec.of("run", made(tiny(lambda: Scaled(middle, raises)), block=4))
    told = block_difference(run_spec, run_spec.split())
    assert told == "" if right else told.startswith("module net (Net) makes"), told
