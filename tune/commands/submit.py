"""`fedfleet submit`."""

from __future__ import annotations

from pathlib import Path

import click

from ..cluster.submit import follow, send
from ..exit_status import report_errors
from ..streams import say
from .options import KeyedCommand, Out, overrides


@click.command("submit", cls=KeyedCommand)
@click.argument("experiment")
@overrides
@click.option("--address", required=True, help="The cluster's dashboard, http://HOST:8265, or auto on its head node.")
@click.option(
    "--out",
    type=Out(here=False),
    help="Folder on the cluster for the run's files (default: ~/fedfleet/<run id> there).",
)
@click.option("--detach", is_flag=True, help="Return as soon as the cluster has accepted the job.")
@report_errors
def command(experiment: str, overrides: tuple[str, ...], address: str, out: Path | None, detach: bool) -> None:
    """Run EXPERIMENT as a job of a cluster and follow its log.

    This package, the file and its plug-ins are sent to the cluster.
    """
    job = send(experiment, overrides, address, str(out) if out else None)
    say(f"job {job}")
    if not detach:
        follow(job, address)
