"""Records of single clients, which are written only if the configuration asks for them."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedfleet.engine import run
from fedfleet.engine.errors import ConfigError

from .setups import EPOCHS, digits


def asked(**engine):
    experiment = digits("scaffold", EPOCHS, rounds=3, **engine)
    return experiment.model_copy(update={"tracking": experiment.tracking.model_copy(update={"clients": True})})


@pytest.mark.parametrize("block", [1, 4])
def test_a_row_a_client_that_adds_up_to_the_record(tmp_path, block):
    result = run(asked(block=block), tmp_path / "run")
    files = sorted((tmp_path / "run" / "clients").iterdir())
    assert [f.name for f in files] == [f"round-{n:06d}.parquet" for n in (1, 2, 3)]
    for file, row in zip(files, result.rows, strict=True):
        table = pq.read_table(file).to_pydict()
        assert table["id"] == sorted(set(table["id"]))
        assert len(table["id"]) == row["client/count"]
        assert sum(table["steps"]) == row["client/steps"]
        assert np.mean(table["loss"]) == pytest.approx(row["train/loss"], rel=1e-6)  # float32 sums
        assert np.mean(table["norm2"]) == pytest.approx(row["client/norm2"], rel=1e-5)


def test_unasked_there_is_none(tmp_path):
    run(digits("scaffold", EPOCHS, rounds=1), tmp_path / "run")
    assert not (tmp_path / "run" / "clients").exists()


def test_it_needs_a_folder():
    with pytest.raises(ConfigError, match=r"tracking\.clients"):
        run(asked())
