"""How a run appears in MLflow: its name, its tags and its parameters."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.config.run_spec import RunSpec


@dataclass(frozen=True)
class RunHeader:
    """What MLflow has of a run from its beginning. parameters: a tree of settings, which is flattened."""

    name: str
    tags: dict[str, str]
    parameters: dict[str, Any] = field(default_factory=dict)


def flatten(data: Any, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}; lists stay whole."""
    if isinstance(data, dict) and data:
        flat = {}
        for key, value in data.items():
            flat.update(flatten(value, f"{prefix}{key}."))
        return flat
    return {prefix[:-1]: str(data)}


def header_of(run_spec: RunSpec, name: str, **tags: str) -> RunHeader:
    """A run's entry. tags: more of them, or other values."""
    made = run_spec.experiment
    found = {
        "method": name_of(made.method),
        "workload": name_of(made.workload),
        "partition": partition_of(run_spec),
        "level": level_of(made.workload),
        "seed": str(made.seed),
        "commit": commit(),
        "fedfleet.run_id": run_spec.run_id,
        "fedfleet.version": version(),
        **tags,
    }
    parameters = {key: value for key, value in made.plain().items() if key != "tracking"}
    return RunHeader(name, {key: value for key, value in found.items() if value}, parameters)


def name_of(spec: Any) -> str:
    return spec["name"] if isinstance(spec, dict) else spec if isinstance(spec, str) else type(spec).__name__


def partition_of(run_spec: RunSpec) -> str:
    """By the name that was chosen, else the workload's default by its class."""
    spec = run_spec.experiment.workload
    if isinstance(spec, dict) and "partition" in spec:
        return name_of(spec["partition"])
    default = getattr(run_spec.workload, "partition", None)
    return "" if default is None else name_of(default).lower()


def level_of(workload: Any) -> str:
    """How unlike the clients are, as the file says it: the partition's arguments, beta=0.1."""
    spec = workload.get("partition") if isinstance(workload, dict) else None
    return ", ".join(f"{key}={value}" for key, value in spec.items() if key != "name") if isinstance(spec, dict) else ""


def version() -> str:
    from importlib.metadata import version

    return version("fedfleet")


@functools.cache
def commit() -> str:
    """Of the sources, where they are a git checkout; else of the current folder; else nothing."""
    for folder in (Path(__file__).parent, Path.cwd()):
        try:
            asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            continue
        if asked.returncode == 0:
            return asked.stdout.strip()
    return ""
