"""What a workload is: data split over clients, a model's initial tensors, a loss, and what to report.

A new data set is one short file: a frozen dataclass on `Classification` with `load`, or on `Workload` with everything.
Losses and reports are written for one client's batch and return one number per example; the engine averages them, so
that padded rows cost nothing and clients can be vectorised. The rules of vectorised code hold in `losses`: pure,
nothing in place, no branch on values, randomness only from `batch["key"]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F

from . import counted
from .cells import check_finite, labels_of
from .metrics import auc

Columns = Mapping[str, np.ndarray]
"""name -> (n, ...) arrays of equal n: one row an example."""

Params = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]
"""A batch's columns, (B, ...), and "key", () int64: this step's source of randomness (see `counted`). Where clients of
a block have short batches also "weight", (B,): each example's part of the mean loss, 0 for padding."""


HELD_OUT = "held_out"
"""A column of training rows, (n,) bool: rows that the client who has them keeps for testing. No batch sees it."""


class ClientIndex(NamedTuple):
    """Who has which rows of the training set: client i has rows[offsets[i] : offsets[i + 1]].

    `held`: the rows that each client has but does not train on, its own test set; None where there are none.
    """

    offsets: np.ndarray  # (N + 1,) int64
    rows: np.ndarray  # int64
    held: ClientIndex | None = None

    @staticmethod
    def of(clients: list[np.ndarray]) -> ClientIndex:
        sizes = [len(rows) for rows in clients]
        return ClientIndex(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.concatenate(clients).astype(np.int64)
        )

    @staticmethod
    def equal(rows: np.ndarray, clients: int) -> ClientIndex:
        """`rows` in their order, in equal parts; the first ones have one more where they do not divide."""
        each, more = divmod(len(rows), clients)
        places = np.arange(clients + 1, dtype=np.int64)
        return ClientIndex(places * each + np.minimum(places, more), rows.astype(np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """(N,) examples per client."""
        return np.diff(self.offsets)

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        """(c,) examples of some clients, whatever their number in all."""
        return self.offsets[clients + 1] - self.offsets[clients]


class Split(NamedTuple):
    train: Columns
    test: Columns
    client_index: ClientIndex


class Partition(ABC):
    """A rule that deals training rows to clients."""

    table: ClassVar[str] = "PARTITIONS"
    column: ClassVar[str] = "label"
    """What `deal` goes by; a column "client", where a set has one, says whose a row is by nature."""

    @abstractmethod
    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        """labels: (n,) class (or what `column` names) of each training row. The same seed deals the same rows."""


class Model(ABC):
    """A recipe of a network: settings only."""

    table: ClassVar[str] = "MODELS"

    @abstractmethod
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for inputs of `shape` (channels, height, width) and logits (B, classes)."""


class Chained(NamedTuple):
    """A loss that is the cross-entropy of `network(inputs)` and the column "label". `shape`: of an example's input;
    `inputs`: (batch, dtype) -> (B, *shape), from the column "input" alone, each example by itself."""

    network: nn.Module
    shape: tuple[int, ...]
    inputs: Callable[[Batch, torch.dtype], Tensor]


class Workload(ABC):
    table: ClassVar[str] = "WORKLOADS"

    def check(self) -> None:  # noqa: B027 nothing to check unless a workload says so
        """Raise ValueError, quickly, where the data cannot be had; called before anything is started."""

    @abstractmethod
    def split(self, seed: int, clients: int) -> Split: ...

    @abstractmethod
    def init(self, seed: int) -> dict[str, Tensor]:
        """The model's initial tensors, by name."""

    @abstractmethod
    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,): the loss of each example."""

    @abstractmethod
    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """Metrics of test examples, each (B,); the report of a test set is their mean, but for those in `whole`."""

    def trial(self, p: Params, batch: Batch) -> object:
        """One forward pass of training, with the batch's "key". The engine watches it before round 1, to refuse modules
        that draw from global generators; what it returns is not used."""
        return self.losses(p, batch)

    may_be_missing: tuple[str, ...] = ()
    """Columns whose NaN or infinite entries have a meaning to `losses`; all others are refused if they have any."""

    def check_split(self, split: Split, most: float) -> None:
        """Raise ValueError where a column of the training or test rows holds what no model can use: NaN, infinity, or
        numbers larger than `most`, the largest of the type that the run computes in."""
        for part, columns in (("the training set", split.train), ("the test set", split.test)):
            for name, column in columns.items():
                if name not in self.may_be_missing:
                    check_finite(column, part, name, most)

    whole: tuple[str, ...] = ()
    """Columns of the report that are not averaged but seen whole by `summary`, as a ranking has to be."""

    buffers: tuple[str, ...] = ()
    """Those of `init`'s tensors that are running statistics: no method sees them. The gradient of `losses` at one is
    what it was less what it becomes, so that a plain step of size one moves it; the server averages them."""

    chained: Chained | None = None
    """Where `losses` is the cross-entropy of a network's logits, nothing else: the engine may compute it otherwise."""

    lower: tuple[str, ...] = ("loss",)
    """Metrics that are better when they are lower: it decides which clients are worst off."""

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """What no mean over examples gives, from the report's means and the `whole` columns (n,) of all n test rows in
        their order; added to the report of a test set."""
        return {}


NO_LABEL = -(1 << 63)
"""What no label is. torch would pass over -100 without a word, and in a block it would not."""


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """(B,) from logits (B, classes) and labels (B,) of any integer type; of bfloat16 in float32, whose digits a softmax
    needs. Raises IndexError (of a block under vmap RuntimeError) for a label that is no class."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    label = label if label.dtype == torch.int64 or label.is_floating_point() else label.long()
    if not is_batchedtensor(logits):
        return F.cross_entropy(logits, label, reduction="none", ignore_index=NO_LABEL)
    # Under vmap torch takes its own apart in Python, and loads sympy for it.
    return -F.log_softmax(logits, -1).gather(-1, label.unsqueeze(-1)).squeeze(-1)


class Keyed(nn.Module):
    """A module that is random while training: it draws from `key`, a tensor (), and does not where that is None."""

    key: Tensor | None = None


class Running(nn.Module):
    """A module with running statistics: buffers, averaged by the server as the model is, that testing goes by.

    While `training` it goes by the batch, each example by its `share` (B,) of it (alike where that is None), and leaves
    in `moved` what its buffers become.
    """

    training: bool
    share: Tensor | None = None
    moved: Mapping[str, Tensor]


def buffers_of(module: nn.Module) -> tuple[str, ...]:
    """The names of running statistics."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ValueError(
                f"running statistics must be of workloads.norms.BatchNorm, which the server averages, got torch's in "
                f"{name}; use that one, or track_running_stats=False"
            )
    return tuple(name for name, _, _ in statistics(module))


def statistics(module: nn.Module) -> list[tuple[str, Running, str]]:
    """(full name, owner, name there) of each."""
    owners = [(f"{name}." if name else "", part) for name, part in module.named_modules() if isinstance(part, Running)]
    return [(name + leaf, part, leaf) for name, part in owners for leaf in part._buffers]


class Stateless:
    """A module as a function of its parameters and running statistics: `call(p, x)`.

    It puts the tensors where the module's parameters are. `torch.func.functional_call` does the same with more checks,
    and costs 40 to 90 microseconds a call on LeNet, 4 to 8 % of a local step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        self.slots = [
            (f"{prefix}.{leaf}" if prefix else leaf, owner._parameters, leaf)
            for prefix, owner in module.named_modules()
            for leaf, value in owner._parameters.items()
            if value is not None
        ]
        self.random = [part for part in module.modules() if isinstance(part, Keyed)]
        self.running = statistics(module)
        self.slots += [(name, owner._buffers, leaf) for name, owner, leaf in self.running]

    def __call__(self, p: Params, x: Tensor, key: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        """`key`: of what is random in training, None in evaluation, which also is the module's mode, train() or eval();
        `share`: (B,), see `Running`."""
        if self.module.training != (key is not None):
            self.module.train(key is not None)
        for name, parameters, leaf in self.slots:
            parameters[leaf] = p[name]  # pyright: ignore[reportArgumentType] torch runs on plain tensors too
        for number, part in enumerate(self.random):
            part.key = None if key is None else counted.key(key, "module", number)
        for _, part, _ in self.running:
            part.share = share
        return self.module(x)

    def drift(self, p: Params) -> Tensor:
        """0, with a gradient: at each buffer, what it was less what the last call makes of it."""
        moves = [(p[name], part.moved[leaf]) for name, part, leaf in self.running]
        total = torch.stack([((old - new).detach() * old).sum() for old, new in moves]).sum()
        return total - total.detach()


def initial(build: Any, seed: int) -> nn.Module:
    """Build a module on the CPU with weights from the seed, torch's global random states left as they were."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int(counted.key(seed, "init")))  # torch.manual_seed reseeds GPUs too
        return build()


@dataclass(frozen=True)
class Classification(Workload):
    """Images (or vectors) with labels, cross-entropy, accuracy. A data set fills `load` and the class constants.

    `mean`, `std`: per channel, applied to inputs scaled to [0, 1] where they are stored as bytes.
    """

    model: Model
    partition: Partition

    classes: ClassVar[int]
    shape: ClassVar[tuple[int, ...]]
    mean: ClassVar[tuple[float, ...]] = (0.0,)
    std: ClassVar[tuple[float, ...]] = (1.0,)

    def build(self) -> nn.Module:
        return self.model.build(self.shape, self.classes)

    def check(self) -> None:
        _ = self.buffers

    @cached_property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch.device("meta"):
            return buffers_of(self.build())

    @abstractmethod
    def load(self) -> tuple[Columns, Columns]:
        """(train, test), each with "input" (n, *shape), bytes or floats, and "label" (n,) int64."""

    def split(self, seed: int, clients: int) -> Split:
        train, test = (
            {**columns, "label": labels_of(columns["label"], self.classes, part)}
            for part, columns in zip(("the training set", "the test set"), self.load(), strict=True)
        )
        column = self.partition.column
        if column not in train:
            raise ValueError(f"the partition goes by a column {column!r}, got a data set with {', '.join(train)}")
        client_index = self.partition.deal(train[column], clients, seed)
        train, test = ({k: v for k, v in columns.items() if k != "client"} for columns in (train, test))
        return Split(train, test, client_index)

    def check_split(self, split: Split, most: float) -> None:
        super().check_split(split, most)
        for part, columns in (("the training set", split.train), ("the test set", split.test)):
            labels_of(columns["label"], self.classes, part)

    def init(self, seed: int) -> dict[str, Tensor]:
        module = initial(self.build, seed)
        buffers = {name: module.get_buffer(name) for name in self.buffers}
        return {name: value.detach().clone() for name, value in [*module.named_parameters(), *buffers.items()]}

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone: `network` keeps tensors of its last call, and those of a vectorised one do not pickle."""
        return {name: value for name, value in self.__dict__.items() if name != "network"}

    @cached_property
    def network(self) -> Stateless:
        """Built in a thread of its own: its first use may be in vectorised code, where weights cannot be drawn."""
        with ThreadPoolExecutor(1) as apart:
            return Stateless(apart.submit(initial, self.build, 0).result())

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """(B, *shape), normalised."""
        x = batch["input"]
        x = x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype)
        if self.mean == (0.0,) and self.std == (1.0,):
            return x
        channels = (-1,) + (1,) * (len(self.shape) - 1)
        mean = torch.tensor(self.mean, dtype=dtype, device=x.device).view(channels)
        std = torch.tensor(self.std, dtype=dtype, device=x.device).view(channels)
        return (x - mean) / std

    def logits(self, p: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        return self.network(p, self.inputs(batch, next(iter(p.values())).dtype), key, batch.get("weight"))

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = cross_entropy(self.logits(p, batch, batch.get("key")), batch["label"])
        return losses + self.network.drift(p) if self.buffers and "key" in batch else losses

    def trial(self, p: Params, batch: Batch) -> object:
        return self.logits(p, batch, batch.get("key"))

    @property
    def overridden(self) -> list[str]:
        """Which of the functions that make the loss are not this class's own."""
        names = ("losses", "logits", "inputs", "network")
        return [
            name
            for name in names
            if getattr(type(self), name) is not getattr(Classification, name)
            or (name != "network" and name in vars(self))
        ]

    @property
    def chained(self) -> Chained | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.overridden else Chained(self.network.module, self.shape, self.inputs)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        logits, label = self.logits(p, batch), batch["label"]
        loss = cross_entropy(logits, label)
        columns = {"loss": loss, "accuracy": (logits.argmax(-1) == label).to(loss.dtype)}
        if self.whole:
            columns |= {"score": logits[:, 1] - logits[:, 0], "label": label}  # rises with the softmax's probability
        return columns

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("score", "label") if self.classes == 2 else ()

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """The area under the ROC curve where there are two classes, and test rows of both."""
        if not columns or len(set(columns["label"].tolist())) < 2:
            return {}
        return {"auc": auc(columns["score"], columns["label"] == 1)}
