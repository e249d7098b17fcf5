"""Small language models in folders as transformers writes them, trained on one text: bases for tests and studies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F

from .. import counted
from ..data.characters import TOKENS, read_text, tokens_of
from ..data.tokens import END_OF_BPE, FILE, of_characters
from ..drawing import initial
from .pretrained import transformers, without_progress

WIDTHS = {2: (64, 176), 4: (128, 352)}
"""Layers -> (width, inner width)."""
WARMUP, FLOOR, SHARE = 50, 0.1, 0.9
"""Steps until the learning rate is 1e-3, the share of it at the end, and the share of the text that is trained on."""


def configuration(kind: Literal["llama", "gpt2"], layers: int) -> Any:
    """The configuration of a small model of 97 characters with 128 positions."""
    package, (width, inner) = transformers(), WIDTHS[layers]
    tokens = {"vocab_size": TOKENS, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return package.GPT2Config(n_embd=width, n_layer=layers, n_head=4, n_positions=128, **rates, **tokens)
    return package.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=inner,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        **tokens,
    )


def pretrain(
    folder: str | Path,
    text: str | Path,
    kind: Literal["llama", "gpt2"] = "llama",
    layers: Literal[2, 4] = 2,
    steps: int = 300,
    seed: int = 0,
) -> float:
    """Train a small model on the first nine tenths of a text file, save it and its tokeniser in a folder, and return
    the loss of the last step. It needs `pip install "fedfleet[text]"`.

    AdamW with weight decay 0.1 of matrices, a cosine of learning rates from 1e-3, gradients clipped to norm 1, batches
    of 16 windows of 64 characters. The same arguments give the same model on one machine with as many threads.
    """
    tokens = torch.from_numpy(tokens_of(read_text(Path(text).expanduser()))).long()
    tokens, length = tokens[: round(SHARE * len(tokens))], 64
    if len(tokens) <= length + 1:
        raise ValueError(f"text must have {math.ceil((length + 2) / SHARE)} characters or more, got {text}")
    config = configuration(kind, layers)
    network: Any = initial(lambda: transformers().AutoModelForCausalLM.from_config(config), seed)
    matrices = [value for value in network.parameters() if value.ndim > 1]
    others = [value for value in network.parameters() if value.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    loss = torch.zeros(())
    for step in range(steps):
        u = max(step - WARMUP, 0) / max(steps - WARMUP, 1)
        factor = min((step + 1) / WARMUP, FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * u)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * factor
        begins = counted.numpy_generator(seed, "pretrain", step).integers(0, len(tokens) - length - 1, 16)
        windows = torch.stack([tokens[begin : begin + length + 1] for begin in begins.tolist()])
        logits = network(input_ids=windows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), windows[:, 1:].reshape(-1))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
    save(network, Path(folder))
    return float(loss.detach())


def save(network: Any, folder: Path) -> None:
    """Write a model of characters with its tokeniser."""
    with without_progress():
        network.save_pretrained(folder)
    (folder / FILE).write_text(of_characters(), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_BPE, "pad_token": END_OF_BPE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
