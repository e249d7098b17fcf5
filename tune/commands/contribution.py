"""`fedfleet contribution`."""

from __future__ import annotations

from pathlib import Path

import click

from ...engine.errors import ConfigError
from ..contribution import Coalitions, contributions, text
from ..exit_status import report_errors
from ..forking import client_numbers
from ..streams import say
from .options import Out


@click.command("contribution")
@click.argument("runs", nargs=-1, required=True, metavar="RUN …", type=Out())
@click.option("--metric", default="eval/accuracy", show_default=True, help="A column of rounds.parquet, at the end.")
@click.option("--client", "--clients", "clients", multiple=True, metavar="I,J", help="Only these (default: all).")
@click.option("--round", "number", default=0, show_default=True, help="The committed round after which forks begin.")
@click.option(
    "--permutations", default=0, show_default=True, help="Also Shapley values, by so many random orders of the clients."
)
@click.option(
    "--tolerance",
    default=0.0,
    show_default=True,
    help="An order ends where the metric is as near to that with all clients (in its own unit, 0.01 is 1 %).",
)
@click.option("--seed", default=0, show_default=True, help="Of the random orders.")
@click.option("--out", type=Out(), help="Folder for the values of one run (default: beside RUN).")
@report_errors
def command(
    runs: tuple[Path, ...],
    metric: str,
    clients: tuple[str, ...],
    number: int,
    permutations: int,
    tolerance: float,
    seed: int,
    out: Path | None,
) -> None:
    """Say what each client contributes to the complete run in the folder RUN.

    A fork without the client, from the same round and with the same draws, ends with another value of the metric; the
    difference is what the client contributes. Intervals need several RUNs, which differ in their seeds, or several
    random orders. Values are kept: an interrupted command goes on where it stopped. Plug-ins that the run's
    config.yaml names are executed: do not use a folder that you do not trust.
    """
    if out is not None and len(runs) > 1:
        raise ConfigError(f"--out is the folder of one run, got {len(runs)} runs; leave it out")
    for name, value in (("round", number), ("permutations", permutations), ("tolerance", tolerance)):
        if not value >= 0:
            raise ConfigError(f"--{name} must be 0 or more, got {value}; raise it")
    games = [Coalitions(run, number, metric, out or beside(run, number)) for run in runs]
    fewest = min(game.clients for game in games)
    players = client_numbers(clients, "--client") or tuple(range(fewest))
    if max(players) >= fewest:
        raise ConfigError(f"--client: the run has clients 0 to {fewest - 1}, got {max(players)}; choose among these")
    say(text(contributions(games, players, permutations, seed, tolerance), games))


def beside(run: Path, number: int) -> Path:
    """The folder of the values of forks of a run after a round, unless another one is given."""
    return run.with_name(f"{run.name}-contribution{f'-{number}' if number else ''}")
