"""An entry of the tables of parts that experiments choose by name."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A part by its name. `build`: "package.module:function", imported only when it is used; `summary`: one line."""

    build: str
    summary: str
