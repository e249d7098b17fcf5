"""The record of a run that was interrupted, wherever and however often, is that of a run without interruption."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedfleet
from fedfleet.engine import Result, run
from fedfleet.engine.api import resume, rounds
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs import run_directory
from fedfleet.engine.runs.run_directory import RunDirectory
from fedfleet.engine.runs.saved_files import read_rows
from fedfleet.engine.state.checkpoint import checkpointed_rounds
from fedfleet.tune.executor.requested_run import RequestedRun
from fedfleet.tune.executor.source import RunReport, RunRequest
from fedfleet.tune.run_files import read_columns
from fedfleet.tune.study.kept_results import NAME, keep

from ..tune.commands import until
from .runs import Watch, interrupt, same, setting, small, untimed

EVERY: dict[str, Any] = {"every": 1}


class Requested(RequestedRun):
    """A run of a study or a search in this process, which keeps its reports."""

    def __init__(self, request: RunRequest, act: Callable[[float], Any] = lambda number: None) -> None:
        super().__init__(request)
        self.act, self.reports = act, list[RunReport]()

    def send(self, report: RunReport) -> None:
        self.reports.append(report)

    def record(self, record: dict[str, float]) -> None:
        super().record(record)
        self.act(record["round"])


def request(folder: Path) -> RunRequest:
    data = setting(folder / "none", checkpoint=EVERY)
    return RunRequest("0", data, str(folder / "out"), columns=("train/loss",), keep_model=True)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def killed_after(folder: str, number: int) -> None:
    """Execute the run until its process kills itself after a round; what a separate process does."""
    Requested(request(Path(folder)), lambda at: die(signal.SIGKILL) if at == number else None).execute()


def killed_between_files(folder: str, name: str) -> None:
    """Execute the run until its process kills itself before a file of its result gets its name."""
    replace = Path.replace

    def fatal(path: Path, target: Any) -> Path:
        if Path(target).name == name:
            die(signal.SIGKILL)
        return replace(path, target)

    Path.replace = fatal  # pyright: ignore[reportAttributeAccessIssue]
    Requested(request(Path(folder))).execute()


def in_a_process(function: Callable[..., None], *given: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=given)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.long
def test_a_requested_run_that_is_killed_again_and_again(tmp_path, expected):
    """After rounds 2 and 5, and in the middle of its result; the record and what the search was told are complete."""
    in_a_process(killed_after, str(tmp_path), 2)
    in_a_process(killed_after, str(tmp_path), 5)
    in_a_process(killed_between_files, str(tmp_path), "model.safetensors")
    again = Requested(request(tmp_path))
    again.execute()
    same(Result.load(tmp_path / "out"), expected)
    assert [report.status for report in again.reports] == ["finished"]
    assert untimed(again.reports[0].rows) == untimed(list(expected.rows))


def test_a_run_that_is_interrupted_again_and_again(tmp_path, expected):
    """Its seconds are those of all its parts."""
    parts = []
    for end in (2, 3, 5, 0):
        part = Requested(request(tmp_path))
        part.act = lambda at, part=part, end=end: setattr(part, "asked", signal.SIGTERM if at == end else part.asked)
        part.execute()
        parts.append(untimed(read_rows(tmp_path / "out" / "rounds.parquet")))
    result = Result.load(tmp_path / "out")
    same(result, expected)
    assert [len(part) for part in parts] == [2, 3, 5, 6]
    assert all(part == parts[-1][: len(part)] for part in parts)
    assert result.total_seconds >= result.seconds


def test_the_seconds_of_a_fork_are_those_of_its_parent_and_its_own(tmp_path):
    parent = run(small(tmp_path / "none", checkpoint={"every": 2, "keep": 9}, keep_state=True), tmp_path / "parent")
    fork = fedfleet.fork(tmp_path / "parent", 4, "method.rule.lr=0.05", tmp_path / "fork")
    assert [row["time/seconds"] for row in fork.rows[:4]] == [row["time/seconds"] for row in parent.rows[:4]]
    assert fork.total_seconds >= fork.seconds > sum(row["time/seconds"] for row in parent.rows[:4])


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Gone(Exception):
    """What leaves the loop over the rounds in a process that was forked."""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["rounds", "run"])
def test_a_forked_process_that_leaves_its_copy_of_a_run_touches_no_file(way, tmp_path, expected):
    out, before, code = tmp_path / "out", dict[str, str](), []
    made = small(tmp_path / "none", checkpoint={"every": 2})

    def fork() -> None:
        until(lambda: 2 in checkpointed_rounds(out), "the checkpoint of round 2", 60)
        before.update(files(out))
        child = os.fork()
        if not child:
            raise Gone
        code.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert files(out) == before

    try:
        if way == "run":
            result = run(made, out, [Watch(r3=fork)])
        else:
            iterator = rounds(made, out)
            for record in iterator:
                if record["round"] == 3:
                    fork()
            result = iterator.result
    except Gone as error:
        error.__traceback__ = None  # the frames go, and with them the run
        iterator = None
        os._exit(7)
    assert code == [7]
    same(result, expected)


@pytest.fixture
def finished(tmp_path) -> Path:
    """The folder of a study with one run."""
    run(small(tmp_path / "none"), tmp_path / "cells" / "0123abcd")
    keep(tmp_path, {"eval/accuracy"})
    return tmp_path


def test_a_record_that_lacks_rounds_of_its_result_is_told_and_never_kept(finished):
    """As it was where rounds.parquet was put back to an earlier state."""
    import pyarrow.parquet as pq

    cell, kept = finished / "cells" / "0123abcd", (finished / NAME).read_text()
    assert json.loads(kept)["rows"]["round"] == [2, 4, 6]
    pq.write_table(pq.read_table(cell / "rounds.parquet").slice(0, 4), cell / "rounds.parquet")
    keep(finished, {"eval/accuracy"})
    assert (finished / NAME).read_text() == kept
    with pytest.raises(ConfigError, match=r"is damaged \(it ends with round 4 of 6\); remove the folder"):
        read_columns(cell)
    with pytest.raises(ConfigError, match=r"rounds\.parquet has 4 of 6 rounds"):
        Result.load(cell)


def test_an_interruption_leaves_a_whole_record_or_the_one_before(tmp_path, monkeypatch):
    out, written = tmp_path / "out", run_directory.RunDirectory._write_rounds
    with pytest.raises(Exception, match="interrupted"):
        run(small(tmp_path / "none", checkpoint=EVERY), out, [Watch(r2=interrupt)])
    before = (out / "rounds.parquet").read_bytes()

    def broken_off(self: RunDirectory, path: Path) -> None:
        written(self, path)
        path.write_bytes(path.read_bytes()[:100])
        raise MemoryError

    monkeypatch.setattr(run_directory.RunDirectory, "_write_rounds", broken_off)
    with pytest.raises(Exception, match="interrupted"):
        resume(small(tmp_path / "none", checkpoint=EVERY), out, [Watch(r4=interrupt)])
    assert (out / "rounds.parquet").read_bytes() == before
