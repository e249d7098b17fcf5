"""A worker: it runs tasks: the local training of some clients, a part of an evaluation, or a pass over messages.

A worker has the data, the model and the method. Client states are in the store and not in the worker. The same task
gives the same result on any worker, any number of times.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Adaptation, Algorithm, Message, Viewer
from ...algorithms.tree import Tree
from ...workloads import counted
from ...workloads.client_index import ClientIndex
from ...workloads.workload import Columns, Params
from ..accelerators.columns import DeviceColumns
from ..accelerators.memory import row_budget
from ..accelerators.settings import kernels_without_form
from ..accelerators.transfer import to_device
from ..aggregation.message_rows import vector_leaves, with_vector_leaves
from ..aggregation.passes import PassTask
from ..aggregation.staged import StagedMessages, trusted_examples
from ..cohorts.tasks import Broadcast, DrawKey, TrainingTask
from ..memory import KeptMemory, Recent
from ..method_form.state_spec import StateSpec
from ..reduction.accumulator import Accumulator
from ..reduction.tree import TaskResult
from ..run_spec import RunSpec
from ..state.resident_rows import ResidentRows
from ..state.row_files import RowFiles, StateLayout
from ..workload.layers import momenta_of
from .batches import BlockBatches, BlockForm, ClientBatches, Stream, TaskBatches, stream
from .evaluation import (
    ClientGroup,
    EvaluationTask,
    LossProbe,
    Metrics,
    TestSlice,
    evaluate_clients,
    evaluate_test_rows,
    probe_losses,
)
from .local_training import LocalResult, LocalTrainer, OwnViews
from .modules import evaluating
from .own_models import WHO_HAS, ClientReports, ClientRows, OwnModels, Served, Tuner, adapted, rows_of
from .own_statistics import OwnStatistics

LARGEST_SEED = 2**63 - 1
WriteStates = Callable[[RowFiles | ResidentRows], np.ndarray]
"""Writes new states of clients to their fresh rows, and returns the digests of these."""


class Data(NamedTuple):
    """The data of a run as tensors: columns of the training and the test set, and each client's training rows."""

    train: dict[str, Tensor]
    test: dict[str, Tensor]
    client_index: ClientIndex

    @staticmethod
    def of(train: Columns, test: Columns, client_index: ClientIndex) -> Data:
        return Data(_tensors(train), _tensors(test), client_index)


def _tensors(columns: Columns) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for later tensors.

    By default every large tensor is a new mapping, whose page faults cost more than the arithmetic on the tensor.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)


class PublicState(NamedTuple):
    """A public state as the clients of some tasks read it. version: of the broadcast that has it. round: of the tasks:
    later ones may find another public state in the same place of the broadcast."""

    version: int
    round: int
    state: Any


@dataclass
class TaskUnderWay:
    """A task whose blocks are being trained. `unwritten`: writes of new states that wait for the end of the task, see
    `Worker._save_states`."""

    worker: Worker
    task: TrainingTask
    trainer: LocalTrainer
    public: Any
    batches: TaskBatches
    accumulator: Accumulator
    started: float
    unwritten: list[WriteStates] = field(default_factory=list)
    looks: int = 0  # rows times models of which clients have found the losses

    def blocks(self) -> Iterator[slice]:
        """The positions of the clients of each block."""
        begin = 0
        for end in self.task.cuts:
            yield slice(begin, end)
            begin = end


class Worker:
    """Runs the tasks of one run in one process: local training, evaluation, passes over messages."""

    def __init__(
        self,
        run_spec: RunSpec,
        data: Data,
        layout: StateLayout,
        beat: Callable[[], None],
        columns: DeviceColumns | None = None,
    ) -> None:
        """layout: of the client states. beat: called before every local step, as a sign of life. columns: those of the
        training set, where an earlier worker has placed them; None to place them."""
        keep_freed_memory()
        engine = run_spec.experiment.engine
        torch.set_num_threads(engine.threads)
        self.run_spec, self.data, self.device = run_spec, data, run_spec.device
        self.x = run_spec.initial_model().to(self.device)
        self.frozen = {name: tensor.to(self.device) for name, tensor in run_spec.frozen.items()}
        self.columns = columns or DeviceColumns(data.train, self.device, row_budget(self.device))
        method = run_spec.method()
        self.state_spec = StateSpec(method, self.x)
        self.alone = method.own_view or method.moves_weights  # no block of it has clients of other runs
        keeps_state = bool(layout.folder and pytree.tree_leaves(self.state_spec.client))
        self.rows: RowFiles | ResidentRows | None = RowFiles(layout, self.state_spec.client) if keeps_state else None
        self.layout, self.beat = layout, beat
        self.as_they_are = run_spec.stage_plan.leaves_messages_alone(layout.messages)
        self.messages: dict[bool, StagedMessages] = {}  # by warm_start
        self.vectorise, self.kernels = engine.vectorise, run_spec.kernels
        self.with_rms = run_spec.sampler.needs_rms
        self.trainers: dict[tuple[int, bool], LocalTrainer] = {}  # by the (round, warm_start) that they were made for
        self.most_trainers = run_spec.experiment.federation.pace.versions
        block = run_spec.block(self.x.flat.numel()) if self.vectorise else 1
        workload, chain = run_spec.workload, self.kernels.chain(run_spec.workload, self.x.layout)
        self.reports = ClientReports(workload, self.frozen, run_spec.experiment.evaluate.batch, block, beat, chain)
        self.tuners: dict[int, list[Tuner]] = {}  # by the round that they were made for
        self.recorder = self.kernels.recorder()
        self.public: dict[int, PublicState] = {}  # by the place in the broadcast
        self.initial: tuple[Any, Any] = (None, None)  # (public state, client state before a first visit)
        self.gather_seconds = 0.0  # of the task under way
        self.draws: Recent[tuple[ClientIndex, Stream]] | None = None  # of all runs of this process, if it has several
        self.moved: tuple[int, ClientIndex] | None = None  # the round, and its rows where they drift
        self.everyone: tuple[ClientIndex, ClientIndex] | None = None  # the index that was asked for last, and its whole
        self.trusted: ClientIndex | None = None  # the server's own examples, once they are needed
        self.prepared: dict[DrawKey, TaskBatches] = {}  # batches of tasks that will probably begin next
        self.kept_memory = KeptMemory()

    def perform(self, call: str, task: Any, broadcast: Broadcast) -> TaskResult:
        """Run a task of a phase. call: "train", "evaluate" or "aggregate"."""
        if call == "aggregate":
            return self.aggregate(task)
        if call == "train":
            return self.train(task, broadcast)
        try:
            return self.evaluate(task, broadcast)
        finally:
            self.kept_memory.trim()

    def launch(self, call: str, task: Any, broadcast: Broadcast) -> Callable[[], TaskResult]:
        """Begin a task of a phase, and return what gives its result.

        A device computes local training in the meantime; other tasks begin when they are asked for their result.
        """
        if call == "train":
            return self.launch_training(task, broadcast)
        return partial(self.perform, call, task, broadcast)

    # --- training -------------------------------------------------------------------------------------------------
    def train(self, task: TrainingTask, broadcast: Broadcast) -> TaskResult:
        """The local training of a task's clients. Returns the sums of their messages; their new states are written to
        fresh rows."""
        return self.launch_training(task, broadcast)()

    @torch.no_grad()
    def launch_training(self, task: TrainingTask, broadcast: Broadcast) -> Callable[[], TaskResult]:
        """Start the local training of a task's clients, and return what waits for its end and gives its result."""
        under_way = self.begin(task, broadcast)
        with kernels_without_form() as without_form:
            for block in under_way.blocks():
                self.train_block(under_way, block)
        under_way.accumulator.times["data"] += self.gather_seconds
        self.gather_seconds = 0.0
        under_way.accumulator.send()
        return partial(self.end, under_way, without_form)

    def begin(self, task: TrainingTask, broadcast: Broadcast) -> TaskUnderWay:
        """Everything before the first block of a task."""
        started = time.perf_counter()
        trainer = self._trainer_for(task.round, task.warm_start)
        if trainer.recorder is not None:
            trainer.recorder.round = task.round
        if trainer.tapes is not None:
            trainer.tapes.begin_round(task.round)
        public = self._public_state(broadcast, trainer.algorithm, task)
        trainer.hold(public)
        self.gather_seconds, began = 0.0, time.perf_counter()
        batches = self.prepared.pop(task.draw_key, None) or self._batches(task)
        stream_seconds = time.perf_counter() - began
        added_up = trainer.state_spec.facts_only() if self.layout.messages else trainer.state_spec
        accumulator = Accumulator(added_up, task.cuts, task.updates, self.kernels.compiled, self.device)
        accumulator.times["data"] = stream_seconds
        return TaskUnderWay(self, task, trainer, public, batches, accumulator, started)

    def _batches(self, task: TrainingTask) -> TaskBatches:
        return TaskBatches.of(self.draw(task), self.columns, self.x.flat.dtype, self.gather)

    def prepare(self, tasks: Sequence[TrainingTask]) -> None:
        """Draw the batches of tasks that will probably begin next, and send their places to the device. Rows that
        are not on the device, or that drift, are drawn when their task begins."""
        if self.columns.resident is not None and self.data.client_index.drift is None:
            before = {task.round - 1 for task in tasks}  # whose tasks have not all begun
            waiting = {key: batches for key, batches in self.prepared.items() if key[0] in before}
            self.prepared = {**waiting, **{task.draw_key: self._batches(task) for task in tasks}}

    def draw(self, task: TrainingTask) -> Stream:
        """The batches of a task's clients."""
        local = self.run_spec.experiment.federation.local
        if task.warm_start:
            local = local.taking(epochs=1)
        seed, index = self.run_spec.experiment.seed, self._client_index(task)

        def draw() -> Stream:
            return stream(index, task.clients, task.visits, local, seed, task.steps)

        if self.draws is None:
            return draw()
        arrays = tuple(None if a is None else a.tobytes() for a in (task.clients, task.visits, task.steps))
        key = (id(index), seed, local.epochs, local.steps, local.examples, *arrays)
        return self.draws.of(key, lambda: (index, draw()))[1]

    @torch.no_grad()
    def end(self, under_way: TaskUnderWay, without_form: Collection[str] = ()) -> TaskResult:
        """The result of a task whose blocks have all been trained. without_form: names of kernels that ran and have no
        deterministic form."""
        task, accumulator = under_way.task, under_way.accumulator
        self._write_kept_states(under_way)
        accumulator.times["data"] += self.gather_seconds
        total, apart, clients = accumulator.result()
        seconds = time.perf_counter() - under_way.started
        looks = {"looks": float(under_way.looks)} if under_way.looks else {}
        return TaskResult(
            task.index,
            total.leaves,
            {**total.facts, **accumulator.times, "seconds": seconds, **looks},
            {"id": task.clients, **clients},
            branch=task.branch,
            apart=apart,
            notes=self._notes(under_way.trainer, without_form),
        )

    def _notes(self, trainer: LocalTrainer, without_form: Collection[str]) -> tuple[str, ...]:
        """Sentences for the log. without_form: names of kernels that ran and have no deterministic form."""
        notes = [
            f"{name} on {self.device} has no deterministic form: this run may not repeat to the bit"
            for name in without_form
        ]
        if trainer.recorder is not None and trainer.recorder.refused:
            notes.append(f"local steps run one by one, they cannot be replayed ({trainer.recorder.refused})")
        if trainer.tapes is not None and trainer.tapes.doubt:
            notes.append(trainer.tapes.doubt)
        return tuple(notes)

    def _client_index(self, task: TrainingTask) -> ClientIndex:
        """The rows of the task's clients. Behind the last client is the server with its trusted examples."""
        clients = self.run_spec.experiment.federation.clients
        if task.clients[0] < clients:
            return self._index_at(task.round)
        if self.trusted is None:
            rule = self.run_spec.stage.rule
            self.trusted = trusted_examples(rule, self.run_spec.experiment.seed, self.data.train, clients)
        return self.trusted

    def _index_at(self, round: int) -> ClientIndex:
        """The rows of all clients in this round."""
        if self.data.client_index.drift is None:
            return self.data.client_index
        if self.moved is None or self.moved[0] != round:
            self.moved = round, self.data.client_index.at(round)
        return self.moved[1]

    def _everyone_at(self, round: int) -> ClientIndex:
        """The rows of all clients in this round, also of those that are never trained with."""
        index = self._index_at(round)
        if index.unseen is None:
            return index
        if self.everyone is None or self.everyone[0] is not index:
            self.everyone = index, index.everyone
        return self.everyone[1]

    def train_block(self, under_way: TaskUnderWay, block: slice) -> None:
        """The clients of one block, at once or one after another. block: their positions in the task."""
        count = block.stop - block.start
        if self.vectorise and (count > 1 or self.kernels.blocks_of_one):
            self._train_at_once(under_way, block)
            return
        for position in range(block.start, block.stop):
            self._train_client(under_way, position, only_client=count == 1)
        under_way.accumulator.end_block()

    def _train_at_once(self, under_way: TaskUnderWay, block: slice) -> None:
        """The clients of one block at once, vectorised."""
        clients, steps = self.load_block(under_way, block), under_way.batches.drawn.steps[block]
        batches = under_way.batches.of_block(BlockForm.of(under_way.batches.drawn, block))
        public = under_way.public
        if under_way.trainer.algorithm.own_view:
            public = self._views(under_way, block, clients)
        result = under_way.trainer.train_block(public, clients, steps, BlockBatches(batches, block, self.beat))
        self.put_block(under_way, block, result)

    def load_block(self, under_way: TaskUnderWay, block: slice) -> Any:
        """The states of the clients of a block, stacked."""
        began = time.perf_counter()
        read = torch.from_numpy(under_way.task.read[block])
        clients = self._load_states(under_way.trainer.algorithm, under_way.public, read)
        under_way.accumulator.times["state"] += time.perf_counter() - began
        return clients

    def put_block(self, under_way: TaskUnderWay, block: slice, result: LocalResult) -> None:
        """Add the messages of a block whose clients ran at once, write their new states, and end the block."""
        task, accumulator, steps = under_way.task, under_way.accumulator, under_way.batches.drawn.steps[block]
        result = self._staged(result, task, block, accumulator)
        accumulator.add_block(result, steps.numpy(), task.weights[block])
        fresh = task.write[block]
        self._save_states(under_way, fresh, lambda rows: rows.write(torch.from_numpy(fresh), result.client))
        accumulator.end_block()

    def _train_client(self, under_way: TaskUnderWay, position: int, only_client: bool) -> None:
        """One client of a block. position: of the client in the task. only_client: whether the block has no other."""
        task, accumulator, batches = under_way.task, under_way.accumulator, under_way.batches
        began, row = time.perf_counter(), int(task.read[position])
        client = self._state_of(under_way.trainer.algorithm, under_way.public, row)
        accumulator.times["state"] += time.perf_counter() - began
        steps = batches.drawn.steps[position : position + 1].numpy()
        local_batches = ClientBatches(batches, position, self.beat)
        public = self._view(under_way, position, client)
        result = under_way.trainer.train_client(public, client, int(steps[0]), local_batches)
        result = self._staged(result, task, position, accumulator)
        accumulator.add_one(result, steps, task.weights[position : position + 1], only_client)
        fresh = task.write[position : position + 1]
        self._save_states(under_way, fresh, lambda rows: rows.write_one(int(fresh[0]), result.client))

    # --- clients' views of the broadcast --------------------------------------------------------------------------
    def _view(self, under_way: TaskUnderWay, position: int, client: Any) -> Any:
        """What a client makes of the broadcast. position: of the client in the task; client: what it keeps."""
        algorithm, number = under_way.trainer.algorithm, int(under_way.task.clients[position])
        if not algorithm.own_view:
            return under_way.public
        index = self._client_index(under_way.task)
        seen, looks = self._seen(algorithm, under_way.public, client, number, index)
        under_way.looks += looks
        return seen

    def _views(self, under_way: TaskUnderWay, block: slice, clients: Any) -> OwnViews:
        """The views of the clients of a block. clients: their states, stacked."""
        views = [
            self._view(under_way, position, pytree.tree_map(lambda leaf, place=place: leaf[place], clients))
            for place, position in enumerate(range(block.start, block.stop))
        ]
        return OwnViews.of(views)

    def _seen(self, algorithm: Algorithm, public: Any, client: Any, number: int, index: ClientIndex) -> tuple[Any, int]:
        """(what a client makes of the broadcast, the rows times models of which it has found the losses). client: what
        it keeps; index: the rows that clients train on."""
        models = algorithm.looks(public, client)
        workload = self.run_spec.workload
        losses: list[float] = []
        if models:
            rows = ClientRows.of(self.data.train, index, np.array([number]), self.device, workload)
            with self.kernels.around_losses(), evaluating():
                losses = [self.reports.of_one_model(model, rows)["loss"][0] for model in models]
        size, mean = int(index.sizes_of(number)), len(index.rows) / (len(index.offsets) - 1)
        share = torch.tensor(size / mean, dtype=torch.float64, device=self.device)
        viewer = Viewer(torch.tensor(number, device=self.device), share)
        seen = algorithm.view(public, viewer, torch.tensor(losses, dtype=self.x.flat.dtype, device=self.device))
        return seen, len(models) * size

    # --- client states --------------------------------------------------------------------------------------------
    def _load_states(self, algorithm: Algorithm, public: Any, read: Tensor) -> Any:
        """The states of c clients, stacked. read: (c,) their rows, -1 for clients on their first visit."""
        initial = self._initial_state(algorithm, public)
        if self.rows is None or bool((read < 0).all()):
            return pytree.tree_map(lambda leaf: leaf.expand(len(read), *leaf.shape), initial)
        return self.rows.read(read, initial)

    def _state_of(self, algorithm: Algorithm, public: Any, row: int) -> Any:
        """The state of one client. row: its row, -1 for a client on its first visit."""
        if row < 0 or self.rows is None:
            return self._initial_state(algorithm, public)
        return self.rows.read_one(row)

    def _initial_state(self, algorithm: Algorithm, public: Any) -> Any:
        """The state of a client before its first visit."""
        if self.initial[0] is not public:
            self.initial = public, algorithm.client_init(public)
        return self.initial[1]

    def _save_states(self, under_way: TaskUnderWay, fresh: np.ndarray, write: WriteStates) -> None:
        """Write new states to their fresh rows (c,). write: does so, and returns the digests of the rows.

        States on a device whose rows are in files are written when the task ends, because the processor would have to
        wait for each block.
        """
        if self.rows is None:
            return
        if self.device.type == "cpu" or (isinstance(self.rows, ResidentRows) and self.rows.takes(fresh)):
            self._write_states(under_way.accumulator, self.rows, write)
        else:
            under_way.unwritten.append(write)

    def _write_kept_states(self, under_way: TaskUnderWay) -> None:
        """Write the new states of a task that has ended, as far as they are not written."""
        for write in under_way.unwritten:
            assert self.rows is not None
            self._write_states(under_way.accumulator, self.rows, write)

    def _write_states(self, accumulator: Accumulator, rows: RowFiles | ResidentRows, write: WriteStates) -> None:
        began = time.perf_counter()
        digests = write(rows)
        if self.layout.digests:
            accumulator.clients.setdefault("digest", []).append(digests)
        accumulator.times["state"] += time.perf_counter() - began

    # --- messages ---------------------------------------------------------------------------------------------------
    def _staged(
        self, result: LocalResult, task: TrainingTask, clients: slice | int, accumulator: Accumulator
    ) -> LocalResult:
        """The result with those parts of the messages that are added up. If the run collects messages, they are written
        to rows, and only their facts are added up. clients: positions in the task, or one position."""
        messages = self._messages(task.warm_start)
        if messages is None:
            return result
        began = time.perf_counter()
        alone = isinstance(clients, int)
        leaves: Sequence[Tensor] = vector_leaves(result.message)
        if alone:
            leaves = [leaf.unsqueeze(0) for leaf in leaves]
        if task.clients[0] < self.run_spec.experiment.federation.clients:  # else it is the server's own
            leaves = messages.attacked(leaves, np.atleast_1d(task.clients[clients]), task.round)
        accumulator.clients.setdefault("norms2", []).append(messages.norms2(leaves))
        if messages.files is None:
            leaves = messages.contributions(leaves)
            kept = with_vector_leaves(result.message, [leaf[0] for leaf in leaves] if alone else leaves)
        else:
            messages.files.write(np.atleast_1d(task.position[clients]).tolist(), leaves)
            kept = Message((), (), result.message.facts)
        accumulator.times["reduce"] += time.perf_counter() - began
        return result._replace(message=kept)

    def _messages(self, warm_start: bool) -> StagedMessages | None:
        """The changes to messages before they are added up; None if they are added up unchanged."""
        if self.as_they_are:
            return None
        if warm_start not in self.messages:
            method = self.run_spec.method()
            algorithm = method.warm_start if warm_start else method
            assert algorithm is not None
            message = StateSpec(algorithm, self.x).message
            self.messages[warm_start] = StagedMessages(self.run_spec.stage_plan, message, self.layout.messages)
        return self.messages[warm_start]

    @torch.no_grad()
    def aggregate(self, task: PassTask) -> TaskResult:
        """A part of a pass over the messages of the round."""
        self.beat()
        messages = self._messages(task.round == 0)
        assert messages is not None
        assert messages.files is not None
        return task.run(messages.files, messages.parts)

    # --- batches --------------------------------------------------------------------------------------------------
    def gather(self, columns: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """The rows (n,) of the columns, on the device."""
        self.beat()
        began = time.perf_counter()
        batch = {name: to_device(column.index_select(0, rows), self.device) for name, column in columns.items()}
        self.gather_seconds += time.perf_counter() - began
        return batch

    # --- method and broadcast -------------------------------------------------------------------------------------
    def _trainer_for(self, round: int, warm_start: bool) -> LocalTrainer:
        """The trainer with the method's settings of a round. A new one is made only if schedules change them."""
        # A pass before round 1 has the settings of round 1: schedules begin there.
        version = (max(round, 1) if self.run_spec.method_has_schedule else 1, warm_start)
        if version not in self.trainers:
            method = self.run_spec.method(version[0])
            algorithm = method.warm_start if warm_start else method
            assert algorithm is not None
            # The pass before round 1 is one round: no recording would be proven in it.
            recorder = None if warm_start else self.recorder
            workload, precision = self.run_spec.workload, self.run_spec.precision
            with_rms = self.with_rms and not warm_start
            local = self.run_spec.experiment.federation.local
            trainer = LocalTrainer(
                algorithm,
                workload,
                self.x,
                self.kernels,
                precision,
                recorder,
                with_rms,
                self.frozen,
                local.at_once,
                self.columns.resident,
                fixed_steps=local.steps is not None,
            )
            while len(self.trainers) >= self.most_trainers:
                self.trainers.pop(next(iter(self.trainers)))  # the oldest
            self.trainers[version] = trainer
        return self.trainers[version]

    def _public_state(self, broadcast: Broadcast, algorithm: Algorithm, task: TrainingTask) -> Any:
        """The public state that the clients of a task unpack from a broadcast."""
        version, place, count = broadcast.version, task.public, self.state_spec.public_spec.num_leaves
        self.public = {each: kept for each, kept in self.public.items() if kept.version == version}
        if place not in self.public or self.public[place].round != task.round:
            arrays = broadcast.leaves[place * count : (place + 1) * count]
            leaves = [to_device(torch.from_numpy(leaf.copy()), self.device) for leaf in arrays]
            state = algorithm.unpack(pytree.tree_unflatten(leaves, self.state_spec.public_spec))
            self.public[place] = PublicState(version, task.round, state)
        return self.public[place].state

    # --- evaluation -----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, task: EvaluationTask | OwnModels, broadcast: Broadcast) -> TaskResult:
        """The metrics of the model that was broadcast, on rows of the test set or on rows of some clients."""
        if isinstance(task, OwnModels):
            return self._evaluate_own(task, broadcast)
        if isinstance(task, LossProbe):
            return TaskResult(task.index, [], *self._probe(task, self.parameters(broadcast)))
        (metrics,) = self.metrics([self.parameters(broadcast)], task)
        return TaskResult(task.index, [], *metrics)

    def parameters(self, broadcast: Broadcast) -> Params:
        """The tensors of the model that was broadcast for an evaluation, and its frozen ones."""
        broadcast_tree = Tree(torch.from_numpy(broadcast.leaves[0].copy()).to(self.device), self.x.layout)
        return {**dict(broadcast_tree.items()), **self.frozen}

    def metrics(self, models: Sequence[Params], task: TestSlice | ClientGroup) -> list[Metrics]:
        """The metrics of models of this run's workload, see `evaluate`."""
        workload, data, size = self.run_spec.workload, self.data, self.run_spec.experiment.evaluate.batch
        with self.kernels.around_losses(), evaluating():
            if isinstance(task, TestSlice):
                rows = task.rows(data.train, data.test, data.client_index)
                return evaluate_test_rows(workload, models, rows, task, self.device)
            return evaluate_clients(workload, models, data.train, data.client_index, task, size, self.device)

    def _probe(self, task: LossProbe, p: Params) -> Metrics:
        workload, seed = self.run_spec.workload, self.run_spec.experiment.seed
        with self.kernels.around_losses(), evaluating():
            index = self._index_at(task.round)
            return probe_losses(workload, p, self.data.train, index, task, seed, self.device)

    # --- clients' own models --------------------------------------------------------------------------------------
    @torch.no_grad()
    def own_models(self, task: OwnModels, broadcast: Broadcast) -> Served:
        """What the clients of a task are evaluated with. The broadcast has the server's model and its public state."""
        algorithm = self._trainer_for(task.round, False).algorithm
        x, *leaves = [torch.from_numpy(leaf.copy()).to(self.device) for leaf in broadcast.leaves]
        x = Tree(x, self.x.layout)
        public = algorithm.unpack(pytree.tree_unflatten(leaves, self.state_spec.public_spec))
        models: dict[str, list[Tree]] = {"server": [x] * len(task.clients)} if task.server else {}
        numbers, index = zip(task.clients.tolist(), task.read.tolist(), strict=True), self._everyone_at(task.round)
        served = [self._own_model(algorithm, x, public, number, row, index) for number, row in numbers]
        facts = {name: np.array([told[name].item() for _, told in served]) for name in served[0][1]}
        models["own"] = self._with_statistics([model for model, _ in served], task.clients, index)
        gradients, block = 0.0, self.run_spec.block(x.flat.numel()) if self.vectorise else 1
        for number, tuner in enumerate(self._tuners_for(task.round, algorithm), 1):
            batches = self._tuning_batches(tuner, task)
            tuned = tuner.tuned(models["own"], batches, block, self.beat)
            models[adapted(number)] = self._with_statistics(tuned, task.clients, index)
            gradients += float(batches.drawn.steps.sum())
        return Served(models, facts, gradients, self._statistics_gradients(models, task.clients, index))

    def _statistics_gradients(self, models: Iterable[str], clients: np.ndarray, index: ClientIndex) -> float:
        """How many gradients the running statistics of these kinds of models of clients (c,) have taken."""
        spec = self.run_spec
        if spec.client_models.statistics == "model":
            return 0.0
        batches = -(-rows_of(index, "training").sizes_of(clients) // spec.experiment.evaluate.batch)
        return float(batches.sum() * sum(name != "server" for name in models))

    def _with_statistics(self, models: list[Tree], clients: np.ndarray, index: ClientIndex) -> list[Tree]:
        """Clients' models, with the running statistics of the clients' own rows if the run is to find them."""
        spec = self.run_spec
        if spec.client_models.statistics == "model":
            return models
        size, momenta = spec.experiment.evaluate.batch, momenta_of(spec.workload.outline)
        own = OwnStatistics(spec.workload, self.frozen, momenta, size, spec.experiment.seed, self.beat)
        rows = ClientRows.of(self.data.train, rows_of(index, "training"), clients, self.device, spec.workload)
        pairs = zip(models, clients.tolist(), pairwise(rows.ends), strict=True)
        return [own.measured(z, client, rows.between(*ends)) for z, client, ends in pairs]

    def _evaluate_own(self, task: OwnModels, broadcast: Broadcast) -> TaskResult:
        """The metrics of clients' own models."""
        models, columns, gradients, of_statistics = self.own_models(task, broadcast)
        index = self._everyone_at(task.round)
        with self.kernels.around_losses(), evaluating():
            for kind in task.kinds:
                own, workload = rows_of(index, kind), self.run_spec.workload
                rows = ClientRows.of(self.data.train, own, task.clients, self.device, workload)
                if not rows.ends[-1]:
                    continue
                columns[f"{kind}{WHO_HAS}"] = task.clients
                for name, found in self._reports_of(models, rows).items():
                    for metric, values in found.items():
                        columns |= self._of_clients(f"{name}/{kind}_{metric}", metric, values, task.clients)
        facts = {"gradients": gradients, "statistics": of_statistics}
        return TaskResult(task.index, [], facts, {"id": task.clients, **columns})

    def _of_clients(self, key: str, metric: str, values: np.ndarray, clients: np.ndarray) -> dict[str, np.ndarray]:
        """A metric (c,) of clients; of one that they may lack, the values that there are, and whose they are."""
        if metric in self.reports.averaged:
            return {key: values}
        there = ~np.isnan(values)
        return {key: values[there], f"{key}{WHO_HAS}": clients[there]}

    def _reports_of(self, models: dict[str, list[Tree]], rows: ClientRows) -> dict[str, dict[str, np.ndarray]]:
        """The reports on clients' rows: model -> metric -> (c,). models: those of `_evaluate_own`."""
        found: dict[str, dict[str, np.ndarray]] = {}
        if "server" in models:
            x = models["server"][0]
            found["server"] = self.reports.of_one_model(x, rows, by_chain=True)
            same = np.array([torch.equal(model.flat, x.flat) for model in models["own"]])
            own = found["server"] if same.all() else self.reports.of_own_models(models["own"], rows)
            # Rounding differs between batches of other sizes, and equal models have equal numbers.
            found["own"] = {metric: np.where(same, found["server"][metric], values) for metric, values in own.items()}
        for name in [name for name in models if name not in found]:
            found[name] = self.reports.of_own_models(models[name], rows)
        return found

    def _own_model(
        self, algorithm: Algorithm, x: Tree, public: Any, number: int, row: int, index: ClientIndex
    ) -> tuple[Tree, dict[str, Tensor]]:
        """(the model that a client is evaluated with, `Algorithm.client_facts`). row: of its state, -1 before its first
        visit. index: the rows that clients train on, or would train on."""
        client = self._state_of(algorithm, public, row)
        if algorithm.own_view:
            public, _ = self._seen(algorithm, public, client, number, index)
        return algorithm.client_model(x, public, client), algorithm.client_facts(public, client)

    def _tuners_for(self, round: int, algorithm: Algorithm) -> list[Tuner]:
        """What tunes clients' models with the method's settings of a round, for each adaptation."""
        version = round if self.run_spec.method_has_schedule else 1
        if version not in self.tuners:
            self.tuners = {version: [self._tuner(each) for each in self.run_spec.adaptations(algorithm)]}
        return self.tuners[version]

    def _tuner(self, adaptation: Adaptation) -> Tuner:
        workload, wanted = self.run_spec.workload, adaptation.tensors
        frozen = [name for name in self.run_spec.kept_apart.frozen if wanted is None or name in wanted]
        freed = {name: self.frozen[name] for name in frozen}
        given = {
            "kernels": self.kernels,
            "precision": self.run_spec.precision,
            "frozen": {name: tensor for name, tensor in self.frozen.items() if name not in freed},
            "at_once": self.run_spec.experiment.federation.local.at_once,
        }
        return Tuner(adaptation, self.x, freed, workload.buffers, workload=workload, **given)

    def _tuning_batches(self, tuner: Tuner, task: OwnModels) -> TaskBatches:
        """The batches on which clients tune their models, drawn alike in all rounds, and otherwise than in training."""
        index, seed = self._everyone_at(task.round), self.run_spec.experiment.seed
        own = int(counted.key(seed, "adapt")) & LARGEST_SEED
        drawn = stream(index, task.clients, np.zeros(len(task.clients), dtype=np.int64), tuner.local(index), own)
        return TaskBatches.of(drawn, self.columns, self.x.flat.dtype, self.gather)
