"""Whatever happens to the files of the cache, the data are those of the source files, and the log says so."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.workloads.files.cache import DIGESTS, cached, read_sealed, seal_of, write_sealed
from fedfleet.workloads.workload import taken_notes

from ..faults.runs import Watch

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def no_notes() -> None:
    taken_notes()


def splits() -> Any:
    random = np.random.default_rng(0)
    return tuple(
        {
            "input": random.integers(0, 256, (count, 3, 4, 4)).astype(np.uint8),
            "label": random.integers(0, 9, count),
            "turned": np.asfortranarray(random.normal(size=(count, 5))),
            "none": np.zeros((count, 0), np.float32),
            "name": np.array([f"row {i}" for i in range(count)]),
        }
        for count in (50, 20)
    )


def loaded(made: list[int]):
    def make():
        made.append(1)
        return splits()

    return cached("set", "settings", [], make)


def same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert np.array_equal(one[name], other[name])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def renamed(entry: Path, one: str, other: str) -> None:
    """Exchange two files."""
    first, second = entry / one, entry / other
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def places(path: Path) -> int:
    """Where the shape is in the header of a file, behind its first 60 bytes."""
    return path.read_bytes()[60:].index(b"50")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "the last bit of a picture": lambda entry: flip(entry / "train/input.npy", -1),
    "a bit of a label": lambda entry: flip(entry / "test/label.npy", -8),
    "a bit of a number": lambda entry: flip(entry / "train/turned.npy", -3),
    "a bit of a name": lambda entry: flip(entry / "test/name.npy", -4),
    "a bit of a shape": lambda entry: flip(entry / "train/input.npy", 60 + places(entry / "train/input.npy")),
    "a bit of the format": lambda entry: flip(entry / "train/label.npy", 0),
    "truncated": lambda entry: (entry / "train/input.npy").write_bytes((entry / "train/input.npy").read_bytes()[:500]),
    "empty": lambda entry: (entry / "train/input.npy").write_bytes(b""),
    "missing": lambda entry: (entry / "test/input.npy").unlink(),
    "exchanged": lambda entry: renamed(entry, "train/label.npy", "test/label.npy"),
    "a pickle": lambda entry: (entry / "train/label.npy").write_bytes(pickle.dumps([1])),
    "a FIFO": lambda entry: fifo(entry / "train/label.npy"),
    "huge": lambda entry: np.lib.format.write_array_header_1_0(
        (entry / "train/label.npy").open("wb"), {"descr": "<i8", "fortran_order": False, "shape": (10**14,)}
    ),
    "no digests": lambda entry: (entry / DIGESTS).unlink(),
    "damaged digests": lambda entry: (entry / DIGESTS).write_bytes(b"\xff["),
    "digests of something else": lambda entry: (entry / DIGESTS).write_text(json.dumps([1])),
    "half written": lambda entry: shutil.rmtree(entry / "test"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_decoded_again_and_told(damage, cache):
    made: list[int] = []
    same(loaded(made), splits())
    same(loaded(made), splits())
    assert len(made) == 1
    assert taken_notes() == []
    (entry,) = (cache / "set").iterdir()
    DAMAGES[damage](entry)
    same(loaded(made), splits())
    assert len(made) == 2
    (line,) = taken_notes()
    assert line.startswith(f"data: {entry} is damaged (")
    assert line.endswith("); its files are decoded again")
    same(loaded(made), splits())
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign seal"])
def test_a_single_file_is_made_again(damage, cache):
    target = cache / "vectors" / "table.npy"
    assert read_sealed(target) is None
    write_sealed(target, b"content")
    assert read_sealed(target) == b"content"
    if damage == "flip":
        flip(target, 3)
    elif damage == "cut":
        target.write_bytes(b"cont")
    else:
        seal_of(target).write_bytes(b"0")
    assert taken_notes() == []
    assert read_sealed(target) is None
    assert taken_notes() == [f"data: {target} is damaged; it is made again"]


def test_a_run_with_a_damaged_entry_has_the_same_model_and_says_so(cache, tmp_path):
    folder, random = tmp_path / "data" / "x", np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = {"x": list(random.normal(size=(60, 4)).astype(np.float32)), "y": np.arange(60) % 3}
    parquet.write_table(pa.table(rows), folder / "train.parquet")
    made = experiment(
        {
            "workload": {
                **{"name": "table", "path": str(folder), "input": "x", "label": "y", "test_fraction": 0.2},
                **{"partition": "iid", "model": {"name": "mlp", "hidden": [4]}},
            },
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {"clients": 4, "cohort": 2, "rounds": 2},
            "engine": {"backend": "local"},
            "tracking": {"uri": "none"},
        }
    )
    expected = run(made).model_sha256
    (column,) = cache.glob("*/*/train/input.npy")
    flip(column, -2)
    watch = Watch()
    assert run(made, observers=[watch]).model_sha256 == expected
    assert sum("is damaged (train/input.npy is not what was written)" in line for line in watch.told) == 1
    watch = Watch()
    assert run(made, observers=[watch]).model_sha256 == expected
    assert not any("damaged" in line for line in watch.told)
