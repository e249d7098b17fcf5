"""Workloads around another one: a subclass overrides some methods, the inner workload does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from ..pair import Pair
from ..workload import Batch, Chained, Columns, Params, Split, StoredTensors, Workload


@dataclass(frozen=True)
class WithDataOf(Workload):
    """A workload with the data and the network of another one. `of`: the other one."""

    of: Workload

    def check(self) -> None:
        self.of.check()

    def seeded(self, seed: int) -> Workload:
        if (inner := self.of.seeded(seed)) is self.of:
            return self
        found = copy(self)
        vars(found)["of"] = inner
        return found

    @property
    def constants_seed(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.constants_seed

    def data_files(self) -> Mapping[str, Path]:
        return self.of.data_files()

    def facts_of_data(self) -> Any:
        return self.of.facts_of_data()

    def take_facts(self, facts: Any) -> None:
        self.of.take_facts(facts)

    def split(self, seed: int, clients: int) -> Split:
        return self.of.split(seed, clients)

    def check_split(self, split: Split, most: float) -> None:
        self.of.check_split(split, most)

    def prepared(self, split: Split) -> Split:
        return self.of.prepared(split)

    @property
    def outline(self) -> nn.Module | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.outline

    @property
    def outline_input(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.outline_input

    @property
    def of_package(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.of_package

    @property
    def training_rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.training_rows

    @property
    def converted(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.converted

    def client_names(self) -> tuple[str, ...]:
        return self.of.client_names()

    def differences(self, seed: int, clients: int) -> dict[str, np.ndarray]:
        return self.of.differences(seed, clients)


@dataclass(frozen=True)
class Wrapped(WithDataOf):
    """A workload around another one, whose losses and reports it has where a subclass does not override them."""

    def init(self, seed: int) -> dict[str, Tensor]:
        return self.of.init(seed)

    def frozen(self, seed: int) -> dict[str, Tensor]:
        return self.of.frozen(seed)

    def stored(self) -> StoredTensors | None:
        return self.of.stored()

    @property
    def pairs(self) -> tuple[Pair, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.pairs

    def losses(self, p: Params, batch: Batch) -> Tensor:
        return self.of.losses(p, batch)

    def row_weights(self, batch: Batch) -> Tensor | None:
        return self.of.row_weights(batch)

    def targets(self, columns: Columns) -> np.ndarray | None:
        return self.of.targets(columns)

    def trial(self, p: Params, batch: Batch) -> object:
        return self.of.trial(p, batch)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return self.of.report(p, batch)

    @property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.buffers

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.whole

    @property
    def lower(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.lower

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        return self.of.summary(means, columns)

    def summary_of_clients(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.of.summary_of_clients(means)


@dataclass(frozen=True)
class OtherRows(Wrapped):
    """A workload whose rows alone differ from those of the inner one: it has its network, losses and kernels. Where the
    inner workload has no classes, shape or logits, neither has this one."""

    rows_alone: ClassVar[bool] = True
    """False where losses or metrics differ too, so that a min-max problem cannot use the network with its own."""

    @property
    def _inner(self) -> Any:
        return self.of

    @property
    def casts_up(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.casts_up

    @property
    def chained(self) -> Chained | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        chained = self.of.chained
        if chained is None or (report := chained.report) is None:
            return chained
        own = (lambda outputs, batch: report(outputs, self.reported(batch))) if self._reports_of_inner() else None
        return chained._replace(report=own)

    def _reports_of_inner(self) -> bool:
        return type(self).report is OtherRows.report

    @property
    def classes(self) -> int:
        return self._inner.classes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._inner.shape

    def logits(self, p: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        return self._inner.logits(p, batch, key)

    def reported(self, batch: Batch) -> Batch:
        """A batch as reports are made of it, for example with the labels that are right."""
        return self.of.reported(batch) if isinstance(self.of, OtherRows) else batch

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return self.of.report(p, self.reported(batch))


def unseen(term: Tensor) -> Tensor:
    """A tensor of value 0 whose gradient is that of `term`. Added to a loss, it does not change the loss's value."""
    return term - term.detach()
