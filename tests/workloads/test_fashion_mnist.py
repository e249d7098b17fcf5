"""FashionMNIST from its published files: packed or unpacked, complete or damaged, from a root that is never written."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfleet.workloads.data.fashion_mnist import PUBLISHED, FashionMnist
from fedfleet.workloads.files.cache import write_whole
from fedfleet.workloads.files.vision import torchvision_datasets

SET, FILES, RAW = PUBLISHED.folder, PUBLISHED.files, PUBLISHED.raw


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def real(real_set) -> str:
    return str(real_set(SET).parent)


@pytest.fixture
def copy(real, tmp_path) -> Path:
    """A data root that can be written to: links, and a copy of the packed labels of the test set."""
    raw = tmp_path / "data" / SET / RAW
    raw.mkdir(parents=True)
    for name in FILES:
        (raw / f"{name}.gz").symlink_to(Path(real, SET, RAW, f"{name}.gz").resolve())
    labels = raw / "t10k-labels-idx1-ubyte.gz"
    labels.unlink()
    shutil.copyfile(Path(real, SET, RAW, labels.name), labels)
    return tmp_path / "data"


def test_our_sums_are_torchvisions():
    assert dict(torchvision_datasets().FashionMNIST.resources) == {f"{k}.gz": v.md5 for k, v in FILES.items()}


def test_rows_and_classes(real, cache):
    before = sorted(path.name for path in Path(real, SET, RAW).iterdir())
    state = torch.get_rng_state()
    train, test = FashionMnist(data_root=real).load()
    assert torch.equal(torch.get_rng_state(), state)
    assert train["input"].shape == (60_000, 1, 28, 28)
    assert test["input"].shape == (10_000, 1, 28, 28)
    assert train["input"].dtype == np.uint8
    assert train["label"].dtype == np.int64
    assert np.bincount(train["label"]).tolist() == [6000] * 10
    assert np.bincount(test["label"]).tolist() == [1000] * 10
    assert train["input"].mean() / 255 == pytest.approx(0.2860, abs=1e-4)
    assert train["input"].std() / 255 == pytest.approx(0.3530, abs=1e-4)
    assert sorted(path.name for path in Path(real, SET, RAW).iterdir()) == before
    assert sorted(path.name for path in (cache / SET / RAW).iterdir()) == sorted(FILES)


def test_root_by_environment_and_one_folder_deeper(real, monkeypatch):
    monkeypatch.setenv("FEDFLEET_DATA", real)
    FashionMnist().check()
    FashionMnist(data_root=str(Path(real, SET))).check()


def test_unpacked_files_are_read_where_they_are(real, cache):
    folder = PUBLISHED.unpack(Path(real, SET))
    shutil.move(cache, cache.with_name("elsewhere"))
    assert len(FashionMnist(data_root=str(cache.with_name("elsewhere") / folder.name)).load()[1]["label"]) == 10_000
    assert not cache.exists()


def test_a_damaged_cache_is_repaired(real, cache):
    PUBLISHED.unpack(Path(real, SET))
    damaged = cache / SET / RAW / "t10k-labels-idx1-ubyte"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    assert len(FashionMnist(data_root=real).load()[1]["label"]) == 10_000


def test_two_processes_unpack_at_once(real, cache):
    code = "from pathlib import Path; from fedfleet.workloads.data.fashion_mnist import PUBLISHED; "
    code += f"PUBLISHED.unpack(Path({real!r}, {SET!r}))"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(300) for process in running] == [0, 0]
    assert {path.name: path.stat().st_size for path in (cache / SET / RAW).iterdir()} == {
        name: file.size for name, file in FILES.items()
    }


def test_no_root():
    with pytest.raises(ValueError, match="FEDFLEET_DATA"):
        FashionMnist().check()


def test_missing_files_are_named(copy, tmp_path):
    (copy / SET / RAW / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"needs the files t10k-labels-idx1-ubyte \(packed.*download=True"):
        FashionMnist(data_root=str(copy)).check()
    with pytest.raises(ValueError, match=r"needs the files train-images-idx3-ubyte, .*raw, got no such files"):
        FashionMnist(data_root=str(tmp_path / "nowhere")).check()


@pytest.mark.parametrize("act", ["check", "load"])
def test_a_truncated_packed_file(act, copy):
    labels = copy / SET / RAW / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:3000])
    with pytest.raises(
        ValueError, match=r"t10k-labels-idx1-ubyte.gz must be .* truncated .* 3000 bytes; .*download=True"
    ):
        getattr(FashionMnist(data_root=str(copy)), act)()


def test_a_truncated_unpacked_file(copy):
    labels = copy / SET / RAW / "t10k-labels-idx1-ubyte"
    labels.write_bytes(gzip.decompress(labels.with_name(labels.name + ".gz").read_bytes())[:-1])
    with pytest.raises(ValueError, match=r"truncated .* 10007 bytes"):
        FashionMnist(data_root=str(copy)).check()


def test_a_cache_that_cannot_be_written(real, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="set FEDFLEET_CACHE"):
        FashionMnist(data_root=real).load()


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "target", b"data")
    assert not list(tmp_path.iterdir())
