"""Data that runs of one process share fit each of them."""

from __future__ import annotations

from typing import Any

import pytest

from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.shared_data import SharedData

PARTITION = {"name": "labels", "per_client": 1}


def spec(**federation: Any) -> RunSpec:
    plan = {"clients": 10, "cohort": 10, "rounds": 1, "local": {"steps": 1, "batch": 4}}
    made = {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [4]}, "partition": PARTITION},
        "method": "fedavg",
        "federation": {**plan, **federation},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    return RunSpec.of("run", experiment(made))


def grouped(floor: float) -> dict[str, Any]:
    return {"sampler": {"name": "agnostic", "groups": "label", "floor": floor}}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {},
            {"weights": "tokens"},
            "federation.weights: tokens counts the targets of texts, and the workload has none",
        ),
        (grouped(0.0), grouped(0.2), r"federation.sampler: 0 <= floor <= 1 / 10 groups must hold, got 0.2; lower it"),
    ],
    ids=["weights", "floor"],
)
def test_what_does_not_fit_is_refused_also_where_another_run_has_read_the_data(first: Any, second: Any, message: str):
    data = SharedData()
    split = data.split(spec(**first))
    assert data.split(spec(**first)).client_index is split.client_index
    with pytest.raises(ConfigError, match=f"^{message}"):
        data.split(spec(**second))
