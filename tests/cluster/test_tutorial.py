"""Executes the tutorial on clusters, with a real cluster in place of the address in the tutorial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..pages import DOCS, Runner, working_in


def test_the_tutorial(cluster: Any, tmp_path: Path):
    with working_in(tmp_path):
        Runner(DOCS / "tutorials/cluster.md", cluster.address).all()
