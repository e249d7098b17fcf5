"""Where data sets lie: a data root that the user gives, and in it one of a set's known layouts.

A root is $FEDFLEET_DATA, or a workload's `data_root`; a set lies in a folder of its own there (`root`/cifar10) or is
the root itself. Roots are only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Layout(NamedTuple):
    """One way a set is published: glob patterns of the files of each split, and how to read them.

    `read(files, train)` gives what the set makes of them, most often columns; every pattern must match a file.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[list[Path], bool], Any]

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys((*self.train, *self.test)))


class Found(NamedTuple):
    layout: Layout
    train: list[Path]
    test: list[Path]

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys((*self.train, *self.test)))

    def read(self) -> tuple[Any, Any]:
        """What the layout makes of (train, test)."""
        return self.layout.read(self.train, True), self.layout.read(self.test, False)


def given_root(data_root: str | None, wants: str) -> Path:
    """`wants`: what must lie there, and how to get it, for the message."""
    root = data_root or os.environ.get("FEDFLEET_DATA")
    if not root:
        raise ValueError(
            "data_root must name the folder of the data sets, got neither data_root nor FEDFLEET_DATA; "
            f"set one to a folder with {wants}"
        )
    return Path(root).expanduser()


def locate(data_root: str | None, folder: str, layouts: tuple[Layout, ...], fetch: str) -> Found:
    """The first layout with files for each of its patterns, in `root`/`folder`, then in the root itself."""
    wants = f"{', or '.join(map(str, layouts))} ({fetch})"
    root = given_root(data_root, wants)
    for place in (root / folder, root):
        for layout in layouts:
            train, test = matches(place, layout.train), matches(place, layout.test)
            if train and test:
                return Found(layout, train, test)
    place = root / folder if (root / folder).is_dir() else root
    raise ValueError(f"{folder} wants {', or '.join(map(str, layouts))} in {place}, got no such files; {fetch}")


def matches(place: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Files of every pattern, each pattern's in order of name; none where a pattern matches nothing."""
    found = [sorted(path for path in place.glob(pattern) if path.is_file()) for pattern in patterns]
    return [path for paths in found for path in paths] if all(found) else []


def damaged(path: Path, error: object) -> ValueError:
    """One sentence on a file that cannot be read."""
    said = (str(error).splitlines() or [""])[0].rstrip(". ")
    return ValueError(f"{path} must be a whole file, got a truncated or different one ({said}); fetch it again")
