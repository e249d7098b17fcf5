"""The processors that this process may use: one number for everything that runs in parallel on a machine.

A machine may have more than a job may use. Linux bounds a process in two ways: by a set of processors on which it may
run (its affinity: `taskset`, a batch system, a cpuset), and by the quota of a control group, processor time per period,
which may be a fraction of a processor (a container with `--cpus`, a service of systemd). A group is inside others, and
the quotas of all of them hold. /proc and `os.cpu_count` still show all processors of the machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

V1_CONTROLLERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
"""The folders in which version 1 of control groups may have the quotas."""


def processors() -> int:
    """The number of processors that this process may use, at least 1: those of its affinity, or of its quota if that is
    less. A quota of 1.5 processors is one."""
    return max(1, int(min(affinity(), quota())))


def affinity() -> int:
    """The number of processors on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float:
    """The processors that the control groups of this process grant, infinity if they set no bound.

    root: where /proc and /sys are. Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and
    Documentation/scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    groups = root / "sys/fs/cgroup"
    granted = [math.inf]
    for folder in own_groups(root, groups, ""):
        with suppress(OSError, ValueError, ZeroDivisionError):
            allowed, period = (folder / "cpu.max").read_text().split()
            granted.append(math.inf if allowed == "max" else int(allowed) / int(period))
    for name in V1_CONTROLLERS:
        for folder in own_groups(root, groups / name, "cpu"):
            with suppress(OSError, ValueError, ZeroDivisionError):
                allowed = int((folder / "cpu.cfs_quota_us").read_text())
                granted.append(math.inf if allowed < 0 else allowed / int((folder / "cpu.cfs_period_us").read_text()))
    return min(granted)


def own_groups(root: Path, mounted: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups of this process in one hierarchy, from the outermost that is visible to its own.

    mounted: where the hierarchy is mounted. controller: "cpu" for that of version 1, "" for version 2.
    """
    yield mounted
    if not mounted.is_dir():
        return
    path = PurePosixPath(own_path(root, controller))
    top = PurePosixPath(mounted_group(root, mounted))
    if not path.is_relative_to(top):  # a group outside of what is visible here, such as a container's host has it
        return
    for part in path.relative_to(top).parts:
        mounted = mounted / part
        yield mounted


def own_path(root: Path, controller: str) -> str:
    """The group of this process in a hierarchy, as /proc/self/cgroup has it; "" if it is not there."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
    return ""


def mounted_group(root: Path, mounted: Path) -> str:
    """The group that a mount shows as its root: / on a machine, that of the container in a container without a
    namespace of its own. The last mount on a folder hides those before."""
    point, found = f"/{mounted.resolve().relative_to(root.resolve())}", "/"
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[4] == point:
                found = fields[3]
    return found
