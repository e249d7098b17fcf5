"""Methods with ranges, such as {search: loguniform, …}: one search is run for each choice that `tune.each` asks for.

A search runs with the seed and level of one cell: the cell itself, the first seed of its level, or the first level and
seed of the study. It takes no means over seeds, unlike tuning by grids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...engine.errors import ConfigError
from ..ranges import decided
from ..search.plan import plan
from .cells import Cell, digest, has_ranges, levels, planned, trial_data, with_keys
from .spec import Study


def wanted(study: Study, method: str, place: tuple[str, ...], seed: int) -> tuple[str, dict[str, Any]]:
    """(key, experiment with ranges and a section `search`) of the search that decides for a cell."""
    all_levels = levels(study)
    at = all_levels[0][1] if study.tune.each == "once" else dict(all_levels)[place]
    seeds = study.tune.seeds or study.seeds
    own = seed if study.tune.each == "cell" and study.tune.seeds is None else seeds[0]
    data = trial_data(planned(study, method, at, own), study)
    data["search"] = {
        "objectives": {study.deciding_of(method): study.deciding_best},
        "last": study.tune.last,
        "trials": study.tune.trials,
    }
    return digest(data, study.files), {**data, "name": f"{study.name}, {method}"}


def searches(study: Study) -> dict[str, dict[str, Any]]:
    """Key -> experiment of all searches that the study needs. Raises ConfigError for ranges without tuning."""
    found = {}
    for method in study.methods:
        for place, at in levels(study):
            if not has_ranges(planned(study, method, at, study.seeds[0])):
                continue
            if study.tune.each == "none":
                raise ConfigError(
                    f"methods.{method} contains a range, but tune.each is none; set it, or write a grid or a number"
                )
            found.update(wanted(study, method, place, seed) for seed in study.seeds)
    return found


def check_searches(study: Study) -> None:
    """Raise ConfigError for a search that could not run."""
    for data in searches(study).values():
        plan(data)


def with_searched_values(cell: Cell, study: Study, searched: Callable[[str], dict[str, Any] | None]) -> Cell:
    """The cell with the values that its search has found instead of its ranges; unchanged if there are none.

    searched: key of a search -> the best value of each range by its dotted key, None if the search is not over.
    """
    if not has_ranges(cell.data):
        return cell
    values = searched(wanted(study, cell.method, cell.place, cell.seed)[0])
    if values is None:
        return cell
    return with_keys(cell._replace(data=decided(cell.data, values), settings=values), study)
