"""The planner of an asynchronous run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...algorithms.contract import Algorithm
from ...workloads.client_index import ClientIndex
from ..config.schema import Asynchronous, Federation
from ..errors import ConfigError
from ..memory import available_memory
from ..method_form.state_spec import StateSpec, traffic_columns
from ..records.per_client import LOST, STALE, USED
from ..run_spec import RunSpec
from .planner import Planner, PlanState, Probe, RoundPlanner, Update
from .timeline import UNUSED, Job, Timeline, staleness_weight


class ResultWeight(NamedTuple):
    """The weight of one result in an update, as it comes about step by step. The divisor of the update is a sum of
    weights of its results, and `federation.pace.divide` says of which step."""

    own: float
    """The weight of its client."""
    stale: float
    """`own` x the weight of its staleness."""
    mixed: float
    """`stale` x `federation.pace.mix`, which is a step size and therefore in no divisor."""
    added: float
    """What its message is multiplied by: `mixed`, or by the client's local steps where the method weighs clients so."""


class AsynchronousPlanner(Planner):
    """Plans updates whose results come from several versions, as the timeline says."""

    def __init__(self, run_spec: RunSpec, state_spec: StateSpec, client_index: ClientIndex, block: int) -> None:
        super().__init__(run_spec, state_spec, client_index, block)
        assert isinstance(self.federation.pace, Asynchronous)
        assert self.fleet is not None
        self.pace, self.state_spec = self.federation.pace, state_spec
        free = available_memory() if self.pace.starts == "slots" else None  # else all clients may be in flight
        if run_spec.experiment.engine.pending is None and free is not None:
            check_pending(self.federation, state_spec, free // 2)
        self.fleet.remember()
        self.restart()

    def restart(self) -> None:
        """Begin with the timeline anew."""
        assert self.fleet is not None
        self.weights_of: dict[int, dict[Job, ResultWeight]] = {}  # update -> of its results
        self.methods: dict[int, Algorithm] = {}  # version -> its method, where the method has a schedule
        federation = self.federation
        self.timeline = Timeline(self.pace, self.seed, federation.clients, federation.cohort, self.fleet)

    def start(self) -> PlanState:
        self.restart()
        return super().start()

    def update(self, number: int, state: PlanState, visited: np.ndarray, probe: Probe) -> Update:
        buffer = self.timeline.update(number)
        discarded = buffer.discarded
        clients = np.array([job.client for job in buffer.jobs], dtype=np.int64)
        weights, staleness = self.weights(number).values(), [job.staleness for job in buffer.jobs]
        columns = {
            **traffic_columns(self.state_spec, buffer.dispatched, len(buffer.jobs) + discarded),
            "system/clock": buffer.clock,
            "system/seconds": buffer.clock - state.seconds,
            "system/waited": buffer.waited,
            "system/wasted": sum(job.end - job.start for job in buffer.unused),
            "client/selected": float(buffer.dispatched),
            "client/lost": float(len(buffer.unused) - discarded),
            "client/eligible": float(self._eligible(buffer.clock)),
            "comm/bytes_wasted": len(buffer.unused) * self.traffic.down + discarded * self.traffic.up,
            "async/staleness": float(np.mean(staleness)),
            "async/staleness_max": float(max(staleness)),
            "async/weight": sum(weight.mixed for weight in weights) / sum(weight.own for weight in weights),
            "async/flight": float(buffer.flight),
            "async/versions": float(buffer.versions),
            "async/discarded": float(discarded),
        }
        visits = columns_of([*buffer.jobs, *buffer.unused])
        order, added = np.argsort(clients, kind="stable"), np.array([weight.added for weight in weights])
        return Update(
            clients[order],
            buffer.dispatched,
            added[order],
            columns=columns,
            clock=buffer.clock,
            visits=visits,
        )

    def jobs(self, number: int) -> list[Job]:
        """The jobs whose results an update uses, in the order of their arrival."""
        return self.timeline.update(number).jobs

    def _eligible(self, t: float) -> int:
        """How many clients are online at time t and have enough memory."""
        assert self.fleet is not None
        eligible = self.fleet.eligible(t)
        return self.federation.clients if eligible is None else len(eligible)

    def weights(self, number: int) -> dict[Job, ResultWeight]:
        """The weights of the results of an update, in the order of its buffer."""
        if number not in self.weights_of:
            jobs = self.jobs(number)
            clients, steps, versions = (
                np.array([getattr(job, name) for job in jobs], dtype=np.int64)
                for name in ("client", "steps", "version")
            )
            own = added = self._client_weights(clients)
            if self.method.local_norms(1) is not None:
                added = self._by_steps(clients, own, steps, versions)
            stale = np.array([staleness_weight(self.pace, job.staleness) for job in jobs])
            mixed = stale * self.pace.mix
            columns = zip(*(each.tolist() for each in (own, own * stale, own * mixed, added * mixed)), strict=True)
            self.weights_of[number] = {job: ResultWeight(*weights) for job, weights in zip(jobs, columns, strict=True)}
        return self.weights_of[number]

    def _method_of(self, version: int) -> Algorithm:
        if version not in self.methods:
            self.methods[version] = super()._method_of(version)
        return self.methods[version]

    def forget(self, version: int) -> None:
        """Nobody asks for the jobs of this version, or the update that made it, again."""
        self.timeline.forget(version)
        self.methods.pop(version, None)
        self.weights_of.pop(version, None)


def columns_of(jobs: list[Job]) -> dict[str, np.ndarray]:
    """The columns of `planner.visit_columns` for jobs that arrived or were lost."""
    return {
        "id": np.array([job.client for job in jobs], dtype=np.int64),
        "selected": np.ones(len(jobs), dtype=bool),
        "status": np.array([LOST if job.lost else STALE if job.target == UNUSED else USED for job in jobs]),
        "start": np.array([job.start for job in jobs]),
        "arrival": np.array([job.end for job in jobs]),
        "duration": np.array([job.duration for job in jobs]),
        "compute": np.array([job.compute for job in jobs]),
        "version": np.array([job.version for job in jobs], dtype=np.int64),
        "staleness": np.array([job.staleness for job in jobs], dtype=np.int64),
    }


def planner_of(run_spec: RunSpec, state_spec: StateSpec, client_index: ClientIndex, block: int) -> Planner:
    """The planner of a run. block: the number of clients in a block."""
    several = run_spec.experiment.federation.pace.versions > 1
    return (AsynchronousPlanner if several else RoundPlanner)(run_spec, state_spec, client_index, block)


def check_pending(federation: Federation, state_spec: StateSpec, most: int) -> None:
    """Raise ConfigError if the results that wait for their updates may take more bytes than `most`: those of all
    clients in flight, and those of a buffer that lacks one result."""
    pace = federation.pace
    assert isinstance(pace, Asynchronous)
    flight = federation.cohort if pace.starts == "slots" else federation.clients
    each, results = state_spec.sum_bytes, flight + pace.buffer - 1
    if results * each > most:
        raise ConfigError(
            f"engine.pending must be at least {results * each:,}, since {results:,} results may wait for their updates "
            f"({flight:,} clients in flight + federation.pace.buffer={pace.buffer:,} - 1) x {each:,} bytes of a "
            f"message, got {most:,}; raise it, or lower federation.cohort"
        )
