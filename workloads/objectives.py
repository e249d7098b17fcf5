"""What the outputs of a network are compared with: the class of a row, numbers, several labels at once, or the token
behind each place of a text.

An objective is the loss of each example, its metrics, and what the column "label" must hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F

from .files.cells import check_finite, labels_of
from .metrics import auc, perplexities, perplexity
from .workload import Columns

NO_LABEL = -(1 << 63)
"""A number that is never a label. By default torch ignores rows of label -100, but only outside of vmap."""


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """(B,) from logits (B, classes) and labels (B,) of any integer type. Logits in bfloat16 are converted to float32,
    because a softmax needs its precision. Raises IndexError, or RuntimeError under vmap, for a label that is no class.
    """
    logits = wide(logits)
    label = label if label.dtype == torch.int64 or label.is_floating_point() else label.long()
    if not is_batchedtensor(logits):
        return F.cross_entropy(logits, label, reduction="none", ignore_index=NO_LABEL)
    # Under vmap torch decomposes its own function in Python, which imports sympy.
    return -F.log_softmax(logits, -1).gather(-1, label.unsqueeze(-1)).squeeze(-1)


def wide(outputs: Tensor) -> Tensor:
    """The outputs, in float32 if they are in bfloat16."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


class Objective(ABC):
    """A subclass is a frozen dataclass. `outputs` are those of a network, (B, width)."""

    whole: tuple[str, ...] = ()
    """The columns of `unreduced` that `summary` needs, see `Workload.whole`."""
    lower: tuple[str, ...] = ("loss",)
    """The metrics of which lower values are better."""

    @abstractmethod
    def checked(self, label: np.ndarray, part: str) -> np.ndarray:
        """The column "label", in the type in which it is compared. part: its place in the data, for messages. Raises
        ValueError for what the objective cannot use."""

    @abstractmethod
    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        """(B,): the loss of each example."""

    @abstractmethod
    def report(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        """name -> (B,): the metrics of each example."""

    @abstractmethod
    def unreduced(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        """name -> (B,): what is not averaged, such as what examples are ordered by."""

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """Further metrics, see `Workload.summary`. `columns` may lack those of `whole` that a workload does without."""
        return {}

    def summary_of_clients(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Workload.summary_of_clients`."""
        return {}


@dataclass(frozen=True)
class Classes(Objective):
    """One of `classes` classes for each row, by cross-entropy; with two classes also the area under the ROC curve."""

    classes: int

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("score", "label") if self.classes == 2 else ()

    def checked(self, label: np.ndarray, part: str) -> np.ndarray:
        return labels_of(label, self.classes, part)

    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(outputs, label)

    def report(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        loss = cross_entropy(outputs, label)
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == label).to(loss.dtype)}

    def unreduced(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        # The difference orders the examples as the probability of class 1 does, and has more digits near 1.
        return {"score": outputs[:, 1] - outputs[:, 0], "label": label}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """The AUC; empty if the test rows are all of one class."""
        if not {"score", "label"} <= columns.keys() or len(set(columns["label"].tolist())) < 2:
            return {}
        return {"auc": auc(columns["score"], columns["label"] == 1)}


@dataclass(frozen=True)
class NextToken(Objective):
    """The token that follows each place of a row, one of `vocabulary`, by the mean cross-entropy over the places.

    `outputs`: (B, T, vocabulary), `label`: (B, T). The metrics are `accuracy`, the share of places whose token has the
    largest logit, and `perplexity`, e to the mean loss in nats: a loss of the same size belongs to a uniform choice
    among so many tokens."""

    vocabulary: int

    lower = ("loss", "perplexity")

    def checked(self, label: np.ndarray, part: str) -> np.ndarray:
        if label.ndim != 2 or label.dtype.kind not in "iu" or not ((label >= 0) & (label < self.vocabulary)).all():
            raise ValueError(
                f"{part} must have a token below {self.vocabulary} for each place of a row in column label, got "
                f"{label.dtype} of shape {label.shape}"
            )
        return label

    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        losses = cross_entropy(outputs.reshape(-1, outputs.shape[-1]), label.reshape(-1).long())
        return losses.view(label.shape).mean(-1)

    def report(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        loss = self.losses(outputs, label)
        return {"loss": loss, "accuracy": (outputs.argmax(-1) == label).to(loss.dtype).mean(-1)}

    def unreduced(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        return {}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        return {"perplexity": perplexity(means["loss"])}

    def summary_of_clients(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"perplexity": perplexities(means["loss"])}


NOT_COUNTED = -1
"""What stands in the place of a target that does not count: of padding, or of a prompt."""


@dataclass(frozen=True)
class CountedTokens(NextToken):
    """The token that follows each place of a row, where some places have none: NOT_COUNTED. The loss and the accuracy
    of a row are means over its targets, 0 without any."""

    def checked(self, label: np.ndarray, part: str) -> np.ndarray:
        super().checked(np.where(label == NOT_COUNTED, 0, label), part)
        return label

    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        given = label != NOT_COUNTED
        tokens = torch.where(given, label, 0).reshape(-1).long()
        losses = cross_entropy(outputs.reshape(-1, outputs.shape[-1]), tokens).view(label.shape)
        return self.mean(losses, given)

    def report(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        loss, given = self.losses(outputs, label), label != NOT_COUNTED
        return {"loss": loss, "accuracy": self.mean((outputs.argmax(-1) == label).to(loss.dtype), given)}

    @staticmethod
    def mean(values: Tensor, given: Tensor) -> Tensor:
        """(B,): the means of values (B, T) over the places where a target is given."""
        return torch.where(given, values, 0.0).sum(-1) / given.sum(-1).clamp(min=1)


Error = Literal["mse", "mae", "huber"]
"""The loss of a regression: the squared error, the absolute error, or Huber's, which is half the squared error up to an
error of 1 and linear beyond."""

ERRORS = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


@dataclass(frozen=True)
class Numbers(Objective):
    """`width` numbers for each row, by the mean of `error` over them. The metrics are `mse`, `mae` and `r2`."""

    width: int
    error: Error = "mse"

    lower = ("loss", "mse", "mae")

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(f"{name}_{place}" for name in ("target", "output") for place in range(self.width))

    def checked(self, label: np.ndarray, part: str) -> np.ndarray:
        if label.ndim != 2 or label.shape[1] != self.width or label.dtype.kind != "f":
            raise ValueError(
                f"{part} must have {self.width} numbers for each row in column label, got {label.dtype} of shape "
                f"{label.shape}; give floats of shape (rows, {self.width})"
            )
        check_finite(label, part, "label")
        return label

    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        outputs = wide(outputs)
        return ERRORS[self.error](outputs, label.to(outputs.dtype), reduction="none").mean(-1)

    def report(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        outputs = wide(outputs)
        apart = outputs - label.to(outputs.dtype)
        return {"loss": self.losses(outputs, label), "mse": apart.square().mean(-1), "mae": apart.abs().mean(-1)}

    def unreduced(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.whole, (*label.unbind(-1), *wide(outputs).unbind(-1)), strict=True))

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """R², the mean over the numbers of a row of 1 - (sum of squared errors) / (sum of squared distances from the
        mean); empty if one of them is the same in all rows."""
        found = []
        for place in range(self.width):
            if f"target_{place}" not in columns:
                return {}
            target, output = (columns[f"{name}_{place}"].astype(np.float64) for name in ("target", "output"))
            spread = float(np.square(target - target.mean()).sum())
            if not spread:
                return {}
            found.append(1 - float(np.square(output - target).sum()) / spread)
        return {"r2": float(np.mean(found))}


@dataclass(frozen=True)
class SeveralLabels(Objective):
    """Any of `labels` labels for each row, by the mean of their binary cross-entropies. The metrics are `accuracy`, the
    share of labels that are right, `exact`, the share of rows whose labels are all right, and `f1`, over all labels of
    all rows (micro)."""

    labels: int

    whole = ("hits", "given", "taken")

    def checked(self, label: np.ndarray, part: str) -> np.ndarray:
        if label.ndim != 2 or label.shape[1] != self.labels or not np.isin(label, (0, 1)).all():
            raise ValueError(
                f"{part} must have {self.labels} numbers 0 or 1 for each row in column label, got {label.dtype} of "
                f"shape {label.shape}; give a mark for each label"
            )
        return label

    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        outputs = wide(outputs)
        return F.binary_cross_entropy_with_logits(outputs, label.to(outputs.dtype), reduction="none").mean(-1)

    def report(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        right = ((outputs > 0) == (label > 0)).to(wide(outputs).dtype)
        return {"loss": self.losses(outputs, label), "accuracy": right.mean(-1), "exact": right.amin(-1)}

    def unreduced(self, outputs: Tensor, label: Tensor) -> dict[str, Tensor]:
        taken, given = outputs > 0, label > 0
        return {"hits": (taken & given).sum(-1), "given": given.sum(-1), "taken": taken.sum(-1)}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """F1; empty if no row has a label and none is given one."""
        if not columns:
            return {}
        hits, given, taken = (float(columns[name].sum(dtype=np.float64)) for name in self.whole)
        return {"f1": 2 * hits / (given + taken)} if given + taken else {}
