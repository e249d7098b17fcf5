"""Ray's processes are forked, are then like those that Ray starts by itself, and end with Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedfleet.engine.backends.ray.process_start import fork_server
from fedfleet.engine.backends.ray.process_start.start_worker import forked, is_plain

from ..tune.commands import living
from .test_shared_ray import started

TOOLS = """
from fedfleet.engine.backends.ray.process_start import fork_server


def parents():
    \"\"\"The names of the parents of Ray's processes that have a task: the fork server, or the node's process.\"\"\"
    family = [each for each in told("name", "ppid") if each["name"].startswith("ray::")]
    working = [each for each in family if "Agent" not in each["name"] and "IDLE" not in each["name"]]
    servers = fork_server.process()
    return sorted("server" if each["ppid"] in servers else psutil.Process(each["ppid"]).name() for each in working)
"""

OBSERVED = """
from fedfleet import Observer


class Parents(Observer):
    seen = None

    def record(self, record):
        Parents.seen = parents()
"""

SAME = (
    TOOLS
    + OBSERVED
    + """
import signal

local = fedfleet.run(experiment(backend="local")).model_sha256
steps = {}
result = fedfleet.run(experiment(workers=2), observers=[Parents()])
steps["forked"] = Parents.seen, result.model_sha256 == local
for process in fork_server.process():
    os.kill(process, signal.SIGKILL)
result = fedfleet.run(experiment(workers=2), observers=[Parents()])
steps["server has died"] = Parents.seen, result.model_sha256 == local
fedfleet.shutdown()
result = fedfleet.run(experiment(workers=2), observers=[Parents()])
steps["started again"] = Parents.seen, result.model_sha256 == local
print(json.dumps(steps))
"""
)

DESCRIBED = (
    TOOLS
    + """
import resource
import signal

from fedfleet.engine.backends.ray.connect import connect
from fedfleet.engine.config.schema import Engine


@ray.remote(num_cpus=0)
class Described:
    def all(self):
        process = psutil.Process()
        return {
            "parent": process.parent().name(),
            "folder": os.getcwd(),
            "path": sys.path,
            "arguments": [each.split("=")[0] for each in sys.argv],
            "main": sys.modules["__main__"].__name__,
            "interpreter": sys.executable,
            "variables": {name: os.environ[name] for name in os.environ if name not in ("MINE", "RAY_JOB_ID", "PS1")},
            "limits": [resource.getrlimit(getattr(resource, each)) for each in dir(resource) if "RLIMIT_" in each],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "handlers": [str(signal.getsignal(each)).split(" at ")[0] for each in (signal.SIGINT, signal.SIGCHLD)],
            "leads its group": os.getpgrp() == os.getpid(),
            "niceness": process.nice(),
            "streams": [os.readlink(f"/proc/self/fd/{each}").rpartition(".")[2] for each in range(3)],
            "job": ray.get_runtime_context().get_job_id(),
        }

    def random(self):
        import random

        import numpy
        import torch

        return random.random(), numpy.random.random(), torch.rand(()).item()


connect(Engine())
actors = [Described.options(runtime_env=each).remote() for each in ({}, {"env_vars": {"MINE": "1"}})]
more = [Described.remote() for _ in range(2)]
print(json.dumps(ray.get([each.all.remote() for each in actors])))
print(json.dumps(ray.get([each.random.remote() for each in more])))
"""
)

ENDS = (
    TOOLS
    + """
import signal

fedfleet.run(experiment(workers=2))
print(json.dumps([each["pid"] for each in told("name") if "Agent" not in each["name"]]), flush=True)
print(fork_server._server.folder, flush=True)
sys.stdin.read()
"""
)


def test_processes_are_forked_and_the_runs_have_the_same_bits(tmp_path: Path):
    """Where the fork server dies, Ray goes on by itself; a Ray that is started later has a server of its own."""
    process = started(SAME, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    steps = json.loads(out.splitlines()[-1])
    assert steps["forked"] == [["server"] * 3, True]
    assert steps["started again"] == [["server"] * 3, True]
    assert steps["server has died"][1]
    assert "raylet" in steps["server has died"][0]


def test_a_forked_process_is_like_one_that_ray_starts(tmp_path: Path):
    """A process with variables of its own is started by Ray; everything else is the same. Two forked processes do not
    draw the same numbers from the generators of Python, numpy and torch."""
    process = started(DESCRIBED, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (ours, rays), (first, second) = (json.loads(line) for line in out.splitlines()[-2:])
    assert ours.pop("parent") != rays.pop("parent") == "raylet"
    one, other = ours.pop("variables"), rays.pop("variables")
    for variables in (one, other):
        variables.pop("SHLVL", None)  # Ray starts processes by a shell, which counts itself
    assert {name: (one.get(name), other.get(name)) for name in one | other if one.get(name) != other.get(name)} == {}
    assert {key: (ours[key], rays[key]) for key in ours if ours[key] != rays[key]} == {}
    assert not set(first) & set(second)


def test_nothing_is_left_when_the_process_that_started_ray_is_killed(tmp_path: Path):
    """Except Ray's own agents, which take a minute to notice it."""
    process = started(ENDS, tmp_path)
    assert process.stdout is not None
    family = living(json.loads(process.stdout.readline()))
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    process.kill()
    process.communicate(timeout=300)
    assert not psutil.wait_procs(family, timeout=120)[1]
    assert not folder.exists()


FORKED = """
import json
import os
import signal
from fedfleet.engine.backends.ray.process_start import fork_server

fork_server.begin()
(server,) = fork_server.process()
first = os.fork()
if not first:
    inherited = fork_server.process()
    fork_server.begin()
    own = fork_server.process()
    fork_server.end()
    os._exit(0 if not inherited and len(own) == 1 and own != {server} else 1)
_, status = os.waitpid(first, 0)
second = os.fork()
if not second:
    signal.pause()
print(json.dumps([status, server, second]), flush=True)
signal.pause()
"""


def test_a_fork_of_the_process_leaves_the_server_to_it():
    """It can have a server of its own, and does not keep that of its parent when the parent is killed."""
    process = subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as told:
        status, *family = json.loads(told.readline())
    server, fork = map(psutil.Process, family)
    assert status == 0
    assert server.is_running()
    process.kill()
    process.wait(300)
    try:
        assert not psutil.wait_procs([server], timeout=120)[1]
        assert fork.is_running()
    finally:
        fork.kill()


PLAIN = ["default_worker.py", "--node-id=1", "--language=PYTHON", "--serialized-runtime-env-context={}"]


@pytest.mark.parametrize(
    ("arguments", "plain"),
    [
        (PLAIN, True),
        ([*PLAIN, "--worker-type=WORKER"], True),
        ([*PLAIN, "--worker-type=SPILL_WORKER"], False),
        (["--language=JAVA", *PLAIN[:2]], False),
        (PLAIN[:2], False),
        *[
            ([*PLAIN[:3], f"--serialized-runtime-env-context={json.dumps(context)}"], plain)
            for context, plain in [
                ({"env_vars": {}, "py_executable": sys.executable, "command_prefix": []}, True),
                ({"env_vars": {"A": "1"}}, False),
                ({"py_executable": "/usr/bin/other"}, False),
                ({"command_prefix": ["nice"]}, False),
                ({"something_new": "x"}, False),
            ]
        ],
    ],
)
def test_which_processes_are_forked(arguments: list[str], plain: bool):
    assert is_plain(arguments) == plain


def test_no_process_without_a_server(tmp_path: Path):
    assert not forked(PLAIN, "")
    assert not forked(PLAIN, str(tmp_path / "socket"))


def test_other_versions_of_ray_start_their_processes_themselves(monkeypatch: pytest.MonkeyPatch):
    import ray
    from ray._private import ray_constants

    before = ray_constants.SETUP_WORKER_FILENAME
    monkeypatch.setattr(fork_server, "_server", None)
    monkeypatch.setattr(ray, "__version__", "2.6.0")
    with fork_server.forked_processes():
        assert before == ray_constants.SETUP_WORKER_FILENAME
        assert not fork_server.process()


def test_a_folder_in_which_no_socket_can_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The path of a socket has at most 107 characters. Ray then starts its processes by itself."""
    from ray._private import ray_constants

    before = ray_constants.SETUP_WORKER_FILENAME
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(fork_server, "_server", None)
    monkeypatch.setattr(fork_server.tempfile, "tempdir", str(long))
    with fork_server.forked_processes():
        assert before == ray_constants.SETUP_WORKER_FILENAME
    assert not list(long.iterdir())
