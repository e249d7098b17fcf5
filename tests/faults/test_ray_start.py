"""Ray's start on this machine: what prevents it is told in one sentence with the remedy that fits, before Ray is
started; it has a limit; and what it starts listens on loopback only."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedfleet.engine.backends.ray.start_obstacles import (
    SOCKET_BYTES,
    SOCKET_NAME,
    group_limits,
    unusable,
    usable_folder,
)

from ..engine.test_shared_ray import SCRIPT

START = """
from fedfleet.engine.backends.ray import local_ray
from fedfleet.engine.errors import FedFleetError
"""
START += """
try:
    local_ray.start_here(None)
except FedFleetError as error:
    print(error)
"""
"""Starts Ray, and prints the error."""


LISTENING = """
import contextlib

from fedfleet import Observer
from fedfleet.engine.backends.ray.connect import clusters_here


class Listening(Observer):
    def record(self, record):
        found = []
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                lines = [line.laddr for line in process.net_connections() if line.status == psutil.CONN_LISTEN]
                found += [(process.name(), address) for address in lines]
        print(json.dumps([found, ray.get_runtime_context().gcs_address in clusters_here()]))


groups = [{"count": 1, "cpus": 0.5}, {"count": 1, "cpus": 0.25}]  # which the driver's own sockets serve
fedfleet.run(experiment(workers=groups, cpus=1), observers=[Listening()])
"""
"""Runs, and prints the sockets at which a process of the run listens after each round, and whether its Ray counts as a
cluster."""

GIVEN_UP = """
import psutil

local_ray.LIMIT_SECONDS, before = 0.0, local_ray.LIMIT_SECONDS
try:
    local_ray.start_here(None)
except FedFleetError as error:
    print(error)
print(len(psutil.wait_procs(psutil.Process().children(recursive=True), 60)[1]))
local_ray.LIMIT_SECONDS = before
local_ray.start_here(None)
print(local_ray.ray.cluster_resources()["CPU"])
local_ray.disconnect()
"""
"""Gives up a start, prints the error and the number of processes that are left, and starts Ray again."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, which every user may use."""
    with tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp") as made:
        os.chmod(made, 0o777)
        yield Path(made)


def output(command: list[str], folder: Path, **variables: str) -> str:
    """Standard output of a command that succeeds. variables: of its environment."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_root(*programs: str) -> None:
    """Skip a test that needs root and these programs."""
    if os.getuid() != 0 or not all(map(shutil.which, programs)):
        pytest.skip(f"only root can do this, by {', '.join(programs)}")


# --- what prevents a start --------------------------------------------------------------------------------------------
def without_loopback(folder: Path) -> tuple[list[str], dict[str, str]]:
    of_root("unshare")
    return ["unshare", "-n", sys.executable, "-c", START], {}


def with_few_processes(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Root is exempt from the limit, so that root becomes another user, who may read what root may."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))"
    limited = [sys.executable, "-c", limit + START]
    if os.getuid() != 0:
        return limited, {}
    of_root("setpriv")
    reads = "-all,+dac_read_search"
    user = ["--reuid=4211", "--regid=4211", "--clear-groups", f"--bounding-set={reads}"]
    return ["setpriv", *user, f"--inh-caps={reads}", "--ambient-caps=+dac_read_search", *limited], {}


def with_a_full_disk(folder: Path) -> tuple[list[str], dict[str, str]]:
    of_root("unshare", "mount")
    (folder / "d").mkdir()
    small = f'mount -t tmpfs -o size=1m none {folder / "d"} && exec "$@"'
    return ["unshare", "-m", "sh", "-c", small, "small", sys.executable, "-c", START], {"RAY_TMPDIR": str(folder / "d")}


def with_long_paths(folder: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-c", START], {"RAY_TMPDIR": str(folder / ("long" * 25))}


def with_a_file_in_the_way(folder: Path) -> tuple[list[str], dict[str, str]]:
    (folder / "d").touch()
    return [sys.executable, "-c", START], {"RAY_TMPDIR": str(folder / "d")}


Surroundings = Callable[[Path], tuple[list[str], dict[str, str]]]
"""From a folder: the begin of a command, or the whole one, and variables of its environment."""


@pytest.mark.parametrize(
    ("prevented", "told"),
    [
        (without_loopback, r"at 127\.0\.0\.1, where no connection can be made \(.*\); bring the loopback interface up"),
        (with_few_processes, r"at least 150 processes and threads, and the limit leaves \d+; raise the limit"),
        (with_a_full_disk, r"the disk of \S+ is full \(1\.0 MB are free\); free some space, or set RAY_TMPDIR"),
        (with_long_paths, r"would have \d+ bytes, and the system allows 107; set RAY_TMPDIR to a folder with a short"),
        (with_a_file_in_the_way, r"d is not writable \(Not a directory\); set RAY_TMPDIR to a folder that is"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_prevents_the_start_is_told_with_its_remedy(prevented: Surroundings, told: str, folder: Path) -> None:
    command, variables = prevented(folder)
    (line,) = output(command, folder, **variables).splitlines()
    assert line.startswith("Ray cannot start on this machine: ")
    assert line.endswith(", or choose engine.backend=local")
    assert re.search(told, line), line
    assert not list(folder.rglob("session_*"))  # Ray was not started


def test_where_ray_would_not_find_a_folder_it_gets_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems set TMPDIR to long paths. A folder that RAY_TMPDIR names is not replaced."""
    long = folder / ("long" * 25)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(long))
    found, lacks = usable_folder()
    assert (found.parent, lacks) == (Path("/tmp"), "")
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    found, lacks = usable_folder()
    assert found == long / "ray"
    assert str(SOCKET_BYTES) in lacks


def test_the_longest_path_that_is_allowed(folder: Path) -> None:
    """Ray finds a path of a socket too long at the same number of bytes; characters count by their bytes."""
    from ray._private.utils import validate_socket_filepath

    for letter in "xä":
        room = SOCKET_BYTES - len(f"{folder}/{SOCKET_NAME}")
        longest = folder / (letter * (room // len(letter.encode())))
        validate_socket_filepath(f"{longest}{SOCKET_NAME}")
        assert not unusable(longest)
        with pytest.raises(OSError, match="AF_UNIX"):
            validate_socket_filepath(f"{longest}{letter}{SOCKET_NAME}")
        assert "short path" in unusable(Path(f"{longest}{letter}"))


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/a/b", {"a/pids": (90, 7), "a/b/pids": ("max", 5)}, [(90, 7)]),  # version 2, the limit is above
        ("0::/", {"pids": (64, 3)}, [(64, 3)]),  # in a container, whose group is the top
        ("4:pids:/a\n3:cpu:/c\n0::/", {"pids/a/pids": (9, 2), "c/pids": (1, 1)}, [(9, 2)]),  # version 1
        ("0::/a", {}, []),
    ],
)
def test_limits_of_control_groups(own: str, files: dict[str, tuple], found: list, folder: Path) -> None:
    for name, values in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for kind, value in zip(("max", "current"), values, strict=True):
            (folder / f"{name}.{kind}").write_text(f"{value}\n")
    (folder / "own").write_text(own)
    assert list(group_limits(folder, folder / "own")) == found


# --- the start --------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_start_that_takes_too_long_is_given_up(folder: Path) -> None:
    """No process is left, and the next start succeeds."""
    told, left, processors = output([sys.executable, "-c", START.split("try")[0] + GIVEN_UP], folder).splitlines()
    assert told.startswith("Ray did not start on this machine (TimeoutError: it has not started within 0 s); it may be")
    assert left == "0"
    assert float(processors) >= 1


def with_a_long_tmpdir(folder: Path) -> tuple[list[str], dict[str, str]]:
    """So long that Ray cannot make its sockets there."""
    long = folder / ("long" * 25)
    long.mkdir()
    return [], {"TMPDIR": str(long)}


def on_a_machine_with_a_foreign_name(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The name of the machine resolves to an address of another one, and only the loopback interface is up."""
    of_root("unshare", "mount", "hostname")
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.9.8.7 elsewhere\n")
    up = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x49))"
    script = f'hostname elsewhere && mount --bind {folder}/hosts /etc/hosts && {sys.executable} -c "{up}" && exec "$@"'
    return ["unshare", "-n", "-m", "-u", "sh", "-c", script, "elsewhere"], {}


@pytest.mark.long
@pytest.mark.parametrize("odd", [with_a_long_tmpdir, on_a_machine_with_a_foreign_name], ids=lambda odd: odd.__name__)
def test_a_run_listens_on_loopback_only(odd: Surroundings, folder: Path) -> None:
    """All processes of Ray and of the run, on a machine where Ray by itself does not start."""
    command, variables = odd(folder)
    (folder / ".ray").mkdir(mode=0o755)
    told = output([*command, sys.executable, "-c", SCRIPT + LISTENING], folder, HOME=str(folder), **variables)
    rounds = [json.loads(line) for line in told.splitlines()]
    assert len(rounds) == 2
    listening, is_cluster = rounds[-1]
    names, addresses = zip(*listening, strict=True)
    assert {"gcs_server", "raylet"} <= set(names)
    assert sum(name.startswith("ray::") for name in names) >= 3  # the driver and two workers
    outside = [(name, host) for name, (host, _) in zip(names, addresses, strict=True) if not is_loopback(host)]
    assert not outside
    assert not is_cluster  # others, such as `fedfleet attach`, do not take it for one
    assert (folder / ".ray" / "auth_token").is_file()
    assert (folder / ".ray").stat().st_mode & 0o077 == 0


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
