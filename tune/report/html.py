"""A report as one HTML page: no network, no script, the reader's fonts; for a desk, a phone and paper.

The page is the Jinja2 template page.html.j2, which escapes everything that it is given.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from markupsafe import Markup

from .charts import Chart, Group
from .findings import Findings
from .tables import Table

LONG = 60
"""Characters from which a cell's text may break."""


def page(found: Findings, tables: list[Table], groups: list[Group]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    made.filters["svg"] = labelled
    template = made.get_template("page.html.j2")
    return template.render(found=found, tables=tables, groups=groups, LONG=LONG)


def labelled(chart: Chart) -> Markup:
    """The SVG, which is our own, with what it shows for those who cannot see it."""
    return Markup(chart.svg.replace("<svg", f'<svg role="img" aria-label="{escape(chart.alt)}"', 1))
