"""CFL in runs: clusters, their models and what is told of them, the same bits in any way, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fedfleet
from fedfleet.engine import Result, resume, run
from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from tests.engine.test_personal import HEAD, NORMED, small
from tests.faults.runs import Watch, interrupt

CFL = {"name": "cfl", "eps1": 10.0, "eps2": 0.0, "least": 2, "after": 1, "most": 4}
"""Every cluster of three clients or more is cut in every round behind the first, up to four clusters."""
FEDERATION = {"clients": 8, "cohort": 8, "rounds": 4, "local": {"steps": 2, "batch": 8}}
EVALUATE = {"every": 0, "held_out": 0.25}
LOCAL = {"backend": "local", "dtype": "float64", "block": 3, "kernels": "torch"}


def clustered(**more: Any) -> Experiment:
    sections = {"federation": FEDERATION, "engine": LOCAL, **more}
    return small(method={**CFL, **sections.pop("given", {})}, evaluate=EVALUATE, **sections)


def table(folder: Path) -> dict[str, list[Any]]:
    return pq.read_table(folder / "clients.parquet").to_pydict()


def same(one: Result, other: Result) -> None:
    assert one.model_sha256 == other.model_sha256
    for first, second in zip(one.rows, other.rows, strict=True):
        own, others = ({k: v for k, v in row.items() if k.startswith(("server/", "eval/"))} for row in (first, second))
        assert own == others


def test_clusters_of_a_run(tmp_path: Path):
    result = run(clustered(engine={**LOCAL, "keep_state": True}, checkpoint={"last": True}), tmp_path / "run")
    counts = [row["server/clusters"] for row in result.rows]
    assert counts == [1, 2, *counts[2:]]
    assert counts[-1] > 2
    assert sum(row["server/cuts"] for row in result.rows) == counts[-1] - 1
    found = table(tmp_path / "run")["cluster"]
    last = [result.rows[-1][f"server/size_{j}"] for j in range(1, 5)]
    assert last == np.bincount(found, minlength=4).tolist()
    assert found[0] == 0
    for name, tensor in result.client_model(0).items():
        torch.testing.assert_close(tensor, result.model[name], rtol=0, atol=0)
    models = [torch.cat([leaf.flatten() for leaf in result.client_model(i).values()]) for i in range(8)]
    for i, j in np.ndindex(8, 8):
        assert torch.equal(models[i], models[j]) == (found[i] == found[j])


def test_a_client_receives_one_model_and_its_number():
    result = run(clustered())
    parameters = sum(leaf.numel() for leaf in result.model.values())
    assert [row["comm/bytes_down"] for row in result.rows] == [8 * (8 * parameters + 8)] * 4
    assert [row["comm/bytes_up"] for row in result.rows] == [8 * 8 * parameters] * 4


def test_a_cluster_that_is_never_cut_is_fedavg():
    """The sums of collected messages round otherwise than those of messages that are added up: 1e-16, four times."""
    whole = run(clustered(given={"after": 4}))
    plain = run(small(federation=FEDERATION, engine=LOCAL, evaluate=EVALUATE))
    for name, value in plain.model.items():
        torch.testing.assert_close(whole.model[name], value, rtol=1e-12, atol=1e-14)


def test_alone_as_in_a_block():
    one, two = (run(clustered(engine={**LOCAL, "block": block})) for block in (1, 4))
    for name, value in one.model.items():
        torch.testing.assert_close(value, two.model[name], rtol=1e-9, atol=1e-12)
    assert [row["server/clusters"] for row in one.rows] == [row["server/clusters"] for row in two.rows]


def test_a_resumed_run_and_a_fork_have_the_same_bits(tmp_path: Path):
    made = clustered(engine={**LOCAL, "keep_state": True}, checkpoint={"every": 2})
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r3=interrupt)])
    resumed, whole = resume(made, tmp_path / "run"), run(made, tmp_path / "whole")
    same(resumed, whole)
    same(fedfleet.fork(tmp_path / "whole", 2, out=tmp_path / "fork", progress=False), whole)
    assert table(tmp_path / "fork") == table(tmp_path / "whole") == table(tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_have_the_bits_of_one_process(workers: int, tmp_path: Path):
    ray = {**LOCAL, "backend": "ray", "workers": workers, "cpus": 0.3}
    same(run(clustered(engine=ray), tmp_path / "ray"), run(clustered(), tmp_path / "here"))
    assert table(tmp_path / "ray") == table(tmp_path / "here")


def test_unseen_clients_get_the_first_model(tmp_path: Path):
    run(clustered(federation={**FEDERATION, "unseen": 2}), tmp_path / "run")
    found = table(tmp_path / "run")
    assert found["cluster"][8:] == [0, 0]
    assert found["own_test_loss"][8:] == found["server_test_loss"][8:]


def test_an_attack_changes_what_is_compared():
    attack = {"name": "sign_flip", "clients": [1]}
    plain, attacked = run(clustered()), run(clustered(attack=attack))
    assert plain.model_sha256 != attacked.model_sha256
    assert attacked.rows[-1]["robust/byzantine"] == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"federation": {**FEDERATION, "cohort": 5}}, "federation.cohort: all clients must take part in every round"),
        ({"aggregate": "median"}, "aggregate: the method compares the messages and adds them up by itself"),
        ({"workload": NORMED}, "workload: running statistics would be means over clients with other models"),
        ({"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-3}}, "it compares updates one by one"),
        ({"systems": {"devices": "uniform"}}, "systems: no client may be missing in a round"),
        ({"personal": HEAD}, "personal: does not go with a method that gives clients whole models of their own"),
        ({"attack": {"name": "drop", "clients": [1]}}, "attack: no client may be missing in a round"),
        ({"given": {"linkage": "average"}}, "method.linkage must be 'single' or 'complete', got 'average'"),
        ({"given": {"most": 0}}, "most >= 1 must hold, got most=0"),
    ],
    ids=["cohort", "rule", "statistics", "privacy", "systems", "personal", "silent", "linkage", "most"],
)
def test_refusals(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(clustered(**sections))
