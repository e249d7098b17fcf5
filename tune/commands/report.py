"""`fedfleet report`."""

from __future__ import annotations

from pathlib import Path

import click

from ...engine.errors import ConfigError
from ..exit_status import report_errors
from ..output_paths import check_page
from ..report.files import write_report
from ..run_report import write_run_report
from ..search.run import report_again
from ..streams import say
from ..study.folder import StudyFolder
from ..study.kept_results import check_restored, restore
from .options import KeyedCommand, Out


@click.command("report", cls=KeyedCommand)
@click.argument("folder", type=Out())
@click.option("--out", type=Out(), help="The page to write, a .html file (default: report.html in FOLDER).")
@report_errors
def command(folder: Path, out: Path | None) -> None:
    """Write the report of the run, study or search in FOLDER, from what has been run so far.

    The page is interactive and needs no network. For a study, a .md file with the same numbers is written beside it.
    """
    page = check_page("--out", out) if out is not None else folder / "report.html"
    if (folder / "study.yaml").is_file():
        restore(folder)
        study = StudyFolder(folder).study
        check_restored(folder, study.columns, study.columns_of_trials)
        say(str(write_report(StudyFolder(folder), page)))
    elif (folder / "search.yaml").is_file():
        say(str(report_again(folder, page)))
    elif (folder / "config.yaml").is_file():
        say(str(write_run_report(folder, page)))
    else:
        raise ConfigError(
            f"{folder} holds no study, search or run; give a folder that `fedfleet study`, `search` or `run` wrote"
        )
