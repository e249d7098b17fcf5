"""The clients of the study `language/shakespeare`: the roles with the most text in plays that tiny Shakespeare does not
have, so that no client has text of the base.

    python -m tools.shakespeare_clients shakespeare_roles.parquet clients.parquet

The input has a row for each line, with the columns user, play, split (train or test) and text, sorted by role and line;
the output has the rows of the chosen roles. Needs pyarrow.
"""

from __future__ import annotations

import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq

IN_BASE = (
    "coriolanus",
    "kingrichardii",
    "kingrichardiii",
    "3kinghenryvi",
    "romeoandjuliet",
    "winterstale",
    "measureforemeasure",
    "tamingoftheshrew",
    "tempest",
)
"""The plays of which tiny Shakespeare has text."""
ROLES = 100


def chosen(lines: pa.Table, roles: int = ROLES) -> pa.Table:
    """The lines of the roles with the most characters of training text; of equal ones the first by name."""
    user, play, split, text = (lines[name].to_pylist() for name in ("user", "play", "split", "text"))
    sizes = Counter[str]()
    for each, where, kind, line in zip(user, play, split, text, strict=True):
        if where not in IN_BASE and kind == "train":
            sizes[each] += len(line)
    most = set(sorted(sizes, key=lambda each: (-sizes[each], each))[:roles])
    return lines.filter(pa.array([each in most for each in user]))


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(
            "give two files: python -m tools.shakespeare_clients shakespeare_roles.parquet clients.parquet"
        )
    found = chosen(pq.read_table(sys.argv[1]))
    pq.write_table(found, sys.argv[2])
    print(f"{len(set(found['user'].to_pylist()))} roles, {found.num_rows:,} lines")


if __name__ == "__main__":
    main()
