"""The user's own tables and idx files: every form of inputs, the choice of test rows, cells that cannot be used."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.data.idx_files import TYPES, IdxFiles
from fedfleet.workloads.data.sentiment import ParquetText
from fedfleet.workloads.data.table import Table
from fedfleet.workloads.partitions.natural import Natural

SHAPE, ROWS = (1, 4, 4), 60


pytestmark = pytest.mark.usefixtures("cache")


def numbers(rows: int = ROWS, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, *shape)).astype(np.uint8)


def put(root: Path, table: Any, name: str) -> None:
    (root / "table").mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, root / f"table/{name}.parquet", row_group_size=17)


def write(root: Path, cells: Any, rows: int = ROWS, **columns: Any) -> None:
    """Write files with the same inputs for training and testing. cells: function, (n, …) bytes -> an Arrow array."""
    for part, count in (("train", rows), ("test", rows // 2)):
        label = np.arange(count) % 3
        own = {name: column[:count] for name, column in columns.items()}
        put(root, pa.table({"input": cells(numbers(rows)[:count]), "label": label, **own}), part)


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def nested(kind: Any, x: np.ndarray) -> Any:
    return pa.array(x[:, 0].tolist(), pa.list_(pa.list_(kind)))


def tensors(x: np.ndarray) -> Any:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(x[:, 0]))


BYTES: dict[str, Any] = {
    "list<uint8>": lambda x: pa.array(x.reshape(len(x), -1).tolist(), pa.list_(pa.uint8())),
    "arrays": lambda x: pa.array(list(x.reshape(len(x), -1))),
    "large_list<uint8>": lambda x: pa.array(x.reshape(len(x), -1).tolist(), pa.large_list(pa.uint8())),
    "fixed<uint8, 16>": lambda x: pa.array(x.reshape(len(x), -1).tolist(), pa.list_(pa.uint8(), 16)),
    "nested": lambda x: nested(pa.uint8(), x),
    "nested, with channels": lambda x: pa.array(x.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8())))),
    "nested and fixed": lambda x: pa.array(x[:, 0].tolist(), pa.list_(pa.list_(pa.uint8(), 4), 4)),
    "channels last": lambda x: pa.array(np.moveaxis(x, 1, -1).tolist(), pa.list_(pa.list_(pa.list_(pa.uint8())))),
    "tensors": tensors,
    "png": lambda x: pa.array([png(image[0]) for image in x]),
    "large png": lambda x: pa.array([png(image[0]) for image in x], pa.large_binary()),
    "structs": lambda x: pa.array([{"bytes": png(image[0]), "path": f"{i}.png"} for i, image in enumerate(x)]),
    "structs without path": lambda x: pa.array([{"bytes": png(image[0])} for image in x]),
}


def normalised(workload: Classification, columns: Any) -> np.ndarray:
    """The inputs that a network gets."""
    return workload.inputs({"input": torch.from_numpy(columns["input"])}, torch.float32).numpy()


@pytest.mark.parametrize("cells", BYTES.values(), ids=BYTES)
def test_bytes_are_scaled_however_they_are_stored(cells, tmp_path):
    write(tmp_path, cells)
    workload = Table(path=str(tmp_path / "table"), reshape=SHAPE)
    train, test = workload.load()
    assert train["input"].dtype == test["input"].dtype == np.uint8
    assert np.array_equal(train["input"], numbers())
    assert np.array_equal(test["input"], numbers()[: ROWS // 2])
    assert np.allclose(normalised(workload, train), numbers() / 255.0)
    assert train["label"].dtype == np.int64
    assert np.array_equal(train["label"], np.arange(ROWS) % 3)


def test_colour_with_channels_last_is_turned(tmp_path):
    x = numbers(ROWS, (3, 4, 5))
    for part in ("train", "test"):
        cells = pa.array(np.moveaxis(x, 1, -1).tolist(), pa.list_(pa.list_(pa.list_(pa.uint8()))))
        put(tmp_path, pa.table({"input": cells, "label": np.arange(ROWS) % 2}), part)
    assert np.array_equal(Table(path=str(tmp_path / "table"), reshape=(3, 4, 5)).load()[0]["input"], x)
    with pytest.raises(ValueError, match=r"must have 3 x 5 x 4 numbers in every row of column input, got 4 x 5 x 3"):
        Table(path=str(tmp_path / "table"), reshape=(3, 5, 4)).load()


OTHERS: dict[str, Any] = {
    "int64": pa.int64(),
    "int8": pa.int8(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "float16": pa.float16(),
}


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_other_numbers_are_taken_as_they_are(kind, tmp_path):
    x = (numbers() // 2).astype(kind.to_pandas_dtype())
    write(tmp_path, lambda some: pa.array(list((some // 2).reshape(len(some), -1).astype(x.dtype))))
    train = Table(path=str(tmp_path / "table"), reshape=SHAPE).load()[0]
    assert train["input"].dtype == np.float32
    assert np.array_equal(train["input"], x.astype(np.float32))


def test_one_number_a_row(tmp_path):
    write(tmp_path, lambda some: pa.array([Decimal(int(v)) / 4 for v in some[:, 0, 0, 0]]))
    train = Table(path=str(tmp_path / "table")).load()[0]
    assert np.array_equal(train["input"], numbers()[:, 0, 0, :1] / np.float32(4))


def test_columns_are_named_for_features(tmp_path):
    x = numbers()[:, 0, 0]
    for part in ("train", "test"):
        columns = {"age": x[:, 0], "height": x[:, 1] / 7, "citizen": x[:, 2] > 99, "label": np.arange(ROWS) % 2}
        put(tmp_path, pa.table(columns), part)
    spec = {"name": "table", "path": str(tmp_path / "table"), "input": ["age", "height", "citizen"]}
    workload: Any = run_spec(spec).workload
    assert workload.shape == (3,)
    train = workload.load()[0]
    assert train["input"].dtype == np.float32  # also for bytes: an age is not a brightness
    assert np.allclose(train["input"], np.stack([x[:, 0], x[:, 1] / 7, x[:, 2] > 99], 1))
    with pytest.raises(ConfigError, match=r"input must have .* none twice, got \['age', 'age'\]; change it"):
        run_spec({**spec, "input": ["age", "age"]}).split()
    with pytest.raises(
        ConfigError, match=r"reshape must have one number for each of the 3 columns of input, got \[4\]"
    ):
        run_spec({**spec, "reshape": [4]}).split()
    with pytest.raises(ConfigError, match=r"input must name a column of .*, got 'weight'; did you mean height"):
        run_spec({**spec, "input": ["age", "weight"]}).split()


def run_spec(workload: Any, clients: int = 5, evaluate: Any = None, **more: Any) -> RunSpec:
    return RunSpec.of(
        "test",
        experiment(
            {
                "workload": workload,
                "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
                "federation": {"clients": clients, "cohort": 2, "rounds": 1},
                "engine": {"backend": "local", **more},
                "evaluate": evaluate or {},
                "tracking": {"uri": "none"},
            }
        ),
    )


# --- test rows --------------------------------------------------------------------------------------------------------
WORDS = np.array(["train", "test", "train", "Test", "TRAIN", "train"] * 10)


@pytest.mark.parametrize("marks", [WORDS, np.char.lower(WORDS) == "test", (np.char.lower(WORDS) == "test").astype(int)])
def test_a_column_says_which_rows_are_for_testing(marks, tmp_path):
    x = numbers()
    put(tmp_path, pa.table({"input": list(x.reshape(ROWS, -1)), "label": np.arange(ROWS) % 3, "part": marks}), "all")
    train, test = Table(path=str(tmp_path / "table"), reshape=SHAPE, split_column="part").load()
    chosen = np.char.lower(WORDS) == "test"
    assert np.array_equal(train["input"], x[~chosen])
    assert np.array_equal(test["input"], x[chosen])
    assert set(train) == set(test) == {"input", "label"}


def test_a_fraction_of_the_rows_is_for_testing(tmp_path):
    x = numbers()
    for part, rows in (("a", slice(0, 20)), ("b", slice(20, ROWS))):
        put(tmp_path, pa.table({"input": list(x[rows].reshape(-1, 16)), "label": np.arange(ROWS)[rows] % 3}), part)
    workload = Table(path=str(tmp_path / "table"), reshape=SHAPE, test_fraction=0.25)
    train, test = workload.load()
    assert len(test["label"]) == 15
    both = np.concatenate([train["input"], test["input"]]).reshape(ROWS, -1)
    assert sorted(map(bytes, both)) == sorted(map(bytes, x.reshape(ROWS, -1)))
    again = Table(path=str(tmp_path / "table"), reshape=SHAPE, test_fraction=0.25, label="label").load()[1]
    assert np.array_equal(again["input"], test["input"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"split_column": "part", "test_fraction": 0.5}, "only one of split_column and test_fraction may be set"),
        ({"test_fraction": 1.0}, "0 <= test_fraction < 1 must hold"),
        (
            {"split_column": "label"},
            "must have test, testing or train, training, true or false, in column label, got 2",
        ),
        ({"test_fraction": 0.001}, "must have rows of both kinds, got no test rows"),
    ],
)
def test_mistakes_about_test_rows(more, words, tmp_path):
    put(tmp_path, pa.table({"input": list(numbers().reshape(ROWS, -1)), "label": np.arange(ROWS) % 3}), "all")
    with pytest.raises(ValueError, match=words):
        Table(path=str(tmp_path / "table"), reshape=SHAPE, **more).load()


def test_bytes_to_train_and_other_numbers_to_test(tmp_path):
    for part, kind in (("train", np.uint8), ("test", np.int64)):
        x = numbers().reshape(ROWS, -1).astype(kind)
        put(tmp_path, pa.table({"input": list(x), "label": np.arange(ROWS) % 3}), part)
    with pytest.raises(
        ValueError, match="inputs must be of one type and shape in the training and test files, got uint8"
    ):
        Table(path=str(tmp_path / "table"), reshape=SHAPE).load()


# --- cells that cannot be used ----------------------------------------------------------------------------------------
def with_cells(values: dict[int, Any], kind: Any, base: float = 0.5) -> Any:
    return pa.array([values.get(row, base) for row in range(ROWS)], kind)


FLOATS = pa.float64()
BAD: list[tuple[str, Any, str]] = [
    ("input", with_cells({20: float("nan"), 41: float("nan")}, FLOATS), "2 rows with NaN or infinity, .* row 20 "),
    ("input", with_cells({40: float("-inf")}, FLOATS), "1 row with NaN or infinity, .* row 40 "),
    ("input", with_cells({33: None, 34: None, 50: None}, FLOATS), "3 rows without a value, .* row 33 "),
    ("input", with_cells({18: 1e300}, FLOATS), "1 row with numbers too large for float32, .* row 18 "),
    ("input", with_cells({18: [1.0, None], 59: None}, pa.list_(FLOATS), [0, 1]), "2 rows without a value, .* row 18 "),
    ("input", with_cells({17: [1, float("nan")]}, pa.list_(FLOATS), [0, 1]), "1 row with NaN or inf.* row 17 "),
    ("input", with_cells({17: [[1], None]}, pa.list_(pa.list_(FLOATS)), [[0], [1]]), "1 row without a val.* row 17 "),
    ("input", with_cells({19: [1, 2, 3]}, pa.list_(FLOATS), [0, 1]), "got one of 3 numbers in row 19 .* others have 2"),
    ("input", with_cells({19: [[1], [2, 3]]}, pa.list_(pa.list_(FLOATS)), [[0], [1]]), "one of 2 numbers in row 19 "),
    ("input", with_cells({}, pa.string(), "1.5"), "must have numbers, lists of numbers or pictures in column input"),
    ("label", with_cells({20: 1.5}, FLOATS, 1.0), "1 row with numbers that are not whole, .* row 20 "),
    ("label", with_cells({20: float("nan")}, FLOATS, 1.0), "1 row with NaN or infinity, .* row 20 "),
    ("label", with_cells({20: None, 21: None}, pa.int64(), 1), "2 rows without a value, .* row 20 "),
    ("client", with_cells({25: None}, pa.string(), "anna"), "must have a client in .*1 row without a value, .* row 25"),
    ("client", with_cells({25: None}, pa.int64(), 3), "must have a client in every row of column client, got 1 row"),
    ("client", with_cells({25: float("nan")}, FLOATS, 3.0), "must have a client in .* 1 row with NaN"),
]


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(("column", "cells", "words"), BAD, ids=lambda value: str(value)[:20])
def test_cells_that_cannot_be_used_are_told_with_column_count_and_first_row(part, column, cells, words, tmp_path):
    good = {"input": pa.array([[0.0, 1.0]] * ROWS), "label": pa.array([0, 1] * (ROWS // 2)), "client": ["a"] * ROWS}
    if column == "input" and not pa.types.is_nested(cells.type):
        good["input"] = pa.array([0.0] * ROWS)
    for one in ("train", "test"):
        put(tmp_path, pa.table({**good, column: cells} if one == part else good), one)
    shape = [2] if pa.types.is_list(cells.type) or column != "input" else [1]
    spec = {"name": "table", "path": str(tmp_path / "table"), "reshape": shape, "client": "client"}
    with pytest.raises(ConfigError, match=words) as found:
        run_spec(spec).split()
    if "row" in words or column in str(found.value):
        assert f"/table/{part}.parquet" in str(found.value)


def test_pictures_without_bytes(tmp_path):
    """Hugging Face leaves out the bytes if a picture is given by its path alone."""

    def cells(x: np.ndarray) -> Any:
        return pa.array([{"bytes": None if i in (21, 29) else png(x[i, 0]), "path": "a"} for i in range(len(x))])

    write(tmp_path, cells)
    with pytest.raises(
        ValueError, match=r"train.parquet .* column input, got 2 rows whose picture has no bytes, .* 21"
    ):
        Table(path=str(tmp_path / "table"), reshape=SHAPE).load()
    with pytest.raises(ValueError, match=r"pictures need shape \(1 or 3, height, width\), got shape=\(16,\)"):
        Table(path=str(tmp_path / "table"), reshape=(16,)).load()


def test_labels_that_are_whole_numbers_of_another_type(tmp_path):
    write(tmp_path, BYTES["list<uint8>"])
    for part in ("train", "test"):
        table = parquet.read_table(tmp_path / f"table/{part}.parquet")
        table = table.set_column(1, "label", table["label"].cast(pa.float64()))
        parquet.write_table(table, tmp_path / f"table/{part}.parquet")
    assert Table(path=str(tmp_path / "table"), reshape=SHAPE).load()[0]["label"].dtype == np.int64


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_clients_are_numbered_in_the_order_of_their_names(kind, tmp_path):
    names = [["10", "9", "12", "9"][row % 4] for row in range(ROWS)]
    clients = pa.array(names, pa.string()).cast(kind)
    write(tmp_path, BYTES["arrays"], client=clients)
    workload = Table(path=str(tmp_path / "table"), reshape=SHAPE, client="client", partition=Natural())
    train = workload.load()[0]
    assert train["client"].tolist() == [[0, 2, 1, 2][row % 4] for row in range(ROWS)]
    assert workload.split(0, 3).client_index.sizes.sum() == ROWS


def test_texts_labels_and_clients_of_parquet_are_checked(tmp_path):
    good = {"text": ["so so", "good"] * 3, "label": [0, 1] * 3, "user": ["a", "b"] * 3}
    spec = {"data_root": str(tmp_path), "folder": "table", "client": "user"}
    for column, cells, words in (
        ("text", ["a", None, "b"] * 2, "must have texts in every row of column text, got 2 rows without a value"),
        ("label", [0, 1, None] * 2, "must have whole numbers in every row of column label, got 2 rows without a value"),
        ("label", [0, 0.5, 1] * 2, "got 2 rows with numbers that are not whole, the first is row 1 "),
        ("user", ["a", "b", None] * 2, "must have a client in every row of column user, got 2 rows without a value"),
        ("text", [1, 2, 3] * 2, "must have texts in column text, got int64"),
    ):
        put(tmp_path, pa.table({**good, column: cells}), "train")
        put(tmp_path, pa.table(good), "test")
        with pytest.raises(ValueError, match=words):
            ParquetText(**spec).load()
    put(tmp_path, pa.table(good), "train")
    assert ParquetText(**spec).load()[0]["client"].tolist() == [0, 1] * 3


def test_a_fraction_of_parquets_training_texts_is_for_testing(tmp_path):
    texts = [f"word{row}" for row in range(20)]
    put(tmp_path, pa.table({"text": texts, "label": [0, 1] * 10}), "train")
    spec = {"data_root": str(tmp_path), "folder": "table"}
    with pytest.raises(ValueError, match=r"found train\.parquet; missing test\*\.parquet; put your files there"):
        ParquetText(**spec).load()
    train, test = ParquetText(**spec, test_fraction=0.2).load()
    assert (len(train["label"]), len(test["label"])) == (16, 4)
    same_rows = ParquetText(**spec, test_fraction=0.2, classes=3).load()
    assert np.array_equal(same_rows[1]["label"], test["label"])


class OwnRows(Classification):
    """A data set of a plug-in, with the columns that a test gives."""

    classes, shape = 3, (2,)
    columns: Any = ()

    def load(self) -> Any:
        good = {"input": np.zeros((9, 2), np.float32), "label": np.arange(9) % 3}
        return tuple({**good, **own} for own in self.columns)


@pytest.mark.parametrize("part", ["the training set", "the test set"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"input": np.where(np.arange(18).reshape(9, 2) > 12, np.nan, 0)}, "2 rows|3 rows with NaN .* row 6 "),
        ({"input": np.full((9, 2), 1e39)}, "9 rows with numbers too large for float32, the first is row 0 "),
        ({"input": np.full((9, 2), np.inf, np.float16)}, "9 rows with NaN or infinity"),
        ({"label": np.arange(9) / 2}, "got 4 rows with numbers that are not whole, the first is row 1 "),
        ({"label": np.arange(9)}, r"got 6 rows outside 0 … 2, the first is row 3 "),
        ({"label": np.arange(9) - 4}, r"must have labels 0 … 2 in every row of column label, got 6 rows outside"),
        ({"label": np.zeros((9, 1))}, "must have one whole number per row in column label"),
        ({"weights": np.full(9, np.nan)}, "column weights, got 9 rows"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_plug_in_loads_is_checked_too(part, bad, words):
    from fedfleet.workloads.models.small import Logistic
    from fedfleet.workloads.partitions.standard import Iid

    workload = OwnRows(model=Logistic(), partition=Iid())
    object.__setattr__(workload, "columns", (bad, {}) if part == "the training set" else ({}, bad))
    with pytest.raises(ConfigError, match=words) as found:
        run_spec(workload).split()
    assert part in str(found.value)
    for fine in ({"label": (np.arange(9) % 3).astype(kind)} for kind in (np.int8, np.int32, np.uint8, np.float64)):
        object.__setattr__(workload, "columns", (fine, fine))
        assert run_spec(workload).split().train["label"].dtype == np.int64


def test_float64_takes_what_float32_does_not():
    from fedfleet.workloads.models.small import Logistic
    from fedfleet.workloads.partitions.standard import Iid

    workload = OwnRows(model=Logistic(), partition=Iid())
    object.__setattr__(workload, "columns", ({"input": np.full((9, 2), 1e39)}, {}))
    assert run_spec(workload, dtype="float64").split().train["input"].max() == 1e39


# --- idx --------------------------------------------------------------------------------------------------------------
def idx(array: np.ndarray) -> bytes:
    code = next(code for code, kind in TYPES.items() if np.dtype(kind) == array.dtype.newbyteorder(">"))
    return (
        bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.astype(TYPES[code]).tobytes()
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("test", ["t10k-images-idx3-ubyte", "emnist-letters-test-images-idx3-ubyte"])
def test_idx_files_of_any_type(kind, packed, test, tmp_path):
    (tmp_path / "idx").mkdir()
    x = (numbers()[:, 0] // 3).astype(kind)
    for name in ("train-images-idx3-ubyte" if test[0] == "t" else "emnist-letters-train-images-idx3-ubyte", test):
        for file, array in (
            (name, x),
            (name.replace("images-idx3", "labels-idx1"), (np.arange(ROWS) % 3).astype("u1")),
        ):
            data = idx(array)
            path = tmp_path / "idx" / f"{file}{'.gz' * packed}"
            path.write_bytes(gzip.compress(data) if packed else data)
    workload = IdxFiles(data_root=str(tmp_path), shape=SHAPE, classes=3)
    train, columns = workload.load()
    assert train["input"].dtype == (np.uint8 if kind == "u1" else np.float32)
    assert np.array_equal(train["input"][:, 0], x.astype(train["input"].dtype))
    assert np.array_equal(columns["label"], np.arange(ROWS) % 3)
    with pytest.raises(ValueError, match=r"must have an input of shape \(1, 8, 2\) .* an array of 60 x 4 x 4"):
        IdxFiles(data_root=str(tmp_path), shape=(1, 8, 2), classes=3).load()
    with pytest.raises(ValueError, match=r"must have labels 0 … 1 in every row of column label, got 20 rows outside"):
        IdxFiles(data_root=str(tmp_path), shape=SHAPE, classes=2).load()


def test_a_fraction_of_the_training_files_is_for_testing(tmp_path):
    x = numbers()[:, 0]
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx/train-images-idx3-ubyte").write_bytes(idx(x))
    with pytest.raises(ValueError, match=r"found train-images-idx3-ubyte; missing \*train\*labels\*idx\*, \*t10k\*im"):
        IdxFiles(data_root=str(tmp_path), shape=SHAPE, classes=3).load()
    (tmp_path / "idx/train-labels-idx1-ubyte").write_bytes(idx((np.arange(ROWS) % 3).astype("u1")))
    train, test = IdxFiles(data_root=str(tmp_path), shape=SHAPE, classes=3, test_fraction=0.25).load()
    assert len(test["label"]) == 15
    both = np.concatenate([train["input"], test["input"]])[:, 0]
    assert sorted(map(bytes, both)) == sorted(map(bytes, x))


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\x08", b"\1\0\x08\1\0\0\0\1a", idx(numbers()[:, 0])[:-1], b"\0\0\x08\1\xff" * 3]
)
def test_idx_files_that_are_damaged(data, tmp_path):
    (tmp_path / "idx").mkdir()
    for name in ("train", "t10k"):
        (tmp_path / f"idx/{name}-images-idx3-ubyte").write_bytes(data)
        (tmp_path / f"idx/{name}-labels-idx1-ubyte").write_bytes(idx(np.zeros(ROWS, "u1")))
    with pytest.raises(ValueError, match=r"images-idx3-ubyte must be a whole file, got a truncated or different one"):
        IdxFiles(data_root=str(tmp_path), shape=SHAPE).load()


def test_real_idx_files_as_torchvision_reads_them(real_set, tmp_path):
    from fedfleet.workloads.data.mnist import Mnist

    root = real_set("mnist")
    own = IdxFiles(data_root=str(root.parent), folder=f"{root.name}/MNIST/raw").load()
    published = Mnist(data_root=str(root)).load()
    for one, other in zip(own, published, strict=True):
        assert np.array_equal(one["input"], other["input"])
        assert np.array_equal(one["label"], other["label"])


# --- size -------------------------------------------------------------------------------------------------------------
MEASURE = """
import sys, time
from fedfleet.workloads.data.table import Table
began = time.process_time()
train, test = Table(path=sys.argv[1] + "/table", reshape=(1, 28, 28)).load()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(time.process_time() - began, int(peak) / 2**10, train["input"].shape)
"""


@pytest.mark.parametrize("kind", ["uint8", pytest.param("float32", marks=pytest.mark.long)])
def test_a_file_of_mnists_size_loads_quickly_in_little_memory(kind, tmp_path):
    """60,000 + 10,000 lists of 784 numbers, decoded and put into the cache: at most 5 s and 1 GiB, all of it."""
    for part, rows in (("train", 60_000), ("test", 10_000)):
        values = np.random.default_rng(rows).integers(0, 256, rows * 784).astype(np.uint8).astype(kind)
        cells = pa.ListArray.from_arrays(pa.array(np.arange(0, rows * 784 + 1, 784, dtype=np.int32)), pa.array(values))
        put_large(tmp_path, pa.table({"input": cells, "label": np.arange(rows) % 10}), part)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds, mebibytes, shape = done.stdout.split(" ", 2)
    assert shape.strip() == "(60000, 1, 28, 28)"
    assert float(seconds) < 5, done.stdout  # processor time, since other work may run beside this
    assert float(mebibytes) < 1024, done.stdout
    print(done.stdout)


def put_large(root: Path, table: Any, name: str) -> None:
    (root / "table").mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, root / f"table/{name}.parquet")
