"""The runs of one process share the Ray that the first of them starts, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..tune.commands import living

SCRIPT = '''
import json
import os
import sys
import threading

import psutil
import ray

import fedfleet


def experiment(**engine):
    return fedfleet.Experiment(
        workload="quadratic",
        method="fedavg",
        federation={"clients": 4, "cohort": 2, "rounds": 2},
        engine={"workers": 1, "cpus": 0.5, **engine},
        tracking={"uri": "none"},
    )


def told(*names):
    """What the processes below this one say of themselves, of which some end meanwhile: dictionaries of these facts."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found.append(process.as_dict(["pid", *names]))
        except psutil.NoSuchProcess:
            pass
    return found


def raylet():
    """The number of the node's process, None if there is no Ray."""
    return next((each["pid"] for each in told("name") if "raylet" in each["name"]), None)
'''
SEVERAL = """
steps = {"before": raylet()}
sha = fedfleet.run(experiment()).model_sha256
steps["first"] = raylet()
assert fedfleet.run(experiment(workers=2)).model_sha256 == sha
steps["second"] = raylet()
threads = [threading.Thread(target=fedfleet.run, args=[experiment()]) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
steps["threads"] = raylet()
fedfleet.run(experiment(backend="local"))
os.environ["FEDFLEET_OF_THE_TEST"] = "1"
assert fedfleet.run(experiment()).model_sha256 == sha
steps["other variables"] = raylet()
fedfleet.shutdown()
steps["shut down"] = raylet()
fedfleet.run(experiment())
ray.shutdown()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
steps["a user's own"] = raylet()
assert fedfleet.run(experiment()).model_sha256 == sha
fedfleet.shutdown()
steps["still the user's own"] = raylet()
ray.shutdown()
print(json.dumps(steps))
"""
KILLED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore the signal
fedfleet.run(experiment())
own = psutil.Process()
print(json.dumps([process.pid for process in own.children(recursive=True)]), flush=True)
if sys.argv[1:] == ["wait"]:
    sys.stdin.read()
"""


PROCESSES = """
def words():
    family = [each for each in told("status", "cmdline") if each["status"] != psutil.STATUS_ZOMBIE]
    return [os.path.basename(word) for each in family for word in each["cmdline"] or ()]


fedfleet.run(experiment())
print(json.dumps(words()))
fedfleet.shutdown()
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
print(json.dumps(words()))
ray.shutdown()
"""


def started(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT + script, *arguments]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, **pipes)


@pytest.mark.long
def test_several_runs_share_one_ray(tmp_path: Path):
    process = started(SEVERAL, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    steps = json.loads(out.splitlines()[-1])
    assert steps["before"] is None
    assert steps["first"] is not None
    assert steps["first"] == steps["second"] == steps["threads"]
    assert steps["other variables"] not in (None, steps["first"])  # its processes must have the variable
    assert steps["shut down"] is None
    assert steps["a user's own"] == steps["still the user's own"] is not None


@pytest.mark.long
def test_ray_starts_without_the_processes_that_serve_nobody(tmp_path: Path):
    """They take as long to import as workers. A Ray that the user starts has them all."""
    process = started(PROCESSES, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    ours, users = (set(json.loads(line)) for line in out.splitlines()[-2:])
    needless = {"monitor.py", "log_monitor.py", "dashboard.py"}
    assert "raylet" in ours, err
    assert not needless & ours
    assert needless <= users


@pytest.mark.long
@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_nothing_is_left_when_the_process_ends(how: str, tmp_path: Path):
    process = started(KILLED, tmp_path, *(["wait"] if how == "interrupt" else []))
    assert process.stdout is not None
    line = process.stdout.readline()
    family = living(json.loads(line))
    if how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode == 0) == (how == "exit"), err
    assert ("KeyboardInterrupt" in err) == (how == "interrupt"), err
    assert not psutil.wait_procs(family, timeout=120)[1]
