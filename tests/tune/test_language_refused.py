"""What has no meaning with adapters and language models: each is refused within two seconds of processor time, with
status 2 and one sentence that says what to change, and leaves no folder.

Other rows are in tests/tune/test_low_communication_refused.py (codes and schedules), tests/engine/test_needs.py (what
does not fit) and tests/engine/test_trial_step.py (what cannot be vectorised).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedfleet.workloads.models.pretrained import transformers

from ..workloads.test_pretrained import saved
from .commands import LOCAL, invoke

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.long]

FC = "name: lora, targets: 'fc*', rank: 2"


def digits(adapter: str) -> str:
    return f"workload={{name: digits, model: {{name: mlp, hidden: [12]}}, adapter: {{{adapter}}}}}"


def text(model: str, more: str = "", **given: Any) -> str:
    """A workload with a base in a folder."""
    name = given.get("name", "causal_lm, path: text.txt, tokens: characters")
    return f"workload={{name: {name}, length: {given.get('length', 16)}, model: {{name: pretrained, {model}}}{more}}}"


LORA = ", adapter: {name: lora, rank: 2}"
CHAT = "instruct, path: chat.jsonl, messages: messages"
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a target of no module": ((digits("name: lora, targets: 'fx*', rank: 2"),), "targets: no module is called fx*; ne"),
    "a trained pattern of no parameter": (
        (digits(f"{FC}, train: ['aut.*']"),),
        "train: no parameter is called aut.*; nearest are ",
    ),
    "nothing trained": ((text("folder: llama, train: []"),), " parameters are frozen "),
    "a norm": (
        (text("folder: llama", ", adapter: {name: lora, targets: model.norm, rank: 2}"),),
        "targets: model.norm is a LlamaRMSNorm, which has no low-rank form; choose linear, convolution or embedding mo",
    ),
    "a rank above all": (
        (digits("name: lora, targets: out, rank: 11"),),
        "rank: 1 <= rank <= 10 must hold for out (10 x 12), got 11; lower rank, or leave the module out",
    ),
    "two factorings": ((digits(FC), "method=fedmud"), "the compression factors weights that an adapter has factored"),
    "kept states of factors that are drawn anew": (
        (digits(FC), "method={name: flora, carry: keep}"),
        "flora draws its factors anew in every round, so that no state can be kept",
    ),
    "a rule beside products": (
        (digits(FC), "method=fedex_lora", "aggregate=median"),
        "products of factors are added to the weights, where only a mean has a meaning",
    ),
    "noise beside products": (
        (digits(FC), "method=fedex_lora", "privacy={clip: 1.0, noise: 1.0, delta: 0.001}"),
        "fedex_lora has no private form",
    ),
    "updates beside products": (
        (digits(FC), "method=fedex_lora", "federation.pace={name: buffered, buffer: 2}", "systems={}"),
        "the method has no asynchronous form",
    ),
    "parts that are interleaved": (
        (text("folder: neox", ", adapter: {name: lora, rank: 2, fused: [q, v]}"),),
        "fused: the parts of query_key_value in gpt_neox are interleaved",
    ),
    "a weight that is frozen and trained": (
        (digits(f"{FC}, train: ['fc1.weight']"),),
        "train: fc1.weight is frozen beside its factors and trained; take it out of train",
    ),
    "no adapter": (("method=flora",), "flora needs adapters, got a model without; give workload.adapter, or"),
    "a name of a hub": ((text("folder: gpt2", LORA),), "there is no folder gpt2; runs never ask a model hub, so give"),
    "pickled weights": (
        (text("folder: pickled", LORA),),
        "pickled has pytorch_model.bin but no *.safetensors; pickled weights can run code, so convert them first",
    ),
    "code of the folder": ((text("folder: code", LORA),), "config.json has auto_map, which runs code of the folder"),
    "a missing tensor": ((text("folder: missing", LORA),), "has no model.norm.weight, and LlamaForCausalLM is built"),
    "a long window": (
        (text("folder: llama", LORA, length=33),),
        "length: 1 <= length <= 32 must hold, the model's positions, got 33",
    ),
    "a small vocabulary": (
        (text("folder: small", LORA),),
        "tokens: ids up to 96, but the model has 31 embeddings; use the model's own tokenizer",
    ),
    "an encoder": ((text("folder: bert", LORA),), "head: bert reads both ways, so that next-token loss has no meaning"),
    "chats without a template": (
        (text("folder: llama", f"{LORA}, tokens: tokens", name=CHAT),),
        "messages need a chat template",
    ),
    "a quantised base": (
        (text("folder: quantised", LORA),),
        "config.json has quantization_config (bitsandbytes); give a folder in float32, bfloat16 or float16",
    ),
    "a base of 16 bits that is trained": (
        (text("folder: llama", ", adapter: {name: lora, rank: 2, train: [model.norm.*]}"), "engine.base=float16"),
        "engine.base: float16 has too few digits for weights that change, and these do",
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with small models, and texts."""
    folder = tmp_path_factory.mktemp("bases")
    for family, vocabulary in (("llama", 97), ("bert", 97), ("gpt_neox", 97), ("small", 31)):
        name = family.removeprefix("gpt_")
        saved(folder / name, "llama" if family == "small" else family, "classify" if family == "bert" else "causal",
              vocab_size=vocabulary)  # fmt: skip
    unread = {"code": {"auto_map": {}}, "quantised": {"quantization_config": {"quant_method": "bitsandbytes"}}}
    for name, settings in unread.items():
        shutil.copytree(folder / "llama", folder / name)
        found = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(found | settings))
    shutil.copytree(folder / "llama", folder / "pickled")
    (folder / "pickled/model.safetensors").rename(folder / "pickled/pytorch_model.bin")
    shutil.copytree(folder / "llama", folder / "missing")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "llama/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "missing/model.safetensors")
    from fedfleet.workloads.models.pretraining import pretrain

    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    pretrain(folder / "tokens", folder / "text.txt", steps=1)
    (folder / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "one?"}]}) + "\n")
    return folder


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_a_sentence_before_anything_starts(what: str, here: Path, bases: Path):
    transformers().AutoModelForCausalLM  # noqa: B018 its import takes seconds
    refused(*REFUSED[what], here, bases)


@pytest.mark.parametrize(
    ("package", "workload", "said"),
    [
        ("transformers", text("folder: llama", LORA), "pretrained needs the package transformers; run: pip install"),
        (
            "tokenizers",
            "workload={name: causal_lm, path: text.txt, tokens: tokens, length: 16, model: {name: gpt, width: 8}}",
            "tokens need the package tokenizers; run: pip install",
        ),
    ],
    ids=["transformers", "tokenizers"],
)
def test_without_the_packages_of_the_extra(
    package: str, workload: str, said: str, here: Path, bases: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where they are not installed, their import raises ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, package, None)
    refused((workload,), f'{said} "fedfleet[text]"', here, bases)


def refused(changes: tuple[str, ...], said: str, here: Path, bases: Path) -> None:
    """Check that a run with these changes is. here: the current folder, which gets the models and texts of `bases`."""
    for each in bases.iterdir():
        (here / each.name).symlink_to(each)
    began = time.process_time()
    done = invoke("run", "digits", *LOCAL, *changes, "--out", "run")
    took = time.process_time() - began
    assert done.exit_code == 2, done.output
    (line,) = [text for text in done.stderr.splitlines() if not text.startswith("changed: ")]
    assert line.startswith("error: ")
    assert said in line
    assert "Traceback" not in line
    assert {each.name for each in here.iterdir()} == {each.name for each in bases.iterdir()}
    assert took < 2
