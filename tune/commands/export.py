"""`fedfleet export`."""

from __future__ import annotations

from pathlib import Path

import click

from ...engine.runs.result import Result
from ..exit_status import report_errors
from ..forking import client_numbers
from ..streams import say
from .options import KeyedCommand, Out

FOLDER = "client-models"
"""The folder in that of the run where the files lie, unless `--out` says otherwise."""


@click.command("export", cls=KeyedCommand)
@click.argument("run", metavar="RUN", type=Out())
@click.option(
    *("--client", "--clients", "clients"),
    multiple=True,
    required=True,
    metavar="I,J",
    help="The clients (may be repeated), or all.",
)
@click.option(
    "--out",
    type=Out(),
    help=f"The file of one client, or the folder of the files of several (default: {FOLDER}/ in RUN).",
)
@report_errors
def command(run: Path, clients: tuple[str, ...], out: Path | None) -> None:
    """Write the own models of clients of the complete run in the folder RUN as safetensors files.

    A file has all tensors of the model that the client is served with after the last round. Plug-ins that the run's
    config.yaml names are executed: do not export from a folder that you do not trust.
    """
    numbers = None if clients == ("all",) else client_numbers(clients, "--client")
    states = Result.load(run).client_states()
    chosen = states.clients if numbers is None else numbers
    states.check(chosen)
    folder = out or run / FOLDER
    if out is not None and numbers is not None and len(numbers) == 1:
        files = [out]
    else:
        files = [folder / f"{client:07}.safetensors" for client in chosen]
    for client, file in zip(chosen, files, strict=True):
        states.save(client, file)
    say(str(files[0]) if len(files) == 1 else f"{len(files)} models in {folder}")
