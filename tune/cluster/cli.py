"""The commands that are about clusters: submit, attach, doctor. Light to import, as the command line is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from ..leftovers import Out
from ..outcome import show_result, told

at = click.option("--address", help="A running Ray: auto (on this machine), HOST:PORT, or ray://HOST:PORT.")


def on_cluster(overrides: Iterable[str], address: str | None, *keys: str) -> tuple[str, ...]:
    """--address as overrides; it wins over `engine.backend=local` of a file."""
    if address is None:
        return tuple(overrides)
    keys = keys or ("engine.backend", "engine.address")
    values = {"engine.backend": "ray", "engine.address": address}
    return (*(f"{key}={values[key]}" for key in keys), *overrides)


@click.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--address", required=True, help="The cluster's dashboard, http://HOST:8265, or auto on its head.")
@click.option("--out", type=Out(), help="Folder on the cluster for the run's files (default: ~/fedfleet/RUN ID there).")
@click.option("--detach", is_flag=True, help="Return once the job is accepted.")
@told
def submit(experiment: str, overrides: tuple[str, ...], address: str, out: Path | None, detach: bool) -> None:
    """Run EXPERIMENT as a job of a cluster, which is sent this package, the file and its plug-ins; follow its log."""
    from .submit import follow, send

    job = send(experiment, overrides, address, str(out) if out else None)
    click.echo(f"job {job}")
    if not detach:
        follow(job, address)


@click.command()
@click.argument("run", default="")
@click.option("--address", help="The cluster's (default: auto); of a job: its dashboard's.")
@click.option("--stop", is_flag=True, help="Ask the run to write a checkpoint and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
@told
def attach(run: str, address: str | None, stop: bool, as_json: bool) -> None:
    """Follow RUN, a detached run's id or folder, or a job's id, to its end; Ctrl-C leaves it going. Without RUN: list
    the detached runs."""
    from .runs import follow_run, going

    if not run:
        click.echo("\n".join(going(address or "auto")) or "no detached run")
        return
    if run.startswith("raysubmit_"):
        from .submit import follow

        follow(run, address or "auto", stop)
        return
    show_result(follow_run(run, address or "auto", stop), as_json)


@click.command()
@click.argument("experiment", required=False)
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--address", help="The Ray to look at; unless given, that of EXPERIMENT, else this machine alone.")
@click.option("--out", type=Out(), help="Folder that all nodes should see (default: runs).")
@told
def doctor(experiment: str | None, overrides: tuple[str, ...], address: str | None, out: Path | None) -> None:
    """Check versions on every node, resources asked and granted, shared storage, authentication, the MLflow store."""
    from .doctor import examine

    examine(experiment, on_cluster(overrides, address), out or Path("runs"))


COMMANDS = (submit, attach, doctor)
