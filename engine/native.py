"""The compiled kernels of the .cpp files here: built once with the machine's C++ compiler, kept in the cache folder.

A library's name is a digest of source, compiler, flags and processor: another of any of these is another library. Two
processes may build at once; each renames a whole file into place.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import ConfigError

SOURCES = [Path(__file__).with_name(name) for name in ("orthogonal.cpp", "chain.cpp", "native.cpp", "draw.cpp")]
"""Each includes the next one."""
FLAGS = ("-O3", "-march=native", "-std=c++17", "-Wno-psabi", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300
"""What a compiler may take, on a machine that is busy."""


class NoKernels(ConfigError):
    """They cannot be built here, and why."""


def cache_folder() -> Path:
    """$FEDFLEET_CACHE, else $XDG_CACHE_HOME/fedfleet, else ~/.cache/fedfleet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("FEDFLEET_CACHE") or f"{cache}/fedfleet").expanduser()


def find_compiler() -> str | None:
    """$CXX, else the first of COMPILERS that is here."""
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [given] if given else COMPILERS)), None)


@functools.cache
def library() -> ctypes.CDLL:
    """NoKernels where there is no compiler, or none that compiles it."""
    compiler = find_compiler()
    if compiler is None:
        raise NoKernels(f"no C++ compiler: none of {os.environ.get('CXX') or ', '.join(COMPILERS)} is here")
    told = "\0".join([*(source.read_text("utf-8") for source in SOURCES), version(compiler), *FLAGS, processor()])
    path = cache_folder() / "kernels" / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            build(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"{path} cannot be made or loaded: {error}") from error


def build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as beside:
        made = Path(beside) / path.name
        try:
            done = subprocess.run(
                [compiler, *FLAGS, str(SOURCES[0]), "-o", str(made)], capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise NoKernels(f"{compiler} took more than {SECONDS} s") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise NoKernels(f"{compiler} does not compile {SOURCES[0].name}: {last[:200]}")
        os.replace(made, path)


@functools.cache
def version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return f"{compiler} {done.stdout}"


@functools.cache
def processor() -> str:
    """Its model and what it can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {
        line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines if line.startswith(wanted)
    }
    return "\n".join([platform.machine(), *(f"{name}: {text}" for name, text in sorted(found.items()))])
