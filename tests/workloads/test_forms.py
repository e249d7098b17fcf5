"""The forms of a user's table: the same rows give the same bits in each, labels become classes, numbers or marks, and
what cannot be read is refused with the line that converts it."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import ipc, parquet
from torch.utils.data import TensorDataset

import fedfleet
from fedfleet.engine.config.earlier import today
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.data.table import Table
from fedfleet.workloads.files.cache import digest_of
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Dirichlet

ROWS = 300

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def frame() -> pd.DataFrame:
    """Two numbers, a label that is a text, and the site of each row."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=ROWS), random.integers(-5, 5, ROWS)
    alarm = np.where(a + b + random.normal(size=ROWS) > 0.5, "yes", "no")
    return pd.DataFrame({"a": a, "b": b, "alarm": alarm, "site": random.integers(4, size=ROWS)})


def saved_as_datasets(table: Any, folder: Path) -> None:
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir()
    with ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def features(**kinds: Any) -> dict[bytes, bytes]:
    """The metadata in which Hugging Face has the types of columns."""
    return {b"huggingface": json.dumps({"info": {"features": kinds}}).encode()}


def coded(frame: pd.DataFrame) -> Any:
    """The rows with a ClassLabel in the place of texts."""
    whole = frame.assign(alarm=(frame.alarm == "yes").astype(int))
    return pa.table(whole).replace_schema_metadata(features(alarm={"names": ["no", "yes"], "_type": "ClassLabel"}))


WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "csv": lambda f, p: f.to_csv(p / "t.csv", index=False),
    "csv with semicolons": lambda f, p: f.to_csv(p / "t.csv", index=False, sep=";"),
    "packed csv": lambda f, p: f.to_csv(p / "t.csv.gz", index=False),
    "jsonl": lambda f, p: (p / "t.jsonl").write_text("\n".join(map(json.dumps, f.to_dict("records")))),
    "parquet": lambda f, p: f.to_parquet(p / "t.parquet"),
    "parquet with a ClassLabel": lambda f, p: parquet.write_table(coded(f), p / "t.parquet"),
    "two parquet files": lambda f, p: [f[b : b + 150].to_parquet(p / f"t{b:03}.parquet") for b in (0, 150)],
    "arrow": lambda f, p: f.to_feather(p / "t.arrow"),
    "datasets": lambda f, p: saved_as_datasets(pa.table(f), p / "saved"),
    "datasets with a ClassLabel": lambda f, p: saved_as_datasets(coded(f), p / "saved"),
}
GIVEN: dict[str, Callable[[pd.DataFrame], Any]] = {
    "frame": lambda f: f,
    "arrow table": lambda f: pa.table(f),
    "arrays": lambda f: {name: f[name].to_numpy() for name in f},
}
COMMON: dict[str, Any] = {"label": "alarm", "client": "site", "test_fraction": 0.2, "partition": "natural"}


def model_of(workload: dict[str, Any], rounds: int = 2, clients: int = 4) -> Any:
    return fedfleet.run(
        fedfleet.Experiment(
            workload={"model": {"name": "mlp", "hidden": [4]}, **workload},
            method={"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            federation={"clients": clients, "cohort": 3, "rounds": rounds},  # pyright: ignore[reportArgumentType]
            engine={"backend": "local", "block": 1, "kernels": "torch"},  # pyright: ignore[reportArgumentType]
            tracking={"uri": "none"},  # pyright: ignore[reportArgumentType]
        )
    )


def in_each_form(frame: pd.DataFrame, folder: Path) -> dict[str, dict[str, Any]]:
    """Name of a form -> the workload that reads the rows in this form."""
    found = {}
    for number, (name, write) in enumerate(WRITERS.items()):
        place = folder / str(number)
        place.mkdir()
        write(frame, place)
        found[name] = {"name": "table", "path": str(place / "saved" if "datasets" in name else place), **COMMON}
    return {**found, **{name: fedfleet.table(give(frame), **COMMON) for name, give in GIVEN.items()}}


def test_the_same_rows_give_the_same_columns_in_each_form(frame, tmp_path):
    workloads = in_each_form(frame, tmp_path)
    digests = {}
    for name, workload in workloads.items():
        settings = {key: value for key, value in workload.items() if key not in ("name", "partition")}
        train, test = Table(**settings).load()
        columns = {f"{part}/{key}": rows for part, of in (("train", train), ("test", test)) for key, rows in of.items()}
        digests[name] = {key: digest_of(rows) for key, rows in sorted(columns.items())}
    assert all(found == digests["csv"] for found in digests.values()), digests


@pytest.mark.long
def test_the_same_rows_give_the_same_model_in_each_form(frame, tmp_path):
    models = {name: model_of(workload).model_sha256 for name, workload in in_each_form(frame, tmp_path).items()}
    assert len(set(models.values())) == 1, models


def test_a_table_of_python_is_kept_and_the_run_goes_on_from_its_folder(frame, tmp_path, cache):
    workload = fedfleet.table(frame, **COMMON)
    assert workload == fedfleet.table(frame.copy(), **COMMON)
    model_of(workload)
    experiment = fedfleet.Experiment(
        workload=workload, method="fedavg", federation={"clients": 4, "cohort": 2, "rounds": 1}
    )
    json.dumps(experiment.plain())
    Path(workload["path"]).unlink()
    with pytest.raises(ValueError, match=r"no such .*; give the data to fedfleet.table again, which writes it"):
        Table(path=workload["path"], label="alarm", test_fraction=0.2).check()
    fedfleet.table(frame, **COMMON)
    Table(path=workload["path"], label="alarm", client="site", test_fraction=0.2).check()


def test_pairs_of_arrays_keep_their_shapes():
    x, y = np.arange(24, dtype=np.uint8).reshape(4, 2, 3), np.array([3, 1, 3, 1])
    pairs = (x, y), TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), {"input": x, "label": y}
    for data in pairs:
        train, test = Table(**without_name(fedfleet.table(data, test=data))).load()
        assert np.array_equal(train["input"], x)
        assert train["input"].dtype == np.uint8
        assert test["label"].tolist() == [1, 0, 1, 0]
    with pytest.raises(TypeError, match=r"pair of arrays .* got generator; write fedfleet.table\("):
        fedfleet.table(iter_of_nothing())


def iter_of_nothing():
    yield from ()


def without_name(workload: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in workload.items() if key != "name"}


# --- labels -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("labels", "more", "names", "first"),
    [
        (["b", "a", "c"], {}, ("a", "b", "c"), 1),
        (["10", "9", "2"], {}, ("2", "9", "10"), 2),
        ([7, 3, 5], {}, ("3", "5", "7"), 2),
        ([2.0, 0.0, 1.0], {}, ("0", "1", "2"), 2),
        ([True, False, True], {}, ("false", "true"), 1),
        (["b", "a", "c"], {"class_names": ("c", "b", "a")}, ("c", "b", "a"), 1),
        ([1, 0, 1], {"class_names": (0, 1, 2)}, ("0", "1", "2"), 1),
    ],
)
def test_labels_become_classes(labels, more, names, first, tmp_path):
    file = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"x": np.arange(30.0), "label": labels * 10}), file)
    workload = Table(path=str(file), test=str(file), **more)
    assert workload.facts.names == names
    assert workload.classes == len(names)
    assert workload.load()[0]["label"][0] == first


@pytest.mark.parametrize(
    ("labels", "more", "words"),
    [
        ([0.5, 1, 2], {}, "got 10 rows with numbers that are not whole"),
        (["0.5", "1", "2"], {}, "must have classes in column label, .* got 0.5; set workload.task=regression"),
        (["a", "a", "a"], {}, "must have two classes or more in column label, got a; set workload.label"),
        (["a", "b", "c"], {"class_names": ("a", "b")}, r"must have one of workload.class_names .* a, b, got 'c'"),
    ],
)
def test_labels_that_are_no_classes(labels, more, words, tmp_path):
    file = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"x": np.arange(30.0), "label": labels * 10}), file)
    with pytest.raises(ValueError, match=words):
        Table(path=str(file), test=str(file), **more).load()


LOSSES = ["mse", *(pytest.param(name, marks=pytest.mark.long) for name in ("mae", "huber"))]


@pytest.mark.parametrize("loss", LOSSES)
def test_regressions_learn_and_say_how_well(loss, tmp_path):
    """Two targets that are linear in two inputs. The metrics are those of scikit-learn."""
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    random = np.random.default_rng(0)
    x = random.normal(size=(400, 2))
    y = x @ np.array([[1.0, -2.0], [0.5, 1.0]]) + 0.1 * random.normal(size=(400, 2))
    table = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "u": y[:, 0], "v": y[:, 1]})
    table.to_csv(tmp_path / "t.csv", index=False)
    spec = {"name": "table", "path": str(tmp_path / "t.csv"), "label": ["u", "v"], "task": "regression", "loss": loss}
    workload = {**spec, "test_fraction": 0.25, "model": "logistic"}
    result = model_of(workload, rounds=15)
    assert result.metrics["eval/r2"] > 0.95
    _, test = Table(path=spec["path"], label=("u", "v"), task="regression", test_fraction=0.25).load()
    found = test["input"] @ result.model["out.weight"].numpy().T + result.model["out.bias"].numpy()
    label = test["label"]
    assert result.metrics["eval/mse"] == pytest.approx(mean_squared_error(label, found), rel=1e-4)  # float32
    assert result.metrics["eval/mae"] == pytest.approx(mean_absolute_error(label, found), rel=1e-4)
    assert result.metrics["eval/r2"] == pytest.approx(r2_score(label, found), rel=1e-4)
    if loss != "huber":
        assert result.metrics["eval/loss"] == result.metrics[f"eval/{loss}"]
    with pytest.raises(
        fedfleet.ConfigError, match="partition: it deals rows by their classes, and these rows have none"
    ):
        model_of({**workload, "partition": "dirichlet"})


def test_targets_in_one_column_are_those_in_several(tmp_path):
    y = np.random.default_rng(0).normal(size=(40, 2))
    table = {"x": np.arange(40.0), "u": y[:, 0], "v": y[:, 1], "y": list(y)}
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    settings = {"path": str(tmp_path / "t.parquet"), "task": "regression", "test_fraction": 0.5, "input": "x"}
    one, several = (Table(**settings, label=label).load()[0]["label"] for label in ("y", ("u", "v")))
    assert np.array_equal(one, several)
    assert one.dtype == np.float32


def test_several_labels_of_a_row(tmp_path):
    """Lists of names, columns of marks and lists of marks of fixed size are the same. F1 is that of scikit-learn."""
    from sklearn.metrics import f1_score

    random = np.random.default_rng(0)
    x = random.normal(size=(300, 3))
    marks = (x + 0.3 * random.normal(size=x.shape) > 0).astype(np.uint8)
    names = [[name for name, mark in zip("abc", row, strict=True) if mark] for row in marks]
    columns = {f"x{j}": x[:, j] for j in range(3)} | {name: marks[:, j] for j, name in enumerate("abc")}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(marks.ravel()), 3)
    parquet.write_table(pa.table({**columns, "names": names, "marks": fixed}), tmp_path / "t.parquet")
    spec = {"path": str(tmp_path / "t.parquet"), "task": "multilabel", "test_fraction": 0.2}
    settings = {**spec, "input": ["x0", "x1", "x2"], "model": "logistic"}
    results = [
        model_of({"name": "table", **settings, "label": label}, rounds=20)
        for label in ("names", ["a", "b", "c"], "marks")
    ]
    assert len({result.model_sha256 for result in results}) == 1
    _, test = Table(**{**spec, "input": ("x0", "x1", "x2"), "label": "names"}).load()
    model = results[0].model
    taken = test["input"] @ model["out.weight"].numpy().T + model["out.bias"].numpy() > 0
    assert results[0].metrics["eval/f1"] == pytest.approx(f1_score(test["label"], taken, average="micro"))
    assert results[0].metrics["eval/exact"] == pytest.approx((test["label"] == taken).all(1).mean())
    assert results[0].metrics["eval/accuracy"] == pytest.approx((test["label"] == taken).mean())


# --- pictures and lists -----------------------------------------------------------------------------------------------
def test_a_folder_of_pictures_for_each_class(tmp_path):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (2, 2, 5, 4, 6, 3)).astype(np.uint8)  # part, class, picture
    for part, classes in zip(("train", "test"), pixels, strict=True):
        for name, images in zip(("dog", "cat"), classes, strict=True):
            (tmp_path / part / name).mkdir(parents=True)
            for number, image in enumerate(images):
                Image.fromarray(image).save(tmp_path / part / name / f"{number}.png")
    workload = Table(path=str(tmp_path))
    assert workload.facts == ((3, 4, 6), 2, ("cat", "dog"), 10)
    train, test = workload.load()
    expected = np.moveaxis(pixels[:, ::-1], -1, 3).reshape(2, 10, 3, 4, 6)
    assert np.array_equal(np.stack([train["input"], test["input"]]), expected)
    assert train["label"].tolist() == [0] * 5 + [1] * 5
    both = Table(path=str(tmp_path / "train"), test_fraction=0.5).load()
    assert sorted(map(bytes, (*both[0]["input"], *both[1]["input"]))) == sorted(map(bytes, expected[0]))
    (tmp_path / "train/bird").mkdir()
    with pytest.raises(ValueError, match=r"train/bird: found no pictures; missing \.png, "):
        Table(path=str(tmp_path)).load()


def test_audio_features_are_lists_of_equal_length(tmp_path):
    mel = np.random.default_rng(0).normal(size=(20, 4, 7)).astype(np.float32)
    rows = {"mel": pa.array(mel.tolist(), pa.list_(pa.list_(pa.float32()))), "label": ["up", "down"] * 10}
    parquet.write_table(pa.table(rows), tmp_path / "t.parquet")
    workload = Table(path=str(tmp_path / "t.parquet"), test_fraction=0.2)
    assert workload.shape == (4, 7)
    lines = [json.dumps({"mel": row.tolist(), "label": "u"}) for row in mel]
    (tmp_path / "t.jsonl").write_text("\n".join([*lines[:3], json.dumps({"mel": [[1]], "label": "u"})]))
    with pytest.raises(
        ValueError, match="must have lists of equal length in column mel, got one of 1 numbers in row 3 "
    ):
        Table(path=str(tmp_path / "t.jsonl"), test_fraction=0.2).load()


# --- what cannot be read ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    [
        ("a.xlsx", "", {}, r"found a file \.xlsx, .*; convert it: pandas.read_excel\('.*a.xlsx'\).to_parquet\("),
        ("a.npz", "", {}, r"found a file \.npz, .*; convert it: .*fedfleet.table\(\(f\['x'\], f\['y'\]\)\)"),
        ("a.json", '[{"a": 1, "label": 2}]', {}, r"JSON that is no object on each line.*lines=True\)"),
        ("a.csv", ",a,label\n0,1,x\n1,2,y\n", {}, r"one without a name, as pandas' index has; .*index=False"),
        ("a.csv", "a,b,label\n1,red,x\n2,blue,y\n", {}, r"got string in column b; .* pandas.get_dummies\(frame"),
        ("a.csv", "a,b\n1,2\n", {}, "label must name a column of .*, got 'label'; valid: a, b$"),
        (
            "a.csv",
            "a,b,alarm\n1,x,y\n",
            {"label": "alram"},
            r"^label must .*, got 'alram'; did you mean alarm\? valid: a, b, alarm$",
        ),
        (
            "a.csv",
            "a,b,site\n1,x,y\n",
            {"label": "b", "client": "sites"},
            r"^client .*; did you mean site\? valid: a, b, site$",
        ),
        ("a.csv", "a,label\n1,x\n2,y,3\n", {}, r"must be a whole table, .*Expected 2 columns, got 3"),
        ("a.csv", "a,label\n1,x\nb,y\n", {"input": ("a",)}, "(cannot be read .*invalid value 'b'|got string)"),
        ("a.csv", "a,label\n1,x\n,y\n", {}, "in every row of column a, got 1 row without a value, the first is row 1 "),
        (
            "a.csv",
            "a,label\n1,x\n2,\n",
            {},
            "must have a class in every row of column label, got 1 row without a value",
        ),
        ("a.csv", "a,a,label\n1,1,x\n", {}, r"must be a whole table, .*multiple columns named a"),
        ("a.csv", "a,label\n1,x\n2,y\n", {"test_fraction": 0.0}, "found rows without parts; missing test rows: set"),
        (
            "a.csv",
            "a,label\n1,x\n2,y\n",
            {"client": "who"},
            "client must name a column of .*, got 'who'; valid: a, label",
        ),
        ("notes.md", "hello", {}, r"found a file \.md, wanted CSV, JSON lines"),
    ],
)
def test_what_cannot_be_read_is_told_with_a_remedy(name, content, more, words, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words) as found:
        Table(path=str(tmp_path / name), **{"test_fraction": 0.5, **more}).load()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "arrow"])
def test_a_regression_of_texts_is_refused(form, frame, tmp_path):
    WRITERS[form](frame, tmp_path)
    settings = {"path": str(tmp_path), "task": "regression", "test_fraction": 0.5, "input": "a"}
    text = "^label must be numbers in a regression, got text in column alarm of .*; "
    with pytest.raises(ValueError, match=text + r"leave out workload\.task to learn classes$"):
        Table(**settings, label="alarm").load()
    with pytest.raises(ValueError, match=text + "leave that column out$"):
        Table(**settings, label=("b", "alarm")).load()


def test_folders_that_are_no_table(tmp_path):
    with pytest.raises(ValueError, match=r"path must name a file, a folder or a pattern .* no such .*none"):
        Table(path=str(tmp_path / "none"), test_fraction=0.5).check()
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(ValueError, match=r"found README.md; missing a table: CSV, JSON lines"):
        Table(path=str(tmp_path), test_fraction=0.5).check()
    for part in ("train", "validation"):
        (tmp_path / f"{part}.csv").write_text("a,label\n1,x\n2,y\n")
    with pytest.raises(ValueError, match=r"found train, validation; missing test rows: set workload.test to "):
        Table(path=str(tmp_path)).check()
    Table(path=str(tmp_path / "train.csv"), test=str(tmp_path / "validation.csv")).check()
    (tmp_path / "more.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"found files of several forms, .*; set workload.path to one"):
        Table(path=str(tmp_path), test_fraction=0.5).check()
    Table(path=str(tmp_path / "*.csv"), test_fraction=0.5).check()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"test": "b", "test_fraction": 0.5}, "only one of test and test_fraction may be set"),
        ({"loss": "mae"}, "loss goes with task: regression, got mae with task: classification"),
        ({"label": ("a", "b")}, "label must be one column in a classification"),
        ({"class_names": ("a",)}, "class_names must have two names or more"),
        ({"reshape": (0,)}, "reshape must have sides of 1 or more"),
    ],
)
def test_settings_that_do_not_go_together(more, words):
    with pytest.raises(ValueError, match=words):
        Table(path="a", **more)


# --- workers and earlier runs -----------------------------------------------------------------------------------------
def test_a_worker_without_the_file_can_build_the_network_from_the_settings(tmp_path):
    workload = Table(Logistic(), Dirichlet(), path=str(tmp_path / "none"), reshape=(3,), class_names=("a", "b"))
    assert pickle.loads(pickle.dumps(workload)).init(0)["out.weight"].shape == (2, 3)


@pytest.mark.parametrize("around", [None, "label_noise", "auc"])
def test_a_run_that_was_sent_needs_neither_the_file_nor_the_cache(around, frame, tmp_path, cache):
    """What the data say of the network goes to workers, whose machines may have none of them."""
    file = tmp_path / "rows.csv"
    frame.to_csv(file, index=False)
    own = {"name": "table", "path": str(file), **COMMON}
    workload = own if around is None else {"name": around, "of": own}
    federation = {"clients": 4, "cohort": 3, "rounds": 2}
    method = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    sent = pickle.dumps(prepare(experiment({"workload": workload, "method": method, "federation": federation}), "run"))
    file.unlink()
    shutil.rmtree(cache)
    run_spec = pickle.loads(sent)
    x = dict(run_spec.initial_model().items())
    batch = {"input": torch.zeros(5, 2), "label": torch.arange(5) % 2, "prior": torch.full((5,), 0.5)}
    assert run_spec.workload.losses(x, batch).shape == (5,)
    with pytest.raises(ConfigError, match=r"path must name a file, a folder or a pattern .* got no such .*rows\.csv"):
        run_spec.split()


def test_a_run_that_was_sent_finds_a_relative_path_in_another_folder(frame, tmp_path, monkeypatch):
    frame.to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.chdir(tmp_path)
    workload = Table(path="rows.csv", label="alarm", test_fraction=0.2)
    again = Table(path="rows.csv", label="alarm", test_fraction=0.2)
    facts = json.loads(json.dumps(workload.facts_of_data()))
    monkeypatch.chdir("/")
    again.take_facts(facts)
    assert len(again.load()[0]["label"]) == again.training_rows == 240


def test_runs_of_the_workload_parquet_go_on_as_tables():
    old = {"name": "parquet", "data_root": "data", "folder": "x", "shape": [4], "classes": 3, "label": "y"}
    assert today({"workload": {"name": "noisy", "of": old}})["workload"]["of"] == {
        **{"name": "table", "path": "data/x", "input": "input", "label": "y"},
        **{"reshape": [4], "class_names": ["0", "1", "2"]},
    }
