"""`fedfleet fork`."""

from __future__ import annotations

from pathlib import Path

import click

from ..exit_status import report_errors
from ..forking import client_numbers
from ..one_run import fork_run, show_result
from .options import KeyedCommand, Out, at, json_result, on_cluster, overrides, quiet


@click.command("fork", cls=KeyedCommand)
@click.argument("run", metavar="DIRECTORY", type=Out())
@overrides
@click.option("--round", "number", type=int, required=True, help="The committed round to go on from; 0: the beginning.")
@click.option(
    "--without-client",
    "without",
    multiple=True,
    metavar="I,J",
    help="Clients that are drawn but not used from there on (may be repeated); the key federation.without.",
)
@click.option("--out", type=Out(), help="Folder for the fork's files (default: runs/<run id>).")
@json_result
@at
@quiet
@report_errors
def command(
    run: Path,
    overrides: tuple[str, ...],
    number: int,
    without: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    address: str | None,
    quiet: bool,
) -> None:
    """Go on from a committed round of the run in DIRECTORY with other settings, as a run of its own.

    All draws stay as they are, and without any change the fork has the bits of its parent. The states of clients are
    shared, not copied. Plug-ins that the run's config.yaml names are executed: do not fork a folder that you do not
    trust.
    """
    clients = client_numbers(without)
    show_result(fork_run(run, number, on_cluster(overrides, address), out, clients, quiet), as_json)
