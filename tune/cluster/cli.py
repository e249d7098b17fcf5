"""The commands for clusters: submit, attach, doctor. The module is quick to import, as the command line is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from ..leftovers import Out
from ..outcome import report_errors, show_result
from ..streams import say

at = click.option(
    "--address", help="Address of a running Ray cluster: auto (on this machine), HOST:PORT, or ray://HOST:PORT."
)
quiet = click.option("--quiet", is_flag=True, help="Print no progress, only the result.")
json_result = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line."
)


def on_cluster(overrides: Iterable[str], address: str | None, *keys: str) -> tuple[str, ...]:
    """The overrides, with those of --address in front. keys: those to set (default: the backend and the address)."""
    if address is None:
        return tuple(overrides)
    keys = keys or ("engine.backend", "engine.address")
    values = {"engine.backend": "ray", "engine.address": address}
    return (*(f"{key}={values[key]}" for key in keys), *overrides)


@click.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--address", required=True, help="The cluster's dashboard, http://HOST:8265, or auto on its head node.")
@click.option(
    "--out",
    type=Out(here=False),
    help="Folder on the cluster for the run's files (default: ~/fedfleet/<run id> there).",
)
@click.option("--detach", is_flag=True, help="Return as soon as the cluster has accepted the job.")
@report_errors
def submit(experiment: str, overrides: tuple[str, ...], address: str, out: Path | None, detach: bool) -> None:
    """Run EXPERIMENT as a job of a cluster and follow its log.

    This package, the file and its plug-ins are sent to the cluster.
    """
    from .submit import follow, send

    job = send(experiment, overrides, address, str(out) if out else None)
    say(f"job {job}")
    if not detach:
        follow(job, address)


@click.command()
@click.argument("run", default="")
@click.option("--address", help="Address of the cluster (default: auto); for a job, address of the dashboard.")
@click.option("--stop", is_flag=True, help="Ask the run to write a checkpoint and stop.")
@json_result
@quiet
@report_errors
def attach(run: str, address: str | None, stop: bool, as_json: bool, quiet: bool) -> None:
    """Follow RUN to its end: the id or folder of a detached run, or the id of a job. Ctrl-C does not stop the run.

    Without RUN, list the detached runs.
    """
    from .runs import follow_run, going

    if not run:
        say("\n".join(going(address or "auto")) or "there is no detached run")
        return
    if run.startswith("raysubmit_"):
        from .submit import follow

        follow(run, address or "auto", stop)
        return
    show_result(follow_run(run, address or "auto", stop, quiet), as_json)


@click.command()
@click.argument("experiment", required=False)
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--address", help="The Ray cluster to check (default: that of EXPERIMENT, else only this machine).")
@click.option("--out", type=Out(), help="Folder that all nodes should be able to read (default: runs).")
@report_errors
def doctor(experiment: str | None, overrides: tuple[str, ...], address: str | None, out: Path | None) -> None:
    """Check versions on every node, placement of workers, shared storage, authentication and the MLflow store."""
    from .doctor import examine

    examine(experiment, on_cluster(overrides, address), out or Path("runs"))


COMMANDS = (submit, attach, doctor)
