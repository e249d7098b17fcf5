"""Finds the files of a data set under the data root that the user gives.

The data root is `data_root` of the workload or $FEDFLEET_DATA. The files of a data set lie in a folder there
(root/cifar10) or in the root itself, in one of the layouts in which the set is published. Data roots are only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

IN_PART = "in part: "
"""What the line of the log begins with that says which part of a data set a run had."""


class Layout(NamedTuple):
    """One form in which a data set is published.

    `train`, `test`: glob patterns of the files of each split; every pattern must match a file. `read`: function (files,
    whether they are for training) -> what is in them, usually the columns.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[list[Path], bool], Any]

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys((*self.train, *self.test)))


class Found(NamedTuple):
    """The files of a data set, and the layout that they are in."""

    layout: Layout
    train: list[Path]
    test: list[Path]

    @property
    def files(self) -> list[Path]:
        """All files, each once."""
        return list(dict.fromkeys((*self.train, *self.test)))

    def read(self) -> tuple[Any, Any]:
        """The results of the layout's `read` for (train, test)."""
        return self.layout.read(self.train, True), self.layout.read(self.test, False)


def given_root(data_root: str | None, wants: str) -> Path:
    """The data root; ValueError if it is not given. wants: what must be in it and how to get it, for the message."""
    root = data_root or os.environ.get("FEDFLEET_DATA")
    if not root:
        raise ValueError(
            "data_root must name the folder of the data sets, got neither data_root nor FEDFLEET_DATA; "
            f"set one of them to a folder with {wants}"
        )
    return Path(root).expanduser()


def locate(data_root: str | None, folder: str, layouts: tuple[Layout, ...], fetch: str) -> Found:
    """The files of the first layout that matches, in root/folder or else in the root itself. ValueError if none does.
    fetch: how to get the files, for the message."""
    wants = f"{', or '.join(map(str, layouts))} ({fetch})"
    root = given_root(data_root, wants)
    for place in (root / folder, root):
        for layout in layouts:
            train, test = matches(place, layout.train), matches(place, layout.test)
            if train and test:
                return Found(layout, train, test)
    place = root / folder if (root / folder).is_dir() else root
    raise ValueError(
        f"{folder} needs {', or '.join(map(str, layouts))} in {place}, {found_and_missing(place, layouts)}; {fetch}"
    )


def found_and_missing(place: Path, layouts: tuple[Layout, ...]) -> str:
    """Which files of the layout that is nearest to what is there were found, and for which of its patterns there is
    none."""
    patterns = [list(dict.fromkeys((*layout.train, *layout.test))) for layout in layouts]
    found = [[pattern for pattern in some if matches(place, (pattern,))] for some in patterns]
    nearest = max(range(len(layouts)), key=lambda number: len(found[number]))
    if not found[nearest]:
        return "got no such files"
    there = ", ".join(path.name for pattern in found[nearest] for path in matches(place, (pattern,))[:3])
    missing = ", ".join(pattern for pattern in patterns[nearest] if pattern not in found[nearest])
    return f"found {there}; missing {missing}"


def matches(place: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files that match the patterns, pattern by pattern in the order of their names; none if a pattern matches no
    file."""
    found = [sorted(path for path in place.glob(pattern) if path.is_file()) for pattern in patterns]
    return [path for paths in found for path in paths] if all(found) else []


def named(folder: str, files: Sequence[Path]) -> dict[str, Path]:
    """The files of a data set by the name of its folder and their place below the folder that holds all of them."""
    place = os.path.commonpath({os.path.dirname(path) for path in files})
    return {f"{folder}/{os.fspath(path)[len(place) :].lstrip(os.sep)}": path for path in files}


def damaged(path: Path, error: object) -> ValueError:
    """The error for a file that cannot be read. error: what is wrong with it."""
    if isinstance(error, OSError) and error.strerror:  # of the system; a format's own errors have none
        return ValueError(f"{path} cannot be read ({error.strerror}); give a file that is there and may be read")
    said = (str(error).splitlines() or [""])[0].rstrip(". ")
    return ValueError(f"{path} must be a whole file, got a truncated or different one ({said}); fetch it again")
