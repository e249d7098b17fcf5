"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_root() -> str:
    """The folder of the real data sets: $FEDFLEET_DATA, else shared/data beside or in the repository."""
    given = os.environ.get("FEDFLEET_DATA")
    here = Path(__file__).resolve().parents[1]
    for root in [Path(given)] if given else [here.parent / "shared" / "data", here / "shared" / "data"]:
        if root.is_dir():
            return str(root)
    pytest.skip("the real data sets are not here; set FEDFLEET_DATA to their folder")


@pytest.fixture(scope="session")
def real_set(data_root: str) -> Callable[[str], Path]:
    """The folder of one of them by its name. Which of them somebody has is his choice, hence a skip."""

    def folder(name: str) -> Path:
        if not Path(data_root, name).is_dir():
            pytest.skip(f"{name} is not in {data_root}")
        return Path(data_root, name)

    return folder


@pytest.fixture(scope="session")
def own_kernels() -> None:
    """Built. A C++ compiler is optional, hence a skip without one; one that is here must do it."""
    from fedfleet.engine.kernels import library

    if library.find_compiler() is None:
        pytest.skip("no C++ compiler is here; install g++")
    library.library()


@pytest.fixture(scope="session")
def ray_here():
    """One Ray for all tests that need it; four logical processors, so that two or three workers fit anywhere."""
    import ray

    from fedfleet.engine.backends.ray.connect import shutdown

    shutdown()  # that of a run of an earlier test
    os.environ.setdefault("RAY_worker_niceness", "0")  # as runs have it: Ray's own 15 starves workers on a busy machine
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20)
    yield
    ray.shutdown()
