"""Writes the files of a report: report.html, which contains everything, and report.md with its charts in charts/."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from ...engine.storage.atomic_write import write
from ..listing import columns
from ..page import html
from ..page.content import Table
from ..study.folder import Folder
from . import markdown
from .charts import groups
from .findings import Findings, findings
from .interactive import page_of
from .tables import tables

CHARTS = ("bytes-", "clock-", "curves-", "key-", "levels-", "sensitivity-")
"""What the names of charts begin with. Other files in their folder are the user's."""
SENTENCE_END = re.compile(r"(?<!et al)[.] (?=[A-Z])")


def import_packages() -> None:
    """Import the packages of the tables and charts, which takes two seconds, before a report is to be written."""
    for name in ("matplotlib.backends.backend_svg", "scipy.stats"):
        import_module(name)


def write_report(folder: Folder, page: Path | None = None) -> str:
    """Write the report of what has been run so far; returns its tables as text. page: by default report.html in the
    study's folder."""
    return write_page(findings(folder), page or folder.path / "report.html")


def write_page(found: Findings, page: Path) -> str:
    """Write the page NAME.html, and NAME.md with its charts beside it; returns the tables as text."""
    made, drawn, path, name = tables(found), groups(found), page.parent, page.stem
    charts = path / ("charts" if name == "report" else f"{name}-charts")
    charts.mkdir(parents=True, exist_ok=True)
    for old in charts.glob("*.svg"):
        if old.stem.startswith(CHARTS):
            old.unlink(missing_ok=True)
    for group in drawn:
        for chart in [*([group.legend] if group.legend else []), *group.charts]:
            write(charts / f"{chart.name}.svg", chart.svg)
    write(page, html.render(page_of(found, made)))
    write(path / f"{name}.md", markdown.page(found, made, drawn, charts.name))
    return text(found, made)


def text(found: Findings, made: list[Table]) -> str:
    """The title and the tables as text, each with the first sentence of its note, which says what the numbers are."""
    told = [found.unfinished] if found.unfinished else []
    parts = [found.title, *told, *(f"Changed from the study's file: {note}." for note in found.notes)]
    for table in made:
        rows = [tuple(table.heads), *(tuple(cell.text for cell in row) for row in table.rows)]
        note = f": {SENTENCE_END.split(table.note)[0].removesuffix('.')}" if table.note else ""
        parts.append(f"\n{table.title}{note}\n{columns(rows)}")
    return "\n".join(parts)
