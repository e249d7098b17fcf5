"""A report as Markdown, with the numbers of the page, and its charts as files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..page import svg
from ..page.content import Axis, Curve, PageSection, TableCell
from .charts import CLOCK
from .findings import Findings

SHOWN = ("curves", "also", "clock", "clients", "levels", "bytes", "sensitivity")
"""The sections of charts, by the beginning of the names of their files. The page has more: a map that repeats the table
of results, the paper's numbers, which have a table too, and seconds, which differ from one run of a study to the
next."""
PANELS = 12
"""Largest number of charts of a section; the tables contain all levels."""
OVER_CLOCK = (
    "The same against the virtual clock, averaged over seeds. On the logarithmic scale equal distances are factors."
)


def text_of(
    found: Findings, tables: list[PageSection], charts: Mapping[str, PageSection], folder: str
) -> tuple[str, dict[str, str]]:
    """(the page as text, its charts as SVG by the names of their files). folder: name of the charts' folder, which lies
    beside the page."""
    facts = "; ".join(filter(None, [found.paper, *found.facts]))
    parts = [f"# {escaped(found.title)}", f"{escaped(facts)}." if facts else ""]
    if found.unfinished:
        parts.append(f"**{escaped(found.unfinished)}**")
    if found.notes:
        parts.append("**Changed from the study's file:** " + escaped("; ".join(found.notes)) + ".")
    if found.published.claims:
        claims = "\n".join(f"- {escaped(claim)}" for claim in found.published.claims)
        parts.append(f"What the paper shows:\n\n{claims}")
    parts += [tabled(table) for table in tables]
    files: dict[str, str] = {}
    for name, section in over_clock(charts).items():
        drawn = drawings(name, section)
        more = len(section.maps) + len(section.charts) - PANELS
        note = f"{section.note} The first {PANELS} of {PANELS + more} charts are shown." if more > 0 else section.note
        images = [f"![{escaped(alt)}]({folder}/{file}.svg)" for file, alt, _ in drawn]
        parts.append("\n\n".join([f"## {section.title}", note, *images]))
        files.update((file, image) for file, _, image in drawn)
    return "\n\n".join(filter(None, parts)) + "\n", files


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
    clock = PageSection("Learning curves over virtual time", OVER_CLOCK, charts=timed)
    shown = {**charts, "clock": clock}
    return {name: shown[name] for name in SHOWN if name in shown and shown[name].has_content}


def drawings(name: str, section: PageSection) -> list[tuple[str, str, str]]:
    """(name of the file without its suffix, text for readers who cannot see it, SVG) of the legend and the charts of a
    section."""
    made = []
    if section.legend:
        key = f"key-{name}"
        made.append((key, f"Legend: {', '.join(section.legend)}", svg.legend(section, key)))
    for number, what in enumerate((*section.maps, *section.charts)[:PANELS], 1):
        made.append((f"{name}-{number}", what.alt, svg.chart(what, f"{name}-{number}")))
    return made


def tabled(table: PageSection) -> str:
    head = f"| {' | '.join(map(escaped, table.heads))} |\n|{' --- |' * len(table.heads)}"
    rows = "\n".join(f"| {' | '.join(map(cell, row))} |" for row in table.rows)
    return f"## {escaped(table.title)}\n\n{escaped(table.note)}\n\n{head}\n{rows}"


def cell(text: TableCell) -> str:
    return f"**{escaped(text.text)}**" if text.best and text.text else escaped(text.text)


def escaped(text: str) -> str:
    """A user's text without any effect as Markdown or HTML, and without line breaks."""
    return re.sub(r"([\\`*_\[\]<>|#&~$])", r"\\\1", " ".join(text.split()))
