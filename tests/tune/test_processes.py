"""Processes that runs share: how many runs they get, and what becomes of them when one of them is killed."""

from __future__ import annotations

import os
import select
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedfleet.engine.records.history import Record
from fedfleet.tune.executor import fork_server
from fedfleet.tune.executor.executor import check_together
from fedfleet.tune.executor.process_main import MemberRun
from fedfleet.tune.executor.processes import Processes
from fedfleet.tune.executor.source import RunReport, RunRequest

from .test_executor import Listed


def request(here: Path, key: str, lr: float, rounds: int = 4, **engine: Any) -> RunRequest:
    made = {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [8]}},
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": lr}},
        "federation": {"clients": 12, "cohort": 6, "rounds": rounds, "local": {"steps": 2, "batch": 8}},
        "engine": {"backend": "local", "block": 3, **engine},
        "tracking": {"uri": "none"},
    }
    return RunRequest(key, made, str(here / key), columns=(), may_end=False)


class Counted(Listed):
    """`most`: how many runs were under way at once, by the name of their kind, the first letter of their keys."""

    def __init__(self, specs: list[RunRequest]) -> None:
        super().__init__(specs)
        self.most: dict[str, int] = {}

    def reported(self, run: RunRequest, rows: list[Record]) -> bool:
        kind = run.key[0]
        self.most[kind] = max(self.most.get(kind, 0), sum(key[0] == kind for key in self.live))
        return super().reported(run, rows)


def log(here: Path, key: str) -> str:
    return (here / key / "run.log").read_text()


def test_how_many_runs_share_a_process_is_found_for_each_kind(tmp_path: Path):
    """Runs whose clients are alone in their blocks follow one another, whatever the kind of the first run is. A process
    that is killed is replaced, also if the fork server is dead too, and its runs go on."""
    alone = [request(tmp_path, f"a{i}", 0.1 * (i + 1), block=1) for i in range(2)]
    shared = [request(tmp_path, f"s{i}", 0.1 * (i + 1)) for i in range(4)]
    source = Counted([*alone, *shared, *[request(tmp_path, f"a{i}", 0.1 * (i + 1), block=1) for i in (2, 3)]])
    with Processes(1, 4) as processes:
        server = processes.server
        processes.run(source, lambda: 0)
        (process,) = processes.processes
        assert psutil.Process(process.id).ppid() == server.popen.pid
        assert set(source.ends.values()) == {"finished"}
        assert sorted(processes.rooms.values()) == [1, 4]
        assert source.most["a"] <= 2  # one that runs, and perhaps one that has not been given to the process yet
        assert all("trained together" in log(tmp_path, f"s{i}") for i in range(4))
        os.kill(server.popen.pid, signal.SIGKILL)
        server.popen.wait()
        os.kill(process.id, signal.SIGKILL)
        again = Listed([request(tmp_path, f"k{i}", 0.1 * (i + 1)) for i in range(2)])
        processes.run(again, lambda: 0)
        assert again.ends == {"k0": "finished", "k1": "finished"}
        assert processes.server is not server
    assert not server.alive
    assert not processes.server.alive


def test_a_process_whose_runs_all_fail_at_once_is_given_the_others(tmp_path: Path):
    """The report of the only run under way comes before the process asks for the next one."""
    runs = [request(tmp_path, f"a{i}", 0.1) for i in range(6)]
    for run in runs:
        run.experiment["method"] = "nosuch"
    source = Listed(runs)
    with Processes(1, 4) as processes:
        processes.run(source, lambda: 0)
    assert source.ends == {f"a{i}": "failed" for i in range(6)}


def test_no_process_takes_more_than_its_share_of_what_is_left(tmp_path: Path):
    """Two processes have room for all twelve runs. Some end early, and the process that had them gets others, which are
    lost for the other process."""
    rounds = [25, 25, 1, 2, 3, 4, *[25] * 6]
    source = Listed([request(tmp_path, f"s{i:02}", 0.05 * (i + 1), rounds=last) for i, last in enumerate(rounds)])
    had, shares = dict[int, int](), list[tuple[int, int]]()
    with Processes(2, 24) as processes:

        def watched() -> int:
            runs = {id(process): len(process.runs) for process in processes.processes}
            unfinished = source.left + sum(runs.values())
            shares.extend((count, unfinished) for each, count in runs.items() if count > had.get(each, 0))
            had.update(runs)
            return 0

        processes.run(source, watched)
    assert set(source.ends.values()) == {"finished"}
    assert shares
    assert all(count <= (unfinished + 1) // 2 for count, unfinished in shares)


def test_data_are_loaded_before_the_runs_that_need_them(tmp_path: Path):
    """A process loads data when it is told to, and the first run with the same data finds them there. Where that fails,
    only a run says so."""
    plugin, loads, told = tmp_path / "loads.py", tmp_path / "loads.txt", tmp_path / "told"
    os.mkfifo(told)
    plugin.write_text(
        "from fedfleet.workloads.data.digits import Digits\n\n"
        "class Counted(Digits):\n"
        "    def load(self):\n"
        f"        open({str(loads)!r}, 'a').write('x')\n"
        f"        open({str(told)!r}, 'w').write('x')\n"
        "        return super().load()\n\n"
        "WORKLOADS = {'counted': Counted}\n"
    )
    runs = [request(tmp_path, f"s{i}", 0.1 * (i + 1)) for i in range(2)]
    for run in runs:
        run.experiment.update(plugins=[str(plugin)], workload={**run.experiment["workload"], "name": "counted"})
    broken = {**runs[0].experiment, "workload": {"name": "nowhere"}}
    source = Listed(runs)
    with open(told, "r+b", buffering=0) as loaded, Processes(1, 4) as processes:
        processes.load(broken)
        processes.load(runs[0].experiment)
        assert select.select([loaded], [], [], 60)[0]
        assert loads.read_text() == "x"  # no run has begun
        processes.run(source, lambda: 0)
    assert source.ends == {"s0": "finished", "s1": "finished"}
    assert loads.read_text() == "x"


def test_kinds():
    here = Path("/nowhere")
    base = request(here, "a", 0.1)
    data = base.experiment
    skewed = {**data["workload"], "partition": {"name": "dirichlet", "beta": 0.1}}
    assert base.kind == request(here, "b", 0.3).kind
    assert base.kind == base._replace(experiment={**data, "workload": skewed, "seed": 3}).kind
    assert base.kind != request(here, "c", 0.1, block=1).kind
    assert base.kind != base._replace(experiment={**data, "method": {"name": "scaffold"}}).kind


def test_a_server_that_a_command_started_is_used_once(monkeypatch: pytest.MonkeyPatch):
    fork_server.begin()
    fork_server.begin()
    first = fork_server.taken()
    try:
        assert first.alive
        assert fork_server._begun is None
    finally:
        first.close()
    fork_server.begin()
    begun = fork_server._begun
    assert begun is not None
    assert not check_together("search.together", False, "")
    assert not begun.alive
    assert fork_server._begun is None


def test_a_run_whose_driver_was_killed_is_asked_to_end(tmp_path: Path):
    """It writes its checkpoint; a report that nobody can take is not a failure of the run."""
    mine, other = socket.socketpair()
    other.close()
    run = MemberRun.__new__(MemberRun)  # without its thread
    run.request, run.asked, run.unanswered = request(tmp_path, "a", 0.1), 0, False
    runs_here: Any = SimpleNamespace(connection=Connection(mine.detach()))
    run.runs_here = runs_here
    run.send(RunReport([], "running", ""))
    assert run.asked == signal.SIGTERM
