"""Evaluation of every client's own model on the client's own rows, and of what is left of it after it has been adapted.

The clients and the data alone determine the tasks, and a client's numbers follow from its own rows, so that they do not
depend on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms.contract import Adaptation, Algorithm
from ...algorithms.parts.own_model import OwnModel
from ...algorithms.tree import Tree
from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ...workloads.workload import Params, Workload
from ..config.schema import Local
from ..kernels.contract import LossInOneCall
from ..kernels.vectorised import vectorised
from ..method_form.personal import Division, Personal
from .batches import BlockForm, ClientBatches, TaskBatches
from .evaluation import reports
from .local_training import LocalTrainer

Kind = Literal["test", "validation", "training"]
WHO_HAS = "/id"
"""Behind the name of a kind of rows: the clients of the tasks in which somebody has such rows. Behind that of a metric
that clients may lack: the clients that have it."""
ROWS_OF_A_TASK = 16
"""A task has clients whose rows are at most so many batches of an evaluation, or one client."""


class OwnModels(NamedTuple):
    """A task: evaluate some clients with their own models.

    read: (c,) the rows of their states, -1 for clients that have never taken part. kinds: on which of their rows.
    server: whether also with the server's model. round: whose settings the method has.
    """

    index: int
    clients: np.ndarray  # (c,)
    read: np.ndarray
    kinds: tuple[Kind, ...]
    server: bool
    round: int
    branch: None = None  # as a TrainingTask has

    @property
    def description(self) -> str:
        return f"evaluation of the own models of clients {', '.join(map(str, self.clients))}"


class Served(NamedTuple):
    """What c clients are served with. models: `server`, `own`, `adapted`, … -> a model for each client. facts: what the
    method tells of clients, name -> (c,). gradients: that the adaptations have taken. of_statistics: those that the
    running statistics of the clients' own rows have taken."""

    models: dict[str, list[Tree]]
    facts: dict[str, np.ndarray]
    gradients: float
    of_statistics: float = 0.0


def adapted(number: int) -> str:
    """The name of the model after an adaptation, which have the numbers 1, 2, …"""
    return "adapted" if number == 1 else f"adapted@{number}"


def rows_of(client_index: ClientIndex, kind: Kind) -> ClientIndex:
    """The index of one kind of the clients' rows."""
    index = {"test": client_index.held, "validation": client_index.validation, "training": client_index}[kind]
    assert index is not None  # or no task would name it
    return index


def kinds_of(client_index: ClientIndex, training: bool) -> tuple[Kind, ...]:
    """The rows on which own models are evaluated: those that clients hold out, those for validation, and, if `training`
    or if there are no others, those that they train on."""
    found: list[Kind] = []
    if client_index.held is not None:
        found.append("test")
    if client_index.validation is not None:
        found.append("validation")
    return (*found, "training") if training or not found else tuple(found)


def targets_of(client_index: ClientIndex) -> dict[str, np.ndarray]:
    """Kind of rows -> (N,) the targets in them, where they are known."""
    kinds = kinds_of(client_index, training=True)
    return {kind: targets for kind in kinds if (targets := rows_of(client_index, kind).targets) is not None}


def evaluated_clients(clients: int, sample: float, seed: int, unseen: int = 0) -> np.ndarray:
    """(c,) the clients of an evaluation before the last one, ascending: the same in all rounds. Behind the clients are
    those that are never trained with, of which there is the same share."""
    if not sample:
        return np.arange(clients + unseen)
    share = sample if sample < 1 else min(1.0, int(sample) / (clients + unseen))
    some = [
        np.sort(counted.numpy_generator(seed, purpose).permutation(count)[: max(1, round(share * count))])
        for purpose, count in (("evaluate", clients), ("evaluate unseen", unseen))
    ]
    return np.concatenate([some[0], clients + some[1]])


def own_models_tasks(
    client_index: ClientIndex, clients: np.ndarray, rows: np.ndarray, kinds: tuple[Kind, ...], server: bool, round: int,
    size: int,
) -> list[OwnModels]:  # fmt: skip
    """The tasks that evaluate these clients (c,), and client_index has all clients. rows: (N,) the row of each client's
    state. size: rows of a batch."""
    counts = sum(rows_of(client_index, kind).sizes_of(clients) for kind in kinds)
    ends = np.cumsum(counts)
    cuts = [0]
    while cuts[-1] < len(clients):
        before = ends[cuts[-1] - 1] if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + size * ROWS_OF_A_TASK, "right"))))
    parts = [clients[begin:end] for begin, end in pairwise(cuts)]
    return [OwnModels(i, part, rows[part], kinds, server, round) for i, part in enumerate(parts)]


# --- in a worker ------------------------------------------------------------------------------------------------------
class ClientRows(NamedTuple):
    """Rows of one kind of c clients, those of a client one after another. columns: (n, …). ends: (c + 1,) where the
    rows of each client begin, and n. weights: (n,) `Workload.row_weights`, None for equal ones."""

    columns: dict[str, Tensor]
    ends: np.ndarray
    weights: np.ndarray | None = None

    @staticmethod
    def of(
        columns: Mapping[str, Tensor], index: ClientIndex, clients: np.ndarray, device: torch.device,
        workload: Workload,
    ) -> ClientRows:  # fmt: skip
        """columns: of all rows. index: of these rows of all clients. clients: (c,)."""
        some = index.of_clients(clients)
        rows = torch.from_numpy(some.rows)
        own = {name: column[rows].to(device) for name, column in columns.items()}
        weights = workload.row_weights(own)
        return ClientRows(own, some.offsets, None if weights is None else weights.double().cpu().numpy())

    def between(self, begin: int, end: int) -> dict[str, Tensor]:
        """The columns of some of the rows."""
        return {name: column[begin:end] for name, column in self.columns.items()}

    def means(self, values: np.ndarray) -> np.ndarray:
        """(c,) the means of values (n,) over the rows of each client, NaN for a client without any."""
        return np.array(
            [self._mean(values, begin, end) if end > begin else np.nan for begin, end in pairwise(self.ends)]
        )

    def _mean(self, values: np.ndarray, begin: int, end: int) -> float:
        if self.weights is None:
            return values[begin:end].mean()
        weights = self.weights[begin:end]
        return (values[begin:end] * weights).sum() / max(weights.sum(), 1)


def report_of_outputs(
    workload: Workload, chain: LossInOneCall | None
) -> Callable[[Tensor, Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """What makes the workload's report from outputs that `chain` has computed; None where it cannot be made so."""
    return workload.chained.report if chain is not None and workload.chained is not None else None


class ClientReports:
    """The workload's report of clients' models on their own rows, as means over the rows of each client, and its
    summary of them: a client whose rows are all of one class has no AUC.

    Models of several clients run at once where a block has several clients: their rows are padded to equal numbers, and
    padding is left out of the means. A report for which that is impossible runs for one client after another. Where the
    run's kernels compute a network in one call, they do so for one client after another, and the outputs of several
    clients are reported together.
    """

    def __init__(
        self, workload: Workload, frozen: Params, size: int, block: int, beat: Callable[[], None],
        chain: LossInOneCall | None = None,
    ) -> None:  # fmt: skip
        """frozen: the tensors that no model has. size: rows of a batch. block: clients at once. beat: called before
        each batch, as a sign of life. chain: of the run's kernels."""
        self.workload, self.frozen, self.size, self.block, self.beat = workload, frozen, size, block, beat
        self.chain, self.of_outputs = chain, report_of_outputs(workload, chain)
        self.at_once = True  # False once the report has failed under vmap
        self.averaged: set[str] = set()  # the metrics that every client with rows has, since they are means

    def of_one_model(self, model: Tree, rows: ClientRows, by_chain: bool = False) -> dict[str, np.ndarray]:
        """The means (c,) of each column of the report, of one model for all clients. by_chain: whether the run's
        kernels may compute the network in one call, as those of own models."""
        return self._metrics(self._values(model, rows.columns, by_chain), rows)

    def of_own_models(self, models: Sequence[Tree], rows: ClientRows) -> dict[str, np.ndarray]:
        """The means (c,) of each column of the report, of a model for each client."""
        if self.chain is not None and self.of_outputs is not None:
            return self._metrics(self._by_chain(models, rows), rows)
        parts: dict[str, list[np.ndarray]] = {}
        for begin in range(0, len(models), self.block):
            some = slice(begin, min(begin + self.block, len(models)))
            for values in self._of_block(models[some], rows, some):
                for name, column in values.items():
                    parts.setdefault(name, []).append(column)
        return self._metrics({name: np.concatenate(columns) for name, columns in parts.items()}, rows)

    def _by_chain(self, models: Sequence[Tree], rows: ClientRows) -> dict[str, np.ndarray]:
        """The columns of the report, (n,), of a model for each client, whose outputs are computed in one call. Those of
        several clients are reported together: each row's numbers follow from its own outputs, and the report of a few
        rows takes as long as their outputs."""
        assert self.chain is not None
        assert self.of_outputs is not None
        parts, outputs, first = list[dict[str, Tensor]](), list[Tensor](), 0
        pieces = [
            (model, at, min(at + self.size, int(end)))
            for model, (begin, end) in zip(models, pairwise(rows.ends), strict=True)
            for at in range(int(begin), int(end), self.size)
        ]
        for number, (model, begin, end) in enumerate(pieces, 1):
            self.beat()
            outputs.append(self.chain.outputs(model.flat, rows.between(begin, end)))
            if number == len(pieces) or pieces[number][2] - first > self.size:
                parts.append(dict(self.of_outputs(torch.cat(outputs), rows.between(first, end))))
                outputs, first = [], end
        return {name: np.concatenate([self._array(name, part[name]) for part in parts]) for name in parts[0]}

    def _metrics(self, values: Mapping[str, np.ndarray], rows: ClientRows) -> dict[str, np.ndarray]:
        """The metrics (c,) of clients from the columns (n,) of the report on their rows: the means, and the metrics of
        the workload's summary, NaN for clients that lack one."""
        whole, count = self.workload.whole, len(rows.ends) - 1
        means = {name: rows.means(column) for name, column in values.items() if name not in whole}
        self.averaged.update(means)
        found = dict(means)
        for client in np.flatnonzero(np.diff(rows.ends)).tolist():
            some = slice(rows.ends[client], rows.ends[client + 1])
            own = {name: float(column[client]) for name, column in means.items()}
            more = self.workload.summary(own, {name: values[name][some] for name in whole if name in values})
            for name, value in more.items():
                found.setdefault(name, np.full(count, np.nan))[client] = value
        return found

    def _of_block(self, models: Sequence[Tree], rows: ClientRows, some: slice) -> list[dict[str, np.ndarray]]:
        """For each of some clients that has rows, the columns of the report on them. some: positions of the clients."""
        begins, counts = rows.ends[some], np.diff(rows.ends[some.start : some.stop + 1])
        widest = int(counts.max())
        fits = widest <= self.size and widest * len(models) <= ROWS_OF_A_TASK * self.size
        if len(models) > 1 and widest and fits and self.at_once:
            self.beat()
            try:
                return self._together(models, rows, begins, counts)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # of whatever kind a report raises under vmap; its own errors come again, one by one
                self.at_once = False
        of_clients = zip(models, begins, counts, strict=True)
        return [self._values(model, rows.between(begin, begin + count)) for model, begin, count in of_clients if count]

    def _together(
        self, models: Sequence[Tree], rows: ClientRows, begins: np.ndarray, counts: np.ndarray
    ) -> list[dict[str, np.ndarray]]:
        """`_of_block` by vmap. begins, counts: (b,) of the clients' rows."""
        layout, last = models[0].layout, int(rows.ends[-1]) - 1
        places = begins[:, None] + np.minimum(np.arange(counts.max()), np.maximum(counts - 1, 0)[:, None])
        padded = torch.from_numpy(np.minimum(places, last))

        def report(flat: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return self._report(Tree(flat, layout), batch)

        batches = {name: column[padded] for name, column in rows.columns.items()}
        found = vectorised(report)(torch.stack([model.flat for model in models]), batches)
        columns = {name: self._array(name, column) for name, column in found.items()}
        return [
            {name: column[client, :count] for name, column in columns.items()}
            for client, count in enumerate(counts)
            if count
        ]

    def _values(self, model: Tree, columns: Mapping[str, Tensor], by_chain: bool = False) -> dict[str, np.ndarray]:
        """The columns of the report, (n,) float64, of a model on rows. columns: (n, …). by_chain: see
        `of_one_model`."""
        parts: dict[str, list[np.ndarray]] = {}
        for begin in range(0, len(next(iter(columns.values()))), self.size):
            self.beat()
            batch = {name: column[begin : begin + self.size] for name, column in columns.items()}
            for name, column in self._report(model, batch, by_chain).items():
                parts.setdefault(name, []).append(self._array(name, column))
        return {name: np.concatenate(each) for name, each in parts.items()}

    def _array(self, name: str, column: Tensor) -> np.ndarray:
        """A column of the report, in float64 where means are made of it."""
        return (column if name in self.workload.whole else column.double()).cpu().numpy()

    def _report(self, model: Tree, batch: Mapping[str, Tensor], by_chain: bool = False) -> dict[str, Tensor]:
        if by_chain and self.chain is not None and self.of_outputs is not None:
            return self.of_outputs(self.chain.outputs(model.flat, batch), batch)
        (found,) = reports(self.workload, [{**self.frozen, **dict(model.items())}], batch)
        return found


class Tuner:
    """Tunes clients' models on their own training rows. Nothing of it is kept or sent."""

    def __init__(self, adaptation: Adaptation, x: Tree, freed: Params, buffers: Sequence[str], **trainer: Any) -> None:
        """x: a model, for its form. freed: tensors that training does not move, and the adaptation does. buffers: the
        running statistics among all of them. trainer: further arguments of LocalTrainer."""
        self.adaptation, self.freed = adaptation, freed
        self.buffers = [name for name in buffers if name in freed or name in x.layout.names]
        layout = (x := self.whole(x)).layout
        moves = {*layout.names} if adaptation.tensors is None else {*adaptation.tensors}
        method: Algorithm = OwnModel(adaptation.rule, prox=adaptation.prox)
        if moving := tuple(name for name in self.buffers if name in moves):
            method = Personal(method, Division(layout.pick(moves), moving, len(moving)), adaptation.rule)
        if stays := tuple(name for name in layout.names if name not in moves):
            division = Division(layout, stays, len(self.buffers) - len(moving))
            method = Personal(method, division, adaptation.rule, trains=False)
        self.method = method
        self.trainer = LocalTrainer(method, x=x, **trainer)

    def whole(self, z: Tree) -> Tree:
        """A model with the tensors that training does not move, running statistics last."""
        if not self.freed:
            return z
        tensors = {**dict(z.items()), **self.freed}
        return Tree.of({**tensors, **{name: tensors.pop(name) for name in self.buffers}})

    def local(self, client_index: ClientIndex) -> Local:
        """The work of one client."""
        batch = self.adaptation.batch or int(client_index.sizes.max())
        return Local(steps=self.adaptation.steps, epochs=self.adaptation.epochs, batch=batch)

    def tuned(self, models: Sequence[Tree], batches: TaskBatches, block: int, beat: Any) -> list[Tree]:
        """The models after their steps, `block` of them at once. batches: of these clients."""
        steps, found, models = batches.drawn.steps, list[Tree](), [self.whole(z) for z in models]
        method, layout = self.method, models[0].layout

        def begun(flat: Tensor) -> Any:
            """The state of a client that begins with this model."""
            return method.client_init(method.server_init(Tree(flat, layout)).public)

        for begin in range(0, len(models), block):
            some = slice(begin, min(begin + block, len(models)))
            x, public = models[begin], method.server_init(models[begin]).public
            if some.stop - some.start == 1:
                local = ClientBatches(batches, begin, beat)
                kept = self.trainer.train_client(public, begun(x.flat), int(steps[begin]), local).client
                found.append(method.client_model(x, public, kept))
                continue
            states = vectorised(begun)(torch.stack([z.flat for z in models[some]]))
            own = batches.of_block(BlockForm.of(batches.drawn, some))
            kept = self.trainer.train_block(public, states, steps[some], lambda k, o=own, s=some: o.at((s, k))).client
            flats = vectorised(lambda state, x=x, public=public: method.client_model(x, public, state).flat)(kept)
            found += [Tree(flat, layout) for flat in flats.unbind()]
        return found
