"""The phases of a run, and how the results of a synchronous round come about: all of its clients train in one phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Server
from ..aggregation.stage import StageRunner
from ..cohorts.tasks import Broadcast, TrainingTask, tree_shape
from ..errors import ClientFailed
from ..fleet.planner import Update
from ..method_form.state_spec import StateSpec
from ..reduction.tree import RoundTotals, TaskResult, reduce_in_order
from ..state.row_table import RowTable
from .pool import Call, Phase, Phases


class PhaseMaker:
    """Makes the phases of a run, and logs what workers find in them."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """log: adds a line to the log of the run."""
        self.log = log
        self.version = 0  # of the last broadcast
        self.notes: set[str] = set()  # that the log has

    def next_version(self) -> int:
        """The version of a further broadcast."""
        self.version += 1
        return self.version

    def totals(
        self, call: Call, tasks: Sequence[Any], state: Any, meanwhile: Callable[[], Any] | None = None
    ) -> Phases[RoundTotals]:
        """Yield a phase of tasks that read `state`, and add up their results. meanwhile: work for this process while
        the workers are busy."""
        broadcast = Broadcast(self.next_version(), [leaf.cpu().numpy() for leaf in pytree.tree_leaves(state)])
        empty = [isinstance(task, TrainingTask) and not len(task.clients) for task in tasks]  # all of them are silent
        work = [task for task, nobody in zip(tasks, empty, strict=True) if not nobody]
        known = [TaskResult.nothing(task) for task, nobody in zip(tasks, empty, strict=True) if nobody]
        shape = tree_shape(tasks)
        results = yield Phase(call, work, broadcast, shape)
        if meanwhile is not None:
            meanwhile()
        return reduce_in_order(shape, chain(known, results))

    def of_pass(self, tasks: Sequence[Any]) -> Phase:
        """A pass over the messages of a round."""
        return Phase("aggregate", tasks, Broadcast(self.next_version(), []))

    def tell_notes(self, number: int, notes: Iterable[str]) -> None:
        """Log what workers found, each sentence once. number: of the round. notes: of a task or of a round."""
        for note in sorted(notes):
            self.tell_once(number, note, note)

    def tell_once(self, number: int, note: str, kind: str) -> None:
        """Log a sentence on a round, unless the log has one of this kind."""
        if kind not in self.notes:
            self.notes.add(kind)
            self.log(f"round {number}: {note}")


class Training:
    """Has the workers train the clients of one update after another."""

    def __init__(self, phases: PhaseMaker, stage: StageRunner, table: RowTable, visits: np.ndarray) -> None:
        """table: of the client states. visits: (N,) how often each client has taken part, which is written to."""
        self.phases, self.stage, self.table, self.visits = phases, stage, table, visits

    def totals(
        self, method: Algorithm, state_spec: StateSpec, server: Server, number: int, update: Update,
        meanwhile: Callable[[], Any],
    ) -> Phases[RoundTotals]:  # fmt: skip
        """Yield phases, and return the sums of an update's results. Their new client states are kept in the table until
        `commit`.

        method: with its settings of this update. state_spec: of the method. number: of the update, 0 for the pass over
        all clients. meanwhile: work for this process while the workers are busy. Raises ClientFailed if no client is
        left of those that began.
        """
        clients = update.clients
        tasks, silent = self._tasks(number, update, self.visits, *self.table.reserve(clients))
        if any(len(task.clients) for task in tasks):
            totals = yield from self.phases.totals("train", tasks, method.broadcast(server), meanwhile)
        else:
            message = self.stage.summed(state_spec).message
            totals = RoundTotals.of_nobody([tuple(leaf.shape) for leaf in pytree.tree_leaves(message)])
        if not totals.leaves:
            cause = "no client of the cohort is left, see the log"
            raise ClientFailed(number, tuple(clients.tolist()), cause, "workers")
        self.phases.tell_notes(number, totals.notes)
        totals = totals._replace(dropped=(*totals.dropped, *silent))
        divisor = update.divisor_without(totals.dropped)
        return totals if divisor is None else totals._replace(facts={**totals.facts, "divisor": divisor})

    def tasks_after(self, update: Update, number: int, following: Update) -> list[TrainingTask]:
        """The tasks of the update `number`, which follows another one, but for the rows of states. They are others if a
        client of the update before is dropped."""
        visits, nowhere = self.visits.copy(), np.full(len(following.clients), -1)
        visits[update.clients] += 1
        return self._tasks(number, following, visits, nowhere, nowhere)[0]

    def _tasks(
        self, number: int, update: Update, visits: np.ndarray, read: np.ndarray, write: np.ndarray
    ) -> tuple[list[TrainingTask], tuple[int, ...]]:
        """(the tasks of an update, the clients that send nothing). visits: (N,). read, write: see `TrainingTask`, of
        the update's clients."""
        clients, when = update.clients, (number, number == 0)
        columns = (visits[clients], update.weights, read, write)
        tasks = [TrainingTask.of(task, when, clients, columns, update.steps) for task in update.tasks]
        return self.stage.without_silent(tasks, number)

    def row_after(self, update: Update, totals: RoundTotals) -> np.ndarray:
        """(N,) the row of each client's state as `commit` with the same arguments would leave it."""
        return self.table.row_after(totals.dropped)

    def commit(self, update: Update, totals: RoundTotals) -> np.ndarray:
        """Make the new states of the update's clients, which `totals` has told of, those of the table. Returns the
        clients that have taken part."""
        self.table.commit(totals.digests(update.clients), totals.dropped)
        used = np.setdiff1d(update.clients, totals.dropped) if totals.dropped else update.clients
        self.visits[used] += 1
        return used

    def pause(self) -> None:
        """Let the tasks under way end, and begin no others, since a phase of another kind is about to begin."""

    def leaves(self) -> list[Tensor]:
        """What a checkpoint has besides the states of server, stage and planner."""
        return []

    def restore(self, number: int, leaves: list[Tensor]) -> None:
        """Take what `leaves` gave to the checkpoint of an update. number: of the update."""
