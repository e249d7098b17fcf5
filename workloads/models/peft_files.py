"""Adapters as the package peft writes and reads them: `adapter_config.json` and `adapter_model.safetensors`.

The names of tensors there are `base_model.model.<module>.lora_A.weight` and `lora_B`, those of embeddings
`lora_embedding_A` and `lora_embedding_B`; parameters that are trained as they are have their names behind the same
prefix. Shapes are those of `adapters`. peft itself is not needed. Mangrulkar et al. 2022, github.com/huggingface/peft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..stateless import parameters_of, statistics

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def names_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """(name of a factor here, its name in peft's file) of all adapted modules, name -> module."""
    for name, module in modules.items():
        own, theirs = (f"{name}.", f"{PREFIX}{name}.") if name else ("", PREFIX)
        for factor in "ab":
            embedding = isinstance(module, nn.Embedding)
            there = f"lora_embedding_{factor.upper()}" if embedding else f"lora_{factor.upper()}.weight"
            yield f"{own}lora_{factor}", theirs + there


def check_whole(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for factors of a part of a weight: peft has them for whole weights alone."""
    for name, module in modules.items():
        if not hasattr(module, "weight"):
            raise ValueError(
                f"peft's adapters have factors of whole weights, got those of the part {name}; give fused: whole, or "
                "export the merged model"
            )


def written(
    settings: Any, network: nn.Module, modules: Mapping[str, nn.Module], p: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The content of the two files: CONFIG -> a mapping, TENSORS -> name -> tensor.

    settings: a `Lora`. network: with its adapters; modules: those that are adapted. p: all tensors of the network.
    Raises ValueError for a network with running statistics, or factors of parts, which no adapter of peft has.
    """
    check_whole(modules)
    if found := statistics(network):
        raise ValueError(f"peft's adapters have no running statistics, got {found[0][0]}; export the merged model")
    names = dict(names_of(modules))
    trained = [name for name, (value, _) in parameters_of(network).items() if value.requires_grad and name not in names]
    whole = sorted({name.rpartition(".")[0] for name in trained})
    tensors = {theirs: p[own] for own, theirs in names.items()}
    tensors |= {f"{PREFIX}{name}": p[name] for name in p if name.rpartition(".")[0] in whole and name not in names}
    config = {
        "peft_type": "LORA",
        "r": settings.rows,
        "lora_alpha": settings.alpha_of(settings.rows),
        "use_rslora": settings.stabilised,
        "lora_dropout": settings.dropout,
        "target_modules": "|".join(re.escape(name) for name in modules),  # a text has to match the whole name
        "modules_to_save": whole or None,
        "fan_in_fan_out": any(type(module).__name__.endswith("Conv1D") for module in modules.values()),
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }
    return {CONFIG: config, TENSORS: tensors}


def read(folder: Path, settings: Any, network: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The factors in a folder of peft, and the other trained parameters that it has, by their names here.

    settings, network, modules: as for `written`. Raises ValueError for an adapter with another scale or of another
    kind, with other factors than the modules have, or with parameters that are not trained.
    """
    check_whole(modules)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"factors must be a folder with {CONFIG} and {TENSORS}, got {folder}: {error}") from error
    rank, alpha = settings.rows, settings.alpha_of(settings.rows)
    for key, wanted in (("r", rank), ("lora_alpha", alpha), ("use_rslora", settings.stabilised)):
        if config.get(key, False) != wanted:
            raise ValueError(
                f"factors: {key} must be {wanted}, as the settings say, got {config.get(key)} in {folder}; give the "
                "settings of the folder"
            )
    for key in ("use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise ValueError(
                f"factors: adapters with {key} are not known, got {config[key]} in {folder}; give a folder without it"
            )
    names, parameters = dict(names_of(modules)), parameters_of(network)
    trained = {name: value for name, (value, _) in parameters.items() if value.requires_grad}
    wanted = {name: names.get(name, f"{PREFIX}{name}") for name in trained}
    found = {name: tensors[theirs] for name, theirs in wanted.items() if theirs in tensors}
    for name, value in trained.items():
        if name not in found and name not in names:
            continue  # it begins as in the network
        shape, got = tuple(value.shape), tuple(found[name].shape) if name in found else "none"
        if got != shape:
            raise ValueError(f"factors: {name} must have the shape {shape}, got {got} in {folder}; change targets")
    whole = {name.rpartition(".")[0] for name in trained}  # modules of which peft has all parameters
    known = {*wanted.values(), *(f"{PREFIX}{name}" for name in parameters if name.rpartition(".")[0] in whole)}
    if others := sorted({*tensors} - known):
        raise ValueError(f"factors: {others[0]} in {folder} is of no trained module; change targets or train")
    return found
