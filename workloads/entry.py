"""The entry of a table of parts that experiments choose by name."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One part. `build`: "package.module:attribute" of the callable that makes it, imported when the part is used.
    `summary`: one line on what it is."""

    build: str
    summary: str
