"""`fedfleet study`: chooses the folder, runs the study and prints its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.runs.saved_files import refuse_other_kind
from ..output_paths import check_out
from ..streams import say, tell
from ..study.cells import cells, trials
from ..study.spec import Study, load
from .runner import run_study


def run_named(
    source: str,
    overrides: tuple[str, ...],
    reduced: dict[str, Any],
    out: Path | None,
    jobs: int | None,
    keep: bool,
    quiet: bool,
) -> int:
    """Run a study, by name or file; returns the number of cells and trials that failed. keep: whether to keep the
    final models; quiet: whether to show no progress."""
    study = load(source, overrides, reduced)
    folder = out or Path("runs") / "studies" / study.name
    check_out(folder)
    refuse_other_kind(folder, "study")
    if not quiet:
        announce(study, folder)

    outcome, text = run_study(study, folder, jobs, keep, quiet)
    say(text)
    counts = f"{outcome.finished} cells finished, {outcome.diverged} diverged, {outcome.failed} failed"
    if outcome.failed_trials:
        counts += f"; {outcome.failed_trials} trials failed, so the choice of settings lacks them"
    say(f"\n{counts}\nreport: {folder / 'report.html'}, {folder / 'report.md'}")
    return outcome.failed + outcome.failed_trials


def announce(study: Study, folder: Path) -> None:
    """Print what will be run."""
    for note in study.notes:
        tell(f"changed: {note}")
    tell(f"{len(cells(study))} cells and {len(trials(study))} trials for tuning; folder: {folder}")
