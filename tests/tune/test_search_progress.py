"""The progress of a search: a line for each trial, or a live line on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from fedfleet.tune.search.observers import SearchProgress
from fedfleet.tune.search.plan import plan
from fedfleet.tune.search.run import header
from fedfleet.tune.search.trial_store import Trial

DATA = {
    "workload": "quadratic",
    "method": {"name": "fedprox", "mu": {"search": "uniform", "low": 0, "high": 1}},
    "federation": {"rounds": 10},
    "search": {"trials": 3},
}


def under_way(number: int) -> Trial:
    return Trial(number, "running", {"method.mu": 0.5}, (), 0)


def told() -> SearchProgress:
    """The progress after two trials, one of which finished."""
    asked = plan(DATA)
    shown = SearchProgress(asked)
    shown.begins("trial", 3, [])
    trials = [under_way(number) for number in (0, 1)]
    for trial, number in zip(trials, (10, 5), strict=True):
        shown.run_begins(trial, 10)
        shown.run_rounds(trial, [{"round": number}])
    shown.run_ends(Trial(0, "finished", {"method.mu": 0.5}, (0.8765,), 10))
    shown.run_ends(Trial(1, "failed", {"method.mu": 0.25}, (), 5, "it broke"))
    shown.ends("finished")
    return shown


def test_a_search_says_what_it_is_about_to_do():
    line = header(plan(DATA), Path("runs/mu"))
    assert line.startswith("search for largest eval/accuracy: 3 trials by tpe over method.mu (")
    assert line.endswith("; folder: runs/mu")


def test_a_line_for_each_trial(capsys: pytest.CaptureFixture[str]):
    told()
    begins, first, second = capsys.readouterr().err.splitlines()
    assert begins == "trials: 0 of 3 done, starting"
    assert first.startswith("trial 0: eval/accuracy 87.6 %, 10 rounds, method.mu 0.5; 1 of 3 done, 1 running, 1 left")
    assert "best 87.6 % (trial 0), about " in first
    assert second.startswith("trial 1: failed: it broke, 5 rounds, method.mu 0.25; 2 of 3 done, 0 running, 1 left")


def test_few_of_many_trials_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    asked = plan({**DATA, "search": {"trials": 1000}})
    shown = SearchProgress(asked)
    shown.begins("trial", 1000, [])
    for number in range(1000):
        shown.run_begins(under_way(number), 10)
    monkeypatch.setattr(shown, "due", lambda: True)
    shown.run_rounds(under_way(3), [{"round": 5}])
    _, line = capsys.readouterr().err.splitlines()
    assert "1000 running, 0 left" in line
    assert line.endswith("trial 2 0%  trial 3 50%  trial 4 0%  trial 5 0%  trial 6 0%  trial 7 0%  and 992 more")


def test_on_a_terminal():
    """The same in a process whose standard error is a terminal: one live line, which is redrawn."""
    leader, follower = pty.openpty()
    code = "from tests.tune.test_search_progress import told; told()"
    done = subprocess.Popen([sys.executable, "-c", code], stderr=follower, env={**os.environ, "TERM": "xterm"})
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert done.wait(300) == 0
    text = shown.decode()
    assert "\x1b[" in text, "nothing was redrawn"
    assert "trial 0: eval/accuracy 87.6 %" in text
    assert "2/3" in text
    assert "best 87.6 % (trial 0)" in text
