"""Every method of the table is run by the engine with its defaults: properties that all methods must have.

The runs have digits, a tiny network, and six clients of unequal size, and therefore with unequal numbers of local
steps, four of them in each round. TOLERANCE: in float64 a block, or other tasks, add up in another order than one
client alone. Within four rounds this grows from 1e-16 to about 1e-12, and to more if a method orthogonalises or divides
by small numbers; an error in a formula makes a difference of 1e-3.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.contract import Deferred, RunContext
from fedfleet.engine import Result, resume, run
from fedfleet.engine.cohorts import tasks
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import Interrupted
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp
from fedfleet.workloads.workload import Model, Partition
from tests.algorithms.driver import run as play
from tests.algorithms.driver import tree
from tests.algorithms.problems import Quadratic, partial
from tests.faults.runs import Watch, interrupt
from tests.methods import ON_ANY_MODEL as METHODS

torch.set_num_threads(1)

TOLERANCE = 1e-9
DECAYS = {"diloco", "muloco", "sparse_loco", "streaming_diloco", "eager_diloco", "data_parallel"}
"""Methods whose default rule has weight decay, which moves the model even if the gradient is zero."""
FACTORED = {"ratio": 0.6, "layers": "all", "nearest": True}
"""Arguments of the methods that compress. The two weights of the tiny network are its first and its last."""
SETTINGS = {
    **dict.fromkeys(["fedmud", "fedmud_bkd", "fedmud_aad", "fedmud_bkd_aad", "fedmud_f", "fedmud_bkd_f"], FACTORED),
    **dict.fromkeys(["fedhm", "fedlmt", "fedpara"], FACTORED),
    "ef21_p": {"ratio": 0.5, "layers": "all"},
    "fedbat": {"layers": "all"},
    "sparse_loco": {"density": 0.25},
    "per_fedavg": {"variant": "fo"},
    "streaming_diloco": {"layers": 1, "overlap": 0},
}
EVERYONE = {"streaming_diloco", "eager_diloco", "cfl"}
"""Methods of which all clients take part in every round."""
DRAWS = {"ef21_p", "fedbat"}
"""Methods whose messages are drawn by the number of the client."""
RESTARTS = {"fedlmt", "fedpara"}
"""Methods that do not start from the workload's model, but from products of factors."""
TRUNCATES = {"fedhm"}
"""The method decomposes the weights anew in every round, and the first round truncates them."""
STEP = {"fedbat": 5e-4}
"""The method moves every weight by at least this much in every round, up or down at random."""
methods = pytest.mark.parametrize("method", METHODS)


@functools.cache
def rows() -> tuple[Any, Any]:
    """(60 training rows, 20 test rows) of digits."""
    train, test = Digits().load()
    return {name: c[:60] for name, c in train.items()}, {name: c[:20] for name, c in test.items()}


@dataclass(frozen=True)
class Hands(Partition):
    """A partition by which client i has the group of rows with the number order[i]; the sizes of the groups are 3, 5,
    8, 11, 14, 19."""

    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        hands = np.split(np.arange(60), np.cumsum([3, 5, 8, 11, 14]))
        return ClientIndex.of([hands[i] for i in self.order])


@dataclass(frozen=True)
class Few(Digits):
    model: Model = Mlp((3,))
    partition: Partition = Hands()

    def load(self):
        return rows()


@dataclass(frozen=True)
class Flat(Few):
    """A workload whose loss is zero everywhere."""

    def losses(self, p, batch):
        return super().losses(p, batch) * 0


def spec(method: str) -> dict[str, Any]:
    return {"name": method, **SETTINGS.get(method, {})}


def made(method: str) -> Any:
    return Registry().build("METHODS", spec(method), "method")


def by_rounds(method: str) -> bool:
    """Whether settings of the method follow from the numbers of steps or rounds."""
    return isinstance(made(method), Deferred) and method not in SETTINGS


def cohort_of(method: str) -> int:
    """The clients of a round."""
    return 6 if method in EVERYONE else 4


def few(method: str, workload: Any = None, rounds: int = 4, **sections: Any) -> Experiment:
    """A small experiment. The local work is epochs, so that numbers of steps are unequal, unless the method must know
    this number. sections: `plan`, further keys of federation; `engine`, further keys of engine."""
    local = {"steps": 3, "batch": 4} if by_rounds(method) else {"epochs": 1, "batch": 4}
    plan = {"clients": 6, "cohort": cohort_of(method), "rounds": rounds, "local": local}
    return experiment(
        {
            "workload": workload or Few(),
            "method": spec(method),
            "federation": {**plan, **sections.get("plan", {})},
            "engine": {"backend": "local", "dtype": "float64", "block": 3, **sections.get("engine", {})},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


@functools.cache
def whole(method: str) -> Result:
    """The result of four rounds in blocks of 3 clients, without interruption."""
    return run(few(method))


def alike(first: Result, second: Result) -> None:
    for name, value in first.model.items():
        np.testing.assert_allclose(value, second.model[name], TOLERANCE, TOLERANCE, err_msg=name)
    for a, b in zip(first.rows, second.rows, strict=True):
        same = [key for key in a if not key.startswith("time/")]
        np.testing.assert_allclose([a[key] for key in same], [b[key] for key in same], 1e-7, 1e-9, err_msg=str(same))


@methods
def test_alone_equals_together(method: str, monkeypatch: pytest.MonkeyPatch):
    """Clients one after the other, all of them in one task, give the model of blocks of 3 clients in several tasks."""
    wanted = whole(method)
    monkeypatch.setattr(tasks, "task_edges", lambda blocks: [0, blocks])
    alike(run(few(method, engine={"block": 1, "vectorise": False})), wanted)


@methods
def test_resumed(method: str, tmp_path: Path):
    """A run of three rounds that is interrupted after two and resumed with four has the same bits. If settings follow
    from the number of rounds, it has four rounds from the beginning."""
    rounds = 4 if by_rounds(method) else 3
    with pytest.raises(Interrupted):
        run(few(method, rounds=rounds), tmp_path / "run", [Watch(r2=interrupt)])
    resumed = resume(few(method), tmp_path / "run")
    assert [row["round"] for row in resumed.rows] == [1, 2, 3, 4]
    assert resumed.model_sha256 == whole(method).model_sha256


FULL = {"plan": {"cohort": 6, "local": {"steps": 2, "batch": 32}}}
"""Settings by which all clients take part and a batch has all rows of a client, so that no draw depends on a client's
number."""


@pytest.mark.parametrize("method", sorted(set(METHODS) - DRAWS))
def test_who_has_which_data(method: str):
    """Clients are interchangeable: if they get the same groups of rows in another order, only this order changes."""
    alike(
        run(few(method, Few(partition=Hands((3, 5, 0, 4, 2, 1))), 2, **FULL)),
        run(few(method, rounds=2, **FULL)),
    )


@methods
def test_zero_gradient(method: str):
    """With a zero gradient the model does not move, and nothing is divided by zero."""
    ended, start = run(few(method, Flat(), 3)).model, Few().init(0)
    if method in RESTARTS:
        run_spec = prepare(few(method), "conformance")
        algorithm: Any = run_spec.method()
        start = dict(algorithm.model(algorithm.server_init(run_spec.initial_model())).items())
    if method in TRUNCATES:
        start = run(few(method, Flat(), 1)).model
    for name, value in ended.items():
        if method in DECAYS:
            assert (value.abs() <= start[name].abs().to(value.dtype)).all()
            assert (value.abs() >= 0.99 * start[name].abs().to(value.dtype)).all()
        elif method in STEP:
            assert (value - start[name]).abs().max() <= 3.001 * STEP[method], name
        elif method in TRUNCATES:
            np.testing.assert_allclose(value, start[name], TOLERANCE, TOLERANCE, err_msg=name)
        else:
            assert torch.equal(value, start[name].to(value.dtype)), name


# --- what is kept, what is sent ---------------------------------------------------------------------------------------
def another(seed: int) -> Any:
    return tree(Quadratic().start) * (1 + seed % 7)


def built(method: str) -> Any:
    found = made(method)
    layout = tree(Quadratic().start).layout
    context = RunContext(5 if method in EVERYONE else 3, 5, 6, 2, 0, layout, drawn=another)
    return found.build(context) if isinstance(found, Deferred) else found


def form(state: Any) -> Any:
    """The structure of a state, and the shapes and dtypes of its tensors."""
    leaves, spec = pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return spec, [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]


@methods
def test_states_keep_their_form(method: str):
    """The states of the server and of all clients keep their structure, shapes and dtypes over the rounds, and are
    finite."""
    everyone = [[*range(5)]] * 6, {(r, i): 2 for r in range(6) for i in range(5)}
    result = play(made := built(method), Quadratic(), *(everyone if method in EVERYONE else partial()))
    first = StateSpec(made, made.model(result.servers[0]))
    for server, clients in zip(result.servers, result.clients, strict=True):
        assert form(server) == form(first.server)
        for client in clients:
            assert form(client) == form(first.client)
        assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves((server, clients)))


def counts(column: str) -> Iterator[tuple[int, int, int]]:
    """A cell of the table, such as "2", "2 or 3", "1 to 2" or "1 + scalar", as (smallest number of trees, largest one,
    further numbers)."""
    for choice in column.split(" or "):
        found = re.fullmatch(r"(\d+)(?: to (\d+))?( \+ scalar)?", choice)
        assert found, f"{column!r} should be like 2, 2 or 3, 1 to 2, 1 + scalar"
        yield int(found[1]), int(found[2] or found[1]), int(bool(found[3]))


def fits(size: int, column: str, tree: int, more: int = 1) -> bool:
    """Whether `size` bytes agree with a cell, for models of `tree` bytes; `more`: how many further numbers the cell
    need not mention."""
    return any(low * tree + 8 * n <= size <= high * tree + 8 * (n + more) for low, high, n in counts(column))


@methods
def test_bytes_and_gradients_are_what_the_table_says(method: str):
    """The recorded bytes equal those that follow from the shapes of the states, and the table's columns times the
    model's bytes. The table need not mention one further number, such as a count of steps, and two of those that
    clients keep."""
    run_spec = prepare(few(method), "conformance")
    x, recipe = run_spec.initial_model(), METHODS[method]
    state_spec, tree = StateSpec(run_spec.method(), x), 8 * x.flat.numel()
    if method not in SETTINGS:  # tests/algorithms/test_compression_bytes.py has the others
        down, up = state_spec.traffic(run_spec.method(), 1)
        assert fits(down, recipe.down, tree), (recipe.down, down / tree)
        assert fits(up, recipe.up, tree), (recipe.up, up / tree)
        assert fits(state_spec.kept, recipe.state, tree, more=2), (recipe.state, state_spec.kept / tree)
    for number, row in enumerate(whole(method).rows):
        cohort, gradients, warm_start = cohort_of(method), row["client/gradients"], run_spec.method().warm_start
        down, up = (cohort * each for each in state_spec.traffic(run_spec.method(), number + 1))
        if number == 0 and warm_start is not None:
            # A warm start: all six clients receive the broadcast, take the gradient of all their rows and send it.
            assert row["comm/bytes_down"] == down + 6 * state_spec.down
            assert row["comm/bytes_up"] == up + 6 * StateSpec(warm_start, x).up
            assert gradients > row["client/steps"]
            continue
        assert (row["comm/bytes_down"], row["comm/bytes_up"]) == (down, up)
        assert gradients / row["client/steps"] in {low for low, _, _ in counts(recipe.gradients)}
