"""Rows by which settings are chosen: drawn from each client's rows or marked by a column, and evaluated apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedfleet.engine import Experiment, run
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.partition_file import partition_digest
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.expected_columns import columns
from fedfleet.engine.workload.split import check_marks, hold_out, set_aside
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.workload import HELD_OUT, VALIDATION, Split

SIZES = [1, 2, 3, 4, 5, 10, 25, 107]


def rows_of(sizes: list[int], **marks: Any) -> Split:
    """Clients with so many rows; the column "x" has the numbers of the rows."""
    cuts = np.cumsum([0, *sizes])
    index = ClientIndex(cuts.astype(np.int64), np.arange(cuts[-1]))
    return Split({"x": np.arange(cuts[-1]), **marks}, {"x": np.arange(3)}, index)


def plan(**evaluate: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "workload": {"name": "digits", "model": "logistic"},
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
            "federation": {"clients": 10, "cohort": 4, "rounds": 2, "local": {"steps": 3, "batch": 8}},
            "engine": {"backend": "local", "block": 1, "kernels": "torch"},
            "evaluate": {"every": 1, **evaluate},
            "tracking": {"uri": "none"},
        }
    )


def test_how_many_rows_are_drawn():
    """Of clients with 1 to 107 rows, a fifth held out and a tenth for validation: the counts of the protocol."""
    split = set_aside(hold_out(rows_of(SIZES), 0.2, seed=0), 0.1, seed=0)
    index = split.client_index
    assert index.held is not None
    assert index.validation is not None
    counts = zip(index.sizes.tolist(), index.validation.sizes.tolist(), index.held.sizes.tolist(), strict=True)
    assert [*counts] == [
        *[(1, 0, 0), (1, 0, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (7, 1, 2), (18, 2, 5), (75, 11, 21)],
    ]
    together = np.concatenate([index.rows, index.validation.rows, index.held.rows])
    assert sorted(together) == list(range(sum(SIZES)))


def test_test_rows_are_those_without_validation():
    before, after = hold_out(rows_of(SIZES), 0.2, seed=3), set_aside(hold_out(rows_of(SIZES), 0.2, seed=3), 0.1, seed=3)
    assert before.client_index.held is not None
    assert after.client_index.held is not None
    np.testing.assert_array_equal(before.client_index.held.rows, after.client_index.held.rows)
    assert partition_digest(before.client_index) != partition_digest(after.client_index)
    again = set_aside(hold_out(rows_of(SIZES), 0.2, seed=3), 0.1, seed=3)
    assert partition_digest(again.client_index) == partition_digest(after.client_index)


def test_the_model_is_evaluated_on_them_and_not_trained_on_them():
    experiment = plan(validation=0.25, batch=50)
    result, split = run(experiment), RunSpec.of("again", experiment).split()
    index = split.client_index.validation
    assert index is not None
    assert not set(index.rows) & set(split.client_index.rows)
    weight, bias = result.model["out.weight"].double().numpy(), result.model["out.bias"].double().numpy()
    x = split.train["input"][index.rows].reshape(len(index.rows), -1).astype(np.float64)
    right = (x @ weight.T + bias).argmax(1) == split.train["label"][index.rows]
    assert result.rows[-1]["eval/validation_accuracy"] == pytest.approx(right.mean(), abs=1e-12)
    names = {name for name in result.rows[-1] if name.startswith("eval/")}
    assert names == {"eval/loss", "eval/accuracy", "eval/validation_loss", "eval/validation_accuracy"}
    assert names <= set(columns(experiment) or ())


def test_per_client_where_the_test_is_per_client():
    experiment = plan(validation=0.1, held_out=0.2)
    last = run(experiment).rows[-1]
    assert {"eval/validation_accuracy", "eval/clients/validation_accuracy_worst", "eval/clients/test_accuracy"} <= {
        *last
    }
    assert {name for name in last if name.startswith("eval/")} <= set(columns(experiment) or ())


def test_rows_that_a_column_marks():
    marks = np.tile([True, False], 10)
    index = set_aside(rows_of([10, 10], **{VALIDATION: marks}), 0.0, seed=0).client_index
    assert index.validation is not None
    np.testing.assert_array_equal(index.validation.rows, np.flatnonzero(marks))
    np.testing.assert_array_equal(index.rows, np.flatnonzero(~marks))


def test_what_cannot_be_set_aside():
    some = np.arange(20) % 4 == 0
    with pytest.raises(ConfigError, match=r"column validation already marks rows, got 0\.1; set it to 0"):
        set_aside(rows_of([10, 10], **{VALIDATION: some}), 0.1, seed=0)
    with pytest.raises(ConfigError, match=r"every client must have a row to train on, got 1 .*\(client 1\)"):
        set_aside(rows_of([10, 10], **{VALIDATION: np.arange(20) >= 10}), 0.0, seed=0)
    with pytest.raises(ConfigError, match="no client has a row for it, got clients of 1 rows at most"):
        set_aside(rows_of([1, 1]), 0.5, seed=0)
    with pytest.raises(ConfigError, match="got 5 rows that the columns held_out and validation both mark"):
        check_marks(rows_of([10, 10], **{VALIDATION: some, HELD_OUT: some}), 0.0)
    with pytest.raises(ConfigError, match=r"column validation needs a column held_out beside it, got held_out=0\.2"):
        check_marks(rows_of([10, 10], **{VALIDATION: some}), 0.2)
