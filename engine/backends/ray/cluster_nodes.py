"""The nodes of a run that has several: on each a keeper of its rows and some workers; rows that are brought to them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...config.run_spec import RunSpec
from ...config.schema import WorkerGroup
from ...state.row_files import StateLayout
from ...state.table import Table
from .locality import DRIVER, Whereabouts, reads
from .node_agent import FarHost, Keeper
from .nodes import Node, cluster, placed, wanted
from .placement import Room
from .worker_handle import death_at_start, why_unfit

CHUNK = 256
"""Rows that are brought at a time."""
STARTS = 3
"""Processes that may die in a row as they start on a node, before no further one is started there."""
ANSWER_SECONDS = 120.0
"""What a node's keeper may take to answer, before the node is held for lost."""


@dataclass
class Site:
    """A node of the run: its number, rows and keeper."""

    id: str
    name: str
    number: int
    place: StateLayout
    keeper: Any
    alive: bool = True
    died: int = 0  # workers in a row that died there as they started
    unfit: str = ""  # why no further worker is started there


class Given(NamedTuple):
    """What a worker has been given: references to its news and to the sums, and the task."""

    news: Any
    sums: Any
    task: Any


@dataclass
class Seat:
    """A worker; `calls`: what it has been given, in order."""

    number: int
    site: Site
    group: WorkerGroup
    actor: Any
    ready: Any
    bundle: int | None = None  # of the run's room; None for one that came later
    speed: float = 1.0  # of its group, steps a second
    calls: list[Given] = field(default_factory=list)

    @property
    def node(self) -> int:
        return self.site.number

    @property
    def name(self) -> str:
        return f"worker {self.number} on node {self.site.name}"


class Sites:
    """`seats` are workers that work, `coming` those that start. tell: is told what a log should have."""

    def __init__(self, run_spec: RunSpec, data: Sequence[Any], table: Table, tell: Callable[[str], None]) -> None:
        self.run_spec, self.data, self.table, self.tell = run_spec, data, table, tell
        self.where = Whereabouts(table.capacity)
        self.sites: list[Site] = []
        self.seats: list[Seat] = []
        self.coming: list[Seat] = []
        self.room: Room | None = None
        self.groups = run_spec.experiment.engine.groups()
        self.pace = np.zeros((len(self.groups), 2))  # steps, seconds
        self.made = 0
        self.moved = 0  # rows, since somebody asked
        self.last = ""  # why the last worker was given up

    def site(self, node: Node) -> Site:
        """The node as one of the run's; the first is the driver's."""
        known = next((site for site in self.sites if site.id == node.id and site.alive), None)
        if known is not None:
            return known
        number, place = self.where.add(), self.table.place
        mine = number != DRIVER or not place.folder  # where clients keep nothing, there are workers' stacks to keep
        if mine:
            parent = self.run_spec.experiment.engine.store or tempfile.gettempdir()
            folder = Path(parent) / f"fedfleet-{self.run_spec.run_id}-{node.id[:12]}"
            place = place._replace(folder=str(folder))
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 2, "scheduling_strategy": on(node.id)}
        actor: Any = ray.remote(**options)(Keeper)
        site = Site(node.id, node.name, number, place, actor.remote(self.run_spec, place, mine))
        self.sites.append(site)
        return site

    def seat(self, site: Site, group: WorkerGroup, bundle: int | None = None) -> Seat:
        number, self.made = self.made, self.made + 1
        options: dict[str, Any] = {"num_cpus": group.cpus, "num_gpus": group.gpus, "resources": group.resources}
        where = on(site.id) if bundle is None or self.room is None else self.room.of(bundle)
        actor: Any = ray.remote(**options, scheduling_strategy=where)(FarHost)
        run_spec = (
            self.run_spec if group.gpus or not self.run_spec.experiment.engine.on_gpus() else self.run_spec.on_cpu()
        )
        made = site.keeper.ready.remote()  # the files are there before the worker opens them
        worker = actor.remote(run_spec, *self.data, site.place, number, made)
        return Seat(number, site, group, worker, worker.ready.remote(), bundle)

    def timed(self, seat: Seat, facts: dict[str, float]) -> None:
        """A task's: where there are several groups, how quick each is."""
        if len(self.groups) > 1:
            self.pace[self.groups.index(seat.group)] += (facts["steps"], facts["seconds"])
            self._set_speeds()

    def _set_speeds(self) -> None:
        """As measured; as the quickest, where nothing was."""
        if len(self.groups) == 1:
            return
        known = [steps / seconds if seconds else 0.0 for steps, seconds in self.pace]
        for seat in self.seats:
            seat.speed = known[self.groups.index(seat.group)] or max(known) or 1.0

    def arrive(self) -> int:
        """Workers that have started get work; how many died on the way."""
        failed, still = 0, []
        for seat in self.coming:
            if not ray.wait([seat.ready], timeout=0)[0]:
                still.append(seat)
                continue
            try:
                ray.get(seat.ready)
                self.seats.append(seat)
                seat.site.died = 0
                self.tell(f"{seat.name} is there")
            except RayError as error:
                failed += 1
                self._died_starting(seat, error)
        self.coming = still
        self._set_speeds()
        return failed

    def _died_starting(self, seat: Seat, error: RayError) -> None:
        cause, site = why_unfit(error), seat.site
        ray.kill(seat.actor)
        if not cause:
            cause, site.died = death_at_start(error, self.run_spec), site.died + 1
            self.tell(f"{seat.name} died as it started: {cause}")
            if site.died < STARTS:
                return
            cause = f"{STARTS} workers in a row died as they started, the last: {cause}"
        self.retire(seat, cause)

    def retire(self, seat: Seat, cause: str) -> None:
        """Go on without a worker, whose environment is to blame and no client, and start no other one on its node."""
        seat.site.unfit = self.last = cause
        self.tell(f"{seat.name} is given up, it cannot run clients: {cause}")

    def grow(self, nodes: Sequence[Node]) -> None:
        """Start what is wanting: workers for nodes that joined, and for those that were lost."""
        unfit = {site.id for site in self.sites if site.alive and site.unfit}
        nodes = [node for node in nodes if node.id not in unfit]
        missing = wanted(self.run_spec.experiment.engine, nodes)
        for seat in self.seats + self.coming:
            same = next((g for g in missing if g == seat.group), None)
            if same is not None:
                missing.remove(same)
        if not missing:
            return
        for spot in placed(missing, [node for node in cluster(free=True) if node.id not in unfit])[0]:
            site = self.site(next(node for node in nodes if node.id == spot.node))
            self.coming.append(self.seat(site, spot.group))
            self.tell(f"a worker starts on node {site.name}")

    # --- rows ---------------------------------------------------------------------------------------------------------
    def bring(self, task: Any, site: Site) -> list[Any]:
        """References that are there once the node has the rows that the task reads."""
        if not self.table.place.folder:
            return []
        moves = []
        for source, rows in self.where.missing(site.number, reads(task)):
            packed = self.sites[source].keeper.read.remote(rows)
            moves.append(site.keeper.write.remote(rows, packed))
            self.moved += len(rows)
        return moves

    def gather(self, rows: np.ndarray) -> None:
        """Copy committed rows to the driver's node, whose files a checkpoint names. Called by the checkpoint's thread;
        the rows are pinned, so nobody writes them meanwhile."""
        if not self.table.place.folder:
            return
        for source, theirs in self.where.missing(DRIVER, rows):
            for begin in range(0, len(theirs), CHUNK):
                part = theirs[begin : begin + CHUNK]
                packed = self.sites[source].keeper.read.remote(part)
                ray.get(self.sites[DRIVER].keeper.write.remote(part, packed))
                self.where.copied(DRIVER, part)

    def close(self) -> None:
        for seat in self.seats + self.coming:
            ray.kill(seat.actor)
        closing = [site.keeper.close.remote() for site in self.sites if site.alive]
        ray.wait(closing, num_returns=len(closing), timeout=10)
        for site in self.sites:
            ray.kill(site.keeper)
        if self.room is not None:
            self.room.leave()


def on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def answers(site: Site) -> bool:
    """Whether the node is there: its keeper says so. (Ray notices by itself where it does not answer.)"""
    try:
        ray.get(site.keeper.ready.remote(), timeout=ANSWER_SECONDS)
        return True
    except RayError:
        return False
