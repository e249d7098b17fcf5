"""The entry of a table of parts that experiments choose by name."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One part. `build`: "package.module:attribute" of the callable that makes it, imported when the part is used.
    `summary`: one line on what it is. `rows`: of a workload, the rows on which it is evaluated, as readers are told:
    "test", "training", or "" where the objective itself is known and has no rows."""

    build: str
    summary: str
    rows: str = "test"
