"""The base class of workloads that classify: inputs with labels, trained by cross-entropy or by another objective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .client_index import check_index
from .drawing import initial, seeded_generators
from .models.convert import Converted, convert
from .models.functional import KeyedFunctions
from .models.stored import StoredTensors
from .objectives import Classes, Objective
from .pair import Pair
from .stateless import NETWORK, Stateless, buffers_of, parameters_of
from .workload import (
    TEST_SET,
    TRAINING_SET,
    WITHOUT_STORED,
    WITHOUT_WEIGHTS,
    Adapter,
    Batch,
    Chained,
    Columns,
    Model,
    Params,
    Partition,
    Split,
    UnfitOutput,
    Workload,
)


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


def holds_parameters_alone(module: nn.Module) -> bool:
    """Whether all tensors of a module are parameters or running statistics, which a run puts in."""
    others = {name for name, _ in module.named_buffers()} - {*buffers_of(module)}
    kept = [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers")
    ]
    return not others and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(kept))


def constants(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n,): the values. They are made on the device: a copy from the processor would make the processor wait."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.cat([torch.full((1,), value, dtype=dtype, device=device) for value in values])


@dataclass(frozen=True)
class Classification(Workload):
    """Inputs with labels, trained by cross-entropy. A data set defines `load` and the class constants.

    `classes`: number of classes. `shape`: shape of one input, (channels, height, width) for images. `mean`, `std`: one
    number per channel; inputs are normalised by them after bytes have been scaled to [0, 1].

    This class splits the rows by `partition`, builds `model` with weights from the seed, and reports loss and accuracy,
    with two classes also the AUC. A subclass with other inputs overrides `inputs`; one whose rows have numbers or
    several labels in the place of a class overrides `objective`; one with another loss overrides `losses`.

    With an `adapter`, it trains what that adds beside the frozen weights of the model.
    """

    model: Model
    partition: Partition
    adapter: Adapter | None = field(default=None, kw_only=True)

    classes: ClassVar[int]
    shape: ClassVar[tuple[int, ...]]
    mean: ClassVar[tuple[float, ...]] = (0.0,)
    std: ClassVar[tuple[float, ...]] = (1.0,)

    run_seed: ClassVar[int] = 0
    """The seed of the run, see `seeded`."""

    @property
    def objective(self) -> Objective:
        """The loss, the metrics, and what labels are."""
        return Classes(self.classes)

    def build(self) -> nn.Module:
        """A new network; see `Model.build`."""
        return self.model.build(self.shape, self.classes)

    def build_converted(self) -> nn.Module:
        """A new network, as it is trained, see `_converted`."""
        return self._converted().module

    def _converted(self) -> Converted:
        """A new network without modules that a run cannot train, see `models.convert`, and with the adapter."""
        found = convert(self.build())
        if self.adapter is not None:
            self.adapter.adapt(found.module)
        return found

    def check(self) -> None:
        _ = self.buffers

    def data_files(self) -> Mapping[str, Path]:
        return {**self.model.files(), **({} if self.adapter is None else self.adapter.files())}

    def seeded(self, seed: int) -> Workload:
        """With the network that this seed gives, whose constants belong to the initial weights that it gives."""
        if seed == self.run_seed:
            return self
        found = copy(self)  # without the network, see `__getstate__`
        vars(found)["run_seed"] = seed
        return found

    @property
    def constants_seed(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if holds_parameters_alone(self.outline) else self.run_seed

    @cached_property
    def outlined(self) -> Converted:
        """`outline`, and what was changed in it. Code that needs numbers, as torch's parametrisation `orthogonal`, is
        called with some."""
        try:
            with seeded_generators(0), torch.device("meta"):
                return self._converted()
        except (NotImplementedError, RuntimeError):
            found = initial(self._converted, 0)
            return found._replace(module=found.module.to("meta"))

    @property
    def outline(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.outlined.module

    @property
    def outline_input(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.shape if {*self.overridden} <= {"losses", "inputs"} else None

    @property
    def of_package(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.of_package

    @property
    def converted(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.outlined.summary

    @cached_property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return buffers_of(self.outline)

    @property
    def pairs(self) -> tuple[Pair, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if self.adapter is None else self.adapter.pairs(self.outline)

    @cached_property
    def frozen_names(self) -> tuple[str, ...]:
        """The names of the parameters that need no gradient (`requires_grad_(False)`)."""
        return tuple(name for name, (value, _) in parameters_of(self.outline).items() if not value.requires_grad)

    @property
    def casts_up(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.frozen_names) and not {"logits", "network"} & {*self.overridden}

    @abstractmethod
    def load(self) -> tuple[Columns, Columns]:
        """The columns of the training and of the test rows; `split` calls it.

        Required are "input", (n, *shape), uint8 or floats, and "label", (n,), whole numbers below `classes`. Training
        rows may also have "client", (n,), the natural client of each row, for the partition `natural`, and "held_out",
        (n,) bool, rows that their client does not train on. Other columns come to `losses` in the batch.
        """

    def split(self, seed: int, clients: int) -> Split:
        train, test = (
            {**columns, "label": self.objective.checked(columns["label"], part)}
            for part, columns in zip((TRAINING_SET, TEST_SET), self.load(), strict=True)
        )
        column = self.partition.column
        if column not in train:
            raise ValueError(
                f"partition: the training rows must have a column {column!r}, got the columns {', '.join(train)}; "
                "choose another partition"
            )
        if column == "label" and self.partition.by_class and not isinstance(self.objective, Classes):
            raise ValueError(
                "partition: it deals rows by their classes, and these rows have none; choose iid, quantity or natural"
            )
        client_index = self.partition.deal(train[column], clients, seed)
        check_index(client_index, len(train["label"]))
        if "client" in train:
            client_index = client_index.with_common("client", np.asarray(train["client"]))
        train, test = ({k: v for k, v in columns.items() if k != "client"} for columns in (train, test))
        return Split(train, test, client_index)

    def check_split(self, split: Split, most: float) -> None:
        super().check_split(split, most)
        for part, columns in split.named:
            self.objective.checked(columns["label"], part)
            if columns["input"].dtype.kind == "c" and "inputs" not in self.overridden:
                raise ValueError(
                    f"{part} must have real inputs, got {columns['input'].dtype} in column input; give real and "
                    "imaginary parts as two channels, or override `inputs`"
                )

    def init(self, seed: int) -> dict[str, Tensor]:
        added = {} if self.adapter is None else self.adapter.initial(self.outline, seed)
        names = [name for name in parameters_of(self.outline) if name not in self.frozen_names]
        if not self.buffers and {*names} <= {*added}:
            return {name: added[name] for name in names}
        rest = tuple(name for name in names if name not in added)
        if not self.buffers and (stored := self._stored(rest)) is not None:
            return {name: added[name] if name in added else stored[name] for name in names}
        stored = self._stored(tuple(name for name in rest if name in (self.stored() or ())))
        parameters = parameters_of(module := self._without_stored(seed))
        own = added if stored is None else {**added, **stored}
        trained = {name: own[name] if name in own else parameters[name][0] for name in names}
        buffers = {name: module.get_buffer(name) for name in self.buffers}
        return {name: value.detach().clone() for name, value in {**trained, **buffers}.items()}

    def frozen(self, seed: int) -> Mapping[str, Tensor]:
        if not self.frozen_names:
            return {}
        if (stored := self._stored(self.frozen_names)) is not None:
            return stored
        parameters = parameters_of(initial(self.build_converted, seed))
        return {name: parameters[name][0].detach().clone() for name in self.frozen_names}

    def stored(self) -> StoredTensors | None:
        if self.adapter is None or self.adapter.keeps_weights:
            return self._of_model()
        return self.adapter.stored(self.outline)

    def _of_model(self) -> StoredTensors | None:
        """See `Model.stored`."""
        return self.model.stored(self.shape, self.classes) if type(self).build is Classification.build else None

    def published(self, p: Params) -> dict[str, Any]:
        """See `Model.published`. p: all parameters without an adapter."""
        return self.model.published(self.shape, self.classes, p)

    def _stored(self, names: tuple[str, ...]) -> StoredTensors | None:
        """These parameters, where all of them are in files."""
        stored = self.stored() if names else None
        return None if stored is None or not {*names} <= {*stored} else stored.some(names)

    def __getstate__(self) -> dict[str, Any]:
        """The settings without the modules: `network` keeps the tensors of its last call, and those of a vectorised
        call cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name not in ("network", "outlined")}

    @cached_property
    def network(self) -> Stateless:
        """The network as a function of its tensors. It is built in another thread, because its first use may be under
        vmap, where weights cannot be drawn, with the run's seed, on which its constants may depend. An adapted network
        gets the frozen tensors of the run, and is not filled with its own where it has nothing else."""
        if self.adapter is not None and holds_parameters_alone(self.outline):
            return NETWORK.get()(deepcopy(self.outline))
        with ThreadPoolExecutor(1) as outside_vmap:
            return NETWORK.get()(outside_vmap.submit(self._without_weights).result())

    def _without_weights(self) -> nn.Module:
        """The network for tensors that are put in."""
        token = WITHOUT_WEIGHTS.set(True)
        try:
            return initial(self.build_converted, self.run_seed)
        finally:
            WITHOUT_WEIGHTS.reset(token)

    def _without_stored(self, seed: int) -> nn.Module:
        """The network for parameters that are not in files."""
        changed = self.adapter is not None and not self.adapter.keeps_weights
        token = WITHOUT_STORED.set(not changed and self.stored() is not None)
        try:
            return initial(self.build_converted, seed)
        finally:
            WITHOUT_STORED.reset(token)

    @cached_property
    def looks_up(self) -> bool:
        """Whether the network has an embedding, so that numbers among its inputs may be those of rows."""
        return any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in self.outline.modules())

    def inputs(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """(B, *shape) in `dtype`: the normalised inputs of the network. Bytes are divided by 255 first.

        With an embedding it is at least float32: bfloat16 has no odd number above 256, which would be other rows.
        """
        x = batch["input"]
        dtype = torch.promote_types(dtype, torch.float32) if self.looks_up else dtype
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
        losses = self.objective.losses(self.logits(p, batch, batch.get("key")), batch["label"])
        return losses + self.network.drift(p) if self.buffers and "key" in batch else losses

    def trial(self, p: Params, batch: Batch) -> object:
        logits = self.logits(p, batch, batch.get("key"))
        if self.network.draws:
            with KeyedFunctions(None):  # an evaluation must not draw
                self.logits(p, batch)
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
        weighted = type(self).row_weights is not Workload.row_weights
        if self.overridden or weighted or not isinstance(self.objective, Classes):
            return None
        report = self._report_of if type(self).report is Classification.report else None
        return Chained(self.network.module, self.shape, self.inputs, report)

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return self._report_of(self.logits(p, batch), batch)

    def _report_of(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The report from the network's outputs (B, classes)."""
        # What a subclass does not name in `whole` would be averaged, and a mean of labels or scores means nothing.
        label = batch["label"]
        unreduced = self.objective.unreduced(outputs, label) if self.whole else {}
        columns = {name: column for name, column in unreduced.items() if name in self.whole}
        return {**self.objective.report(outputs, label), **columns}

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.whole

    @property
    def lower(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.lower

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        return self.objective.summary(means, columns)

    def summary_of_clients(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.objective.summary_of_clients(means)
