"""The native kernels read and write only the memory that they are given, and have no undefined behaviour."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfleet.engine.kernels import library

ROOT = Path(__file__).parents[2]
CHECKED = ("-O0", "-g1", "-std=c++17", "-Wno-psabi", "-shared", "-fPIC", "-fsanitize=address,undefined")
FLAGS = (*CHECKED, "-fno-sanitize-recover=all")
MACHINES = {"any processor": (), "this processor": ("-march=native",)}
"""Flags of the compiler. For any processor, vectors are narrow and their parts are copied, which all checks of the
sanitizers see; for this processor they may be masked."""
if " avx2 " in f"{library.processor()} ":
    MACHINES["AVX2"] = ("-march=haswell",)


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """The libraries that must be loaded before Python allocates memory."""
    compiler = library.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler is here; install g++")
    found = []
    for name in ("libasan.so", "libstdc++.so"):  # without the second, the first finds no __cxa_throw
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        path = Path(done.stdout.strip())
        if not path.is_absolute() or not path.exists():
            pytest.skip(f"{compiler} has no {name}, which a program that is not built by it needs; use g++")
        found.append(str(path.resolve()))
    return " ".join(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(flags, marks=pytest.mark.slow if name == "AVX2" else (), id=name)
        for name, flags in MACHINES.items()
    ],
)
def test_nothing_is_read_or_written_beyond_its_end(machine, sanitizer: str, tmp_path: Path):
    environment = {**os.environ, "FEDFLEET_CACHE": str(tmp_path), "LD_PRELOAD": sanitizer}
    # With wide guards large blocks of memory begin at multiples of 64 bytes, and room for alignment is never needed.
    options = {"ASAN_OPTIONS": "detect_leaks=0:redzone=16:max_redzone=16", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.sanitized", *FLAGS, *machine],
        capture_output=True,
        text=True,
        env={**environment, **options},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("all are sound")
