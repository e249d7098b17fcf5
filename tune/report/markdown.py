"""A report as Markdown, with the numbers of the HTML page and the charts as files."""

from __future__ import annotations

import re

from .charts import Chart, Group
from .findings import Findings
from .tables import Table, Text


def page(found: Findings, tables: list[Table], groups: list[Group], folder: str) -> str:
    """The page as text. folder: name of the charts' folder, which lies beside the page."""
    parts = [f"# {escaped(found.title)}", head(found)]
    if found.unfinished:
        parts.append(f"**{escaped(found.unfinished)}**")
    if found.notes:
        parts.append("**Changed from the study's file:** " + escaped("; ".join(found.notes)) + ".")
    if found.published.claims:
        claims = "\n".join(f"- {escaped(claim)}" for claim in found.published.claims)
        parts.append(f"What the paper shows:\n\n{claims}")
    parts += [tabled(table) for table in tables]
    parts += [section(group, folder) for group in groups]
    return "\n\n".join(filter(None, parts)) + "\n"


def head(found: Findings) -> str:
    """The line below the title: the paper, sizes and versions."""
    texts = [found.paper, *found.facts]
    return escaped("; ".join(filter(None, texts))) + "." if any(texts) else ""


def section(group: Group, folder: str) -> str:
    charts = [*([group.legend] if group.legend else []), *group.charts]
    return "\n\n".join([f"## {group.title}", group.note, *(image(chart, folder) for chart in charts)])


def image(chart: Chart, folder: str) -> str:
    return f"![{escaped(chart.alt)}]({folder}/{chart.name}.svg)"


def tabled(table: Table) -> str:
    head = f"| {' | '.join(map(escaped, table.heads))} |\n|{' --- |' * len(table.heads)}"
    rows = "\n".join(f"| {' | '.join(map(cell, row))} |" for row in table.rows)
    return f"## {escaped(table.title)}\n\n{escaped(table.note)}\n\n{head}\n{rows}"


def cell(text: Text) -> str:
    return f"**{escaped(text.text)}**" if text.best and text.text else escaped(text.text)


def escaped(text: str) -> str:
    """A user's text without any effect as Markdown or HTML, and without line breaks."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", " ".join(text.split()))
