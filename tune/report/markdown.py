"""A report as Markdown, with the numbers of the page, and its charts as files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ..page import svg
from ..page.content import Axis, Curve, PageSection
from .charts import CLOCK
from .findings import Findings
from .tables import PageTable, TableCell

SHOWN = ("curves", "clock", "levels", "bytes", "sensitivity")
"""The sections of charts, by the beginning of the names of their files. The page has more: a map that repeats the table
of results, the paper's numbers, which have a table too, and seconds, which differ from one run of a study to the
next."""
PANELS = 12
"""Largest number of charts of a section; the tables contain all levels."""
OVER_CLOCK = (
    "The same against the virtual clock, averaged over seeds. On the logarithmic scale equal distances are factors."
)


class Drawing(NamedTuple):
    """A chart as a file. `name`: of the file, without suffix; `alt`: text for readers who cannot see it."""

    name: str
    alt: str
    svg: str


def page(
    found: Findings, tables: list[PageTable], charts: Mapping[str, PageSection], folder: str
) -> tuple[str, list[Drawing]]:
    """(the page as text, its charts). folder: name of the charts' folder, which lies beside the page."""
    parts = [f"# {escaped(found.title)}", head(found)]
    if found.unfinished:
        parts.append(f"**{escaped(found.unfinished)}**")
    if found.notes:
        parts.append("**Changed from the study's file:** " + escaped("; ".join(found.notes)) + ".")
    if found.published.claims:
        claims = "\n".join(f"- {escaped(claim)}" for claim in found.published.claims)
        parts.append(f"What the paper shows:\n\n{claims}")
    parts += [tabled(table) for table in tables]
    every: list[Drawing] = []
    for name, section in over_clock(charts).items():
        drawn = drawings(name, section)
        more = len(section.maps) + len(section.charts) - PANELS
        note = f"{section.note} The first {PANELS} of {PANELS + more} charts are shown." if more > 0 else section.note
        images = [f"![{escaped(each.alt)}]({folder}/{each.name}.svg)" for each in drawn]
        parts.append("\n\n".join([f"## {section.title}", note, *images]))
        every += drawn
    return "\n\n".join(filter(None, parts)) + "\n", every


def over_clock(charts: Mapping[str, PageSection]) -> dict[str, PageSection]:
    """The sections that are shown. The curves of runs on a virtual clock are drawn over it too, since a reader of
    Markdown cannot choose the axis."""
    timed = []
    for figure in charts["curves"].charts if "curves" in charts else ():
        series = [
            replace(one, x={CLOCK: one.x[CLOCK]}) for one in figure.series if isinstance(one, Curve) and CLOCK in one.x
        ]
        if series:
            timed.append(figure._replace(x=Axis(CLOCK, log=True), series=series))
    clock = (
        {"clock": PageSection("Learning curves over virtual time", OVER_CLOCK, charts=tuple(timed))} if timed else {}
    )
    return {name: section for name in SHOWN if (section := {**charts, **clock}.get(name))}


def drawings(name: str, section: PageSection) -> list[Drawing]:
    """The legend and the charts of a section."""
    made = []
    if section.legend:
        key = f"key-{name}"
        made.append(Drawing(key, f"Legend: {', '.join(section.legend)}", svg.legend(section, key)))
    for number, what in enumerate((*section.maps, *section.charts)[:PANELS], 1):
        made.append(Drawing(f"{name}-{number}", what.alt, svg.chart(what, f"{name}-{number}")))
    return made


def head(found: Findings) -> str:
    """The line below the title: the paper, sizes and versions."""
    texts = [found.paper, *found.facts]
    return escaped("; ".join(filter(None, texts))) + "." if any(texts) else ""


def tabled(table: PageTable) -> str:
    head = f"| {' | '.join(map(escaped, table.heads))} |\n|{' --- |' * len(table.heads)}"
    rows = "\n".join(f"| {' | '.join(map(cell, row))} |" for row in table.rows)
    return f"## {escaped(table.title)}\n\n{escaped(table.note)}\n\n{head}\n{rows}"


def cell(text: TableCell) -> str:
    return f"**{escaped(text.text)}**" if text.best and text.text else escaped(text.text)


def escaped(text: str) -> str:
    """A user's text without any effect as Markdown or HTML, and without line breaks."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", " ".join(text.split()))
