"""The contract of a workload: the data of every client, the initial model, the loss, and the reported metrics.

A new data set is one short file: a frozen dataclass that extends `Classification` and defines `load`, or one that
extends `Workload` and defines all four of its abstract methods. Losses and reports are written for the batch of one
client and return one number per example. The engine averages these numbers, so padded examples do not count and the
clients of a block can be vectorised. `losses` must follow the rules of vectorised code: it is a pure function, writes
nothing in place, does not branch on the values of tensors, and draws random numbers from `batch["key"]` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .client_index import ClientIndex
from .files.cells import check_finite
from .models.stored import StoredTensors
from .pair import Pair

PASS_OVER: ContextVar[bool] = ContextVar("PASS_OVER", default=False)
"""Whether losses may pass over padded places of sequences, for which they branch on the values of a mask. The engine
sets it for kernels that are proven on the data of the run."""

WITHOUT_WEIGHTS: ContextVar[bool] = ContextVar("WITHOUT_WEIGHTS", default=False)
"""Whether a network is built for a run that puts all of its parameters in, so that it need not read or draw them."""

WITHOUT_STORED: ContextVar[bool] = ContextVar("WITHOUT_STORED", default=False)
"""Whether a network is built for those of its parameters that `Model.stored` lacks, so that it need not read others."""


_notes: list[str] = []


def note(line: str) -> None:
    """Add a line to the log of the run that loads its data now."""
    _notes.append(line)


def taken_notes() -> list[str]:
    """The lines of `note` since the last call."""
    lines, _notes[:] = list(_notes), []
    return lines


Columns = Mapping[str, np.ndarray]
"""name -> array of shape (n, ...); n is the same for all columns, and each row is one example."""


Params = Mapping[str, Tensor]
"""name -> tensor: the parameters of the model, trained and frozen, and, where it has any, its running statistics."""


Batch = Mapping[str, Tensor]
"""The columns of one batch, each (B, ...), under their names in `Columns`.

A training batch has two more entries. "key", () int64, is the source of randomness of this client and this step (see
`counted`). "weight", (B,), is present where some client of the block has a short batch: the weight of each example in
the mean loss; the weights sum to 1, and padded examples have weight 0. A batch for `report` has neither.
"""


HELD_OUT, VALIDATION = "held_out", "validation"
"""Names of optional training columns, (n,) bool: true in rows that their client keeps for testing, and in rows by which
settings are chosen. Their clients do not train on either. The engine removes the columns before batches are made."""


class Split(NamedTuple):
    """The data of a run.

    `train`: the columns of all training rows; a batch is made of rows of all these columns. `test`: the columns of the
    test rows, which belong to no client; they may differ from those of `train`, unless the run evaluates on the
    clients' own rows. `client_index`: the training rows of each client; every client must have at least one.
    """

    train: Columns
    test: Columns
    client_index: ClientIndex

    @property
    def named(self) -> tuple[tuple[str, Columns], tuple[str, Columns]]:
        """The columns of the training and of the test rows, each with its name for messages."""
        return (TRAINING_SET, self.train), (TEST_SET, self.test)


TRAINING_SET, TEST_SET = "the training set", "the test set"


class Partition(ABC):
    """A rule that assigns training rows to clients. A subclass is a frozen dataclass of settings."""

    table: ClassVar[str] = "PARTITIONS"
    column: ClassVar[str] = "label"
    """The training column that `deal` gets. A data set whose rows belong to natural clients (writers, users) has their
    numbers in the column "client"."""
    by_class: ClassVar[bool] = True
    """Whether `deal` reads the labels as classes. Rows whose labels are numbers, or several at once, have none."""

    @abstractmethod
    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        """The rows of each of `clients` clients. `Classification.split` calls it.

        `labels`: (n,) the entries of `column` in the training rows. The result follows from the arguments alone:
        randomness comes from `counted.numpy_generator(seed, ...)`. Raises ValueError where a client would have no row.
        """


class Model(ABC):
    """A recipe for a network. A subclass is a frozen dataclass of settings and holds no tensors."""

    table: ClassVar[str] = "MODELS"

    @abstractmethod
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A new module that maps inputs (B, *shape) to logits (B, classes), or to as many numbers in a regression.
        `shape` is (channels, height, width) for images and (length, width of a vector) for texts.

        Initial weights are drawn from torch's global generator, which the caller seeds. The caller replaces torch's
        BatchNorm, Dropout and their like (`models.convert`); otherwise the module must run under `torch.func.vmap`:
        nothing in place, `Keyed` modules for random layers, `norms.BatchNorm` for running statistics.
        Raises ValueError for a shape that the network cannot take.
        """

    def files(self) -> Mapping[str, Path]:
        """The files that initial weights are read from, by names as in `Workload.data_files`."""
        return {}

    of_package: bool = False
    """See `Workload.of_package`."""

    def stored(self, shape: tuple[int, ...], classes: int) -> StoredTensors | None:
        """The parameters of `build(shape, classes)` that are in files, by name, each read when it is asked for: so a
        large network is never twice in memory. None where `build` has to make them."""
        return None

    def published(self, shape: tuple[int, ...], classes: int, p: Params) -> dict[str, Any]:
        """The model in files that other packages read: name of a file -> a mapping of JSON, the bytes of the file, or
        name -> tensor. p: all parameters of `build(shape, classes)`. Raises ValueError where there is no such form."""
        raise ValueError(f"{type(self).__name__.lower()} has no form that other packages read; export its tensors")


class Adapter(ABC):
    """A recipe for what is trained beside the frozen tensors of a network. A subclass is a frozen dataclass of settings
    and holds no tensors."""

    table: ClassVar[str] = "ADAPTERS"

    keeps_weights: bool = False
    """Whether `adapt` leaves the numbers of the network's parameters as they are."""

    @abstractmethod
    def adapt(self, network: nn.Module) -> None:
        """Change a network in place: its parameters are frozen (`requires_grad_(False)`), and modules get further ones,
        which are trained. The network may be on the device "meta"; names of its tensors stay. Raises ValueError for a
        network that cannot be adapted."""

    @abstractmethod
    def initial(self, network: nn.Module, seed: int) -> dict[str, Tensor]:
        """The initial values of the parameters that `adapt` has added, name -> tensor on the CPU, drawn by keys of
        `counted` from the seed alone, or read from `files`, where there may be others that are trained, too. network:
        after `adapt`, on any device."""

    def files(self) -> Mapping[str, Path]:
        """The files that tensors are read from, by names as in `Workload.data_files`."""
        return {}

    def stored(self, network: nn.Module) -> StoredTensors | None:
        """The parameters of the network that `adapt` reads from a file, where it does not keep their numbers; None
        where they are not in one. network: after `adapt`, on any device."""
        return None

    def pairs(self, network: nn.Module) -> tuple[Pair, ...]:
        """The weights with factors beside them, in the order of the network. network: after `adapt`, on any device."""
        return ()

    @abstractmethod
    def merged(self, network: nn.Module, p: Params) -> dict[str, Tensor]:
        """The tensors of a network without what `adapt` adds, which computes the same. network: after `adapt`, on any
        device; p: all of its tensors. Raises ValueError where there is none."""

    @abstractmethod
    def written(self, network: nn.Module, p: Params) -> dict[str, Any]:
        """What `adapt` adds, in the files of the package peft: name of a file -> a mapping of JSON, or name -> tensor.
        The arguments are those of `merged`. Raises ValueError where peft has no such adapter."""


class Chained(NamedTuple):
    """Says that the loss is the cross-entropy of `network(inputs)` and the column "label", and nothing else.

    `shape`: the shape of one input. `inputs`: function (batch, dtype) -> (B, *shape), which reads the column "input"
    alone and treats each example by itself. `report`: function (outputs (B, classes), batch) -> what `Workload.report`
    gives for them; None where that follows from something else, too.
    """

    network: nn.Module
    shape: tuple[int, ...]
    inputs: Callable[[Batch, torch.dtype], Tensor]
    report: Callable[[Tensor, Batch], dict[str, Tensor]] | None = None


class Workload(ABC):
    """A learning problem: data, initial model, loss and metrics. A subclass is a frozen dataclass of settings.

    The engine calls the methods in this order. `check`, in the process that starts the run. `split`, in the process of
    the driver, whose columns are then shared with all workers. `init`, in the driver and in every worker. `losses`, in
    the workers, once for every gradient that the method asks for in a local step, for one client or vectorised over a
    block of clients, and where a sampler asks for the loss of a model, with modules in `eval()`. `report`, in the
    workers, at every evaluation, on slices of the test rows; then `summary`, in the driver, once for every evaluation.

    Workloads are pickled and sent to the workers, so they must not hold data or tensors.
    """

    table: ClassVar[str] = "WORKLOADS"

    def check(self) -> None:  # noqa: B027 most workloads have nothing to check
        """Raise ValueError if the data are not available. It must return quickly: nothing has been started yet."""

    def seeded(self, seed: int) -> Workload:
        """The workload of a run with this seed, whose `losses` and `report` have no other way to know it."""
        return self

    @property
    def constants_seed(self) -> int | None:
        """The seed that tensors of the network follow from which are neither parameters nor running statistics, such as
        a buffer that it draws; None where it has none. Only runs in which it is equal are trained as one."""
        return None

    def data_files(self) -> Mapping[str, Path]:
        """The files that the data and the model are read from, by names that do not depend on where they lie. A run
        records their digests. Raises ValueError if there are none, as `check` does."""
        return {}

    @abstractmethod
    def split(self, seed: int, clients: int) -> Split:
        """The data of a run with `clients` clients. The result follows from the settings and the arguments alone;
        `seed` is the seed of the run."""

    def prepared(self, split: Split) -> Split:
        """The split with columns that follow from the rows that clients train on. It is called once, when the rows that
        clients hold out and those for validation are known, and leaves the rows of the clients as they are."""
        return split

    @abstractmethod
    def init(self, seed: int) -> dict[str, Tensor]:
        """The initial model, name -> tensor on the CPU, without its frozen tensors. The same seed must give the same
        tensors in every process. The engine converts them to the run's dtype."""

    def frozen(self, seed: int) -> dict[str, Tensor]:
        """The frozen tensors of the model, name -> tensor on the CPU. They are constants of the run: they are neither
        trained nor sent, methods do not see them, and no client has a copy of its own.

        Their names are none of those of `init`. `losses`, `trial` and `report` get them beside the other tensors, in
        the same dtype. The same seed must give the same tensors in every process.
        """
        return {}

    def stored(self) -> StoredTensors | None:
        """The parameters that are in files, by name; None where the workload has to make some."""
        return None

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The frozen weights with trained factors of low rank beside them; () without adapters."""
        return ()

    @abstractmethod
    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,): the loss of each example of a training batch of one client, with a gradient in the tensors of `p` that
        `init` has.

        `p` is in the run's dtype; the columns of `batch` have the types of `Split.train`. The engine computes the mean,
        with the batch's weights where it has them, and with those of `row_weights`.
        """

    @abstractmethod
    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """name -> (B,): the metrics of each example of a batch of test rows. What is recorded for a test set is the
        mean over all of its examples, with their `row_weights`, except for the columns that `whole` names. Modules are
        in `eval()`."""

    def row_weights(self, batch: Batch) -> Tensor | None:
        """(B,) w >= 0: how much each row of a batch counts, such as the number of targets of a text; None where all
        rows count alike. They follow from the columns of the row alone.

        The mean of losses l is sum(w l) / max(sum(w), 1): in a local step over the rows of a client's batch, also where
        it is taken in parts, and in evaluations over all rows of the test set or of a client. The columns of the report
        are averaged in the same way.
        """
        return None

    def targets(self, columns: Columns) -> np.ndarray | None:
        """(n,) whole numbers: how many targets each row of these columns has, such as the tokens of a text that are
        predicted, by which `federation.weights: tokens` weighs clients; None where rows are not counted so."""
        return None

    def client_names(self) -> tuple[str, ...]:
        """The names of the data set's natural clients, in the order of their numbers in the column "client"; () where
        these numbers alone are known."""
        return ()

    def trial(self, p: Params, batch: Batch) -> object:
        """One forward pass of training, on a batch with a "key". The engine runs it before round 1 and refuses modules
        that draw from global generators. The result is not used. Raises UnfitOutput for a
        network whose output does not fit."""
        return self.losses(p, batch)

    may_be_missing: tuple[str, ...] = ()
    """Columns in which NaN and infinity have a meaning to `losses`. In every other column they are refused."""

    def check_split(self, split: Split, most: float) -> None:
        """Raise ValueError if a training or test column holds NaN, infinity, or a number larger than `most`, which is
        the largest number of the run's dtype."""
        for part, columns in split.named:
            for name, column in columns.items():
                if name not in self.may_be_missing:
                    check_finite(column, part, name, most)

    whole: tuple[str, ...] = ()
    """Columns of the report that are not averaged: `summary` gets all of their entries, for example for a ranking."""

    buffers: tuple[str, ...] = ()
    """The tensors of `init` that are running statistics. Methods do not see them, and the server averages them. The
    gradient of `losses` at a buffer must be its old value minus its new one, so that a plain gradient step of size 1
    gives the new value."""

    chained: Chained | None = None
    """Set where `losses` is nothing but the cross-entropy of a network's logits, and rows have no weights; the engine
    may then compute the loss with a fused kernel."""

    outline: nn.Module | None = None
    """The network without its numbers, on the device "meta", where the workload has one."""

    outline_input: tuple[int, ...] | None = None
    """The shape of one input of `outline`, where one call of it is all that a loss computes, besides what costs little.
    """

    casts_up: bool = False
    """Whether floats of `frozen` may be given to losses and reports in a narrower type than the other tensors, since
    the network casts them up where it uses them."""

    of_package: bool = False
    """Whether the code of the network is a package's. Where it cannot be vectorised, clients then train one after the
    other, unless `engine.vectorise` is given; the user's own code is refused with its line."""

    training_rows: int | None = None
    """The number of training rows, where it is known before they are read."""

    def facts_of_data(self) -> Any:
        """What the model depends on and only the data say, as plain data, such as the shape of an input; None where the
        settings say all. The process that starts a run reads it, and workers get it by `take_facts`: their machines
        need not have the files."""
        return None

    def take_facts(self, facts: Any) -> None:  # noqa: B027 most workloads need none
        """Use what `facts_of_data` gave in another process, in the place of reading it."""

    converted: str = ""
    """Which modules of torch were replaced in the network, in one line for the log; "" for none."""

    lower: tuple[str, ...] = ("loss",)
    """Metrics of which lower values are better. This decides which clients count as the worst."""

    def differences(self, seed: int, clients: int) -> dict[str, np.ndarray]:
        """name -> (clients,) numbers: how clients differ besides the rows that they have, for `fedfleet partition`."""
        return {}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """Metrics that are not means over examples; they are recorded beside the means.

        `means`: the recorded means of the report. `columns`: those columns of the report that `whole` names, each (n,),
        for all n test rows in their order.
        """
        return {}

    def summary_of_clients(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Metrics that follow from the means of the report over the rows of each client, for the table of clients.
        means: name -> (c,), NaN for a client without it; the results are alike."""
        return {}


class UnfitOutput(ValueError):
    """A network gives something that its loss cannot be computed from."""
