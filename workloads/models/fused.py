"""Projections of queries, keys and values that are one weight, and the outputs of each of the three.

    GPT-2   c_attn      q, k, v: a third of the outputs each
    Phi-3   qkv_proj    q: heads x size of a head; k, v: heads of keys and values x size of a head, each

Other architectures of transformers have such weights, too, and order their outputs otherwise: GPT-NeoX's
query_key_value has q, k and v of one head side by side.
"""

from __future__ import annotations

from typing import Any

from torch import nn

INTERLEAVED = {"gpt_neox": "query_key_value"}
"""Architecture -> the last part of the name of a weight whose parts are no slices of its outputs."""


def part_sizes(network: nn.Module, name: str) -> dict[str, int] | None:
    """Part -> the number of its outputs, of a fused projection in the order of its outputs; None for a module that is
    none, or whose parts are not known. network: of transformers, with its configuration; name: of a module of it."""
    config: Any = getattr(network, "config", None)
    place = (getattr(config, "model_type", None), name.rpartition(".")[2])
    if place == ("gpt2", "c_attn"):
        return dict.fromkeys("qkv", int(config.hidden_size))
    if place == ("phi3", "qkv_proj"):
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        own, common = config.num_attention_heads, config.num_key_value_heads
        return {"q": int(size * own), "k": int(size * common), "v": int(size * common)}
    return None


def check_parts(network: nn.Module, names: list[str], fused: tuple[str, ...]) -> None:
    """Raise ValueError unless one of the modules with these names is a fused projection whose parts are known, and none
    is one whose parts are no slices. fused: the wanted parts."""
    family = getattr(getattr(network, "config", None), "model_type", type(network).__name__)
    wrong = next((name for name in names if name.rpartition(".")[2] == INTERLEAVED.get(family)), None)
    if wrong is not None:
        raise ValueError(
            f"fused: the parts of {wrong.rpartition('.')[2]} in {family} are interleaved, got fused={[*fused]}; give "
            "fused: whole"
        )
    if not any(part_sizes(network, name) for name in names):
        raise ValueError(
            f"fused: no target in {family} is a projection whose parts are known, got fused={[*fused]}; give fused: "
            "whole, or the targets c_attn of gpt2 or qkv_proj of phi3"
        )
