"""The page of identities: settings under which two methods are one method. The tests run every row of it."""

from __future__ import annotations

from tests.algorithms.identities import ROUNDING, ROUNDING_SADDLE, TABLE, SameMethod

from .text import table

BEGIN = f"""# Identities of methods

Settings under which two methods are one method. They say what a method adds to another, and they are tests: each row is
run, round by round, in float64 and with noisy gradients. *To the bit* means that both methods do the same operations in
the same order. Otherwise their models differ by rounding errors alone: less than {ROUNDING:g}, relative and absolute,
and {ROUNDING_SADDLE:g} for min-max problems.

"""


def page() -> str:
    """The page in Markdown."""
    return BEGIN + table(("method", "is the same as", "where", "equal", "because"), [row_of(row) for row in TABLE])


def row_of(row: SameMethod) -> tuple[str, ...]:
    """The cells of a row."""
    where = row.where.text + (f"; not with {row.apart.text}" if row.apart else "")
    return f"`{row.one}`", f"`{row.other}`", where, "to the bit" if row.exact else "within rounding", row.why
