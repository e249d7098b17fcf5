"""The driver of an asynchronous run: a round is one update of the server from the results of M jobs.

The timeline says in advance which job is used by which update, so jobs run in an order that suits the workers: when an
update needs a result that is not there yet, all jobs that were dispatched from the versions up to now run, those of one
version together in vectorised blocks. Results wait as sums for their updates. An update adds the sums of its versions
in ascending order, and those of one version in the order of the tree over its blocks. Neither depends on the workers.

A checkpoint has, besides what every run has, the broadcasts of those versions whose jobs are not all used yet. A run
that is resumed computes their results again in the same blocks, and so to the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm, Round, Server
from ..backends.base import Phase
from ..cohorts.tasks import MOST_TASKS, VERSIONS, Broadcast, ClientTask, TrainingTask, plan_tasks, tree_shape
from ..config.run_spec import RunSpec
from ..config.schema import Asynchronous
from ..errors import ClientFailed
from ..fleet.asynchronous import AsynchronousPlanner
from ..fleet.planner import PlanState, RoundPlan
from ..fleet.timeline import UNUSED, Job, Timeline
from ..methods.state_spec import StateSpec
from ..records.history import Record
from ..reduction.accumulator import FACTS, added
from ..reduction.round_totals import TIMES, RoundTotals
from ..reduction.tree import Leaves, TaskResult, TreeNode, TreeReducer, TreeShape, add_leaves, sums_by_target
from .aggregation import Aggregated, StageState
from .driver import DataSummary, Driver


class ClientResult(NamedTuple):
    """What is known of one job that has run, besides its message. row: the fresh row of its client's new state."""

    row: int
    digest: np.ndarray | None
    loss: float
    norm2: float
    steps: int


class BlockSum(NamedTuple):
    """The sums of the clients of one block that belong to one update. facts: in the order of FACTS."""

    leaves: Leaves
    facts: list[float]


class BlockTask(NamedTuple):
    """A block of a version as a task. node: of the block in the tree of the version. jobs: of its clients, in order."""

    version: int
    node: TreeNode
    jobs: list[Job]
    task: TrainingTask


class Waiting:
    """What an asynchronous run has between updates."""

    def __init__(self) -> None:
        self.ran = 0  # the jobs of all versions below have run
        self.broadcasts: dict[int, list[np.ndarray]] = {}  # version -> leaves of its public state
        self.origins: dict[int, Tensor] = {}  # version -> the model that its jobs begin from, for base=current
        self.shapes: dict[int, TreeShape] = {}  # version -> the tree over its blocks
        self.sums: dict[int, dict[int, dict[TreeNode, BlockSum]]] = {}  # update -> version -> block -> sum
        self.results: dict[Job, ClientResult] = {}
        self.dropped: set[Job] = set()
        self.spent: dict[str, float] = defaultdict(float)  # seconds of the workers since the last update


class AsynchronousDriver(Driver):
    """The same driver with the pace of `federation.pace`."""

    def __init__(self, run_spec: RunSpec, data: DataSummary) -> None:
        assert isinstance(run_spec.experiment.federation.pace, Asynchronous)
        self.pace = run_spec.experiment.federation.pace
        self.removed = frozenset(run_spec.experiment.federation.without)
        super().__init__(run_spec, data)

    @torch.no_grad()
    def _begin(self) -> None:
        super()._begin()
        self.waiting, self.settled = Waiting(), 0  # settled: all jobs of the versions below have been used

    @property
    def asynchronous(self) -> AsynchronousPlanner:
        """The planner, which has the timeline."""
        assert isinstance(self.planner, AsynchronousPlanner)
        return self.planner

    @property
    def timeline(self) -> Timeline:
        return self.asynchronous.timeline

    # --- an update ----------------------------------------------------------------------------------------------------
    def _train(
        self, method: Algorithm, state_spec: StateSpec, number: int, plan: RoundPlan
    ) -> tuple[Aggregated, RoundTotals, Round]:
        if number == 0:
            return super()._train(method, state_spec, number, plan)
        update, waiting = self.timeline.update(number), self.waiting
        self._publish(method)
        if any(job.version >= waiting.ran for job in update.jobs):
            self._run_versions(number - 1)
        removed = {job for job in update.jobs if job.client in self.removed}
        waiting.dropped |= removed
        used = [job for job in update.jobs if job not in waiting.dropped]
        if not used and len(removed) == len(update.jobs):
            return self._nothing(state_spec, number, removed)
        if not used:
            clients = tuple(plan.clients.tolist())
            raise ClientFailed(number, clients, "no client of the update is left, see the log", "workers")
        leaves, facts, divisor = self._sum(number, state_spec, used)
        results = [waiting.results[job] for job in used]
        clients = {
            "id": np.array([job.client for job in used]),
            **{name: np.array([getattr(each, name) for each in results]) for name in ("loss", "norm2", "steps")},
        }
        times = {name: waiting.spent[name] for name in (*TIMES, "seconds")}
        waiting.spent.clear()
        dropped = tuple(job.client for job in update.jobs if job in waiting.dropped)
        totals = RoundTotals(leaves, {**facts, **times}, clients, dropped)
        mean = state_spec.mean([torch.as_tensor(leaf) for leaf in leaves], len(used), divisor)
        return Aggregated(mean, self.stage_state, {}), totals, self._round(number, len(used))

    def _nothing(self, state_spec: StateSpec, number: int, removed: set[Job]) -> tuple[Aggregated, RoundTotals, Round]:
        """An update whose results are all of clients that are not used: the mean of no messages is 0."""
        totals = RoundTotals.of_nobody([tuple(leaf.shape) for leaf in pytree.tree_leaves(state_spec.message)])
        totals = totals._replace(dropped=tuple(job.client for job in removed))
        mean = state_spec.mean([torch.as_tensor(leaf) for leaf in totals.leaves], 1, 1)
        return Aggregated(mean, self.stage_state, {}), totals, self._round(number, 0)

    def _sum(self, number: int, state_spec: StateSpec, used: list[Job]) -> tuple[Leaves, dict[str, float], float]:
        """(the sums of the update's messages, sums of facts by name, what the weighted sums are divided by)."""
        total: Leaves = []
        facts = [0.0] * len(FACTS)
        for version, blocks in sorted(self.waiting.sums[number].items()):
            shape = self.waiting.shapes[version]
            leaves, numbers = TreeReducer(shape, add_leaves), TreeReducer(shape, added)
            for node in blocks_of(shape):
                own = blocks.get(node)
                leaves.put(node, [] if own is None else own.leaves)
                numbers.put(node, [0.0] * len(FACTS) if own is None else own.facts)
            own = [np.array(leaf) for leaf in leaves.total()]
            if self.pace.base == "current":
                self._rebase(state_spec, own, version, numbers.total()[FACTS.index("weight")])
            total, facts = add_leaves(total, own), added(facts, numbers.total())
        named: dict[str, float] = dict(zip(FACTS, facts, strict=True))
        weights = self.asynchronous.weights(number)
        own = sum(weights[job].own for job in used)
        fresh = all(weight.own == weight.added for weight in weights.values())
        divisors = {"buffer": named["weight"] if fresh else own, "weights": named["weight"], "none": 1.0}
        return total, named, divisors[self.pace.divide]

    def _rebase(self, state_spec: StateSpec, leaves: Leaves, version: int, weight: float) -> None:
        """Make the sum of changes of the model of `version` one of changes of the newest model."""
        delta = pytree.tree_leaves(state_spec.message.delta)
        assert len(delta) == 1
        moved = (self.waiting.origins[version] - self.waiting.origins[self.round]).to(torch.float64).cpu().numpy()
        leaves[0] += weight * moved.reshape(leaves[0].shape)

    # --- running jobs -------------------------------------------------------------------------------------------------
    def _publish(self, method: Algorithm) -> None:
        """Keep the broadcast of the newest version until its jobs have run."""
        waiting, version = self.waiting, self.round
        if version in waiting.broadcasts:
            return
        public = method.broadcast(self.server)
        waiting.broadcasts[version] = [leaf.cpu().numpy().copy() for leaf in pytree.tree_leaves(public)]
        if self.pace.base == "current":
            waiting.origins[version] = method.origin(method.unpack(public)).flat.clone()

    def _run_versions(self, last: int) -> None:
        """Run the jobs of all versions up to `last` that have not run, in phases that the workers can hold."""
        waiting, tasks = self.waiting, []
        for version in range(waiting.ran, last + 1):
            of_version = self._tasks_of(version)
            together = {block.version for block in tasks}
            if tasks and (len(together) >= VERSIONS or self._follows(of_version, together)):
                self._run_tasks(tasks)
                of_version, tasks = self._tasks_of(version), []  # whose clients may read states that were written now
            tasks += of_version
        if tasks:
            self._run_tasks(tasks)
        waiting.ran = last + 1
        for version in [version for version in waiting.broadcasts if version <= last and not self._keeps(version)]:
            del waiting.broadcasts[version]

    def _follows(self, tasks: list[BlockTask], versions: set[int]) -> bool:
        """Whether a job of these tasks reads a state that a job of one of these versions writes."""
        return any(job.before is not None and job.before.version in versions for task in tasks for job in task.jobs)

    def _keeps(self, version: int) -> bool:
        """Whether a checkpoint needs the broadcast of a version: not all of its jobs have been used."""
        return self.checkpoints is not None and self._has_jobs_ahead(version)

    def _has_jobs_ahead(self, version: int) -> bool:
        """Whether not all jobs of a version have been used, also by updates after the last one of this run."""
        return any((job.target or 0) > self.round for job in self.timeline.of_version(version))

    def _tasks_of(self, version: int) -> list[BlockTask]:
        """The blocks of a version's jobs, without those whose jobs are not used by any update to come."""
        jobs = sorted(self.timeline.of_version(version), key=lambda job: (job.client, job.refill))
        if not jobs:
            return []
        clients = np.array([job.client for job in jobs], dtype=np.int64)
        steps = np.array([job.steps for job in jobs], dtype=np.int64)
        sizes, local = self.data.client_index.sizes_of(clients), self.federation.local
        whole = self.timeline.fleet.parts.work.whole
        plan = plan_tasks(np.arange(len(jobs)), sizes, local, self.planner.block, None if whole else steps)
        shape = self.waiting.shapes[version] = TreeShape([len(task.cuts) for task in plan])
        found = []
        for task in plan:
            for block, (begin, end) in enumerate(zip((0, *task.cuts), task.cuts, strict=False)):
                own = [jobs[position] for position in task.clients[begin:end].tolist()]
                if any(self._is_ahead(job) for job in own):
                    node = TreeNode(0, (task.index << shape.depth) + block)
                    found.append(BlockTask(version, node, own, self._task(version, own, None if whole else steps)))
        return found

    def _is_ahead(self, job: Job) -> bool:
        """Whether an update of this run that is yet to come uses the job."""
        ahead = job.target is not None and self.round < job.target <= self.last_round
        return ahead and job.client not in self.removed

    def _task(self, version: int, jobs: list[Job], steps: np.ndarray | None) -> TrainingTask:
        """One block as a task; its index, its place and the rows to write are not known yet."""
        clients = np.array([job.client for job in jobs], dtype=np.int64)
        targets = np.array([job.target if self._is_ahead(job) else UNUSED for job in jobs], dtype=np.int64)
        read = np.array([self._row(job) if self._is_ahead(job) else -1 for job in jobs], dtype=np.int64)
        weights = np.array([self._weight(job) for job in jobs])
        visits = np.array([job.visit for job in jobs], dtype=np.int64)
        taken = None if steps is None else np.array([job.steps for job in jobs], dtype=np.int64)
        task = ClientTask(0, clients, (len(jobs),))
        columns = (visits, weights, read, np.full(len(jobs), -1), np.arange(len(jobs)))
        return TrainingTask(task, version + 1, False, *columns, None, taken, targets)

    def _weight(self, job: Job) -> float:
        """The weight with which the job's update adds its result; 1 if no update to come uses it."""
        return self.asynchronous.weights(job.target or 0)[job].added if self._is_ahead(job) else 1.0

    def _row(self, job: Job) -> int:
        """The row of a client's state as it is when the job is dispatched: that of its last result, which may still
        wait for its update."""
        before = self.waiting.results.get(job.before) if job.before is not None else None
        return int(self.table.row[job.client]) if before is None else before.row

    def _run_tasks(self, blocks: list[BlockTask]) -> None:
        """Run blocks of several versions at the same time, and keep their sums."""
        for begin in range(0, len(blocks), MOST_TASKS):
            self._run_phase(blocks[begin : begin + MOST_TASKS])

    def _run_phase(self, blocks: list[BlockTask]) -> None:
        versions = sorted({block.version for block in blocks})
        rows = self.table.reserve_waiting(sum(len(block.jobs) for block in blocks))
        tasks, at, given = [], 0, {}
        for index, block in enumerate(blocks):
            write = rows[at : at + len(block.jobs)]
            at += len(block.jobs)
            given |= dict(zip(block.jobs, write.tolist(), strict=True))
            own = block.task._replace(task=block.task.task._replace(index=index), write=write)
            tasks.append(own._replace(place=versions.index(block.version)))
        self.version += 1
        leaves = [leaf for version in versions for leaf in self.waiting.broadcasts[version]]
        phase = Phase("train", tasks, Broadcast(self.version, leaves), tree_shape(tasks), with_sums=True)
        for result in self.retry.run(phase, partial(self._prepare, self.round + 1)):
            assert isinstance(result, TaskResult)
            self._keep(blocks[result.index], result, given)
        unused = [row for job, row in given.items() if job not in self.waiting.results]
        self.table.release_waiting(np.array(unused, dtype=np.int64))

    def _prepare(self, number: int) -> None:
        """While workers train, work out the timeline a little further."""
        if number < self.last_round:
            self.timeline.of_version(number)

    def _keep(self, block: BlockTask, result: TaskResult, given: dict[Job, int]) -> None:
        """Keep the result of a block until its updates. given: the row of each job's new state."""
        waiting, jobs = self.waiting, {job.client: job for job in block.jobs}
        for target, leaves in sums_by_target(result).items():
            facts = [result.facts[f"{name}/{target}"] for name in FACTS]
            by_version = waiting.sums.setdefault(target, {}).setdefault(block.version, {})
            by_version[block.node] = BlockSum([np.array(leaf) for leaf in leaves], facts)
        digests, found = result.clients.get("digest"), result.clients
        for position, client in enumerate(found.get("id", np.zeros(0)).tolist()):
            job = jobs[client] if self.pace.once else block.jobs[position]
            if self._is_ahead(job):
                numbers = (float(found[name][position]) for name in ("loss", "norm2", "steps"))
                loss, norm2, steps = numbers
                digest = None if digests is None else digests[position]
                waiting.results[job] = ClientResult(given[job], digest, loss, norm2, int(steps))
        self._tell_notes(self.round + 1, result.facts)
        waiting.dropped.update(jobs[client] for client in result.dropped)
        for name in (*TIMES, "seconds"):
            waiting.spent[name] += result.facts.get(name, 0.0)

    # --- the commit ---------------------------------------------------------------------------------------------------
    def _commit(
        self, server: Server, stage_state: StageState, plan_state: PlanState, sampled: np.ndarray,
        totals: RoundTotals, record: Record,
    ) -> None:  # fmt: skip
        """The same for an update: the states of its clients, whose rows have waited for it, become theirs."""
        self.consistent = False
        jobs = [job for job in self.timeline.update(self.round + 1).jobs if job not in self.waiting.dropped]
        for some in without_repeats(jobs):
            results = [self.waiting.results.pop(job) for job in some]
            clients = np.array([job.client for job in some], dtype=np.int64)
            self.table.begin_update(clients, np.array([result.row for result in results], dtype=np.int64))
            digests = [result.digest for result in results if result.digest is not None]
            self.table.commit(np.stack(digests) if digests else None)
            self.visits[clients] += 1
        self.server, self.stage_state, self.plan_state = server, stage_state, plan_state
        self.round += 1
        self.records.append(record)
        self._forget()
        self.consistent = True

    def _forget(self) -> None:
        """Drop what no later update needs."""
        waiting, number = self.waiting, self.round
        for version in waiting.sums.pop(number, {}):
            if not any(version in by_version for by_version in waiting.sums.values()):
                waiting.shapes.pop(version, None)
        for version in [v for v in waiting.origins if v < number and not self._has_jobs_ahead(v)]:
            del waiting.origins[version]
        for version in [v for v in waiting.broadcasts if v < waiting.ran and not self._keeps(v)]:
            del waiting.broadcasts[version]
        while self.settled < number and not self._has_jobs_ahead(self.settled):
            self.asynchronous.forget(self.settled)
            self.settled += 1
        waiting.dropped = {job for job in waiting.dropped if (job.target or 0) > number}

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def _leaves_in_flight(self) -> list[Tensor]:
        """What a checkpoint has besides the server's state: the broadcasts that jobs of later updates began from."""
        found: list[Tensor] = []
        for version in self._versions_in_flight():
            found += [torch.from_numpy(leaf.copy()) for leaf in self.waiting.broadcasts[version]]
            if self.pace.base == "current":
                found.append(self.waiting.origins[version].cpu().clone())
        return found

    def _versions_in_flight(self) -> list[int]:
        """The versions before the newest whose jobs are not all used yet, ascending."""
        return [version for version in range(self.settled, self.round) if self._keeps(version)]

    def _take_leaves_in_flight(self, leaves: list[Tensor]) -> None:
        """The inverse of `_leaves_in_flight`, after the server's state is that of the checkpoint. The timeline goes on
        from its beginning, and jobs that had run run again when an update needs them."""
        self.asynchronous.restart()
        self.waiting, self.settled = Waiting(), 0
        self.timeline.update(self.round)
        count, rest = self.state_spec.public_spec.num_leaves, list(leaves)
        for version in self._versions_in_flight():
            self.waiting.broadcasts[version] = [leaf.numpy() for leaf in rest[:count]]
            del rest[:count]
            if self.pace.base == "current":
                self.waiting.origins[version] = rest.pop(0).to(self.run_spec.device)


def blocks_of(shape: TreeShape) -> Iterable[TreeNode]:
    """The nodes of all blocks of a tree."""
    for index, count in enumerate(shape.blocks):
        for block in range(count):
            yield TreeNode(0, (index << shape.depth) + block)


def without_repeats(jobs: list[Job]) -> list[list[Job]]:
    """The jobs in their order, cut where a client would be there twice."""
    found: list[list[Job]] = [[]]
    for job in jobs:
        if any(job.client == other.client for other in found[-1]):
            found.append([])
        found[-1].append(job)
    return found


def driver_of(run_spec: RunSpec, data: DataSummary) -> Driver:
    """The driver of a run."""
    asynchronous = isinstance(run_spec.experiment.federation.pace, Asynchronous)
    return (AsynchronousDriver if asynchronous else Driver)(run_spec, data)
