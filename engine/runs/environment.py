"""Where the numbers of a run come from: environment.json in its folder.

It has the commit of this package, the versions of packages, the machine, the GPUs, and the digests of the files that
the run reads its data from. A run that is continued elsewhere keeps what was said before, under `before`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ...workloads.processors import processors
from ..run_spec import RunSpec
from ..storage.known_digests import known
from ..storage.plain_files import read_text
from ..storage.sha256 import sha256, sha256_of_file
from ..user_code import plugin_errors

NAME = "environment.json"
PACKAGES = ("fedfleet", "torch", "numpy", "ray", "pyarrow", "optuna", "mlflow")
MANY = 100
"""Of more files than this, there is one digest of all names and sizes: to read 100,000 images takes minutes."""
LARGE = 64 << 20
"""A file of so many bytes is read for its digest once, and not by every run: a large base takes seconds."""


def environment(run_spec: RunSpec) -> dict[str, Any]:
    """What a reader needs to judge or repeat the run."""
    with plugin_errors("workload"):
        data = digests(run_spec.workload.data_files())
    return {
        "commit": own_commit(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpus": processors(),
        "threads": run_spec.experiment.engine.threads,
        "cards": cards() if run_spec.device.type == "cuda" else [],
        "packages": dict(versions()),
        "data": data,
    }


def with_earlier(found: dict[str, Any], file: Path) -> dict[str, Any]:
    """The environment, and those before it that differ from it and are in the file, if it is there."""
    try:
        last = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):
        return found
    if not isinstance(last, dict):
        return found
    before = last.pop("before", [])
    before = [*before, *([last] if last != found else [])]
    return {**found, "before": before} if before else found


# --- the program ------------------------------------------------------------------------------------------------------
@cache
def own_commit() -> str:
    """The commit of the sources of this package, followed by "-dirty" if tracked files differ from it; "" if the
    sources are not tracked, as those of an installed package."""
    file = Path(__file__).resolve()
    if not git(file.parent, "ls-files", "--", file.name):
        return ""
    return git(file.parent, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def git(folder: Path, *arguments: str) -> str:
    """What a command of git prints in a folder, "" if it fails."""
    try:
        asked = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


@cache
def versions() -> dict[str, str | None]:
    """Name of a package -> its version, None if it is not installed. To look them up takes 40 ms."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


# --- the machine ------------------------------------------------------------------------------------------------------
@cache
def processor() -> str:
    """The name of the processor, "" if the system does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def cards() -> list[str]:
    """The names of the NVIDIA GPUs of this machine, from the files of their driver. To ask CUDA would start it in this
    process, which may still be forked."""
    try:
        texts = [path.read_text("utf-8", "replace") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    except OSError:
        texts = []
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    return sorted(line.partition(":")[2].strip() for line in lines) or ["not known"]


# --- the data ---------------------------------------------------------------------------------------------------------
def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Name -> SHA-256 of the file; see MANY. Raises ValueError for a file that cannot be read."""
    try:
        return _digests(files)
    except OSError as error:
        raise ValueError(f"{error.filename} must be readable, got {error.strerror}; change its permissions") from error


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    if len(files) > MANY:
        about = [[name, path.stat().st_size] for name, path in sorted(files.items())]
        return {f"{len(files)} files, their names and sizes": sha256(json.dumps(about))}
    return {name: digest_of(path, *_state(path)) for name, path in sorted(files.items())}


def _state(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


@lru_cache(1000)
def digest_of(path: Path, size: int, changed: int) -> str:
    """The digest of a file, which is read once in a process unless its size or time changes; see LARGE."""
    if size < LARGE:
        return sha256_of_file(path)
    return known([path], "sha256", lambda: {"sha256": sha256_of_file(path)})["sha256"]
