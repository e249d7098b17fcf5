"""`fedfleet bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from ..bench.command import bench, lines_of, summary, text_of
from ..exit_status import report_errors
from ..keyboard import keyboard
from ..output_paths import check_chart
from ..streams import say, tell
from .options import KeyedCommand, Out


@click.command("bench", cls=KeyedCommand)
@click.argument("works", nargs=-1, metavar="[w1|…|w8|engine.a=b …]")
@click.option(
    "--method",
    "methods",
    multiple=True,
    help="Method to time beside fedavg, on the first work (default: scaffold and fedmuon_bc).",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=COMMAND",
    help="Command of another simulator to time; see docs/tutorials/speed.md.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Number of runs of every line."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Number of timed rounds of a run."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of workers of the engine; the plain loop has two processes.",
)
@click.option("--out", type=Out(), help="Also draw the ratios into this file: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as one JSON object on the last line.")
@report_errors
def command(
    works: Sequence[str], methods: Sequence[str], peers: Sequence[str], out: Path | None, as_json: bool, **how: int
) -> None:
    """Compare the speed of the engine on this machine with a plain two-process PyTorch loop. It takes minutes."""
    lines = lines_of(works, methods, peers)
    if out is not None:
        check_chart("--out", out)
    with keyboard():
        bench(lines, how, out, tell, lambda found: say(json.dumps(summary(found)) if as_json else text_of(found)))
