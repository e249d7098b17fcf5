"""Models of transformers from a local folder: built without a second copy, alone and for several clients at once.

Tolerances: one client alone and under vmap agree in float32 to 1e-4 of the largest entry of the gradient, as other
kernels add up in another order.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import vmap

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.cli import main
from fedfleet.workloads import counted
from fedfleet.workloads.data.instruct import Instruct
from fedfleet.workloads.data.language import CausalLm
from fedfleet.workloads.drawing import initial
from fedfleet.workloads.models.adapters import Lora, adapted_in
from fedfleet.workloads.models.convert import convert
from fedfleet.workloads.models.head import without_head
from fedfleet.workloads.models.pretrained import Pretrained, transformers
from fedfleet.workloads.models.pretraining import pretrain
from fedfleet.workloads.stateless import Stateless, parameters_of
from fedfleet.workloads.workload import WITHOUT_STORED, WITHOUT_WEIGHTS

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODERS = {
    "gpt2": {},
    "llama": {},
    "mistral": {},
    "qwen2": {"layer_types": ["full_attention"] * 2},
    "qwen3": {"head_dim": 8, "layer_types": ["full_attention"] * 2},
    "gemma2": {"head_dim": 8, "layer_types": ["full_attention"] * 2},
    "gemma3_text": {"head_dim": 8, "layer_types": ["full_attention"] * 2},
    "phi3": {},
    "gpt_neox": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 1]},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "gpt_neo": {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 2},
    "mixtral": {"num_local_experts": 3},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2},
}
MADE_OF_SEVERAL = {"mixtral"}
"""Families whose parameters transformers makes of several tensors of their files, which are then read as a whole."""
ENCODERS = ["bert", "roberta", "distilbert"]


def saved(folder: Path, family: str, head: str = "causal", **more: int) -> Path:
    """A folder with a small random model."""
    package = transformers()
    config = package.AutoConfig.for_model(family, **{**SMALL, **DECODERS.get(family, {}), **more})
    if family == "distilbert":
        config = package.AutoConfig.for_model(
            family, **{**SMALL, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
        )
    auto = package.AutoModelForCausalLM if head == "causal" else package.AutoModel
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
    return folder


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 31, shape, generator=torch.Generator().manual_seed(1))


def planes(rows: torch.Tensor) -> torch.Tensor:
    """Two documents in each row, and two places of padding."""
    document = torch.tensor([0] * 3 + [1] * (rows.shape[-1] - 5) + [-1] * 2).expand_as(rows)
    position = torch.tensor([*range(3), *range(rows.shape[-1] - 5), 0, 0]).expand_as(rows)
    return torch.stack([rows, document, position], -2)


def checked_in_blocks(network: nn.Module, p: dict[str, torch.Tensor], x: torch.Tensor) -> None:
    """The gradients of two clients at once are those of each alone. x: (2, B, …)."""
    function, key = Stateless(convert(network).module), torch.tensor(1)
    points = {name: torch.stack([value, value * 1.01]).requires_grad_() for name, value in p.items()}

    def loss(p, x):
        return function(p, x, key).square().mean()

    together = torch.autograd.grad(vmap(loss)(points, x).sum(), [*points.values()], allow_unused=True)
    for client in range(2):
        own = {name: value[client].detach().requires_grad_() for name, value in points.items()}
        alone = torch.autograd.grad(loss(own, x[client]), [*own.values()], allow_unused=True)
        largest = max(float(g.abs().max()) for g in alone if g is not None)
        for one, several in zip(alone, together, strict=True):
            if one is not None:
                assert float((several[client] - one).abs().max()) <= 1e-4 * largest


def built(folder: Path, head: str, shape: tuple[int, ...], classes: int):
    """(the network for tensors that are put in, its tensors)."""
    model = Pretrained(str(folder), head=head)  # pyright: ignore
    loaded = initial(lambda: model.build(shape, classes), 0)
    token = WITHOUT_WEIGHTS.set(True)
    try:
        network = initial(lambda: model.build(shape, classes), 0)
    finally:
        WITHOUT_WEIGHTS.reset(token)
    with torch.device("meta"):
        outline = model.build(shape, classes)
    p = {name: value.detach().clone() for name, (value, _) in parameters_of(loaded).items()}
    assert [*parameters_of(outline)] == [*p] == [*parameters_of(network)]
    return network, p


@pytest.mark.long
@pytest.mark.parametrize("family", DECODERS)
def test_decoders(family, tmp_path):
    """The network without numbers gives what from_pretrained gives, several clients at once what each gives alone, and
    a mask keeps documents apart."""
    folder = saved(tmp_path, family)
    network, p = built(folder, "causal", (10,), 31)
    x = tokens(2, 3, 10)
    published = transformers().AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        found = Stateless(network)(p, x[0])
        assert torch.equal(found, published(input_ids=x[0], use_cache=False).logits)
        apart = Stateless(network)(p, planes(x[0]))
        torch.testing.assert_close(apart[:, 3:8], Stateless(network)(p, x[0][:, 3:8]), rtol=1e-4, atol=1e-5)
    checked_in_blocks(network, p, planes(x))
    checked_in_blocks(network, p, x)
    with torch.no_grad(), without_head():
        hidden = Stateless(network)(p, planes(x[0]))
    head = CausalLm.last_layer(network)
    assert head is not None
    torch.testing.assert_close(head.logits(hidden), apart, rtol=1e-5, atol=1e-6)
    stored = Pretrained(str(folder)).stored((10,), 31)
    assert (stored is None) == (family in MADE_OF_SEVERAL)
    if stored is not None:
        assert [*stored] == [*p]
        assert all(torch.equal(stored[name], value) for name, value in p.items())


@pytest.mark.long
@pytest.mark.parametrize("family", [*ENCODERS, "llama", "gpt2"])
def test_classifiers(family, tmp_path):
    """Padding changes nothing, several clients at once give what each gives alone, and the head is drawn anew, as
    from_pretrained draws it, also where the files are not read for that."""
    folder = saved(tmp_path, family, "classify")
    network, p = built(folder, "classify", (3, 10), 4)
    model = Pretrained(str(folder), head="classify")
    stored, token = model.stored((3, 10), 4), WITHOUT_STORED.set(True)
    try:
        own = dict(parameters_of(initial(lambda: model.build((3, 10), 4), 0)))
    finally:
        WITHOUT_STORED.reset(token)
    assert stored is not None
    assert all(torch.equal(stored[name], p[name]) for name in stored)
    lacking = {*p} - {*stored}
    assert lacking
    assert all(torch.equal(own[name][0], p[name]) for name in lacking)
    assert any(p[name].any() for name in lacking)
    x = planes(tokens(2, 3, 10))
    x[:, :, 1] = torch.where(x[:, :, 1] >= 0, 0, -1)
    x[:, :, 2] = torch.arange(10)
    function = Stateless(network)
    with torch.no_grad():
        assert function(p, x[0]).shape == (3, 4)
        torch.testing.assert_close(function(p, x[0]), function(p, x[0][..., :8]), rtol=1e-4, atol=1e-6)
    checked_in_blocks(network, p, x)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "phi3", "opt"])
def test_a_base_in_16_bits(family, tmp_path):
    """Read as it is stored, and cast up where it is used, it gives what its numbers in float32 give, for a client alone
    and for two. TOLERANCE: biases are added after the product, float32."""
    folder = saved(tmp_path / "base", family, vocab_size=97)
    package = transformers()
    package.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 9)
    model = {"name": "pretrained", "folder": str(folder)}
    workload = {"name": "causal_lm", "path": str(tmp_path / "text.txt"), "tokens": "characters", "length": 10}
    asked = {
        "workload": {**workload, "model": model, "adapter": {"name": "lora", "rank": 2, "zero_b": False}},
        "method": "fedavg",
        "engine": {"backend": "local", "base": "as_stored"},
        "tracking": {"uri": "none"},
    }
    half = RunSpec.of("id", experiment(asked))
    single = RunSpec.of("id", experiment({**asked, "engine": {"backend": "local"}}))
    assert {value.dtype for value in half.frozen.values()} == {torch.bfloat16}
    assert half.frozen_facts["bytes"] * 2 == single.frozen_facts["bytes"]
    own = dict(half.initial_model().items())
    x, key, found = tokens(2, 3, 10), torch.tensor(1), []
    for spec in (single, half):
        function, frozen = Stateless(initial(spec.workload.build_converted, 0)), spec.frozen  # pyright: ignore
        alone = function({**own, **frozen}, x[0], key)
        points = {name: torch.stack([value, 2 * value]).requires_grad_() for name, value in own.items()}
        both = vmap(lambda p, x, function=function, frozen=frozen: function({**p, **frozen}, x, key))(points, x)
        found.append([alone, both, *torch.autograd.grad(both.square().mean(), [*points.values()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_family_that_cannot_be_vectorised_runs_one_client_at_a_time(tmp_path):
    """Bloom has a function of its own, for which torch has no rule. The log says so once, with the line of it,
    and the models are those of a run that is told to train one client after the other."""
    folder, models = saved(tmp_path / "base", "bloom", n_layer=2, n_head=2, vocab_size=97), []
    for name, engine in (("left", {}), ("told", {"vectorise": False})):
        asked = {
            "workload": {
                **{"name": "causal_lm", "path": str(write_text(tmp_path)), "tokens": "characters", "length": 10},
                "model": {"name": "pretrained", "folder": str(folder)},
            },
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {"clients": 3, "cohort": 3, "rounds": 2, "local": {"steps": 2, "batch": 2}},
            "engine": {"backend": "local", **engine},
            "tracking": {"uri": "none"},
        }
        models.append(run(experiment(asked), tmp_path / name).model)
    told = [line for line in (tmp_path / "left/run.log").read_text().splitlines() if "one after the other" in line]
    assert len(told) == 1
    assert re.search(
        r"transformers/models/bloom/modeling_bloom\.py, line \d+ in forward: .*engine\.vectorise=", told[0]
    )
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


FUSED = {
    "gpt2": ("transformer.h.{}.attn.c_attn", (16, 16, 16)),
    "phi3": ("model.layers.{}.self_attn.qkv_proj", (16, 8, 8)),
}
"""Family -> the name of the projection of a layer, and the outputs of its parts q, k and v."""


@pytest.mark.parametrize("parts", [("q", "v"), ("k",)])
@pytest.mark.parametrize("family", FUSED)
def test_parts_of_a_projection_have_factors_of_their_own(family, parts, tmp_path):
    """They give what the merged weights give, alone and vectorised, and no other output moves. TOLERANCE: float32, sums
    of at most 24 terms in two layers, as torch's assert_close has it."""
    folder, (name, sizes) = saved(tmp_path, family), FUSED[family]
    network, p = built(folder, "causal", (10,), 31)
    plain, x = Stateless(network), tokens(2, 3, 10)
    adapted = initial(lambda: Pretrained(str(folder)).build((10,), 31), 0)
    lora = Lora(rank=2, fused=parts)
    lora.adapt(adapted)
    places = [f"{name.format(layer)}.{part}" for layer in range(2) for part in parts]
    assert [*adapted_in(adapted)] == places
    first = lora.initial(adapted, 3)
    factors = {
        key: torch.randn(2, *value.shape, generator=torch.Generator().manual_seed(4)) for key, value in first.items()
    }
    assert [*factors] == [f"{place}.lora_{factor}" for place in places for factor in "ab"]
    outputs = dict(zip("qkv", sizes, strict=True))
    assert [value.shape[1] for key, value in factors.items() if key.endswith("b")] == [
        outputs[part] for part in parts
    ] * 2
    key = counted.key(3, "adapter", len(places) - 1, "a")  # parts count one by one
    drawn = (2 * counted.uniform(key, 32) - 1) / 16**0.5
    assert torch.equal(first[f"{places[-1]}.lora_a"], drawn.view(2, 16))
    function = Stateless(adapted)
    together = vmap(lambda own: function({**p, **own}, x[0]))(factors)
    for client in range(2):
        own = {key: value[client] for key, value in factors.items()}
        merged = lora.merged(adapted, {**p, **own})
        weight = f"{name.format(0)}.weight"
        moved = (merged[weight] - p[weight]).abs().amax(0 if family == "gpt2" else 1)
        for part, rows in zip("qkv", moved.split(sizes), strict=True):
            assert bool(rows.any()) == (part in parts)
        torch.testing.assert_close(together[client], plain(merged, x[0]))
        torch.testing.assert_close(function({**p, **own}, x[0]), plain(merged, x[0]))
    with pytest.raises(ValueError, match=f"factors of whole weights, got those of the part {places[0]}; give fused"):
        lora.written(adapted, {**p, **own})


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        (
            "gpt_neox",
            {},
            r"fused: the parts of query_key_value in gpt_neox are interleaved, got fused=\['q', 'v'\]; give",
        ),
        ("llama", {}, "fused: no target in llama is a projection whose parts are known, got fused="),
        (
            "phi3",
            {"rank": 9, "fused": ("k",)},
            r"rank: 1 <= rank <= 8 must hold for .*\.qkv_proj\.k \(8 x 16\), got 9",
        ),
    ],
)
def test_parts_that_are_not_known_are_refused(family, settings, told, tmp_path):
    folder = saved(tmp_path, family)
    with torch.device("meta"):
        network = Pretrained(str(folder)).build((10,), 31)
    with pytest.raises(ValueError, match=told):
        Lora(**{"rank": 2, "fused": ("q", "v"), **settings}).adapt(network)


@pytest.mark.long
def test_clients_train_adapters_beside_a_folder(tmp_path):
    """The base is frozen and written nowhere; clients of a block train as they train alone."""
    folder = saved(tmp_path / "base", "llama", vocab_size=97)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["tie_word_embeddings"] is False
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    models = []
    for block in (1, 3):
        made = experiment(
            {
                "workload": {
                    "name": "characters",
                    "path": str(tmp_path / "text.txt"),
                    "length": 16,
                    "model": {"name": "pretrained", "folder": str(folder)},
                    "adapter": {"name": "lora", "rank": 2},
                },
                "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}},
                "federation": {"clients": 6, "cohort": 3, "rounds": 2, "local": {"steps": 2, "batch": 4}},
                "engine": {"backend": "local", "block": block, "dtype": "float64"},
                "tracking": {"uri": "none"},
            }
        )
        result = run(made, tmp_path / f"run{block}")
        assert {name.rpartition(".")[2] for name in result.model if "lora" in name} == {"lora_a", "lora_b"}
        models.append({name: value for name, value in result.model.items() if "lora" in name})
    assert max(float((models[0][name] - models[1][name]).abs().max()) for name in models[0]) < 1e-9
    files = [file.stat().st_size for file in (tmp_path / "run1" / "checkpoints").rglob("*") if file.is_file()]
    assert max(files) < sum(value.nbytes for value in models[0].values()) * 8 + 20_000


def folder_with(path: Path, config: dict | None, *files: str) -> Path:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ({"auto_map": {}}, ["a.safetensors"], r"config.json has auto_map, which runs code of the folder; use an arch"),
        ({}, ["pytorch_model.bin"], r"has pytorch_model.bin but no \*.safetensors; pickled weights can run code"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["a.safetensors"],
            r"quantization_config \(bitsandbytes\); give a folder in float32",
        ),
        (None, ["a.safetensors"], r"must have a readable config.json"),
        ({}, ["a.safetensors", "adapter_config.json"], r"has adapter_config.json, which names another base; give the"),
    ],
    ids=["remote code", "pickled", "quantised", "without a configuration", "factors of another base"],
)
def test_folders_that_are_not_read(config, files, message, tmp_path):
    folder = folder_with(tmp_path / "base", config, *files)
    with pytest.raises(ValueError, match=message):
        Pretrained(str(folder)).build((8,), 31)


def test_no_hub_is_asked():
    """Nor is transformers, which would take a second and more."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r"there is no folder gpt2; runs never ask a model hub, so give a local fold"):
        Pretrained("gpt2").build((8,), 31)
    assert time.process_time() - began < 1


@pytest.mark.long
def test_folders_that_do_not_fit(tmp_path):
    from safetensors.torch import load_file, save_file

    folder, encoder = saved(tmp_path / "llama", "llama"), saved(tmp_path / "bert", "bert", "classify")
    with pytest.raises(ValueError, match=r"length: 1 <= length <= 32 must hold, the model's positions, got 33"):
        Pretrained(str(folder)).build((33,), 31)
    roberta = saved(tmp_path / "roberta", "roberta", "classify")  # its positions begin behind that of the padding, 0
    with pytest.raises(ValueError, match=r"length: 1 <= length <= 31 must hold, the model's positions, got 32"):
        Pretrained(str(roberta), head="classify").build((32,), 2)
    with pytest.raises(ValueError, match=r"tokens: ids up to 96, but the model has 31 embeddings; use the model's own"):
        Pretrained(str(folder)).build((8,), 97)
    with pytest.raises(ValueError, match=r"head: bert reads both ways, .*; give head: classify"):
        Pretrained(str(encoder)).build((8,), 31)
    with pytest.raises(ValueError, match=r"train: no parameter is called \*.q_projj; nearest are model.embed_tok"):
        Pretrained(str(folder), train=("*.q_projj",)).build((8,), 31)
    tensors = load_file(folder / "model.safetensors")
    without = {name: value for name, value in tensors.items() if not name.endswith("0.mlp.up_proj.weight")}
    for changed, what in (
        (without, "no model.layers.0.mlp.up_proj.weight"),
        ({**tensors, "more": torch.zeros(2)}, "besides what it needs more"),
        ({**tensors, "model.norm.weight": torch.zeros(2)}, "another shape of model.norm.weight"),
    ):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"has {what}, and LlamaForCausalLM is built from it"):
            Pretrained(str(folder)).build((8,), 31)


@pytest.mark.long
def test_headers_alone_tell_what_is_missing(tmp_path):
    """Before any number is read: the file is cut behind its header."""
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path, "llama")
    tensors, model = load_file(folder / "model.safetensors"), Pretrained(str(folder))

    def outline():
        with torch.device("meta"):
            return model.build((8,), 31)

    outline()
    missing = {name: value for name, value in tensors.items() if not name.endswith("1.mlp.down_proj.weight")}
    for changed, what in (
        (missing, "no model.layers.1.mlp.down_proj.weight"),
        ({**tensors, "model.norm.weight": torch.zeros(2)}, "another shape of model.norm.weight"),
    ):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"has {what}, and LlamaForCausalLM is built from it"):
            outline()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors must be a whole file, got a truncated or different one"):
        outline()
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"must have model.safetensors or a readable model.safetensors.index.json"):
        outline()


@pytest.mark.long
def test_files_of_parts_are_read_by_their_index(tmp_path):
    folder = saved(tmp_path / "whole", "llama")
    auto = transformers().AutoModelForCausalLM
    auto.from_pretrained(folder).save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert len([*(tmp_path / "parts").glob("*.safetensors")]) > 2
    one, parts = (Pretrained(str(tmp_path / name)).stored((8,), 31) for name in ("whole", "parts"))
    assert one is not None
    assert parts is not None
    assert [*one] == [*parts]
    assert all(torch.equal(one[name], parts[name]) for name in one)


@pytest.mark.long
def test_tied_tensors_are_one(tmp_path):
    """By the first of their names; a pattern may name the second."""
    package = transformers()
    config = package.AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)
    package.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _, p = built(tmp_path, "causal", (8,), 31)
    assert "lm_head.weight" not in p
    chosen = Pretrained(str(tmp_path), train=("lm_head.*",)).build((8,), 31)
    assert [name for name, value in chosen.named_parameters() if value.requires_grad] == ["model.embed_tokens.weight"]


def write_text(folder: Path) -> Path:
    """A file with a text that a base can be trained on."""
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 9)
    return folder / "text.txt"


CHAT = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
)


@pytest.mark.long
def test_chats_of_a_base_that_is_trained_here(tmp_path):
    """The same arguments give the same base. Answers are found by marks of the template, and by the turns before."""
    text = write_text(tmp_path)
    for name in ("base", "again"):
        pretrain(tmp_path / name, text, steps=2)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("base", "again"))
    assert one == other
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": CHAT})] * 4))
    settings = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    found = []
    for template in (MARKED, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        (tmp_path / "base/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        model = Pretrained(str(tmp_path / "base"))
        chat = Instruct(model, path=str(tmp_path / "chat.jsonl"), messages="messages", length=24, test_fraction=0.25)
        chat.check()
        found.append(chat.load()[0])
    for name, column in found[0].items():
        assert (column == found[1][name]).all(), name
    targets = found[0]["label"][0]
    assert [int(token) for token in targets if token >= 0] == [19, 0, 20, 0]
    assert found[0]["bytes"].tolist() == [2] * 3
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"messages need a chat template, and tokenizer_config.json in .* has none"):
        Instruct(model, path=str(tmp_path / "chat.jsonl"), messages="messages").check()
    (tmp_path / "base/chat_template.jinja").write_text(MARKED)
    chat = Instruct(model, path=str(tmp_path / "chat.jsonl"), messages="messages", test_fraction=0.25)
    assert chat.data_files()["chat_template.jinja"].is_file()
    for wrong in (None, [{"role": "user"}], "hello"):
        (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": wrong})] * 4))
        with pytest.raises(ValueError, match=r"messages must have a list of {role, content} in each row of .*, got "):
            chat.load()


BLOCKED = """
import ipaddress, os, socket, sys

def told(what):
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{what!r}\\n")
    raise OSError(f"the network is blocked, got {what!r}")

def is_here(host):
    try:
        return host in (None, "", b"", "localhost", socket.gethostname()) or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

def checked(own):
    def connect(self, address):
        if self.family != socket.AF_UNIX and not is_here(address[0]):
            told(address)
        return own(self, address)
    return connect

resolve = socket.getaddrinfo
def getaddrinfo(host, *more, **named):
    return resolve(host, *more, **named) if is_here(host) else told(host)

socket.socket.connect, socket.socket.connect_ex = map(checked, (socket.socket.connect, socket.socket.connect_ex))
socket.getaddrinfo = getaddrinfo
"""
"""What Python imports as `sitecustomize` when it starts: only this machine is reached, and what else is asked for is
written to the file $ASKED."""


@pytest.mark.long
def test_no_run_asks_a_network(tmp_path):
    """Nor does a command that makes a base, a chat's tokeniser, or the export of the model. What runs in other
    processes is blocked, too. The name of a hub's model is refused."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(BLOCKED)
    asked, here = tmp_path / "asked", os.environ
    outer = {name: value for name, value in here.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    environment = {**outer, "PYTHONPATH": str(tmp_path / "blocked"), "ASKED": str(asked)}

    def done(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fedfleet", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    block = [sys.executable, "-c", "import socket; socket.getaddrinfo('example.org', 80)"]
    assert b"the network is blocked" in subprocess.run(block, env=environment, capture_output=True).stderr
    asked.unlink()  # the block does block
    write_text(tmp_path)
    made = done("small-model", "base", "--text", "text.txt", "--layers", "2", "--steps", "1")
    assert not made.returncode, made.stderr
    names = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps({**names, "chat_template": MARKED}))
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": CHAT})] * 8))
    text = "workload={name: causal_lm, path: text.txt, length: 16, "
    chats = "workload={name: instruct, path: chat.jsonl, messages: messages, length: 24, test_fraction: 0.25, "
    model, adapter = "model: {name: pretrained, folder: base}", "adapter: {name: lora, rank: 2}}"
    plan = "federation={clients: 2, cohort: 2, rounds: 1, local: {steps: 1, batch: 2}}"
    common = ("method={name: fedavg, rule: {name: sgd, lr: 0.1}}", plan, "engine={backend: local}", "tracking.uri=none")
    (tmp_path / "run.yaml").write_text("workload: digits\nmethod: fedavg\n")
    for workload, out in ((f"{text}{model}, {adapter}", "texts"), (f"{chats}{model}, {adapter}", "chats")):
        ran = done("run", "run.yaml", workload, *common, "--out", out)
        assert not ran.returncode, ran.stderr
    exported = done("export", "texts", "--as", "model", "--out", "model")
    assert not exported.returncode, exported.stderr
    hub = done("run", "run.yaml", f"{text}{model.replace('base', 'gpt2')}, {adapter}", *common)
    assert hub.returncode == 2
    assert "there is no folder gpt2; runs never ask a model hub, so give a local folder with" in hub.stderr
    assert not asked.exists(), asked.read_text()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_exported_model_is_read_by_transformers(kind, tmp_path):
    """Whether the run has an adapter or trains all: from its folder, transformers gives the logits of the run's model;
    the folder is the base of another run, whose tokens are the same.

    TOLERANCE: float32, and other orders of sums where weights are merged."""
    from click.testing import CliRunner

    text = write_text(tmp_path)
    pretrain(tmp_path / "base", text, kind, steps=1)
    x = tokens(2, 10)
    for name, adapter in (("whole", None), ("adapted", {"name": "lora", "rank": 2})):
        workload = {
            "name": "causal_lm",
            "path": str(text),
            "length": 16,
            "model": {"name": "pretrained", "folder": str(tmp_path / "base")},
            **({} if adapter is None else {"adapter": adapter}),
        }
        asked = {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
            "federation": {"clients": 2, "cohort": 2, "rounds": 2, "local": {"steps": 2, "batch": 2}},
            "engine": {"backend": "local"},
            "tracking": {"uri": "none"},
        }
        result = run(experiment(asked), tmp_path / name)
        out = tmp_path / f"{name}-model"
        done = CliRunner().invoke(main, ["export", str(tmp_path / name), "--as", "model", "--out", str(out)])
        assert done.exit_code == 0, done.output
        published, found = transformers().AutoModelForCausalLM.from_pretrained(
            out, attn_implementation="eager", output_loading_info=True
        )
        assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        spec = RunSpec.of("id", experiment(asked))
        network = Stateless(spec.workload.build_converted())  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            logits = published.eval()(input_ids=x, use_cache=False).logits
            torch.testing.assert_close(logits, network(result.model, x), rtol=1e-4, atol=1e-5)
            base = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
            assert float((base.eval()(input_ids=x).logits - logits).abs().max()) > 1e-3  # it has been trained
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (out / file).read_bytes() == (tmp_path / "base" / file).read_bytes()
        assert Pretrained(str(out)).stored((16,), 97) is not None


@pytest.mark.long
def test_a_model_without_a_published_form_is_not_exported_so(tmp_path):
    from click.testing import CliRunner

    asked = {"workload": "digits", "method": "fedavg", "engine": {"backend": "local"}, "tracking": {"uri": "none"}}
    run(experiment({**asked, "federation": {"clients": 2, "cohort": 2, "rounds": 1}}), tmp_path / "run")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--as", "model", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "has no form that other packages read; export its tensors" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_small_model_is_made_by_a_command(tmp_path):
    """What it writes is what the function writes, and transformers reads it; a folder with files is left as it is."""
    from click.testing import CliRunner

    text, runner = write_text(tmp_path), CliRunner()
    asked = ["small-model", str(tmp_path / "made"), "--text", str(text), "--layers", "2", "--steps", "2"]
    assert runner.invoke(main, asked).exit_code == 0
    pretrain(tmp_path / "base", text, steps=2)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    package = transformers()
    sizes = {}
    for kind in ("llama", "gpt2"):
        asked = ["small-model", str(tmp_path / kind), "--text", str(text), "--kind", kind, "--steps", "1"]
        assert runner.invoke(main, asked).exit_code == 0
        sizes[kind] = package.AutoModelForCausalLM.from_pretrained(tmp_path / kind).num_parameters()
    assert sizes == {"llama": 750_848, "gpt2": 822_144}
    again = runner.invoke(main, asked)
    assert again.exit_code == 2
    assert again.stderr == f"error: FOLDER must be empty or new, got {tmp_path / 'gpt2'}; give another one\n"
    (tmp_path / "short.txt").write_text("short")
    short = runner.invoke(main, ["small-model", str(tmp_path / "none"), "--text", str(tmp_path / "short.txt")])
    assert short.exit_code == 2
    assert short.stderr.startswith("error: text must have 74 characters or more, got ")
    none = runner.invoke(main, ["small-model", str(tmp_path / "none"), "--text", str(tmp_path / "none.txt")])
    assert none.exit_code == 2
    assert none.stderr.endswith(
        "none.txt cannot be read (No such file or directory); give a file that is there and may be read\n"
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_no_code_of_a_tokeniser_runs(tmp_path, monkeypatch):
    """Nor is the user asked whether it may."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user is asked"))
    pretrain(tmp_path / "base", write_text(tmp_path), steps=1)
    (tmp_path / "base/config.json").unlink()
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}, "eos_token": "<end>"}
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "base/own.py").write_text("raise SystemExit")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    chat = Instruct(path=str(tmp_path / "chat.jsonl"), messages="messages", tokens=str(tmp_path / "base"))
    with pytest.raises(
        ValueError, match=r"cannot read the tokeniser in .*; give a folder whose tokeniser needs no code"
    ):
        chat.check()


@pytest.mark.long
def test_texts_are_classified(tmp_path, monkeypatch):
    """By the head of a decoder, in a run with adapters; the head is trained too. The base is read by tensors alone."""
    monkeypatch.setattr(Pretrained, "loaded", lambda *_: pytest.fail("the base is read as a whole"))
    pretrain(tmp_path / "base", write_text(tmp_path), steps=1)
    rows = [
        {"text": f"{word} times {i}", "mark": word, "of": "ab"[i % 2]} for i in range(20) for word in ("best", "worst")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workload = {
        "name": "text_classes",
        "path": str(tmp_path / "rows.jsonl"),
        "label": "mark",
        "labels": ["worst", "best"],
        "client": "of",
        "length": 12,
        "model": {"name": "pretrained", "folder": str(tmp_path / "base")},
        "adapter": {"name": "lora", "rank": 2, "train": ["score.*"]},
    }
    made = experiment(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.03}},
            "federation": {"clients": 2, "cohort": 2, "rounds": 5, "local": {"steps": 5, "batch": 8}},
            "engine": {"backend": "local"},
            "tracking": {"uri": "none"},
        }
    )
    result = run(made)
    assert result.rows[-1]["eval/accuracy"] == 1
    assert {"eval/auc", "eval/clients/test_loss"} <= set(result.rows[-1])
    with pytest.raises(ConfigError, match=r"labels must name all classes of .*, got no best; add it"):
        run(made.model_copy(update={"workload": {**workload, "labels": ["worst", "other"]}}))
