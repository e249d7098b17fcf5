"""Joining a Ray cluster, or starting Ray here; what goes wrong with it in a sentence."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import AuthenticationError
from ray.util.client import ray as client
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...config.run_spec import RunSpec
from ...config.schema import Engine
from ...errors import ConfigError

STORE_BYTES = 2 * 2**30
"""Object store of a Ray started here: data sets and models of a laptop's size; Ray spills to disk beyond."""
ANSWER_SECONDS = 5.0
"""What a cluster's port may take to accept a connection, and then for each answer; Ray itself waits for minutes."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How a client of HTTP/2, which gRPC speaks, begins: the protocol's words and an empty frame of settings."""
SETTINGS = 4
"""The type of the frame that a server of HTTP/2 begins with, in its fourth byte."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A question that the head of any cluster can answer."""
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file ~/.ray/auth_token to the cluster's token"


def start_ray(run_spec: RunSpec) -> bool:
    """Connect to Ray for a run; see `connect`."""
    return connect(run_spec.experiment.engine)


def connect(engine: Engine) -> bool:
    """Connect to Ray, starting it here unless an address is given; whether it was started (and is ours to stop).

    Raises ConfigError where the address cannot be joined or the workers do not fit.
    """
    started = not ray.is_initialized()
    if started:
        if not engine.address:
            _fits(engine, {"CPU": float(os.cpu_count() or 1), "GPU": gpus_or_cpus(engine, "gpus")})
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # workers are the work, not a background to it
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
    found = own_cluster() or latest() if address == "auto" else address
    if found is not None:
        answers(found, address)
        is_ray(found, address)
    try:
        ray.init(address=found or address, **QUIET)
    except AuthenticationError:
        raise ConfigError(f"engine.address={address}: the cluster wants a token and none is here; {TOKEN}") from None
    except RuntimeError as error:
        raise ConfigError(f"engine.address={address}: {mismatch(str(error))}") from None
    except (ConnectionError, SystemExit) as error:
        raise ConfigError(f"engine.address={address}: {refused(address, str(error))}") from None


def own_cluster() -> str | None:
    """HOST:PORT of the cluster that this process is a job of, None where it is none. Ray tells a job an address too
    (RAY_ADDRESS), which it looks for among all clusters of the machine, and which may be another's; the node's own
    process (raylet), whose number is inherited, was started with the right one."""
    raylet = os.environ.get("RAY_RAYLET_PID", "")
    try:
        words = Path(f"/proc/{int(raylet)}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    found = [
        word.partition(b"=")[2].decode() for word in words if word.startswith((b"--gcs-address=", b"--gcs_address="))
    ]
    return found[0] if found else None


def latest() -> str | None:
    """HOST:PORT that Ray would take for `auto`; None where it is for Ray to say."""
    from ray._private import services

    try:
        return services.canonicalize_bootstrap_address("auto")
    except Exception:  # whatever it is, ray.init says the same
        return None


def spot(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or ray://HOST:PORT; ConfigError for anything else."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"engine.address must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def answers(address: str, given: str = "") -> None:
    """ConfigError where nothing listens. given: how the user wrote it."""
    try:
        socket.create_connection(spot(address), ANSWER_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"engine.address={given or address}: no cluster answers there ({error.strerror or error}); look at `ray "
            "status` on its head, or leave engine.address out to start Ray here"
        ) from None


def is_ray(address: str, given: str) -> None:
    """ConfigError, within a few times ANSWER_SECONDS, where something listens that is no Ray: Ray itself would wait for
    a quarter of an hour. given: how the user wrote it."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return  # what listens wants certificates before it says anything
    if not speaks_http2(address):
        raise ConfigError(
            f"engine.address={given}: something answers there, but it is no Ray; give the port that `ray start --head` "
            "told (6379 unless chosen otherwise; 8265 is the dashboard's, for `fedfleet submit`)"
        )
    if not address.startswith("ray://") and not is_head(address):
        raise ConfigError(
            f"engine.address={given}: something answers there, but it is not the head of a Ray cluster; give the port "
            "that `ray start --head` told, or ray://HOST:PORT for a port of Ray Client"
        )


def speaks_http2(address: str) -> bool:
    """Whether the first thing that is said there is what a server of gRPC says first."""
    told = first_words(address, PREFACE, 4)
    return len(told) == 4 and told[3] == SETTINGS


def first_words(address: str, said: bytes, count: int) -> bytes:
    """The first `count` bytes that are answered to what is said, fewer where no more come within ANSWER_SECONDS."""
    end, told = time.monotonic() + ANSWER_SECONDS, b""
    with suppress(OSError), socket.create_connection(spot(address), ANSWER_SECONDS) as line:
        line.sendall(said)
        while len(told) < count and (left := end - time.monotonic()) > 0:
            line.settimeout(left)
            more = line.recv(count - len(told))
            if not more:
                break
            told += more
    return told


def is_head(address: str) -> bool:
    """Whether a server of gRPC knows the question for a cluster's id, whoever may ask it."""
    try:
        import grpc
    except ImportError:
        return True  # it comes with ray[default] alone; then Ray itself finds out
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(CLUSTER_ID, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            known: Any = error
            return known.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


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
        if isinstance(engine.workers, tuple):
            raise ConfigError(
                f"engine.workers: the groups take {asked:g} {resource} together, there are {granted:g}; lower a "
                f"count or {key} (fractions are allowed)"
            )
        raise ConfigError(
            f"engine.workers x engine.{key} <= {granted:g} must hold, got {engine.count_workers()} x "
            f"{getattr(engine, key):g}; lower engine.workers or engine.{key} (fractions are allowed)"
        )


def gpus_or_cpus(engine: Engine, key: str) -> float:
    """What all workers take together; auto takes what there is."""
    if engine.workers == "auto" and engine.address:
        return 0.0
    return sum(group.count * getattr(group, key) for group in engine.groups())


def here() -> Any:
    """On this node, for files and boards are its own: in the placement group that this process is in, whose bundles
    are its workers' processors (a trial of a search), else anywhere on the node."""
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
