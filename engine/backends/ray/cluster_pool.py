"""The pool of a run on several nodes. The driver has the pool, which has one agent for each node and group of workers.
The pool gives each agent tasks (near the states that they read, the longest first), has the rows copied that their
nodes lack, and takes the sums at the end of a phase. If a node is lost, the tasks that it had in this round run again
elsewhere. Committed rows of a lost node are also on the driver's node if a checkpoint names them; if some rows are on
no node, RowsLost sends the driver back to its last checkpoint.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from torch.utils import _pytree as pytree

from ...aggregation.message_rows import write_rows
from ...aggregation.planning import row_files
from ...aggregation.staged import StagedMessages
from ...aggregation.vectors import vector_leaves
from ...cohorts.tasks import TrainingTask
from ...config.schema import WorkerGroup
from ...errors import NoRoom, RowsLost, WorkersLost, WorkersUnfit
from ...method_form.state_spec import StateSpec
from ...reduction.tree import PartialSum, TaskResult
from ...rounds.pool import Failure, Outcome, Phase, Pool
from ...run_spec import RunSpec
from ...state.row_files import RowFiles
from ...state.table import Table
from .links import ANSWER_SECONDS, Bell, Link, Listener, readable
from .node_agent import Add, Begin, News, NodeAgent
from .placement import Node, Placement, Spot, cluster, on_node, placed, wanted
from .row_locations import DRIVER, RowLocations
from .scheduler import AHEAD, Key, Scheduler, key_of, rows_read
from .task_splitting import split_tasks
from .worker_pool import DEATHS, LOOK_SECONDS, Hooks, WorkerRequest, last_error_line, start_seconds
from .worker_process import memory_sizes

CHUNK = 256
"""The number of rows that a checkpoint copies to the driver's node at a time."""
CLOSE_SECONDS = 10.0
"""The time in which the agents must have closed."""
NODES_SECONDS = 1.0
"""The time between two looks at the nodes of the cluster. A look costs some milliseconds."""


@dataclass(eq=False)
class Agent:
    """The workers of one group on one node, as the driver sees them.

    id: Ray's id of the node. node: the run's number of the node, see RowLocations. workers: the number of workers.
    number: of this agent in the run. started: the reference to the answer of `start`. alive: a reference that fails if
    the agent dies. link: the connection, once the agent has started. speed: the local steps per second of one worker.
    given: the tasks that the agent has not finished. unsent: those of them that have not been sent to it. begun:
    whether it knows of the phase. sums: the sums of its results that have come.
    """

    id: str
    name: str
    node: int
    group: WorkerGroup
    worker_requests: Sequence[WorkerRequest]
    actor: Any
    workers: int
    number: int
    started: Any = None
    alive: Any = None
    link: Link | None = None
    speed: float = 1.0
    given: dict[Key, Any] = field(default_factory=dict)
    unsent: list[Any] = field(default_factory=list)
    begun: bool = False
    sums: list[PartialSum] = field(default_factory=list)


@dataclass
class Progress:
    """The state of a phase.

    open: the tasks whose results are awaited. reported: the tasks whose outcome the driver has; if such a task is open
    again, only its states and sums are needed. done: the tasks with a result, and the agents that have their states and
    sums.
    """

    phase: Phase
    number: int
    open: set[Key] = field(default_factory=set)
    reported: set[Key] = field(default_factory=set)
    done: dict[Key, tuple[Any, Agent]] = field(default_factory=dict)


class ClusterPool(Pool):
    """The pool on a cluster. `open` starts the agents and must be called first."""

    def __init__(
        self,
        run_spec: RunSpec,
        data: Sequence[Any],
        table: Table,
        hooks: Hooks,
        steps: np.ndarray,
        placement: Placement,
    ) -> None:
        """data: see WorkerPool. table: its committed rows must not be lost. steps: (N,) local steps of each client in a
        round. placement: what the workers take of the cluster."""
        self.run_spec, self.data, self.table, self.hooks = run_spec, list(data), table, hooks
        self.placement, self.steps = placement, steps
        self.sample = StateSpec(run_spec.method(), run_spec.initial_model()).client
        keeps_state = bool(table.layout.folder and pytree.tree_leaves(self.sample))
        self.rows = RowFiles(table.layout, self.sample) if keeps_state else None  # of this node, which is the driver's
        self.sizes = memory_sizes(run_spec)
        self.messages = row_files(run_spec) if table.layout.messages else (0, 0)
        self.locations = RowLocations(table.capacity)
        self.scheduler = Scheduler(self.locations, steps)
        self.agents: list[Agent] = []  # the agents whose workers have started
        self.coming: list[Agent] = []  # the agents whose workers are starting
        self.numbers: dict[str, int] = {}  # Ray's id of a node -> its number
        self.groups = run_spec.experiment.engine.groups()
        self.pace = np.zeros((len(self.groups), 2))  # steps and seconds of each group
        self.earlier: dict[Key, tuple[Any, Agent]] = {}  # Progress.done of the round's earlier phases
        self.moving: dict[Any, tuple[Agent, Any, np.ndarray]] = {}  # reference -> agent, task, rows on their way
        self.progress: Progress | None = None
        self.phases = self.deaths = 0
        self.looked = -np.inf  # when the pool last looked at the nodes of the cluster (time.monotonic)
        self.listener: Listener | None = None
        self.bell = Bell()
        self.made = count()  # numbers of agents
        self.here: tuple[bool, StagedMessages] | None = None  # for passes by the driver, with whether of the warm start
        self.unfit: dict[str, str] = {}  # Ray's ids of nodes whose workers were given up -> why
        self.counts = dict.fromkeys(("rows", "results", "sums", "bytes"), 0)  # since the last call of `facts`
        table.fetch_rows, table.on_grown = self.gather, self.locations.grow
        table.on_restored = lambda rows: self.locations.wrote(DRIVER, rows)

    # --- agents -----------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Start the agents and their workers, and wait for them."""
        port = self.run_spec.experiment.engine.port
        try:
            self.listener = Listener(ray.util.get_node_ip_address(), port)
        except OSError as error:
            raise NoRoom(
                f"engine.port: the driver cannot listen at port {port} ({error.strerror}); choose another port, or 0 "
                "for any"
            ) from None
        nodes = cluster()  # the driver's node is the first
        if all(spot.node != nodes[0].id for spot in self.placement.spots):
            self._start_agent(nodes[0], self.groups[0], [])  # for the rows that are there
        worker_requests = [(spot, self.placement.of(bundle)) for bundle, spot in enumerate(self.placement.spots)]
        self._start_agents(nodes, worker_requests)
        limit = self.run_spec.experiment.engine.wait + start_seconds(self.run_spec)
        end = time.monotonic() + limit
        while self.coming:
            ray.wait([agent.started for agent in self.coming], timeout=LOOK_SECONDS)
            self.hooks.check()
            self._welcome(first=True)
            if not self.coming and not self._takers():
                self._grow()
            if self.coming and time.monotonic() > end:
                raise NoRoom(
                    f"engine.workers: the workers on {len(self.coming)} nodes have not started within {limit:g} s, the "
                    f"first on node {self.coming[0].name}; look at `ray status` on the cluster's head, or raise "
                    "engine.wait"
                )
        busy = self._takers()
        if not busy:
            raise self._none_left()
        self.hooks.log(f"{sum(agent.workers for agent in busy)} workers on {len({agent.id for agent in busy})} nodes")

    def _start_agents(self, nodes: Sequence[Node], worker_requests: Sequence[tuple[Spot, Any]]) -> None:
        """worker_requests: where each worker goes, and Ray's scheduling strategy for it."""
        for node in nodes:
            for group in self.groups:
                theirs = [
                    WorkerRequest(group, how)
                    for spot, how in worker_requests
                    if spot.node == node.id and spot.group == group
                ]
                if theirs:
                    self._start_agent(node, group, theirs)

    def _start_agent(self, node: Node, group: WorkerGroup, worker_requests: Sequence[WorkerRequest]) -> None:
        if node.id not in self.numbers:
            self.numbers[node.id] = self.locations.add()
        number, layout = self.numbers[node.id], self.table.layout
        beside = next((agent for agent in self.agents + self.coming if agent.node == number), None)
        if layout.folder and number != DRIVER:
            parent = self.run_spec.experiment.engine.store or tempfile.gettempdir()
            layout = layout._replace(folder=str(Path(parent) / f"fedfleet-{self.run_spec.run_id}-{node.id[:12]}"))
        if layout.messages and number != DRIVER:
            parent = self.run_spec.experiment.engine.store or tempfile.gettempdir()
            name = f"fedfleet-{self.run_spec.run_id}-{node.id[:12]}-messages"
            layout = layout._replace(messages=str(Path(parent) / name))
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 8, "scheduling_strategy": on_node(node.id)}
        remote: Any = ray.remote(**options)(NodeAgent)
        makes = number != DRIVER and beside is None
        made = None if beside is None else beside.actor.answers.remote()  # Ray waits for it: then the files are there
        actor = remote.remote(self.run_spec, self.data, layout, self.sample, self.sizes, makes, made, self.messages)
        assert self.listener is not None
        agent = Agent(node.id, node.name, number, group, worker_requests, actor, len(worker_requests), next(self.made))
        agent.started = actor.start.remote(list(worker_requests), self.listener.address, agent.number)
        agent.alive = actor.until_closed.remote()
        self.bell.watch(agent.started)
        self.bell.watch(agent.alive)
        self.coming.append(agent)

    def _welcome(self, first: bool = False) -> None:
        """Let the agents whose workers have started take part. first: whether an agent that cannot start ends the
        run."""
        assert self.listener is not None
        for line in self.listener.news():
            self.hooks.log(line)
        for agent in list(self.coming):
            if not ray.wait([agent.started], timeout=0)[0]:
                continue
            self.coming.remove(agent)
            try:
                ray.get(agent.started)
                agent.link = self.listener.link(agent.number)
            except (RayError, WorkersLost) as error:
                cause = cause_of(error)
                if isinstance(cause, WorkersUnfit):
                    self._log(agent, ray.get(agent.actor.lines.remote()))
                    self._give_up(agent, cause)
                    self.agents.append(agent)  # for the rows of its node
                    continue
                if first:
                    raise cause from cause.__cause__
                self.hooks.log(f"the workers on node {agent.name} did not start: {last_error_line(error)}")
                self._died("as it started")
                continue
            self.agents.append(agent)
            if not first:
                self.hooks.log(f"{agent.workers} workers are ready on node {agent.name}")
        self._set_speeds()

    def _give_up(self, agent: Agent, cause: Exception) -> None:
        """Go on without an agent's workers, because their environment cannot run clients. No worker starts on its node
        again. The agent stays for the rows of its node and for the sums of its workers' results.
        """
        self.unfit[agent.id] = str(cause)
        agent.workers = 0
        for task in agent.given.values():
            self.scheduler.put(task)
        agent.given.clear()
        agent.unsent.clear()

    def _log(self, agent: Agent, lines: Sequence[str]) -> None:
        for line in lines:
            self.hooks.log(f"node {agent.name}: {line}")

    def _none_left(self) -> WorkersLost:
        known = list(self.unfit.values())
        return WorkersLost(known[-1] if known else "no worker is left, and no node has room for another")

    def _set_speeds(self) -> None:
        """Set the measured speeds of the groups; a group that was not measured counts as the fastest."""
        known = [steps / seconds if seconds else 0.0 for steps, seconds in self.pace]
        for agent in self.agents:
            agent.speed = known[self.groups.index(agent.group)] or max(known) or 1.0

    def _grow(self) -> None:
        """Find nodes that are gone, and start workers on those that joined."""
        self.looked = time.monotonic()
        everywhere = cluster()
        there = {node.id for node in everywhere}
        for agent in list(self.agents):
            if agent in self.agents and agent.id not in there:
                self._lost_node(agent)
        nodes = [node for node in everywhere if node.id not in self.unfit]
        missing = wanted(self.run_spec.experiment.engine, nodes)
        for agent in self.agents + self.coming:
            for worker_request in agent.worker_requests if agent.id not in self.unfit else ():
                if worker_request.group in missing:
                    missing.remove(worker_request.group)
        if not missing:
            return
        spots = placed(missing, [node for node in cluster(free=True) if node.id not in self.unfit])[0]
        for name in sorted({node.name for node in nodes for spot in spots if spot.node == node.id}):
            self.hooks.log(f"workers start on node {name}")
        worker_requests = [(spot, on_node(spot.node)) for spot in spots]
        self._start_agents(nodes, worker_requests)

    def _workers(self) -> list[Agent]:
        """The agents with workers."""
        return [agent for agent in self.agents if agent.workers]

    def _takers(self) -> list[Agent]:
        """The agents that may get tasks: a pass over messages is run where the messages are."""
        passes = self.progress is not None and self.progress.phase.call == "aggregate"
        return [agent for agent in self._workers() if agent.node == DRIVER or not passes]

    def unfinished(self) -> int:
        return len(self.progress.open) if self.progress is not None else 0

    # --- phases -----------------------------------------------------------------------------------------------------
    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        if phase.call == "aggregate" and not any(agent.node == DRIVER for agent in self._workers()):
            return self._pass_here(phase)
        self.progress = None
        if not phase.repeated:
            self.earlier.clear()
            if phase.call == "train":
                self._welcome()
        self.phases += 1
        progress = self.progress = Progress(phase, self.phases)
        alone = phase.repeated or phase.with_sums
        sum_bytes = 0 if alone else 2 * sum(leaf.nbytes for leaf in phase.broadcast.leaves)  # about: float64
        self.scheduler.begin(phase.shape, self.table.width, sum_bytes)
        for agent in self._takers():
            self._begin(agent)
        workers = sum(agent.workers for agent in self.agents)
        for task in phase.tasks if alone else split_tasks(phase.tasks, workers, self.steps):
            self._put(progress, task)
        self._hand_out(progress)
        if phase.call == "train" and not phase.repeated and time.monotonic() > self.looked + NODES_SECONDS:
            self._grow()  # while the workers are busy
        return self._outcomes(progress)

    def _pass_here(self, phase: Phase) -> Iterator[Outcome]:
        """Run a pass over the messages in the driver itself, if its node has the messages but no worker."""
        round = phase.tasks[0].round
        if self.here is None or self.here[0] != (round == 0):
            staged = StagedMessages(self.run_spec, self._message_of(round), self.table.layout.messages)
            self.here = (round == 0, staged)
        staged = self.here[1]
        assert staged.files is not None
        for task in phase.tasks:
            self.hooks.check()
            yield task.run(staged.files, staged.parts)

    def _message_of(self, round: int) -> Any:
        """A sample of the messages of a round, of which round 0 is the warm start."""
        method, x = self.run_spec.method(), self.run_spec.initial_model()
        algorithm = method.warm_start if round == 0 else method
        assert algorithm is not None
        return StateSpec(algorithm, x).message

    def _begin(self, agent: Agent) -> None:
        """Tell the agent of the phase; its first tasks come in the same message."""
        agent.given.clear()
        agent.unsent.clear()
        agent.begun, agent.sums = False, []

    def _put(self, progress: Progress, task: Any) -> None:
        progress.open.add(key_of(task))
        self.scheduler.put(task)

    def _outcomes(self, progress: Progress) -> Iterator[Outcome]:
        sums: list[PartialSum] = []
        while progress.open:
            yield from self._step(progress)
            alone = progress.phase.repeated or progress.phase.with_sums
            if not progress.open and progress.phase.call == "train" and not alone:
                sums = self._sums(progress)
        self.earlier.update(progress.done)
        if progress.phase.call == "train" and self.table.layout.messages:
            self._gather_messages(progress)
        yield from sums

    def _gather_messages(self, progress: Progress) -> None:
        """Copy the messages of the phase to the driver's node, whose workers do the passes over them."""
        if not progress.done:
            return
        round = next(task.round for task, _ in progress.done.values())
        width = sum(leaf.numel() * leaf.element_size() for leaf in vector_leaves(self._message_of(round)))
        try:
            for task, agent in progress.done.values():
                for begin in range(0, len(task.position) if agent.node != DRIVER else 0, CHUNK):
                    rows = task.position[begin : begin + CHUNK]
                    packed: Any = ray.get(agent.actor.read_messages.remote(rows, width))
                    write_rows(self.table.layout.messages, rows, packed)
        except RayError as error:
            self._survey()
            raise RowsLost(f"messages of round {round} were lost with a node ({last_error_line(error)})") from error

    def _step(self, progress: Progress) -> list[Outcome]:
        """Hand out tasks, wait for news, and return the outcomes that the driver has not had."""
        self._hand_out(progress)
        if not (self.moving or self.coming or any(agent.given for agent in self.agents)):
            self._grow()
            if not self.coming:
                raise self._none_left()
            return []
        ready = self._wait()
        self.hooks.check()
        if self.bell in ready and self.bell.rang():
            self._answered(progress)
        outcomes: list[Outcome] = []
        for agent in [agent for agent in self.agents if agent.link in ready]:
            outcomes += self._hear(progress, agent)
        return outcomes

    def _wait(self) -> Sequence[Link | Bell]:
        """Wait for a message of an agent or an answer of Ray. Returns where there is one."""
        return readable([self.bell, *filter(None, (agent.link for agent in self.agents))], LOOK_SECONDS)

    def _answered(self, progress: Progress) -> None:
        """Ray has answered something: an agent has started or is gone, or rows have moved."""
        before = len(self.agents)
        self._welcome()
        for agent in self.agents[before:]:
            self._begin(agent)
        for reference in self._answers(self.moving):
            self._moved(progress, reference)
        for reference in self._answers([agent.alive for agent in self.agents]):
            for agent in [agent for agent in self.agents if agent.alive == reference]:
                self._lost_node(agent)

    def _answers(self, references: Iterable[Any]) -> list[Any]:
        """Those of the references whose answers are there, or cannot come any more."""
        waiting = list(references)
        return ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []

    def _hear(self, progress: Progress, agent: Agent) -> list[Outcome]:
        """Take an agent's news, and return its outcomes."""
        if agent not in self.agents:  # it was lost with another agent of its node
            return []
        assert agent.link is not None
        try:
            news: News = agent.link.receive()
        except (OSError, EOFError):
            self._lost_node(agent)
            return []
        agent.workers = news.workers
        self._log(agent, news.log)
        if isinstance(news.error, WorkersUnfit):
            self._give_up(agent, news.error)
        elif news.error is not None:
            raise news.error
        if news.version != progress.number:
            return []
        agent.sums += news.sums
        outcomes = (self._ended(progress, agent, outcome) for outcome in news.outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def _ended(self, progress: Progress, agent: Agent, outcome: Any) -> Outcome | None:
        """Note a task's outcome; returns None if the driver has had it before."""
        key = key_of(outcome.task if isinstance(outcome, Failure) else outcome)
        task = agent.given.pop(key)
        known = key in progress.reported or key in self.earlier
        if isinstance(outcome, Failure) and known:  # it succeeded before
            self.scheduler.put(task)
            return None
        progress.open.discard(key)
        progress.reported.add(key)
        if isinstance(outcome, TaskResult):
            self.deaths = 0
            if isinstance(task, TrainingTask):
                progress.done[key] = (task, agent)
                self.locations.wrote(agent.node, task.write[task.write >= 0])
                self.counts["results"] += agent.node != DRIVER
                if len(self.groups) > 1:
                    self.pace[self.groups.index(agent.group)] += (outcome.facts["steps"], outcome.facts["seconds"])
                    self._set_speeds()
        return None if known else outcome

    def _sums(self, progress: Progress) -> list[PartialSum]:
        """The sums of all results. An agent has sent its sums with the outcome of its last task."""
        agents = [agent for agent in self.agents if any(agent is has for _, has in progress.done.values())]
        crossed = [part for agent in agents if agent.node != DRIVER for part in agent.sums]
        self.counts["sums"] += len(crossed)
        self.counts["bytes"] += sum(leaf.nbytes for part in crossed for leaf in part.leaves)
        return [part for agent in agents for part in agent.sums]

    # --- tasks and the rows that they read --------------------------------------------------------------------------
    def _hand_out(self, progress: Progress) -> None:
        """Give agents the tasks that should start now or soon, all tasks of an agent in one message."""
        takers = self._takers()
        self.scheduler.hand_out(takers, self._give)
        phase, number = progress.phase, progress.number
        for agent in takers:
            if agent not in self.agents or (agent.begun and not agent.unsent):
                continue
            with_sums = phase.repeated or phase.with_sums or phase.call == "aggregate"
            begin = Begin(phase.call, phase.shape, with_sums, phase.broadcast.leaves)
            add = Add(number, agent.unsent, self._left(agent), None if agent.begun else begin)
            agent.begun, agent.unsent = True, []
            assert agent.link is not None
            try:
                agent.link.send(add)
            except OSError:
                self._lost_node(agent)

    def _left(self, agent: Agent) -> int:
        """At how many unfinished tasks an agent sends its outcomes: before its workers are idle, if tasks wait."""
        return AHEAD * agent.workers if len(self.scheduler) else 0

    def _give(self, agent: Agent, task: Any) -> None:
        """Have an agent run a task, and have other nodes send the rows that the task reads and the agent's node lacks.

        A task that waits for rows is sent by itself, so that it keeps no other task waiting.
        """
        assert self.progress is not None
        agent.given[key_of(task)] = task
        moves = []
        for source, rows in self.locations.missing(agent.node, rows_read(task)) if self.table.layout.folder else []:
            moves.append(agent.actor.write.remote(rows, self._read(source, rows)))
            self.counts["rows"] += len(rows)
        if moves:
            added = agent.actor.add.remote(Add(self.progress.number, [task], self._left(agent)), *moves)
            self.moving[added] = (agent, task, rows_read(task))
            self.bell.watch(added)
        else:
            agent.unsent.append(task)

    def _moved(self, progress: Progress, added: Any) -> None:
        """The rows for a task have come, or cannot come, because the node that had them is gone."""
        agent, task, rows = self.moving.pop(added)
        try:
            ray.get(added)
            self.locations.copied(agent.node, rows)
        except RayError:
            self._survey()
            if agent.given.pop(key_of(task), None) is not None:
                self.scheduler.put(task)

    def _read(self, node: int, rows: np.ndarray) -> Any:
        """(c, bytes of a row) uint8: rows (c,) as a node has them, or a reference to them.

        The driver's node is also that of this process, which reads the rows where the agent was killed and another one
        is starting. Raises RowsLost where the agent of another node is gone.
        """
        agent = next((agent for agent in self.agents if agent.node == node), None)
        if agent is not None:
            return agent.actor.read.remote(rows)
        if node == DRIVER and self.rows is not None:
            return self.rows.packed(rows)
        raise RowsLost(f"the states of {len(rows)} clients were lost with a node")

    def gather(self, rows: np.ndarray) -> None:
        """Copy committed rows to the driver's node, whose files a checkpoint names.

        The checkpoint's thread calls this. The rows are pinned, so nobody writes to them meanwhile.
        """
        if self.rows is None:
            return
        for source, theirs in self.locations.missing(DRIVER, rows):
            for begin in range(0, len(theirs), CHUNK):
                part = theirs[begin : begin + CHUNK]
                packed: Any = ray.get(self._read(source, part))
                self.rows.unpack(part, packed)
                self.locations.copied(DRIVER, part)

    # --- what is lost -----------------------------------------------------------------------------------------------
    def _survey(self) -> None:
        """Find agents that are gone."""
        for agent in list(self.agents):
            try:
                ray.get(agent.actor.answers.remote(), timeout=ANSWER_SECONDS)
            except RayError:
                if agent in self.agents:
                    self._lost_node(agent)

    def _died(self, cause: str) -> None:
        self.deaths += 1
        if self.deaths > DEATHS:
            raise WorkersLost(f"{self.deaths} nodes' workers died in a row without finishing a task, the last: {cause}")

    def _lost_node(self, lost: Agent) -> None:
        """A node, or an agent on it, is lost: its tasks go elsewhere. Raises RowsLost if committed rows are lost."""
        gone = [agent for agent in self.agents if agent.node == lost.node]
        self.agents = [agent for agent in self.agents if agent.node != lost.node]
        self.coming = [agent for agent in self.coming if agent.node != lost.node]
        for agent in gone:
            ray.kill(agent.actor)
            if agent.link is not None:
                agent.link.close()
        self._died("the node is lost")
        on_driver = lost.node == DRIVER  # its rows are in the run's own files
        if not on_driver:
            self.locations.lose(lost.node)
            del self.numbers[lost.id]
        rows_there = self.table.layout.folder or self.table.layout.messages
        again = self._run_again(gone, rows=bool(rows_there) and not on_driver)
        given = sum(len(agent.given) for agent in gone)
        self.hooks.log(
            f"node {lost.name} is lost: {given} tasks under way go elsewhere, {again} of this round run again for the "
            "states and sums that are lost"
        )
        committed = np.concatenate([self.table.row[self.table.row >= 0], np.array([*self.table.waiting], np.int64)])
        if self.table.layout.folder and len(rows := self.locations.gone(committed)):
            self._drop()
            raise RowsLost(f"the states of {len(rows)} clients were lost with node {lost.name}")
        if on_driver:
            self._start_agent(Node(lost.id, lost.name, {}, {}), lost.group, lost.worker_requests)

    def _run_again(self, gone: Sequence[Agent], rows: bool) -> int:
        """Let the tasks of these agents wait again. Returns how many of them had a result. rows: whether the states
        were lost too."""
        progress = self.progress
        if progress is None:
            return 0
        had = {**(self.earlier if rows else {}), **(progress.done if rows or not progress.phase.repeated else {})}
        again = {key: task for key, (task, agent) in had.items() if agent in gone}
        for key, task in again.items():
            progress.done.pop(key, None)
            self._put(progress, task)
        for task in [task for agent in gone for task in agent.given.values()]:
            self._put(progress, task)
        return len(again)

    def _drop(self) -> None:
        """Give up the phase, and wait until no worker writes rows."""
        self.scheduler.forget()
        self.earlier.clear()
        self.progress = None
        self.moving.clear()
        waiting = [agent.actor.drop.remote() for agent in self._workers()]
        ray.wait(waiting, num_returns=len(waiting)) if waiting else None
        for agent in self.agents:
            agent.given.clear()
            agent.unsent.clear()

    # --- the end ----------------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, float]:
        """The columns that only a run on several nodes has.

        node/count: the number of nodes with workers. node/bytes_moved: the bytes of clients' states that were copied to
        the node of a worker. node/results: the number of tasks that ran on other nodes than the driver's. node/sums:
        the number of sums that came from other nodes. node/bytes_sums: the bytes of these sums."""
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        found = {
            "node/count": len({agent.node for agent in self._workers()}),
            "node/bytes_moved": counts["rows"] * self.table.width,
            "node/results": counts["results"],
            "node/sums": counts["sums"],
            "node/bytes_sums": counts["bytes"],
        }
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        agents = self.agents + self.coming
        closing = [agent.actor.close.remote() for agent in agents]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for agent in agents:
            ray.kill(agent.actor)
            if agent.link is not None:
                agent.link.close()
        if self.listener is not None:
            self.listener.close()
        self.bell.close()
        self.placement.leave()


def cause_of(error: Exception) -> Exception:
    """The exception that was raised in the other process, if Ray has it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
