"""`fedfleet doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from ..cluster.doctor import examine
from ..exit_status import report_errors
from .options import KeyedCommand, Out, on_cluster, overrides


@click.command("doctor", cls=KeyedCommand)
@click.argument("experiment", required=False)
@overrides
@click.option("--address", help="The Ray cluster to check (default: that of EXPERIMENT, else only this machine).")
@click.option("--out", type=Out(), help="Folder that all nodes should be able to read (default: runs).")
@report_errors
def command(experiment: str | None, overrides: tuple[str, ...], address: str | None, out: Path | None) -> None:
    """Check versions on every node, placement of workers, storage, authentication and the MLflow store."""
    examine(experiment, on_cluster(overrides, address), out or Path("runs"))
