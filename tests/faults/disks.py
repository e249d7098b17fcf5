"""Small disks, which only root can mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a disk of `size` KiB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=100).returncode:
        raise NoDisk("a small disk can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=100)


class NoDisk(Exception):
    """No disk can be mounted here, so the test or point cannot be run."""


def enlarge(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True, timeout=100)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            return
