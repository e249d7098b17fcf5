"""The table of a run's records."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from fedfleet.engine.records.parquet import nullable, to_table

ALONE = """
import sys
from fedfleet.engine.records.parquet import to_table
to_table([{"round": 1.0, "train/loss": 0.5}, {"round": 2.0}])
print("pandas" in sys.modules)
"""


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_arrays_with_nulls_are_those_of_pyarrow(count, dtype):
    random = np.random.default_rng(count)
    values, there = (10 * random.normal(size=count)).astype(dtype), random.random(count) < 0.5
    for each, present in ((values, there), (values[::-1], there), (values, np.ones(count, dtype=bool))):
        found = nullable(each, present)
        found.validate(full=True)
        assert found.equals(pa.array(each, mask=~present))
        assert found.null_count == int((~present).sum())


def test_what_was_not_measured_is_null():
    table = to_table([{"round": 1.0, "a": 0.5}, {"round": 2.0, "a": 0.25, "b": 1.5}, {"round": 3.0}])
    assert table.to_pylist() == [
        {"round": 1, "a": 0.5, "b": None},
        {"round": 2, "a": 0.25, "b": 1.5},
        {"round": 3, "a": None, "b": None},
    ]


def test_the_table_is_made_without_pandas():
    """Loading it takes longer than a short run."""
    found = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"
