"""The clients of language/shakespeare have no text of their base's plays, and are those with the most training text."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tools.shakespeare_clients import IN_BASE, ROLES, chosen


def test_roles_with_the_most_training_text_in_other_plays():
    lines = [
        *(("tempest__A", "tempest", "train", "x" * 99), ("macbeth__B", "macbeth", "train", "xx")),
        *(("macbeth__B", "macbeth", "test", "y" * 50), ("hamlet__C", "hamlet", "train", "xxx")),
        *(("hamlet__C", "hamlet", "test", "y"), ("hamlet__D", "hamlet", "train", "x")),
    ]
    table = pa.table(dict(zip(("user", "play", "split", "text"), zip(*lines, strict=True), strict=True)))
    found = chosen(table, 2)
    assert found["user"].to_pylist() == ["macbeth__B", "macbeth__B", "hamlet__C", "hamlet__C"]


def test_the_roles_of_the_study(real_set: Callable[[str], Path]):
    found = chosen(pq.read_table(real_set("shakespeare") / "shakespeare_roles.parquet"))
    assert len(set(found["user"].to_pylist())) == ROLES
    assert not set(found["play"].to_pylist()) & set(IN_BASE)
