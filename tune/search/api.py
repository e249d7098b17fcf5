"""`fedfleet.search`, and the command `fedfleet search`, which has the same arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...engine.config.yaml_text import own
from ...engine.errors import ConfigError
from ...engine.runs.prepare import new_run_id
from ...engine.storage.expanded import expanded
from ..files import listed, load_data, override
from ..output_paths import check_out
from ..units import setting, shown
from .folder import load
from .found import Found
from .paper_grids import with_grid
from .plan import CHOSE_A_SEED
from .run import search as conduct
from .trial_store import Trial

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
        return conduct(data, SEARCHES / new_run_id() if out is None else out, progress=not quiet)
    if out is not None or wants_grid:
        raise ConfigError("resume takes only the search's folder; leave out and paper_grid away")
    if isinstance(experiment, Mapping):
        raise ConfigError("resume takes the search's folder, got plain data of an experiment; give the folder")
    return conduct(override(load(expanded(experiment)).plain(), changes), experiment, resume=True, progress=not quiet)


def plain(experiment: str | Path | Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The plain data of an experiment with overrides applied."""
    if not isinstance(experiment, Mapping):
        return load_data(str(experiment), overrides)
    data = override(own(dict(experiment)), overrides)
    return {**data, "plugins": listed(data.get("plugins"))}


# --- the command ------------------------------------------------------------------------------------------------------
def run_search(
    source: str, overrides: Iterable[str], out: Path | None, paper_grid: bool, paper: str, go_on: bool, quiet: bool
) -> Found:
    """Run a search; the arguments are those of `search`. source: an experiment's file or shipped name; with `go_on`
    the folder of a search to continue."""
    if go_on and (out is not None or paper_grid or paper != "auto"):
        raise ConfigError("--resume takes only the search's folder; leave --out and --paper-grid out")
    check_out(out or SEARCHES)
    return search(source, overrides, out, paper_grid=paper_grid, paper=paper, resume=go_on, quiet=quiet)


def text_of(found: Found) -> str:
    """The outcome in a few lines."""
    counts = {
        key: found.summary()[key] for key in ("finished", "pruned", "diverged", "failed") if key in found.summary()
    }
    lines = [", ".join(f"{count} {status}" for status, count in counts.items())]
    lines += [row(trial, list(found.values)) for trial in found.front]
    if any("seed" in trial.params for trial in found.front):
        lines.append(f"note: {CHOSE_A_SEED}")
    return "\n".join([*lines, f"the best trial as an experiment file: {found.folder / 'best.yaml'}"])


def row(trial: Trial, objectives: list[str]) -> str:
    """A trial's values and parameters in one line, as the lines of progress have them."""
    values = [f"{name} {shown(name, value)}" for name, value in zip(objectives, trial.values, strict=True)]
    params = [f"{key} {setting(value)}" for key, value in trial.params.items()]
    return f"trial {trial.number}: {', '.join([*values, *params])}"
