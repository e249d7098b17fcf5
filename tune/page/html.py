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

from ..chart import COLOURS
from .content import NO_STYLE, Page

FOLDER = Path(__file__).parent
LONG = 60
"""Longer texts of table cells may be broken into lines."""

SYMBOLS = {
    "circle": "M12 5a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "square": "M12.2 2.2h5.6v5.6h-5.6z",
    "triangle-up": "M15 1.2l3.6 6.4h-7.2z",
    "triangle-down": "M15 8.8l3.6-6.4h-7.2z",
    "diamond": "M15 1l4 4l-4 4l-4-4z",
    "cross": "M13.8 1.4h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4z",
    "x": "M12.2 3.6l1.4-1.4l1.4 1.4l1.4-1.4l1.4 1.4l-1.4 1.4l1.4 1.4l-1.4 1.4l-1.4-1.4l-1.4 1.4l-1.4-1.4l1.4-1.4z",
}
"""Markers of plotly.js in the order of `chart.MARKERS`, with their shapes in the legend, around (15, 5)."""

DASHES = {"solid": "", "dash": "6 3", "dot": "2 3", "dashdot": "7 3 2 3"}
"""Line styles of plotly.js -> patterns of SVG, for the legend."""

GREY = "#8a8a8a"
"""Colour of what belongs to no method, and of the palette's black, which a dark page would not show."""

SCALE = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))
"""Colours of the maps from worst to best: cividis, which colour-blind readers can distinguish."""


def render(page: Page) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    made.globals |= {"style": style, "SYMBOLS": SYMBOLS, "DASHES": DASHES, "colour": colour, "ink": ink, "LONG": LONG}
    library, own = script("plotly/plotly-basic.min.js"), script("charts.js")
    figures = [figure for section in page.sections for figure in section.figures]
    scripts = [Markup(own)] if not figures else [Markup(library), Markup(own)]
    return made.get_template("page.html.j2").render(
        page=page,
        css=Markup((FOLDER / "page.css").read_text("utf-8")),
        scripts=scripts,
        digests=" ".join(f"'sha256-{digest(text)}'" for text in scripts),
        figures=Markup(as_json({"figures": [f.plain() for f in figures], "styles": styles()})),
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


def style(number: int) -> dict[str, str]:
    """Colour, marker and line of a style, the same in all charts and in the legend.

    Styles of the same colour have different markers, because points have no line.
    """
    if number == NO_STYLE:
        return {"colour": GREY, "symbol": "circle", "dash": "solid"}
    turn = number // len(COLOURS)
    chosen = COLOURS[number % len(COLOURS)]
    return {
        "colour": GREY if chosen == "#000000" else chosen,
        "symbol": list(SYMBOLS)[(number + turn) % len(SYMBOLS)],
        "dash": list(DASHES)[turn % len(DASHES)],
    }


def styles() -> list[dict[str, str]]:
    """All styles in order; the last one is NO_STYLE."""
    return [*(style(number) for number in range(len(COLOURS) * len(DASHES))), style(NO_STYLE)]


def colour(share: float) -> str:
    """The colour of a cell. share: 0 (worst) … 1 (best)."""
    place = share * (len(SCALE) - 1)
    at = min(int(place), len(SCALE) - 2)
    mixed = [round(a + (place - at) * (b - a)) for a, b in zip(SCALE[at], SCALE[at + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(share: float) -> str:
    """The colour of the text in a cell."""
    return "#ffffff" if share < 0.45 else "#111111"
