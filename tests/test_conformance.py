"""Every method of the table, with its defaults, through the engine: what a method must do whatever its idea is.

Digits, a tiny network, six clients of unequal size, hence with unequal numbers of local steps, four of them a round.
TOLERANCE: in float64 a block, or other tasks, add up in another order than one client alone does; within four rounds
that grows from 1e-16 to 1e-12 or so, more where a method orthogonalises or divides by small numbers, and a mistake in
a formula shows at 1e-3.
"""

import functools
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.contract import Deferred, RunContext
from fedfleet.algorithms.table import METHODS
from fedfleet.engine.api import resume, run
from fedfleet.engine.cohorts import tasks
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import Interrupted
from fedfleet.engine.methods.state_spec import StateSpec
from fedfleet.engine.runs.launch import prepare
from fedfleet.engine.runs.observer import Observer
from fedfleet.engine.runs.result import Result
from fedfleet.workloads.base import ClientIndex, Model, Partition
from fedfleet.workloads.digits import Digits
from fedfleet.workloads.models import Mlp
from tests.algorithms.driver import run as play
from tests.algorithms.driver import tree
from tests.algorithms.problems import Quadratic, partial

torch.set_num_threads(1)

TOLERANCE = 1e-9
DECAYS = {"diloco", "muloco"}
"""Their default rule has a weight decay, which moves the model where the gradient is zero."""
FACTORED = {"ratio": 0.6, "layers": "all", "nearest": True}
"""Of methods that compress: the tiny network's two weights are its first and its last."""
SETTINGS = {
    **dict.fromkeys(["fedmud", "fedmud_bkd", "fedmud_aad", "fedmud_bkd_aad", "fedmud_f", "fedmud_bkd_f"], FACTORED),
    **dict.fromkeys(["fedhm", "fedlmt", "fedpara"], FACTORED),
    "ef21_p": {"ratio": 0.5, "layers": "all"},
    "fedbat": {"layers": "all"},
}
DRAWS = {"ef21_p", "fedbat"}
"""Clients draw, by their number, what they send."""
RESTARTS = {"fedlmt", "fedpara"}
"""The model that they start from is another than the workload's: products of factors."""
TRUNCATES = {"fedhm"}
"""Every round decomposes the weights anew; the first one truncates them."""
STEP = {"fedbat": 5e-4}
"""Moves every weight by so much a round at least, up or down at random."""
methods = pytest.mark.parametrize("method", METHODS)


@functools.cache
def rows() -> tuple[Any, Any]:
    """60 training rows and 20 test rows of digits."""
    train, test = Digits().load()
    return {name: c[:60] for name, c in train.items()}, {name: c[:20] for name, c in test.items()}


@dataclass(frozen=True)
class Hands(Partition):
    """Client i has the rows of hand order[i]; hands are of sizes 3, 5, 8, 11, 14, 19."""

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
    """A loss that is zero everywhere."""

    def losses(self, p, batch):
        return super().losses(p, batch) * 0


def spec(method: str) -> dict[str, Any]:
    return {"name": method, **SETTINGS.get(method, {})}


def made(method: str) -> Any:
    return Registry().build("METHODS", spec(method), "method")


def by_rounds(method: str) -> bool:
    """Whether settings follow from numbers of steps or rounds."""
    return isinstance(made(method), Deferred) and method not in SETTINGS


def few(method: str, workload: Any = None, rounds: int = 4, **sections: Any) -> Experiment:
    """Epochs, and so unequal steps, unless the method needs to know their number; `plan`, `engine`: more keys there."""
    local = {"steps": 3, "batch": 4} if by_rounds(method) else {"epochs": 1, "batch": 4}
    plan = {"clients": 6, "cohort": 4, "rounds": rounds, "local": local}
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
    """Four rounds in blocks of 3 clients, without a break."""
    return run(few(method))


def alike(first: Result, second: Result) -> None:
    for name, value in first.model.items():
        np.testing.assert_allclose(value, second.model[name], TOLERANCE, TOLERANCE, err_msg=name)
    for a, b in zip(first.rows, second.rows, strict=True):
        same = [key for key in a if not key.startswith("time/")]
        np.testing.assert_allclose([a[key] for key in same], [b[key] for key in same], 1e-7, 1e-9, err_msg=str(same))


@methods
def test_alone_equals_together(method: str):
    alike(run(few(method, engine={"block": 1, "vectorise": False})), whole(method))


@methods
def test_other_tasks(method: str, monkeypatch: pytest.MonkeyPatch):
    """Blocks of 2, all in one task."""
    monkeypatch.setattr(tasks, "task_edges", lambda blocks: [0, blocks])
    alike(run(few(method, engine={"block": 2})), whole(method))


class Interrupt(Observer):
    """An observer that is pressed Ctrl-C after round 2."""

    def record(self, record):
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)


@methods
def test_resumed(method: str, tmp_path: Path):
    """Two rounds of three, then on to four: the same bits. Of four, where settings follow from the number of rounds."""
    rounds = 4 if by_rounds(method) else 3
    with pytest.raises(Interrupted):
        run(few(method, rounds=rounds), tmp_path / "run", [Interrupt()])
    resumed = resume(few(method), tmp_path / "run")
    assert [row["round"] for row in resumed.rows] == [1, 2, 3, 4]
    assert resumed.model_sha256 == whole(method).model_sha256


FULL = {"plan": {"cohort": 6, "local": {"steps": 2, "batch": 32}}}
"""Everyone takes part, and a batch is all of a client's data: no draw depends on a client's number."""


@pytest.mark.parametrize("method", sorted(set(METHODS) - DRAWS))
def test_who_has_which_data(method: str):
    """Clients are alike: dealing them the same hands in another order changes nothing but that order."""
    alike(
        run(few(method, Few(partition=Hands((3, 5, 0, 4, 2, 1))), 3, **FULL)),
        run(few(method, rounds=3, **FULL)),
    )


@methods
def test_zero_gradient(method: str):
    """Nothing moves, and nothing divides by zero."""
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
def built(method: str) -> Any:
    found = made(method)
    layout = tree(Quadratic().start).layout
    return found.build(RunContext(3, 5, 6, 2, 0, layout)) if isinstance(found, Deferred) else found


def form(state: Any) -> Any:
    """Structure, shapes and dtypes."""
    leaves, spec = pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return spec, [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]


@methods
def test_states_keep_their_form(method: str):
    """The server's and every client's, over rounds; they are finite."""
    result = play(made := built(method), Quadratic(), *partial())
    first = StateSpec(made, made.model(result.servers[0]))
    for server, clients in zip(result.servers, result.clients, strict=True):
        assert form(server) == form(first.server)
        for client in clients:
            assert form(client) == form(first.client)
        assert all(leaf.isfinite().all() for leaf in pytree.tree_leaves((server, clients)))


def counts(column: str) -> Iterator[tuple[int, int, int]]:
    """A cell of the table as (fewest trees, most trees, numbers beside): "2", "2 or 3", "1 to 2", "1 + scalar"."""
    for choice in column.split(" or "):
        found = re.fullmatch(r"(\d+)(?: to (\d+))?( \+ scalar)?", choice)
        assert found, f"{column!r} should be like 2, 2 or 3, 1 to 2, 1 + scalar"
        yield int(found[1]), int(found[2] or found[1]), int(bool(found[3]))


def fits(size: int, column: str, tree: int, more: int = 1) -> bool:
    """Whether so many bytes are what a cell says, for models of `tree` bytes; `more`: numbers it need not mention."""
    return any(low * tree + 8 * n <= size <= high * tree + 8 * (n + more) for low, high, n in counts(column))


@methods
def test_bytes_and_gradients_are_what_the_table_says(method: str):
    """Recorded = what the states' forms come to = the table's columns times the model's bytes, but for a number that
    the table need not mention, a count of steps, say; two of those that clients keep."""
    run_spec = prepare(few(method), "conformance")
    x, recipe = run_spec.initial_model(), METHODS[method]
    state_spec, tree = StateSpec(run_spec.method(), x), 8 * x.flat.numel()
    if method not in SETTINGS:  # of these see tests/algorithms/test_compression_bytes.py
        assert fits(state_spec.down, recipe.down, tree), (recipe.down, state_spec.down / tree)
        assert fits(state_spec.up, recipe.up, tree), (recipe.up, state_spec.up / tree)
        assert fits(state_spec.kept, recipe.state, tree, more=2), (recipe.state, state_spec.kept / tree)
    for number, row in enumerate(whole(method).rows):
        up, gradients, warm_start = 4 * state_spec.up, row["client/gradients"], run_spec.method().warm_start
        if number == 0 and warm_start is not None:
            # A warm start: all six clients receive the broadcast, take the gradient of all their rows and send it.
            assert row["comm/bytes_down"] == (4 + 6) * state_spec.down
            assert row["comm/bytes_up"] == up + 6 * StateSpec(warm_start, x).up
            assert gradients > row["client/steps"]
            continue
        assert (row["comm/bytes_down"], row["comm/bytes_up"]) == (4 * state_spec.down, up)
        assert gradients / row["client/steps"] in {low for low, _, _ in counts(recipe.gradients)}
