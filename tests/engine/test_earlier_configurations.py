"""Folders that an earlier version wrote, when the sampler had three keys, are read. The old keys are refused in an
experiment of today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedfleet
from fedfleet.engine.config.earlier import today
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.state.checkpoint import checkpoints_in
from fedfleet.engine.storage.sha256 import sha256_of_json
from fedfleet.tune.study.cells import digest
from tests.aggregation.test_engine import StopsAfter
from tests.engine.test_finite import plan

BINOMIAL, TURNS = {"sampler": "binomial"}, {"name": "turns", "separation": 3}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"federation": {"sampling": "fixed", "separation": None, "sampler": "oort"}, "engine": {"port": 1}},
        {"federation": {"sampler": "oort"}, "engine": {}},
    ),
    ({"federation": {"sampling": "poisson", "separation": None}}, {"federation": BINOMIAL}),
    ({"federation": {"sampling": "poisson", "sampler": "uniform"}}, {"federation": BINOMIAL}),
    ({"federation": {"sampling": "cyclic", "separation": 3}}, {"federation": {"sampler": TURNS}}),
    ({"a": [{"federation.sampling": "cyclic", "federation.separation": 3}]}, {"a": [{"federation.sampler": TURNS}]}),
    ({"a": {"federation.sampling": "fixed"}}, {"a": {"federation.sampler": "uniform"}}),
    ({"workload": {"name": "mine", "sampling": "poisson"}}, {"workload": {"name": "mine", "sampling": "poisson"}}),
    ({"federation": {"sampling": {"search": "choice"}}}, {"federation": {"sampling": {"search": "choice"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), CASES)
def test_old_keys_have_todays_form(old: dict[str, Any], new: dict[str, Any]):
    assert today(old) == new
    assert today(new) == new


def test_an_interrupted_run_of_an_earlier_version_is_resumed(tmp_path: Path):
    data, folder = plan(federation={**plan()["federation"], "sampler": "binomial"}), tmp_path / "run"
    whole, made = fedfleet.run(experiment(data)), experiment({**data, "checkpoint": {"every": 1}})
    with pytest.raises(KeyboardInterrupt):
        fedfleet.run(made, folder, [StopsAfter(2)])
    old = made.plain()
    old["federation"] |= {"sampling": "poisson", "separation": None, "sampler": "uniform"}
    (folder / "config.yaml").write_text(yaml.safe_dump(old))
    store = checkpoints_in(folder)
    for number in store.rounds():
        store.write(store.read(number)._replace(config=old))
    assert fedfleet.resume(folder).model_sha256 == whole.model_sha256


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sampling": "poisson"}, "got sampling=poisson; write federation.sampler: binomial"),
        (
            {"sampling": "cyclic", "separation": 3},
            "federation.sampling is a part of federation.sampler now, got sampling=cyclic with separation=3; "
            "write federation.sampler: {name: turns, separation: 3}",
        ),
    ],
)
def test_an_experiment_with_an_old_key_is_told_the_new_one(keys: dict[str, Any], words: str):
    data = plan()
    data["federation"] |= keys
    with pytest.raises(ConfigError, match=re.escape(words)):
        experiment(data)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("binomial", {"federation.sampling": "poisson"}),
        (TURNS, {"federation.sampling": "cyclic", "federation.separation": 3}),
        ("oort", {"federation.sampler": "oort"}),
    ],
)
def test_the_keys_of_a_studys_runs_stay(new: Any, old: dict[str, Any]):
    """So that results of earlier versions are found again."""
    assert digest({"federation": {"sampler": new}}) == sha256_of_json([old, []])[:16]
