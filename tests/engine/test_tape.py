"""Recorded functions of tensors: they change no bit, and are not used where they would."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedfleet import run
from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.local import LocalMethod
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.engine import Experiment
from fedfleet.engine.clients import local_training
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.clients.members import MembersPublic, MembersTrainer
from fedfleet.engine.kernels import tape
from fedfleet.engine.kernels.tape import PROOFS, Tapes
from fedfleet.engine.method_form.numbers import numbers
from fedfleet.engine.method_form.state_spec import some_view
from fedfleet.engine.runs.prepare import prepare
from tests.methods import ON_ANY_MODEL as METHODS

from ..test_conformance import spec as with_arguments
from .setups import EPOCHS, STEPS, digits

SHORT = ("fedavg", "scaffold", "fedadam", "local_muon", "fedmuon_bc", "stem", "fedprox", "diloco")
"""Methods of all kinds. `make test-long` has the others, too."""


@pytest.fixture(scope="module")
def problem() -> Any:
    return prepare(digits("fedavg", {**STEPS, "steps": 2}), "test")  # some methods need an even number


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in METHODS])
def test_a_recorded_round_has_the_bits_of_the_round(name: str, problem: Any):
    """Several rounds of a block of three members, with batches and numbers of steps that change from round to round."""
    experiment = problem.experiment.model_copy(update={"method": with_arguments(name)})
    spec = problem.of("test", experiment)
    method, x, count = spec.method(), spec.initial_model(), 3
    paths = [path for path in numbers(method) if path[-1] in ("lr", "server_lr", "matrix_lr")][:1]
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        public = method.unpack(method.broadcast(method.server_init(x)))
        client = method.client_init(public)
        both = pytree.tree_map(
            lambda leaf: leaf.expand(count, *leaf.shape).clone(), (some_view(method, public, client), client)
        )
        values = tuple(torch.full((count,), numbers(method)[path], dtype=torch.float64) for path in paths)
        recorded, plain = (MembersTrainer(LocalTrainer(method, spec.workload, x), tuple(paths)) for _ in range(2))
        plain.tapes = None
        clients = [both[1], both[1]]
        for steps in ((2, 2, 2), (3, 2, 1), (2, 2, 2), (2, 2, 2)):
            batches = [
                {
                    "input": torch.rand(count, 4, 1, 8, 8, generator=draw),
                    "label": torch.randint(10, (count, 4), generator=draw),
                    "key": torch.randint(1 << 40, (count,), generator=draw),
                }
                for _ in range(max(steps))
            ]
            results = [
                trainer.train_block(
                    MembersPublic(both[0], values), client, torch.tensor(steps), lambda k, own=batches: own[k]
                )
                for trainer, client in zip((recorded, plain), clients, strict=True)
            ]
            found, wanted = (pytree.tree_leaves((each.message, each.client, each.loss)) for each in results)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            assert results[0].gradients == results[1].gradients
            clients = [result.client for result in results]
    assert recorded.tapes is not None
    assert recorded.tapes.refused == ""
    assert recorded.tapes.replayed > PROOFS


def called(function: Any, times: int = 6, tapes: Tapes | None = None) -> Tapes:
    """The recordings after some calls with different arguments, whose results are those of the function."""
    tapes = tapes or Tapes()
    for i in range(times):
        x = torch.arange(4.0) + i
        assert torch.equal(tapes.call("f", function, x), function(x))
    return tapes


def test_a_function_is_recorded_once_for_each_shape():
    tapes = called(vmap(lambda x: torch.where(x > 2, x.sin(), x * 3).sum()))
    assert (tapes.recorded, tapes.replayed, tapes.refused) == (1, 5, "")
    assert torch.equal(tapes.call("f", lambda x: x * 2, torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert tapes.recorded == 2


def test_writing_in_place_and_views():
    def function(x):
        y = x.clone()
        y[1:].add_(1)
        y.view(2, 2)[0].mul_(y[3])
        return y

    assert called(function).refused == ""


def test_several_results_and_arguments_that_are_one_tensor():
    tapes, x = Tapes(), torch.arange(4.0)
    function = lambda a, b: (a.split([1, 3])[1], {"sum": a + b, "b": b})  # noqa: E731
    tapes.call("f", function, x, x)
    for _ in range(5):
        first, second = tapes.call("f", function, x, x + 1)
        assert first.tolist() == [1, 2, 3]
        assert second["sum"].tolist() == [1, 3, 5, 7]
        assert second["b"].tolist() == [1, 2, 3, 4]
    assert tapes.refused == ""


CYCLE = torch.eye(4).roll(1, 0).to_sparse()
"""A matrix as graph networks multiply with it."""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x + torch.rand(4), "random"),
        (lambda x: x * float(x[1]), "not a tensor"),
        (lambda x: x * 2 if x.sum() > 7 else x, "not a tensor"),
        (lambda x: x * (2 if torch.equal(x, x.abs()) else 3), "not a tensor"),
        (lambda x: x + torch.from_numpy(x.numpy()), "numpy reads the numbers"),
        (lambda x: x + float(np.asarray(x)[1]), "__array__ reads the numbers"),
        (lambda x: x + torch.tensor(x.tolist()), "tolist reads the numbers"),
        (lambda x: x + torch.from_dlpack(torch._C._to_dlpack(x)), "that no operation made"),
        (lambda x: x + float(repr(x)[8]), "other bits"),
        (lambda x: x + torch.tensor(1.0).add_(1), "writes into a tensor that no operation"),
        (lambda x: torch.add(x, 1, out=torch.from_numpy(np.zeros(4, np.float32))), "writes into a tensor that no"),
        (lambda x: x * torch.tensor([x[0], 2, x.min(), 1]), "tensor reads the numbers of the tensors in a list"),
        (lambda x: x + x.new_tensor(data=[[x.max()]]), "new_tensor reads the numbers of the tensors in a list"),
        (lambda x: x + x.tensor_split(torch.tensor([2]))[0].sum(), "tensor_split reads the numbers"),
        (lambda x: x + torch.sparse.mm(CYCLE, x.view(4, 1)).view(4), "the layout sparse_coo"),
    ],
)
def test_what_a_replay_would_not_do_again_is_refused(function: Any, why: str):
    tapes = Tapes()
    for i in range(3):
        x = torch.arange(4.0) + i
        with torch.random.fork_rng():
            torch.manual_seed(i)
            found = tapes.call("f", function, x)
            torch.manual_seed(i)
            assert torch.equal(found, function(x))
    assert why in tapes.refused
    assert not tapes.kept


def masked_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        return torch.autograd.grad(point[point >= 0].square().mean(), point)[0]


def packed(x: torch.Tensor) -> torch.Tensor:
    """A sequence whose length is that up to its last positive number, packed and padded again."""
    length = (x > 0).long().flip(0).cumsum(0).count_nonzero().view(1)
    rows = nn.utils.rnn.pack_padded_sequence(x.view(1, 4, 1), length, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(rows, total_length=4)[0].view(4)


SHAPES_FROM_NUMBERS = {
    "packed sequences": packed,
    "nonzero": lambda x: x.sum() / len((x >= 0).nonzero()),
    "the length of a masked tensor": lambda x: x.sum() / len(x[x >= 0]),
    "a branch on it": lambda x: x * 2 if len(x[x >= 0]) == 4 else x * 3,
    "masked_select": lambda x: x.sum() / torch.masked_select(x, x >= 0).numel(),
    "a gradient through a mask": masked_gradient,
    "unique": lambda x: x / len(torch.unique(x)),
    "bincount": lambda x: x / torch.bincount(x.abs().long()).numel(),
    "repeat_interleave": lambda x: x / torch.repeat_interleave(x, (x >= 0).long()).numel(),
}


@pytest.mark.parametrize("name", SHAPES_FROM_NUMBERS)
def test_shapes_that_depend_on_numbers_are_not_recorded(name: str):
    """Sizes in a recording are those of its first call. Here they are the same in the calls that are made both ways,
    and differ later."""
    function, tapes = SHAPES_FROM_NUMBERS[name], Tapes()
    usual = torch.arange(1.0, 5.0)
    for x in [usual] * (PROOFS + 2) + [torch.tensor([-1.0, 2.0, 7.0, 2.0]), torch.tensor([1.0, 2.0, 7.0, -2.0])]:
        assert torch.equal(tapes.call(name, function, x), function(x))
    assert "depends on the numbers" in tapes.refused


def test_rows_by_their_numbers_are_recorded():
    """`index` with whole numbers gives the shape of its index."""
    tapes, x = Tapes(), torch.arange(12.0).view(4, 3)
    for rows in (torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([3, 0]), torch.tensor([2, 3])):
        assert torch.equal(tapes.call("rows", lambda x, rows: x[rows], x, rows), x[rows])
    assert (tapes.refused, tapes.replayed) == ("", 3)


def test_a_replay_that_fails_is_refused():
    """torch's LSTM on the processor gives a workspace that a replay cannot give to its backward pass."""
    lstm = torch.nn.LSTM(3, 5, batch_first=True)
    weights = [value.detach() for value in lstm.parameters()]
    zeros = torch.zeros(1, 2, 5)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = torch.lstm(x, (zeros, zeros), weights, True, 1, 0.0, False, False, True)[0]
            return torch.autograd.grad(out.square().sum(), x)[0]

    tapes = Tapes()
    for _ in range(4):
        x = torch.rand(2, 4, 3)
        assert torch.equal(tapes.call("f", function, x), function(x))
    assert tapes.refused


@pytest.mark.parametrize("when", [2, 3, 5, 9])
def test_a_constant_that_differs_by_round_is_found_in_the_first_call_of_a_round(when: int):
    """As a schedule or a counter is that a function reads from elsewhere: in the first round all calls agree."""
    tapes, factor = Tapes(), [1.0]

    def scaled(x: Tensor) -> Tensor:
        return x.sin() * factor[0]

    for round in range(1, 10):
        tapes.begin_round(round)
        factor[0] = 2.0 if round >= when else 1.0
        called(scaled, tapes=tapes)
    assert tapes.refused == "a replay gave other bits"
    assert (f"other bits in round {when}" in tapes.doubt) == (when > 3)


class Tired(LocalMethod):
    """The state of a client is the number of its visits; from the sixth on its steps are shorter."""

    def client_init(self, public: Any) -> Any:
        return torch.zeros((), dtype=torch.int64), super().client_init(public)

    def client_begin(self, public: Any, client: Any) -> Any:
        return super().client_begin(public, client[1])

    def client_step(self, public: Any, client: Any, local: Any, oracle: Any) -> Any:
        after = super().client_step(public, client[1], local, oracle)
        return pytree.tree_map(lambda a, b: torch.where(client[0] < 5, a, (a + b) / 2), after, local)

    def client_finish(self, public: Any, client: Any, local: Any) -> Any:
        message, inner = super().client_finish(public, client[1], local)
        return message, (client[0] + 1, inner)


def test_a_state_that_differs_by_round_is_an_input_of_recordings(problem: Any):
    """Its change shows long after the recordings were made, in a round in which none is compared."""
    method, x, count = Tired(Sgd(0.1), Plain(), Mean(1.0, "cohort"), "reset"), problem.initial_model(), 2
    draw = torch.Generator().manual_seed(0)
    recorded, plain = (MembersTrainer(LocalTrainer(method, problem.workload, x), ()) for _ in range(2))
    plain.tapes = None
    assert recorded.tapes is not None
    with torch.no_grad():
        public = method.unpack(method.broadcast(method.server_init(x)))
        both = pytree.tree_map(
            lambda leaf: leaf.expand(count, *leaf.shape).clone(), (public, method.client_init(public))
        )
        clients = [both[1], both[1]]
        for round in range(1, 9):
            recorded.tapes.begin_round(round)
            batch = {
                "input": torch.rand(count, 4, 1, 8, 8, generator=draw),
                "label": torch.randint(10, (count, 4), generator=draw),
                "key": torch.randint(1 << 40, (count,), generator=draw),
            }
            steps, results = torch.full((count,), 2), []
            for trainer, client in zip((recorded, plain), clients, strict=True):
                found = trainer.train_block(MembersPublic(both[0], ()), client, steps, lambda k, own=batch: own)
                results.append(found)
            found, wanted = (pytree.tree_leaves((each.message, each.client, each.loss)) for each in results)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            clients = [result.client for result in results]
    assert clients[0][0].tolist() == [8, 8]
    assert recorded.tapes.refused == ""


def test_later_rounds_cost_one_call_in_the_rounds_1_2_4_later():
    tapes, calls = Tapes(), []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin()

    for round in range(1, 7):
        for task in range(3):  # of one round
            tapes.begin_round(round)
            for i in range(4):
                tapes.call("f", counted, torch.ones(3) + i + task)
    assert len(calls) == 1 + PROOFS + 3
    assert tapes.refused == ""


def test_what_takes_much_memory_is_not_recorded():
    tapes = Tapes(most_bytes=100)
    for _ in range(3):
        assert torch.equal(tapes.call("f", lambda x: (x + 1) * 2, torch.ones(4)), torch.full((4,), 4.0))
    assert (tapes.recorded, tapes.replayed, tapes.refused) == (1, 2, "")
    for _ in range(3):
        assert torch.equal(tapes.call("f", lambda x: (x + 1) * 2, torch.ones(9)), torch.full((9,), 4.0))
    assert "would not make them faster" in tapes.refused


VIT = {"name": "vit", "width": 16, "depth": 1, "heads": 2, "head": 8, "mlp": 16, "dropout": 0.3}


@pytest.mark.parametrize("method", ["fedavg", {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}, "fedmuon_bc"])
@pytest.mark.parametrize(
    ("workload", "local"),
    [
        ({"name": "digits", "model": {"name": "mlp", "hidden": [16]}}, EPOCHS),
        ({"name": "digits", "model": VIT}, EPOCHS),
        ({"name": "digits", "model": VIT}, STEPS),
    ],
)
def test_a_client_alone_has_the_same_bits(
    method: Any, workload: dict[str, Any], local: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """Epochs have short batches, whose shapes have recordings of their own; the transformer draws for its dropout."""
    made: list[Tapes] = []
    start = Tapes.__init__

    def started(self: Tapes, most_bytes: float = 0) -> None:
        start(self, most_bytes)
        made.append(self)

    monkeypatch.setattr(Tapes, "__init__", started)
    plan = digits(method, local, block=1, kernels="torch").model_dump()
    experiment = Experiment.model_validate({**plan, "workload": workload})
    recorded = run(experiment)
    assert {tapes.refused for tapes in made} == {""}
    assert max(tapes.replayed for tapes in made) > 20
    monkeypatch.setattr(local_training, "RECORDED_BYTES", 0)
    assert run(experiment).model_sha256 == recorded.model_sha256
    assert made[-1].replayed == 0


LOADED = """
import sys, fedfleet
from fedfleet.tune.files import load
run = ("federation.rounds=2", "engine.backend=auto", "engine.block=1", "engine.kernels=torch", "tracking.uri=none")
fedfleet.run(load("digits", ("method.name=fedavg", *run)))
sys.exit(bool({"ray", "sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_a_short_run_does_not_load_the_compiler_of_torch():
    """Neither to count what it will compute, nor for recordings."""
    assert subprocess.run([sys.executable, "-c", LOADED], timeout=500).returncode == 0


def test_shapes_that_always_change_are_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tape, "TRIES", 4)
    tapes = Tapes()
    for size in range(2, 10):
        assert torch.equal(tapes.call("f", torch.sin, torch.ones(size)), torch.ones(size).sin())
    assert tapes.refused == "shapes change too often"
    assert tapes.recorded == 4


def test_only_the_last_recordings_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tape, "MOST", 2)
    tapes = Tapes()
    for size in (2, 3, 2, 4, 2):
        tapes.call("f", torch.sin, torch.ones(size))
    assert (tapes.recorded, tapes.replayed) == (3, 2)


def test_recordings_let_go_of_their_constants_without_the_garbage_collector():
    """Frozen tensors of a model are constants of its recordings, and the collector may look for them late."""
    constant, tapes = torch.ones(4), Tapes()
    tapes.call("f", lambda x, c=constant: x + c, torch.ones(4))
    kept = weakref.ref(constant)
    gc.disable()
    try:
        del constant
        assert tapes.recorded == 1
        assert kept() is not None
        del tapes
        assert kept() is None
    finally:
        gc.enable()


def test_an_error_of_the_function_is_raised():
    def function(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Tapes().call("f", function, torch.ones(2))
