"""Memory that runs out is no client's fault: blocks are run in smaller groups, else the run ends with one sentence that
names the block, the model and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from fedfleet.engine import memory, run
from fedfleet.engine.backends.ray.worker_handle import death
from fedfleet.engine.errors import OutOfMemory
from fedfleet.engine.run_spec import RunSpec

from .runs import Watch, cohort_of, plan, rule, same, small

COMMAND = """
import resource, sys
import fedfleet.engine.api
from fedfleet.tune.cli import main

with open("/proc/self/statm") as told:
    size = int(told.read().split()[0]) * resource.getpagesize() + (640 << 20)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
main(sys.argv[1:])
"""
"""A command that may have 640 MiB of addresses more than its modules take."""

RUN = """
import json, resource, sys
import pyarrow.fs, pyarrow.parquet, safetensors.torch
from fedfleet.engine import memory, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import FedFleetError

sys.path.insert(0, sys.argv[1])
from tests.faults.runs import Watch

def limit():
    holes, mib = int(sys.argv[2]), int(sys.argv[3])
    memory.release_freed_memory()
    with open("/proc/self/statm") as told:
        size = int(told.read().split()[0]) * resource.getpagesize() + (holes + 8) * (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        while True:  # what was freed before is no room either
            taken.append(bytearray(mib << 20))
    except MemoryError:
        del taken[-2 : -2 - 2 * holes : -2]

taken = []
try:
    run(experiment(json.loads(sys.argv[4])), "out", [Watch(r1=limit)])
except FedFleetError as error:
    print(type(error).__name__, error)
else:
    print("well")
"""
"""A run whose memory has only the given number of holes of the given size in MiB from round 2 on. By then everything is
loaded that needs addresses but no memory."""


def limited(folder: Path, holes: int, mib: int, hidden: int, **engine: Any) -> str:
    data = {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [hidden]}},
        "method": {"name": "fedavg"},
        "federation": {"clients": 16, "cohort": 16, "rounds": 2, "local": {"steps": 1, "batch": 8}},
        "engine": {"backend": "local", "block": 16, "kernels": "torch", **engine},
        "tracking": {"uri": "none"},
    }
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", RUN, root, str(holes), str(mib), json.dumps(data)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_that_cannot_be_allocated(tmp_path):
    """The model needs 900 MB, which the machine has, but more than this process may use."""
    hidden = 3 * 10**6
    given = ("run", "digits", f"workload.model={{name: mlp, hidden: [{hidden}]}}", "engine.backend=local")
    command = [sys.executable, "-c", COMMAND, *given, "tracking.uri=none", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: workload: the model of digits cannot be allocated (")
    assert str(hidden) in line
    assert line.endswith("choose a smaller model")


@pytest.mark.long
def test_a_block_that_cannot_be_allocated(tmp_path):
    assert limited(tmp_path, 6, 100, 60_000) == "well"
    log = (tmp_path / "out" / "run.log").read_text()
    assert "run well in smaller groups, a block has 16 clients, and the model of workload digits has" in log
    assert "lower engine.block or federation.local.batch, or choose a smaller model" in log
    assert log.count("client/count=16 client/dropped=0") == 2


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["fail", pytest.param("drop", marks=pytest.mark.slow)])
def test_a_client_for_which_there_is_no_memory(on_failure, tmp_path):
    told = limited(tmp_path, 0, 16, 300_000, block=1, on_failure=on_failure)
    assert told.startswith("OutOfMemory ")
    assert "a block has 1 clients, and the model of workload digits has 22,500,010 parameters, 85.8 MiB" in told
    assert "lower engine.block or federation.local.batch" in told
    assert "failed: OutOfMemory" in (tmp_path / "out" / "run.log").read_text()


def test_clients_without_memory_are_not_dropped(tmp_path, expected):
    """Whether memory suffices depends on the machine: if clients were dropped for it, the model would differ between
    machines."""
    client = int(cohort_of(1)[4])
    plan(tmp_path, rule(client, "memory"))
    with pytest.raises(OutOfMemory, match=r"round 1: one client alone failed on this process for lack of memory"):
        run(small(tmp_path, on_failure="drop"))
    plan(tmp_path, rule(client, "memory", 0, 1))
    watch = Watch()
    same(run(small(tmp_path, on_failure="drop"), observers=[watch]), expected)
    assert any("MemoryError" in text for text in watch.told)


def test_how_a_workers_death_is_told(tmp_path):
    remedy = RunSpec.of("run", small(tmp_path)).memory_remedy()
    found = death(OutOfMemoryError("Memory on the node was 0.96, above the threshold of 0.95"), remedy)
    assert found.kind == "memory"
    assert "memory ran out" in found.cause
    killed = ActorDiedError()
    killed.error_msg = "There are some potential root causes. (1) the process was killed by the OOM killer"
    found = death(killed, remedy)
    assert found.kind == "client"
    assert "as the kernel does where memory runs out: then, a block has 4 clients, and the model" in found.cause


def test_a_bound_is_taken_back():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), memory.bounded_address_space():
        bytearray(1 << 44)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("version", [1, 2])
def test_copies_of_files_count_as_memory_that_can_be_had(version, tmp_path):
    """A control group that has read many files is at its limit, but the memory of their copies is available."""
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 2048 * 1024
    folder, limit, used, prefix = tmp_path, "memory.max", "memory.current", ""
    if version == 1:
        folder, limit, used, prefix = tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        folder.mkdir()
    (folder / limit).write_text("1000000\n")
    (folder / used).write_text("990000\n")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 10_000
    (folder / "memory.stat").write_text(f"anon 1\n{prefix}active_file 300000\n{prefix}inactive_file 200000\n")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 510_000
    (folder / limit).write_text("max\n")
    assert memory.available_memory(tmp_path / "meminfo", tmp_path) == 2048 * 1024
