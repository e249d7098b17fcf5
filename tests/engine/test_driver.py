"""The driver as a generator: it yields phases and is sent results, here prepared ones. No task is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.engine.errors import Diverged, RowsLost
from fedfleet.engine.reduction.tree import NAMES, TaskResult
from fedfleet.engine.rounds.driver import Driver
from fedfleet.engine.rounds.pool import Outcome, Phase, Pool, played
from fedfleet.engine.runs.prepare import prepare

from .setups import STEPS, digits

MOVES = 0.5
"""By how much each client moves each weight."""


class NoPool(Pool):
    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        raise AssertionError

    def close(self) -> None:
        pass


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Of three rounds with three tasks each, whose model is evaluated after rounds 2 and 3."""
    made = digits({"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}, STEPS)
    run_spec = prepare(made, "test")
    split = run_spec.split()
    driver = Driver(run_spec, split.client_index, len(next(iter(split.test.values()))))
    driver.start(lambda table: NoPool())
    yield driver
    driver.close()


def results(driver: Driver, phase: Phase, moves: float = MOVES) -> Iterator[TaskResult]:
    """The results of all tasks of a phase: every client moves all weights by `moves`, every test row has the loss 2."""
    for task in reversed(phase.tasks):
        if phase.call == "evaluate":
            rows = task.end - task.begin
            yield TaskResult(task.index, [], {"examples": rows, "weights": rows, "loss": 2.0 * rows, "accuracy": 0.0})
            continue
        count = len(task.clients)
        facts = dict.fromkeys(NAMES, 0.0) | {"loss": 3.0 * count, "steps": 3.0 * count, "weight": float(count)}
        columns = {"norm2": np.ones(count), "loss": np.full(count, 3.0), "steps": np.full(count, 3)}
        leaves = [np.full(shape, moves * count) for shape in driver.state_spec.shapes]
        yield TaskResult(task.index, leaves, facts, {"id": task.clients, **columns})


def test_a_run_is_phases_and_records(driver):
    seen: list[Any] = []
    models: list[np.ndarray] = []

    def run(phase: Phase) -> Iterator[TaskResult]:
        seen.append(phase.call)
        models.append(phase.broadcast.leaves[0])
        return results(driver, phase)

    records = [event for event in played(driver.steps(), run) if isinstance(event, dict)]
    assert seen == ["train", "train", "evaluate", "train", "evaluate"]
    assert [record["train/loss"] for record in records] == [3.0] * 3
    assert [record.get("eval/loss") for record in records] == [None, 2.0, 2.0]
    moved = [float((model - models[0]).mean()) for model in models]
    assert moved == pytest.approx([0, MOVES, 2 * MOVES, 2 * MOVES, 3 * MOVES])


def test_states_that_are_lost_send_the_driver_back(driver):
    """They are lost while the second phase begins. There is no checkpoint, so that the next one is that of round 1."""
    begun: list[Phase] = []

    def run(phase: Phase) -> Iterator[TaskResult]:
        begun.append(phase)
        if len(begun) == 2:
            raise RowsLost("a node is gone")
        return results(driver, phase)

    events = list(played(driver.steps(), run))
    assert [event["round"] for event in events if isinstance(event, dict)] == [1, 1, 2, 3]
    assert any("a node is gone" in event for event in events if isinstance(event, str))
    assert np.array_equal(begun[2].broadcast.leaves[0], begun[0].broadcast.leaves[0])
    assert [task.clients.tolist() for task in begun[2].tasks] == [task.clients.tolist() for task in begun[0].tasks]


def test_results_that_are_not_finite_end_the_run(driver):
    with pytest.raises(Diverged, match="not finite"):
        list(played(driver.steps(), lambda phase: results(driver, phase, float("nan"))))
    assert driver.round == 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in driver.tensors().values())
