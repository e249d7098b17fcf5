"""The fleet of an experiment as Parquet files: the devices of its clients, and when they are online."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..engine.config.schema import Experiment
from ..engine.errors import ConfigError
from ..engine.fleet.fleet import Parts, build_parts
from ..engine.fleet.traces import DeviceTable, Sessions, write_devices, write_sessions
from ..engine.run_spec import RunSpec
from .listing import columns

DAY = 86_400.0
PERCENTILES = (5, 25, 50, 75, 95)


def describe(experiment: Experiment, devices: Path | None, sessions: Path | None, days: float) -> str:
    """Percentiles of the fleet as text. devices, sessions: the files to write, None for no file. days: how long the
    file of sessions is."""
    if experiment.systems is None:
        raise ConfigError("systems is missing; add systems: {} for the default devices")
    federation = experiment.federation
    registry = RunSpec.of("fleet", experiment).registry
    parts = build_parts(experiment.systems, registry, federation.local, federation.clients)
    table = device_table(parts, experiment.seed, federation.clients)
    if devices is not None:
        write_devices(devices, table, {"source": f"fedfleet, seed {experiment.seed}"})
    online = None
    if sessions is not None or not parts.availability.always:
        online = online_sessions(parts, experiment.seed, federation.clients, days * DAY)
    if sessions is not None and online is not None:
        write_sessions(sessions, online, {"source": f"fedfleet, seed {experiment.seed}"})
    rows = [("", *(f"{place} %" for place in PERCENTILES))]
    for name, values in (
        (f"compute, ms per {table.unit}", table.compute), ("down, kbit/s", table.down), ("up, kbit/s", table.up),
        ("memory, MB", table.memory / 1e6),
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


def device_table(parts: Parts, seed: int, clients: int) -> DeviceTable:
    """The device of every client on its first visit."""
    everyone = np.arange(clients)
    return DeviceTable(*parts.devices.numbers(seed, everyone, 1), everyone, parts.devices.unit)


def online_sessions(parts: Parts, seed: int, clients: int, seconds: float) -> Sessions:
    """The sessions of every client from 0 to `seconds`, at which they are cut off. The trace does not repeat. Raises
    ConfigError if nobody is ever online."""
    everyone, now = np.arange(clients), np.zeros(clients)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while len(everyone):
        begin = parts.availability.next(seed, everyone, now)
        there = begin < seconds
        everyone, begin = everyone[there], begin[there]
        if len(everyone):
            now = np.minimum(parts.availability.until(seed, everyone, begin), seconds)
            found.append((everyone, begin, now))
    if not found:
        raise ConfigError(f"systems.availability: nobody is online in {seconds:,.0f} seconds; choose more days")
    client, begin, end = (np.concatenate([part[i] for part in found]) for i in range(3))
    order = np.lexsort((begin, client))
    numbers, first = np.unique(client[order], return_index=True)
    return Sessions(begin[order], end[order], np.append(first, len(client)), numbers, None)
