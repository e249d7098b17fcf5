"""`fedfleet run`."""

from __future__ import annotations

from pathlib import Path

import click

from ..exit_status import report_errors
from ..files import load
from ..streams import passing, say
from ..tracking.mlflow_process import beside
from .options import KeyedCommand, Out, at, json_result, on_cluster, overrides, quiet


@click.command("run", cls=KeyedCommand)
@click.argument("experiment")
@overrides
@click.option("--out", type=Out(), help="Folder for the run's files (default: runs/<run id>).")
@json_result
@at
@click.option(
    "--detach", is_flag=True, help="Start the run on the cluster and return; `fedfleet attach` follows it later."
)
@quiet
@report_errors
def command(
    experiment: str,
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    address: str | None,
    detach: bool,
    quiet: bool,
) -> None:
    """Run EXPERIMENT, a YAML file or a shipped name (see `fedfleet list experiments`)."""
    loaded = load(experiment, on_cluster(overrides, address))

    if detach:
        from ..cluster.runs import leave
        from ..one_run import folder_of

        run_id, folder = folder_of(out)
        say(leave(loaded, folder, run_id))
        return
    with beside(loaded.tracking):
        with passing(f"starting {loaded.title}", quiet):
            from ..one_run import begin_run, folder_of, show_result  # it imports torch

        run_id, folder = folder_of(out)
        show_result(begin_run(loaded, folder, run_id, quiet), as_json)
