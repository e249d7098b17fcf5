"""Which tensors of a model `personal.tensors` and `personal.frozen` mean.

A layer is a module that owns parameters: those whose names have the same part before the last dot. Tensors of
normalisation layers belong to the layer before them, which they follow in a network, or to the first one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...workloads.stateless import Running, parameters_of, statistics
from ..errors import ConfigError, nearest

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, Running)
SHOWN = 8
"""The largest number of tensors that a message names."""


def normalisation_of(outline: nn.Module | None) -> frozenset[str]:
    """The names of the tensors of a network's normalisation layers."""
    if outline is None:
        return frozenset()
    owners = [name for name, part in outline.named_modules() if isinstance(part, NORMALISATION)]
    names = [*parameters_of(outline), *(name for name, _ in outline.named_buffers())]
    return frozenset(name for name in names if owner_of(name) in owners)


def momenta_of(outline: nn.Module | None) -> dict[str, float]:
    """Name of a running statistic of a network -> the fraction of the way that a batch moves it; {} where a layer does
    not say it."""
    if outline is None:
        return {}
    found = {name: getattr(part, "momentum", None) for name, part, _ in statistics(outline)}
    return {name: value for name, value in found.items() if value} if all(found.values()) else {}


def owner_of(name: str) -> str:
    """The name of the module that owns a tensor."""
    return name.rpartition(".")[0]


def layers_of(names: Sequence[str], norm: Collection[str]) -> list[list[str]]:
    """The tensors of each layer, in the order in which layers appear. norm: of normalisation layers."""
    owners = list(dict.fromkeys(owner_of(name) for name in names if name not in norm))
    layer_of: dict[str, str] = {}  # the owner of a tensor -> the one of its layer
    last = next(iter(owners), "")
    for name in names:
        last = last if name in norm else owner_of(name)
        layer_of.setdefault(owner_of(name), last)
    layers: dict[str, list[str]] = {owner: [] for owner in owners}
    for name in names:
        layers.setdefault(layer_of[owner_of(name)], []).append(name)
    return list(layers.values())


def chosen(
    form: Any, key: str, names: Sequence[str], statistics: Collection[str], norm: Collection[str], model: str
) -> tuple[str, ...]:
    """The names that a setting means, in the order of the model.

    form: its value. names: of all tensors of the model, the running statistics last, which `statistics` names. norm: of
    its normalisation layers. model: its name, for messages. Raises ConfigError for a form that means nothing here.
    """
    parameters = [name for name in names if name not in statistics]
    if isinstance(form, Mapping):
        return some_layers(form, key, names, norm)
    if not isinstance(form, str):
        return matching(form, key, names)
    if form in ("head", "body") and any(name.startswith("dual.") for name in names):
        last = names[-1]
        raise ConfigError(f"{key}: {form} is not defined where the last tensors are dual, got {last}; give patterns")
    if form in ("norm", "norm_parameters", "statistics"):
        found = {
            "norm": [name for name in names if name in norm or name in statistics],
            "norm_parameters": [name for name in parameters if name in norm],
            "statistics": [name for name in names if name in statistics],
        }[form]
        if not found:
            what = "running statistics" if form == "statistics" else "normalisation layers"
            raise ConfigError(
                f"{key}: {form} needs {what}, got {model}, which has none; choose head, or a network with norm: batch"
            )
        return tuple(found)
    head = [name for name in parameters if owner_of(name) == owner_of(parameters[-1])]
    sides = {"none": [], "all": names, "head": head, "body": [name for name in names if name not in head]}
    return tuple(sides[form])


def some_layers(form: Mapping[str, int], key: str, names: Sequence[str], norm: Collection[str]) -> tuple[str, ...]:
    """The tensors of the first or of the last layers."""
    ((side, count),) = form.items()
    layers = layers_of(names, norm)
    if count >= len(layers):
        raise ConfigError(
            f"{key}: 1 <= n < {len(layers)} layers must hold, got {side}: {count}; choose a method that sends "
            "nothing for local training"
        )
    some = layers[:count] if side == "first" else layers[-count:]
    wanted = {name for layer in some for name in layer}
    return tuple(name for name in names if name in wanted)


def matching(patterns: Sequence[str], key: str, names: Sequence[str]) -> tuple[str, ...]:
    """The tensors that one of the shell patterns matches."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern.strip("*.") or pattern, names)
            raise ConfigError(f"{key}: every pattern must name a tensor, got {pattern}; {near}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def shown(names: Sequence[str]) -> str:
    """Names for a message or a line of the log."""
    others = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{others}"
