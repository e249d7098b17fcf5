"""`fedfleet search`."""

from __future__ import annotations

import json
from typing import Any

import click

from ..executor.fork_server import begin
from ..exit_status import report_errors
from ..search.as_python import as_python
from ..streams import say
from .options import KeyedCommand, Out, at, on_cluster, overrides, quiet


@click.command("search", cls=KeyedCommand)
@click.argument("experiment")
@overrides
@click.option("--out", type=Out(), help="Folder of the search (default: runs/searches/<search id>).")
@click.option("--paper-grid", is_flag=True, help="Search the grid that a paper gives for the method.")
@click.option("--paper", default="auto", help="Name of the paper, if several give a grid; implies --paper-grid.")
@click.option("--resume", "go_on", is_flag=True, help="Continue the search in the folder EXPERIMENT.")
@click.option("--python", "as_code", is_flag=True, help="Print the same search as a Python program; run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object on the last line.")
@at
@quiet
@report_errors
def command(
    experiment: str, overrides: tuple[str, ...], as_json: bool, as_code: bool, address: str | None, **how: Any
) -> None:
    """Search the ranges in EXPERIMENT, a YAML file or a shipped name. Optuna proposes values for the trials.

    A range takes the place of a value: method.rule.lr='{search: loguniform, low: 1e-3, high: 1}'.
    """
    if as_code:
        say(as_python(experiment, overrides, resume=how.pop("go_on"), address=address, **how))
        return
    if address is None:
        begin()  # it imports beside this process

    from ..search.search_command import run_search, text_of

    found = run_search(experiment, on_cluster(overrides, address, "engine.address"), **how)
    say(json.dumps(found.summary()) if as_json else text_of(found))
