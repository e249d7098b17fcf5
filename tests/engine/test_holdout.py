"""The clients' own test rows: chosen by a fraction or by a column, with natural clients; rows that no client has are
reported."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedfleet.engine import Experiment, Result, resume, run
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.records.partition_file import partition_digest
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.partition import PartitionSummary, table_of
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Dirichlet, Iid

ROWS, TESTS, OWNERS = 240, 40, 15


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A data set with natural clients, also in its test rows, and with a column that marks held-out rows."""
    random = np.random.default_rng(1)
    (tmp_path / "data/table").mkdir(parents=True)
    for part, rows in (("train", ROWS), ("test", TESTS)):
        x = random.normal(size=(rows, 3))
        columns = {
            "input": list(x),
            "label": (x[:, 0] > 0).astype(int),
            "who": [f"w{i % OWNERS}" for i in range(rows)],
            "mine": np.arange(rows) // OWNERS % 4 == 0,
        }
        parquet.write_table(pa.table(columns), tmp_path / f"data/table/{part}.parquet")
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    data = {"name": "table", "path": str(tmp_path / "data/table"), "input": "input", "client": "who"}
    return {**data, "model": "logistic", "partition": "natural"}


def plan(workload: Any, clients: int = OWNERS, evaluate: Any = None, **engine: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
            "federation": {"clients": clients, "cohort": 4, "rounds": 3, "local": {"steps": 3, "batch": 8}},
            "engine": {"backend": "local", **engine},
            "evaluate": {"every": 2, "batch": 32, **(evaluate or {})},
            "tracking": {"uri": "none"},
        }
    )


def on_clients(result: Result, columns: Any, client_index: ClientIndex) -> np.ndarray:
    """The accuracy of the final model on each client's own rows, in float64; NaN for a client without such rows."""
    weight, bias = result.model["out.weight"].double().numpy(), result.model["out.bias"].double().numpy()
    x = columns["input"].reshape(len(columns["label"]), -1).astype(np.float64)
    right = (x @ weight.T + bias).argmax(1) == columns["label"]
    own = np.split(right[client_index.rows], client_index.offsets[1:-1])
    return np.array([each.mean() if len(each) else np.nan for each in own])


def worst(values: np.ndarray) -> float:
    return float(np.sort(values)[: -(-len(values) // 10)].mean())


def test_fairness_with_natural_clients(table):
    experiment = plan(table, evaluate={"fairness": True})
    result = run(experiment)
    split = RunSpec.of("again", experiment).split()
    assert "client" not in split.train
    assert "client" not in split.test
    own = on_clients(result, split.train, split.client_index)
    assert result.metrics["eval/clients/accuracy"] == pytest.approx(own.mean(), abs=1e-12)
    assert result.metrics["eval/clients/accuracy_worst"] == pytest.approx(worst(own), abs=1e-12)


@pytest.mark.parametrize("way", ["fraction", "column"])
def test_accuracy_on_rows_that_clients_hold_out(way, table):
    """The accuracies equal plain means of the final model over each client's rows, both together with those of the
    training rows and alone."""
    asked = {"held_out": 0.25} if way == "fraction" else {}
    workload = {**table, "held_out": "mine"} if way == "column" else table
    experiment = plan(workload, evaluate={"fairness": True, **asked})
    result, split = run(experiment), RunSpec.of("again", experiment).split()
    held = split.client_index.held
    assert held is not None
    assert held.sizes.tolist() == [4] * OWNERS
    assert split.client_index.sizes.tolist() == [12] * OWNERS
    for prefix, client_index in (("", split.client_index), ("test_", held)):
        own = on_clients(result, split.train, client_index)
        assert result.metrics[f"eval/clients/{prefix}accuracy"] == pytest.approx(own.mean(), abs=1e-12)
        assert result.metrics[f"eval/clients/{prefix}accuracy_worst"] == pytest.approx(worst(own), abs=1e-12)
    alone = run(plan(workload, evaluate=asked))
    assert alone.model_sha256 == result.model_sha256
    assert alone.metrics["eval/clients/test_accuracy"] == result.metrics["eval/clients/test_accuracy"]
    assert "eval/clients/accuracy" not in alone.metrics


def test_held_out_rows_are_not_trained_on(table):
    """Each row is either trained on or held out by its client, and the same seed holds out the same rows."""
    whole = RunSpec.of("all", plan(table)).split().client_index
    asked = plan(table, evaluate={"held_out": 0.3})
    client_index, again = (RunSpec.of("some", asked).split().client_index for _ in range(2))
    assert client_index.held is not None
    assert partition_digest(client_index) == partition_digest(again)
    assert partition_digest(client_index) != partition_digest(ClientIndex(client_index.offsets, client_index.rows))
    for client in range(OWNERS):
        trained, held, both = (
            p.rows[p.offsets[client] : p.offsets[client + 1]] for p in (client_index, client_index.held, whole)
        )
        assert len(held) == round(0.3 * 16)
        assert sorted([*trained, *held]) == sorted(both)
    column = RunSpec.of("column", plan({**table, "held_out": "mine"})).split()
    assert "held_out" not in column.train
    assert column.client_index.held is not None
    assert set(column.client_index.held.rows.tolist()) == {i for i in range(ROWS) if i // OWNERS % 4 == 0}


def test_a_resumed_run_holds_out_the_same_rows(table: dict[str, Any], tmp_path: Path):
    """Another fraction would train on other rows. All else of `evaluate` may change."""
    records: list[Any] = []
    with pytest.raises(Interrupted):
        run(
            plan(table, evaluate={"held_out": 0.3}),
            tmp_path / "run",
            [records.append],
            stop=lambda: signal.SIGTERM if records else 0,
        )
    with pytest.raises(ConfigError, match=r"evaluate\.held_out was 0\.3, is 0\.5"):
        resume(plan(table, evaluate={"held_out": 0.5}), tmp_path / "run")
    resume(plan(table, evaluate={"held_out": 0.3, "batch": 7}), tmp_path / "run")


def test_without_held_out_rows_nothing_moves(table):
    experiment = plan(table)
    client_index = RunSpec.of("plain", experiment).split().client_index
    assert client_index.held is None
    assert not [name for name in run(experiment).metrics if name.startswith("eval/clients")]


@pytest.mark.parametrize("batch", [7, 500])
def test_clients_with_few_rows(batch):
    """A client with one row trains on it and is left out of the mean; a client with two rows holds out one."""
    workload = Digits(model=Logistic(), partition=Dirichlet(0.1))
    experiment = plan(workload, 200, {"held_out": 0.1, "batch": batch})
    whole, split = RunSpec.of("w", plan(workload, 200)).split().client_index, RunSpec.of("s", experiment).split()
    held = split.client_index.held
    assert held is not None
    assert (whole.sizes == 1).any()
    assert np.array_equal(held.sizes == 0, whole.sizes == 1)
    assert split.client_index.sizes.min() >= 1
    result = run(experiment)
    own = on_clients(result, split.train, held)
    own = own[~np.isnan(own)]
    assert result.metrics["eval/clients/test_accuracy"] == pytest.approx(own.mean(), abs=1e-12)
    assert result.metrics["eval/clients/test_accuracy_worst"] == pytest.approx(worst(own), abs=1e-12)


@pytest.mark.long
def test_on_ray_and_in_process(table, ray_here):
    asked = {"fairness": True, "held_out": 0.25}
    local = run(plan(table, evaluate=asked))
    there = run(plan(table, evaluate=asked, backend="ray", workers=2))
    assert there.model_sha256 == local.model_sha256
    assert there.metrics == local.metrics


@dataclass(frozen=True)
class Marked(Digits):
    """Digits with a column of held-out rows that a test gives."""

    every: int = 2

    def load(self) -> Any:
        train, test = super().load()
        return {**train, "held_out": np.arange(len(train["label"])) % self.every == 0}, test


def test_mistakes_about_held_out_rows(table):
    for experiment, words in (
        (plan(Marked(partition=Iid()), 10, {"held_out": 0.5}), "held_out: the workload's column held_out already says"),
        (plan(Marked(every=1), 10), "every client must have a row to train on, got 10 clients whose rows are all held"),
        (plan(Marked(every=10**6), 10), None),
        (plan("digits", 1442, {"held_out": 0.5}), "held_out: no client has a row to hold out, got clients of 1 rows"),
        (plan("quadratic", 10, {"held_out": 0.5}), "held_out: no client has a row"),
        (plan("linear", 10, {"held_out": 0.5}), None),
        (plan("saddle", 10, {"fairness": True}), "evaluate.fairness: the workload's report needs floor"),
    ):
        run_spec = RunSpec.of("mistake", experiment)
        if words is None:
            assert run_spec.split().client_index.held is not None
        else:
            with pytest.raises(ConfigError, match=words):
                run_spec.split()


# --- rows that nobody has ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.long)])
def test_natural_with_fewer_clients_says_how_many_rows_it_leaves_out(backend, table, tmp_path, ray_here):
    run(plan(table, 5, backend=backend, workers=1), tmp_path / "out")
    log = (tmp_path / "out/run.log").read_text()
    assert "160 of 240 training rows belong to no client: the partition deals 80 to 5 clients" in log
    assert "rest=merge" in log
    merged = {**table, "partition": {"name": "natural", "rest": "merge"}}
    run(plan(merged, 5, backend=backend, workers=1), tmp_path / "merged")
    assert "belong to no client" not in (tmp_path / "merged/run.log").read_text()


def test_the_partition_command_says_it_too(table):
    said = table_of(PartitionSummary.of(RunSpec.of("partition", plan(table, 5, {"held_out": 0.25}))))
    assert "5 clients, 60 training rows, 40 test rows, 20 rows held out by clients" in said
    assert "160 of 240 training rows belong to no client" in said
