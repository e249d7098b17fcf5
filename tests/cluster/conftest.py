"""Real clusters on this machine, with the processes of a Ray node for each of their nodes. Runs are started by the
command line in separate processes, because the process of the tests may use another Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ..tune.commands import COMMAND, until

STORE = 100 * 2**20


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[Any]]:
    """The cluster that the tests of a file share, or an empty list while there is none."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray gives a busy machine 30
    shared: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *told: None)  # others must not find the cluster
        yield shared
    for made in shared:
        ended_cluster(made)


@pytest.fixture
def cluster(clusters: list[Any]) -> Iterator[Any]:
    """Two nodes with one logical processor each; tests remove and add nodes. The next test of the file has the same
    cluster if these are still its nodes, and when the processes of this test have ended."""
    if not clusters:
        clusters.append(two_nodes(tempfile.mkdtemp(prefix="ff-ray-")))  # other programs must not find this cluster
    (shared,) = clusters
    nodes = set(shared.list_all_nodes())
    yield shared
    if set(shared.list_all_nodes()) == nodes:
        until(lambda: not any(busy(node) for node in nodes), "the workers of the test to end")
    else:
        ended_cluster(clusters.pop())


def two_nodes(folder: str) -> Any:
    """folder: of Ray's files. It must be short, because Ray makes sockets in it."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": STORE,
            "include_dashboard": False,
            "temp_dir": folder,
        },
    )
    made.add_node(num_cpus=1, object_store_memory=STORE, labels={"kind": "second"})
    return made


def ended_cluster(made: Any) -> None:
    folder = made.head_node.temp_dir
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def busy(node: Any) -> bool:
    """Whether the node has a process that Ray has made an actor of, or that executes a task. Their titles begin with
    "ray::" and the name of the class or of the function."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    titles = []
    for process in raylet.children(recursive=True):
        with suppress(psutil.Error):
            titles.append(" ".join(process.cmdline()))
    own = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return any(title.startswith("ray::") and not title.startswith(own) for title in titles)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Start]:
    """start(setting, name): starts a run with these settings on the cluster; its files are in the folder `name`."""
    running = []

    def run(data: dict[str, Any], name: str = "out") -> subprocess.Popen[str]:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(data))
        arguments = ("run", str(file), "--address", cluster.address, "--out", str(tmp_path / name), "--json")
        running.append(subprocess.Popen([*COMMAND, *arguments], stdout=-1, stderr=-1, text=True, cwd=tmp_path))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = 500) -> dict[str, Any]:
    """The object that `--json` printed, after the process has ended."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of clusters come first, because a Cluster that ends also removes the connection of this process to another
    Ray (`ray_here`). All of them are marked long, because each starts nodes of Ray."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here not in item.path.parents)
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.long)
