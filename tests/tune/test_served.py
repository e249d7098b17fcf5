"""What clients are served with, in the report of a study."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine.records.client_models import FILE
from fedfleet.engine.storage.atomic_write import write
from fedfleet.tune.by_client import better_off
from fedfleet.tune.report.served import Row, Served, clients_of, differences, pairs, served, spread_table, worse_off
from fedfleet.tune.report.statistics import bootstrap
from fedfleet.tune.study.kept_results import number

SPREAD = (0.5, 0.5, 0.1, 0.4, math.nan, 2000.0)


def of(values: dict[int, float], split: str = "s") -> Served:
    return Served(*SPREAD, split, values)


def test_shares_are_strict_and_over_pairs_with_the_same_split():
    base = [of({0: 0.5, 1: 0.5, 2: 0.5}), of({0: 0.0}), of({0: 0.0}, "")]
    other = [of({0: 0.6, 1: 0.5, 3: 1.0}), of({0: 1.0}, "another"), of({0: 1.0}, "")]
    found = pairs(base, other)
    parts, difference = better_off(*found, "max")
    assert (parts, len(found[0])) == ([0.5, 0.5, 0.0], 2)
    assert difference == pytest.approx(0.05, abs=1e-15)
    assert better_off(*found, "min")[0] == [0.0, 0.5, 0.5]


def test_a_kept_value_is_equal_to_the_one_that_it_was():
    kept, found = np.array([number(17 / 18), 0.5]), np.array([17 / 18, 0.5 + 1e-9])
    assert kept[0] != found[0]
    assert better_off(kept, found, "max")[0] == better_off(found, kept, "min")[0] == [0.5, 0.5, 0.0]


def test_differences_by_client_are_means_over_seeds():
    """In the order of the clients, and of runs with the same split alone."""
    base = [of({1: 0.5, 0: 0.25}), of({0: 0.5, 2: 0.5}), of({0: 0.0})]
    other = [of({0: 0.5, 1: 0.25, 3: 1.0}), of({2: 0.25, 0: 1.0}), of({0: 1.0}, "another")]
    assert differences(base, other).tolist() == [0.375, -0.25, -0.25]
    assert differences([of({0: 1.0}, "")], [of({0: 0.0}, "")]).shape == (0,)


def test_a_bootstrap_over_clients():
    """Of two values a sample has the mean 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4. Of many values it is near the
    normal interval, by the theorem of the central limit: its ends are quantiles of 10,000 means, of which one has a
    standard error of sqrt(0.025 * 0.975 / 10,000) / density(1.96) = 0.027 standard errors of the mean."""
    assert bootstrap(np.array([0.0, 1.0])) == (0.5, 0.0, 1.0)
    assert bootstrap(np.array([0.25])) == pytest.approx((0.25, math.nan, math.nan), nan_ok=True)
    assert np.isnan(bootstrap(np.zeros(0))).all()
    values = np.random.default_rng(0).standard_normal(400)
    mean, low, high = bootstrap(values)
    assert (mean, low, high) == bootstrap(values)
    error = values.std() / 20
    assert mean == values.mean()
    assert (np.array([low, high]) - mean) / error == pytest.approx([-1.96, 1.96], abs=4 * 0.027)
    assert bootstrap(values + 1.0) == pytest.approx((mean + 1, low + 1, high + 1), abs=1e-12)


def test_tables():
    """A method is compared with each of `against` but itself, at its level and with its seeds."""
    rows = [
        Row("A", "Local", {0: of({0: 0.25, 1: 0.5}), 1: of({0: 0.5})}),
        Row("A", "Ditto", {0: of({0: 0.75, 1: 0.25})}),
        Row("B", "Ditto", {0: of({0: 0.75})}),
        Row("A", "FedAvg", {0: of({})}),  # which has not kept what each client gets
    ]
    made = worse_off(rows, ["Local"], "max", 100.0, "Accuracy")
    assert [[cell.text for cell in row] for row in made.rows] == [
        ["A", "Local", "Ditto", "50.0%", "0.0%", "50.0%", "+12.5", "2"],
        ["A", "Local", "FedAvg", "–", "–", "–", "–", "0"],
    ]
    spread = [[cell.text for cell in row] for row in spread_table(rows, 100.0, "Accuracy").rows]
    assert spread[0] == ["A", "Local", "50", "50", "10", "40", "–", "2000"]


def test_clients_that_are_never_trained_with_are_not_compared(tmp_path: Path):
    columns = {"client": [0, 1, 2], "population": ["seen", "seen", "unseen"], "own_test_accuracy": [0.5, None, 1.0]}
    pq.write_table(pa.table(columns), tmp_path / FILE)
    write(tmp_path / "partition.json", "{}")
    assert clients_of(tmp_path, "own_test_accuracy") == {0: 0.5}
    assert clients_of(tmp_path, "adapted_test_accuracy") == {}


@pytest.mark.parametrize("model", ["own", "adapted", "adapted@2", "chosen"])
def test_whose_models_a_metric_is_of(model: str, tmp_path: Path):
    """Means come from the record, with unseen clients where there are some, and values of clients from the table."""
    pq.write_table(pa.table({"client": [0, 1], f"{model}_test_accuracy": [0.25, 0.75]}), tmp_path / FILE)
    write(tmp_path / "partition.json", '{"sha256": "s"}')
    base, unseen = f"eval/{model}/test_accuracy", f"eval/unseen/{model}/test_accuracy"
    columns = {base: np.array([0.1, 0.5]), f"{base}_worst": np.array([0.0, 0.2]), unseen: np.array([0.3, 0.4])}
    for metric in (base, f"{base}_worst", f"{base}_gap", unseen):
        found = served(tmp_path, columns, metric)
        assert found is not None
        assert (found.mean, found.worst, found.unseen) == (0.5, 0.2, 0.4)
        assert (found.split, found.clients) == ("s", {0: 0.25, 1: 0.75})
    assert served(tmp_path, {"eval/accuracy": np.ones(2)}, "eval/accuracy") is None
