"""How the results of an update come about in a synchronous run: the workers train all of its clients in one phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Server
from ..aggregation.stage import StageRunner
from ..cohorts.tasks import TrainingTask
from ..errors import ClientFailed
from ..fleet.planner import Update
from ..method_form.state_spec import StateSpec
from ..reduction.round_totals import RoundTotals
from ..state.row_table import RowTable
from .phases import Phases


class Training:
    """Has the workers train the clients of one update after another."""

    def __init__(self, phases: Phases, stage: StageRunner, table: RowTable, visits: np.ndarray) -> None:
        """table: of the client states. visits: (N,) how often each client has taken part, which is written to."""
        self.phases, self.stage, self.table, self.visits = phases, stage, table, visits

    def totals(
        self, method: Algorithm, state_spec: StateSpec, server: Server, number: int, update: Update,
        meanwhile: Callable[[], Any],
    ) -> RoundTotals:  # fmt: skip
        """The sums of an update's results. Their new client states are kept in the table until `commit`.

        method: with its settings of this update. state_spec: of the method. number: of the update, 0 for the pass over
        all clients. meanwhile: work for this process while the workers are busy. Raises ClientFailed if no client is
        left.
        """
        clients, when = update.clients, (number, number == 0)
        columns = (self.visits[clients], update.weights, *self.table.reserve(clients))
        tasks = [TrainingTask.of(task, when, clients, columns, update.steps) for task in update.tasks]
        tasks, silent = self.stage.without_silent(tasks, number)
        if any(len(task.clients) for task in tasks):
            totals = self.phases.run("train", tasks, method.broadcast(server), meanwhile)
        else:
            message = self.stage.summed(state_spec).message
            totals = RoundTotals.of_nobody([tuple(leaf.shape) for leaf in pytree.tree_leaves(message)])
        if not totals.leaves:
            cause = "no client of the cohort is left, see the log"
            raise ClientFailed(number, tuple(clients.tolist()), cause, "workers")
        dropped, facts, divisor = (*totals.dropped, *silent), totals.facts, update.divisor
        self.phases.tell_notes(number, facts)
        if divisor is None and update.divided is not None:
            divisor = float(update.divided[~np.isin(clients, dropped)].sum())
        if divisor is not None:
            facts = {**facts, "divisor": divisor}
        return totals._replace(dropped=dropped, facts=facts)

    def commit(self, update: Update, totals: RoundTotals) -> None:
        """Make the new states of the update's clients, which `totals` has told of, those of the table."""
        self.table.commit(totals.digests(update.clients), totals.dropped)
        self.visits[np.setdiff1d(update.clients, totals.dropped)] += 1

    def pause(self) -> None:
        """Let the tasks under way end, and begin no others, since a phase of another kind is about to begin."""

    def leaves(self) -> list[Tensor]:
        """What a checkpoint has besides the states of server, stage and planner."""
        return []

    def restore(self, number: int, leaves: list[Tensor]) -> None:
        """Take what `leaves` gave to the checkpoint of an update. number: of the update."""
