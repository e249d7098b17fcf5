"""Fragments: the tensors of a model in groups that are exchanged in turns.

Layers are found by the first whole number in the names of tensors, as in `blocks.3.q.weight`. What comes before the
first layer, such as embeddings, is in its fragment, and what comes after another layer is in that one's. Where no name
has a number, each tensor is a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..tree import Layout
from .checks import one_of

LayerOrder = Literal["strided", "sequential"]
"""Which layers are in one fragment of F: each F-th one, or neighbours."""
Fragments = tuple[tuple[str, ...], ...]
"""The names of the tensors of each fragment."""


def layers_of(names: Sequence[str]) -> list[int]:
    """The layer of each tensor, from 0."""
    parts = [name.split(".") for name in names]
    numbered = [next((i for i, part in enumerate(each) if part.isdigit()), None) for each in parts]
    if not any(at is not None for at in numbered):
        return list(range(len(names)))
    found: dict[str, int] = {}
    layers, last = [], 0
    for each, at in zip(parts, numbered, strict=True):
        if at is not None:
            last = found.setdefault(".".join(each[: at + 1]), len(found))
        layers.append(last)
    return layers


def by_layers(layout: Layout, layers: int | None, count: int | None, order: LayerOrder) -> Fragments:
    """Fragments of `layers` layers each, or `count` fragments."""
    one_of("strided", "sequential", order=order)
    of_tensor = layers_of(layout.names)
    depth = max(of_tensor) + 1
    if count is None:
        assert layers is not None
        count = -(-depth // layers)
    if not 1 <= count <= depth:
        raise ValueError(f"1 <= fragments <= {depth} must hold for a model of {depth} layers, got fragments={count}")
    fragment = [i % count if order == "strided" else i * count // depth for i in range(depth)]
    return tuple(
        tuple(name for name, layer in zip(layout.names, of_tensor, strict=True) if fragment[layer] == f)
        for f in range(count)
    )


def by_patterns(layout: Layout, patterns: Sequence[Sequence[str]]) -> Fragments:
    """Fragments by patterns, * and ? as in file names; a tensor is in the first fragment that it matches."""
    found: list[list[str]] = [[] for _ in patterns]
    for name in layout.names:
        matches = (f for f, each in enumerate(patterns) if any(fnmatchcase(name, pattern) for pattern in each))
        if (first := next(matches, None)) is None:
            raise ValueError(f"fragments: {name} is in no fragment; add a pattern that it matches, as *")
        found[first].append(name)
    if empty := [str(list(each)) for each, names in zip(patterns, found, strict=True) if not names]:
        raise ValueError(f"fragments: no tensor is left for {empty[0]}; the tensors are {', '.join(layout.names)}")
    return tuple(map(tuple, found))


@lru_cache(maxsize=8)
def fragment_numbers(fragments: Fragments, layout: Layout, device: torch.device) -> Tensor:
    """(P,) int16: the number of the fragment, from 0, at each place of a flat vector."""
    of_name = {name: f for f, names in enumerate(fragments) for name in names}
    sized = zip(layout.names, layout.sizes, strict=True)
    return torch.cat([torch.full((size,), of_name[name], dtype=torch.int16, device=device) for name, size in sized])
