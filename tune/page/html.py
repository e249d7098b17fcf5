"""Writes a page as one HTML file, which needs no network, for screens, phones and paper.

The Jinja2 template page.html.j2 escapes all values. The page's policy allows the two scripts of this folder by their
digests, and no other one, so that no text of a user could be executed even if it were not escaped. Most of the file,
1.2 MB, is the library plotly.js in its smallest distribution.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from .content import Page
from .style import DASHES, SYMBOLS, colour, ink, style, styles

FOLDER = Path(__file__).parent
LONG = 60
"""Longer texts of table cells may be broken into lines."""


def render(page: Page) -> str:
    """The page as text."""
    import jinja2

    made = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined)
    made.globals |= {"style": style, "SYMBOLS": SYMBOLS, "DASHES": DASHES, "colour": colour, "ink": ink, "LONG": LONG}
    library, own = script("plotly/plotly-basic.min.js"), script("charts.js")
    figures = [figure for section in page.sections for figure in section.charts]
    scripts = [library, own] if figures else [own]
    return made.get_template("page.html.j2").render(
        page=page,
        css=(FOLDER / "page.css").read_text("utf-8"),
        scripts=scripts,
        digests=" ".join(f"'sha256-{digest(text)}'" for text in scripts),
        figures=as_json({"figures": [f.plain() for f in figures], "styles": styles()}),
    )


@functools.cache
def script(name: str) -> str:
    """The text of a script of this folder."""
    return (FOLDER / name).read_text("utf-8")


def digest(text: str) -> str:
    """The digest by which a content security policy allows a script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_json(data: Any) -> str:
    """JSON that cannot end the element that contains it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
