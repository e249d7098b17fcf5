"""A study that takes seconds: synthetic classes, two methods, six cells, each with a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

STUDY: dict[str, Any] = {
    "title": "Small <b>study</b> & more",
    "experiment": {
        "workload": {"name": "logistic", "rows": 20, "dim": 8},
        "federation": {"clients": 8, "cohort": 4, "rounds": 6, "local": {"steps": 2, "batch": 10}},
        "evaluate": {"every": 2},
    },
    "methods": {
        "FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": {"search": "grid", "values": [0.1, 0.01]}}},
        "SCAFFOLD": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
    },
    "axes": {"beta": {"key": "workload.beta", "values": [0.5, 2.0]}},
    "seeds": [0, 1],
    "report": {"targets": [0.3]},
    "tracking": {"uri": "none"},
}


def written(folder: Path, **changes: Any) -> str:
    """Write the study to a file, with some top-level keys changed; returns the path."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False), encoding="utf-8")
    return str(path)
