"""Checks of the network of a workload, before anything starts.

Modules get their parameters as plain tensors, for a client alone or vectorised over clients. What torch keeps on its
parameters themselves does not survive that, and gradients are dense. A network that relies on the one or gives the
other is refused by name, because it would be trained in another way than by torch.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from ..errors import ConfigError


def check_network(network: nn.Module) -> None:
    """Raise ConfigError if the engine would not train a network as torch does. network: on any device, also "meta"."""
    parameters = dict(network.named_parameters())
    if parameters and not any(value.requires_grad for value in parameters.values()):
        raise ConfigError(
            f"workload: all {len(parameters)} parameters are frozen (requires_grad_(False)), so there is nothing to "
            "train; leave some of them trained"
        )
    for name, value in parameters.items():
        check_parameter(name, value)
    for name, part in network.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"workload: gradients must be dense, got module {name} ({type(part).__name__}) with sparse=True; leave "
                "it out"
            )
    check_memory(parameters)


def check_parameter(name: str, value: Tensor) -> None:
    """Raise ConfigError for a parameter with hooks, or of complex numbers."""
    for attribute, register in (
        ("_backward_hooks", "register_hook"),
        ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
    ):
        if getattr(value, attribute):
            raise ConfigError(
                f"workload: parameter {name} must have no hooks, which would not be called, got one of {register}; "
                "change its gradient in forward, by a torch.autograd.Function of the weight"
            )
    if value.is_complex():
        raise ConfigError(
            f"workload: parameters must be real, got {name} in {str(value.dtype).removeprefix('torch.')}; keep real "
            "and imaginary parts as two parameters"
        )


def check_memory(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for two parameters that share memory: a step of one of them would not move the other here."""
    of_storage: dict[int, list[str]] = {}
    for name, value in parameters.items():
        of_storage.setdefault(value.untyped_storage()._cdata, []).append(name)
    for names in of_storage.values():
        for one, other in combinations(names, 2):
            if overlap(parameters[one], parameters[other]):
                raise ConfigError(
                    f"workload: parameters {one} and {other} share memory and are not the same parameter; make them "
                    "one, and change its form in forward where the forms differ"
                )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory of two tensors of one storage overlaps, from the first to the last number of each."""
    begins, ends = zip(*map(extent, (a, b)), strict=True)
    return max(begins) < min(ends)


def extent(value: Tensor) -> tuple[int, int]:
    """(the place of the first number in the storage, the place behind the last one), in bytes."""
    begin, size = int(value.storage_offset()), value.element_size()
    last = sum((count - 1) * stride for count, stride in zip(value.shape, value.stride(), strict=True))
    return begin * size, (begin + last + 1) * size if value.numel() else begin * size


def wider_than(dtype: torch.dtype, network: nn.Module) -> str:
    """Which parameters have more digits than the type of a run, as in "out.weight and 3 others, in float64"; "" if none
    has."""
    least = torch.finfo(dtype).eps
    wider = [
        (name, value.dtype)
        for name, value in network.named_parameters()
        if value.is_floating_point() and torch.finfo(value.dtype).eps < least
    ]
    if not wider:
        return ""
    others = f" and {len(wider) - 1} others" if len(wider) > 1 else ""
    return f"{wider[0][0]}{others}, in {str(wider[0][1]).removeprefix('torch.')}"
