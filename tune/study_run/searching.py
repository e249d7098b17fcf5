"""Runs the searches of a study whose methods have ranges."""

from __future__ import annotations

from typing import Any

from ...engine.config.schema import Engine
from ...engine.errors import ConfigError, FedFleetError, Interrupted
from ...engine.stopping import Stop
from ..executor.executor import WANTED, cpus_for, why_not_together
from ..search.run import search
from ..study.folder import StudyFolder
from ..study.searches import searches
from ..study.spec import Study


def run_searches(study: Study, folder: StudyFolder, jobs: int | None, stop: Stop, quiet: bool = False) -> list[str]:
    """Run the searches that are not over; returns a sentence for each one that failed. jobs: see `bounded`. stop: the
    study's flag, after which no search begins. quiet: whether to show no progress. Raises Interrupted if the flag is
    set during a search that has trials left."""
    failed = []
    for key, data in searches(study).items():
        if stop():
            break
        if folder.searched(key) is not None:
            continue
        wanted = bounded(data, study.tune.together, jobs)
        try:
            search(wanted, folder.search_of(key), resume=True, progress=not quiet, stop=stop)
        except (ConfigError, Interrupted):
            raise
        except FedFleetError as error:
            failed.append(f"{data['name']}: {error}")
    return failed


def bounded(data: dict[str, Any], together: WANTED, jobs: int | None) -> dict[str, Any]:
    """The experiment of a search with at most `jobs` processes, which have one trial each unless trials share them;
    None: as many as fit."""
    engine = Engine.model_validate(data["engine"])
    shared = bool(together) and not why_not_together(engine)
    settings = {**data["search"], "together": together, "concurrent": "auto" if shared else jobs or "auto"}
    if shared and jobs:  # more trials than processes are under way, so `concurrent` cannot bound the processes
        data = {**data, "engine": {**data["engine"], "cpus": cpus_for(engine, jobs)}}
    return {**data, "search": settings}
