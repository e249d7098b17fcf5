"""A plug-in: the tiny regressions of `tests.algorithms.own` as workloads, and cohorts that are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfleet.algorithms.contract import Deferred, RunContext
from fedfleet.algorithms.ifca import Ifca
from fedfleet.engine.cohorts.samplers import CountedSampler
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.workload import Split, Workload
from tests.algorithms.own import CASES, PROBLEMS, losses
from tests.algorithms.test_clusters import with_starts


@dataclass(frozen=True)
class Given(CountedSampler):
    """The cohorts of a golden case, again and again: the round behind the last one is drawn, too."""

    case: str

    def cohort(self, seed: int, number: int, clients: int, size: int) -> np.ndarray:
        cohorts = CASES[self.case][1].cohorts
        return np.array(cohorts[(number - 1) % len(cohorts)])


@dataclass(frozen=True)
class Tiny(Workload):
    """problem: its name."""

    problem: str

    def split(self, seed: int, clients: int) -> Split:
        rows = [each.numpy() for each in PROBLEMS[self.problem].rows]
        train = {"row": np.concatenate(rows)}
        ends = np.cumsum([len(each) for each in rows])
        return Split(train, train, ClientIndex.of(np.split(np.arange(ends[-1]), ends[:-1])))

    def init(self, seed: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(value.copy()) for name, value in PROBLEMS[self.problem].start.items()}

    @property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return PROBLEMS[self.problem].statistics

    def losses(self, p, batch) -> Tensor:
        return losses(p, batch["row"], "key" in batch)

    def report(self, p, batch) -> dict[str, Tensor]:
        return {"loss": losses(p, batch["row"], False)}


@dataclass(frozen=True)
class Starts(Deferred):
    """IFCA with the models before round 1 of its golden case."""

    def build(self, context: RunContext) -> Ifca:
        return with_starts(CASES["ifca"][1].settings["starts"])


METHODS = {"ifca_from": Starts}
SAMPLERS = {"given": Given}
WORKLOADS = {"tiny": Tiny}
