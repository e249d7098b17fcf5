"""A head that `ray start` has started and that requires a token: jobs, detached runs, the doctor, and users without the
token."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment

from ..faults.runs import plan, rule, setting, visitor
from ..tune.commands import COMMAND, until
from .conftest import STORE

TOKEN = "0123456789abcdef" * 2


class Head(NamedTuple):
    address: str
    dashboard: str
    env: dict[str, str]

    def __call__(self, folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a user who has the token, unless env says otherwise."""
        done = subprocess.run(
            [*COMMAND, *args], cwd=folder, env=self.env | env, capture_output=True, text=True, timeout=500
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done


def ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="ff-head-"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
    path = f"{Path(sys.executable).parent}:{env['PATH']}"
    env |= {"PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "HOME": str(folder)}
    env |= {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120", "OMP_NUM_THREADS": "1"}
    gcs, client, dashboard, agent = ports(4)
    named = {"port": gcs, "ray-client-server-port": client, "dashboard-port": dashboard}
    named |= {"dashboard-agent-listen-port": agent, "num-cpus": 2, "object-store-memory": STORE}
    flags = [f"--{name}={value}" for name, value in named.items()]
    flags += ["--head", "--block", "--include-dashboard=true", "--disable-usage-stats", f"--temp-dir={folder}/r"]
    log = (folder / "log").open("w")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags]
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: all(map(listens, (gcs, dashboard, agent))), "the head's ports")
        yield Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}", env)
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for each in family:  # Ray's own end takes half a minute
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(family[1:], timeout=120)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_runs_what_was_sent(head, tmp_path):
    """The job has the same model as a run in this process. Its plug-in was sent with it, and it leaves nothing in this
    folder."""
    plan(tmp_path / "faults")
    data = setting(tmp_path / "faults", rounds=2, backend="ray", workers=1)
    (tmp_path / "job.yaml").write_text(json.dumps(data))
    sent = head(tmp_path, "submit", "job.yaml", "--address", head.dashboard, "--out", str(tmp_path / "out"))
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert sent.stdout.startswith("job raysubmit_")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["model_sha256"][:16] in sent.stdout
    assert result["model_sha256"] == run(experiment({**data, "engine": {"backend": "local", "block": 4}})).model_sha256
    again = head(tmp_path, "attach", sent.stdout.split()[1], "--address", head.dashboard)
    assert result["model_sha256"][:16] in again.stdout


def test_a_job_that_fails_says_so(head, tmp_path):
    sent = head(tmp_path, "submit", "digits", "engine.workers=64", "--address", head.dashboard)
    assert sent.returncode == 1
    assert "got 64 x 1" in sent.stdout
    assert "failed; its log is above" in sent.stderr


def test_a_detached_run_is_found_again(head, tmp_path):
    """The launcher of a detached run ends before round 1 is over; `attach` gets the result."""
    client, before = visitor(2)
    plan(tmp_path / "faults", rule(client, "gate", before + 1, 1))
    (tmp_path / "run.yaml").write_text(json.dumps(setting(tmp_path / "faults", backend="ray", workers=1)))
    left = head(tmp_path, "run", "run.yaml", "--detach", "--out", "out", "--address", head.address)
    assert left.returncode == 0, left.stderr
    run_id = left.stdout.split()[1]
    until((tmp_path / "faults" / "at-0").exists, "round 2")
    assert head(tmp_path, "attach", "--address", head.address).stdout.split() == [run_id]
    (tmp_path / "faults" / "open-0").touch()
    result = head(tmp_path, "attach", "out", "--json", "--address", head.address)
    assert result.returncode == 0, result.stderr
    expected = json.loads((tmp_path / "out" / "result.json").read_text())
    assert json.loads(result.stdout.splitlines()[-1]) == expected
    assert expected["run_id"] == run_id
    assert expected["rounds"] == 6


def test_a_detached_run_is_stopped(head, tmp_path):
    client, before = visitor(3)
    plan(tmp_path / "faults", rule(client, "gate", before + 1, 1))
    (tmp_path / "run.yaml").write_text(json.dumps(setting(tmp_path / "faults", backend="ray", workers=1)))
    run_id = head(tmp_path, "run", "run.yaml", "--detach", "--out", "out", "--address", head.address).stdout.split()[1]
    until((tmp_path / "faults" / "at-0").exists, "round 3")
    stopped = head(tmp_path, "attach", "out", "--stop", "--address", head.address)
    assert stopped.returncode == 128 + signal.SIGTERM
    assert "checkpoint after round 2; to go on: fedfleet resume out" in stopped.stderr
    (tmp_path / "faults" / "open-0").touch()
    resumed = head(tmp_path, "resume", "out", "--json", "--address", head.address)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1])["run_id"] == run_id


@pytest.mark.parametrize(
    ("mode", "token", "got"),
    [
        ("token", "", "none"),
        pytest.param("token", "f" * 32, "another one", marks=pytest.mark.slow),
        pytest.param("disabled", "", "none", marks=pytest.mark.slow),
    ],
    ids=["none", "another", "no mode"],
)
def test_without_the_token(mode, token, got, head, tmp_path):
    """The head says so at once; Ray itself would ask for 20 seconds."""
    env = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}
    for command in (("run", "digits", "--address", head.address), ("submit", "digits", "--address", head.dashboard)):
        done = head(tmp_path, *command, **env)
        assert done.returncode == 2, done.stderr
        line = done.stderr.splitlines()[-1]
        assert "token" in line
        assert command[0] != "run" or f"the cluster requires a token, got {got}; " in line
        assert "set RAY_AUTH_TOKEN, or the file ~/.ray/auth_token, to the cluster's token" in line


def test_nobody_there(head, tmp_path):
    (port,) = ports(1)
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        done = head(tmp_path, "run", "digits", "--address", address)
        assert done.returncode == 2
        assert "no cluster answers there" in done.stderr
    done = head(tmp_path, "attach", "nosuch", "--address", head.address)
    assert done.returncode == 2
    assert "no detached run nosuch is under way at" in done.stderr
    done = head(tmp_path, "run", "digits", "--detach")
    assert done.returncode == 2
    assert "give --address" in done.stderr


def test_the_doctor(head, tmp_path):
    well = head(tmp_path, "doctor", "digits", "engine.workers=2", "--address", head.address)
    assert well.returncode == 0, well.stdout + well.stderr
    assert "same versions as here" in well.stdout
    assert "authentication: by token" in well.stdout
    assert "ok      torchvision: version" in well.stdout
    assert "2 requested, granted: 2 on" in well.stdout
    ill = head(tmp_path, "doctor", "digits", "engine.workers=3", "tracking.uri=sqlite:////no/such/folder/x.db",
               "--address", head.address)  # fmt: skip
    assert ill.returncode == 1
    assert "PROBLEM workers: engine.workers: 1 of 3 workers fit on no node" in ill.stdout
    assert "PROBLEM MLflow" in ill.stdout
    assert "2 problems found" in ill.stderr
