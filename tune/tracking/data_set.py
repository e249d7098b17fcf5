"""The data set of a run as MLflow shows it: its name, how it is divided among the clients, and a digest of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...engine.run_spec import RunSpec
from ...engine.storage.sha256 import sha256_of_json
from ..run_files import read_json

TRAINING = "training"
"""MLflow's word for what a data set is used for."""


def data_set(run_spec: RunSpec, name: str, folder: Path | None) -> dict[str, str]:
    """The arguments of MLflow's Dataset.

    The digest depends on the settings of the workload, on the number of clients, the seed, and, if the run has a
    folder, on which client has which rows. The data themselves are not read again.
    """
    made = run_spec.experiment
    settings = made.plain()["workload"]
    dealt = read_json(folder / "partition.json") if folder is not None else {}
    identity = [settings, made.federation.clients, made.seed, dealt.get("sha256")]
    profile: dict[str, Any] = {"num_rows": dealt.get("rows"), "clients": made.federation.clients, "seed": made.seed}
    if "sha256" in dealt:
        profile["partition_sha256"] = dealt["sha256"]
    return {
        "name": name,
        "digest": sha256_of_json(identity)[:16],
        "source_type": "code",
        "source": json.dumps({"tags": {"workload": settings}}),
        "profile": json.dumps({key: value for key, value in profile.items() if value is not None}),
    }
