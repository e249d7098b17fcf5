"""Small experiments for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedfleet.engine.api import Result, run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.records.history import Record
from fedfleet.engine.rounds.driver import Driver
from fedfleet.engine.rounds.pool import finished
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs import host
from fedfleet.engine.runs.launch import play
from fedfleet.engine.runs.members import Member, Members
from fedfleet.engine.runs.prepare import prepare
from fedfleet.engine.state.row_files import RowFiles
from fedfleet.workloads.workload import Model

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "rule": {"name": "momentum", "lr": 0.05}},
    "scaffold": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
    "local_muon": {"name": "local_muon", "matrix_lr": 0.01, "vector_lr": 0.1},
    "fedmuon_bc": {"name": "fedmuon_bc", "matrix_lr": 0.01, "vector_lr": 0.1},
}

STEPS = {"steps": 3, "batch": 16}
EPOCHS = {"epochs": 1, "batch": 8}
"""A partition by which clients have unequal numbers of rows, and therefore of steps."""


def digits(method: Any, local: dict[str, int], rounds: int = 3, **engine: Any) -> Experiment:
    """An experiment on digits with 30 unequal clients, 9 of them in each round."""
    return experiment(
        {
            "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [16]}},
            "method": METHODS.get(method, method) if isinstance(method, str) else method,
            "federation": {"clients": 30, "cohort": 9, "rounds": rounds, "local": local},
            "engine": {"backend": "local", "block": 4, **engine},
            "evaluate": {"every": 2, "batch": 100},
            "tracking": {"uri": "none"},
        }
    )


def quadratic(method: Any, workload: dict[str, Any], plan: dict[str, Any], **engine: Any) -> Experiment:
    return experiment(
        {
            "workload": {"name": "quadratic", **workload},
            "method": method,
            "federation": {"local": {"steps": 5, "batch": 1}, **plan},
            "engine": {"backend": "local", "dtype": "float64", **engine},
            "tracking": {"uri": "none"},
        }
    )


@dataclass(frozen=True)
class Built(Model):
    """The network that `make` builds, for runs in this process."""

    make: Callable[[], nn.Module]

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return self.make()


def run_and_count(made: Experiment, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, int]:
    """The result of a run, and how often it called the function `name` of `owner` in its second round, after all proofs
    and trials. Two ways to the same result may round alike, so that their bits do not tell which one was taken."""
    calls, until = [], []
    found = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *given: calls.append(name) or found(*given))
        result = run(made, observers=[lambda record: until.append(len(calls))])
    return result, until[1] - until[0]


@contextmanager
def driver_here(made: Experiment, directory: Path | None = None, **more: Any) -> Iterator[Driver]:
    """The driver of a run, with one worker in this process. directory: of the run's files, None for none. more:
    arguments of `prepare`."""
    run_spec = prepare(made, "test", directory, **more)
    with host.driver_here(run_spec, run_spec.split()) as driver:
        yield driver


def next_round(driver: Driver) -> Record:
    """The record of the driver's next round, which begins without a pass over all clients."""
    return finished(driver.run_round({}), driver.retry.run)


def execute_together(
    runs: Sequence[tuple[RunSpec, Any]], stop: Callable[[], int] = lambda: 0
) -> list[Result | BaseException]:
    """The result of each run, or the exception that ended it, of runs that this process executes side by side."""
    members, ended = Members(), dict[int, Result | BaseException]()

    def run_of(number: int, member: Member) -> Generator[Any, Any, None]:
        try:
            ended[number] = yield from play(*runs[number], [], stop, member)
        except BaseException as error:
            ended[number] = error

    for number in range(len(runs)):
        member = Member(members)
        member.begin(run_of(number, member))
    while members.running:
        members.advance()
    return [ended[number] for number in range(len(runs))]


def states_of(driver: Driver) -> list[Any]:
    """The states of all clients that have taken part, in ascending client number; [] for a method without states."""
    rows = driver.table.row
    if not driver.table.layout.folder:
        return []
    files = RowFiles(driver.table.layout, driver.state_spec.client)
    return [files.read_one(int(row)) for row in rows if row >= 0]
