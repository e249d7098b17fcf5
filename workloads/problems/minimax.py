"""Min-max workloads: minimisation over tensors named `primal.…`, maximisation over tensors named `dual.…`.

The value of `losses` is the objective. Its gradient is that of the objective for the primal tensors and minus that of
the objective for the dual tensors. A method that descends along it thus minimises over the primal and maximises over
the dual tensors, and needs no min-max code.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ..classification import Classification, check_logits
from ..objectives import Classes
from ..workload import Batch, Params, Workload
from ..wrappers.wrapped import OtherRows, WithDataOf

PRIMAL, DUAL, NET = "primal.", "dual.", "primal.net."


def reversed_dual(p: Params) -> dict[str, Tensor]:
    """The same tensors, but the sign of the gradient is reversed for dual ones. The values are equal to the bit."""
    return {name: 2 * value.detach() - value if name.startswith(DUAL) else value for name, value in p.items()}


class MinMax(Workload):
    """A min-max workload. A subclass defines `objectives` instead of `losses`."""

    @abstractmethod
    def objectives(self, p: Params, batch: Batch) -> Tensor:
        """(B,): the objective of each example, minimised over the primal and maximised over the dual tensors."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        return self.objectives(reversed_dual(p), batch)


@dataclass(frozen=True)
class OverClassification(MinMax, WithDataOf):
    """A min-max objective over the network of a classification workload `of`, around which there may be workloads with
    other rows, such as label_noise. The tensors of the network are named `primal.net.…`."""

    def __post_init__(self) -> None:
        _ = self.base

    @property
    def base(self) -> Classification:
        """The workload that has the network. Raises ValueError if there is none."""
        inner = self.of
        while isinstance(inner, OtherRows) and inner.rows_alone:
            inner = inner.of
        if not isinstance(inner, Classification):
            raise ValueError(
                "of must be a classification workload, or one with other rows around it (feature_skew, label_noise), "
                f"got {type(self.of).__name__}"
            )
        return inner

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
        super().check()
        if not isinstance(self.base.objective, Classes):
            raise ValueError("of must have a class for each row, got numbers or several; leave workload.of.task out")

    @abstractmethod
    def others(self) -> dict[str, Tensor]:
        """The initial values of the tensors that do not belong to the network, by name."""

    def init(self, seed: int) -> dict[str, Tensor]:
        return {**{NET + name: value for name, value in self.of.init(seed).items()}, **self.others()}

    def frozen(self, seed: int) -> dict[str, Tensor]:
        return {NET + name: value for name, value in self.of.frozen(seed).items()}

    def logits(self, p: Params, batch: Batch) -> Tensor:
        """(B, classes): the logits of the network, in training mode if the batch has a key."""
        return self.base.logits(self._net(p), batch, batch.get("key"))

    def trial(self, p: Params, batch: Batch) -> object:
        return check_logits(self.base.trial(self._net(p), batch))

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return self.metrics(p, self.of.reported(batch) if isinstance(self.of, OtherRows) else batch)

    @abstractmethod
    def metrics(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """`report`, for a batch with the labels that are right."""

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = super().losses(p, batch)
        return losses + self.base.network.drift(self._net(p)) if self.buffers and "key" in batch else losses

    def _net(self, p: Params) -> dict[str, Tensor]:
        return {name.removeprefix(NET): value for name, value in p.items() if name.startswith(NET)}
