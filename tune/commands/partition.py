"""`fedfleet partition`."""

from __future__ import annotations

from pathlib import Path

import click

from ..exit_status import report_errors
from ..files import load
from ..partition import describe
from ..streams import say
from .options import KeyedCommand, Out, overrides


@click.command("partition", cls=KeyedCommand)
@click.argument("experiment")
@overrides
@click.option("--out", type=Out(), default="partition.png", help="File for the chart: .png, .svg, .pdf or .html.")
@report_errors
def command(experiment: str, overrides: tuple[str, ...], out: Path) -> None:
    """Draw how EXPERIMENT distributes its data over the clients, and print measures of heterogeneity."""
    say(describe(load(experiment, overrides), out))
