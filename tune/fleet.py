"""The fleet of an experiment as Parquet files: the devices of its clients, and when they are online."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError
from ..engine.fleet.contract import Availability
from ..engine.fleet.traces import Sessions, write_devices, write_sessions
from ..engine.fleet.visits import build_parts
from ..engine.run_spec import RunSpec
from .listing import columns

DAY = 86_400.0
PERCENTILES = (5, 25, 50, 75, 95)


def describe(experiment: Experiment, devices: Path | None, sessions: Path | None, days: float) -> str:
    """Percentiles of the fleet as text. devices, sessions: the files to write, None for no file. days: how long the
    file of sessions is."""
    if experiment.systems is None:
        raise ConfigError("systems is missing; add systems: {} for the default devices")
    federation, source = experiment.federation, f"fedfleet, seed {experiment.seed}"
    registry = RunSpec.of("fleet", experiment).registry
    kind, availability, _ = build_parts(experiment.systems, registry, federation.local, federation.clients)
    everyone = np.arange(federation.clients)
    device = kind.numbers(experiment.seed, everyone, 1)  # of every client on its first visit
    if devices is not None:
        write_devices(devices, device, everyone, {"unit": kind.unit, "source": source})
    online = None
    if sessions is not None or not availability.always:
        online = online_sessions(availability, experiment.seed, federation.clients, days * DAY)
    if sessions is not None and online is not None:
        write_sessions(sessions, online, {"source": source})
    rows = [("", *(f"{place} %" for place in PERCENTILES))]
    for name, values in (
        (f"compute, ms per {kind.unit}", device.compute), ("down, kbit/s", device.down), ("up, kbit/s", device.up),
        ("memory, MB", device.memory / 1e6),
    ):  # fmt: skip
        if np.isfinite(values).all():
            rows.append((name, *(f"{value:,.3g}" for value in np.percentile(values, PERCENTILES))))
    if online is not None:
        lengths = (online.end - online.begin) / 3600
        rows.append(("session, hours", *(f"{value:.3g}" for value in np.percentile(lengths, PERCENTILES))))
        by_client = np.add.reduceat(online.end - online.begin, online.offsets[:-1]) / (days * DAY)
        share = np.append(by_client, np.zeros(federation.clients - len(by_client)))
        rows.append(("share of time online", *(f"{value:.3g}" for value in np.percentile(share, PERCENTILES))))
    return columns(rows)


def online_sessions(availability: Availability, seed: int, clients: int, seconds: float) -> Sessions:
    """The sessions of every client from 0 to `seconds`, at which they are cut off. The trace does not repeat. Raises
    ConfigError if nobody is ever online."""
    everyone, now = np.arange(clients), np.zeros(clients)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while len(everyone):
        begin = availability.next(seed, everyone, now)
        there = begin < seconds
        everyone, begin = everyone[there], begin[there]
        if len(everyone):
            now = np.minimum(availability.until(seed, everyone, begin), seconds)
            found.append((everyone, begin, now))
    if not found:
        raise ConfigError(f"systems.availability: nobody is online in {seconds:,.0f} seconds; choose more days")
    client, begin, end = (np.concatenate([part[i] for part in found]) for i in range(3))
    order = np.lexsort((begin, client))
    numbers, first = np.unique(client[order], return_index=True)
    return Sessions(begin[order], end[order], np.append(first, len(client)), numbers, None)
