"""Colours, markers and lines of everything that is drawn, the same in pages and in files."""

from __future__ import annotations

from .content import NO_STYLE

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish; markers distinguish the lines in print."""

SYMBOLS = {
    "circle": "M12 5a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "square": "M12.2 2.2h5.6v5.6h-5.6z",
    "triangle-up": "M15 1.2l3.6 6.4h-7.2z",
    "triangle-down": "M15 8.8l3.6-6.4h-7.2z",
    "diamond": "M15 1l4 4l-4 4l-4-4z",
    "cross": "M13.8 1.4h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4z",
    "x": "M12.2 3.6l1.4-1.4l1.4 1.4l1.4-1.4l1.4 1.4l-1.4 1.4l1.4 1.4l-1.4 1.4l-1.4-1.4l-1.4 1.4l-1.4-1.4l1.4-1.4z",
}
"""Markers by their names in plotly.js, with their shapes in the legend of a page, around (15, 5)."""

DASHES = {"solid": "", "dash": "6 3", "dot": "2 3", "dashdot": "7 3 2 3"}
"""Lines by their names in plotly.js -> patterns of SVG, for the legend of a page."""

GREY = "#8a8a8a"
"""Colour of what belongs to no method, and of the palette's black, which a dark page would not show."""

SCALE = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))
"""Colours of the maps from worst to best: cividis, which colour-blind readers can distinguish."""


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
