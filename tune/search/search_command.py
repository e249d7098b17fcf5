"""`fedfleet search`: starts the search that the command line describes, and prints what it has found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from ...engine.errors import ConfigError
from ..output_paths import check_out
from .api import SEARCHES, search
from .found import Found
from .plan import CHOSE_A_SEED
from .trial_store import Trial


def run_search(
    source: str, overrides: Iterable[str], out: Path | None, paper_grid: bool, paper: str, go_on: bool, quiet: bool
) -> Found:
    """Run a search; the arguments are those of `api.search`. source: an experiment's file or shipped name; with `go_on`
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
    """A trial's values and parameters in one line."""
    values = ", ".join(f"{name} {value:.6g}" for name, value in zip(objectives, trial.values, strict=True))
    params = yaml.safe_dump(trial.params, default_flow_style=True, sort_keys=False, width=1000).strip()
    return f"trial {trial.number}: {values}, {params}"
