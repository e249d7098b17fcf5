"""The library of compiled kernels: built once from csrc/ with the machine's C++ compiler, stored in the cache folder.

The name of a library contains a digest of source, compiler, flags and processor, so a change of any of these leads to
another library. It also contains a digest of the file's content: a truncated or damaged file is built again, because
loading it would end the process. Two processes may build at once: each renames a complete file to the final name.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from ..errors import ConfigError
from ..storage.expanded import cache_folder
from ..storage.sha256 import sha256

SOURCES = Path(__file__).with_name("csrc")
"""The folder of the sources: library.cpp, which is compiled, and the headers that it includes."""
THIS_PROCESSOR = "-mcpu=native" if (sys.platform, platform.machine()) == ("darwin", "arm64") else "-march=native"
"""Older compilers of macOS for its own processors know only the first."""
FLAGS = ("-O3", THIS_PROCESSOR, "-std=c++17", "-Wno-psabi", "-shared", "-fPIC")
DONE, NO_CLASS, NO_MEMORY = range(3)
"""The values of the enum `Status` of vectors.h, which functions of the library return."""
COMPILERS = ("c++", "g++", "clang++")
OLDEST = {"g++": 9, "clang++": 14}
"""The oldest versions that compile the sources."""
BUILD = ".build-"
"""How the names of temporary folders for compilations begin."""
SECONDS = 300
"""The time limit of a compilation, sufficient on a busy machine."""


class NoKernels(ConfigError):
    """The kernels cannot be built on this machine. The message says why."""


def source_files() -> list[Path]:
    """The sources of the library, in alphabetical order."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def find_compiler() -> str | None:
    """The path of $CXX, else of the first of COMPILERS that is installed, else None."""
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [given] if given else COMPILERS)), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, built if necessary. Raises NoKernels if that is impossible."""
    compiler = find_compiler()
    if compiler is None:
        raise NoKernels(f"no C++ compiler: none of {os.environ.get('CXX') or ', '.join(COMPILERS)} is here")
    texts = [source.read_text("utf-8") for source in source_files()]
    name = sha256("\0".join([*texts, compiler_version(compiler), *FLAGS, processor()]))[:32]
    folder = cache_folder() / "kernels"
    try:
        return ctypes.CDLL(str(find_library(folder, name) or build(compiler, folder, name)))
    except OSError as error:
        raise NoKernels(
            f"{folder}/{name} cannot be made or loaded: {error}; set FEDFLEET_CACHE to a folder that can be written"
        ) from error


def instruction_set() -> str:
    """The instruction set that the library's vectors and tiles are for: "AVX-512 with bfloat16", where products of
    bfloat16 are part of it, "AVX-512", "AVX2", or "any". Raises NoKernels."""
    named = library().instruction_set
    named.restype = ctypes.c_char_p
    return named().decode()


def why_no_kernels() -> str:
    """The reason why this machine cannot have the kernels, "" if it can. They are built if necessary."""
    try:
        library()
    except NoKernels as error:
        return str(error)
    return ""


def find_library(folder: Path, name: str) -> Path | None:
    """The file of the library `name`, None if there is no file whose content agrees with the digest in its name."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError):
            if path.name == library_file(name, path.read_bytes()):
                return path
    return None


def library_file(name: str, content: bytes) -> str:
    """The file name of a library with this content."""
    return f"{name}-{sha256(content)[:32]}.so"


def build(compiler: str, folder: Path, name: str) -> Path:
    """Compile the library `name` and return its file. Damaged files of the same library are removed."""
    check_compiler(compiler)
    folder.mkdir(parents=True, exist_ok=True)
    with build_folder(folder) as temporary:
        made = temporary / "made.so"
        try:
            done = subprocess.run(
                [compiler, *FLAGS, str(SOURCES / "library.cpp"), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env={**os.environ, "TMPDIR": str(temporary)},  # for the compiler's own files
            )
        except subprocess.TimeoutExpired as error:
            raise NoKernels(f"{compiler} took more than {SECONDS} s") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise NoKernels(f"{compiler} does not compile library.cpp: {last[:200]}")
        path = folder / library_file(name, made.read_bytes())
        for damaged in folder.glob(f"{name}-*.so"):
            if damaged.name != library_file(name, damaged.read_bytes()):
                damaged.unlink(missing_ok=True)
        os.replace(made, path)
    return path


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder in `folder`, which is locked (`flock`) while it is used. Those that processes have left which
    were killed while they compiled are removed: the kernel has released their locks."""
    with locked(folder):  # nobody finds a folder that is made and not locked yet
        for left in folder.glob(f"{BUILD}*"):
            with suppress(OSError), locked(left, wait=False):  # another process uses it
                shutil.rmtree(left, ignore_errors=True)
        temporary = tempfile.mkdtemp(prefix=BUILD, dir=folder)
        lock = os.open(temporary, os.O_RDONLY)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield Path(temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder. wait: for the process that holds it; else OSError is raised if one does, or if the
    file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            if not wait:
                raise
        yield
    finally:
        os.close(handle)


def check_compiler(compiler: str) -> None:
    """Raise NoKernels unless the compiler is one of OLDEST, in that version or a newer one."""
    done = subprocess.run([compiler, "-x", "c++", "-dM", "-E", os.devnull], capture_output=True, text=True)
    macros = dict(re.findall(r"^#define (__clang_major__|__GNUC__) (\d+)", done.stdout, re.MULTILINE))
    kind = "clang++" if "__clang_major__" in macros else "g++"
    number = int(macros.get("__clang_major__", macros.get("__GNUC__", 0)))
    if number < OLDEST[kind]:
        wanted = " or ".join(f"{name} {least} or newer" for name, least in OLDEST.items())
        found = f"{kind} {number}" if number else "neither of the two"
        raise NoKernels(f"the compiler must be {wanted}, got {compiler}, which is {found}")


@functools.cache
def compiler_version(compiler: str) -> str:
    """The compiler and the output of its --version."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return f"{compiler} {done.stdout}"


@functools.cache
def processor() -> str:
    """The model of this machine's processor and its instruction sets, as far as the system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {
        line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines if line.startswith(wanted)
    }
    return "\n".join([platform.machine(), *(f"{name}: {text}" for name, text in sorted(found.items()))])


def pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """The address of a tensor's memory for a call of the library."""
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def check_status(status: int) -> None:
    """Raise MemoryError if a function of the library returned that it could not allocate memory."""
    if status == NO_MEMORY:
        raise MemoryError("the kernels cannot allocate what a batch of this size needs")


def call(name: str, tensors: tuple[Tensor | None, ...], *sizes: int) -> None:
    """Call a function of the library whose arguments are tensors, then sizes."""
    check_status(getattr(library(), name)(*map(pointer, tensors), *map(ctypes.c_int64, sizes)))
