"""`fedfleet search`: starts the search that the command line describes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...engine.errors import ConfigError
from ..output_paths import check_out
from .api import SEARCHES, search
from .found import Found


def run_search(
    source: str, overrides: Iterable[str], out: Path | None, paper_grid: bool, paper: str, go_on: bool, quiet: bool
) -> Found:
    """Run a search; the arguments are those of `api.search`. source: an experiment's file or shipped name; with `go_on`
    the folder of a search to continue."""
    if go_on and (out is not None or paper_grid or paper != "auto"):
        raise ConfigError("--resume takes only the search's folder; leave --out and --paper-grid out")
    check_out(out or SEARCHES)
    return search(source, overrides, out, paper_grid=paper_grid, paper=paper, resume=go_on, quiet=quiet)
