"""`fedfleet fleet`."""

from __future__ import annotations

from pathlib import Path

import click

from ..exit_status import report_errors
from ..files import load
from ..fleet import describe
from ..streams import say
from .options import KeyedCommand, Out, overrides


@click.command("fleet", cls=KeyedCommand)
@click.argument("experiment")
@overrides
@click.option("--devices", type=Out(), help="Parquet file to write, with the device of every client.")
@click.option("--sessions", type=Out(), help="Parquet file to write, with the sessions in which clients are online.")
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), default=7.0, show_default=True, help="Days of sessions."
)
@report_errors
def command(
    experiment: str, overrides: tuple[str, ...], devices: Path | None, sessions: Path | None, days: float
) -> None:
    """Print percentiles of the devices in the section `systems` of EXPERIMENT, and write them to files."""
    say(describe(load(experiment, overrides), devices, sessions, days))
