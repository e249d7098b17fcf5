"""`fedfleet search`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ..executor.fork_server import begin
from ..exit_status import report_errors
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

    from ..search.api import run_search, text_of  # it imports torch

    found = run_search(experiment, on_cluster(overrides, address, "engine.address"), **how)
    say(json.dumps(found.summary()) if as_json else text_of(found))


def as_python(experiment: str, overrides: Iterable[str], **arguments: Any) -> str:
    """A program with the call of `search` that does what a command line does. arguments: its further arguments."""
    changes = "".join(f"\n        {quoted(text)}," for text in overrides)
    given = {name: value for name, value in arguments.items() if value not in (None, False, "auto")}
    further = "".join(f"\n    {name}={quoted(value)}," for name, value in given.items())
    listing = f"[{changes}\n    ]" if changes else "[]"
    call = f"fedfleet.search(\n    {quoted(experiment)},\n    {listing},{further}\n)"
    return (
        f"import fedfleet\n\nfound = {call}\nprint(found.values, found.best)\n"
        "print(found.to_pandas())  # one row for each trial\n"
        "# found.study: the study of Optuna; found.records(0): the rounds of a trial"
    )


def quoted(value: Any) -> str:
    """A value as Python code, texts in double quotes."""
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else repr(value)
