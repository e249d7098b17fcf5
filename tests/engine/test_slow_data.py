"""A workload whose data take long to read, or for ever, is told with the line where that goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.planning import data
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.progress import Progress
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp


@dataclass(frozen=True)
class Waiting(Digits):
    """Its data are there when somebody has been told that they are not."""

    told: ClassVar[threading.Event] = threading.Event()

    def load(self) -> Any:
        assert self.told.wait(600)  # the line that is told
        return super().load()


def run_spec() -> RunSpec:
    Waiting.told.clear()
    workload = Waiting(model=Mlp((4,)))
    made = {"workload": workload, "method": "fedavg", "federation": {"clients": 5, "cohort": 2, "rounds": 1}}
    return RunSpec.of("slow", Experiment(**made, engine={"backend": "local"}, tracking={"uri": "none"}))


def test_where_data_are_read_is_told_until_they_are_there(monkeypatch):
    monkeypatch.setattr(data, "SLOW_SECONDS", 0.01)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            Waiting.told.set()

    data.checked_split(run_spec(), say=say)
    assert lines[0].startswith("still reading the data of the workload after 0.01 s, ")
    assert lines[1].startswith("still reading the data of the workload after 0.02 s, ")
    assert all("in load: assert self.told.wait(600)  # the line that is told" in line for line in lines[:2])
    assert not [thread for thread in threading.enumerate() if thread.name == "reading data" and not thread.daemon]


def test_a_run_tells_it_on_standard_error(monkeypatch, capfd):
    import fedfleet

    monkeypatch.setattr(data, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(data.sys, "stderr", Setting(data.sys.stderr, Waiting.told))
    spec = run_spec()
    assert fedfleet.run(spec.experiment).rows
    assert "still reading the data of the workload" in capfd.readouterr().err


class Setting:
    """A stream that sets an event when something is written."""

    def __init__(self, stream: Any, event: threading.Event) -> None:
        self.stream, self.event = stream, event

    def write(self, text: str) -> int:
        self.event.set()
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@pytest.mark.parametrize(("line", "shown"), [("still reading the data", True), ("plan: blocks of 4 clients", False)])
def test_the_log_of_a_batch_job_shows_it(line, shown, capsys):
    progress = Progress()
    progress.event(line)
    assert (line in capsys.readouterr().err) == shown
