"""How the results of an update come about in a synchronous run: the workers train all of its clients in one phase."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm
from ..cohorts.tasks import TrainingTask
from ..errors import ClientFailed
from ..fleet.planner import Update
from ..method_form.state_spec import StateSpec
from ..reduction.round_totals import RoundTotals

if TYPE_CHECKING:
    from .driver import Driver


class Training:
    """Has the workers train the clients of the driver's updates, one update after another."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def totals(self, method: Algorithm, state_spec: StateSpec, number: int, update: Update) -> RoundTotals:
        """The sums of an update's results, which are reserved in the table of client states until `commit`.

        method: with its settings of this update. state_spec: of the method. number: of the update, 0 for the pass over
        all clients. Raises ClientFailed if no client is left.
        """
        driver, clients, when = self.driver, update.clients, (number, number == 0)
        columns = (driver.visits[clients], update.weights, *driver.table.reserve(clients))
        tasks = [TrainingTask.of(task, when, clients, columns, update.steps) for task in update.tasks]
        tasks, silent = driver.stage.without_silent(tasks, number)
        if any(len(task.clients) for task in tasks):
            meanwhile = partial(driver.prepare, number)
            totals = driver.run("train", tasks, method.broadcast(driver.server), meanwhile)
        else:
            leaves = pytree.tree_leaves(driver.stage.summed(state_spec).message)
            totals = RoundTotals.of_nobody([tuple(leaf.shape) for leaf in leaves])
        if not totals.leaves:
            raise ClientFailed(
                number, tuple(clients.tolist()), "no client of the cohort is left, see the log", "workers"
            )
        dropped, facts, divisor = (*totals.dropped, *silent), totals.facts, update.divisor
        driver.tell_notes(number, facts)
        if divisor is None and update.divided is not None:
            divisor = float(update.divided[~np.isin(clients, dropped)].sum())
        if divisor is not None:
            facts = {**facts, "divisor": divisor}
        return totals._replace(dropped=dropped, facts=facts)

    def commit(self, update: Update, totals: RoundTotals) -> None:
        """Make the clients' new states, which `totals` has told of, those of the table."""
        driver = self.driver
        driver.table.commit(totals.digests(update.clients), totals.dropped)
        driver.visits[np.setdiff1d(update.clients, totals.dropped)] += 1

    def pause(self) -> None:
        """Let the tasks under way end, and begin no others, since a phase of another kind is about to begin."""

    def leaves(self) -> list[Tensor]:
        """What a checkpoint has besides the states of server, stage and planner."""
        return []

    def restore(self, leaves: list[Tensor]) -> None:
        """Take what `leaves` gave to the checkpoint that the run goes on from, after the driver has taken the rest."""
