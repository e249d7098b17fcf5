"""How the results of an update come about in an asynchronous run: from jobs that began from several versions.

The timeline says in advance which job is used by which update. The jobs of one version of the model run in vectorised
blocks; a block is ready once its version is there, and an update is made once all blocks with a job of it have ended.
Workers take ready blocks in the order of the updates that need them first, so they go on with blocks of later updates
while the driver makes one. Results wait as sums for their updates. An update adds the sums of its versions in ascending
order, and those of one version in the order of the tree over its blocks. Neither depends on the workers.

A checkpoint has, besides what every run has, the broadcasts of those versions whose jobs are not all used yet. A run
that is resumed computes their results again in the same blocks, and so to the same bits.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Server
from ..aggregation.stage import StageRunner
from ..cohorts.tasks import (
    Broadcast,
    ClientTask,
    TrainingTask,
    most_blocks,
    plan_tasks,
)
from ..errors import ClientFailed
from ..fleet.asynchronous import AsynchronousPlanner
from ..fleet.planner import Update
from ..fleet.timeline import UNUSED, Job
from ..method_form.batch_norm import buffers_in
from ..method_form.state_spec import StateSpec
from ..reduction.tree import TIMES, Leaves, RoundTotals, Sums, TaskResult, TreeShape, add_sparse, add_sums
from ..state.row_table import RowTable
from .pool import Phase, Phases, Results
from .training import PhaseMaker, Training


class ClientResult(NamedTuple):
    """What is known of one job that has run, besides its message. row: the fresh row of its client's new state."""

    row: int
    digest: np.ndarray | None
    loss: float
    norm2: float
    steps: int


SPENT = (*TIMES, "seconds", "looks")
"""What the tasks since the last update have taken together."""


class Block(NamedTuple):
    """A block of the jobs of one version. due: the number of the update before which it runs; number: of the block on
    the lowest level of the tree of its version. jobs: of its clients, in order."""

    due: int
    number: int
    jobs: list[Job]


class Group(NamedTuple):
    """Blocks of one version that run as one task, in ascending order. due: that of the first."""

    due: int
    version: int
    first: int  # the number of the first block
    blocks: list[Block]

    @property
    def jobs(self) -> list[Job]:
        """Those of all blocks, in order."""
        return [job for block in self.blocks for job in block.jobs]


class Running:
    """The phase of local training that is under way."""

    def __init__(self, version: int) -> None:
        self.broadcast = Broadcast(version, [])
        self.versions: list[int] = []  # whose public states are in the broadcast, in its order
        self.given: dict[int, tuple[Group, np.ndarray]] = {}  # task -> its blocks, the rows of its clients' new states
        self.count = 0  # of the tasks
        self.ending = False  # whether there shall be no more tasks
        self.results: Results = iter(())


class Stream(Training):
    """Has the workers train the jobs of all updates in one stream, as far as they can run.

    It begins after the last committed update; jobs that were in flight then run again if an update needs them.
    """

    def __init__(
        self, phases: PhaseMaker, stage: StageRunner, table: RowTable, visits: np.ndarray, planner: AsynchronousPlanner,
        state_spec: StateSpec, keeps: bool,
    ) -> None:  # fmt: skip
        """keeps: whether the run has checkpoints. Other parameters: see `Training`."""
        super().__init__(phases, stage, table, visits)
        self.planner, self.state_spec, self.keeps, self.run_spec = planner, state_spec, keeps, planner.run_spec
        self.pace, self.federation, self.number = planner.pace, planner.federation, 0  # of the last update
        self.removed = frozenset(self.federation.without)
        self.keeps_nothing = not pytree.tree_leaves(state_spec.client)
        self.has_origins = self.pace.base == "current" or state_spec.statistics > 0
        """Whether sums of changes are made ones of changes of the newest model, or of its running statistics."""
        self.whole = planner.timeline.fleet.work.whole  # whether every client does all of its local work
        self.running: Running | None = None
        self.planned = 0  # the blocks of all versions below are known
        self.settled = 0  # all jobs of the versions below have been used
        self.broadcasts: dict[int, list[np.ndarray]] = {}  # version -> leaves of its public state
        self.origins: dict[int, Tensor] = {}  # version -> what `_rebase` needs of the model that its jobs begin from
        self.last_use: dict[int, int] = {}  # version -> the last update that uses one of its jobs
        self.groups: list[Group] = []  # a heap of those that no worker has been given
        self.unfinished: dict[int, int] = {}  # version -> its groups that have not ended
        self.sums: dict[int, dict[int, dict[int, Sums]]] = {}  # update -> version -> number of the block -> its sums
        self.results: dict[Job, ClientResult] = {}  # of jobs that have run, and whose updates are yet to come
        self.dropped: set[Job] = set()  # that have no result
        self.spent: dict[str, float] = defaultdict(float)  # by the workers since the last update

    # --- an update ----------------------------------------------------------------------------------------------------
    def totals(
        self, method: Algorithm, state_spec: StateSpec, server: Server, number: int, update: Update,
        meanwhile: Callable[[], Any],
    ) -> Phases[RoundTotals]:  # fmt: skip
        if number == 0:
            return (yield from super().totals(method, state_spec, server, number, update, meanwhile))
        self._publish(method, server)
        jobs = self.planner.jobs(number)
        removed = {job for job in jobs if job.client in self.removed}
        self.dropped |= removed
        yield from self._wait_for(jobs)
        used = [job for job in jobs if job not in self.dropped]
        dropped = tuple(job.client for job in jobs if job in self.dropped)
        if not used and len(removed) == len(jobs):
            return RoundTotals.of_nobody(state_spec.shapes)._replace(dropped=tuple(sorted(dropped)))
        if not used:
            raise ClientFailed(number, dropped, "no client of the update is left, see the log", "workers")
        began = time.perf_counter()
        leaves, facts = self._sum(number, state_spec, used)
        seconds = time.perf_counter() - began
        results = [self.results[job] for job in used]
        clients = {
            "id": np.array([job.client for job in used]),
            **{name: np.array([getattr(each, name) for each in results]) for name in ("loss", "norm2", "steps")},
        }
        spent = {name: self.spent[name] for name in SPENT}
        self.spent.clear()
        return RoundTotals(leaves, {**facts, **spent}, clients, dropped, seconds)

    def _sum(self, number: int, state_spec: StateSpec, used: list[Job]) -> tuple[Leaves, dict[str, float]]:
        """(the sums of the update's messages, sums of facts by name with what the displacements are divided by)."""
        total = Sums([], {})
        weights = {job: self.planner.weights(number)[job] for job in used}
        by_steps = any(weight.added != weight.mixed for weight in weights.values())
        for version, blocks in sorted(self.sums[number].items()):
            of_version = add_sparse(blocks, add_sums)
            mixed = sum(weight.mixed for job, weight in weights.items() if job.version == version)
            self._rebase(state_spec, of_version.leaves, version, mixed if by_steps else of_version.facts["weight"])
            total = add_sums(total, of_version)
        own, stale = (sum(getattr(weight, name) for weight in weights.values()) for name in ("own", "stale"))
        fresh = all(weight.own == weight.added for weight in weights.values())
        in_order = all(weight.stale == weight.added for weight in weights.values())
        divisors = {
            "buffer": total.facts["weight"] if fresh else own,  # if it is the same, added in the order of a round
            "weights": total.facts["weight"] if in_order else stale,
            "none": 1.0,
        }
        return total.leaves, {**total.facts, "divisor": divisors[self.pace.divide]}

    def _rebase(self, state_spec: StateSpec, leaves: Leaves, version: int, weight: float) -> None:
        """Make the sum of changes of the model of `version` one of changes of the newest model, for base=current. With
        another base this is done for running statistics only: their change is added to the newest ones, and the sum
        shall be what the clients have measured."""
        if version not in self.origins:
            return
        assert len(pytree.tree_leaves(state_spec.message.delta)) == 1
        moved = (self.origins[version] - self.origins[self.number]).to(torch.float64).cpu().numpy()
        leaves[0][..., -moved.size :] += weight * moved

    # --- blocks -------------------------------------------------------------------------------------------------------
    def _publish(self, method: Algorithm, server: Server) -> None:
        """Keep the broadcast of the newest version, and plan the blocks of all versions that have none."""
        version = self.number
        if version not in self.broadcasts:
            public = method.broadcast(server)
            self.broadcasts[version] = [leaf.cpu().numpy().copy() for leaf in pytree.tree_leaves(public)]
            if self.pace.base == "current":
                self.origins[version] = method.origin(method.unpack(public)).flat.clone()
            elif (buffers := buffers_in(public)) is not None:
                self.origins[version] = buffers.flat.clone()
        for each in range(self.planned, version + 1):
            groups = self._groups_of(each) if each in self.broadcasts else []
            self.unfinished[each] = len(groups)
            for group in groups:
                heapq.heappush(self.groups, group)
        self.planned = version + 1

    def _groups_of(self, version: int) -> list[Group]:
        """The blocks of a version as tasks: those that are due at nearly the same time together."""
        most = most_blocks(self.state_spec.sum_bytes * self.planner.block)
        groups: list[Group] = []
        for block in sorted(self._blocks_of(version)):
            if groups and block.due <= groups[-1].due + 1 and len(groups[-1].blocks) < most:
                groups[-1].blocks.append(block)
            else:
                groups.append(Group(block.due, version, block.number, [block]))
        return groups

    def _blocks_of(self, version: int) -> list[Block]:
        """The blocks of a version's jobs, without those whose jobs are not used by any update to come."""
        jobs = sorted(self.planner.timeline.of_version(version), key=lambda job: (job.client, job.refill))
        if not jobs:
            return []
        sizes = self.planner.client_index.sizes_of(np.array([job.client for job in jobs], dtype=np.int64))
        steps = None if self.whole else np.array([job.steps for job in jobs], dtype=np.int64)
        plan = plan_tasks(np.arange(len(jobs)), sizes, self.federation.local, self.planner.block, steps)
        depth, found = TreeShape([len(task.cuts) for task in plan]).depth, []
        for task in plan:
            for place, (begin, end) in enumerate(zip((0, *task.cuts), task.cuts, strict=False)):
                own = [jobs[position] for position in task.clients[begin:end].tolist()]
                if targets := [job.target or 0 for job in own if self._is_ahead(job)]:
                    due = min(
                        *targets, version + self.pace.versions - 2
                    )  # late enough; versions must give way to others
                    found.append(Block(due, (task.index << depth) + place, own))
        return found

    def _is_ahead(self, job: Job) -> bool:
        """Whether an update of this run that is yet to come uses the job."""
        ahead = job.target is not None and self.number < job.target <= self.run_spec.last_round
        return ahead and job.client not in self.removed

    # --- running blocks -----------------------------------------------------------------------------------------------
    def _wait_for(self, jobs: list[Job]) -> Phases[None]:
        """Keep results as they come until those of all these jobs are there."""
        missing = {job for job in jobs if job not in self.results and job not in self.dropped}
        while missing:
            if self.running is None:
                yield from self._begin_phase()
            missing.difference_update(self._next())

    def _begin_phase(self) -> Phases[None]:
        running = Running(self.phases.next_version())
        tasks = self._further(running, 1)
        assert tasks
        running.results = yield Phase("train", tasks, running.broadcast, further=partial(self._further, running))
        self.running = running

    def _next(self) -> list[Job]:
        """Keep the next result of the phase under way. Returns the jobs of its block; none if the phase has ended."""
        running = self.running
        assert running is not None
        result = next(running.results, None)
        if result is None:
            self.running = None
            return []
        assert isinstance(result, TaskResult)
        group, rows = running.given.pop(result.index)
        self._keep(group, rows, result)
        return group.jobs

    def pause(self) -> None:
        if self.running is not None:
            self.running.ending = True
        while self.running is not None:
            self._next()

    def _further(self, running: Running, count: int) -> list[TrainingTask]:
        """Up to `count` tasks that can run now, those that are due first, see `pool.Further`."""
        tasks: list[TrainingTask] = []
        later: list[Group] = []
        while not running.ending and self.groups and len(tasks) < count:
            group = heapq.heappop(self.groups)
            place = self._place(running, group.version) if all(map(self._has_state, group.jobs)) else None
            if place is None:
                later.append(group)
            else:
                tasks.append(self._task(running, group, place))
        for group in later:
            heapq.heappush(self.groups, group)
        return tasks

    def _place(self, running: Running, version: int) -> int | None:
        """The place of a version's public state in the broadcast. None if all places have versions whose blocks have
        not all run."""
        versions, leaves = running.versions, self.broadcasts[version]
        if version in versions:
            return versions.index(version)
        if len(versions) < self.pace.versions:
            versions.append(version)
            running.broadcast.leaves.extend(leaves)
            return len(versions) - 1
        for place, other in enumerate(versions):
            if not self.unfinished.get(other):
                versions[place] = version
                running.broadcast.leaves[place * len(leaves) : (place + 1) * len(leaves)] = leaves
                return place
        return None

    def _has_state(self, job: Job) -> bool:
        """Whether the state with which the job's client begins is known: the result that it comes from is there, or the
        method's clients keep nothing. Only then may the client have two jobs of one version, in one block or task."""
        before = job.before
        return (
            before is None
            or self.keeps_nothing
            or (before.target or 0) <= self.number
            or before in self.results
            or before in self.dropped
            or not self._is_ahead(job)
        )

    def _row(self, job: Job) -> int:
        """The row of a client's state as it is when the job is dispatched: that of its last result, which may still
        wait for its update."""
        before = job.before
        while before is not None and before in self.dropped:
            before = before.before
        found = None if before is None else self.results.get(before)
        return int(self.table.row[job.client]) if found is None else found.row

    def _task(self, running: Running, group: Group, place: int) -> TrainingTask:
        """The task of some blocks. place: of their version's public state in the broadcast."""
        jobs = [(job, self._is_ahead(job)) for job in group.jobs]
        cuts = np.cumsum([len(block.jobs) for block in group.blocks]).tolist()
        write = self.table.reserve_waiting(len(jobs))
        clients = np.array([job.client for job, _ in jobs], dtype=np.int64)
        task = TrainingTask(
            ClientTask(running.count, clients, tuple(cuts)),
            round=group.version + 1,
            warm_start=False,
            visits=np.array([job.visit for job, _ in jobs], dtype=np.int64),
            weights=np.array([self._weight(job) if used else 1.0 for job, used in jobs]),
            read=np.array([self._row(job) if used else -1 for job, used in jobs], dtype=np.int64),
            write=write,
            position=np.arange(len(jobs)),
            steps=None if self.whole else np.array([job.steps for job, _ in jobs], dtype=np.int64),
            targets=np.array([job.target if used else UNUSED for job, used in jobs], dtype=np.int64),
            public=place,
        )
        running.given[running.count] = group, write
        running.count += 1
        return task

    def _weight(self, job: Job) -> float:
        """The weight with which the job's update adds its result."""
        return self.planner.weights(job.target or 0)[job].added

    def _keep(self, group: Group, rows: np.ndarray, result: TaskResult) -> None:
        """Keep the result of a task until its updates. rows: of its clients' new states."""
        found, jobs = result.clients, group.jobs
        self.unfinished[group.version] -= 1
        for (block, update), sums in result.apart.items():
            of_version = self.sums.setdefault(update, {}).setdefault(group.version, {})
            of_version[group.blocks[block].number] = sums
        digests, absent = found.get("digest"), result.dropped
        places = [place for place in range(len(jobs)) if place not in absent]  # a client may have two of the jobs
        numbers = zip(*(found[name].tolist() for name in ("loss", "norm2", "steps")), strict=True) if places else []
        free = set(range(len(rows)))
        for position, (place, (loss, norm2, steps)) in enumerate(zip(places, numbers, strict=True)):
            if self._is_ahead(job := jobs[place]):
                digest = None if digests is None else digests[position]
                self.results[job] = ClientResult(int(rows[place]), digest, loss, norm2, int(steps))
                free.discard(place)
        if free:
            self.table.release_waiting(rows[sorted(free)])
        self.dropped.update(jobs[place] for place in absent)
        self.phases.tell_notes(self.number + 1, result.notes)
        for name in SPENT:
            self.spent[name] += result.facts.get(name, 0.0)

    def row_after(self, update: Update, totals: RoundTotals) -> np.ndarray:
        row = self.table.row.copy()
        jobs = [job for job in self.planner.jobs(self.number + 1) if job not in self.dropped]
        for job in jobs:
            row[job.client] = self.results[job].row
        return row

    # --- the commit ---------------------------------------------------------------------------------------------------
    def commit(self, update: Update, totals: RoundTotals) -> np.ndarray:
        """The rows of the clients' states have waited for the update."""
        self.number += 1
        jobs = [job for job in self.planner.jobs(self.number) if job not in self.dropped]
        for some in without_repeats(jobs):
            results = [self.results.pop(job) for job in some]
            clients = np.array([job.client for job in some], dtype=np.int64)
            self.table.begin_update(clients, np.array([result.row for result in results], dtype=np.int64))
            digests = [result.digest for result in results if result.digest is not None]
            self.table.commit(np.stack(digests) if digests else None)
            self.visits[clients] += 1
        self._forget()
        return np.array([job.client for job in jobs], dtype=np.int64)

    def _forget(self) -> None:
        """Drop what no later update needs."""
        number = self.number
        self.sums.pop(number, None)
        for version in [v for v in self.origins if v < number and not self._has_jobs_ahead(v)]:
            del self.origins[version]
        for version in [v for v in self.broadcasts if not self.unfinished[v] and not self._keeps(v)]:
            del self.broadcasts[version]
        while self.settled < number and not self._has_jobs_ahead(self.settled):
            self.planner.forget(self.settled)
            self.last_use.pop(self.settled, None)
            self.unfinished.pop(self.settled, None)
            self.settled += 1
        self.dropped = {job for job in self.dropped if (job.target or 0) > number}

    def _keeps(self, version: int) -> bool:
        """Whether a checkpoint needs the broadcast of a version: not all of its jobs have been used."""
        return self.keeps and self._has_jobs_ahead(version)

    def _has_jobs_ahead(self, version: int) -> bool:
        """Whether not all jobs of a version have been used, also by updates after the last one of this run."""
        last_use = self.last_use
        if version not in last_use:
            last_use[version] = max((job.target or 0 for job in self.planner.timeline.of_version(version)), default=0)
        return last_use[version] > self.number

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def leaves(self) -> list[Tensor]:
        """The broadcasts that jobs of later updates began from."""
        found: list[Tensor] = []
        for version in self._versions_in_flight():
            found += [torch.from_numpy(leaf.copy()) for leaf in self.broadcasts[version]]
            if self.has_origins:
                found.append(self.origins[version].cpu().clone())
        return found

    def _versions_in_flight(self) -> list[int]:
        """The versions before the newest whose jobs are not all used yet, ascending."""
        return [version for version in range(self.settled, self.number) if self._keeps(version)]

    def restore(self, number: int, leaves: list[Tensor]) -> None:
        """The timeline goes on from its beginning, and jobs that had run run again when an update needs them."""
        self.number = number
        self.planner.restart()
        self.planner.timeline.update(number)
        count, rest = self.state_spec.public_spec.num_leaves, list(leaves)
        for version in self._versions_in_flight():
            self.broadcasts[version] = [leaf.numpy() for leaf in rest[:count]]
            del rest[:count]
            if self.has_origins:
                self.origins[version] = rest.pop(0).to(self.run_spec.device)


def without_repeats(jobs: list[Job]) -> list[list[Job]]:
    """The jobs in their order, cut where a client would be there twice."""
    found: list[list[Job]] = [[]]
    for job in jobs:
        if any(job.client == other.client for other in found[-1]):
            found.append([])
        found[-1].append(job)
    return found
