"""`fedfleet compare`."""

from __future__ import annotations

from pathlib import Path

import click

from ...engine.errors import ConfigError
from ...engine.records.metrics import default_column
from ..comparison.data_frame import labelled
from ..comparison.findings import compare_runs
from ..comparison.paired import compare_paired, text
from ..exit_status import report_errors
from ..streams import say
from .options import KeyedCommand, Out


@click.command("compare", cls=KeyedCommand)
@click.argument("runs", nargs=-1, required=True, type=Out())
@click.option(
    "--metric",
    help="A column of rounds.parquet (default: eval/accuracy, or of runs whose clients alone have models "
    "eval/own/test_accuracy, or else the first column of the evaluations that all runs have).",
)
@click.option("--lower", is_flag=True, help="Lower values of the metric are better.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=float,
    help="Value of the metric; the report says how many rounds, bytes and seconds it took, virtual seconds too "
    "(repeatable; default for runs on a virtual clock: a value that all of them reached).",
)
@click.option(
    "--columns",
    multiple=True,
    metavar="NAME[,NAME …]",
    help="Further columns of the table of results: columns of rounds.parquet, such as eval/loss, of which it has the "
    "last values, or keys of the configuration, such as method.rule.lr (repeatable).",
)
@click.option("--html", type=Out(), help="Also write an HTML page with charts to this file.")
@click.option(
    "--paired",
    is_flag=True,
    help="Differences from the first run's settings, seed by seed, on common random numbers, with 95 % intervals.",
)
@report_errors
def command(
    runs: tuple[Path, ...],
    metric: str | None,
    lower: bool,
    targets: tuple[float, ...],
    columns: tuple[str, ...],
    html: Path | None,
    paired: bool,
) -> None:
    """Compare the runs in these folders. Runs that differ only in the seed are shown as one line."""
    if not paired:
        names = [name.strip() for some in columns for name in some.split(",") if name.strip()]
        say(compare_runs(runs, metric, lower, targets, html, names))
        return
    if targets or columns or html is not None:
        told = "got --target, --columns or --html; leave them out"
        raise ConfigError(f"--paired has no targets, no chosen columns and no page, {told}")
    of_runs = labelled(runs)
    say(text(compare_paired(of_runs, metric or default_column(*(result.rows.columns for _, result in of_runs)))))
