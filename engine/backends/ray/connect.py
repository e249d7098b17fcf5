"""Connects to a Ray cluster, or starts Ray on this machine. Every failure becomes a one-line message.

The runs of one process share the Ray that the first of them starts, because its start takes longer than many runs. It
ends with the process, or by `shutdown`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import AuthenticationError
from ray.util.client import ray as client
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ....workloads.processors import processors
from ...config.schema import Engine, workers_on
from ...errors import ConfigError, Interrupted
from ...stopping import at_once
from .local_ray import FOR_A_RUN, QUIET, below, disconnect, shut_down, start_here

ANSWER_SECONDS = 5.0
"""Seconds that a cluster may take to accept a connection, and for each answer. Ray itself would wait for minutes."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a client of HTTP/2 sends first (gRPC uses HTTP/2): the protocol's words and an empty frame of settings."""
SETTINGS = 4
"""The type of the first frame of a server of HTTP/2. It is the fourth byte of the frame."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId", b""
"""A call of gRPC that the head of every cluster can answer, and its argument."""
PING = "/ray.rpc.RayletDriver/ClusterInfo", b"\x08\x06"
"""A call that every port of Ray Client can answer, and its argument, the type PING."""
INLINE_BYTES = 1 << 22
"""An argument or an answer of at most these bytes is part of the message of its call (Ray's own limit is 100 KiB)."""
TOKEN = "set RAY_AUTH_TOKEN, or the file ~/.ray/auth_token, to the cluster's token (RAY_AUTH_MODE is token, or not set)"


@dataclass
class SharedRay:
    """The Ray that the runs of this process share.

    `address`: of its head. `surroundings`: what its processes inherited when it started. `processes`: the ids of those
    that were started here; the others are their descendants. `users`: the number of runs that use it now.
    """

    address: str
    surroundings: tuple[Any, ...]
    processes: set[int]
    users: int = 0

    def connected(self) -> bool:
        """Whether this process is still connected to it, and not to another Ray that the user has started since."""
        return ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address


shared: SharedRay | None = None
"""None while runs share no Ray: none was started yet, or this process was connected to Ray by other means."""
_lock = threading.RLock()
"""Held while `shared` changes, because runs may be started by several threads."""


@contextmanager
def ray_for(engine: Engine, stop: Callable[[], int]) -> Iterator[bool]:
    """A context in which this process is connected to Ray, for one run. Yields whether only this run uses that Ray.

    A Ray that was started here stays for the next run. A connection to a cluster, `engine.address`, ends with the
    context, unless it existed before. stop: returns the number of a signal that shall end the run, or 0. Raises
    ConfigError as `connect` does, and Interrupted; then no process is left.
    """
    global shared
    with _lock:
        end_unsuitable(engine)
        before, was_connected = set(below(os.getpid())), ray.is_initialized()
        try:
            with at_once(stop):
                started = connect(engine, stop)
        except Interrupted:
            if not was_connected:
                shut_down(set(below(os.getpid())) - before)
            raise
        if started and not engine.address:
            head = ray.get_runtime_context().gcs_address
            shared = SharedRay(head, surroundings(), set(below(os.getpid())) - before)
            atexit.register(shutdown)
        mine = shared
        if mine is not None:
            mine.users += 1
    try:
        yield mine is not None and mine.users == 1
    finally:
        if mine is not None:
            mine.users -= 1
        elif started:
            shut_down(set(below(os.getpid())) - before)


def shutdown() -> None:
    """End the Ray that the runs of this process share, with all of its processes. The next run starts it again.

    It does nothing if no run has started Ray, or if this process was connected to Ray by other means. Python calls it
    when the process ends.
    """
    global shared
    with _lock:
        mine, shared = shared, None
        atexit.unregister(shutdown)
        if mine is not None and mine.connected():
            shut_down(mine.processes)


def surroundings() -> tuple[Any, ...]:
    """What the processes of Ray inherit from this one when it starts: the current folder, the path of imports, and the
    environment variables, except those that Ray sets itself."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return os.getcwd(), tuple(sys.path), variables


def end_unsuitable(engine: Engine) -> None:
    """End the shared Ray if a run could not use it, so that it is started again.

    It is unsuitable if the run is for a cluster, needs more than this Ray has, or would find other surroundings. One
    that the user has ended, by `ray.shutdown()`, is forgotten.
    """
    with _lock:
        if shared is None or shared.users:
            return
        others = engine.address or surroundings() != shared.surroundings
        if others or not shared.connected() or not suffices(engine):
            shutdown()


def suffices(engine: Engine) -> bool:
    """Whether the Ray that this process is connected to has what the workers of a run reserve."""
    try:
        _fits(counted(engine), ray.cluster_resources())
    except ConfigError:
        return False
    return True


def connect(engine: Engine, stop: Callable[[], int] = lambda: 0) -> bool:
    """Connect to Ray, or start it here if no address is given. Returns whether it was started, and is ours to stop.

    stop: see `start_here`. Raises ConfigError if the address cannot be joined or the workers do not fit, and what
    `start_here` raises.
    """
    end_unsuitable(engine)
    started = not ray.is_initialized()
    if started:
        if not engine.address:
            _fits(engine, {"CPU": float(processors()), "GPU": gpus_or_cpus(engine, "gpus")})
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the workers do the work of the machine
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # a history of calls, which nobody reads
        os.environ.setdefault("RAY_max_direct_call_object_size", str(INLINE_BYTES))
        with same_sigterm():
            if engine.address:
                join(engine.address)
            else:
                start_here(int(np.ceil(gpus_or_cpus(engine, "gpus"))) or None, stop)
    try:
        _fits(counted(engine), ray.cluster_resources())
    except ConfigError:
        if started:
            disconnect()
        raise
    return started


@contextmanager
def same_sigterm() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM. Ray replaces it when it starts, and would end the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def join(address: str) -> None:
    """Connect to a running cluster. address: auto, HOST:PORT or ray://HOST:PORT. Raises ConfigError with the reason."""
    found = found_cluster() if address == "auto" else address
    check_listening(found, address)
    check_is_ray(found, address)
    try:
        ray.init(address=found, **QUIET)
    except AuthenticationError:
        raise ConfigError(f"engine.address={address}: {no_token()}") from None
    except RuntimeError as error:
        raise ConfigError(f"engine.address={address}: {version_mismatch(str(error))}") from None
    except (ConnectionError, SystemExit):
        raise ConfigError(f"engine.address={address}: {refused()}") from None


def found_cluster() -> str:
    """HOST:PORT of the cluster that `auto` means: that of which this process is a job, else RAY_ADDRESS, else the only
    one with a node on this machine or, among several, the last that `ray start` has started. Raises ConfigError."""
    given = own_cluster() or os.environ.get("RAY_ADDRESS", "")
    if given not in ("", "auto"):
        return given
    found = clusters_here()
    if len(found) > 1:
        with suppress(OSError, ImportError):
            from ray._private.utils import read_ray_address

            found = [each for each in found if each == read_ray_address()] or found
    if len(found) > 1:
        raise ConfigError(
            f"engine.address=auto: {len(found)} clusters run on this machine; give the HOST:PORT of one: "
            f"{', '.join(sorted(found))}"
        )
    if not found:
        raise ConfigError(
            "engine.address=auto: no cluster runs on this machine (a run that has started a Ray for itself is none); "
            "start one by `ray start --head`, or give its HOST:PORT"
        )
    return found[0]


def own_cluster() -> str | None:
    """HOST:PORT of the cluster that this process is a job of; None if it is no job.

    RAY_ADDRESS may name another cluster of the machine. The node's own process (raylet), whose process number a job
    inherits, was started with the right address.
    """
    raylet = os.environ.get("RAY_RAYLET_PID", "")
    return head_of(Path("/proc", raylet)) if raylet.isdecimal() else None


def clusters_here() -> list[str]:
    """HOST:PORT of each cluster with a node on this machine. A Ray that a run has started for itself is none."""
    found = [head_of(process) for process in Path("/proc").glob("[0-9]*")]
    return [*dict.fromkeys(filter(None, found))]


def head_of(raylet: Path) -> str | None:
    """HOST:PORT of the cluster to which a node's own process belongs; None if the process is none, or if its Ray is for
    one run alone. raylet: the folder of the process in /proc."""
    try:
        words = (raylet / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if Path(words[0]).name != "raylet" or f"--labels={json.dumps(FOR_A_RUN)}" in words:
        return None
    found = [word.partition("=")[2] for word in words if word.startswith(("--gcs-address=", "--gcs_address="))]
    return found[0] if found else None


def use_token() -> bool:
    """Use this user's token from now on, for a cluster that has asked for one. Returns whether there is a token, and
    RAY_AUTH_MODE does not forbid it.

    Ray itself does so for a cluster that it starts or finds on this machine. At an address that the user gives, it
    would use no token, although `ray start` has made the cluster ask for one because there was one.
    """
    with suppress(ImportError):  # a version of Ray without tokens
        from ray._private.authentication import authentication_token_setup as setup

        setup.logger.setLevel(logging.ERROR)
        return setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return False


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT or ray://HOST:PORT. Raises ConfigError for anything else."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"engine.address must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def check_listening(address: str, given: str = "", seconds: float = ANSWER_SECONDS) -> None:
    """Raise ConfigError if nothing listens at an address. given: the address as the user wrote it. seconds: the time
    that a connection may take."""
    try:
        socket.create_connection(split_address(address), seconds).close()
    except OSError as error:
        raise ConfigError(
            f"engine.address={given or address}: no cluster answers there ({error.strerror or error}); look at `ray "
            "status` on its head, or leave engine.address out to start Ray here"
        ) from None


def check_is_ray(address: str, given: str) -> None:
    """Raise ConfigError if what listens at an address is not Ray. given: the address as the user wrote it.

    This takes a few times ANSWER_SECONDS at most; Ray itself would wait for a quarter of an hour.
    """
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return  # the server wants certificates before it answers
    if not speaks_http2(address):
        raise ConfigError(
            f"engine.address={given}: something answers there, but it is no Ray; give the port that `ray start --head` "
            "printed (by default 6379; 8265 is the dashboard's, for `fedfleet submit`)"
        )
    known = is_ray(address)
    if known is None and use_token():
        known = is_ray(address)
    if known is None:
        raise ConfigError(f"engine.address={given}: {no_token()}")
    if not known:
        raise ConfigError(
            f"engine.address={given}: something answers there, but it is not the head of a Ray cluster; give the port "
            "that `ray start --head` printed, or ray://HOST:PORT for a port of Ray Client"
        )


def speaks_http2(address: str) -> bool:
    """Whether the first bytes of the answer are those of a server of gRPC."""
    answer = first_bytes(address, PREFACE, 4)
    return len(answer) == 4 and answer[3] == SETTINGS


def first_bytes(address: str, question: bytes, count: int) -> bytes:
    """The first `count` bytes of the answer to a question; fewer if no more come within ANSWER_SECONDS."""
    end, answer = time.monotonic() + ANSWER_SECONDS, b""
    with suppress(OSError), socket.create_connection(split_address(address), ANSWER_SECONDS) as line:
        line.sendall(question)
        while len(answer) < count and (left := end - time.monotonic()) > 0:
            line.settimeout(left)
            more = line.recv(count - len(answer))
            if not more:
                break
            answer += more
    return answer


def is_ray(address: str) -> bool | None:
    """Whether a server of gRPC answers as Ray does at such an address; None if it asks for a token, or for another one
    than this process uses."""
    try:
        import grpc
    except ImportError:
        return True  # only ray[default] includes grpc; without it, Ray itself finds out
    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        call, argument = PING if address.startswith("ray://") else CLUSTER_ID
        ask = channel.unary_unary(call, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(argument, timeout=ANSWER_SECONDS, metadata=token_header())
        except grpc.RpcError as error:
            known: Any = error
            if known.code() == grpc.StatusCode.UNAUTHENTICATED:
                return None
            return known.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


def token_header() -> tuple[tuple[str, str], ...]:
    """What a call of gRPC carries for this process's token; empty if it uses none."""
    if not token_found():
        return ()
    import ray._raylet as raylet

    loader: Any = getattr(raylet, "AuthenticationTokenLoader")  # noqa: B009 - it has no types
    with suppress(AuthenticationError):  # there is none
        return tuple((name.lower(), value) for name, value in loader.instance().get_token_for_http_header().items())
    return ()


def no_token() -> str:
    """A clause for a cluster that wants a token, which this process does not have."""
    got = "another one" if token_header() else "none"
    return f"the cluster requires a token, got {got}; {TOKEN}"


def token_found() -> bool:
    """Whether this process uses a token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return is_token_auth_enabled()


def version_mismatch(message: str) -> str:
    """A sentence from Ray's message on two versions that differ; the first line of any other message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    versions = [line for line in lines if line.startswith(("Ray:", "Python:"))]
    if len(versions) != 4:
        return lines[0] if lines else "Ray refused the connection"
    theirs, ours = ", ".join(versions[:2]), ", ".join(versions[2:])
    return f"versions differ: the cluster has {theirs}, here is {ours}; install the cluster's here, or use another"


def refused() -> str:
    """A clause for a cluster that Ray could not connect to, although its head answers."""
    return (
        f"something listens there, but this Ray ({ray.__version__}) was refused: if the cluster requires a token, "
        f"{TOKEN}; else compare `ray --version` on both sides"
    )


def counted(engine: Engine) -> Engine:
    """The engine with the number of its workers where it says `workers: auto`: as many as fit on this node of the Ray
    that this process is connected to. That is the user's own, whatever they gave to `ray.init`, or was started here
    with the processors of this process. A cluster, `engine.address`, is filled with workers by `placement.wanted`."""
    if engine.workers != "auto" or engine.address or client.is_connected():
        return engine
    mine = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == mine)
    return engine.model_copy(update={"workers": workers_on(node["Resources"].get("CPU", 0.0), engine.cpus)})


def _fits(engine: Engine, have: Mapping[str, float]) -> None:
    """Raise ConfigError for workers that Ray could never place, before anything waits for them."""
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
    """The number of processors or GPUs of all workers; 0 for workers: auto on a cluster, which takes what is there."""
    if engine.workers == "auto" and engine.address:
        return 0.0
    return sum(group.count * getattr(group, key) for group in engine.groups())


def here() -> Any:
    """Ray's scheduling strategy for this node, whose files and shared memory are its own.

    If this process is in a placement group (a trial of a search), its bundles are for the workers.
    """
    group = get_current_placement_group()
    if group is not None:
        return PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    if client.is_connected():  # this process is outside the cluster, so that any node will do
        return "DEFAULT"
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def carried(address: str | None) -> dict[str, Any]:
    """Options of an actor on a cluster that was there before: it gets our environment variables.

    If Ray was started here, processes inherit them, and a process that must set its own starts more slowly.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
    return {"runtime_env": {"env_vars": ours}} if address and ours else {}
