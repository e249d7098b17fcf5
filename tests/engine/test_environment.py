"""environment.json: the digests of the files that a run reads, and what a run that is continued elsewhere keeps."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedfleet
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs import environment as found_here
from fedfleet.engine.runs.environment import MANY, digests, environment, with_earlier
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.data.sentiment import Sst2


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def two_tables(folder: Path) -> dict[str, Path]:
    """train.parquet and test.parquet with 8 rows, in the folder "table" of a data root."""
    (folder / "table").mkdir(parents=True)
    rows = pa.table({"x": np.arange(8.0), "label": np.arange(8) % 2})
    files = {f"table/{part}.parquet": folder / f"table/{part}.parquet" for part in ("train", "test")}
    for path in files.values():
        pq.write_table(rows, path)
    return files


@pytest.fixture
def data(tmp_path: Path) -> tuple[dict[str, Path], dict[str, object]]:
    files = two_tables(tmp_path / "root")
    workload = {"name": "table", "path": str(tmp_path / "root/table"), "model": "logistic"}
    return files, {
        "workload": {"name": "noisy", "of": workload},
        "method": "fedavg",
        "federation": {"clients": 2, "cohort": 2, "rounds": 1},
        "engine": {"backend": "local", "block": 1, "kernels": "torch"},
        "tracking": {"uri": "none"},
    }


def test_a_run_records_the_digests_of_its_data(data, tmp_path):
    files, config = data
    fedfleet.run(experiment(config), tmp_path / "run")
    recorded = json.loads((tmp_path / "run/environment.json").read_text())
    assert recorded["data"] == {name: sha256(path) for name, path in files.items()}
    assert recorded["threads"] == 1
    assert recorded["cards"] == []
    assert recorded["machine"]


def test_other_content_has_another_digest(data, tmp_path):
    files, config = data
    before = environment(prepare(experiment(config), "one"))["data"]
    changed = files["table/train.parquet"]
    pq.write_table(pa.table({"x": np.arange(9.0), "label": np.arange(9) % 2}), changed)
    after = environment(prepare(experiment(config), "two"))["data"]
    assert before.keys() == after.keys()
    assert before["table/test.parquet"] == after["table/test.parquet"]
    assert after["table/train.parquet"] == sha256(changed) != before["table/train.parquet"]


def test_word_vectors_are_data(tmp_path):
    (tmp_path / "sst2/SST-2").mkdir(parents=True)
    paths = [tmp_path / "sst2/SST-2" / name for name in ("train.tsv", "dev.tsv")]
    for path in (*paths, tmp_path / "v.txt"):
        path.write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    found = Sst2(data_root=str(tmp_path), glove=str(tmp_path / "v.txt")).data_files()
    assert found == {"sst2/train.tsv": paths[0], "sst2/dev.tsv": paths[1], "word vectors": tmp_path / "v.txt"}
    assert Sst2(stand_in=8).data_files() == {}


def test_many_files_have_one_digest(tmp_path):
    files = {}
    for number in range(MANY + 1):
        files[f"{number}"] = tmp_path / f"{number}"
        files[f"{number}"].write_text("x")
    (only,) = digests(files).items()
    assert only[0] == f"{MANY + 1} files, their names and sizes"
    files["0"].write_text("xx")
    assert digests(files)[only[0]] != only[1]


def test_a_large_file_is_read_once_by_all_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(found_here, "LARGE", 4)
    read: list[Path] = []
    monkeypatch.setattr(found_here, "sha256_of_file", lambda path: read.append(path) or sha256(path))
    large, small = tmp_path / "large", tmp_path / "small"
    for path, content in ((large, "large"), (small, "so")):
        path.write_text(content)
        os.utime(path, (1e9, 1e9))
    for _ in range(2):
        found_here.digest_of.cache_clear()  # as in another process
        assert digests({"large": large, "small": small}) == {"large": sha256(large), "small": sha256(small)}
    assert read == [large, small, small]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"gone must be readable, got No such file"):
        digests({"a": tmp_path / "gone"})


def test_a_continued_run_keeps_what_was_recorded_before(tmp_path):
    file = tmp_path / "environment.json"
    for commit in ("a", "a", "b", "c"):
        file.write_text(json.dumps(with_earlier({"commit": commit}, file)))
    assert json.loads(file.read_text()) == {"commit": "c", "before": [{"commit": "a"}, {"commit": "b"}]}
    file.write_text("damaged")
    assert with_earlier({"commit": "c"}, file) == {"commit": "c"}
