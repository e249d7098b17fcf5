"""Joining a Ray cluster, or starting Ray here; what goes wrong with it in a sentence."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import AuthenticationError
from ray.util.client import ray as client
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from .config import Engine
from .errors import ConfigError
from .job import Job

STORE_BYTES = 2 * 2**30
"""Object store of a Ray started here: data sets and models of a laptop's size; Ray spills to disk beyond."""
ANSWER_SECONDS = 5.0
"""What a cluster's port may take to accept a connection; Ray itself gives up after two minutes."""
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file ~/.ray/auth_token to the cluster's token"


def start_ray(job: Job) -> bool:
    """Connect to Ray, starting it here unless an address is given; whether it was started (and is ours to stop)."""
    engine = job.experiment.engine
    started = not ray.is_initialized()
    if started:
        if not engine.address:
            _fits(engine, {"CPU": float(os.cpu_count() or 1), "GPU": gpus_or_cpus(engine, "gpus")})
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # hosts are the work, not a background to it
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # a history of calls that nobody looks at
        with same_sigterm():
            if engine.address:
                join(engine.address)
            else:
                gpus = int(np.ceil(gpus_or_cpus(engine, "gpus"))) or None
                ray.init("local", include_dashboard=False, num_gpus=gpus, object_store_memory=STORE_BYTES, **QUIET)
    try:
        _fits(engine, ray.cluster_resources())
    except ConfigError:
        if started:
            ray.shutdown()
        raise
    return started


@contextmanager
def same_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself as it starts, and ends the process there and then; the caller keeps its handler."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def join(address: str) -> None:
    """Connect to a running cluster: auto, ray://HOST:PORT, HOST:PORT. ConfigError says why that cannot be."""
    answers(address)
    try:
        ray.init(address=address, **QUIET)
    except AuthenticationError:
        raise ConfigError(f"engine.address={address}: the cluster wants a token and none is here; {TOKEN}") from None
    except RuntimeError as error:
        raise ConfigError(f"engine.address={address}: {mismatch(str(error))}") from None
    except (ConnectionError, SystemExit) as error:
        raise ConfigError(f"engine.address={address}: {refused(address, str(error))}") from None


def answers(address: str) -> None:
    """ConfigError where nothing listens."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"engine.address must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"engine.address={address}: no cluster answers there ({error.strerror or error}); look at `ray status` on "
            "its head, or leave engine.address out to start Ray here"
        ) from None


def token_found() -> bool:
    """Whether this process shows a token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return is_token_auth_enabled()


def mismatch(said: str) -> str:
    """Of Ray's lines on two versions, or its first line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    versions = [line for line in lines if line.startswith(("Ray:", "Python:"))]
    if len(versions) != 4:
        return lines[0] if lines else "Ray refused the connection"
    theirs, ours = ", ".join(versions[:2]), ", ".join(versions[2:])
    return f"versions differ: the cluster has {theirs}, here is {ours}; install the cluster's here, or use another"


def refused(address: str, said: str) -> str:
    if address == "auto" or "Could not find any running Ray instance" in said:
        return "no cluster runs on this machine; start one by `ray start --head`, or give its HOST:PORT"
    return (
        f"something listens there, but this Ray ({ray.__version__}) was not let in: if the cluster wants a token, "
        f"{TOKEN}; else compare `ray --version` on both sides"
    )


def _fits(engine: Engine, have: Mapping[str, float]) -> None:
    """Refuse what Ray could never place, before anything waits for it."""
    for key, resource in (("cpus", "CPU"), ("gpus", "GPU")):
        asked, granted = gpus_or_cpus(engine, key), have.get(resource, 0.0)
        if asked <= granted + 1e-9:
            continue
        if isinstance(engine.hosts, tuple):
            raise ConfigError(
                f"engine.hosts: the groups take {asked:g} {resource} together, there are {granted:g}; lower a count or "
                f"{key} (fractions are allowed)"
            )
        raise ConfigError(
            f"engine.hosts x engine.{key} <= {granted:g} must hold, got {engine.count_hosts()} x "
            f"{getattr(engine, key):g}; lower engine.hosts or engine.{key} (fractions are allowed)"
        )


def gpus_or_cpus(engine: Engine, key: str) -> float:
    """What all hosts take together; auto takes what there is."""
    if engine.hosts == "auto" and engine.address:
        return 0.0
    return sum(group.count * getattr(group, key) for group in engine.groups())


def here() -> Any:
    """On this node, for files and boards are its own: in the placement group that this process is in, whose bundles
    are its hosts' processors (a trial of a search), else anywhere on the node."""
    group = get_current_placement_group()
    if group is not None:
        return PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    if client.is_connected():  # this process is no part of the cluster: its head is as good as any node
        return "DEFAULT"
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def carried(address: str | None) -> dict[str, Any]:
    """Options of an actor on a cluster that was there before: our variables go with it. (Where Ray was started here
    they are inherited, and a process that has to set its own starts more slowly.)"""
    ours = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
    return {"runtime_env": {"env_vars": ours}} if address and ours else {}
