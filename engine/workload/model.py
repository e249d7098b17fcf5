"""Checks of the model of a workload, before anything starts.

Modules get their parameters as plain tensors, for a client alone or vectorised over clients. What torch keeps on its
parameters themselves does not survive that, and gradients are dense. A network that relies on the one or gives the
other is refused by name, because it would be trained in another way than by torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import part_name
from ..errors import ConfigError, type_and_first_line
from ..memory import bounded_address_space, is_out_of_memory
from ..user_code import location_clause


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


# --- memory -----------------------------------------------------------------------------------------------------------
def physical_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_size(outline: nn.Module) -> None:
    """Raise ConfigError if a network does not fit into this machine's memory. outline: see `Workload.outline`.

    The tensors are only measured here, not allocated. An allocation would succeed at first, since the kernel promises
    more memory than there is, and the process would be killed later.
    """
    parameters = list(outline.parameters())
    count = sum(each.numel() for each in parameters)
    size, memory = sum(each.numel() * each.element_size() for each in parameters), physical_memory()
    if size > memory:
        raise ConfigError(
            f"workload.model: the model must fit into memory, got {count:,} parameters, {size / 1e9:,.0f} GB, where "
            f"this machine has {memory / 1e9:,.0f} GB; choose a smaller one"
        )


@contextmanager
def building_model(workload: Any) -> Iterator[None]:
    """For code that builds a model: raises ConfigError if there is not enough memory for the model.

    workload: as the experiment gives it. The address space is bounded meanwhile. Without the bound the kernel would
    kill the process.
    """
    try:
        with bounded_address_space():
            yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"workload: the model of {part_name(workload)} cannot be allocated ({type_and_first_line(error)})"
            f"{location_clause(error)}, got {workload}; choose a smaller model"
        ) from error


# --- a model that the caller gives ------------------------------------------------------------------------------------
def tensors_of(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of a model's tensors or arrays on the CPU. Raises ConfigError for what is neither, or is not finite."""
    if not isinstance(model, Mapping):
        raise ConfigError(f"initial_model must map names to tensors, got {type(model).__name__}; give result.model")
    tensors = {}
    for name, value in model.items():
        try:
            tensor = torch.as_tensor(value).detach().cpu().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"initial_model: {name} must be a tensor or an array, got {value!r}") from error
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"initial_model: {name} must be finite, got infinite numbers or NaN; give another model")
        tensors[name] = tensor
    return tensors


def like(tensors: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The given tensors in the order of the workload's `tensors`. Raises ConfigError if names or shapes differ."""
    if set(given) != set(tensors):
        missing, unknown = sorted(set(tensors) - set(given)), sorted(set(given) - set(tensors))
        got = "; ".join([*[f"{name} is missing" for name in missing], *[f"{name} is not in it" for name in unknown]])
        raise ConfigError(f"initial_model must have the tensors of the workload's model, but {got}")
    for name, tensor in tensors.items():
        if given[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, got {tuple(given[name].shape)}"
            raise ConfigError(f"initial_model: {name} must have the shape {shapes}; give a model of this workload")
    return {name: given[name] for name in tensors}
