"""The executor of many runs, with sources of this test: processes that die, runs that are asked to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.config.schema import Engine
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.history import Record
from fedfleet.tune.executor.executor import on_ray
from fedfleet.tune.executor.source import RunRequest, Source

PLUGIN = '''
import os
from dataclasses import dataclass
from pathlib import Path

from fedfleet.algorithms.parts.rules import Sgd


@dataclass(frozen=True)
class Noted(Sgd):
    """Sgd that notes the process it runs in, and kills it once, as soon as its run has a checkpoint."""

    notes: str = ""
    dies: bool = False

    def step(self, y, v, state):
        notes = Path(self.notes)
        with notes.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        once = notes.with_name("died")
        if self.dies and not once.exists() and list(notes.parent.glob("dies/checkpoints/round-*")):
            once.touch()
            os.kill(os.getpid(), 9)
        return super().step(y, v, state)


RULES = {"noted": Noted}
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noted.py").write_text(PLUGIN)
    return tmp_path


def spec(here: Path, key: str, rounds: int = 4, dies: bool = False, **keys: Any) -> RunRequest:
    rule = {"name": "noted", "lr": 0.1, "notes": str(here / "notes"), "dies": dies}
    made = {
        "plugins": [str(here / "noted.py")],
        "workload": {"name": "quadratic", "dim": 4},
        "method": {"name": "fedavg", "rule": rule},
        "federation": {"clients": 4, "cohort": 2, "rounds": rounds, "local": {"steps": 1, "batch": 1}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
        **keys,
    }
    return RunRequest(key, made, str(here / key), columns=())


class Listed(Source[RunRequest]):
    """A source that hands out a list of runs. `heard`: key -> the rounds that it has reported; `ends`: key -> how it
    ended."""

    def __init__(self, specs: list[RunRequest]) -> None:
        super().__init__()
        self.waiting = list(specs)
        self.heard: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}

    def next(self) -> RunRequest | None:
        if not self.waiting:
            return None
        found = self.waiting.pop(0)
        self.begin(found, 0)
        return found

    @property
    def left(self) -> int:
        return len(self.waiting)

    def reported(self, run: RunRequest, rows: list[Record]) -> bool:
        self.heard.setdefault(run.key, []).extend(int(row["round"]) for row in rows)
        return False

    def record_end(self, run: RunRequest, status: str, reason: str) -> RunRequest:
        self.ends[run.key] = status
        return run


def execute(source: Listed, stop: Any = lambda: 0) -> None:
    with on_ray(Engine(), at_once=2) as executor:
        executor.run(source, stop)


@pytest.mark.long
def test_processes_are_used_again(here: Path, ray_here: None):
    """Eight runs, two at the same time, use two processes, and every round of each is reported once."""
    source = Listed([spec(here, f"run{number}") for number in range(8)])
    execute(source)
    assert source.ends == {f"run{n}": "finished" for n in range(8)}
    assert all(rounds == [1, 2, 3, 4] for rounds in source.heard.values())
    assert len(set((here / "notes").read_text().split())) <= 3


@pytest.mark.long
def test_a_run_whose_process_is_killed_is_resumed_in_another(here: Path, ray_here: None):
    undisturbed = Listed([spec(here, "calm", 40)])
    execute(undisturbed)
    source = Listed([spec(here, "dies", 40, dies=True, checkpoint={"every": 5}), spec(here, "beside")])
    execute(source)
    assert (here / "died").exists()
    assert source.ends == {"dies": "finished", "beside": "finished"}
    log = (here / "dies" / "run.log").read_text()
    assert log.count(" begins\n") == log.count(" resumes\n") == 1
    results = [json.loads((here / name / "result.json").read_text()) for name in ("calm", "dies")]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]


@pytest.mark.long
def test_runs_that_are_asked_to_end_leave_a_checkpoint(here: Path, ray_here: None):
    source = Listed([spec(here, name, 100_000) for name in ("one", "two", "three")])
    execute(source, lambda: len(source.heard) == 2)
    assert not source.ends
    assert [one.key for one in source.waiting] == ["three"]
    for name in ("one", "two"):
        assert list((here / name / "checkpoints").glob("round-*")), name


@pytest.mark.long
def test_what_was_done_is_read_and_not_run(here: Path, ray_here: None):
    execute(Listed([spec(here, "run")]))
    notes = (here / "notes").read_text()
    again = Listed([spec(here, "run")])
    execute(again)
    assert again.heard == {"run": [1, 2, 3, 4]}
    assert (here / "notes").read_text() == notes


def test_rays_client_is_refused():
    with pytest.raises(ConfigError, match="cannot run through Ray's client"):
        on_ray(Engine(address="ray://head:10001")).start(lambda: 0)
