"""The data sets that a study needs: which of their files are here, their digests, and which are here in part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..engine.errors import ConfigError, FedFleetError
from ..engine.runs.environment import digests
from ..engine.user_code import plugin_errors
from ..workloads.classification import Classification
from ..workloads.data.published import Published
from ..workloads.data.text import Text
from ..workloads.workload import Workload
from .listing import columns
from .study.data import files_of, workloads
from .study.spec import load


def check(source: str, overrides: tuple[str, ...]) -> tuple[str, int]:
    """(the data sets of a study as text, how many of them are missing or damaged). source: its name or file."""
    told = dict[str, bool]()
    for data, workload in workloads(load(source, overrides)):
        text, good = about(*unwrapped(data["workload"], workload))
        told[text] = good
    return "\n\n".join(told), sum(not good for good in told.values())


def unwrapped(settings: Any, workload: Workload) -> tuple[str, Workload]:
    """The name and the workload that reads the data, of one that may lie around it."""
    while isinstance(inner := getattr(workload, "of", None), Workload):
        settings, workload = settings["of"], inner
    return (settings["name"] if isinstance(settings, dict) else str(settings)), workload


def about(name: str, workload: Workload) -> tuple[str, bool]:
    """(what is here of the data set of a workload, whether it can be used). Its rows are counted by loading it."""
    if isinstance(workload, Published) and workload.stand_in:
        return f"{name}: synthetic rows in place of the files (stand_in)", True
    try:
        with plugin_errors("experiment.workload"):
            workload.check()
        files = files_of(workload)
        if not files:
            return f"{name}: needs no files of data", True
        head = f"{name}: {contents(workload)}"
    except FedFleetError as error:
        return f"{name}: {'; '.join([*places(workload), str(error).removeprefix('experiment.workload: ')])}", False
    sizes = {name: path.stat().st_size for name, path in files.items()}
    table = [("  file", "bytes", "SHA-256")]
    table += [(f"  {file}", f"{sizes.get(file, sum(sizes.values())):,}", sha) for file, sha in digests(files).items()]
    where = sorted({str(path.parent) for path in files.values()})
    vectors = ["  no file of word vectors (glove): they are drawn at random"]
    drawn = vectors if isinstance(workload, Text) and workload.glove is None else []
    return "\n".join([head, *(f"  in {place}" for place in where), columns(table), *drawn]), True


def contents(workload: Workload) -> str:
    """Whether the data set is complete, and its rows. Raises FedFleetError if it cannot be read."""
    if not isinstance(workload, Classification):
        return "found"
    train, test = loaded(workload)
    rows = len(next(iter(train.values()))), len(next(iter(test.values())))
    published = isinstance(workload, Published)
    if part := workload.in_part(*rows) if published else "":
        return f"in part: {part}"
    kind = "complete" if published and workload.full_rows else "found"
    return f"{kind}: {rows[0]:,} training and {rows[1]:,} test rows"


def loaded(workload: Classification) -> Any:
    """The columns of (train, test). Raises ConfigError if they cannot be read."""
    try:
        return workload.load()
    except FedFleetError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def places(workload: Workload) -> Iterator[str]:
    root = getattr(workload, "data_root", None)
    if isinstance(workload, Published):
        root = root or os.environ.get("FEDFLEET_DATA")
    yield f"not usable, looked for in {root}" if root else "not usable"
