"""`fedfleet.search`: the command `fedfleet search` as a function, with the same arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...engine.config.yaml_text import own
from ...engine.errors import ConfigError
from ...engine.runs.launch import new_run_id
from ...engine.storage.expanded import expanded
from ..files import listed, load_data, override
from .folder import load
from .found import Found
from .paper_grids import with_grid
from .run import search as run_search

SEARCHES = Path("runs/searches")


def search(
    experiment: str | Path | Mapping[str, Any],
    overrides: str | Iterable[str] = (),
    out: str | Path | None = None,
    *,
    paper_grid: bool = False,
    paper: str = "auto",
    resume: bool = False,
    address: str | None = None,
    quiet: bool = True,
) -> Found:
    """Search the ranges in an experiment, as `fedfleet search` does: Optuna proposes values for the trials.

        found = fedfleet.search("digits", "method.rule.lr={search: loguniform, low: 1e-3, high: 1}", "runs/searches/lr")
        print(found.best, found.values)

    experiment: a YAML file, a shipped name, or plain data with ranges; with `resume` the folder of a search. overrides:
    one `a.b=c`, or several. out: folder of the search (default: runs/searches/<search id>). paper_grid: search the grid
    that a paper gives for the method; paper: the paper's name, which implies it. resume: continue the search in the
    folder `experiment`. address: of a Ray cluster. quiet: whether to show no progress on standard error.

    Raises ConfigError for a search that cannot run as it is written, Interrupted on a signal that ends runs
    (`resume` then loses no trial that has ended), FedFleetError if no trial finished.
    """
    changes = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    if address is not None:
        changes = (f"engine.address={address}", *changes)
    wants_grid = paper_grid or paper != "auto"
    if not resume:
        data = plain(experiment, changes)
        data = with_grid(data, paper) if wants_grid else data
        return run_search(data, SEARCHES / new_run_id() if out is None else out, progress=not quiet)
    if out is not None or wants_grid:
        raise ConfigError("resume takes only the search's folder; leave out and paper_grid away")
    if isinstance(experiment, Mapping):
        raise ConfigError("resume takes the search's folder, got plain data of an experiment; give the folder")
    return run_search(
        override(load(expanded(experiment)).plain(), changes), experiment, resume=True, progress=not quiet
    )


def plain(experiment: str | Path | Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The plain data of an experiment with overrides applied."""
    if not isinstance(experiment, Mapping):
        return load_data(str(experiment), overrides)
    data = override(own(dict(experiment)), overrides)
    return {**data, "plugins": listed(data.get("plugins"))}
