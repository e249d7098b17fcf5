"""Min-max workloads: min over tensors named `primal.…`, max over those named `dual.…`.

Min-max is a sign, and it is here: the gradient of `losses` is that of the objective on the primal and minus that of the
objective on the dual, so that it is a descent direction on both and methods need to know of no groups. The value of
`losses` stays the objective's.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from .base import Batch, Classification, Params, Split, Workload

PRIMAL, DUAL, NET = "primal.", "dual.", "primal.net."


def reversed_dual(p: Params) -> dict[str, Tensor]:
    """The same tensors, the dual ones with their gradient's sign turned. 2 v - v is v to the bit."""
    return {name: 2 * value.detach() - value if name.startswith(DUAL) else value for name, value in p.items()}


class MinMax(Workload):
    """A workload fills `objectives` in the place of `losses`."""

    @abstractmethod
    def objectives(self, p: Params, batch: Batch) -> Tensor:
        """(B,): each example's part of what the primal minimises and the dual maximises."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        return self.objectives(reversed_dual(p), batch)


@dataclass(frozen=True)
class OverClassification(MinMax):
    """An objective over the network of a classification workload, whose tensors are `primal.net.…`."""

    of: Workload

    def __post_init__(self) -> None:
        if not isinstance(self.of, Classification):
            raise ValueError(f"of must be a classification workload, got {type(self.of).__name__}")

    @property
    def base(self) -> Classification:
        assert isinstance(self.of, Classification)  # see __post_init__
        return self.of

    @property
    def classes(self) -> int:
        return self.base.classes

    @property
    def partition(self) -> object:
        return self.base.partition

    @property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(NET + name for name in self.base.buffers)

    def check(self) -> None:
        self.of.check()

    def split(self, seed: int, clients: int) -> Split:
        return self.of.split(seed, clients)

    def check_split(self, split: Split, most: float) -> None:
        self.of.check_split(split, most)

    @abstractmethod
    def others(self) -> dict[str, Tensor]:
        """The first values of the tensors that are not the network's."""

    def init(self, seed: int) -> dict[str, Tensor]:
        return {**{NET + name: value for name, value in self.of.init(seed).items()}, **self.others()}

    def logits(self, p: Params, batch: Batch) -> Tensor:
        """(B, classes), of training where there is a key."""
        return self.base.logits(self._net(p), batch, batch.get("key"))

    def trial(self, p: Params, batch: Batch) -> object:
        return self.logits(p, batch)

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = super().losses(p, batch)
        return losses + self.base.network.drift(self._net(p)) if self.buffers and "key" in batch else losses

    def _net(self, p: Params) -> dict[str, Tensor]:
        return {name.removeprefix(NET): value for name, value in p.items() if name.startswith(NET)}
