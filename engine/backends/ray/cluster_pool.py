"""A run's workers on several nodes: the driver calls each, brings rows to where they are read, and outlives nodes.

A node that is lost costs the tasks under way on it, and those of the round whose fresh rows went with it, another run
elsewhere. Rows that were committed there are on the driver's node too if a checkpoint names them; if some are not,
`RowsLost` sends the driver back to the last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from ...cohorts.tasks import Broadcast, TrainingTask
from ...config.run_spec import RunSpec
from ...errors import NoRoom, RowsLost, WorkersLost
from ...reduction.tree import PartialSum, TaskResult
from ...state.table import Table
from ..base import Call, Failure
from .cluster_nodes import ANSWER_SECONDS, Given, Seat, Site, Sites, answers
from .locality import DRIVER, Desk, reads
from .node_agent import UNMOVED
from .nodes import cluster
from .phase import Phase
from .placement import Room
from .task_splitting import Piece, cut, key
from .worker_handle import death
from .worker_pool import DEATHS, LOOK_SECONDS, start_seconds

Check = Callable[[], None]
Tell = Callable[[str], None]


class Spread:
    """check: called while waiting; may raise to stop. tell: is told what a log should have. table: of which the
    committed rows must stay. steps: (N,) of each client in a round."""

    def __init__(
        self, run_spec: RunSpec, data: Sequence[Any], table: Table, calls: tuple[Check, Tell], steps: np.ndarray
    ) -> None:
        check, tell = calls
        self.steps = steps
        self.run_spec, self.table, self.check, self.tell = run_spec, table, check, tell
        self.sites = Sites(run_spec, data, table, tell)
        self.where = self.sites.where
        self.desk = Desk(self.where, steps)
        self.deaths = 0
        self.working: dict[Any, Seat] = {}  # reference -> who works on it
        self.young, self.fresh = True, []  # a phase whose tasks are still being put
        self.phase = Phase()
        table.gather = self.sites.gather
        table.brought = lambda rows: self.where.wrote(DRIVER, rows)

    def open(self, room: Room) -> None:
        """Start the first workers, and wait for them."""
        nodes, sites = {node.id: node for node in cluster()}, self.sites
        sites.site(next(iter(nodes.values())))
        sites.room = room
        for bundle, spot in enumerate(room.spots):
            sites.coming.append(sites.seat(sites.site(nodes[spot.node]), spot.group, bundle))
        limit = self.run_spec.experiment.engine.wait + start_seconds(self.run_spec)
        end = time.monotonic() + limit
        try:
            while sites.coming:
                ray.wait([seat.ready for seat in sites.coming], timeout=LOOK_SECONDS)
                self.check()
                sites.arrive()
                if not sites.coming and not sites.seats:
                    self._grow()
                if sites.coming and time.monotonic() > end:
                    raise NoRoom(
                        f"engine.workers: {len(sites.coming)} workers have not started within {limit:g} s, the first "
                        f"is {sites.coming[0].name}; look at `ray status` on the cluster's head, or raise engine.wait"
                    )
            if not sites.seats:
                raise WorkersLost(f"no worker is left that can run clients, the last: {sites.last}")
        except BaseException:
            sites.close()
            raise
        self.tell(f"{len(sites.seats)} workers on {len({seat.site.id for seat in sites.seats})} nodes")

    def _grow(self) -> None:
        """Workers for nodes that joined, and for those that were lost."""
        nodes = cluster()
        for site in self.sites.sites:
            if site.alive and site.id not in {node.id for node in nodes}:
                self._lost_node(site)
        self.sites.grow(nodes)

    # --- tasks --------------------------------------------------------------------------------------------------------
    def start(self, call: Call, shared: Broadcast) -> None:
        self.call: Call = call
        self.version = shared.version
        self.leaves = ray.put(shared.leaves)
        self.sum_bytes = 2 * sum(leaf.nbytes for leaf in shared.leaves)  # about: float64, and like what is broadcast
        self.phase.clear()
        self.young = True
        self.fresh.clear()
        if call == "train":
            self._grow()
            self.sites.arrive()

    def put(self, task: Any) -> None:
        """Those of a phase come before the first `get`; later ones are run whole, and their sums come with them."""
        if self.young:
            self.fresh.append(task)
        else:
            self.phase.late.add(task.index)
            self.desk.put(task)

    def go(self) -> None:
        if self.young:
            self._begin()
            self.desk.hand_out(self.sites.seats, self._give)

    def get(self) -> tuple[Any, TaskResult | Failure]:
        self.go()
        while not self.phase.over or self.phase.again:  # no result before the rows of those before it are there
            self._step()
        return self.phase.over.popleft()

    def rest(self) -> Iterator[PartialSum]:
        while gone := self.phase.held.missing():
            self._survey()
            for task in self.phase.lose_sums(gone):
                self.desk.put(task)
            while self.phase.again:
                self._step()
        yield from self.phase.rest()

    def _begin(self) -> None:
        """The phase's tasks are known."""
        self.young = False
        self.desk.begin(self.phase.begin(self.fresh), self.table.width, self.sum_bytes)
        for task in cut(self.fresh, len(self.sites.seats), self.steps):
            self.desk.put(task)
        self.fresh.clear()

    def _step(self) -> None:
        """Hand out what waits; wait for news."""
        self.desk.hand_out(self.sites.seats, self._give)
        waiting = list(self.working) or [seat.ready for seat in self.sites.coming]
        if not waiting:
            self._grow()
            if not self.sites.coming:
                last = f", the last: {self.sites.last}" if self.sites.last else ""
                raise WorkersLost(f"no worker is left, and no node has room for another{last}")
            return
        ready, _ = ray.wait(waiting, timeout=LOOK_SECONDS)
        self.check()
        self._died(self.sites.arrive(), "as they started")
        for reference in ready:
            if reference in self.working:
                self._returned(reference)

    def _give(self, seat: Seat, task: Any) -> None:
        moves = self.sites.bring(task, seat.site)
        news, sums = seat.actor.do.remote(self.call, task, self.version, self.leaves, moves)
        seat.calls.append(Given(news, sums, task))
        self.working[news] = seat

    def _returned(self, news: Any) -> None:
        seat = self.working[news]
        given = next(each for each in seat.calls if each.news == news)
        try:
            result: Any = ray.get(news)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from cause.__cause__
        except RayError as error:
            self._lost(seat, death(error, self.run_spec))
            return
        self.working.pop(news)
        seat.calls.remove(given)
        if isinstance(result, Failure) and result.cause.startswith(UNMOVED):
            self._survey()
            self.desk.put(given.task)
            return
        if isinstance(result, Failure) and result.kind == "worker":
            for task in [given.task, *(other.task for other in self._leave(seat))]:
                self.desk.put(task)
            self.sites.retire(seat, result.cause)
            return
        self.deaths = 0
        if isinstance(given.task, TrainingTask | Piece):
            self.where.copied(seat.site.number, reads(given.task))
            if not isinstance(result, Failure):
                try:
                    result = self.phase.summed(seat.site, given, result)
                except RayError:
                    self._survey()
                    self.desk.put(given.task)
                    return
                self.sites.timed(seat, result.facts)
                self.where.wrote(seat.site.number, given.task.write)
                self.phase.done[key(given.task)] = (given.task, seat.site.number)
        self._ended(given.task, result)

    def _ended(self, task: Any, result: Any) -> None:
        if not self.phase.ended(task, result):
            self.desk.put(task)

    # --- what is lost -------------------------------------------------------------------------------------------------
    def _lost(self, seat: Seat, why: Failure) -> None:
        """A worker is gone: blame the task that it was at, unless its whole node is gone."""
        if not answers(seat.site):
            self._lost_node(seat.site)
            return
        where, cause = seat.name, why.cause
        stack = ray.get(seat.site.keeper.stack.remote(seat.number), timeout=ANSWER_SECONDS)
        self._died(1, cause)
        if stack:
            patience = self.run_spec.experiment.engine.patience
            self.tell(f"{where} has taken no step for {patience:g} s; its stack:\n{stack}")
            cause = f"no step for {patience:g} s (engine.patience)"
            why = Failure(cause, "")
        self.tell(f"{where}: {cause}; another one starts")
        first, *later = self._leave(seat)
        for other in later:
            self.desk.put(other.task)
        self._ended(first.task, why._replace(where=where))
        self.sites.coming.append(self.sites.seat(seat.site, seat.group, seat.bundle))

    def _died(self, count: int, cause: str) -> None:
        self.deaths += count
        if self.deaths > DEATHS:
            raise WorkersLost(f"{self.deaths} workers died in a row without finishing a task, the last: {cause}")

    def _leave(self, seat: Seat) -> list[Given]:
        """The worker is no more; what it had been given."""
        ray.kill(seat.actor)
        if seat in self.sites.seats:
            self.sites.seats.remove(seat)
        for given in seat.calls:
            self.working.pop(given.news)
        return seat.calls

    def _survey(self) -> None:
        for site in self.sites.sites:
            if site.alive and not answers(site):
                self._lost_node(site)

    def _lost_node(self, site: Site) -> None:
        """Its tasks go elsewhere; RowsLost where that is not enough."""
        site.alive = False
        self.where.lose(site.number)
        self.sites.coming = [seat for seat in self.sites.coming if seat.site is not site]
        tasks = [call.task for seat in list(self.sites.seats) if seat.site is site for call in self._leave(seat)]
        for task in tasks:
            self.desk.put(task)
        gone = self.phase.lose(site, rows=bool(self.table.place.folder))
        for task in gone:
            self.desk.put(task)
        self.tell(
            f"node {site.name} is lost: {len(tasks)} tasks under way go elsewhere, {len(gone)} of this round are run "
            "again for the states and sums that went with it"
        )
        committed = self.table.row[self.table.row >= 0]
        if self.table.place.folder and len(lost := self.where.gone(committed)):
            self._forget()
            raise RowsLost(f"the states of {len(lost)} clients were lost with node {site.name}")

    def _forget(self) -> None:
        """Let the round go: workers finish what they have been given, and nobody listens."""
        self.desk.forget()
        self.phase.clear()
        for seat in self.sites.seats:
            if seat.calls:
                ray.wait([given.news for given in seat.calls], num_returns=len(seat.calls))
            for given in seat.calls:
                self.working.pop(given.news, None)
            seat.calls = []

    # --- the end ------------------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, float]:
        """Nodes with workers; bytes of states that were copied between nodes to be read (not for checkpoints); results
        on other nodes, sums that came from there, and their bytes."""
        moved, self.sites.moved = self.sites.moved, 0
        nodes = {seat.site.number for seat in self.sites.seats}
        return {"node/count": len(nodes), "node/bytes_moved": moved * self.table.width, **self.phase.held.facts()}

    def close(self) -> None:
        self.sites.close()
