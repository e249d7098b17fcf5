"""Texts as rows of tokens: windows of streams, prompts with answers, tokenisers, and means over tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.clients.local_training import shares_of
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads.data import tokens as tokenisers
from fedfleet.workloads.data.characters import tokens_of
from fedfleet.workloads.data.instruct import Instruct
from fedfleet.workloads.data.language import CausalLm, windows_of
from fedfleet.workloads.data.tokens import Characters, Coded
from fedfleet.workloads.metrics import perplexities
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.models.gpt import Gpt
from fedfleet.workloads.models.head import Head, losses_of, places_at_once
from fedfleet.workloads.objectives import NOT_COUNTED, CountedTokens
from fedfleet.workloads.stateless import Stateless
from fedfleet.workloads.workload import taken_notes
from tests.workloads.test_adapters import close
from tests.workloads.test_language import GOLDEN, golden_tensors

PADDED = [
    {"input": [3, 4, 5, 0], "label": [4, 5, 0, 6], "document": [0, 0, 0, 0], "position": [0, 1, 2, 3]},
    {"input": [6, 7, 0, 8], "label": [7, 0, 8, 9], "document": [1, 1, 1, 2], "position": [0, 1, 2, 0]},
    {"input": [9, 10, 11, 0], "label": [10, 11, 0, -1], "document": [2, 2, 2, -1], "position": [1, 2, 3, 0]},
]
"""The windows of three documents, of an implementation that knows none of this code."""


def coded(*ids: int) -> Coded:
    return Coded(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.int32))


@pytest.mark.parametrize(("tail", "golden"), [("pad", PADDED), ("drop", PADDED[:2])])
def test_windows_have_the_golden_values(tail: str, golden: list[dict[str, Any]]):
    end = Coded(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))
    rows = windows_of([coded(3, 4, 5), coded(6, 7), coded(8, 9, 10, 11)], 4, tail, end)._asdict()
    for name in golden[0]:
        assert rows[name].tolist() == [row[name] for row in golden], name
    assert rows["bytes"].tolist() == [3, 3, 2][: len(golden)]  # an end has no bytes


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden['positions']}-{golden['norm']}")
def test_masked_rows_have_the_golden_values(golden: dict[str, Any]):
    """Documents that do not see each other, and means over the tokens of answers, and over rows."""
    network = Gpt(8, 2, 2, positions=golden["positions"], norm=golden["norm"]).build((6,), 7)
    p, ids, target = golden_tensors(network), torch.tensor(golden["ids"]), torch.tensor(golden["target"])
    document = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    position = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    answer = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.bool)
    objective, label = CountedTokens(7), torch.where(answer, target, NOT_COUNTED)
    within = Stateless(network)(p, torch.stack([ids, document, position], 1))
    close(objective.losses(within, target), np.mean(golden["loss_within_documents"], 1))
    losses, counts = objective.losses(Stateless(network)(p, ids), label), answer.sum(-1)
    close((losses * counts).sum() / counts.sum(), golden["answer_tokens_mean"])
    close(losses.mean(), golden["answer_rows_mean"])


TEXTS = {"anna": ["a b c. " * 9, "déjà vu! " * 6], "ben": ["x y z? " * 12], "cleo": ["nothing else " * 8]}


def table(folder: Path) -> Path:
    lines = [json.dumps({"who": name, "text": text}) for name, texts in TEXTS.items() for text in texts]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder / "texts.jsonl"


def test_clients_have_windows_of_their_own_texts(tmp_path: Path):
    """With padding, each token but the first of a client is a target once."""
    workload = CausalLm(Gpt(8, 1, 2), path=str(table(tmp_path)), client="who", length=16)
    train, test = workload.load()
    for client, (name, texts) in enumerate(TEXTS.items()):
        rows = (train["client"] == client) & ~train["held_out"]
        labels = train["label"][rows]
        length = round(0.9 * sum(map(len, texts)))
        ends = 1 + (length > len(texts[0]))
        assert (labels != NOT_COUNTED).sum() == length + ends - 1, name
    assert train["bytes"][~train["held_out"]].sum() + test["bytes"].sum() == sum(
        len(text.encode()) for texts in TEXTS.values() for text in texts
    ) - 2 * len(TEXTS)  # no target is the first token of a stream
    assert set(train) == {"input", "label", "bytes", "client", "held_out"}


def language(folder: Path, workload: dict[str, Any], **local: int):
    return experiment(
        {
            "workload": {"path": str(table(folder)), "client": "who", "length": 16, **workload},
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
            "federation": {"clients": 3, "cohort": 3, "rounds": 2, "local": {"steps": 2, "batch": 4, **local}},
            "engine": {"backend": "local", "dtype": "float64"},
            "tracking": {"uri": "none"},
        }
    )


@pytest.mark.parametrize("more", [{}, {"attend": "within"}], ids=["stream", "within"])
def test_a_run_reports_means_over_tokens(more: dict[str, Any], tmp_path: Path):
    small = {"name": "causal_lm", "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 2}, **more}
    whole, parts = (run(language(tmp_path, small, **each)) for each in ({}, {"batch": 1, "accumulate": 4}))
    for name, value in whole.model.items():
        torch.testing.assert_close(parts.model[name], value, rtol=1e-10, atol=1e-12)
    row, workload = whole.rows[-1], CausalLm(Gpt(8, 1, 2), path=str(table(tmp_path)), client="who", length=16, **more)
    test = {name: torch.from_numpy(column) for name, column in workload.load()[1].items()}
    report, counts = workload.report(dict(whole.model), test), (test["label"] != NOT_COUNTED).sum(-1)
    loss = float((report["loss"] * counts).sum() / counts.sum())
    assert row["eval/loss"] == pytest.approx(loss, rel=1e-12)
    assert row["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    bits = loss * int(counts.sum()) / (math.log(2) * int(test["bytes"].sum()))
    assert row["eval/bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_clients_are_weighted_by_their_targets(tmp_path: Path):
    """One local step of all rows of each client, with weights by targets, is a step on the mean over all tokens; with
    weights by rows it is another one, as the last row of a client has fewer targets.

    TOLERANCE: float64, sums of some hundred tokens in another order."""
    small = {"name": "causal_lm", "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 2}}
    workload = CausalLm(Gpt(8, 1, 2), path=str(table(tmp_path)), client="who", length=16)
    train, _ = workload.load()
    batch = {name: torch.from_numpy(column[~train["held_out"]]) for name, column in train.items()}
    start = {name: value.double().requires_grad_() for name, value in workload.init(0).items()}
    counts = (batch["label"] != NOT_COUNTED).sum(-1)
    ((workload.losses(start, batch) * counts).sum() / counts.sum()).backward()
    gradients: Any = {name: value.grad for name, value in start.items()}
    errors = {}
    for weights in ("tokens", "examples"):
        asked = language(tmp_path, small, steps=1, batch=1000).model_dump()
        asked["federation"] |= {"weights": weights, "rounds": 1}
        found = run(experiment(asked)).model
        errors[weights] = max(
            float((found[name] - (value.detach() - 0.5 * gradients[name])).abs().max())  # pyright: ignore[reportOptionalOperand]
            for name, value in start.items()
        )
    assert errors["tokens"] < 1e-12
    assert errors["examples"] > 1e-6


def test_the_table_of_clients_has_their_perplexities_and_targets(tmp_path: Path):
    import pyarrow.parquet as pq

    asked = language(tmp_path, {"name": "causal_lm", "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 2}})
    asked = experiment({**asked.model_dump(), "evaluate": {"clients": {"own": True}}})
    run(asked, tmp_path / "run")
    found = pq.read_table(tmp_path / "run/clients.parquet").to_pydict()
    for model in ("server", "own"):
        np.testing.assert_allclose(found[f"{model}_test_perplexity"], np.exp(found[f"{model}_test_loss"]), rtol=1e-15)
    train, _, index = CausalLm(path=str(table(tmp_path)), client="who", length=16).split(0, 3)
    for kind, held_out in (("training", False), ("test", True)):
        counts = (train["label"] != NOT_COUNTED).sum(-1) * (train["held_out"] == held_out)
        clients = [index.rows[index.offsets[client] : index.offsets[client + 1]] for client in range(3)]
        assert found[f"targets_{kind}"] == [int(counts[rows].sum()) for rows in clients]


def test_perplexities_of_clients_are_never_too_large_for_floats():
    found = perplexities(np.array([0.0, 708.9, 709.0, 1e9, np.inf, np.nan]))
    assert found[:2].tolist() == [1.0, math.exp(708.9)]
    assert np.isposinf(found[2:5]).all()
    assert np.isnan(found[5])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda counts: 0 * counts, "federation.weights: with tokens every client must have a target, got none for "),
        (lambda counts: counts[1:], r"workload: targets must be whole numbers of shape \(\d+,\), got int64 of shape"),
        (lambda counts: counts / 2, r"workload: targets must be whole numbers of shape \(\d+,\), got float64 of"),
    ],
    ids=["none", "too few", "halves"],
)
def test_targets_that_are_no_weights_are_refused(found: Any, message: str, tmp_path: Path, monkeypatch: Any):
    real = CausalLm.targets
    monkeypatch.setattr(CausalLm, "targets", lambda self, columns: found(real(self, columns)))
    asked = language(tmp_path, {"name": "causal_lm", "model": {"name": "gpt", "width": 8, "heads": 2}}).model_dump()
    asked["federation"] |= {"weights": "tokens"}
    with pytest.raises(ConfigError, match=message):
        run(experiment(asked))


def test_weights_by_targets_need_texts():
    asked = {"workload": "digits", "method": "fedavg", "federation": {"clients": 4, "cohort": 4, "weights": "tokens"}}
    with pytest.raises(
        ConfigError, match=r"federation.weights: tokens counts the targets of texts, and the workload has "
    ):
        run(experiment({**asked, "engine": {"backend": "local"}, "tracking": {"uri": "none"}}))


@pytest.mark.parametrize("more", [{}, {"attend": "within"}, {"mean": "rows"}], ids=["stream", "within", "rows"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_in_chunks_give_the_same(more: dict[str, Any], tied: bool, tmp_path: Path):
    """Losses, gradients, also of clients at once, and reports. 5 does not divide the 16 places of a row.

    TOLERANCE: float64, sums of up to 97 terms in another order."""
    model, path = Gpt(8, 1, 2, tied=tied), str(table(tmp_path))
    whole, parts = (CausalLm(model, path=path, length=16, loss_chunk=chunk, **more) for chunk in (16, 5))
    rows = {name: torch.from_numpy(column[:4]) for name, column in whole.load()[0].items()}
    p = {name: value.double() for name, value in whole.init(0).items()}
    batch = {**rows, "key": torch.tensor(3)}
    assert parts.in_chunks(p, batch) is not None
    assert whole.in_chunks(p, batch) is None

    def results(workload: CausalLm) -> list[torch.Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
        losses = workload.losses(leaves, batch)
        several = {name: torch.stack([value, 1.1 * value]).requires_grad_() for name, value in p.items()}
        both = torch.func.vmap(lambda own, rows: workload.losses(own, {**batch, **rows}), (0, 0))(
            several, {name: torch.stack([column, column.flip(0)]) for name, column in rows.items()}
        )
        weights = torch.arange(1.0, 5.0, dtype=torch.float64)
        gradients = torch.autograd.grad((losses * weights).sum(), [*leaves.values()])
        of_both = torch.autograd.grad((both * weights).sum(), [*several.values()])
        report = workload.report(p, rows)
        return [losses, both, *gradients, *of_both, report["loss"], report["accuracy"]]

    for one, other in zip(results(whole), results(parts), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_a_capped_last_layer_in_chunks_has_the_gradient_of_autograd():
    """Also of a bias. TOLERANCE: float64, some hundred terms."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 7, 4), (11, 4), (11,))]
    label, ways = torch.randint(11, (2, 7), generator=generator), []
    for places in (7, 3):
        hidden, weight, bias = (value.clone().requires_grad_() for value in made)
        head = Head(weight, bias, 1.5)
        losses = head.losses(hidden, label, places) if places == 3 else losses_of(head, hidden, label)
        ways.append([losses, *torch.autograd.grad((losses * label).sum(), (hidden, weight, bias))])
        assert (head.hits(hidden, label, places) == (head.logits(hidden).argmax(-1) == label)).all()
    for one, other in zip(*ways, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)


def test_a_run_in_chunks_is_the_run(tmp_path: Path):
    """In blocks and alone; by default, logits of this size are computed at once."""
    small = {"name": "causal_lm", "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 2}}
    models = []
    for chunk, block in ((None, 1), (5, 1), (5, 3)):
        asked = language(tmp_path, {**small, "loss_chunk": chunk}).model_dump()
        asked["engine"] |= {"block": block}
        models.append(run(experiment(asked)).model)
    for name, value in models[0].items():
        for other in models[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12)
    assert places_at_once(None, 8, 131_072) == 16
    with pytest.raises(ValueError, match="loss_chunk >= 1 must hold, got loss_chunk=0; leave it out for 64 MiB"):
        CausalLm(path="", loss_chunk=0)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_document_by_itself_is_one_in_a_packed_row(positions: Any):
    """Where places see their own document alone, what is beside it changes nothing."""
    network = Gpt(16, 2, 2, positions=positions).build((3, 9), 20)
    alone, document = torch.randint(1, 20, (1, 4)), torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1, -1]])
    rows = torch.cat([alone, torch.randint(1, 20, (1, 5))], 1)
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    packed = network(torch.stack([rows, document, position], 1))
    torch.testing.assert_close(packed[:, :4], network(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed[:, 4:7], network(rows[:, 4:7]), rtol=1e-5, atol=1e-6)


# --- prompts and answers ----------------------------------------------------------------------------------------------
def instruct(folder: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> Instruct:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Instruct(Gpt(8, 1, 2), path=str(folder / "rows.jsonl"), **{"length": 16, **more})


def answers_of(columns: Mapping[str, np.ndarray]) -> list[str]:
    """The targets of each row, as text, with | for the end."""
    return [
        "".join("|" if token == 0 else chr(token + 30) for token in row[row != NOT_COUNTED]) for row in columns["label"]
    ]


@pytest.mark.parametrize("adapter", [None, Lora(targets=("*.q", "*.up"), rank=2, zero_b=False, dropout=0.5)])
def test_padded_rows_change_nothing(adapter: Lora | None, tmp_path: Path):
    """Losses and gradients of three rows alone and beside two that are padding, with dropout of the network and of the
    inputs of factors. TOLERANCE: 1e-6, sums in another order in float32."""
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 4)
    model = Gpt(width=16, depth=1, heads=2, dropout=0.5)
    workload = CausalLm(model, path=str(tmp_path / "text.txt"), length=8, tokens="characters", adapter=adapter)
    rows = {name: torch.from_numpy(column[:5]) for name, column in workload.load()[0].items()}
    frozen, found = workload.frozen(1), []
    for count in (3, 5):
        leaves = {name: value.requires_grad_() for name, value in workload.init(1).items()}
        weight = torch.tensor([1 / 3] * 3 + [0.0] * (count - 3))
        batch = {**{name: column[:count] for name, column in rows.items()}, "weight": weight, "key": torch.tensor(7)}
        losses = workload.losses({**leaves, **frozen}, batch)
        shares = shares_of(workload, batch, losses.dtype)
        assert shares is not None
        loss = (losses * shares).sum()
        found.append([loss, *torch.autograd.grad(loss, [*leaves.values()])])
    for alone, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, alone, rtol=1e-6, atol=1e-6)
    evaluated = {name: column for name, column in batch.items() if name not in ("key", "weight")}
    assert not torch.allclose(workload.losses({**leaves, **frozen}, evaluated), losses)  # training drops


PAIRS = [
    {"prompt": "two?", "answer": "2"},
    {"prompt": "a prompt that is too long", "answer": "short"},
    {"prompt": "say", "answer": "an answer that is too long"},
    {"prompt": "nothing", "answer": ""},
    {"prompt": "test", "answer": "yes"},
]


def test_the_targets_are_answers(tmp_path: Path):
    """A long prompt loses its beginning, a long answer its end."""
    taken_notes()
    train, test = instruct(tmp_path, PAIRS, test_fraction=0.2).load()
    assert answers_of(train) == ["2|", "short|", "an answer tha"]
    assert answers_of(test) == ["yes|"]
    assert "".join(chr(token + 30) for token in train["input"][1] if token > 1) == "s too longshort"
    assert train["bytes"].tolist() == [1, 5, 13]
    (line, *_) = [note for note in taken_notes() if "lose" in note]
    assert "of 4 examples, 1 lose the beginning of their prompt, 1 the end of their answer, and 1 have no" in line


def test_examples_of_a_row_are_apart(tmp_path: Path):
    train, _ = instruct(tmp_path, PAIRS, pack=True, length=24, test_fraction=0.2).load()
    assert answers_of(train)[0] == "2|"
    first = train["document"][0].tolist()
    assert first == [0] * 6 + [-1] * 18
    short = [{"prompt": "1", "answer": "2"}] * 6
    train, _ = instruct(tmp_path, short, pack=True, length=7, test_fraction=0.2).load()
    assert train["document"][0].tolist() == [0] * 3 + [1] * 3 + [-1]
    assert train["position"][0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(train["input"]) == 3


def test_templates_and_inputs(tmp_path: Path):
    rows = [{"prompt": "add", "answer": "3", "of": "1 2"}] * 4
    train, _ = instruct(tmp_path, rows, input="of", template="Q: {prompt} A: ", length=24, test_fraction=0.25).load()
    assert answers_of(train) == ["3|"] * 3
    train, _ = instruct(tmp_path, rows, template="Q: {prompt} A: ", loss_on="all", test_fraction=0.25).load()
    assert answers_of(train) == [": add A: 3|"] * 3
    with pytest.raises(ValueError, match=r"template must have \{prompt\} where the prompt stands, got 'Q: '"):
        instruct(tmp_path, rows, template="Q: ")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"length": 0}, "length >= 1 must hold, got length=0"),
        ({"vocabulary": 256}, "vocabulary > 256 must hold, as bytes are tokens"),
        ({"test_fraction": 1.0}, "0 < test_fraction < 1 must hold"),
    ],
)
def test_settings_that_mean_nothing_are_refused(more: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(ValueError, match=told):
        instruct(tmp_path, PAIRS, **more)


def test_files_that_do_not_fit_are_refused(tmp_path: Path):
    workload = instruct(tmp_path, [{"prompt": "a"}])
    with pytest.raises(ValueError, match=r"must have prompt, answer in each line, got line 1 without answer"):
        workload.load()
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"rows.jsonl.*line 1"):
        workload.load()
    with pytest.raises(ValueError, match=r"path must be a file .jsonl or .parquet, got"):
        Instruct(Gpt(), path=str(tmp_path / "text.txt")).check()
    with pytest.raises(ValueError, match=r"messages need a tokeniser with a chat template, got characters or bpe"):
        instruct(tmp_path, PAIRS, messages="messages").check()
    with pytest.raises(ValueError, match=r"must have who in each record, got null; give it, or leave records out"):
        instruct(tmp_path, [{**PAIRS[0], "who": None}], client="who").load()


def test_texts_may_have_any_ends_of_lines(tmp_path: Path):
    """Only a new line ends a record; JSON may have others, such as U+2028, as they are."""
    pairs = [{"prompt": "a\u2028", "answer": "b\x85c"}] * 2
    workload = instruct(tmp_path, pairs)
    (tmp_path / "rows.jsonl").write_text(
        "\r\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs), encoding="utf-8"
    )
    assert [*workload.records()] == pairs


@pytest.mark.parametrize("text", ["[1", "[1]"])
def test_a_tokeniser_with_damaged_settings_is_refused(text: str, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(tokenisers.of_characters())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"tokenizer_config.json must be a whole file|must have a token for the end of"
    ):
        tokenisers.of_folder(tmp_path)


# --- tokenisers -------------------------------------------------------------------------------------------------------
MIXED = "To be,\tor — not\r\nto be: ä€😀"


def test_characters_have_the_bytes_of_the_text():
    (found,) = Characters().coded([MIXED])
    assert found.ids.tolist() == tokens_of(MIXED)[:-1].tolist()
    assert found.bytes.sum() == len(MIXED.encode())
    assert Characters().coded([""])[0].ids.tolist() == []


@pytest.mark.long
def test_the_file_of_characters_gives_their_tokens(data_root: str):
    """On a text with all that is particular, and on tiny-shakespeare where it is there."""
    read = tokenisers.FromFile(tokenisers.of_characters(), tokenisers.END_OF_BPE, "it")
    texts = [MIXED]
    if (path := Path(data_root) / "tiny_shakespeare/input.txt").is_file():
        texts.append(path.read_text())
    for text in texts:
        (one,), (other,) = read.coded([text]), Characters().coded([text])
        assert np.array_equal(one.ids, other.ids)
        assert one.bytes.sum() == other.bytes.sum() == len(text.encode())
    assert (read.size, read.end) == (97, 0)


def test_byte_pairs_are_learnt_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    texts = [text for texts in TEXTS.values() for text in texts]
    assert tokenisers.learnt(300, texts) == tokenisers.learnt(300, texts)
    workload = CausalLm(Gpt(8, 1, 2), path=str(table(tmp_path)), client="who", tokens="bpe", vocabulary=300, length=8)
    train, _ = workload.load()
    assert workload.classes == 300
    assert train["label"].max() < 300
    again = CausalLm(Gpt(8, 1, 2), path=str(table(tmp_path)), client="who", tokens="bpe", vocabulary=300, length=8)
    assert np.array_equal(again.load()[0]["input"], train["input"])
    assert len([*(tmp_path / "cache/bpe").iterdir()]) == 1
    (found,) = workload.tokeniser.coded([MIXED])
    assert found.bytes.sum() == len(MIXED.encode())
