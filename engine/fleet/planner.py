"""Plans the updates of the server: whose results one uses, when it is made, and how the messages are weighted.

Without a section `systems` the clients that are drawn are those that are used. With it, they are those that arrive in
time on the virtual clock. Everything that decides who is used is known before anything is trained, so that the engine
runs only clients whose results are used, and the record says what the others would have wasted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...algorithms.contract import Algorithm
from ...algorithms.tree import Tree
from ...workloads.client_index import ClientIndex
from ..cohorts.samplers import NOBODY, Ask, CountedSampler, Draw, Feedback, PoissonSampler, Sampler
from ..cohorts.tasks import ClientTask, plan_tasks, steps_of
from ..config.schema import Federation, Pace
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..records.per_client import LATE, LOST, USED
from ..run_spec import RunSpec
from .visits import Fleet, Traffic, VisitTimes, transfer_seconds

Probe = Callable[[np.ndarray, "int | None"], np.ndarray]
"""(clients (c,), rows of each or None for all) -> (c,) losses of the model on their rows."""


class PlanState(NamedTuple):
    """What is committed with a round: the sampler's state by name, in the order of the names, and the virtual clock,
    (1,) seconds, without entries if there is none."""

    sampler: Mapping[str, np.ndarray]
    clock: Mapping[str, np.ndarray]

    @property
    def seconds(self) -> float:
        """The virtual clock, 0 without one."""
        return float(self.clock["seconds"][0]) if self.clock else 0.0


class Update(NamedTuple):
    """An update of the server. A synchronous round is one whose results all come from the newest version of the
    model."""

    clients: np.ndarray  # (S,) whose results are used, ascending
    selected: int  # how many receive the broadcast
    weights: np.ndarray  # (S,) with which the messages are added
    divisor: float | np.ndarray | None = None
    """What the weighted sum of the displacements is divided by: a number, or the sum of these numbers (S,) over the
    clients whose results are there; None for the sum of `weights`, or for `federation.pace.divide`."""
    by_sampler: bool = False
    """Whether a sampler weighs the clients. Only then is the method told of a divisor that is not their number: the
    federation's own weights divide that number among them."""
    tasks: list[ClientTask] = []  # noqa: RUF012 in which the clients train; in an asynchronous run they are the stream's
    steps: np.ndarray | None = None  # (S,) local steps where any client takes fewer than all; else None
    skipped: bool = False  # whether the update is empty and the server's state stays as it is
    columns: Mapping[str, float] = {}  # for the record
    clock: float | None = None  # at which it is made
    drawn: tuple[Ask, Draw] | None = None  # what the sampler gave
    visits: Mapping[str, np.ndarray] = {}  # with a virtual clock: columns by name, see `visit_columns`

    def divisor_without(self, absent: Sequence[int]) -> float | None:
        """The divisor if these clients have no results; None where it is a sum of weights that the workers have."""
        if isinstance(self.divisor, np.ndarray):
            return float(self.divisor[~np.isin(self.clients, absent)].sum())
        return self.divisor


class Planner(ABC):
    """Plans the updates of a run. Its state is passed in and returned."""

    def __init__(self, run_spec: RunSpec, state_spec: StateSpec, client_index: ClientIndex, block: int) -> None:
        """block: the number of clients in a block."""
        experiment = run_spec.experiment
        self.run_spec, self.federation, self.client_index = run_spec, experiment.federation, client_index
        self.block, self.seed, self.method = block, experiment.seed, run_spec.method()
        self.sampler = run_spec.sampler
        column = self.sampler.grouped_by
        self.groups = None if column is None else np.unique(client_index.common[column], return_inverse=True)[1]
        self.fleet = Fleet.of(experiment, run_spec.registry, state_spec, client_index)
        self.traffic = Traffic.of(state_spec)

    def start(self) -> PlanState:
        """The state before the first update."""
        return first_plan_state(self.sampler, self.federation, self.fleet is not None)

    @abstractmethod
    def update(self, number: int, state: PlanState, visited: np.ndarray, probe: Probe) -> Update:
        """The plan of an update. number: from 1. visited: (N,) how often each client has taken part."""

    def after(self, state: PlanState, update: Update, found: Mapping[str, np.ndarray]) -> PlanState:
        """The state after an update. found: columns (c,) of the clients whose results were used, by name: `id`, `loss`,
        and `rms` if the sampler needs it."""
        clock = state.clock if update.clock is None else {"seconds": np.array([update.clock])}
        if update.drawn is None:
            return state._replace(clock=clock)
        order, visits = np.argsort(found["id"]), update.visits
        clients, loss, rms = (found[name][order] if name in found else np.zeros(0) for name in ("id", "loss", "rms"))
        late = np.sort(visits["id"][visits["status"] == LATE]) if visits else NOBODY
        ask, draw = update.drawn
        sampler = self.sampler.told(state.sampler, ask, draw, Feedback(clients, loss, rms, late))
        return PlanState(in_order(sampler), clock)

    def ahead(self, number: int) -> Update | None:
        """The update with this number, planned while workers train for the one before. None where it needs something
        that is learned there."""
        return None

    def everyone(self) -> Update:
        """The pass over all clients that some methods begin with."""
        clients, local = np.arange(self.federation.clients), self.federation.local.taking(epochs=1)
        tasks = plan_tasks(clients, self.client_index.sizes, local, self.block)
        return self._weighted(Update(clients, len(clients), self._client_weights(clients), tasks=tasks), 0)

    def after_warm_start(self, state: PlanState, method: Algorithm, x: Tree) -> PlanState:
        """The state after that pass. method: of the pass. x: the model."""
        return state

    # --- weights ------------------------------------------------------------------------------------------------------
    def _client_weights(self, clients: np.ndarray) -> np.ndarray:
        """(S,) the federation's weights of these clients, whose sum is S but for rounding."""
        if not self.method.weighted or self.federation.weights == "uniform" or not len(clients):
            return np.ones(len(clients))
        counts = self._counts[clients]
        return counts * (len(clients) / float(counts.sum()))

    @property
    def _counts(self) -> np.ndarray:
        """(N,) what clients with weights are weighted by."""
        index = self.client_index
        return index.sizes if self.federation.weights == "examples" or index.targets is None else index.targets

    def _weighted(self, update: Update, version: int) -> Update:
        """The update with the weights that the method gives clients by their local steps. version: of all jobs."""
        if not len(update.clients) or self.method.local_norms(1) is None:
            return update
        steps = update.steps
        if steps is None:
            steps = steps_of(self.client_index.sizes_of(update.clients), self.federation.local)
        versions = np.full(len(steps), version)
        weights = self._by_steps(update.clients, update.weights, steps, versions)
        return update._replace(weights=weights, divisor=update.weights if update.divisor is None else update.divisor)

    def _by_steps(
        self, clients: np.ndarray, weights: np.ndarray, steps: np.ndarray, versions: np.ndarray
    ) -> np.ndarray:
        """(S,) the weights of results for a method that weighs clients by their local steps: each weight x (the mean of
        `LocalNorms.effective` over the clients, with these weights) / the client's `LocalNorms.norms`.

        weights: (S,) without that. steps, versions: (S,) of each job, whose norms are those of the method by which it
        ran. The clients of `federation.without` do not count in the mean.
        """
        norms, effective = np.zeros(len(steps)), np.zeros(len(steps))
        for version in np.unique(versions).tolist():
            those = versions == version
            found = self._method_of(version).local_norms(int(steps[those].max()))
            assert found is not None
            norms[those], effective[those] = (np.array(each)[steps[those] - 1] for each in found)
        counts = ~np.isin(clients, self.federation.without)
        if not counts.any():
            return weights
        lengths, own = effective[counts], weights[counts]
        mean = lengths[0] if (lengths == lengths[0]).all() else (own * lengths).sum() / own.sum()
        return weights * (mean / norms)

    def _method_of(self, version: int) -> Algorithm:
        """The method by which the jobs of a version run."""
        if not self.run_spec.method_has_schedule:
            return self.method
        return self.run_spec.method(version + 1)


class RoundPlanner(Planner):
    """Plans synchronous rounds, whose clients are drawn by a sampler."""

    def __init__(self, run_spec: RunSpec, state_spec: StateSpec, client_index: ClientIndex, block: int) -> None:
        super().__init__(run_spec, state_spec, client_index, block)
        assert isinstance(self.federation.pace, Pace)
        self.pace = self.federation.pace
        plain = self.fleet is None and self.federation.mean != "unbiased"
        self.plain = self.sampler if plain and isinstance(self.sampler, CountedSampler) else None
        self.next: tuple[int, Update] | None = None  # the plain update that was planned last, and its number

    def ahead(self, number: int) -> Update | None:
        if self.plain is not None and (self.next is None or self.next[0] != number):
            self.next = number, self._plain_update(self.plain, number)
        return self.next and self.next[1]

    def _plain_update(self, sampler: CountedSampler, number: int) -> Update:
        """The update of a round whose cohort follows from the seed and its number alone."""
        clients = sampler.cohort(self.seed, number, self.federation.clients, self.federation.cohort)
        sizes = self.client_index.sizes_of(clients)
        tasks = plan_tasks(clients, sizes, self.federation.local, self.block) if len(clients) else []
        update = Update(clients, len(clients), self._client_weights(clients), tasks=tasks)
        return self._weighted(update, number - 1)

    def after_warm_start(self, state: PlanState, method: Algorithm, x: Tree) -> PlanState:
        """The pass takes as long as the slowest client, all of whom have to be there."""
        if self.fleet is None:
            return state
        local, traffic = self.federation.local.taking(epochs=1), Traffic.of(StateSpec(method, x))
        fleet = self.fleet.with_local(local, traffic)
        everyone = np.arange(self.federation.clients)
        device = fleet.device_numbers(everyone, 0)
        steps = steps_of(self.client_index.sizes, local)
        seconds = fleet.compute_seconds(device, self.client_index.sizes, np.zeros_like(steps), steps)
        seconds = seconds + transfer_seconds(traffic.down, device.down) + transfer_seconds(traffic.up, device.up)
        return state._replace(clock={"seconds": state.clock["seconds"] + seconds.max()})

    # --- a round ------------------------------------------------------------------------------------------------------
    def update(self, number: int, state: PlanState, visited: np.ndarray, probe: Probe) -> Update:
        if (planned := self.ahead(number)) is not None:
            return planned
        begin, eligible = state.seconds, None
        if self.fleet is not None:
            begin = self.fleet.first_time(begin, self.pace.least)
            eligible = self.fleet.eligible(begin)
        probed = Probed(probe)
        ask = self._ask(number, eligible, visited, begin, probed)
        draw = self.sampler.draw(state.sampler, ask)
        update = Update(draw.clients, len(draw.clients), np.ones(0), columns=draw.columns, drawn=(ask, draw))
        if self.fleet is not None:
            update = self._timed(update, ask, draw, visited, begin, begin - state.seconds, probed)
        empty = not len(update.clients)
        step = isinstance(self.sampler, PoissonSampler) and self.sampler.empty == "step"
        sizes = self.client_index.sizes_of(update.clients)
        tasks = [] if empty else plan_tasks(update.clients, sizes, self.federation.local, self.block, update.steps)
        columns = {**update.columns, **self._probe_columns(ask, probed)}
        update = update._replace(tasks=tasks, skipped=empty and not step, columns=columns)
        return self._weighted(self._with_draw_weights(update, ask, draw), number - 1)

    def _ask(self, number: int, eligible: np.ndarray | None, visited: np.ndarray, begin: float, probe: Probe) -> Ask:
        federation, sizes = self.federation, self.client_index.sizes
        target = None if federation.weights == "uniform" else self._counts / self._counts.sum()
        spares = federation.selected - federation.cohort

        def duration() -> np.ndarray:
            everyone = np.arange(federation.clients)
            if self.fleet is None:
                return np.ones(federation.clients)
            return self.fleet.visits(everyone, number, visited, begin).duration

        steps = steps_of(sizes, federation.local)
        sizes_and_work = (sizes, target, steps, federation.local.examples)
        cohort, asked = (federation.clients, federation.cohort, spares), (probe, duration, self.groups)
        return Ask(self.seed, number, *cohort, eligible, *sizes_and_work, *asked)

    def _timed(
        self, update: Update, ask: Ask, draw: Draw, visited: np.ndarray, begin: float, waited: float, probed: Probed
    ) -> Update:
        """The update with the clients that arrive in time. begin: the clock after waiting for eligible clients."""
        assert self.fleet is not None
        asked = np.concatenate([draw.clients, draw.spares])
        spare = np.arange(len(asked)) >= len(draw.clients)
        before = probed.seconds(self.fleet, ask)
        deadline = math.inf if self.pace.deadline is None else self.pace.deadline
        partial = deadline if self.pace.stragglers == "partial" else math.inf
        visits = self.fleet.visits(asked, ask.number, visited[asked], begin + before, partial)
        wanted = self.sampler.wanted(ask) if self.sampler.fixed else len(asked)
        used, length = arrivals(visits, asked, spare, wanted, deadline)
        if not len(used):
            self._check_deadline(deadline)
        if len(used) < self.pace.least:
            used = used[:0]
        used = used[np.argsort(asked[used])]
        others = np.setdiff1d(np.arange(len(asked)), used)
        spent = np.minimum(np.minimum(visits.duration, visits.lost), length)[others]
        lost = visits.lost[others] <= length
        seconds = waited + before + length + self.fleet.systems.server
        clock = begin - waited + seconds
        full = steps_of(self.client_index.sizes_of(asked[used]), self.federation.local)
        steps = visits.steps[used]
        columns = {
            "system/clock": clock,
            "system/seconds": seconds,
            "system/waited": waited,
            "system/wasted": float(spent.sum()),
            "client/selected": float(len(asked)),
            "client/late": float((~lost).sum()),
            "client/lost": float(lost.sum()),
            "client/eligible": float(ask.clients if ask.eligible is None else len(ask.eligible)),
            "comm/bytes_wasted": float(len(others) * self.traffic.down),
        }
        return update._replace(
            clients=asked[used],
            selected=len(asked),
            steps=None if np.array_equal(steps, full) else steps,
            columns={**update.columns, **columns},
            clock=clock,
            visits=visit_columns(asked, ~spare, visits, (begin + before, length), used, ask.number - 1),
        )

    def _check_deadline(self, deadline: float) -> None:
        """Raise ConfigError if no client can ever answer by the deadline: its transfers alone take longer."""
        assert self.fleet is not None
        if math.isinf(deadline) or not self.fleet.devices.constant:
            return
        device = self.fleet.device_numbers(np.arange(self.federation.clients), 0)
        transfers = transfer_seconds(self.traffic.down, device.down) + transfer_seconds(self.traffic.up, device.up)
        if transfers.min() > deadline:
            raise ConfigError(
                f"federation.pace.deadline: no client can answer in time, since the fastest one needs "
                f"{transfers.min():.3g} virtual seconds for its transfers alone, got {deadline:g}; raise it"
            )

    def _with_draw_weights(self, update: Update, ask: Ask, draw: Draw) -> Update:
        """The update with the weights of its clients: the sampler's, or what makes the mean unbiased, or the
        federation's own."""
        unbiased, used = self.federation.mean == "unbiased", update.clients
        if not self.method.weighted or not len(used) or (draw.weights is None and not unbiased):
            return update._replace(weights=self._client_weights(used))
        if draw.weights is None:
            candidates = ask.candidates
            weights = len(candidates) * ask.shares_of(candidates)
            weights, divisor = weights[np.searchsorted(candidates, used)], float(len(draw.clients))
        else:
            weights, divisor = draw.weights[used], draw.divisor if self.federation.mean != "normalised" else None
            if unbiased and divisor is None:
                divisor = float(ask.size)
        return update._replace(weights=weights, divisor=divisor, by_sampler=True)

    def _probe_columns(self, ask: Ask, probed: Probed) -> dict[str, float]:
        """The columns of the candidates that said their loss and were not drawn: those that were have the model."""
        if probed.asked is None:
            return {}
        beyond = max(0, len(probed.asked) - ask.size)
        return {"comm/bytes_probe": beyond * self.traffic.down + 4.0 * len(probed.asked)}


class Probed:
    """Asks clients for their losses, and remembers whom. `asked`: these clients, None before."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.asked, self.rows = probe, None, None

    def __call__(self, clients: np.ndarray, rows: int | None) -> np.ndarray:
        self.asked: np.ndarray | None = clients
        self.rows: int | None = rows
        return self.probe(clients, rows)

    def seconds(self, fleet: Fleet, ask: Ask) -> float:
        """The virtual seconds of the slowest of the clients that were asked: forward passes only, which take a third
        of the time of training."""
        if self.asked is None:
            return 0.0
        device, unit = fleet.device_numbers(self.asked, ask.number), fleet.devices.unit
        rows = ask.sizes[self.asked]
        rows = rows if self.rows is None else np.minimum(rows, self.rows)
        units = {"forward": rows, "example": rows / 3, "step": rows / ask.batch / 3}
        share = rows / (ask.steps[self.asked] * ask.batch) / 3  # of a visit
        return float((device.compute * units.get(unit, share)).max()) * fleet.systems.scale / 1000


def arrivals(
    visits: VisitTimes, asked: np.ndarray, spare: np.ndarray, wanted: int, deadline: float
) -> tuple[np.ndarray, float]:
    """(positions of the first `wanted` clients that arrive by the deadline, seconds until the round ends).

    asked: (c,) client numbers. spare: (c,) bool. Clients that arrive at the same time are in the order of cohort,
    spares, and of their numbers: otherwise equal speeds would always leave out the highest numbers.
    """
    duration = visits.duration
    order = np.lexsort((asked, spare, duration))
    in_time = order[visits.arrives[order] & (duration[order] <= deadline)]
    used = in_time[:wanted]
    if len(used) == wanted and wanted:
        return used, float(duration[used[-1]])
    if math.isfinite(deadline):
        return used, deadline
    return used, float(np.minimum(duration, visits.lost).max()) if len(asked) else 0.0


def visit_columns(
    asked: np.ndarray, wanted: np.ndarray, visits: VisitTimes, when: tuple[float, float], used: np.ndarray, version: int
) -> dict[str, np.ndarray]:
    """The visits of the clients of a round as columns (c,) by name, see `records.per_client`.

    asked: (c,) client numbers. wanted: (c,) whether each was drawn for the cohort and not as a spare. when: (virtual
    time at which the visits begin, seconds until the round ends). used: positions of the clients that are used.
    version: of the model that they receive.
    """
    begin, length = when
    status = np.where(visits.lost <= length, LOST, LATE)
    status[used] = USED
    return {
        "id": asked,
        "selected": wanted,
        "status": status,
        "start": np.full(len(asked), begin),
        "arrival": begin + np.minimum(visits.duration, visits.lost),
        "duration": visits.duration,
        "compute": visits.compute,
        "version": np.full(len(asked), version),
        "staleness": np.zeros(len(asked), dtype=np.int64),
    }


def in_order(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays in the order of their names, in which a checkpoint has them."""
    return {name: state[name] for name in sorted(state)}


def first_plan_state(sampler: Sampler, federation: Federation, clock: bool) -> PlanState:
    """The state before round 1. clock: whether the run has a virtual clock."""
    state = sampler.start(federation.clients, federation.cohort)
    return PlanState(in_order(state), {"seconds": np.zeros(1)} if clock else {})
