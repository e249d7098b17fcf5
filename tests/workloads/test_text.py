"""Texts and characters from the real files: words, vocabulary, padding, clients, GloVe; crops and flips of images."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.func import vmap

from fedfleet.engine.api import run
from fedfleet.engine.config.schema import experiment
from fedfleet.workloads import counted
from fedfleet.workloads.data.augment import crop, flip
from fedfleet.workloads.data.sentiment import Imdb, ParquetText, Sentiment140, Sst2, Yelp
from fedfleet.workloads.data.shakespeare import CHARACTERS, Shakespeare, coded
from fedfleet.workloads.data.text import OTHER, PAD, numbered, vocabulary_of, words
from fedfleet.workloads.models.recurrent import Lstm, Rnn
from fedfleet.workloads.partitions.natural import Natural

pytestmark = pytest.mark.usefixtures("cache")


def test_words_and_numbers():
    assert words("It's GOOD, isn't it?") == ["it's", "good", ",", "isn't", "it", "?"]
    known = vocabulary_of(["b b a", "a c"], 4)  # of a and b, two each, the first by alphabet; c is one too many
    assert known == {"a": 2, "b": 3}
    assert numbered(["b c a b", "", "a"], known, 3).tolist() == [
        [3, OTHER, 2],
        [OTHER, PAD, PAD],
        [2, PAD, PAD],
    ]


@pytest.mark.parametrize(
    ("kind", "train", "test", "clients"),
    [
        (Sst2, [29780, 37569], [428, 444], None),
        (Sentiment140, [7950, 8050], [177, 182], 15313),
        (Yelp, [1876, 5291], [450, 1322], 10),
        (Imdb, [1500, 1500], [500, 500], None),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_rows_and_classes(kind, train, test, clients, real_set):
    """The numbers of rows are those in the descriptions of the sets."""
    workload = kind(data_root=str(real_set(kind.folder).parent), vocabulary=500, length=16)
    columns = workload.load()
    assert [np.bincount(part["label"]).tolist() for part in columns] == [train, test]
    tokens = columns[0]["input"]
    assert tokens.shape[1] == 16
    assert (tokens[:, 0] != PAD).all()
    assert tokens.max() == 499
    assert len(np.unique(columns[0]["client"])) == clients if clients else "client" not in columns[0]


def test_a_text_model_learns_from_embeddings_and_ignores_padding(real_set):
    workload = Yelp(Rnn(8), Natural(), data_root=str(real_set("yelp").parent), vocabulary=200, length=12, embedding=5)
    split, p = workload.split(0, 10), workload.init(0)
    assert sorted(split.train) == ["input", "label"]
    assert sorted(split.client_index.sizes)[-1] == 4383  # restaurants
    assert p["embedding.weight"].shape == (200, 5)
    batch = {name: torch.from_numpy(rows[:6]) for name, rows in split.train.items()} | {"key": counted.key(0)}
    several = {name: value.expand(2, *value.shape) for name, value in p.items()}
    together = vmap(lambda p: workload.losses(p, batch))(several)
    assert torch.allclose(together[1], workload.losses(p, batch), atol=1e-6)
    longer = {**batch, "input": torch.nn.functional.pad(batch["input"], (0, 5))}
    assert torch.allclose(workload.losses(p, longer), workload.losses(p, batch), atol=1e-6)


def test_glove_fills_the_rows_of_known_words(tmp_path):
    texts = pa.table({"text": ["good good film", "bad film"], "label": [1, 0]})
    (tmp_path / "texts").mkdir()
    for part in ("train", "test"):
        parquet.write_table(texts, tmp_path / "texts" / f"{part}.parquet")
    (tmp_path / "glove.txt").write_text("film 1 2 3\nother 0 0 0\ngood 4 5 6\n")
    plain = ParquetText(Rnn(4), data_root=str(tmp_path), vocabulary=6, length=3, embedding=3)
    filled = ParquetText(
        Rnn(4), data_root=str(tmp_path), vocabulary=6, length=3, embedding=3, glove=str(tmp_path / "glove.txt")
    )
    table, before = filled.init(0)["embedding.weight"], plain.init(0)["embedding.weight"]
    assert table[2:4].tolist() == [[1, 2, 3], [4, 5, 6]]  # film and good, two each
    assert torch.equal(table[4:], before[4:])
    (tmp_path / "glove.txt").write_text("film 1 2\n")
    with pytest.raises(ValueError, match="vectors of 2 numbers, where embedding=3"):
        filled.init(0)


@pytest.fixture
def worded(tmp_path) -> ParquetText:
    """A vocabulary of six words, and a file with vectors for two of them."""
    texts = pa.table({"text": ["good good film", "bad film"] * 8, "label": [1, 0] * 8})
    (tmp_path / "texts").mkdir()
    for part in ("train", "test"):
        parquet.write_table(texts, tmp_path / "texts" / f"{part}.parquet")
    (tmp_path / "glove.txt").write_text("film 1 2 3\ngood 4 5 6\n")
    sizes = {"vocabulary": 6, "length": 3, "embedding": 3}
    root, glove = str(tmp_path), str(tmp_path / "glove.txt")
    return ParquetText(Rnn(4), data_root=root, glove=glove, embeddings="frozen", **sizes)


def test_frozen_vectors_are_the_files_and_no_part_of_the_model(worded, tmp_path):
    """Words 2 and 3 are film and good; bad, padding and others have no vector."""
    table = worded.network.module.embedding.table
    assert table.tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    p = worded.init(0)
    trained = replace(worded, embeddings="trained").init(0)
    assert set(trained) - set(p) == {"embedding.weight"}
    assert all(torch.equal(p[name], trained[name]) for name in p)
    (cached,) = (tmp_path / "cache/vectors").iterdir()
    (tmp_path / "glove.txt").touch()  # a new time of the file gives a new entry of the cache
    assert torch.equal(replace(worded).network.module.embedding.table, table)
    assert len(list((tmp_path / "cache/vectors").iterdir())) == 2
    assert cached.is_file()


def test_frozen_vectors_without_a_file_do_not_depend_on_the_seed(worded):
    drawn = replace(worded, glove=None)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        tables = [replace(drawn).network.module.embedding.table for _ in range(2)]
    assert torch.equal(*tables)
    assert float(tables[0].std()) == pytest.approx(1, abs=0.5)  # 18 numbers
    with pytest.raises(ValueError, match="embeddings must be trained or frozen"):
        replace(drawn, embeddings="fixed")
    with pytest.raises(ValueError, match="leave one of them out"):
        replace(worded, stand_in=10).init(0)


def test_frozen_vectors_on_ray_and_in_process(worded, ray_here):
    """Workers have the same vectors, and nothing that is sent contains them."""
    spec = {
        "name": "parquet_text",
        "model": {"name": "rnn", "hidden": 4},
        **{name: getattr(worded, name) for name in ("data_root", "glove", "embeddings", "vocabulary", "length")},
        "embedding": 3,
    }
    results = []
    for engine in ({"backend": "local", "dtype": "float64"}, {"backend": "ray", "workers": 1, "dtype": "float64"}):
        data = {
            "workload": spec,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {"clients": 3, "cohort": 2, "rounds": 2},
            "engine": engine,
            "tracking": {"uri": "none"},
        }
        results.append(run(experiment(data)))
    assert results[0].model_sha256 == results[1].model_sha256
    # Two layers of 4 cells on 3 and 4 inputs with two biases each, and 2 outputs; 8 bytes.
    numbers = 4 * (3 + 4 + 2) + 4 * (4 + 4 + 2) + 2 * (4 + 1)
    assert results[0].rows[0]["comm/bytes_up"] == 2 * 8 * numbers


@pytest.mark.parametrize(
    ("kind", "name", "content", "said"),
    [
        (Sst2, "SST-2/train.tsv", "sentence\tlabel\ngood \tone\n", r"train.tsv must be a whole file"),
        (Sst2, "SST-2/train.tsv", "good\t1\n", r"first line is"),
        (Sentiment140, "train_a.csv", '"4","1","date","q","user"\n', r"row 1 is not target"),
        (Sentiment140, "train_a.csv", '"4","1","date","q","user","text', r"train_a.csv must be a whole file"),
    ],
)
def test_damaged_files(kind, name, content, said, tmp_path):
    tests = {
        Sst2: ("SST-2/dev.tsv", "sentence\tlabel\nbad \t0\n"),
        Sentiment140: ("testdata.manual.2009.06.14.csv", ""),
    }
    for file, text in ((name, content), tests[kind]):
        path = tmp_path / kind.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        kind(data_root=str(tmp_path)).load()


@pytest.mark.parametrize("kind", [Sst2, Sentiment140, Yelp, Imdb, Shakespeare, ParquetText])
def test_missing_sets_say_what_is_wanted_where(kind, tmp_path):
    with pytest.raises(ValueError, match=rf"needs .* in {tmp_path}, got no such files; .*"):
        kind(data_root=str(tmp_path)).check()


def test_shakespeare_by_role(real_set):
    workload = Shakespeare(data_root=str(real_set("shakespeare").parent))
    split = workload.split(0, 100)
    assert split.train["input"].shape == (17_672, 80)
    assert split.test["input"].shape == (4_397, 80)
    assert (split.client_index.sizes.min(), split.client_index.sizes.max()) == (107, 616)
    text = "".join(CHARACTERS[c] for c in workload.load()[0]["input"][0])
    assert text.startswith("Now, Hal, what time of day is it, lad?")
    assert sum(value.numel() for value in workload.init(0).values()) == 1_093_199
    assert coded("a\nZ|é").tolist() == [CHARACTERS.index(c) for c in "a Z  "]


@pytest.mark.parametrize("model", [Lstm(hidden=8, layers=1), Rnn(hidden=8, layers=1)])
def test_a_blank_in_a_window_of_shakespeare_is_no_padding(model):
    """The blank is number 0, which is padding in texts of words; a network must read all 80 characters."""
    net = Shakespeare(model=model, embedding=8).build()
    window = torch.full((1, 80), 7)
    window[0, 3] = 0
    other = window.clone()
    other[0, 79] = 5
    assert not torch.equal(net(window), net(other))


def test_a_window_of_another_length(tmp_path):
    for part in ("train", "test"):
        path = tmp_path / "shakespeare" / part / "a.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"users": ["u"], "user_data": {"u": {"x": ["abc"], "y": ["d"]}}}))
    with pytest.raises(ValueError, match="a window of 3 characters"):
        Shakespeare(data_root=str(tmp_path)).load()
    path.write_text('{"users": ["u"]')
    (tmp_path / "shakespeare/train/a.json").write_text('{"users": ["u"]')
    with pytest.raises(ValueError, match=r"a.json must be a whole file"):
        Shakespeare(data_root=str(tmp_path)).load()


# --- crops and flips --------------------------------------------------------------------------------------------------
def test_crops_are_cuts_of_the_padded_image():
    x = torch.randint(1, 256, (300, 3, 8, 8), dtype=torch.uint8)
    out = crop(x, counted.key(0), pad=1)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    cuts = torch.stack([padded[:, :, i : i + 8, j : j + 8] for i in range(3) for j in range(3)])
    which = (cuts == out).flatten(2).all(-1)
    assert (which.sum(0) == 1).all()
    assert which.sum(1).min() > 15  # 300 / 9 = 33, deviation 5.4


def test_flips_are_half():
    x = torch.randint(0, 256, (1000, 1, 2, 3), dtype=torch.uint8)
    out = flip(x, counted.key(0))
    turned = (out == x.flip(-1)).flatten(1).all(-1)
    assert ((out == x).flatten(1).all(-1) | turned).all()
    assert abs(int(turned.sum()) - 500) < 80


def test_a_batch_is_varied_alike_alone_together_and_shorter():
    x, keys = torch.randint(0, 256, (4, 6, 3, 8, 8), dtype=torch.uint8), counted.key(0, torch.arange(4))
    for change in (crop, flip):
        together = vmap(change)(x, keys)
        for client in range(4):
            assert torch.equal(change(x[client], keys[client]), together[client])
            assert torch.equal(change(x[client, :2], keys[client]), together[client, :2])
        assert not torch.equal(change(x[0], keys[1]), together[0])
