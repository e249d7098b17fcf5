"""Networks and methods of users that nobody had in mind: constants that a network draws, sparse matrices, parts that
depend on the size of a batch, messages of whole numbers. A run computes what plain autograd computes on the module that
its seed gives, or refuses in a sentence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from fedfleet.algorithms.contract import Algorithm, Message, Server
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import run
from fedfleet.engine.clients.batches import stream
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.clients.modules import generators, moved
from fedfleet.engine.config.schema import Experiment, Local
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.wrappers.noisy import Noisy

from .test_as_written import BATCH, EPOCHS, LR, ROUNDS, SIZES, TOLERANCE, Net, Tiny, made, off_plain, tiny


# --- networks ---------------------------------------------------------------------------------------------------------
class Around(nn.Module):
    """The network of these tests, behind what a subclass does with its inputs (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(nn.Identity())

    def changed(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.changed(x))


class Features(Around):
    """Random features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("omega", torch.randn(6, 6))

    def changed(self, x: Tensor) -> Tensor:
        return torch.cos(x @ self.get_buffer("omega").to(x.dtype))


class Attribute(Around):
    """Keeps what follows from its initial weights in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.net.first.weight.detach().abs().sum(0)

    def changed(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype)


class Pruned(Around):
    """Without the smallest of its initial weights."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.net.first, "weight", 10)


class ByNumpy(Around):
    """Draws its constants and a parameter by NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.from_numpy(np.random.rand(6)))
        self.scale = nn.Parameter(torch.full((6,), random.random()))

    def changed(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("mask").to(x.dtype) * self.scale


class Graph(Around):
    """Multiplies with a sparse matrix that is a buffer, and with one that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cycle", torch.eye(6, dtype=torch.float64).roll(1, 0).to_sparse())

    def changed(self, x: Tensor) -> Tensor:
        places, ones = torch.arange(6).expand(2, -1), torch.ones(6, dtype=x.dtype)
        made = torch.sparse_coo_tensor(places, ones, (6, 6), check_invariants=False)
        return x + torch.sparse.mm(self.get_buffer("cycle"), torch.sparse.mm(made, x.T)).T


class Empty(Around):
    """Has parameters without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.nothing = nn.Parameter(torch.zeros(0, 3)), nn.Linear(6, 0)

    def changed(self, x: Tensor) -> Tensor:
        return x + self.none.sum() + self.nothing(x).sum(1, keepdim=True)


class OwnGenerator(Around):
    """Draws by a generator without a seed."""

    def __init__(self, parameter: bool) -> None:
        super().__init__()
        scale = torch.from_numpy(np.random.default_rng().random(6))
        self.scale = nn.Parameter(scale) if parameter else scale

    def changed(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype)


class FrozenNorm(Around):
    """Has a BatchNorm that is always in eval(), as fine-tuning often has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.norm.register_buffer("running_mean", torch.full((6,), 0.3))
        self.norm.register_buffer("running_var", torch.full((6,), 2.0))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def changed(self, x: Tensor) -> Tensor:
        return self.norm(x) * (2 if self.training else 1)


def orthogonal() -> nn.Module:
    return Net(parametrizations.orthogonal(nn.Linear(6, 6).double()))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (Features, Attribute, Pruned, ByNumpy, Graph, Empty, FrozenNorm)},
    "orthogonal": orthogonal,
    "scripted": scripted,
}


# --- the plain loop ---------------------------------------------------------------------------------------------------
def plainly(workload: Tiny, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(model before, model after) all rounds of FedAvg by one module, torch.optim.SGD and loss.backward()."""
    split, local = workload.split(seed, len(SIZES)), Local(epochs=EPOCHS, batch=BATCH)
    module = initial(workload.build, seed).double().train()
    begin = {name: value.detach().clone() for name, value in module.named_parameters()}
    now, clients = begin, np.arange(len(SIZES))
    for number in range(ROUNDS):
        drawn, after = stream(split.client_index, clients, np.full(len(SIZES), number), local, seed), []
        assert drawn.weight is not None  # some batches are short
        for client in clients:
            for name, value in module.named_parameters():
                value.data.copy_(now[name])
            optimiser = torch.optim.SGD(module.parameters(), LR)
            for step in range(int(drawn.steps[client])):
                rows = drawn.rows[client, step][drawn.weight[client, step] > 0].numpy()
                batch = {name: torch.from_numpy(column[rows]) for name, column in split.train.items()}
                optimiser.zero_grad()
                F.cross_entropy(module(batch["input"]), batch["label"]).backward()
                optimiser.step()
            after.append({name: value.detach().clone() for name, value in module.named_parameters()})
        now = {name: torch.stack([each[name] for each in after]).mean(0) for name in now}
    return begin, now


def seeded(workload: Any, seed: int, **engine: Any) -> Experiment:
    return made(workload, **engine).model_copy(update={"seed": seed})


def sized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those with numbers."""
    return {name: value for name, value in tensors.items() if value.numel()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:Initializing zero-element")
@pytest.mark.parametrize("name", NETWORKS)
def test_runs_equal_a_plain_loop_on_the_module_of_the_seed(name: str):
    """What a network draws besides its weights belongs to them: both follow from the seed."""
    workload = tiny(NETWORKS[name])
    before = generators()
    begin, end = plainly(workload, 3)
    for engine in ({"block": 1}, {"block": 4}, {"block": 4, "vectorise": False}):
        if name == "scripted" and engine == {"block": 4}:
            continue  # it may not run under vmap
        found = run(seeded(workload, 3, **engine)).model
        assert off_plain(found, sized(begin), sized(end)) < TOLERANCE, engine
    assert moved(before) == ""


def test_workloads_around_others_have_the_network_of_the_seed():
    digests = [run(seeded(workload, 3)).model_sha256 for workload in (tiny(Features), Noisy(tiny(Features)))]
    assert digests[0] == digests[1]


def test_members_with_other_constants_are_not_trained_as_one():
    forms = {}
    for kind in (Features, Around):
        specs = [prepare(seeded(tiny(kind), seed), "x") for seed in (3, 3, 4)]
        forms[kind] = [LocalTrainer(spec.method(), spec.workload, spec.initial_model()).form for spec in specs]
    assert forms[Features][0] == forms[Features][1] != forms[Features][2]
    assert forms[Around][0] == forms[Around][1] == forms[Around][2]


class DropsInLargeBatches(Around):
    """Larger ones than those that are tried before round 1."""

    def changed(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training) if len(x) > 10 else x


def test_functions_that_are_called_for_some_batches_draw_from_the_key():
    local = Local(epochs=1, batch=16)
    asked = made(tiny(DropsInLargeBatches, sizes=(40, 30, 20, 33, 21, 22)), block=1)
    asked = asked.model_copy(update={"federation": asked.federation.model_copy(update={"local": local})})
    digests = set()
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            digests.add(run(asked).model_sha256)
    assert len(digests) == 1


class Bounded(Around):
    """Keeps a weight in bounds that the initial one is far from."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.net.last.weight.clamp_(-1, 1)
        return self.net(x)


class Fused(Around):
    """Keeps in eval() what follows from the weights."""

    def train(self, mode: bool = True) -> nn.Module:
        self.twice = None if mode else 2 * self.net.first.weight.detach()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.twice is None else self.net.last(F.linear(x, self.twice).tanh())


class Merged(Around):
    """Adds factors to its weights in eval(), in place."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.merged = nn.Parameter(torch.full((3, 6), 0.1)), False

    def train(self, mode: bool = True) -> nn.Module:
        if mode == self.merged:
            self.net.last.weight.data += -self.more if mode else self.more
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.merged else self.net(x) + F.linear(self.net.first(x).tanh(), self.more)


class Kept(Around):
    """Keeps in its first evaluation what follows from the weights, until it is trained again."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = None if self.training else self.net.first.weight.detach() if self.kept is None else self.kept
        return self.net(x) if self.kept is None else self.net(x @ self.kept)


IN_EVAL = r"the metric \w+ differs between the engine and the module itself in eval\(\); let forward"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Bounded, r"losses write in place into the model \(.*clamp_\(-1, 1\)\); make a new tensor"),
        (Fused, IN_EVAL),
        (Merged, IN_EVAL),
        (Kept, IN_EVAL),
        (lambda: OwnGenerator(True), r"a network that is built again with the same seed .* has other weights; draw by"),
        (lambda: OwnGenerator(False), "a network that is built again .* computes something else; draw by"),
    ],
)
def test_networks_that_keep_or_change_weights_are_refused(make: Callable[[], nn.Module], told: str):
    with pytest.raises(ConfigError, match=f"^workload: {told}"):
        run(made(tiny(make)))


# --- losses and columns -----------------------------------------------------------------------------------------------
class Detached(Tiny):
    def losses(self, p: Any, batch: Any) -> Tensor:
        return super().losses(p, batch).detach()


class Errors(Tiny):
    def losses(self, p: Any, batch: Any) -> Tensor:
        return self.logits(p, batch, batch.get("key")).argmax(-1) != batch["label"]


@pytest.mark.parametrize(
    ("kind", "got"), [(Detached, r"numbers without one; .*without detach\(\)"), (Errors, "bool; compute them")]
)
def test_losses_without_a_gradient_are_refused(kind: type[Tiny], got: str):
    with pytest.raises(ConfigError, match=f"^workload: losses must have a gradient in the model, got {got}"):
        run(made(tiny(Around, kind)))


COLUMNS: dict[str, Callable[[np.ndarray], Any]] = {
    ">f8 in another order of bytes in column input": lambda x: x.astype(">f8"),
    "object in column input": lambda x: x.astype(object),
    "<U32 in column input": lambda x: x.astype(str),
    "Tensor in column input": torch.from_numpy,
    "list in column input": np.ndarray.tolist,
    "complex128 in column input; give real": lambda x: x + 1j,
}


@pytest.mark.parametrize("told", COLUMNS)
def test_columns_that_torch_cannot_take_are_refused(told: str):
    class Other(Tiny):
        def load(self) -> Any:
            return [{**part, "input": COLUMNS[told](part["input"])} for part in super().load()]

    with pytest.raises(ConfigError, match=f"^workload: .* got {told}"):
        run(made(tiny(Around, Other)))


# --- methods ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Votes(Algorithm):
    """Clients send in which direction every number has moved, and the server adds the mean."""

    kind: str = "int8"

    def server_init(self, x: Tree) -> Server:
        return Server(x)

    def client_init(self, public: Tree) -> Any:
        return ()

    def client_begin(self, public: Tree, client: Any) -> Tree:
        return public

    def client_step(self, public: Tree, client: Any, local: Tree, oracle: Any) -> Tree:
        return local + oracle(local) * -LR

    def client_finish(self, public: Tree, client: Any, local: Tree) -> tuple[Any, Any]:
        moved = local - public
        up = moved.flat > 0
        facts = {"norm2": moved.norm2(), "up": up.sum()}
        return Message(
            (), up if self.kind == "bool" else moved.flat.sign().to(getattr(torch, self.kind)), facts
        ), client

    def server_update(self, server: Server, mean: Message, round: Any) -> Server:
        votes = 2 * mean.sent - 1 if self.kind == "bool" else mean.sent
        return Server(Tree(server.public.flat + 0.01 * votes, server.public.layout))

    def model(self, server: Server) -> Tree:
        return server.public


@pytest.mark.parametrize("block", [1, 4])
def test_means_of_whole_numbers_are_not_rounded(block: int):
    results = {
        kind: run(made(tiny(Around), block=block).model_copy(update={"method": Votes(kind)}))
        for kind in ("float64", "int8", "bool")
    }
    wanted, begin = results["float64"], {name: value.double() for name, value in tiny(Around).init(0).items()}
    end = {name: torch.as_tensor(value) for name, value in wanted.model.items()}
    for kind, found in results.items():
        assert off_plain(found.model, begin, end) < TOLERANCE, kind
        assert found.rows[0]["client/up"] == wanted.rows[0]["client/up"]
    assert wanted.rows[0]["client/up"] % 1 > 0  # a mean over clients that is no whole number
    assert results["int8"].rows[0]["comm/bytes_up"] * 8 == wanted.rows[0]["comm/bytes_up"]


class Complex(Votes):
    def client_finish(self, public: Tree, client: Any, local: Tree) -> tuple[Any, Any]:
        moved = local - public
        return Message((), torch.fft.rfft(moved.flat), {"norm2": moved.norm2()}), client


class WithoutNorm(Votes):
    def client_finish(self, public: Tree, client: Any, local: Tree) -> tuple[Any, Any]:
        return Message(local - public, (), {}), client


class Vector(Votes):
    def client_finish(self, public: Tree, client: Any, local: Tree) -> tuple[Any, Any]:
        return Message(local - public, (), {"norm2": local.norm2(), "all": local.flat[:3]}), client


class Number(Votes):
    def client_finish(self, public: Tree, client: Any, local: Tree) -> tuple[Any, Any]:
        return Message(local - public, (), {"norm2": 0.5}), client


class Alone(Votes):
    def client_finish(self, public: Tree, client: Any, local: Tree) -> Any:
        return Message(local - public, (), {"norm2": local.norm2()})


class NoGradient(Votes):
    def client_step(self, public: Tree, client: Any, local: Tree, oracle: Any) -> Tree:
        return local


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            Complex(),
            r"client_finish: messages must be real, got complex numbers \(.*line \d+ in client_finish: .*view_as",
        ),
        (WithoutNorm(), r"client_finish: the facts of a message must have norm2, got none \(.*\.norm2\(\)"),
        (Vector(), r"client_finish: facts are numbers, got all of shape \(3,\)"),
        (Number(), r"a Message has tensors only, got 0\.5 in facts; give torch\.as_tensor of it$"),
        (Alone(), r"client_finish must return \(a Message, the client's state\), got Message; return both$"),
        (NoGradient(), r"client_step asks for no gradient; call oracle\(y\)"),
    ],
)
def test_messages_that_cannot_be_averaged_are_refused(method: Any, told: str):
    with pytest.raises(ConfigError, match=f"^method: {told}"):
        run(made(tiny(Around)).model_copy(update={"method": method}))


@pytest.mark.parametrize("more", [{"aggregate": "median"}, {"attack": {"name": "sign_flip", "share": 0.2}}])
def test_rules_and_attacks_need_floats(more: dict[str, Any]):
    asked = Experiment(**{**dict(made(tiny(Around))), "method": Votes("int8"), **more})
    with pytest.raises(ConfigError, match=r"^method: client_finish: with aggregate, attack or privacy .* got int8"):
        run(asked)


def test_factors_beside_a_weight_that_is_computed_are_refused():
    with pytest.raises(
        ConfigError, match=r"^workload: targets: net\.first must have a weight of its own, got one that"
    ):
        run(made(replace(tiny(Pruned), adapter=Lora(targets="net.first", rank=2))))
