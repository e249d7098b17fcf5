"""Writes the files of a report: report.html, which contains everything, and report.md with its charts in charts/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from ...engine.storage.atomic_write import write
from ..listing import columns
from ..page import html
from ..page.content import Page, PageSection
from ..study.folder import StudyFolder
from . import markdown
from .charts import charts
from .findings import Findings, findings
from .tables import tables

SENTENCE_END = re.compile(r"(?<!et al)[.] (?=[A-Z])")


def import_packages() -> None:
    """Import the packages of the tables and charts, which takes two seconds, before a report is to be written."""
    for name in ("matplotlib.backends.backend_svg", "scipy.stats"):
        import_module(name)


def write_report(folder: StudyFolder, page: Path | None = None) -> str:
    """Write the report of what has been run so far; returns its tables as text. page: by default report.html in the
    study's folder."""
    return write_page(findings(folder), page or folder.path / "report.html")


def write_page(found: Findings, page: Path) -> str:
    """Write the page NAME.html, and NAME.md with its charts beside it; returns the tables as text."""
    made, drawn, name = tables(found), charts(found), page.stem
    folder = page.parent / ("charts" if name == "report" else f"{name}-charts")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):  # other files in the folder are the user's
        if old.stem.startswith(tuple(f"{begin}-" for begin in ("key", *markdown.SHOWN))):
            old.unlink(missing_ok=True)
    markdown_text, images = markdown.text_of(found, made, drawn, folder.name)
    for file, image in images.items():
        write(folder / f"{file}.svg", image)
    write(page, html.render(page_of(found, made, drawn)))
    write(page.parent / f"{name}.md", markdown_text)
    return text(found, made)


def page_of(found: Findings, tables: list[PageSection], charts: Mapping[str, PageSection]) -> Page:
    """The page. tables: those of the report, the results first."""
    head = [text for text in (found.unfinished, found.paper, *found.facts) if text]
    sections = [*tables[:1], *charts.values(), *tables[1:]]
    return Page(found.title, head, sections, found.notes, found.published.claims)


def text(found: Findings, made: list[PageSection]) -> str:
    """The title and the tables as text, each with the first sentence of its note, which says what the numbers are."""
    told = [found.unfinished] if found.unfinished else []
    parts = [found.title, *told, *(f"Changed from the study's file: {note}." for note in found.notes)]
    for table in made:
        rows = [tuple(table.heads), *(tuple(cell.text for cell in row) for row in table.rows)]
        note = f": {SENTENCE_END.split(table.note)[0].removesuffix('.')}" if table.note else ""
        parts.append(f"\n{table.title}{note}\n{columns(rows)}")
    return "\n".join(parts)
