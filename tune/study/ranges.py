"""Methods with ranges, such as {search: loguniform, …}: one search is run for each choice that `tune.each` asks for.

A search runs with the seed and level of one cell: the cell itself, the first seed of its level, or the first level and
seed of the study. It takes no means over seeds, unlike tuning by grids.
"""

from __future__ import annotations

from typing import Any

from ...engine.config.schema import Engine
from ...engine.errors import ConfigError, FedFleetError, Interrupted
from ...engine.stopping import Stop
from ..executor.executor import WANTED, cpus_for, why_not_together
from .cells import Cell, digest, levels, planned, shorten
from .folder import Folder
from .grids import has_ranges
from .spec import Study


def wanted(study: Study, method: str, place: tuple[str, ...], seed: int) -> tuple[str, dict[str, Any]]:
    """(key, experiment with ranges and a section `search`) of the search that decides for a cell."""
    all_levels = levels(study)
    overrides = all_levels[0][1] if study.tune.each == "once" else dict(all_levels)[place]
    seeds = study.tune.seeds or study.seeds
    own = seed if study.tune.each == "cell" and study.tune.seeds is None else seeds[0]
    data = shorten(planned(study, method, overrides, own), study.trial_rounds)
    data["search"] = {
        "objectives": {study.deciding: study.deciding_best},
        "last": study.tune.last,
        "trials": study.tune.trials,
    }
    return digest(data), {**data, "name": f"{study.name}, {method}"}


def searches(study: Study) -> dict[str, dict[str, Any]]:
    """Key -> experiment of all searches that the study needs. Raises ConfigError for ranges without tuning."""
    found = {}
    for method in study.methods:
        for place, overrides in levels(study):
            if not has_ranges(planned(study, method, overrides, study.seeds[0])):
                continue
            if study.tune.each == "none":
                raise ConfigError(
                    f"methods.{method} contains a range, but tune.each is none; set it, or write a grid or a number"
                )
            found.update(wanted(study, method, place, seed) for seed in study.seeds)
    return found


def check_ranges(study: Study) -> None:
    """Raise ConfigError for a search that could not run."""
    from ..search.plan import plan

    for data in searches(study).values():
        plan(data)


def run_searches(study: Study, folder: Folder, jobs: int | None, stop: Stop, quiet: bool = False) -> list[str]:
    """Run the searches that are not over; returns a sentence for each one that failed. jobs: see `bounded`. stop: the
    study's flag, after which no search begins. quiet: whether to show no progress. Raises Interrupted if the flag is
    set during a search that has trials left."""
    from ..search import search

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


def with_searched_values(cell: Cell, study: Study, folder: Folder) -> Cell:
    """The cell with the values that its search has found instead of its ranges; unchanged if there are none."""
    from ..search.space import decided

    if not has_ranges(cell.data):
        return cell
    values = folder.searched(wanted(study, cell.method, cell.place, cell.seed)[0])
    if values is None:
        return cell
    data = decided(cell.data, values)
    return cell._replace(data=data, settings=values, key=digest(data))
