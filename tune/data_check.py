"""The data sets that a study needs: which of their files are here, their digests, and which are here in part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..engine.errors import ConfigError, FedFleetError
from ..engine.runs.environment import digests
from ..workloads.data.published import Published
from ..workloads.data.table import Table
from ..workloads.workload import Workload
from .listing import columns
from .study.data import files_of, workloads
from .study.spec import load


def check(source: str, overrides: tuple[str, ...]) -> tuple[str, int]:
    """(the data sets of a study as text, how many of them are missing or damaged). source: its name or file."""
    sets = dict[str, Workload]()
    for data, workload in workloads(load(source, overrides)):
        name, base = unwrapped(data["workload"], workload)
        sets.setdefault(f"{name} {getattr(base, 'data_root', None)} {getattr(base, 'glove', None)}", base)
    told = [about(key.partition(" ")[0], workload) for key, workload in sets.items()]
    return "\n\n".join(text for text, _ in told), sum(not good for _, good in told)


def unwrapped(settings: Any, workload: Workload) -> tuple[str, Workload]:
    """The name and the workload that reads the data, of one that may lie around it."""
    while isinstance(inner := getattr(workload, "of", None), Workload):
        settings, workload = settings["of"], inner
    return (settings["name"] if isinstance(settings, dict) else str(settings)), workload


def about(name: str, workload: Workload) -> tuple[str, bool]:
    """(what is here of the data set of a workload, whether it can be used). Its rows are counted by loading it."""
    if not isinstance(workload, Published | Table):
        return f"{name}: needs no files of data", True
    published = isinstance(workload, Published)
    if published and workload.stand_in:
        return f"{name}: synthetic rows in place of the files (stand_in)", True
    try:
        files, (train, test) = files_of(workload), loaded(workload)
    except ConfigError as error:
        return f"{name}: {'; '.join([*places(workload), str(error).removeprefix('experiment.workload: ')])}", False
    rows = len(train["label"]), len(test["label"])
    part = workload.in_part(*rows) if published else ""
    whole = f"{rows[0]:,} training and {rows[1]:,} test rows"
    kind = "in part" if part else "complete" if published and workload.full_rows else "found"
    head = f"{name}: {kind}: {part or whole}"
    sizes = {name: path.stat().st_size for name, path in files.items()}
    table = [("  file", "bytes", "SHA-256")]
    table += [(f"  {file}", f"{sizes.get(file, sum(sizes.values())):,}", sha) for file, sha in digests(files).items()]
    where = sorted({str(path.parent) for path in files.values()})
    return "\n".join([head, *(f"  in {place}" for place in where), columns(table)]), True


def loaded(workload: Published | Table) -> Any:
    """The columns of (train, test). Raises ConfigError if they cannot be read."""
    try:
        return workload.load()
    except FedFleetError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def places(workload: Published | Table) -> Iterator[str]:
    root = getattr(workload, "data_root", None) or os.environ.get("FEDFLEET_DATA")
    yield f"not usable, looked for in {root}" if root else "not usable"
