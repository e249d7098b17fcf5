"""Starts Ray on this machine (on loopback only, within a limit, with the reason if that fails), and ends it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from ....workloads.processors import processors
from ...errors import FedFleetError, Interrupted
from ...stopping import SIGNALS
from .start_obstacles import obstacle, usable_folder, usual_folder, why_not

STORE_BYTES = 2 * 2**30
"""Size of the object store. It holds the data sets; Ray writes what does not fit to the disk."""
FOR_A_RUN = {"fedfleet": "run"}
"""The label of a Ray that a run starts for itself: no cluster for others, because it ends with the run's process."""
LIMIT_SECONDS = 60.0
"""The time in which Ray must have started. It takes 3 seconds on a machine that is not busy."""
LOOK_SECONDS = 0.1
"""How often whoever waits for the start looks for a signal."""
NEEDLESS = ("start_api_server", "start_monitor", "start_log_monitor")
"""The methods of Ray's `Node` that start a server of statistics about Ray's use (what is left of the dashboard without
a dashboard), the autoscaler of a cluster that cannot grow, and a reader of logs that are not shown. These three
processes take a sixth of the processor time until the first round."""
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


WAIT = "wait_for_persisted_port"
"""The function of Ray that waits for a file with the port of a process."""


class Start:
    """A start of Ray, in a thread of its own that stays as long as Ray.

    Ray waits for its processes in code of C++, in which a signal is noticed only after half a minute; waiting for a
    thread can be ended at any time. The thread stays because Linux ends Ray's processes together with the thread that
    has started them (PR_SET_PDEATHSIG). For the same reason a start that was given up leaves no process.

    Signals that end a run are blocked in the thread, and so in Ray's processes, which inherit it: a batch system that
    ends a job must not end Ray before its run has a checkpoint.
    """

    def __init__(self, **options: Any) -> None:
        self.lock, self.done, self.over, self.given_up = threading.Lock(), threading.Event(), threading.Event(), False
        self.error: BaseException | None = None
        threading.Thread(target=self._run, args=(options,), name="Ray", daemon=True).start()

    def _run(self, options: dict[str, Any]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with fewer_processes(), short_waits(), on_loopback(), one_arena():
                ray.init("local", **options)
        except BaseException as error:
            self.error = error
        with self.lock:
            self.done.set()
        if self.given_up:
            shut_down_ray()
        elif self.error is None:
            with no_reports():
                self.over.wait()

    def give_up(self) -> bool:
        """End the start if it is under way. Returns whether it was."""
        with self.lock:
            self.given_up = not self.done.is_set()
            return self.given_up

    def wait(self, stop: Callable[[], int]) -> None:
        """Return when Ray has started. Raises what Ray raises, TimeoutError after LIMIT_SECONDS, and Interrupted."""
        end = time.monotonic() + LIMIT_SECONDS
        while not self.done.wait(LOOK_SECONDS):
            if stop():
                raise Interrupted(stop())
            if time.monotonic() > end:
                raise TimeoutError(f"it has not started within {LIMIT_SECONDS:g} s")
        if self.error is not None:
            raise self.error


_start: Start | None = None
"""The last start of Ray in this process."""


def start_here(gpus: int | None, stop: Callable[[], int] = lambda: 0) -> None:
    """Start Ray on this machine. gpus: the number that it announces; None: those that it finds. stop: returns the
    number of a signal that shall end the start, or 0.

    Raises FedFleetError, with the reason, if its processes cannot start or do not start within LIMIT_SECONDS, and
    Interrupted. Then no process is left.
    """
    global _start
    if _start is not None and not _start.done.wait(LIMIT_SECONDS):
        raise FedFleetError(
            "Ray cannot start yet, as an earlier start in this process, which was given up, goes on; try again later, "
            "or choose engine.backend=local"
        )
    folder, lacks = usable_folder()
    with on_loopback():
        address = ray.util.get_node_ip_address()
    if found := lacks or obstacle(address):
        raise FedFleetError(f"Ray cannot start on this machine: {found}, or choose engine.backend=local")
    resources = {"num_cpus": processors(), "num_gpus": gpus, "object_store_memory": STORE_BYTES}
    options: dict[str, Any] = {**resources, "labels": FOR_A_RUN, **QUIET}
    if folder != usual_folder():
        options["_temp_dir"] = str(folder)
    close_token()
    before = set(below(os.getpid()))
    try:
        _start = Start(include_dashboard=False, **options)
        _start.wait(stop)
    except Exception as error:  # Ray raises bare exceptions here
        shut_down(set(below(os.getpid())) - before)
        raise error if isinstance(error, FedFleetError) else FedFleetError(why_not(error, folder, address)) from None


def close_token() -> None:
    """Close the folder of Ray's token to other users, to whom a usual umask opens it. With the token, they could
    execute code as this one."""
    with suppress(OSError, RuntimeError):  # no home folder, or not this user's
        folder = Path.home() / ".ray"
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)


@contextmanager
def on_loopback() -> Iterator[None]:
    """The processes of a Ray that starts within the context listen on the loopback interface only.

    Ray does this by itself where it cannot be part of a cluster of several machines, which it believes of macOS. It has
    no argument for it (`_node_ip_address` with a loopback address is replaced), so that its constant is replaced while
    it starts. So it also starts on a machine whose name resolves to an address of another one.
    """
    from ray._private import ray_constants

    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    if before is None:
        yield
        return
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def short_waits() -> Iterator[None]:
    """Ray starts without the one wait for a process in which no other thread of Python runs, and no signal is handled.

    `wait_for_persisted_port` waits for half a minute in C++ with Python's lock held, so that it is replaced, while Ray
    starts, by short waits. It ends at once if the start is given up.
    """
    node: Any = sys.modules.get("ray._private.node")
    wait: Any = getattr(node, WAIT, None)
    if wait is None:
        yield
        return

    def waits(*file: str, timeout_ms: int) -> int:
        end = time.monotonic() + timeout_ms / 1e3
        while True:
            try:
                return wait(*file, timeout_ms=0)
            except RuntimeError:
                if time.monotonic() > end or (_start is not None and _start.given_up):
                    raise
            time.sleep(LOOK_SECONDS)

    setattr(node, WAIT, waits)
    try:
        yield
    finally:
        setattr(node, WAIT, wait)


@contextmanager
def fewer_processes() -> Iterator[None]:
    """Ray starts without the processes that serve nobody here, see NEEDLESS. It has no argument for this, so that its
    methods are replaced while it starts. A version of Ray that has no such methods starts all of its processes."""
    node = getattr(sys.modules.get("ray._private.node"), "Node", None)
    found = {name: getattr(node, name) for name in NEEDLESS if hasattr(node, name)}
    for name in found:
        setattr(node, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, method in found.items():
            setattr(node, name, method)


@contextmanager
def one_arena() -> Iterator[None]:
    """The processes of a Ray that starts within the context keep the memory that their threads free.

    A worker computes in a thread, and malloc of glibc gives each thread an arena of its own, which returns memory to
    the system whatever `keep_freed_memory` says. With one arena for all threads, local steps take 6 % less time. malloc
    reads the environment variable when a process starts.
    """
    variable = "MALLOC_ARENA_MAX"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = "1"
    try:
        yield
    finally:
        del os.environ[variable]


@contextmanager
def no_reports() -> Iterator[None]:
    """Ray prints no reports on standard output, such as twenty lines of a log when its node has died. It has no
    argument for this, and what has died is told by the run in one sentence (`watch`)."""
    worker: Any = sys.modules.get("ray._private.worker")
    before = getattr(worker, "print_to_stdstream", None)
    if before is None:
        yield
        return
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


# --- the end ----------------------------------------------------------------------------------------------------------
def shut_down(processes: set[int]) -> None:
    """End the Ray that was started here, with these processes and all their descendants, also where its start has
    failed."""
    family = family_of(processes)
    disconnect()
    kill(family)


def disconnect() -> None:
    """Leave Ray, and end it if this process has started it. A start that is under way is given up."""
    if _start is None or not _start.give_up():
        shut_down_ray()
    if _start is not None:
        _start.over.set()


def shut_down_ray() -> None:
    """`ray.shutdown`, which ends the processes that were started here by SIGKILL at once: SIGTERM is blocked in them,
    and it would wait a second for the effect in each. Processes of a killed node would stay, and are killed too."""
    node = getattr(sys.modules.get("ray._private.worker"), "_global_node", None)
    started = [info.process for infos in getattr(node, "all_processes", {}).values() for info in infos]
    for process in started:
        process.terminate = process.kill
    family = family_of({process.pid for process in started})
    ray.shutdown()
    kill(family)


def family_of(processes: set[int]) -> list[int]:
    """Those of the processes that are below this one, and all their descendants."""
    return [each for process in below(os.getpid()) if process in processes for each in (process, *below(process))]


def kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def below(process: int) -> Iterator[int]:
    """The ids of a process's children and of all their descendants; parents come before their children."""
    if not Path("/proc").is_dir():  # as on macOS
        import psutil

        with suppress(psutil.Error):
            yield from (child.pid for child in psutil.Process(process).children(recursive=True))
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield child
                yield from below(child)
