"""Python imports this file when it starts, if its folder is in PYTHONPATH.

From the first import of fedfleet on, the process is as on macOS, as far as Linux can show that: the name of the
platform, no functions that only Linux has, no /proc, /sys and /dev/shm. What other packages import before is that of
Linux, because they are built for it.
"""

import errno
import os
import sys
import sysconfig
from importlib import import_module
from importlib.abc import MetaPathFinder

OTHERS = "torch numpy pyarrow pyarrow.parquet pydantic yaml xxhash safetensors.torch multiprocessing.connection psutil"
LINUX = {
    "os": (
        "posix_fallocate posix_fadvise memfd_create eventfd eventfd_read eventfd_write sched_getaffinity fdatasync "
        "sched_setaffinity sched_getparam sched_getscheduler sched_setscheduler pidfd_open splice copy_file_range "
        "getrandom getresuid getresgid setresuid setns unshare getxattr setxattr listxattr removexattr sync_file_range "
        "O_TMPFILE O_DIRECT O_PATH O_NOATIME O_LARGEFILE RWF_DSYNC RWF_NOWAIT P_PIDFD"
    ),
    "signal": "SIGPWR SIGSTKFLT SIGPOLL SIGCLD SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo pidfd_send_signal",
    "resource": "prlimit RUSAGE_THREAD RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_MSGQUEUE RLIMIT_SIGPENDING",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_NOTIFY F_SETPIPE_SZ F_GETPIPE_SZ",
    "select": "epoll EPOLLIN EPOLLOUT",
    "time": "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    "mmap": "MAP_POPULATE",
    "socket": "AF_NETLINK AF_PACKET AF_VSOCK SO_PEERCRED SO_BINDTODEVICE",
}
"""Module -> names that Python has on Linux and not on macOS, by its documentation ("Availability")."""
ABSENT = ("/proc", "/sys", "/dev/shm")


def no_linux_files(event: str, given: tuple[object, ...]) -> None:
    """Files and folders of Linux are not there, for `open`, `os.listdir` and `os.scandir`."""
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(given[0], str | bytes | os.PathLike):
        return
    path = os.fsdecode(given[0])
    psutil = sys._getframe(1).f_globals.get("__name__", "").startswith("psutil")  # it has other sources on macOS
    if not psutil and any(path == each or path.startswith(f"{each}/") for each in ABSENT):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class Darwin(MetaPathFinder):
    """Changes the process at the first import of fedfleet. It finds no module itself."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "fedfleet":
            return
        sys.meta_path.remove(self)
        for name in OTHERS.split():
            import_module(name)
        sysconfig.get_config_vars()  # of the platform for which this Python is built
        for module, names in LINUX.items():
            for name in names.split():
                vars(import_module(module)).pop(name, None)
        sys.addaudithook(no_linux_files)  # there is no such event for os.stat
        sys.platform = "darwin"


sys.meta_path.insert(0, Darwin())
