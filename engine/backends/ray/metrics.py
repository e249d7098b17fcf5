"""Gauges of a run, which the nodes of Ray export to Prometheus; docs/howto/monitoring.md lists them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ray.util.metrics import Gauge

from ...config.schema import part_name
from ...records.history import Record
from ...rounds.driver import Driver

TICK_SECONDS = 1.0
"""How often the gauges are set. The rounds of a run do not wait for it."""

GAUGES = {
    "fedfleet_round": "The last round that was committed.",
    "fedfleet_rounds": "The number of rounds that the run will have.",
    "fedfleet_clients_per_second": "Clients of the last round, divided by its seconds.",
    "fedfleet_round_seconds": "Seconds of the last round.",
    "fedfleet_busy_share": "Share of the last round, from 0 to 1, in which the workers were at work.",
    "fedfleet_state_bytes": "Bytes of client states in the files of the driver's node.",
    "fedfleet_retries": "Tasks that failed on a worker since the run began, and were run again.",
    "fedfleet_queue_tasks": "Tasks of the phase under way that have no result yet.",
    "fedfleet_loss": "The mean training loss of the last round.",
}
"""Name of a gauge -> what it is. Ray puts `ray_` in front of the names."""

TAGS = ("run", "method", "workload")


class RunMetrics:
    """The gauges of one run. A thread sets them, so that a round costs no more than remembering its record."""

    def __init__(self, driver: Driver) -> None:
        experiment = driver.run_spec.experiment
        names = [
            spec if isinstance(spec, str | dict) else type(spec).__name__
            for spec in (experiment.method, experiment.workload)
        ]
        values = (driver.run_spec.run_id, *map(part_name, names))
        self.driver, self.record = driver, {}
        self.gauges = {name: Gauge(name, description, TAGS) for name, description in GAUGES.items()}
        for gauge in self.gauges.values():
            gauge.set_default_tags(dict(zip(TAGS, values, strict=True)))

    @contextmanager
    def exported(self) -> Iterator[None]:
        """A context in which the gauges are set every TICK_SECONDS."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(TICK_SECONDS):
                self._set()

        thread = threading.Thread(target=tick, name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._set()

    def saw(self, record: Record) -> None:
        """A round was committed."""
        self.record = record

    def _set(self) -> None:
        for name, value in values_of(self.driver, self.record).items():
            self.gauges[name].set(value)


def values_of(driver: Driver, record: Record) -> dict[str, float]:
    """The values of the gauges. record: of the last round, {} before the first one has ended. A number that the round
    does not have, such as the loss of a round without clients, keeps its last value."""
    found = {
        "fedfleet_round": float(driver.round),
        "fedfleet_rounds": float(driver.last_round),
        "fedfleet_state_bytes": float(driver.table.used * driver.table.width),
        "fedfleet_retries": float(driver.retry.repeated),
        "fedfleet_queue_tasks": float(driver.pool.unfinished()),
    }
    if not record:
        return found
    seconds = record["time/seconds"]
    busy = record.get("time/workers", math.nan) / (max(1, driver.run_spec.workers) * seconds)
    of_round = {
        "fedfleet_clients_per_second": record.get("client/count", math.nan) / seconds,
        "fedfleet_round_seconds": seconds,
        "fedfleet_busy_share": min(busy, 1.0),
        "fedfleet_loss": record.get("train/loss", math.nan),
    }
    return {**found, **{name: value for name, value in of_round.items() if math.isfinite(value)}}
