"""The command line. Light to import: torch, Ray and MLflow load only when a run starts."""

from __future__ import annotations

from .keyboard import arm, finish, keyboard

if __name__ == "__main__":
    arm()  # before the other imports, which take a moment

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..engine.errors import ConfigError, FedFleetError
from .cluster.cli import COMMANDS, at, on_cluster
from .leftovers import Out
from .outcome import resumable, show_result, told


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fedfleet")
def main() -> None:
    """FedFleet: federated optimisation at scale, stateful clients, runs that repeat to the bit."""


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Folder for the run's files (default: runs/<run id>).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
@at
@click.option("--detach", is_flag=True, help="Leave the run on the cluster; `fedfleet attach` comes back to it.")
@told
def run(
    experiment: str, overrides: tuple[str, ...], out: Path | None, as_json: bool, address: str | None, detach: bool
) -> None:
    """Run EXPERIMENT, a YAML file or a shipped name (see `fedfleet list experiments`)."""
    from .files import load
    from .leftovers import check_out

    loaded = load(experiment, on_cluster(overrides, address))
    check_out(out or Path("runs"))

    from ..engine.api import run as start
    from ..engine.runs.launch import new_run_id
    from .progress import Progress

    run_id = new_run_id()
    folder = out or Path("runs") / run_id
    if detach:
        from .cluster.runs import leave

        click.echo(leave(loaded, folder, run_id))
        return
    with resumable(folder):
        result = start(loaded, folder, [Progress()], run_id)
    show_result(result, as_json)


@main.command()
@click.argument("run", metavar="DIRECTORY")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Of a URL: folder for the run's files here.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
@at
@told
def resume(run: str, overrides: tuple[str, ...], out: Path | None, as_json: bool, address: str | None) -> None:
    """Go on with the run in DIRECTORY from its last checkpoint, to the same bits as a run without a break.

    DIRECTORY may be a URL, what `checkpoint.folder` was: then the run's folder here is made of what is there. Plug-ins
    that its config.yaml names are executed, also files that lie beside it: resume no folder that you do not trust.
    """
    from .files import load

    directory = Path(run)
    if "://" in run or (not (directory / "config.yaml").is_file() and directory.is_dir() and out is not None):
        from ..engine.runs.restore import bring

        directory = bring(run, out)
    elif out is not None:
        raise ConfigError(f"--out is for a run that is resumed from a URL, {run} is a folder; leave it out")
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"{directory} holds no run; give the folder that `fedfleet run` wrote")
    loaded = load(str(directory / "config.yaml"), on_cluster(overrides, address))

    from ..engine.api import resume as go_on
    from .progress import Progress

    with resumable(directory):
        result = go_on(loaded, directory, [Progress()])
    show_result(result, as_json)


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@told
def show(experiment: str, overrides: tuple[str, ...]) -> None:
    """Print the resolved configuration, the parameters by kind and the bytes that a round will move.

    No round is run, but plug-ins that EXPERIMENT names are executed, also files that lie beside it.
    """
    from .files import load

    loaded = load(experiment, overrides)
    from .show import describe

    click.echo(describe(loaded))


@main.command()
@click.argument("study")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Folder (default: runs/studies/NAME); goes on with it.")
@click.option("--scale", type=float, help="Multiply the rounds by this; the report says so.")
@click.option("--rounds", type=int, help="Rounds of every run, in the place of the study's.")
@click.option("--clients", type=int, help="Clients, in the place of the study's; the cohort in proportion.")
@click.option("--jobs", type=click.IntRange(min=1), help="Cells at once (default: as many as there are processors).")
@click.option("--keep-models", is_flag=True, help="Keep every cell's final model.")
@at
@told
def study(
    study: str,
    overrides: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    keep_models: bool,
    address: str | None,
    **reduced: Any,
):
    """Run STUDY, a YAML file or a shipped name (see `fedfleet list studies`), or go on with it where it stopped."""
    from .study_run.command import run_named

    given = {key: value for key, value in reduced.items() if value is not None}
    if address is not None:
        overrides = (f"experiment.engine.address={address}", *overrides)
    if failed := run_named(study, overrides, given, out, jobs, keep_models):
        raise FedFleetError(f"{failed} of the study's cells failed; the report says why, the same command tries again")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@told
def report(folder: Path) -> None:
    """Write report.html and report.md of the study in FOLDER anew, of what has been run so far."""
    from .report.page import write_report
    from .study.folder import Folder

    click.echo(write_report(Folder(folder)))


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--metric", default="eval/accuracy", show_default=True, help="A column of rounds.parquet.")
@click.option("--lower", is_flag=True, help="Lower values are better.")
@click.option("--target", "targets", multiple=True, type=float, help="For rounds, bytes, seconds to it (repeatable).")
@click.option("--html", type=Out(), help="Also write a page with charts.")
@told
def compare(runs: tuple[Path, ...], metric: str, lower: bool, targets: tuple[float, ...], html: Path | None) -> None:
    """Compare the runs in these folders; runs that differ in the seed alone are one line."""
    from .compare import compare_runs

    click.echo(compare_runs(runs, metric, lower, targets, html))


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Folder (default: runs/searches/<search id>).")
@click.option("--paper-grid", is_flag=True, help="Search the grid that a paper prints for the method.")
@click.option("--paper", default="auto", help="Which paper's, where several print one; implies --paper-grid.")
@click.option("--resume", "go_on", is_flag=True, help="Go on with the search in the folder EXPERIMENT.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object on the last line.")
@at
@told
def search(experiment: str, overrides: tuple[str, ...], as_json: bool, address: str | None, **how: Any) -> None:
    """Search the ranges in EXPERIMENT, a YAML file or a shipped name: Optuna proposes, Ray Tune runs.

    A range stands for a value: method.rule.lr='{search: loguniform, low: 1e-3, high: 1}'.
    """
    from .search.command import run_search, told_of

    found = run_search(experiment, on_cluster(overrides, address, "engine.address"), **how)
    click.echo(json.dumps(found.summary()) if as_json else told_of(found))


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), default="partition.png", help="The chart: .png, .svg or .pdf.")
@told
def partition(experiment: str, overrides: tuple[str, ...], out: Path) -> None:
    """Draw who has how much of what in EXPERIMENT, and print how unlike its clients are."""
    from .files import load
    from .partition import describe

    click.echo(describe(load(experiment, overrides), out))


@main.command()
@click.argument("works", nargs=-1, metavar="[w1|w2|w3|engine.a=b …]")
@click.option("--method", "methods", multiple=True, help="Beside fedavg, on the first work (default: scaffold, …).")
@click.option("--peer", "peers", multiple=True, metavar="NAME=COMMAND", help="Another simulator's, see the README.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of every line.")
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, help="Rounds timed in a run.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="The plain loop has two.")
@click.option("--out", type=Out(), help="Also draw the ratios: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print all pairs as one JSON object on the last line.")
@told
def bench(
    works: Sequence[str], methods: Sequence[str], peers: Sequence[str], out: Path | None, as_json: bool, **how: int
) -> None:
    """Time the engine on this machine beside a plain two-process PyTorch loop, in turn: minutes."""
    from .bench.command import bench as start
    from .bench.command import lines_of, summary, told_of

    with keyboard():
        found = start(lines_of(works, methods, peers), how, out, functools.partial(click.echo, err=True))
    click.echo(json.dumps(summary(found)) if as_json else told_of(found))


KINDS = {
    "methods": "METHODS",
    "workloads": "WORKLOADS",
    "models": "MODELS",
    "partitions": "PARTITIONS",
    "rules": "RULES",
    "balls": "BALLS",
    "compressions": "COMPRESSIONS",
    "experiments": "",
    "studies": "",
}


@main.command(name="list")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--plugin", "plugins", multiple=True, help="Also load this file or module (may be repeated).")
@told
def list_(kind: str, plugins: tuple[str, ...]) -> None:
    """List what can be chosen by name."""
    from .listing import listing

    click.echo(listing(kind, KINDS[kind], plugins))


for command in COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    finish(main)
