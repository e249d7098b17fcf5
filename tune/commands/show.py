"""`fedfleet show`."""

from __future__ import annotations

from pathlib import Path

import click

from ..exit_status import report_errors
from ..files import load
from ..show import describe, described_lineage
from ..streams import say
from .options import KeyedCommand, overrides


@click.command("show", cls=KeyedCommand)
@click.argument("experiment")
@overrides
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also print the keys that have their defaults, and the arguments of method and workload.",
)
@report_errors
def command(experiment: str, overrides: tuple[str, ...], everything: bool) -> None:
    """Print the configuration, the parameters by kind, and the bytes that one round sends.

    Of the configuration, it prints the keys that the file and the command line set, and all others only with --all.
    No round is run, but plug-ins that EXPERIMENT names are executed, including files that lie beside it.
    """
    loaded = load(experiment, overrides)
    say("\n".join([*described_lineage(Path(experiment)), describe(loaded, everything)]))
