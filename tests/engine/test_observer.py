"""Observers: the base class does nothing, subclasses override the methods that they need, and objects of other classes
may be observers too."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine import Observer, resume, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.runs.detached import Detached
from fedfleet.engine.runs.run_directory import RunDirectory
from fedfleet.tune.progress import Progress
from fedfleet.tune.tracking.run import MlflowTracker

METHODS = {name for name, _ in inspect.getmembers(Observer, inspect.isfunction)}


def small(rounds: int = 4) -> Any:
    return experiment(
        {
            "workload": "quadratic",
            "method": "fedavg",
            "federation": {"clients": 4, "cohort": 2, "rounds": rounds},
            "engine": {"backend": "local"},
            "tracking": {"uri": "none"},
        }
    )


class Rounds(Observer):
    """Overrides a single method."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def record(self, record: dict[str, float]) -> None:
        self.seen.append(int(record["round"]))
        if self.seen == [1, 2]:
            os.kill(os.getpid(), signal.SIGINT)


class Foreign:
    """Has every method of an observer without inheriting, as the tracker of a plug-in may."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)
        return lambda *arguments: self.calls.append(name)


@pytest.mark.parametrize("kind", [RunDirectory, Detached, Progress, MlflowTracker])
def test_all_of_ours_inherit_it(kind: type):
    assert issubclass(kind, Observer)


def test_an_observer_that_overrides_one_method_sees_a_run_that_is_resumed(tmp_path: Path):
    watching, foreign = Rounds(), Foreign()
    with pytest.raises(Interrupted):
        run(small(), tmp_path / "run", [watching, foreign])  # type: ignore[list-item]
    assert foreign.calls[0] == "begin"
    assert foreign.calls[-1] == "failed"
    foreign.calls.clear()
    resume(small(), tmp_path / "run", [watching, foreign])  # type: ignore[list-item]
    assert watching.seen == [1, 2, 3, 4]
    assert {"begin", "resumed", "record", "end"} <= set(foreign.calls)


def test_an_observer_of_an_earlier_version_is_refused_before_the_run():
    class Earlier(Observer):
        def begin(self, run_spec: Any, facts: Any) -> None:  # type: ignore[override]
            raise AssertionError

    words = r"begin must take one argument, the run, got \(run_spec, facts\) in Earlier; leave out the"
    with pytest.raises(ConfigError, match=words):
        run(small(), observers=[Earlier()])


def test_a_run_can_be_asked_to_stop_without_a_signal(tmp_path: Path):
    """The executor of many runs uses this, because it executes each run in a thread."""
    seen: list[int] = []

    class Count(Observer):
        def record(self, record: dict[str, float]) -> None:
            seen.append(int(record["round"]))

    with pytest.raises(Interrupted):
        run(small(1000), tmp_path / "run", [Count()], stop=lambda: signal.SIGTERM if len(seen) >= 2 else 0)
    assert seen[-1] < 1000
    assert list((tmp_path / "run" / "checkpoints").glob("round-*"))
