"""What several files of tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .disks import NoDisk, mounted


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
