"""Whether two methods have the same models after every round of a problem; the models of each are (R, P)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.algorithms.driver import run
from tests.algorithms.problems import partial


@dataclass(frozen=True)
class Compare:
    """Comparisons of two methods. problem: used if a test gives none; rounding: the absolute and relative tolerance of
    `close`."""

    problem: Any
    rounding: float

    def paths(self, first: Any, second: Any, problem: Any = None, timetable: Any = None) -> list[torch.Tensor]:
        problem = problem or self.problem
        cohorts, steps = timetable or partial(problem.clients)
        runs = (run(method, problem, cohorts, steps) for method in (first, second))
        return [torch.stack([model.flat for model in result.models()]) for result in runs]

    def close(self, *what: Any, **where: Any) -> None:
        one, other = self.paths(*what, **where)
        torch.testing.assert_close(one, other, rtol=self.rounding, atol=self.rounding)

    def equal(self, *what: Any, **where: Any) -> None:
        one, other = self.paths(*what, **where)
        assert torch.equal(one, other), f"largest difference {(one - other).abs().max()}"

    def unlike(self, *what: Any, **where: Any) -> None:
        one, other = self.paths(*what, **where)
        assert (one - other).abs().max() > 1e-4
