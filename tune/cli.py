"""The command line. The module is quick to import: torch, Ray and MLflow are loaded only when a run starts."""

from __future__ import annotations

from .keyboard import arm, finish, keyboard

if __name__ == "__main__":
    arm()  # before the other imports, which take some time

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..engine.errors import ConfigError, FedFleetError
from ..engine.storage.expanded import expanded_address
from .cluster.cli import COMMANDS, at, json_result, on_cluster, quiet
from .keys_as_options import Command
from .leftovers import Out
from .outcome import report_errors, resumable, show_result
from .streams import say, tell

if TYPE_CHECKING:
    from ..engine.config.schema import Engine


class Commands(click.Group):
    command_class = Command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fedfleet")
def main() -> None:
    """FedFleet: federated optimisation at scale, with stateful clients and runs that can be repeated bit for bit."""


def import_beside(engine: Engine) -> None:
    """Have the process started from which Ray's processes will be forked, so that it imports while this one does, if
    the run of a command will start Ray here."""
    if engine.backend == "ray" and not engine.address:
        from ..engine.backends.ray.process_start.fork_server import begin

        begin()


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Folder for the run's files (default: runs/<run id>).")
@json_result
@at
@click.option(
    "--detach", is_flag=True, help="Start the run on the cluster and return; `fedfleet attach` follows it later."
)
@quiet
@report_errors
def run(
    experiment: str,
    overrides: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    address: str | None,
    detach: bool,
    quiet: bool,
) -> None:
    """Run EXPERIMENT, a YAML file or a shipped name (see `fedfleet list experiments`)."""
    from .files import load
    from .leftovers import check_out

    loaded = load(experiment, on_cluster(overrides, address))
    check_out(out or Path("runs"))
    import_beside(loaded.engine)

    from ..engine.api import run as start
    from ..engine.runs.launch import new_run_id
    from .progress import shown

    run_id = new_run_id()
    folder = out or Path("runs") / run_id
    if detach:
        from .cluster.runs import leave

        say(leave(loaded, folder, run_id))
        return
    with resumable(folder):
        result = start(loaded, folder, shown(quiet), run_id)
    show_result(result, as_json)


@main.command()
@click.argument("run", metavar="DIRECTORY")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Local folder for the run's files; only if DIRECTORY is a URL.")
@json_result
@at
@quiet
@report_errors
def resume(
    run: str, overrides: tuple[str, ...], out: Path | None, as_json: bool, address: str | None, quiet: bool
) -> None:
    """Continue the run in DIRECTORY from its last checkpoint. The result has the same bits as an uninterrupted run.

    DIRECTORY may be a URL, the value of `checkpoint.folder`: the run's files are then copied from there into a local
    folder first. Plug-ins that its config.yaml names are executed, including files that lie beside it: do not resume
    a folder that you do not trust.
    """
    from .files import load

    run = expanded_address(run)
    directory = Path(run)
    if "://" in run or (not (directory / "config.yaml").is_file() and directory.is_dir() and out is not None):
        from ..engine.runs.restore import bring

        directory = bring(run, out)
    elif out is not None:
        raise ConfigError(f"--out is only for a run that is resumed from a URL, and {run} is a folder; leave --out out")
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"{directory} holds no run; give the folder that `fedfleet run` wrote")
    loaded = load(str(directory / "config.yaml"), on_cluster(overrides, address))
    import_beside(loaded.engine)

    from ..engine.api import resume as go_on
    from .progress import shown

    with resumable(directory):
        result = go_on(loaded, directory, shown(quiet))
    show_result(result, as_json)


@main.command()
@click.argument("run", metavar="DIRECTORY", type=Out())
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--round", "number", type=int, required=True, help="The committed round to go on from; 0: the beginning.")
@click.option(
    "--without-client",
    "without",
    multiple=True,
    metavar="I,J",
    help="Clients that are drawn but not used from there on (may be repeated); the key federation.without.",
)
@click.option("--out", type=Out(), help="Folder for the fork's files (default: runs/<run id>).")
@json_result
@at
@quiet
@report_errors
def fork(
    run: Path,
    overrides: tuple[str, ...],
    number: int,
    without: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    address: str | None,
    quiet: bool,
) -> None:
    """Go on from a committed round of the run in DIRECTORY with other settings, as a run of its own.

    All draws stay as they are, and without any change the fork has the bits of its parent. The states of clients are
    shared, not copied. Plug-ins that the run's config.yaml names are executed: do not fork a folder that you do not
    trust.
    """
    from .forking import client_numbers, prepared

    clients = client_numbers(without)
    run_spec, folder = prepared(run, number, on_cluster(overrides, address), out, clients)

    from ..engine.runs.launch import execute
    from .progress import shown

    with resumable(folder.path):
        result = execute(run_spec, folder, shown(quiet))
    show_result(result, as_json)


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--all", "everything", is_flag=True, help="Also print the keys that have their defaults.")
@report_errors
def show(experiment: str, overrides: tuple[str, ...], everything: bool) -> None:
    """Print the configuration, the parameters by kind, and the bytes that one round sends.

    Of the configuration, it prints the keys that the file and the command line set, and all others only with --all.
    No round is run, but plug-ins that EXPERIMENT names are executed, including files that lie beside it.
    """
    from .files import load

    loaded = load(experiment, overrides)
    from .show import describe, described_lineage

    say("\n".join([*described_lineage(Path(experiment)), describe(loaded, everything)]))


@main.command()
@click.argument("study")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option(
    "--out",
    type=Out(),
    help="Folder of the study (default: runs/studies/NAME); a study that is already there is continued.",
)
@click.option("--scale", type=float, help="Multiply the number of rounds by this factor; the report says so.")
@click.option("--rounds", type=int, help="Rounds of every run, instead of the study's.")
@click.option("--clients", type=int, help="Clients, instead of the study's; the cohort shrinks in proportion.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Cells that run at the same time (default: the number of processors, or as many as fit a cluster).",
)
@click.option("--keep-models", is_flag=True, help="Keep every cell's final model.")
@at
@quiet
@report_errors
def study(
    study: str,
    overrides: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    keep_models: bool,
    address: str | None,
    quiet: bool,
    **reduced: Any,
):
    """Run STUDY, a YAML file or a shipped name (see `fedfleet list studies`), or continue it where it stopped."""
    if address is None:
        from .executor.fork_server import begin

        begin()  # it imports beside this process

    from .study_run.command import run_named

    given = {key: value for key, value in reduced.items() if value is not None}
    if address is not None:
        overrides = (f"experiment.engine.address={address}", *overrides)
    if failed := run_named(study, overrides, given, out, jobs, keep_models, quiet):
        raise FedFleetError(
            f"{failed} cells or trials of the study failed; the report says why, and the same command tries them again"
        )


@main.command()
@click.argument("folder", type=Out())
@click.option("--out", type=Out(), help="The page to write, a .html file (default: report.html in FOLDER).")
@report_errors
def report(folder: Path, out: Path | None) -> None:
    """Write the report of the run, study or search in FOLDER, from what has been run so far.

    The page is interactive and needs no network. For a study, a .md file with the same numbers is written beside it.
    """
    from .leftovers import check_page

    page = check_page("--out", out) if out is not None else folder / "report.html"
    if (folder / "study.yaml").is_file():
        from .report.page import write_report
        from .study.folder import Folder
        from .study.kept_results import check_restored, restore

        restore(folder)
        study = Folder(folder).study
        check_restored(folder, (study.report.metric, study.deciding))
        say(str(write_report(Folder(folder), page)))
        return
    if (folder / "search.yaml").is_file():
        from .search.run import report_again as write_page
    elif (folder / "config.yaml").is_file():
        from .run_report import write_run_report as write_page
    else:
        raise ConfigError(
            f"{folder} holds no study, search or run; give a folder that `fedfleet study`, `search` or `run` wrote"
        )
    say(str(write_page(folder, page)))


@main.command()
@click.argument("runs", nargs=-1, required=True, type=Out())
@click.option("--metric", default="eval/accuracy", show_default=True, help="A column of rounds.parquet.")
@click.option("--lower", is_flag=True, help="Lower values of the metric are better.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=float,
    help="Value of the metric; the report says how many rounds, bytes and seconds it took, virtual seconds too "
    "(repeatable; default for runs on a virtual clock: a value that all of them reached).",
)
@click.option("--html", type=Out(), help="Also write an HTML page with charts to this file.")
@click.option(
    "--paired",
    is_flag=True,
    help="Differences from the first run's settings, seed by seed, on common random numbers, with 95 % intervals.",
)
@report_errors
def compare(
    runs: tuple[Path, ...], metric: str, lower: bool, targets: tuple[float, ...], html: Path | None, paired: bool
) -> None:
    """Compare the runs in these folders. Runs that differ only in the seed are shown as one line."""
    if paired:
        if targets or html is not None:
            raise ConfigError("--paired has no targets and no page, got --target or --html; leave them out")
        from .comparison import labelled
        from .paired import compare_paired, text

        say(text(compare_paired(labelled(runs), metric)))
        return
    from .compare import compare_runs

    say(compare_runs(runs, metric, lower, targets, html))


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), help="Folder of the search (default: runs/searches/<search id>).")
@click.option("--paper-grid", is_flag=True, help="Search the grid that a paper gives for the method.")
@click.option("--paper", default="auto", help="Name of the paper, if several give a grid; implies --paper-grid.")
@click.option("--resume", "go_on", is_flag=True, help="Continue the search in the folder EXPERIMENT.")
@click.option("--python", "as_code", is_flag=True, help="Print the same search as a Python program; run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object on the last line.")
@at
@quiet
@report_errors
def search(
    experiment: str, overrides: tuple[str, ...], as_json: bool, as_code: bool, address: str | None, **how: Any
) -> None:
    """Search the ranges in EXPERIMENT, a YAML file or a shipped name. Optuna proposes values for the trials.

    A range takes the place of a value: method.rule.lr='{search: loguniform, low: 1e-3, high: 1}'.
    """
    if as_code:
        from .search.api import as_python

        say(as_python(experiment, overrides, resume=how.pop("go_on"), address=address, **how))
        return
    if address is None:
        from .executor.fork_server import begin

        begin()  # it imports beside this process

    from .search.command import run_search, text_of

    found = run_search(experiment, on_cluster(overrides, address, "engine.address"), **how)
    say(json.dumps(found.summary()) if as_json else text_of(found))


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--out", type=Out(), default="partition.png", help="File for the chart: .png, .svg or .pdf.")
@report_errors
def partition(experiment: str, overrides: tuple[str, ...], out: Path) -> None:
    """Draw how the data of EXPERIMENT are distributed over its clients, and print measures of their heterogeneity."""
    from .files import load
    from .partition import describe

    say(describe(load(experiment, overrides), out))


@main.command()
@click.argument("experiment")
@click.argument("overrides", nargs=-1, metavar="[a.b=c …]")
@click.option("--devices", type=Out(), help="Parquet file to write, with the device of every client.")
@click.option("--sessions", type=Out(), help="Parquet file to write, with the sessions in which clients are online.")
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), default=7.0, show_default=True, help="Days of sessions."
)
@report_errors
def fleet(
    experiment: str, overrides: tuple[str, ...], devices: Path | None, sessions: Path | None, days: float
) -> None:
    """Print percentiles of the devices that the section `systems` of EXPERIMENT describes, and write them to files."""
    from .files import load
    from .fleet import describe

    say(describe(load(experiment, overrides), devices, sessions, days))


@main.command()
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
def bench(
    works: Sequence[str], methods: Sequence[str], peers: Sequence[str], out: Path | None, as_json: bool, **how: int
) -> None:
    """Compare the speed of the engine on this machine with a plain two-process PyTorch loop. It takes minutes."""
    from .bench.command import bench as start
    from .bench.command import lines_of, summary, text_of
    from .leftovers import check_chart

    lines = lines_of(works, methods, peers)
    if out is not None:
        check_chart("--out", out)
    with keyboard():
        start(lines, how, out, tell, lambda found: say(json.dumps(summary(found)) if as_json else text_of(found)))


KINDS = {
    "methods": "METHODS",
    "workloads": "WORKLOADS",
    "models": "MODELS",
    "partitions": "PARTITIONS",
    "rules": "RULES",
    "balls": "BALLS",
    "compressions": "COMPRESSIONS",
    "aggregators": "AGGREGATORS",
    "preaggregators": "PREAGGREGATORS",
    "samplers": "SAMPLERS",
    "devices": "DEVICES",
    "distributions": "DISTRIBUTIONS",
    "availabilities": "AVAILABILITIES",
    "work": "LOCAL_WORK",
    "attacks": "ATTACKS",
    "mechanisms": "MECHANISMS",
    "experiments": "",
    "studies": "",
}


@main.command(name="list")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--plugin", "plugins", multiple=True, help="Also load this file or module (may be repeated).")
@report_errors
def list_(kind: str, plugins: tuple[str, ...]) -> None:
    """List what can be chosen by name."""
    from .listing import listing

    say(listing(kind, KINDS[kind], plugins))


for command in COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    finish(main)
