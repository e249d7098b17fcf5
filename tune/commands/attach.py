"""`fedfleet attach`."""

from __future__ import annotations

import click

from ..cluster.runs import follow_run, going
from ..cluster.submit import follow
from ..exit_status import report_errors
from ..one_run import show_result
from ..streams import say
from .options import KeyedCommand, json_result, quiet


@click.command("attach", cls=KeyedCommand)
@click.argument("run", default="")
@click.option("--address", help="Address of the cluster (default: auto); for a job, address of the dashboard.")
@click.option("--stop", is_flag=True, help="Ask the run to write a checkpoint and stop.")
@json_result
@quiet
@report_errors
def command(run: str, address: str | None, stop: bool, as_json: bool, quiet: bool) -> None:
    """Follow RUN to its end: the id or folder of a detached run, or the id of a job. Ctrl-C does not stop the run.

    Without RUN, list the detached runs.
    """
    if not run:
        say("\n".join(going(address or "auto")) or "there is no detached run")
    elif run.startswith("raysubmit_"):
        follow(run, address or "auto", stop)
    else:
        show_result(follow_run(run, address or "auto", stop, quiet), as_json)
