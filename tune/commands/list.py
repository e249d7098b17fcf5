"""`fedfleet list`."""

from __future__ import annotations

import click

from ..exit_status import report_errors
from ..listing import KINDS, details, listing
from ..streams import say
from .options import KeyedCommand


@click.command("list", cls=KeyedCommand)
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("names", nargs=-1, metavar="[NAME …]")
@click.option("--plugin", "plugins", multiple=True, help="Also load this file or module (may be repeated).")
@report_errors
def command(kind: str, names: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """List what can be chosen by name. With NAME, list its arguments with their types, defaults and meanings."""
    say("\n\n".join(details(kind, name, plugins) for name in names) or listing(kind, plugins))
