"""The header of a run in MLflow: its name, its tags, its parameters and its data set."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from ...engine.records.lineage import lineage_of
from ...engine.run_spec import RunSpec
from ...engine.storage.sha256 import sha256_of_json
from ..run_files import read_json
from .origin import origin
from .writer import RunHeader


def header_of(run_spec: RunSpec, name: str, folder: Path | None, **tags: str) -> RunHeader:
    """The header of a run. folder: the run's, or None. tags: further tags, or other values of these."""
    made = run_spec.experiment
    found = {
        "method": name_of(made.method),
        "workload": name_of(made.workload),
        "partition": partition_of(run_spec),
        "level": level_of(made.workload),
        "seed": str(made.seed),
        "fedfleet.run_id": run_spec.run_id,
        "fedfleet.version": metadata.version("fedfleet"),
        "fedfleet.frozen": run_spec.frozen_text,
        **fork_tags(folder),
        **origin(run_spec.plugins),
        **tags,
    }
    parameters = {key: value for key, value in made.plain().items() if key != "tracking"}
    dealt = read_json(folder / "partition.json") if folder is not None else run_spec.dealt
    if "heterogeneity" in dealt:
        parameters["heterogeneity"] = dealt["heterogeneity"]
    return RunHeader(
        name,
        {key: value for key, value in found.items() if value},
        parameters,
        data_set(run_spec, name_of(made.workload), dealt),
    )


def fork_tags(folder: Path | None) -> dict[str, str]:
    """The tags of a fork; {} for a run that is no fork."""
    lineage = lineage_of(folder)
    if lineage is None:
        return {}
    return {
        "fedfleet.fork.run_id": lineage.run,
        "fedfleet.fork.round": str(lineage.round),
        "fedfleet.fork.changes": "; ".join(lineage.changes) or "no change",
    }


def name_of(spec: Any) -> str:
    """The name of a part that a configuration gives as a mapping, a name or an object."""
    return spec["name"] if isinstance(spec, dict) else spec if isinstance(spec, str) else type(spec).__name__


def partition_of(run_spec: RunSpec) -> str:
    """The name of the partition that the configuration chooses, else the class of the workload's default, or ""."""
    spec = run_spec.experiment.workload
    if isinstance(spec, dict) and "partition" in spec:
        return name_of(spec["partition"])
    default = getattr(run_spec.workload, "partition", None)
    return "" if default is None else name_of(default).lower()


def level_of(workload: Any) -> str:
    """The heterogeneity of the clients as the file gives it: the partition's arguments, such as beta=0.1."""
    spec = workload.get("partition") if isinstance(workload, dict) else None
    return ", ".join(f"{key}={value}" for key, value in spec.items() if key != "name") if isinstance(spec, dict) else ""


def data_set(run_spec: RunSpec, name: str, dealt: dict[str, Any]) -> dict[str, str]:
    """The arguments of MLflow's Dataset, which shows how the data are divided among the clients. dealt: of the file
    partition.json, {} if the run has none.

    The digest depends on the settings of the workload, on the number of clients, the seed, and, if the run has a
    folder, on which client has which rows. The data themselves are not read again.
    """
    made = run_spec.experiment
    settings = made.plain()["workload"]
    identity = [settings, made.federation.clients, made.seed, dealt.get("sha256")]
    sizes = {"num_rows": dealt.get("rows"), "clients": made.federation.clients, "seed": made.seed}
    profile = {**sizes, "partition_sha256": dealt.get("sha256")}
    return {
        "name": name,
        "digest": sha256_of_json(identity)[:16],
        "source_type": "code",
        "source": json.dumps({"tags": {"workload": settings}}),
        "profile": json.dumps({key: value for key, value in profile.items() if value is not None}),
    }
