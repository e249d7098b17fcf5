"""Processors are counted once: affinity and quotas of control groups, and everybody uses the number."""

from __future__ import annotations

import ast
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from fedfleet.engine.config.schema import Engine
from fedfleet.tune.executor.executor import processes_here
from fedfleet.workloads.data import images
from fedfleet.workloads.processors import processors, quota

ROOT = Path(__file__).parents[2]


def machine(root: Path, own: str, files: dict[str, str], mounts: str = "") -> Path:
    """A folder with /proc and /sys of a process in these groups. files: below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text(mounts)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text + "\n")
    return root


V1 = "5:cpuset:/x\n4:cpu,cpuacct:{}\n0::/ignored\n"
MOUNT = "36 25 0:31 {} /sys/fs/cgroup{} rw,relatime - {} cgroup rw\n"


@pytest.mark.parametrize(
    ("own", "files", "mounts", "granted"),
    [
        ("0::/\n", {}, "", math.inf),
        ("0::/\n", {"cpu.max": "max 100000"}, "", math.inf),
        ("0::/\n", {"cpu.max": "150000 100000"}, "", 1.5),
        ("0::/\n", {"cpu.max": "20000 100000"}, "", 0.2),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "", 2.0),  # of a group around it
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 50000"}, "", 1.0),
        ("0::/a\n", {"b/cpu.max": "100000 100000"}, "", math.inf),  # of another group
        ("0::/../other\n", {"cpu.max": "100000 100000"}, "", 1.0),
        # A container of version 2 without a namespace: its own group is the root of what it sees.
        ("0::/docker/7/in\n", {"in/cpu.max": "100000 100000"}, MOUNT.format("/docker/7", "", "cgroup2"), 1.0),
        ("0::/docker/7\n", {"cpu.max": "100000 100000"}, MOUNT.format("/docker/7", "", "cgroup2"), 1.0),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "", math.inf),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, "", 0.5),
        (
            V1.format("/a/b"),
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            "",
            3.0,
        ),
        (
            V1.format("/docker/7"),
            {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
            MOUNT.format("/docker/7", "/cpu", "cgroup"),
            1.0,
        ),
        ("0::/\n", {"cpu.max": "", "cpu/cpu.cfs_quota_us": "?"}, "", math.inf),
        ("", {"cpu.max": "100000 0"}, "", math.inf),
    ],
)
def test_quotas(own, files, mounts, granted, tmp_path):
    assert quota(machine(tmp_path, own, files, mounts)) == pytest.approx(granted)


@pytest.mark.parametrize(("allowed", "granted", "count"), [(8, math.inf, 8), (8, 3.9, 3), (2, 3.9, 2), (8, 0.2, 1)])
def test_the_least_bound_holds_and_one_is_left(allowed, granted, count, monkeypatch):
    monkeypatch.setattr("fedfleet.workloads.processors.affinity", lambda: allowed)
    monkeypatch.setattr("fedfleet.workloads.processors.quota", lambda: granted)
    assert processors() == count


def one_picture() -> bytes:
    """A grey picture of 256 x 256 pixels, as PNG: smaller ones are read in one thread."""
    file = io.BytesIO()
    Image.new("L", (256, 256)).save(file, "PNG")
    return file.getvalue()


def test_everybody_uses_the_number(monkeypatch):
    monkeypatch.setattr("fedfleet.workloads.processors.affinity", lambda: 5)
    monkeypatch.setattr("fedfleet.workloads.processors.quota", lambda: math.inf)
    assert Engine().count_workers() == 5
    assert Engine(cpus=2).count_workers() == 2
    assert processes_here(Engine()) == 5
    threads: list[int] = []

    class Pool(images.ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            threads.append(count)
            super().__init__(count)

    monkeypatch.setattr(images, "ThreadPoolExecutor", Pool)
    images.pictures([one_picture()], (1, 256, 256), "nowhere")
    assert threads == [5]


def test_nobody_counts_the_processors_of_the_machine():
    """They are more than a job may use. The one place that tells a reader of the machine is allowed."""
    names = re.compile(r"cpu_count|sched_getaffinity|process_cpu_count")
    found = []
    for folder in ("engine", "algorithms", "workloads", "tune"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and names.fullmatch(node.attr):
                    found.append(str(path.relative_to(ROOT)))
    assert set(found) == {"workloads/processors.py"}


def done(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert found.returncode == 0, found.stdout + found.stderr
    return found


def on_one_core() -> list[str]:
    """The beginning of a command that may run on one processor, as `taskset` binds it."""
    first = min(os.sched_getaffinity(0))
    code = f"import os, sys; os.sched_setaffinity(0, [{first}]); os.execvp(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code]


def with_quota(folder: Path, microseconds: int) -> list[str]:
    """The beginning of a command that sees a quota per 100,000 microseconds, as in a container. It needs the right to
    make a mount that nobody else sees."""
    groups = Path("/sys/fs/cgroup")
    if (groups / "cgroup.controllers").exists():
        (folder / "cpu.max").write_text(f"{microseconds} 100000\n")
        target = groups  # the group of a machine has no such file, so that the folder hides all of it
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{microseconds}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        target = groups / "cpu"
    mount = f"mount --bind {folder} {target}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this process may not make mounts of its own (unshare -m, mount --bind)")
    return ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]


COUNT = """
from fedfleet.engine.config.schema import Engine
from fedfleet.workloads.processors import processors
print(processors(), Engine().count_workers())
"""


def test_affinity_of_a_process():
    assert done([*on_one_core(), sys.executable, "-c", COUNT]).stdout.split() == ["1", "1"]


@pytest.mark.parametrize("microseconds", [100_000, 20_000])
def test_quota_of_a_process(microseconds, tmp_path):
    assert done([*with_quota(tmp_path, microseconds), sys.executable, "-c", COUNT]).stdout.split() == ["1", "1"]


@pytest.mark.long
@pytest.mark.parametrize("bound", ["affinity", "quota"])
def test_a_run_with_one_processor_has_one_worker(bound, tmp_path):
    """Of a machine with more; everything else is left to the defaults."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this process may use one processor only")
    (tmp_path / "group").mkdir()
    prefix = on_one_core() if bound == "affinity" else with_quota(tmp_path / "group", 100_000)
    run = [
        "-m",
        "fedfleet",
        "run",
        "digits",
        "engine.backend=ray",
        "federation.rounds=1",
        "tracking.uri=none",
        "--out",
        str(tmp_path / "out"),
    ]
    assert "1 worker on Ray" in done([*prefix, sys.executable, *run]).stderr


OWN_RAY = """
import sys
import ray
import fedfleet
from fedfleet.engine.backends.ray.connect import counted
from fedfleet.tune.progress import place_of
from fedfleet.engine.run_spec import RunSpec

made = fedfleet.Experiment(
    workload="quadratic",
    method="fedavg",
    federation={"clients": 4, "cohort": 2, "rounds": 1},
    engine={"backend": "ray"},
    tracking={"uri": "none"},
)
for count in map(int, sys.argv[1:]):
    ray.init("local", num_cpus=count, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    print(counted(made.engine).workers, place_of(RunSpec.of("run", made)))
    if count == 1:
        assert fedfleet.run(made).rows
    ray.shutdown()
"""


@pytest.mark.long
def test_workers_follow_the_ray_of_the_user():
    """One that the user has started with fewer processors than there are, or with more."""
    more = len(os.sched_getaffinity(0)) + 1
    found = done([sys.executable, "-c", OWN_RAY, "1", str(more)]).stdout.splitlines()
    assert found == ["1 1 worker on Ray", f"{more} {more} workers on Ray"]
