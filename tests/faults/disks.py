"""Small disks, as only root can have them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """A disk of `size` KiB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=10).returncode:
        raise NoDisk("a small disk can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=10)


class NoDisk(Exception):
    """This point cannot be run here."""


def enlarge(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True, timeout=10)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:
            return
