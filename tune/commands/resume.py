"""`fedfleet resume`."""

from __future__ import annotations

from pathlib import Path

import click

from ...engine.errors import ConfigError
from ...engine.runs.saved_files import require_kind
from ...engine.storage.expanded import expanded_address
from ..exit_status import report_errors
from ..files import load
from ..streams import passing
from ..tracking.mlflow_process import beside
from .options import KeyedCommand, Out, at, json_result, on_cluster, overrides, quiet


@click.command("resume", cls=KeyedCommand)
@click.argument("run", metavar="DIRECTORY")
@overrides
@click.option("--out", type=Out(), help="Local folder for the run's files; only if DIRECTORY is a URL.")
@json_result
@at
@quiet
@report_errors
def command(
    run: str, overrides: tuple[str, ...], out: Path | None, as_json: bool, address: str | None, quiet: bool
) -> None:
    """Continue the run in DIRECTORY from its last checkpoint. The result has the same bits as an uninterrupted run.

    A run that is complete is made longer with federation.rounds=N.

    DIRECTORY may be a URL, the value of `checkpoint.folder`: the run's files are then copied from there into a local
    folder first. Plug-ins that its config.yaml names are executed, including files that lie beside it: do not resume
    a folder that you do not trust.
    """
    run = expanded_address(run)
    directory = Path(run)
    if "://" in run or (not (directory / "config.yaml").is_file() and directory.is_dir() and out is not None):
        from ...engine.runs.restore import bring

        directory = bring(run, out)
    elif out is not None:
        raise ConfigError(f"--out is only for a run that is resumed from a URL, and {run} is a folder; leave --out out")
    require_kind(directory, "run")
    loaded = load(str(directory / "config.yaml"), on_cluster(overrides, address))

    asked = any(override.startswith("federation.rounds=") for override in overrides)
    with beside(loaded.tracking):
        with passing(f"resuming {loaded.title}", quiet):
            from ..one_run import resume_run, show_result  # it imports torch

        show_result(resume_run(loaded, directory, quiet, loaded.federation.rounds if asked else None), as_json)
