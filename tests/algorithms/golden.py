"""Golden values: a regression with four clients, one of whom never takes part, and the models of some methods after
each of three rounds.

They were computed from the methods' equations by a program that shares no code with the engine, nor with the slow
references. Every local step is on all rows of its client.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.algorithms.problems import Regression, flatten

DIGITS = 1e-12
"""The values have at most 13 digits, of numbers of about 1; absolute."""


class Case(NamedTuple):
    """settings: of the method. expected: `x` of each round, and more by the method, as flat lists."""

    method: str
    settings: dict[str, Any]
    cohorts: list[list[int]]
    K: int
    expected: dict[str, Any]

    @property
    def timetable(self) -> tuple[list[list[int]], dict[tuple[int, int], int]]:
        """(cohorts, (round, client) -> K)."""
        return self.cohorts, {(r, i): self.K for r, cohort in enumerate(self.cohorts) for i in cohort}

    def slow(self, method: Any, *given: Any, **settings: Any) -> Any:
        """What a slow reference makes of the case."""
        return method(PROBLEM.gradient, PROBLEM.start, PROBLEM.clients, *self.timetable, *given, **settings)


_FOUND = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
PROBLEM = Regression(_FOUND["problem"]["rows"], _FOUND["problem"]["x0"])
CASES = {name: Case(**case) for name, case in _FOUND["cases"].items()}


def equal(found: Any, expected: Any) -> None:
    """Compare a tree, a dict of arrays or an engine's tree, with a flat list."""
    values = found.flat.numpy() if hasattr(found, "flat") else flatten(found)
    np.testing.assert_allclose(values, expected, rtol=0, atol=DIGITS)
