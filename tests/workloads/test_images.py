"""Image sets from the real files in every published layout; messages for damaged and missing files."""

from __future__ import annotations

import gzip
import io
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedfleet.workloads.data.cifar import Cifar10, Cifar100
from fedfleet.workloads.data.femnist import Femnist
from fedfleet.workloads.data.mnist import WRITERS, Mnist
from fedfleet.workloads.data.svhn import Svhn
from fedfleet.workloads.data.tiny_imagenet import TinyImagenet
from fedfleet.workloads.files import cache as caching
from fedfleet.workloads.files.vision import torchvision_datasets
from fedfleet.workloads.partitions.natural import Natural

pytestmark = pytest.mark.usefixtures("cache")


def first_rows(folder: Path, target: Path, rows: int) -> None:
    """The first rows of the Parquet files of a set."""
    target.mkdir(parents=True)
    for path in folder.glob("*.parquet"):
        parquet.write_table(
            next(parquet.ParquetFile(path).iter_batches(rows)).to_pandas().pipe(pa.Table.from_pandas),
            target / path.name,
        )


@pytest.fixture
def cifar(real_set, tmp_path) -> Path:
    first_rows(real_set("cifar10"), tmp_path / "data/cifar10", 60)
    return tmp_path / "data"


# --- CIFAR ------------------------------------------------------------------------------------------------------------
def test_cifar10_from_parquet(cifar):
    workload = Cifar10(data_root=str(cifar))
    workload.check()
    train, test = workload.load()
    assert train["input"].shape == test["input"].shape == (60, 3, 32, 32)
    assert train["input"].dtype == np.uint8
    # The published first labels (frog, truck, truck, deer, automobile) and first bytes of the first batch.
    assert train["label"][:5].tolist() == [6, 9, 9, 4, 1]
    assert train["input"][0, :, 0, 0].tolist() == [59, 62, 63]
    assert test["label"][:5].tolist() == [3, 8, 8, 0, 6]


def as_batches(columns: dict, folder: Path) -> None:
    """The published layout, five training batches, pickled as Python 2 did: protocol 2."""
    folder.mkdir(parents=True)
    rows = np.array_split(np.arange(len(columns["label"])), 5)
    for name, own in [*((f"data_batch_{i + 1}", rows[i]) for i in range(5)), ("test_batch", rows[0])]:
        batch = {
            b"data": columns["input"][own].reshape(len(own), 3072),
            b"labels": columns["label"][own].tolist(),
            b"filenames": [b"a.png"] * len(own),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def test_cifar10_from_batches_and_from_their_archive(cifar, tmp_path):
    train = Cifar10(data_root=str(cifar)).load()[0]
    as_batches(dict(train), tmp_path / "batches/cifar-10-batches-py")
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "batches/cifar-10-batches-py", "cifar-10-batches-py")
    for root in (tmp_path / "batches", tmp_path):
        again, test = Cifar10(data_root=str(root)).load()
        assert np.array_equal(again["input"], train["input"])
        assert np.array_equal(again["label"], train["label"])
        assert len(test["label"]) == 12


class Malice:
    def __reduce__(self):
        return eval, ("exit('a pickle must run nothing')",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({"data": Malice(), "labels": []}, 2), "names __builtin__.eval, which no array needs"),
        (pickle.dumps({"data": np.array([object()]), "labels": [1]}, 2), "it names|numbers of type"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 2),
            "does not hold 3072 bytes and a label for each row",
        ),
        (pickle.dumps([1, 2], 2), "a list, not a dictionary"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}, 2)[:4000], "truncated"),
    ],
    ids=["code", "objects", "lengths", "list", "short"],
)
def test_a_batch_runs_nothing_and_says_what_is_wrong(content, words, cifar, tmp_path):
    as_batches(dict(Cifar10(data_root=str(cifar)).load()[0]), tmp_path / "cifar-10-batches-py")
    path = tmp_path / "cifar-10-batches-py/data_batch_3"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data_batch_3 must be a whole file.*{words}.*fetch it again"):
        Cifar10(data_root=str(tmp_path)).load()


def test_cifar100_from_the_published_archive(real_set):
    train, test = Cifar100(data_root=str(real_set("cifar100").parent)).load()
    assert train["input"].shape == (8000, 3, 32, 32)
    assert np.bincount(train["label"]).tolist() == [80] * 100
    assert np.bincount(test["label"]).tolist() == [20] * 100
    assert train["label"][:5].tolist() == [19, 29, 0, 11, 1]  # of the published training file


def test_a_truncated_archive(real_set, tmp_path):
    archive = real_set("cifar100") / "cifar-100-python.tar.gz"
    (tmp_path / archive.name).write_bytes(archive.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"cifar-100-python.tar.gz must be a whole file"):
        Cifar100(data_root=str(tmp_path)).load()


def test_a_truncated_parquet_file(cifar):
    path = next((cifar / "cifar10").glob("train*"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"train-.*parquet must be a whole file, got a truncated"):
        Cifar10(data_root=str(cifar)).check()


def test_a_picture_that_cannot_be_decoded_or_has_another_size(cifar, tmp_path):
    path = next((cifar / "cifar10").glob("train*"))
    whole = parquet.read_table(path)
    for image, words in ((b"RIFFxxxx", "picture 0 of .* cannot be decoded"), (None, r"must have shape \(3, 64, 64\)")):
        if image is None:
            shutil.copy(next((cifar / "cifar10").glob("test*")), tmp_path / "val.parquet")
            parquet.write_table(whole, tmp_path / "train.parquet")
            workload = TinyImagenet(data_root=str(tmp_path))
        else:
            images = [image, *whole["image"].to_pylist()[1:]]
            parquet.write_table(pa.table({"image": images, "label": whole["label"]}), path)
            workload = Cifar10(data_root=str(cifar))
        with pytest.raises(ValueError, match=words):
            workload.load()


# --- the cache --------------------------------------------------------------------------------------------------------
def test_the_second_start_decodes_nothing(cifar, cache, monkeypatch):
    first = Cifar10(data_root=str(cifar)).load()
    monkeypatch.setattr(Cifar10, "decode", lambda *a: pytest.fail("decoded again"))
    again = Cifar10(data_root=str(cifar)).load()
    for one, other in zip(first, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in ("input", "label"))
    assert [path.name[0] for path in (cache / "cifar10").iterdir()] != ["."]


def test_other_files_are_decoded_anew_and_a_damaged_entry_too(cifar, cache):
    workload = Cifar10(data_root=str(cifar))
    workload.load()
    path = next((cifar / "cifar10").glob("train*"))
    parquet.write_table(parquet.read_table(path).slice(0, 30), path)
    assert len(workload.load()[0]["label"]) == 30
    assert len(list((cache / "cifar10").iterdir())) == 2
    for entry in (cache / "cifar10").glob("*/train/input.npy"):
        entry.write_bytes(entry.read_bytes()[:1000])
    assert len(workload.load()[0]["label"]) == 30


def test_two_may_keep_the_same_entry(tmp_path):
    splits = tuple({"input": np.zeros((2, 3)), "label": np.arange(2)} for _ in range(2))
    for _ in range(2):
        caching.keep(tmp_path / "entry", splits)  # pyright: ignore[reportArgumentType]
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["entry"]


@pytest.mark.slow
def test_all_of_cifar10_starts_in_two_seconds(data_root):
    import time

    train, test = Cifar10(data_root=data_root).load()
    assert np.bincount(test["label"]).tolist() == [1000] * 10
    begin = time.process_time()  # processor time, since other work may run beside this
    again = Cifar10(data_root=data_root).load()
    assert time.process_time() - begin < 2
    assert np.array_equal(again[0]["input"], train["input"])


# --- others -----------------------------------------------------------------------------------------------------------
def test_tiny_imagenet_from_parquet_and_from_its_folder(real_set, tmp_path):
    first_rows(real_set("tiny_imagenet"), tmp_path / "data/tiny_imagenet", 30)
    rows = parquet.read_table(tmp_path / "data/tiny_imagenet/train.parquet").to_pylist()
    top = tmp_path / "folder/tiny-imagenet-200"
    lines = []
    (top / "val/images").mkdir(parents=True)
    for name in ("n01443537", "n01629819"):
        (top / "train" / name / "images").mkdir(parents=True)
    for i, row in enumerate(rows):
        name = ("n01443537", "n01629819")[i % 2]  # two classes, whatever they show
        (top / "train" / name / "images" / f"{name}_{i:02}.JPEG").write_bytes(row["image"])
        (top / "val/images" / f"val_{i:02}.JPEG").write_bytes(row["image"])
        lines.append(f"val_{i:02}.JPEG\t{name}\t0\t0\t62\t62")
    (top / "val/val_annotations.txt").write_text("\n".join(lines))
    train, _ = TinyImagenet(data_root=str(tmp_path / "data")).load()
    again, test = TinyImagenet(data_root=str(tmp_path / "folder")).load()
    assert train["input"].shape == (30, 3, 64, 64)
    assert np.array_equal(test["input"], train["input"])
    assert test["label"].tolist() == [0, 1] * 15
    assert again["label"].tolist() == [0] * 15 + [1] * 15
    assert np.array_equal(again["input"][:15], train["input"][::2])
    (top / "val/val_annotations.txt").write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match=r"no known class for val_00.JPEG"):
        TinyImagenet(data_root=str(tmp_path / "folder")).load()


@pytest.fixture
def mnist(real_set) -> str:
    return str(real_set("mnist").parent)


def test_mnist_by_writer(mnist):
    split = Mnist(partition=Natural(minimum=100), data_root=mnist).split(0, 20)
    assert split.train["input"].shape == (60_000, 1, 28, 28)
    assert sorted(split.train) == ["input", "label"]
    assert np.bincount(split.test["label"]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    train, _ = Mnist(data_root=mnist).load()
    sizes = np.unique(train["client"], return_counts=True)[1]
    assert (len(sizes), sizes.min(), int(np.median(sizes)), sizes.max()) == (539, 19, 116, 131)
    for rows in np.split(split.client_index.rows, split.client_index.offsets[1:-1]):
        (writer,) = np.unique(train["client"][rows])
        assert len(rows) == (train["client"] == writer).sum() >= 100


def test_mnist_without_writers_and_with_other_ones(mnist, tmp_path):
    place = tmp_path / "mnist"
    place.mkdir()
    (place / "MNIST").symlink_to(Path(mnist, "mnist/MNIST").resolve())
    with pytest.raises(ValueError, match="must have a column 'client', got the columns input, label"):
        Mnist(partition=Natural(), data_root=str(tmp_path)).split(0, 10)
    path = place / WRITERS
    path.parent.mkdir(parents=True)
    data = gzip.decompress(Path(mnist, "mnist", f"{WRITERS}.gz").read_bytes())
    for damaged, words in ((data[:-4], "whole file"), (data[:12] + data[44:] + data[12:44], "the labels of MNIST")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=words):
            Mnist(data_root=str(tmp_path)).load()


def test_svhn_through_torchvision(tmp_path, monkeypatch):
    import hashlib

    from scipy.io import savemat

    rng = np.random.default_rng(0)
    sums = {}
    for part, rows in (("train", 12), ("test", 4)):
        path = tmp_path / f"{part}_32x32.mat"
        labels = (np.arange(rows) % 10 + 1).astype(np.uint8)[:, None]  # 10 stands for the digit 0
        savemat(path, {"X": rng.integers(0, 256, (32, 32, 3, rows), dtype=np.uint8), "y": labels})
        sums[part] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision_datasets().SVHN, "split_list", sums)
    train, test = Svhn(data_root=str(tmp_path)).load()
    assert train["input"].shape == (12, 3, 32, 32)
    assert train["label"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert len(test["label"]) == 4
    (tmp_path / "test_32x32.mat").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"test_32x32.mat must be a whole file"):
        Svhn(data_root=str(tmp_path)).load()


@pytest.mark.parametrize("kind", [Cifar10, Cifar100, Svhn, TinyImagenet, Femnist], ids=lambda kind: kind.__name__)
def test_missing_sets_say_what_is_wanted_where(kind, tmp_path):
    with pytest.raises(ValueError, match=rf"{kind.folder} needs .* in {tmp_path}, got no such files; .*"):
        kind(data_root=str(tmp_path)).check()
    with pytest.raises(ValueError, match="set one of them to a folder with"):
        kind().check()


def test_femnist_in_leafs_form(tmp_path):
    import json

    pixels = [(np.arange(784) % 256 / 255).tolist()] * 3
    for part in ("train", "test"):
        (tmp_path / "femnist" / part).mkdir(parents=True)
        data = {
            "users": ["b", "a"],
            "user_data": {"a": {"x": pixels[:1], "y": [61]}, "b": {"x": pixels, "y": [1, 2, 3]}},
        }
        (tmp_path / "femnist" / part / "all.json").write_text(json.dumps(data))
    train, _ = Femnist(data_root=str(tmp_path)).load()
    assert train["client"].tolist() == [1, 1, 1, 0]
    assert train["label"].tolist() == [1, 2, 3, 61]
    assert np.array_equal(train["input"][0].reshape(-1), np.arange(784) % 256)


@pytest.mark.parametrize("labels", [["cat"], [None], [0.5]], ids=["texts", "empty", "halves"])
def test_labels_that_are_no_whole_numbers(cifar, labels):
    path = next((cifar / "cifar10").glob("train*"))
    whole = parquet.read_table(path)
    parquet.write_table(pa.table({"image": whole["image"], "label": labels * len(whole)}), path)
    with pytest.raises(ValueError, match=r"train.* must have whole numbers in .*column label, got (string|.* rows w)"):
        Cifar10(data_root=str(cifar)).load()


def test_labels_beyond_the_classes(cifar):
    path = next((cifar / "cifar10").glob("train*"))
    whole = parquet.read_table(path)
    label = pa.array(np.full(len(whole), 10))
    parquet.write_table(pa.table({"image": whole["image"], "label": label}), path)
    with pytest.raises(ValueError, match=r"0 <= label < 10 must hold, got labels 10 to 10 in the train files"):
        Cifar10(data_root=str(cifar)).load()


def test_pictures_are_read_as_bytes_of_png(tmp_path):
    from PIL import Image

    from fedfleet.workloads.data.images import picture

    file = io.BytesIO()
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(file, "PNG")
    assert picture(file.getvalue(), (1, 3, 4), "here").reshape(-1).tolist() == list(range(12))
