"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints, just above the last line, how many tests were skipped for which reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}", yellow=True)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Every test begins with the same state of torch's global generator, from which layers that it makes are drawn."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> str:
    """The folder of the real data sets: $FEDFLEET_DATA, else shared/data in the repository or beside it."""
    given = os.environ.get("FEDFLEET_DATA")
    here = Path(__file__).resolve().parents[1]
    for root in [Path(given)] if given else [here.parent / "shared" / "data", here / "shared" / "data"]:
        if root.is_dir():
            return str(root)
    pytest.skip("the real data sets are not here; set FEDFLEET_DATA to their folder")


@pytest.fixture(scope="session")
def real_set(data_root: str) -> Callable[[str], Path]:
    """real_set(name): the folder of a real data set. A test is skipped if the set is not there, because the sets are
    optional."""

    def folder(name: str) -> Path:
        if not Path(data_root, name).is_dir():
            pytest.skip(f"{name} is not in {data_root}")
        return Path(data_root, name)

    return folder


@pytest.fixture(scope="session")
def own_kernels() -> None:
    """Builds the native kernels. A test is skipped if there is no C++ compiler, because it is optional; a compiler that
    is there must succeed."""
    from fedfleet.engine.kernels import library

    if library.find_compiler() is None:
        pytest.skip("no C++ compiler is here; install g++")
    library.library()


def start_ray(**more: int) -> None:
    """Starts a Ray of this process with four logical processors. more: further arguments of `ray.init`."""
    import ray

    os.environ.setdefault("RAY_worker_niceness", "0")  # as in runs; Ray's default of 15 starves workers
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray gives a busy machine 30
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init("local", num_cpus=4, object_store_memory=256 * 2**20, **quiet, **more)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="session")
def ray_here():
    """One Ray for all tests that need it, with four logical processors, so that two or three workers fit on any
    machine."""
    import ray

    from fedfleet.engine.backends.ray.connect import shutdown

    shutdown()  # the Ray that a run of an earlier test has started
    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def one_fork_server() -> Iterator[None]:
    """The searches and studies that a file's tests call in this process get their processes from one fork server, which
    imports torch once: the next one takes it where the one before would have ended it."""
    from fedfleet.tune.executor import fork_server
    from fedfleet.tune.executor.fork_server import ForkServer

    end = ForkServer.close

    def close(server: ForkServer, seconds: float = 0.0) -> None:
        if server.alive and fork_server._begun in (None, server):
            fork_server._begun = server
        else:
            end(server, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "close", close)
        yield
    fork_server.not_needed()
