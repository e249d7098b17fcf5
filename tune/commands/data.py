"""`fedfleet data`."""

from __future__ import annotations

import click

from ...engine.errors import FedFleetError
from ..exit_status import report_errors
from ..streams import say
from .options import KeyedCommand, overrides


@click.command("data", cls=KeyedCommand)
@click.argument("action", type=click.Choice(["check"]))
@click.argument("study")
@overrides
@report_errors
def command(action: str, study: str, overrides: tuple[str, ...]) -> None:
    """Check the data sets that STUDY needs: what is missing, damaged or here in part, and all SHA-256.

    The data sets are loaded, so that their rows can be counted. The exit status is 1 if one cannot be used.
    """
    from ..data_check import check  # it imports torch

    text, bad = check(study, overrides)
    say(text)
    if bad:
        raise FedFleetError(f"{bad} of the data sets cannot be used, see above")
