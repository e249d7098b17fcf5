"""Any classification workload whose training data some clients have poisoned.

    label_flipped       label l of a row of these clients becomes C - 1 - l
    gradients_flipped   every gradient of these clients is multiplied by -k
    backdoored          some rows of these clients get a trigger, a square of one value at the top left, and a target
                        label; the metric `backdoor` is the share of the test rows of other classes that, with the
                        trigger, are taken for the target

Values of losses, and reports on clean test rows, are those of the inner workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import counted
from ..client_index import ClientIndex
from ..objectives import Classes
from ..workload import Batch, Chained, Columns, Params, Split
from .wrapped import OtherRows, unseen


@dataclass(frozen=True)
class Poisoned(OtherRows):
    """`of`: the inner workload. `clients`: the numbers of the clients whose rows are poisoned."""

    clients: tuple[int, ...] = ()

    rows_alone: ClassVar[bool] = False

    @property
    def classes(self) -> int:
        """C. Raises ValueError for a workload without classes."""
        classes = getattr(self.of, "classes", None)
        if classes is None:
            raise ValueError(
                f"poisoned data need a workload with labels and classes, got {type(self.of).__name__}; choose another "
                "workload"
            )
        return classes

    def check(self) -> None:
        self.of.check()
        _ = self.classes
        if not isinstance(getattr(self.of, "objective", Classes(self.classes)), Classes):
            raise ValueError(
                "poisoned data need a class for each row, got numbers or several; leave workload.of.task out"
            )

    def rows(self, client_index: ClientIndex) -> np.ndarray:
        """The training rows of the poisoned clients."""
        if outside := [number for number in self.clients if not 0 <= number < len(client_index.sizes)]:
            raise ValueError(f"clients must be numbers from 0 to {len(client_index.sizes) - 1}, got {outside[0]}")
        spans = zip(client_index.offsets[list(self.clients)], client_index.offsets[np.array(self.clients) + 1])  # noqa: B905
        return np.concatenate([client_index.rows[begin:end] for begin, end in spans])


@dataclass(frozen=True)
class LabelFlipped(Poisoned):
    """Every label of the poisoned clients is flipped."""

    def split(self, seed: int, clients: int) -> Split:
        split = self.of.split(seed, clients)
        if not self.clients:
            return split
        rows, label = self.rows(split.client_index), split.train["label"].copy()
        label[rows] = self.classes - 1 - label[rows]
        return split._replace(train={**split.train, "label": label})


@dataclass(frozen=True)
class GradientsFlipped(Poisoned):
    """`k`: the factor, so that a client with plain SGD climbs its loss. Any workload; the values of losses stay."""

    k: float = 1.0

    @property
    def chained(self) -> Chained | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None: fused kernels would compute the gradients of the inner losses."""
        return None

    def check(self) -> None:
        self.of.check()

    def split(self, seed: int, clients: int) -> Split:
        """Adds the column "flipped", (n,) bool: the rows of the poisoned clients."""
        split = self.of.split(seed, clients)
        flipped = np.zeros(len(next(iter(split.train.values()))), dtype=bool)
        if self.clients:
            flipped[self.rows(split.client_index)] = True
        return split._replace(train={**split.train, "flipped": flipped})

    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,): l, or l with the gradient -k l' in rows of poisoned clients."""
        inner = {name: column for name, column in batch.items() if name != "flipped"}
        losses = self.of.losses(p, inner)
        if "flipped" not in batch:
            return losses
        return torch.where(batch["flipped"], losses.detach() - self.k * unseen(losses), losses)


@dataclass(frozen=True)
class Backdoored(Poisoned):
    """`poison`: the probability that a row of the poisoned clients gets the trigger. `size`, `value`: the side of the
    square, and what its inputs become; `value` None: the largest input. `target`: the label."""

    poison: float = 0.32
    size: int = 5
    value: float | None = None
    target: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.poison <= 1:
            raise ValueError(f"0 <= poison <= 1 must hold, got poison={self.poison}")
        if self.size < 1:
            raise ValueError(f"size >= 1 must hold, got size={self.size}")

    def check(self) -> None:
        super().check()
        shape = getattr(self.of, "shape", ())
        if len(shape) < 2 or min(shape[-2:]) < self.size:
            raise ValueError(f"size: a square of {self.size} x {self.size} must fit the inputs, got the shape {shape}")
        if not 0 <= self.target < self.classes:
            raise ValueError(f"0 <= target < {self.classes} must hold, got target={self.target}")

    def split(self, seed: int, clients: int) -> Split:
        """Adds the test column "triggered": the test inputs with the trigger."""
        split = self.of.split(seed, clients)
        train = dict(split.train)
        value = float(train["input"].max()) if self.value is None else self.value
        if self.clients:
            rows = self.rows(split.client_index)
            draws = counted.uniform(counted.key(seed, "backdoor", torch.from_numpy(rows)), 1)[:, 0].numpy()
            rows = rows[draws < self.poison]
            train["input"], train["label"] = train["input"].copy(), train["label"].copy()
            train["input"][rows] = self.triggered(train["input"][rows], value)
            train["label"][rows] = self.target
        test = {**split.test, "triggered": self.triggered(split.test["input"], value)}
        return split._replace(train=train, test=test)

    def triggered(self, inputs: np.ndarray, value: float) -> np.ndarray:
        """(n, ..., height, width): inputs with the trigger."""
        found = inputs.copy()
        found[..., : self.size, : self.size] = value
        return found

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """The inner report, and "hit": whether a row with the trigger is taken for the target; -1 in rows of the target
        class, which do not count, and in rows without a triggered input."""
        found = self.of.report(p, batch)
        label = batch["label"]
        if "triggered" not in batch:
            return {**found, "hit": torch.full_like(label, -1)}
        of: Any = self.of
        taken = of.logits(p, {**batch, "input": batch["triggered"]}).argmax(-1)
        return {**found, "hit": torch.where(label == self.target, -1, (taken == self.target).to(label.dtype))}

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*self.of.whole, "hit")

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """`backdoor`: the attack success rate."""
        hit = columns["hit"][columns["hit"] >= 0] if "hit" in columns else np.zeros(0)
        rate = {"backdoor": float(hit.mean())} if len(hit) else {}
        inner = {name: columns[name] for name in self.of.whole if name in columns}
        return {**self.of.summary(means, inner), **rate}
