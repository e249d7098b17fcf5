"""What prevents Ray from starting on this machine, each with the remedy that fits it.

It is looked for before Ray is started, and again if that has failed: Ray waits for half a minute for a process of its
own that cannot start, and does not say why it cannot.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ...errors import type_and_first_line

SOCKET_BYTES = (104 if sys.platform == "darwin" else 108) - 1
"""The most bytes of the path of a socket in a folder (`sun_path` of unix(7), with a zero at its end)."""
SOCKET_NAME = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest name of a socket in Ray's folder. It has the date and the number of the process, at most 2^22."""
LEAST_BYTES = 8 * 2**20
"""Free space that Ray's folder must have: the files of a start and of a short run take some 100 kB."""
LEAST_PROCESSES = 150
"""Processes and threads that a Ray with one worker takes at least. On two processors it has 168, on more of them more:
26 in the server of the head, 29 in the node's process, 45 in its two agents, 23 in each process that is connected."""
FAMILIAR = ("Resource temporarily unavailable", "No space left on device")
"""Texts of the system in Ray's log files that name the cause of a failed start."""
CONNECT_SECONDS = 1.0
"""The time in which a connection of this machine with itself is made."""


def why_not(error: Exception, folder: Path, address: str) -> str:
    """Why Ray has not started, as a sentence with a remedy that fits the cause. folder: of Ray's files. address: of the
    node."""
    logs = max(folder.glob(f"session_*_{os.getpid()}/logs"), default=None)
    texts = [str(error), *familiar(logs.glob("*") if logs else ())]
    found = unusable(folder) or obstacle(address)
    if not found and any(FAMILIAR[0] in text for text in texts):
        found = "the limit of processes and threads was reached; raise it (`ulimit -u`, or that of the container)"
    if not found and any(FAMILIAR[1] in text for text in texts):
        found = f"a disk is full; free some space in {folder} and /dev/shm, or set RAY_TMPDIR to a folder with space"
    if found:
        return f"Ray did not start on this machine: {found}, or choose engine.backend=local"
    look = f", look at {logs}" if logs else ""
    return (
        f"Ray did not start on this machine ({type_and_first_line(error)}); it may be too busy or short of memory: "
        f"give the command again when it is not{look}, or choose engine.backend=local"
    )


def familiar(files: Iterable[Path]) -> Iterator[str]:
    """Those of FAMILIAR that occur in the files."""
    for file in files:
        with suppress(OSError):
            text = file.read_text(errors="replace") if file.is_file() else ""
            yield from (each for each in FAMILIAR if each in text)


def obstacle(address: str) -> str:
    """What prevents Ray's start whatever its folder, with a remedy, as a clause; "" if nothing does. address: of the
    node."""
    free = free_processes()
    if free is not None and free < LEAST_PROCESSES:
        return (
            f"it takes at least {LEAST_PROCESSES} processes and threads, and the limit leaves {max(free, 0)}; raise "
            "the limit (`ulimit -u`, or that of the container)"
        )
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], CONNECT_SECONDS).close()
    except OSError as error:
        return (
            f"its processes would connect at {address}, where no connection can be made ({error.strerror or error}); "
            "bring the loopback interface up (`ip link set lo up`), or correct /etc/hosts if it names this address"
        )
    return ""


def usual_folder() -> Path:
    """The folder that Ray takes for its files by itself."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray")


def usable_folder() -> tuple[Path, str]:
    """(the folder for Ray's files, why Ray cannot use it or "").

    Where Ray cannot use that of TMPDIR, which batch systems set, or another user's /tmp/ray, it is one of this user in
    /tmp. A folder that RAY_TMPDIR names is not replaced.
    """
    usual = usual_folder()
    lacks = unusable(usual)
    if lacks and "RAY_TMPDIR" not in os.environ:
        mine = Path(f"/tmp/ray-{os.getuid()}")
        with suppress(OSError):
            mine.mkdir(mode=0o700, exist_ok=True)
        for other in (Path("/tmp/ray"), mine):
            if not unusable(other) and (other != mine or mine.lstat().st_uid == os.getuid()):
                return other, ""
    return usual, lacks


def unusable(folder: Path) -> str:
    """Why Ray cannot make its files in a folder, with a remedy, as a clause; "" if it can."""
    size = len(os.fsencode(folder) + SOCKET_NAME.encode())
    if size > SOCKET_BYTES:
        return (
            f"the paths of its sockets in {folder} would have {size} bytes, and the system allows {SOCKET_BYTES}; set "
            "RAY_TMPDIR to a folder with a short path (RAY_TMPDIR=/tmp)"
        )
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
        free = shutil.disk_usage(there).free
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return f"{there} is not writable ({error.strerror}); set RAY_TMPDIR to a folder that is"
        free = 0
    if free < LEAST_BYTES:
        return (
            f"the disk of {there} is full ({free / 1e6:.1f} MB are free); free some space, or set RAY_TMPDIR to a "
            "folder on another disk"
        )
    return ""


def free_processes() -> int | None:
    """How many processes and threads may still be started here, by the limits of this user and of the control groups
    of this process; None if there is no limit."""
    found = [limit - used for limit, used in (*user_limit(), *group_limits())]
    return min(found, default=None)


def user_limit() -> Iterator[tuple[int, int]]:
    """(limit, used) of this user's processes and threads. Nothing for processes that Linux exempts from the limit:
    those of root, and with the capabilities 21 or 24 (CAP_SYS_ADMIN, CAP_SYS_RESOURCE)."""
    limit, mine, used = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.getuid(), 0
    status = Path("/proc/self/status")
    if limit == resource.RLIM_INFINITY or mine == 0 or not status.exists():
        return
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    if int(fields["CapEff"], 16) & (1 << 21 | 1 << 24):
        return
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == mine:
                used += sum(1 for _ in (process / "task").iterdir())
    yield limit, used


def group_limits(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, int]]:
    """(limit, used) of each control group with a limit that this process is in."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "pids"):
                continue
            top = groups / controllers
            group = top / path.lstrip("/")
            for folder in {group, *(each for each in group.parents if each.is_relative_to(top)), top}:
                with suppress(OSError, ValueError):  # no limit here, or "max"
                    limit = int((folder / "pids.max").read_text())
                    yield limit, int((folder / "pids.current").read_text())
