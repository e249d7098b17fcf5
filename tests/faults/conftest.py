"""What several files of tests need."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedfleet.engine import Result, run
from fedfleet.engine.errors import Interrupted

from .disks import NoDisk, mounted
from .runs import EVERY, Watch, interrupt, small


@pytest.fixture(scope="session")
def expected(tmp_path_factory) -> Result:
    """The result of the small run without faults."""
    return run(small(tmp_path_factory.mktemp("none")))


@pytest.fixture(scope="session")
def broken_off(tmp_path_factory) -> Path:
    """The folder of the small run that Ctrl-C ended in round 6, with checkpoints of the rounds 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("broken") / "out"
    with pytest.raises(Interrupted):
        run(small(folder, checkpoint=EVERY), folder, [Watch(r5=interrupt)])
    return folder


@pytest.fixture
def out(broken_off, tmp_path) -> Path:
    """A copy of the folder `broken_off`, which a test may damage."""
    shutil.copytree(broken_off, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """disk(size): mounts a disk of `size` KiB."""
    with ExitStack() as made:

        def make(size: int) -> Path:
            try:
                return made.enter_context(mounted(tmp_path / "disk", size))
            except NoDisk as reason:
                pytest.skip(str(reason))

        yield make
