"""The base classes of workloads: the data of every client, the initial model, the loss, and the reported metrics.

A new data set is one short file: a frozen dataclass that extends `Classification` and defines `load`, or one that
extends `Workload` and defines all four of its abstract methods. Losses and reports are written for the batch of one
client and return one number per example. The engine averages these numbers, so padded examples do not count and the
clients of a block can be vectorised. `losses` must follow the rules of vectorised code: it is a pure function, writes
nothing in place, does not branch on the values of tensors, and draws random numbers from `batch["key"]` alone.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from . import counted
from .files.cells import check_finite, labels_of
from .metrics import auc

PASS_OVER: ContextVar[bool] = ContextVar("PASS_OVER", default=False)
"""Whether losses may pass over padded places of sequences, for which they branch on the values of a mask. The engine
sets it for kernels that are proven on the data of the run."""

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


HELD_OUT = "held_out"
"""Name of an optional training column, (n,) bool: true in rows that their client keeps for testing. The engine removes
the column before batches are made."""


class ClientIndex(NamedTuple):
    """Which rows of the training set each of the N clients has.

    `offsets`: (N + 1,) int64, ascending from 0. `rows`: (offsets[N],) int64, row numbers of the training columns.
    Client i has rows[offsets[i] : offsets[i + 1]]. No row belongs to two clients, and a row that belongs to none is not
    used. `held`: the index of the rows that each client has but does not train on, which are its own test set, or None.
    The engine sets it; a partition leaves it out.
    """

    offsets: np.ndarray
    rows: np.ndarray
    held: ClientIndex | None = None

    @staticmethod
    def of(clients: list[np.ndarray]) -> ClientIndex:
        """The index of a list with the row numbers of each client, (n_i,) integers."""
        sizes = [len(rows) for rows in clients]
        return ClientIndex(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.concatenate(clients).astype(np.int64)
        )

    @staticmethod
    def equal(rows: np.ndarray, clients: int) -> ClientIndex:
        """`rows`, (n,) integers, cut in their order into `clients` parts of equal size. Where n is not divisible, the
        first parts have one row more."""
        each, more = divmod(len(rows), clients)
        places = np.arange(clients + 1, dtype=np.int64)
        return ClientIndex(places * each + np.minimum(places, more), rows.astype(np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """(N,) int64: the number of examples of every client."""
        return np.diff(self.offsets)

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        """(c,) int64: the number of examples of the given clients, (c,) integers."""
        return self.offsets[clients + 1] - self.offsets[clients]


def check_index(index: Any, rows: int) -> None:
    """Raise ValueError unless `index` is a ClientIndex of a training set with this number of rows."""
    if not isinstance(index, ClientIndex):
        raise ValueError(
            f"a partition must return a ClientIndex, got {type(index).__name__}; return ClientIndex.of(rows "
            "of each client)"
        )
    for name, values in (("offsets", index.offsets), ("rows", index.rows)):
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
            got = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ValueError(f"{name} of a ClientIndex must be whole numbers of shape (n,), got {got}; convert them")
    offsets, dealt = index.offsets, index.rows
    if not len(offsets) or offsets[0] or offsets[-1] != len(dealt) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"offsets of a ClientIndex must ascend from 0 to the number of its rows, {len(dealt)}, got "
            f"{np.array2string(offsets, threshold=8)}; ClientIndex.of makes them"
        )
    wrong = dealt[(dealt < 0) | (dealt >= rows)]
    if len(wrong):
        raise ValueError(
            f"0 <= row < {rows} must hold, the number of training rows, for the rows of a ClientIndex, got {wrong[0]}; "
            "give row numbers of the training set"
        )
    seen = np.zeros(rows, dtype=bool)
    seen[dealt] = True
    if np.count_nonzero(seen) < len(dealt):
        check_owners(index)


def check_owners(index: ClientIndex) -> None:
    """Raise ValueError if a row belongs to two clients. Some row is there twice."""
    dealt = index.rows.astype(np.int64)
    again = np.bincount(dealt)[dealt] > 1
    row, owner = dealt[again], np.repeat(np.arange(len(index.sizes)), index.sizes)[again]
    order = np.lexsort((owner, row))
    row, owner = row[order], owner[order]
    shared = np.flatnonzero((row[1:] == row[:-1]) & (owner[1:] != owner[:-1]))
    if len(shared):
        at = shared[0]
        raise ValueError(
            f"no row may belong to two clients, got row {row[at]} of the clients {owner[at]} and {owner[at + 1]}; give "
            "it to one of them"
        )


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
        """A new module that maps inputs (B, *shape) to logits (B, classes). `shape` is (channels, height, width) for
        images and (length, width of a vector) for texts.

        Initial weights are drawn from torch's global generator, which the caller seeds. The module must run under
        `torch.func.vmap`: nothing in place, `Keyed` modules for random layers, `norms.BatchNorm` for batch norm.
        Raises ValueError for a shape that the network cannot take.
        """


class Chained(NamedTuple):
    """Says that the loss is the cross-entropy of `network(inputs)` and the column "label", and nothing else.

    `shape`: the shape of one input. `inputs`: function (batch, dtype) -> (B, *shape), which reads the column "input"
    alone and treats each example by itself.
    """

    network: nn.Module
    shape: tuple[int, ...]
    inputs: Callable[[Batch, torch.dtype], Tensor]


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

    @abstractmethod
    def split(self, seed: int, clients: int) -> Split:
        """The data of a run with `clients` clients. The result follows from the settings and the arguments alone;
        `seed` is the seed of the run."""

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

    @abstractmethod
    def losses(self, p: Params, batch: Batch) -> Tensor:
        """(B,): the loss of each example of a training batch of one client, with a gradient in the tensors of `p` that
        `init` has.

        `p` is in the run's dtype; the columns of `batch` have the types of `Split.train`. The engine computes the mean,
        with the batch's weights where it has them.
        """

    @abstractmethod
    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """name -> (B,): the metrics of each example of a batch of test rows. What is recorded for a test set is the
        mean over all of its examples, except for the columns that `whole` names. Modules are in `eval()`."""

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
    """Set where `losses` is nothing but the cross-entropy of a network's logits; the engine may then compute the loss
    with a fused kernel."""

    outline: nn.Module | None = None
    """The network without its numbers, on the device "meta", where the workload has one."""

    lower: tuple[str, ...] = ("loss",)
    """Metrics of which lower values are better. This decides which clients count as the worst."""

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """Metrics that are not means over examples; they are recorded beside the means.

        `means`: the recorded means of the report. `columns`: those columns of the report that `whole` names, each (n,),
        for all n test rows in their order.
        """
        return {}


class UnfitOutput(ValueError):
    """A network gives something that its loss cannot be computed from."""


def check_logits(logits: object) -> object:
    """The output of a network for a batch. Raises UnfitOutput unless it is one tensor."""
    if isinstance(logits, Tensor):
        return logits
    got = type(logits).__name__
    if isinstance(logits, tuple | list):
        got += f" of {', '.join(type(part).__name__ for part in logits)}"
    elif isinstance(logits, Mapping):
        got += f" with {', '.join(map(str, logits))}"
    raise UnfitOutput(
        f"the network must return one tensor of logits, (B, classes), got a {got}; return the logits alone, or "
        "override `logits` in the workload"
    )


NO_LABEL = -(1 << 63)
"""A number that is never a label. By default torch ignores rows of label -100, but only outside of vmap."""


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """(B,) from logits (B, classes) and labels (B,) of any integer type. Logits in bfloat16 are converted to float32,
    because a softmax needs its precision. Raises IndexError, or RuntimeError under vmap, for a label that is no class.
    """
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    label = label if label.dtype == torch.int64 or label.is_floating_point() else label.long()
    if not is_batchedtensor(logits):
        return F.cross_entropy(logits, label, reduction="none", ignore_index=NO_LABEL)
    # Under vmap torch decomposes its own function in Python, which imports sympy.
    return -F.log_softmax(logits, -1).gather(-1, label.unsqueeze(-1)).squeeze(-1)


class Keyed(nn.Module):
    """A module that is random in training. `key`: () int64, the source of its draws in this step; None in evaluation,
    where it must not draw."""

    key: Tensor | None = None


class Running(nn.Module):
    """A module with running statistics, which evaluation uses. They are buffers, and the server averages them.

    In training mode the module uses the statistics of the batch. `share`: (B,) the weight of each example in them, or
    None for equal weights. After a forward pass `moved` holds the new value of each buffer, by name; the buffers
    themselves are not written.
    """

    training: bool
    share: Tensor | None = None
    moved: Mapping[str, Tensor]


def buffers_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the module's running statistics. Raises ValueError for torch's BatchNorm modules."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ValueError(
                "running statistics must belong to fedfleet.workloads.models.norms.BatchNorm, which the server "
                f"averages, got torch's BatchNorm in {name}; replace it, or take nn.GroupNorm"
            )
    return tuple(name for name, _, _ in statistics(module))


def parameters_of(module: nn.Module) -> dict[str, tuple[nn.Parameter, list[tuple[dict[str, Any], str]]]]:
    """name -> (parameter, the places in the modules that hold it, each a dictionary and a key). A parameter that is
    tied to another one is there once, under the first of its names in the order of `named_parameters`."""
    names: dict[nn.Parameter, str] = {}
    found: dict[str, tuple[nn.Parameter, list[tuple[dict[str, Any], str]]]] = {}
    for prefix, owner in module.named_modules():
        for leaf, value in owner._parameters.items():
            if value is not None:
                name = names.setdefault(value, f"{prefix}.{leaf}" if prefix else leaf)
                found.setdefault(name, (value, []))[1].append((owner._parameters, leaf))
    return found


def statistics(module: nn.Module) -> list[tuple[str, Running, str]]:
    """(full name, module that owns it, name in that module) of every running statistic."""
    owners = [(f"{name}." if name else "", part) for name, part in module.named_modules() if isinstance(part, Running)]
    return [(name + leaf, part, leaf) for name, part in owners for leaf in part._buffers]


class Stateless:
    """A module as a function of its parameters and running statistics.

    A call puts the given tensors in the place of the module's parameters. `torch.func.functional_call` does the same
    with more checks, and costs 40 to 90 microseconds per call on LeNet, 4 to 8 % of a local step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        self.slots = [(name, *place) for name, (_, places) in parameters_of(module).items() for place in places]
        self.random = [part for part in module.modules() if isinstance(part, Keyed)]
        self.running = statistics(module)
        self.slots += [(name, owner._buffers, leaf) for name, owner, leaf in self.running]

    def __call__(self, p: Params, x: Tensor, key: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        """The module's output for inputs x, (B, ...). `p`: all parameters and running statistics by name; tied ones
        have the first of their names. `key`: ()
        int64, source of randomness; given in training, None in evaluation, and it sets the module's mode, train() or
        eval(). `share`: (B,), see `Running`."""
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
        """A term () of value 0 that gives every running statistic its gradient: the old value minus the one that the
        last call computed; without a gradient where the modules were in `eval()`. See `Workload.buffers`."""
        moves = [(p[name], part.moved[leaf]) for name, part, leaf in self.running if part.training]
        if not moves:
            return next(iter(p.values())).new_zeros(())
        total = torch.stack([((old - new).detach() * old).sum() for old, new in moves]).sum()
        return total - total.detach()


NETWORK: ContextVar[Callable[[nn.Module], Stateless]] = ContextVar("NETWORK", default=Stateless)
"""What makes a module a function of its tensors where a workload first needs its network. The engine sets another one
to find the gradients of the module as it was written."""


def constants(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n,): the values. They are made on the device: a copy from the processor would make the processor wait."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.cat([torch.full((1,), value, dtype=dtype, device=device) for value in values])


def initial(build: Any, seed: int) -> nn.Module:
    """The module that `build()` returns, on the CPU, with weights that follow from the seed. torch's global generators
    keep their states."""
    with Drawing(torch.Generator().manual_seed(int(counted.key(seed, "init")))), torch.device("cpu"):
        return build()


class Seeding:
    """What `torch.manual_seed` and its like find in the place of torch's global generator: the generator from which the
    calling thread draws in a context `Drawing`, the global one in all other threads."""

    def __init__(self) -> None:
        self.of_thread, self.lock, self.contexts = threading.local(), threading.Lock(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.of_thread, "generator", torch.default_generator), name)

    def count(self, change: int) -> None:
        """A context begins, 1, or ends, -1. torch has its own generator again when none is left."""
        with self.lock:
            self.contexts += change
            place: Any = torch.random
            place.default_generator = self if self.contexts else torch.default_generator


_seeding = Seeding()


class Drawing(TorchDispatchMode):
    """A context in which this thread draws from, and seeds, a generator on the CPU instead of torch's global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __enter__(self) -> Drawing:
        self.outer = getattr(_seeding.of_thread, "generator", torch.default_generator)
        _seeding.of_thread.generator = self.generator
        _seeding.count(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _seeding.count(-1)
        _seeding.of_thread.generator = self.outer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler has to pass over this class, for which every process would load it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        places = [value.device for value in args if isinstance(value, Tensor)] + [kwargs.get("device") or "cpu"]
        if any(torch.device(place).type != "cpu" for place in places):
            return func(*args, **kwargs)
        if (drawing := with_generator(func)) is not None:
            return drawing(*args, **kwargs, generator=self.generator)
        own = torch.default_generator.get_state()  # an operation like dropout has no such argument
        torch.default_generator.set_state(self.generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(own)


@lru_cache
def with_generator(operation: Any) -> Any:
    """The overload of an operation that has the same arguments and a generator; None if there is none."""
    names = [argument.name for argument in operation._schema.arguments]
    if "generator" in names:
        return operation
    for overload in map(operation.overloadpacket.__getattr__, operation.overloadpacket.overloads()):
        others = [argument.name for argument in overload._schema.arguments]
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return overload
    return None


@dataclass(frozen=True)
class Classification(Workload):
    """Inputs with labels, trained by cross-entropy. A data set defines `load` and the class constants.

    `classes`: number of classes. `shape`: shape of one input, (channels, height, width) for images. `mean`, `std`: one
    number per channel; inputs are normalised by them after bytes have been scaled to [0, 1].

    This class splits the rows by `partition`, builds `model` with weights from the seed, and reports loss and accuracy,
    with two classes also the AUC. A subclass with other inputs overrides `inputs`; one with another loss overrides
    `losses`.
    """

    model: Model
    partition: Partition

    classes: ClassVar[int]
    shape: ClassVar[tuple[int, ...]]
    mean: ClassVar[tuple[float, ...]] = (0.0,)
    std: ClassVar[tuple[float, ...]] = (1.0,)

    def build(self) -> nn.Module:
        """A new network; see `Model.build`."""
        return self.model.build(self.shape, self.classes)

    def check(self) -> None:
        _ = self.buffers

    @cached_property
    def outline(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        with torch.device("meta"):
            return self.build()

    @cached_property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return buffers_of(self.outline)

    @cached_property
    def frozen_names(self) -> tuple[str, ...]:
        """The names of the parameters that need no gradient (`requires_grad_(False)`)."""
        return tuple(name for name, (value, _) in parameters_of(self.outline).items() if not value.requires_grad)

    @abstractmethod
    def load(self) -> tuple[Columns, Columns]:
        """The columns of the training and of the test rows; `split` calls it.

        Required are "input", (n, *shape), uint8 or floats, and "label", (n,), whole numbers below `classes`. Training
        rows may also have "client", (n,), the natural client of each row, for the partition `natural`, and "held_out",
        (n,) bool, rows that their client does not train on. Other columns come to `losses` in the batch.
        """

    def split(self, seed: int, clients: int) -> Split:
        train, test = (
            {**columns, "label": labels_of(columns["label"], self.classes, part)}
            for part, columns in zip((TRAINING_SET, TEST_SET), self.load(), strict=True)
        )
        column = self.partition.column
        if column not in train:
            raise ValueError(
                f"partition: the training rows must have a column {column!r}, got the columns {', '.join(train)}; "
                "choose another partition"
            )
        client_index = self.partition.deal(train[column], clients, seed)
        check_index(client_index, len(train["label"]))
        train, test = ({k: v for k, v in columns.items() if k != "client"} for columns in (train, test))
        return Split(train, test, client_index)

    def check_split(self, split: Split, most: float) -> None:
        super().check_split(split, most)
        for part, columns in split.named:
            labels_of(columns["label"], self.classes, part)

    def init(self, seed: int) -> dict[str, Tensor]:
        module = initial(self.build, seed)
        trained = {name: value for name, (value, _) in parameters_of(module).items() if name not in self.frozen_names}
        buffers = {name: module.get_buffer(name) for name in self.buffers}
        return {name: value.detach().clone() for name, value in {**trained, **buffers}.items()}

    def frozen(self, seed: int) -> dict[str, Tensor]:
        if not self.frozen_names:
            return {}
        parameters = parameters_of(initial(self.build, seed))
        return {name: parameters[name][0].detach().clone() for name in self.frozen_names}

    def __getstate__(self) -> dict[str, Any]:
        """The settings without the modules: `network` keeps the tensors of its last call, and those of a vectorised
        call cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name not in ("network", "outline")}

    @cached_property
    def network(self) -> Stateless:
        """The network as a function of its tensors. It is built in another thread, because its first use may be under
        vmap, where weights cannot be drawn."""
        with ThreadPoolExecutor(1) as outside_vmap:
            return NETWORK.get()(outside_vmap.submit(initial, self.build, 0).result())

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """(B, *shape) in `dtype`: the normalised inputs of the network. Bytes are divided by 255 first."""
        x = batch["input"]
        x = x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype)
        if self.mean == (0.0,) and self.std == (1.0,):
            return x
        channels = (-1,) + (1,) * (len(self.shape) - 1)
        mean, std = (constants(values, dtype, x.device).view(channels) for values in (self.mean, self.std))
        return (x - mean) / std

    def logits(self, p: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        """(B, classes). `key`: the batch's key in training, None in evaluation."""
        return self.network(p, self.inputs(batch, next(iter(p.values())).dtype), key, batch.get("weight"))

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = cross_entropy(self.logits(p, batch, batch.get("key")), batch["label"])
        return losses + self.network.drift(p) if self.buffers and "key" in batch else losses

    def trial(self, p: Params, batch: Batch) -> object:
        logits = self.logits(p, batch, batch.get("key"))
        return logits if "losses" in self.overridden else check_logits(logits)

    @property
    def overridden(self) -> list[str]:
        """The names of those functions that compute the loss and that a subclass has replaced."""
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
            # The difference orders the examples as the probability of class 1 does, and has more digits near 1.
            columns |= {"score": logits[:, 1] - logits[:, 0], "label": label}
        return columns

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("score", "label") if self.classes == 2 else ()

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """With two classes, the area under the ROC curve; empty if the test rows are all of one class."""
        if not columns or len(set(columns["label"].tolist())) < 2:
            return {}
        return {"auc": auc(columns["score"], columns["label"] == 1)}
