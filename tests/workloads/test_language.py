"""The small language model, and texts as windows of characters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from fedfleet.engine import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.workloads.data.characters import Characters, tokens_of, windows_of
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.models.dropout import Dropout
from fedfleet.workloads.models.gpt import Gpt
from fedfleet.workloads.objectives import NextToken
from fedfleet.workloads.stateless import Stateless, parameters_of
from tests.workloads.test_adapters import close, wave

GOLDEN = json.loads((Path(__file__).parents[1] / "reference/gpt.json").read_text())
"""Values of an implementation in numpy that knows none of this code."""


# --- the model --------------------------------------------------------------------------------------------------------
def golden_tensors(network: nn.Module) -> dict[str, torch.Tensor]:
    """Sines for the tensors in their order, around 1 for scales."""
    parameters = {name: tuple(value.shape) for name, (value, _) in parameters_of(network).items()}
    return {
        name: wave(shape, j, 0.4) if len(shape) > 1 else 1 + wave(shape, j, 0.1)
        for j, (name, shape) in enumerate(parameters.items())
    }


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden['positions']}-{golden['norm']}")
def test_the_model_has_the_golden_values(golden: dict[str, Any]):
    network = Gpt(8, 2, 2, positions=golden["positions"], norm=golden["norm"]).build((6,), 7)
    p, ids, target = golden_tensors(network), torch.tensor(golden["ids"]), torch.tensor(golden["target"])
    assert sum(value.numel() for value in p.values()) == golden["numbers"]
    logits = Stateless(network)(p, ids)
    close(logits[0, -1], golden["logits_first_row_last_place"])
    close(NextToken(7).losses(logits, target), np.mean(golden["loss"], 1))
    report = NextToken(7).report(logits, target)
    close(report["loss"].mean(), golden["mean"])
    summary = NextToken(7).summary({"loss": float(report["loss"].mean())}, {})
    assert summary["perplexity"] == pytest.approx(golden["perplexity"], rel=1e-9)


@pytest.mark.parametrize("settings", [{"positions": "rope", "norm": "rms", "kv_heads": 2, "tied": False}])
def test_clients_at_once_are_clients_alone(settings: dict[str, Any]):
    """TOLERANCE: products of 16 terms in float64."""
    network = Gpt(16, 2, 4, **settings).build((5,), 9).double()
    p = {name: torch.randn(3, *value.shape, dtype=torch.float64) for name, (value, _) in parameters_of(network).items()}
    call, ids = Stateless(network), torch.randint(9, (3, 2, 5))
    together = torch.func.vmap(call)(p, ids)
    for client in range(3):
        alone = call({name: value[client] for name, value in p.items()}, ids[client])
        torch.testing.assert_close(together[client], alone, rtol=1e-12, atol=1e-12)


def test_dropout_of_the_model_draws_from_the_key():
    """In training alone, for an example the same whatever is beside it, and without bias: the mean over keys of the
    numbers that the layers of dropout give is what they are given, within five standard errors."""
    network = Gpt(16, 2, 2, dropout=0.25).build((5,), 9).double()
    p = {name: torch.randn(value.shape, dtype=torch.float64) for name, (value, _) in parameters_of(network).items()}
    call, ids, key = Stateless(network), torch.randint(9, (3, 5)), torch.tensor(7)
    first = call(p, ids, key)
    assert torch.equal(first, call(p, ids, key))
    assert torch.equal(call(p, ids), call({**p}, ids))
    assert not torch.allclose(first, call(p, ids, torch.tensor(8)))
    assert not torch.allclose(first, call(p, ids))
    torch.testing.assert_close(call(p, ids[:2], key), first[:2], rtol=1e-12, atol=1e-12)
    layers = [part for part in network.modules() if isinstance(part, Dropout)]
    assert [part.rate for part in layers] == [0.25] * 7  # the embeddings, and three in each of two blocks
    plain = Gpt(16, 2, 2).build((5,), 9).double()
    assert torch.equal(Stateless(plain)(p, ids, key), call(p, ids))
    layers[0].key = key
    kept = layers[0](torch.ones(1, 40_000)) > 0
    assert abs(float(kept.double().mean()) - 0.75) < 5 * math.sqrt(0.25 * 0.75 / 40_000)


def test_clients_of_a_block_drop_what_they_drop_alone():
    network = Gpt(16, 1, 2, dropout=0.5).build((5,), 9).double()
    p = {name: torch.randn(value.shape, dtype=torch.float64) for name, (value, _) in parameters_of(network).items()}
    call, ids, keys = Stateless(network), torch.randint(9, (3, 2, 5)), torch.arange(3)
    together = torch.func.vmap(call, (None, 0, 0))(p, ids, keys)
    for client in range(3):
        torch.testing.assert_close(together[client], call(p, ids[client], keys[client]), rtol=1e-12, atol=1e-12)


def test_a_place_sees_none_behind_it():
    network = Gpt(16, 1, 2, positions="rope").build((6,), 9)
    ids = torch.randint(9, (1, 6))
    other = torch.cat([ids[:, :4], (ids[:, 4:] + 1) % 9], 1)
    first, second = network(ids), network(other)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4:], second[:, 4:])


def test_common_heads_are_heads_that_are_equal():
    """Key and value heads that are repeated give what a model with as many equal heads gives."""
    few, many = (Gpt(16, 1, 4, kv_heads=heads).build((5,), 9) for heads in (2, None))
    state = few.state_dict()
    for name in ("blocks.0.k.weight", "blocks.0.v.weight"):
        state[name] = state[name].view(2, 4, 16).repeat_interleave(2, 0).reshape(16, 16)
    many.load_state_dict(state)
    ids = torch.randint(9, (2, 5))
    torch.testing.assert_close(few(ids), many(ids))


def test_the_size_of_the_models_of_studies():
    network = Gpt(96, 3, 3).build((64,), 97)
    assert sum(value.numel() for value in network.parameters()) == 347_904
    stds = {name: float(value.detach().std()) for name, value in network.named_parameters() if value.ndim > 1}
    for name, std in stds.items():
        wanted = 0.02 / math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 0.02
        assert std == pytest.approx(wanted, rel=0.05), name


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Gpt(depth=0), "depth >= 1 must hold, got depth=0"),
        (lambda: Gpt(10, heads=4), "heads must divide width, got width=10, heads=4"),
        (lambda: Gpt(16, heads=4, kv_heads=3), "kv_heads must divide heads, got heads=4, kv_heads=3"),
        (lambda: Gpt(12, heads=4, positions="rope"), "rope needs heads of even width, got width=12, heads=4"),
        (lambda: Gpt(dropout=1.0), "0 <= dropout < 1 must hold, got dropout=1"),
        (lambda: Gpt(theta=1.0), "1 < theta < infinity must hold, got theta=1"),
        (lambda: Gpt().build((1, 8, 8), 10), "gpt needs tokens"),
    ],
)
def test_settings_of_the_model_that_mean_nothing_are_refused(make: Callable[[], object], told: str):
    with pytest.raises(ValueError, match=told):
        make()


# --- texts ------------------------------------------------------------------------------------------------------------
def test_characters_have_their_numbers():
    assert tokens_of(" ~\nA\r\n\tä€").tolist() == [2, 96, 1, 35, 1, 2, 2, 2, 0]
    assert tokens_of("").tolist() == [0]


@pytest.mark.parametrize("length", [1, 3, 4, 9, 10])
def test_windows_cover_a_text_once(length: int):
    """Every token but the first is a label in one window, as far as windows are full."""
    tokens = np.arange(10)
    windows = windows_of(tokens, length)
    labels = windows[:, 1:].reshape(-1)
    assert labels.tolist() == tokens[1 : len(labels) + 1].tolist()
    assert windows[:, :-1].reshape(-1).tolist() == tokens[: len(labels)].tolist()
    assert len(labels) == 9 // length * length


ROLES = {
    "hamlet": "To be, or not to be: that is the question. " * 6,
    "ghost": "Adieu, adieu! Remember me. " * 8,
    "no": "x",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = [
        {"user": name, "line": line, "kept": part}
        for part in ("train", "test")
        for name, text in ROLES.items()
        for line in (text, text.upper())
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "roles.parquet")
    (tmp_path / "play.txt").write_text("".join(ROLES.values()) * 3)
    return tmp_path


def test_the_texts_of_clients_are_theirs(files: Path):
    workload = Characters(
        Gpt(8, 1, 1), path=str(files / "roles.parquet"), length=16, text="line", client="user", split_column="kept"
    )
    split = workload.split(0, 2)
    held = split.train["held_out"]
    assert held.sum() == len(split.test["label"])
    for client in range(2):
        rows = split.client_index.rows[split.client_index.offsets[client] : split.client_index.offsets[client + 1]]
        own = sorted(split.train["input"][rows][~held[rows]].tolist())
        wanted = [windows_of(tokens_of(f"{text}\n{text.upper()}"), 16)[:, :-1].tolist() for text in ROLES.values()]
        assert own in [sorted(each) for each in wanted]


def test_the_end_of_a_text_is_its_test(files: Path):
    text = (files / "play.txt").read_text()
    workload = Characters(path=str(files / "play.txt"), length=10, test_fraction=0.2)
    train, test = workload.load()
    cut = round(0.8 * len(text))
    for columns, part in ((train, text[:cut]), (test, text[cut:])):
        assert np.array_equal(columns["input"], windows_of(tokens_of(part), 10)[:, :-1])
        assert np.array_equal(columns["label"], windows_of(tokens_of(part), 10)[:, 1:])
    assert "held_out" not in train


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"path": "none.txt"}, "path must be a file, got .*none.txt; give a .txt or .parquet file"),
        (
            {"path": "play.txt", "client": "user"},
            "client and split_column are columns of a Parquet file, got .*play.txt",
        ),
        ({"path": "roles.parquet"}, r"roles.parquet must have the columns \['text'\], got \['user', 'line', 'kept'\]"),
        ({"path": "play.txt", "length": 5000}, "play.txt must have a text of 5001 characters or more"),
        (
            {"path": "play.txt", "length": 400},
            "play.txt has no test text of 401 characters; raise test_fraction or lower length",
        ),
        ({"path": "play.txt", "length": 0}, "length >= 1 must hold, got length=0"),
        ({"path": "play.txt", "test_fraction": 1.0}, "0 < test_fraction < 1 must hold, got test_fraction=1.0"),
    ],
)
def test_texts_that_do_not_fit_are_refused(settings: dict[str, Any], told: str, files: Path):
    def load() -> None:
        workload = Characters(**{**settings, "path": str(files / settings["path"])})
        workload.check()
        workload.load()

    with pytest.raises(ValueError, match=told):
        load()


# --- runs -------------------------------------------------------------------------------------------------------------
def small(path: Path, **workload: Any) -> Experiment:
    model = {"name": "gpt", "width": 16, "depth": 1, "heads": 2}
    return experiment(
        {
            "workload": {"name": "characters", "path": str(path), "length": 16, "model": model, **workload},
            "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}},
            "federation": {"clients": 2, "cohort": 2, "rounds": 2, "local": {"steps": 2, "batch": 4}},
            "engine": {"backend": "local", "block": 2, "dtype": "float64"},
            "tracking": {"uri": "none"},
        }
    )


def test_a_language_model_is_trained_and_then_adapted(files: Path):
    """From a text, then with adapters on the texts of clients, whose losses are recorded."""
    base = run(small(files / "play.txt", partition="contiguous"), files / "base")
    assert base.metrics["eval/perplexity"] == pytest.approx(math.exp(base.metrics["eval/loss"]))
    assert base.metrics["eval/loss"] < math.log(97)
    columns = {"text": "line", "client": "user", "split_column": "kept"}
    lora = {"name": "lora", "rank": 2, "weights": str(files / "base/model.safetensors")}
    adapted = run(small(files / "roles.parquet", **columns, adapter=lora))
    assert {name for name in adapted.model if "lora" in name} == {
        f"blocks.0.{layer}.lora_{factor}" for layer in "qv" for factor in "ab"
    }
    assert adapted.rows[-1]["comm/bytes_up"] == 2 * 8 * 2 * 2 * (16 + 16)
    for name, value in base.model.items():
        assert torch.equal(adapted.model[name], value.float().double()) or torch.equal(adapted.model[name], value)


def test_all_weights_of_a_trained_model_are_trained_further(files: Path):
    """The file takes the place of the draws, with an adapter too, and counts as a file that the run reads."""
    base = run(small(files / "play.txt", partition="contiguous"), files / "base")
    path = files / "base/model.safetensors"
    tuned = Characters(Gpt(16, 1, 2, weights=str(path)), path=str(files / "play.txt"), length=16)
    adapted = Characters(tuned.model, path=tuned.path, length=16, adapter=Lora(rank=2))
    tuned.check()
    assert path in tuned.data_files().values()
    for found in (tuned.init(7), adapted.frozen(7)):
        assert found.keys() == base.model.keys()
        assert all(torch.equal(value, base.model[name].to(value.dtype)) for name, value in found.items())


def test_weights_of_another_model_are_refused(files: Path):
    run(small(files / "play.txt", partition="contiguous"), files / "base")

    def check(width: int, weights: str) -> None:
        Characters(Gpt(width, 1, 2, weights=weights), path=str(files / "play.txt"), length=16).check()

    with pytest.raises(ValueError, match=r"weights must be those of this network, got the shape \(97, 16\) for"):
        check(8, str(files / "base/model.safetensors"))
    with pytest.raises(ValueError, match=r"weights must be a safetensors file, got none\.safetensors"):
        check(16, "none.safetensors")
