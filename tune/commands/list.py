"""`fedfleet list`."""

from __future__ import annotations

import click

from ..exit_status import report_errors
from ..listing import KINDS, listing
from ..streams import say
from .options import KeyedCommand


@click.command("list", cls=KeyedCommand)
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--plugin", "plugins", multiple=True, help="Also load this file or module (may be repeated).")
@report_errors
def command(kind: str, plugins: tuple[str, ...]) -> None:
    """List what can be chosen by name."""
    say(listing(kind, plugins))
