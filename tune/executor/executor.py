"""Executes many runs at the same time. Ray is loaded only if the runs need it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from ...engine.config.schema import Engine, workers_on
from ...engine.errors import ConfigError
from ...workloads.processors import processors
from ..streams import tell
from .fork_server import not_needed
from .processes import Processes
from .source import Source

WANTED = Literal["auto"] | bool
"""Whether runs share processes: auto where that is possible."""


def why_not_together(engine: Engine, workers: int = 0) -> str:
    """Why runs with these settings cannot share processes; "" if they can. workers: see `Executor`."""
    if engine.address:
        return f"engine.address={engine.address} names a cluster"
    if other_machines():
        return "this process is connected to a cluster of several machines"
    if workers:
        return f"each of them has {workers} worker processes"
    if engine.gpus or engine.device not in ("auto", "cpu"):
        return "they run on GPUs"
    return ""


def other_machines() -> bool:
    """Whether this process is connected to a Ray cluster that has other nodes than this machine."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    here = ray.get_runtime_context().get_node_id()
    return any(node["Alive"] and node["NodeID"] != here for node in ray.nodes())


def check_together(key: str, wanted: WANTED, why_not: str) -> bool:
    """Whether runs share processes. wanted: the setting, whose name is `key`. why_not: why they cannot, or "".

    Raises ConfigError if they must and cannot. Says on standard error why they do not where that was left open.
    """
    if wanted is True and why_not:
        raise ConfigError(f"{key}: runs cannot share processes, got true: {why_not}; choose auto")
    if wanted == "auto" and why_not:
        tell(f"every run has a process of its own: {why_not}")
    together = bool(wanted) and not why_not
    if not together:
        not_needed()
    return together


def processes_here(engine: Engine) -> int:
    """The number of runs that the processors of this process can execute at the same time, at least 1."""
    return workers_on(processors(), engine.cpus)


def cpus_for(engine: Engine, processes: int) -> float:
    """The least `engine.cpus` with which `processes_here` is at most this number of processes."""
    return max(engine.cpus, processors() / processes)


class Executor:
    """Executes the runs that sources hand out. A context manager: at its end it stops Ray if it has started it."""

    def __init__(
        self,
        engine: Engine,
        stop: Callable[[], Any],
        at_once: int | None = None,
        workers: int = 0,
        share: bool = False,
        processes: Processes | None = None,
    ) -> None:
        """Does not connect to Ray yet.

        engine: settings of the cluster and of the resources of a run. stop: polled while runs are under way; when it
        returns something true, no further run begins, and those under way write a checkpoint and end. at_once: largest
        number of simultaneous runs; None: as many as fit. workers: worker processes of a run beside its own process;
        0: a run takes place in its own process only. share: with `at_once`, whether runs share the processors if there
        are fewer than all of them would reserve. processes: those of this machine that runs share, without Ray; None
        for a process of Ray for each run.
        """
        self.processes = processes
        self.engine = engine.model_copy(update={"backend": "ray", "workers": max(1, workers)})
        self.stop, self.at_once, self.workers, self.share = stop, at_once, workers, share
        self.ours = self.started = False

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        if self.ours:
            from ...engine.backends.ray.local_ray import disconnect

            disconnect()

    def start(self) -> None:
        """Connect to Ray or start it. Raises ConfigError if that is impossible, or if a run could never be placed, and
        Interrupted if `stop` returns a signal meanwhile."""
        from ...engine.backends.ray.connect import connect

        if (self.engine.address or "").startswith("ray://"):
            raise ConfigError(
                f"engine.address={self.engine.address}: searches and studies cannot run through Ray's client; start "
                "the command on a node of the cluster, with auto or HOST:PORT as the address"
            )
        if not self.started:
            self.ours, self.started = connect(self.engine, self._signal), True

    def _signal(self) -> int:
        """The number of a signal that asks to end, or 0."""
        found = self.stop()
        return found if isinstance(found, int) else 0

    def run(self, source: Source) -> None:
        """Execute the source's runs, until it has none left or `stop` asks to end. Returns when no run is under way."""
        if self.processes is not None:
            self.processes.run(source, self.stop)
            return
        self.start()
        from .ray_tune import execute

        one = {"CPU": self.engine.cpus, "GPU": self.engine.gpus}
        execute(source, one, self.workers, self.at_once, self.share, self.stop)
