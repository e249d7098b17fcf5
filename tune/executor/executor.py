"""Which executor runs get: processes that they share, or a process of Ray for each."""

from __future__ import annotations

import sys
from typing import Literal

from ...engine.config.schema import Engine, workers_on
from ...engine.errors import ConfigError
from ...workloads.processors import processors
from ..streams import tell
from .fork_server import not_needed
from .source import Executor

WANTED = Literal["auto"] | bool
"""Whether runs share processes: auto where that is possible."""


def why_not_together(engine: Engine, workers: int = 0) -> str:
    """Why runs with these settings cannot share processes; "" if they can. workers: see `on_ray`."""
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


def on_ray(engine: Engine, at_once: int | None = None, workers: int = 0, share: bool = False) -> Executor:
    """Executes every run in a process of its own, which Ray starts. Does not connect to Ray yet.

    engine: settings of the cluster and of the resources of a run. at_once: largest number of simultaneous runs; None:
    as many as fit. workers: worker processes of a run beside its own process; 0: a run takes place in its own process
    only. share: with `at_once`, whether runs share the processors if there are fewer than all of them would reserve.
    """
    from .ray_tune import RayTune  # it loads Ray

    return RayTune(engine, at_once, workers, share)
