"""The library of native kernels: the compilers that can build it, and its file in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedfleet.engine.kernels import library

ROOT = Path(__file__).parents[2]
QUICK = ("-O0", "-march=native", "-std=c++17", "-Wno-psabi", "-shared", "-fPIC")
LOAD = (
    "import sys; from fedfleet.engine.kernels import library; "
    "library.FLAGS = tuple(sys.argv[1:]); library.library().conv_forward"
)
KNOWN = [f"g++-{number}" for number in range(9, 17)] + [f"clang++-{number}" for number in range(14, 24)]
HERE = {os.path.realpath(found): name for name in ("g++", "clang++", *KNOWN) if (found := shutil.which(name))}


def loading(cache: Path, compiler: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a process that builds or loads the library. It is built without optimisation, because optimisation takes
    seconds."""
    environment = {**os.environ, "FEDFLEET_CACHE": str(cache), **({"CXX": compiler} if compiler else {})}
    command = [sys.executable, "-c", LOAD, *QUICK]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("compiler", HERE.values())
def test_every_compiler_that_is_here_makes_kernels_that_compute_the_same(compiler, tmp_path: Path):
    environment = {**os.environ, "FEDFLEET_CACHE": str(tmp_path), "CXX": compiler}
    command = [sys.executable, "-m", "tests.engine.sanitized", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("macros", "found"),
    [
        ("#define __GNUC__ 8", "g++ 8"),
        ("#define __GNUC__ 4\n#define __clang_major__ 13", "clang++ 13"),
        ("", "neither"),
    ],
    ids=["g++ 8", "clang++ 13", "something else"],
)
def test_a_compiler_that_is_too_old_is_refused_with_the_reason(macros, found, tmp_path: Path, monkeypatch):
    """The compiler is a script that answers as an old one does, because few machines have such old compilers."""
    old = tmp_path / "old-c++"
    old.write_text(f"#!/bin/sh\ncat <<'end'\n{macros}\nend\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    wanted = rf"must be g\+\+ 9 or newer or clang\+\+ 14 or newer, got .*old-c\+\+, which is {found.replace('+', '.')}"
    with pytest.raises(library.NoKernels, match=wanted):
        library.library.__wrapped__()
    assert not (tmp_path / "cache").exists()


DAMAGE = {
    "cut to a half": lambda content: content[: len(content) // 2],
    "cut to a page": lambda content: content[:4096],
    "empty": lambda content: b"",
    "another byte": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "not a library": lambda content: b"no library",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a library in it."""
    if library.find_compiler() is None:
        pytest.skip("no C++ compiler is here; install g++")
    cache = tmp_path_factory.mktemp("cache")
    done = loading(cache)
    assert done.returncode == 0, done.stderr
    return cache


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_never_loaded(damage, built: Path, tmp_path: Path):
    """Loading a truncated file would end the process by SIGBUS."""
    (whole,) = (built / "kernels").iterdir()
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / whole.name).write_bytes(damage(whole.read_bytes()))
    name = whole.name.partition("-")[0]
    assert library.find_library(folder, name) is None
    assert library.find_library(built / "kernels", name) == whole


def test_a_library_that_was_cut_short_is_built_anew(built: Path, tmp_path: Path):
    shutil.copytree(built, tmp_path / "cache")
    (file,) = (tmp_path / "cache/kernels").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:4096])
    done = loading(tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "cache/kernels").iterdir()
    assert library.find_library(file.parent, file.name.partition("-")[0]) == file


def test_a_cache_that_cannot_be_written_serves_what_it_has(built: Path):
    folders = [built / "kernels", built]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = loading(built)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_and_has_nothing_is_told(tmp_path: Path):
    """root may write to every ordinary folder, so a folder is used to which nobody can write."""
    closed = Path("/sys/kernel") if os.geteuid() == 0 else tmp_path / "closed"
    if os.geteuid() != 0:
        closed.mkdir(mode=0o555)
    elif not closed.is_dir():
        pytest.skip("root may write everywhere here; run as another user")
    done = loading(closed)
    assert done.returncode == 1
    assert "NoKernels: " in done.stderr
    assert "; set FEDFLEET_CACHE to a folder that can be written" in done.stderr
