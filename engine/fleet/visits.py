"""The model of the fleet: who is online, how much a client does, how long it takes, and whether it is lost.

A visit is one client's part in a round, or one dispatch of it in an asynchronous run. Its duration is a pure function
of the seed, the client, the number of the round or dispatch, its local steps and the bytes of both messages. No
duration depends on weights or losses, so a timeline is known before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...workloads.client_index import ClientIndex
from ..cohorts.tasks import steps_of
from ..config.registry import Registry
from ..config.schema import Experiment, Local, Systems
from ..errors import ConfigError
from ..method_form.state_spec import StateSpec
from ..user_code import plugin_errors
from .contract import Availability, DeviceNumbers, Devices, LocalWork, WorkRequest, keys, uniform

MOST_MOVES = 1_000
"""How often the clock goes on to the next client that comes online, in search of a time at which enough are."""
ONE_STEP = 1e-9
"""A step counts as done by a deadline that it misses by this part of a step, which is rounding."""


class VisitTimes(NamedTuple):
    """The visits of c clients; every array is (c,). Times are virtual seconds from the start of the visit."""

    steps: np.ndarray  # int64, the local steps that are taken; 0 if a deadline leaves none
    down: np.ndarray  # seconds of the download
    compute: np.ndarray  # seconds of the local steps
    up: np.ndarray  # seconds of the upload
    lost: np.ndarray  # when the client is lost, infinite if it is not

    @property
    def duration(self) -> np.ndarray:
        """(c,) the seconds of the whole visit, if the client is not lost."""
        return self.down + self.compute + self.up

    @property
    def arrives(self) -> np.ndarray:
        """(c,) bool: whether the client's message arrives at all."""
        return np.isinf(self.lost)


def build_parts(
    systems: Systems, registry: Registry, local: Local, clients: int
) -> tuple[Devices, Availability, LocalWork]:
    """The parts that the section names. Raises ConfigError if one of them does not fit the federation."""
    devices = registry.build("DEVICES", systems.devices, "systems.devices")
    availability = registry.build("AVAILABILITIES", systems.availability, "systems.availability")
    work = registry.build("LOCAL_WORK", systems.work, "systems.work")
    for key, part, base in (
        ("devices", devices, Devices), ("availability", availability, Availability), ("work", work, LocalWork),
    ):  # fmt: skip
        if not isinstance(part, base):
            raise ConfigError(f"systems.{key}: {part!r} is no {base.__name__}; give a name")
    with plugin_errors("systems.devices"):
        devices.check(clients)
    with plugin_errors("systems.availability"):
        availability.check(clients)
    with plugin_errors("systems.work"):
        work.check(local.epochs)
    return devices, availability, work


class Traffic(NamedTuple):
    """The bytes of one client's messages in a round, with buffers, and those of the model as it is trained."""

    down: float
    up: float
    model: float

    @staticmethod
    def of(state_spec: StateSpec) -> Traffic:
        buffers = state_spec.buffers
        return Traffic(state_spec.down + buffers, state_spec.up + buffers, state_spec.bytes_with_buffers)


class Fleet:
    """The devices of a run's clients in virtual time. All methods are pure functions of their arguments."""

    def __init__(
        self,
        seed: int,
        systems: Systems,
        parts: tuple[Devices, Availability, LocalWork],
        local: Local,
        client_index: ClientIndex,
        traffic: Traffic,
    ) -> None:
        """parts: what `build_parts` returns."""
        self.seed, self.systems, self.local = seed, systems, local
        self.devices, self.availability, self.work = parts
        self.client_index, self.traffic = client_index, traffic
        self.remembered: VisitTimes | None = None  # of all clients, see `remember`
        self.remembered_devices: DeviceNumbers | None = None

    @staticmethod
    def of(
        experiment: Experiment, registry: Registry, state_spec: StateSpec, client_index: ClientIndex
    ) -> Fleet | None:
        """The fleet of a run; None for a run without a section `systems`."""
        if experiment.systems is None:
            return None
        federation = experiment.federation
        parts = build_parts(experiment.systems, registry, federation.local, federation.clients)
        traffic = Traffic.of(state_spec)
        return Fleet(experiment.seed, experiment.systems, parts, federation.local, client_index, traffic)

    def with_local(self, local: Local, traffic: Traffic) -> Fleet:
        """The same devices with other local work and messages."""
        parts = self.devices, self.availability, self.work
        return Fleet(self.seed, self.systems, parts, local, self.client_index, traffic)

    # --- visits -------------------------------------------------------------------------------------------------------
    def visits(
        self,
        clients: np.ndarray,
        number: int | np.ndarray,
        visited: np.ndarray,
        start: float | np.ndarray,
        deadline: float = np.inf,
    ) -> VisitTimes:
        """The visits of these clients (c,).

        number: of the round or of the dispatch, from 1; one for all or (c,). visited: (c,) how often each client has
        taken part before, which says where its stream of batches goes on. start: the virtual time at which the visits
        begin, one for all or (c,). deadline: seconds after the start; clients take only as many steps as fit into it.
        """
        if self.remembered is not None and deadline == np.inf:
            return VisitTimes(*(column[clients] for column in self.remembered))
        sizes, device = self.client_index.sizes_of(clients), self.device_numbers(clients, number)
        full, batches = steps_of(sizes, self.local), -(-sizes // self.local.examples)
        request = WorkRequest(self.seed, clients, number, full, batches, device.compute)
        steps = np.clip(self.work.steps(request), 1, full)
        down, up = (transfer_seconds(size, rate) for size, rate in zip(self.traffic[:2], device[1:3], strict=True))

        def compute(steps: np.ndarray) -> np.ndarray:
            return self.compute_seconds(device, sizes, visited, steps)

        if np.isfinite(deadline):
            steps = steps_until(deadline - down - up, steps, compute)
        with np.errstate(over="ignore"):
            seconds = compute(steps)
        if not np.isfinite(down + seconds + up).all():
            raise ConfigError(
                f"systems: every visit must have a finite duration, got {(down + seconds + up).max()} virtual seconds; "
                "choose other numbers for systems.devices or systems.scale"
            )
        lost = self._lost(clients, number, start, down + seconds + up)
        if np.isfinite(deadline):
            lost = np.where(steps > 0, lost, np.minimum(lost, deadline))
        return VisitTimes(steps, down, seconds, up, lost)

    def device_numbers(self, clients: np.ndarray, number: int | np.ndarray) -> DeviceNumbers:
        """The devices of these clients (c,), see `Devices.numbers`."""
        if self.remembered_devices is not None:
            return DeviceNumbers(*(column[clients] for column in self.remembered_devices))
        return self.devices.numbers(self.seed, clients, number)

    def remember(self) -> None:
        """Work out the devices of all clients now, if they keep them, and their visits, if all visits of a client
        without a deadline are alike. An asynchronous run asks for one visit at a time."""
        sizes = self.client_index.sizes
        everyone = np.arange(len(sizes))
        if not self.devices.constant:
            return
        self.remembered_devices = self.devices.numbers(self.seed, everyone, 0)
        full_batches = self.systems.examples == "nominal" or not (sizes % self.local.examples).any()
        nobody_is_lost = not self.systems.dropout and (self.availability.always or self.systems.interrupt == "never")
        if self.work.whole and full_batches and nobody_is_lost:
            self.remembered = self.visits(everyone, 0, np.zeros_like(everyone), 0.0)

    def compute_seconds(
        self, device: DeviceNumbers, sizes: np.ndarray, visited: np.ndarray, steps: np.ndarray
    ) -> np.ndarray:
        """(c,) the seconds of `steps` (c,) local steps; the other arguments as in `visits`. sizes: (c,) examples."""
        unit = self.devices.unit
        full = steps_of(sizes, self.local)
        if unit in ("forward", "example"):
            if self.systems.examples == "nominal":
                units = self.local.examples * steps
            else:
                units = examples_seen(sizes, self.local.examples, visited * full, steps)
            units = units * (3 if unit == "forward" else 1)
        else:
            units = steps if unit == "step" else steps / full
        return device.compute * units * (self.systems.scale / 1000)

    def _lost(
        self, clients: np.ndarray, number: int | np.ndarray, start: float | np.ndarray, duration: np.ndarray
    ) -> np.ndarray:
        """(c,) the seconds after the start at which each client is lost, infinite for clients that are not."""
        lost = np.full(len(clients), np.inf)
        if self.systems.dropout > 0:
            drops = uniform(keys(self.seed, "dropout", clients, number)) < self.systems.dropout
            when = uniform(keys(self.seed, "dropout time", clients, number)) * duration
            lost = np.where(drops, when, lost)
        availability, how = self.availability, self.systems.interrupt
        if availability.always or how == "never":
            return lost
        if how == "end":
            ends = availability.online(self.seed, clients, start + duration)
            return np.minimum(lost, np.where(ends, np.inf, duration))
        session = availability.until(self.seed, clients, start) - start
        return np.minimum(lost, np.where(session < duration, session, np.inf))

    # --- who is online ------------------------------------------------------------------------------------------------
    def fits(self, clients: np.ndarray) -> np.ndarray:
        """(c,) bool: whether each client's memory is large enough for the model."""
        if not self.devices.limits_memory:
            return np.ones(len(clients), dtype=bool)
        need = self.systems.needs * self.traffic.model
        return self.device_numbers(clients, 0).memory >= need

    def online(self, clients: np.ndarray, t: float) -> np.ndarray:
        """(c,) bool: whether each client is online at time t."""
        return self.availability.online(self.seed, clients, t)

    def next_online(self, clients: np.ndarray, t: float) -> np.ndarray:
        """(c,) t for clients that are online, else the start of their next session, infinite if there is none."""
        return self.availability.next(self.seed, clients, t)

    @property
    def all_eligible(self) -> bool:
        """Whether every client is eligible at all times."""
        return self.availability.always and not self.devices.limits_memory

    def eligible(self, t: float) -> np.ndarray | None:
        """The ascending numbers of the clients that are online at time t and have enough memory; None for all."""
        if self.all_eligible:
            return None
        everyone = np.arange(len(self.client_index.sizes))
        return everyone[self.fits(everyone) & self.online(everyone, t)]

    def first_time(self, t: float, least: int) -> float:
        """The first time from t on at which at least this many clients are eligible. Raises ConfigError if there is
        none."""
        if self.all_eligible:
            return t
        everyone = np.arange(len(self.client_index.sizes))
        fitting, start = everyone[self.fits(everyone)], t
        for _ in range(MOST_MOVES):
            come = np.sort(self.next_online(fitting, t))
            if len(come) < least or not np.isfinite(come[least - 1]):
                break
            if come[least - 1] <= t:
                return t
            t = float(come[least - 1])
        raise ConfigError(
            f"systems: {least} client{'s' * (least > 1)} must be online at one time with enough memory, got no such "
            f"time from second {start:,.0f} on; choose another availability, or lower federation.pace.least or "
            "systems.needs"
        )


def check_fleet(experiment: Experiment, registry: Registry, state_spec: StateSpec) -> None:
    """Raise ConfigError for a section `systems` whose parts cannot be built for the run."""
    Fleet.of(experiment, registry, state_spec, none_of(experiment.federation.clients))


def none_of(clients: int) -> ClientIndex:
    """An index in which every client has one row, for checks that need no data."""
    return ClientIndex(np.arange(clients + 1), np.arange(clients))


def transfer_seconds(size: float, rate: np.ndarray) -> np.ndarray:
    """(c,) the seconds that `size` bytes take at these rates (c,) in kbit/s."""
    return 8 * size / (1000 * rate)


def examples_seen(sizes: np.ndarray, batch: int, first: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """(c,) the examples in the batches first … first + steps - 1 of each client's stream; all arguments (c,) integers.
    The last batch of a pass over a client's rows may be short."""
    per_pass = -(-sizes // batch)

    def before(number: np.ndarray) -> np.ndarray:
        return number // per_pass * sizes + np.minimum(number % per_pass * batch, sizes)

    return before(first + steps) - before(first)


def steps_until(seconds: np.ndarray, steps: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(c,) the largest numbers of steps, `steps` at most, whose computing fits into these seconds (c,). compute: (c,)
    numbers of steps -> (c,) seconds."""
    one = compute(steps) / steps
    found = np.clip(np.floor(seconds / one + ONE_STEP), 0, steps).astype(np.int64)
    while (late := (found > 0) & (compute(found) > seconds + ONE_STEP * one)).any():  # later batches may be larger
        found = found - late
    return found
