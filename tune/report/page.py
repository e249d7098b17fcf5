"""Writes the files of a report: report.html, which contains everything, and report.md with its charts in charts/."""

from __future__ import annotations

import shutil
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


def write_report(folder: Folder) -> str:
    """Write the report of what has been run so far; returns its tables as text."""
    return write_page(findings(folder), folder.path)


def write_page(found: Findings, path: Path, name: str = "report") -> str:
    """Write NAME.html, NAME.md and the charts into a folder; returns the tables as text."""
    made, drawn = tables(found), groups(found)
    charts = path / ("charts" if name == "report" else f"{name}-charts")
    if charts.is_dir():
        shutil.rmtree(charts)
    charts.mkdir(parents=True)
    for group in drawn:
        for chart in [*([group.legend] if group.legend else []), *group.charts]:
            write(charts / f"{chart.name}.svg", chart.svg)
    write(path / f"{name}.html", html.render(page_of(found, made)))
    write(path / f"{name}.md", markdown.page(found, made, drawn, charts.name))
    return text(found, made)


def text(found: Findings, made: list[Table]) -> str:
    """The title and the tables as text."""
    parts = [found.title, *(f"Reduced: {note}." for note in found.notes)]
    for table in made:
        rows = [tuple(table.heads), *(tuple(cell.text for cell in row) for row in table.rows)]
        parts.append(f"\n{table.title}\n{columns(rows)}")
    return "\n".join(parts)
