"""The files that the cells of a study read: those that settings name by their paths, and whether cells were run with
other data than are here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...engine.config.differences import flatten
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError
from ...engine.run_spec import RunSpec
from ...engine.runs.environment import digests
from ...engine.user_code import plugin_errors
from ...workloads.workload import Workload
from ..run_files import read_json
from .cells import first_values, levels, planned, trials
from .folder import OVER, StudyFolder
from .spec import Study


def workloads(study: Study) -> Iterator[tuple[dict[str, Any], Workload]]:
    """(settings of an experiment, its workload) of each different workload of a study."""
    found = dict[str, dict[str, Any]]()
    for _, at in levels(study):
        for method in study.methods:
            data = first_values(planned(study, method, at, study.seeds[0]))
            found.setdefault(key_of(data), data)
    for data in found.values():
        yield data, RunSpec.of("data", experiment(data)).workload


def files_of(workload: Workload) -> Mapping[str, Path]:
    """The files that a workload reads. Raises ConfigError if they are not here."""
    with plugin_errors("experiment.workload"):
        return workload.data_files()


def key_of(data: dict[str, Any]) -> str:
    """Text that is the same for experiments with the same workload."""
    return json.dumps(data.get("workload"), sort_keys=True, default=repr)


def with_files(study: Study) -> Study:
    """The study with the digests of the files that settings of its workloads name."""
    named = dict[str, str]()
    for data, workload in workloads(study):
        paths = set(files_of(workload).values())
        for text in flatten({"workload": data.get("workload")}).values():
            if isinstance(text, str) and (path := Path(text).expanduser()) in paths:
                named.update(dict.fromkeys([text], *digests({text: path}).values()))
    return study.model_copy(update={"files": named})


def refuse_other_data(folder: StudyFolder, study: Study) -> None:
    """Raise ConfigError if a run of the study is over that read other data than are here.

    Only files of the same names are compared, since a set may be here packed and have been unpacked there.
    """
    here = {key_of(data): digests(files_of(workload)) for data, workload in workloads(study)}
    for cell in (*trials(study), *folder.cells()):
        own = here.get(key_of(cell.data), {})
        recorded = read_json(folder.of(cell) / "environment.json").get("data") if folder.status(cell) in OVER else None
        for name, digest in (recorded or {}).items():
            if own.get(name, digest) != digest:
                raise ConfigError(
                    f"{folder.path}: its cells were run with another {name} than is here (SHA-256 {digest[:16]}…, here "
                    f"{own[name][:16]}…); put the file back, or give another folder with --out"
                )
