"""A report as one HTML page, which needs no network and no script, for screens, phones and paper.

The page is the Jinja2 template page.html.j2, which escapes all values except our own SVG.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from markupsafe import Markup

from .charts import Chart, Group
from .findings import Findings
from .tables import Table

LONG = 60
"""Longer texts of table cells may be broken into lines."""


def page(found: Findings, tables: list[Table], groups: list[Group]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    made.filters["svg"] = labelled
    template = made.get_template("page.html.j2")
    return template.render(found=found, tables=tables, groups=groups, LONG=LONG)


def labelled(chart: Chart) -> Markup:
    """The chart's SVG, which is our own and not escaped, with a description for readers who cannot see it."""
    return Markup(chart.svg.replace("<svg", f'<svg role="img" aria-label="{escape(chart.alt)}"', 1))
