"""`fedfleet study`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ...engine.errors import FedFleetError
from ..executor.fork_server import begin
from ..exit_status import report_errors
from .options import KeyedCommand, Out, at, overrides, quiet


@click.command("study", cls=KeyedCommand)
@click.argument("study")
@overrides
@click.option(
    "--out",
    type=Out(),
    help="Folder of the study (default: runs/studies/NAME); a study that is already there is continued.",
)
@click.option("--scale", type=float, help="Multiply the number of rounds by this factor; the report says so.")
@click.option("--rounds", type=int, help="Rounds of every run, instead of the study's.")
@click.option("--clients", type=int, help="Clients, instead of the study's; the cohort shrinks in proportion.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Processes that run cells (default: the number of processors, or as many as fit a cluster).",
)
@click.option("--keep-models", is_flag=True, help="Keep every cell's final model.")
@at
@quiet
@report_errors
def command(
    study: str,
    overrides: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    keep_models: bool,
    address: str | None,
    quiet: bool,
    **reduced: Any,
):
    """Run STUDY, a YAML file or a shipped name (see `fedfleet list studies`), or continue it where it stopped."""
    if address is None:
        begin()  # it imports beside this process

    from ..study_run.runner import run_named  # it imports torch

    given = {key: value for key, value in reduced.items() if value is not None}
    if address is not None:
        overrides = (f"experiment.engine.address={address}", *overrides)
    if failed := run_named(study, overrides, given, out, jobs, keep_models, quiet):
        raise FedFleetError(
            f"{failed} cells or trials of the study failed; the report says why, and the same command tries them again"
        )
