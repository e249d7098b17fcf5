"""A network as a function of its tensors, and the modules that such a network may have beside plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from . import counted
from .models.functional import KeyedFunctions
from .models.narrow import Narrow, cast_up_in, is_narrower
from .workload import Params


class Keyed(nn.Module):
    """A module that is random in training. `key`: () int64, the source of its draws in this step; None in evaluation,
    where it must not draw."""

    key: Tensor | None = None


class Running(nn.Module):
    """A module with running statistics, which evaluation uses. They are buffers, and the server averages them.

    In training mode the module uses the statistics of the batch. `share`: (B,) the weight of each example in them, or
    None for equal weights. After a forward pass `moved` holds the new value of each buffer, by name; the buffers
    themselves are not written.
    """

    training: bool
    share: Tensor | None = None
    moved: Mapping[str, Tensor]


def buffers_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the module's running statistics. Raises ValueError for torch's BatchNorm modules."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ValueError(
                "running statistics must belong to fedfleet.workloads.models.norms.BatchNorm, which the server "
                f"averages, got torch's BatchNorm in {name}; call fedfleet.convert on the network"
            )
    return tuple(name for name, _, _ in statistics(module))


def parameters_of(module: nn.Module) -> dict[str, tuple[nn.Parameter, list[tuple[dict[str, Any], str]]]]:
    """name -> (parameter, the places in the modules that hold it, each a dictionary and a key). A parameter that is
    tied to another one is there once, under the first of its names in the order of `named_parameters`."""
    names: dict[nn.Parameter, str] = {}
    found: dict[str, tuple[nn.Parameter, list[tuple[dict[str, Any], str]]]] = {}
    for prefix, owner in module.named_modules():
        for leaf, value in owner._parameters.items():
            if value is not None:
                name = names.setdefault(value, f"{prefix}.{leaf}" if prefix else leaf)
                found.setdefault(name, (value, []))[1].append((owner._parameters, leaf))
    return found


def statistics(module: nn.Module) -> list[tuple[str, Running, str]]:
    """(full name, module that owns it, name in that module) of every running statistic."""
    owners = [(f"{name}." if name else "", part) for name, part in module.named_modules() if isinstance(part, Running)]
    return [(name + leaf, part, leaf) for name, part in owners for leaf in part._buffers]


class Stateless:
    """A module as a function of its parameters and running statistics.

    A call puts the given tensors in the place of the module's parameters. `torch.func.functional_call` does the same
    with more checks, and costs 40 to 90 microseconds per call on LeNet, 4 to 8 % of a local step.

    Frozen parameters may be given in a narrower type than the first tensor, see `models.narrow`.

    `draws`: whether the module's forward calls functions such as `F.dropout`, which then draw from the key. `without`:
    the shapes of inputs with which it called none in training. In all other trainings it is called in a context that
    looks at each of its functions, and never in evaluations, where torch has fast paths that it does not take in such a
    context.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        parameters = parameters_of(module)
        self.slots = [(name, *place) for name, (_, places) in parameters.items() for place in places]
        self.frozen = [name for name, (value, _) in parameters.items() if not value.requires_grad]
        self.narrow: list[Narrow] | None = None
        self.random = [part for part in module.modules() if isinstance(part, Keyed)]
        self.running = statistics(module)
        self.slots += [(name, owner._buffers, leaf) for name, owner, leaf in self.running]
        self.draws = False
        self.without: set[torch.Size | None] = set()

    def __call__(self, p: Params, x: Tensor, key: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        """The module's output for inputs x, (B, ...). `p`: all parameters and running statistics by name; tied ones
        have the first of their names. `key`: ()
        int64, source of randomness; given in training, None in evaluation, and it sets the module's mode, train() or
        eval(). `share`: (B,), see `Running`."""
        if self.module.training != (key is not None):
            self.module.train(key is not None)
        for name, parameters, leaf in self.slots:
            parameters[leaf] = p[name]  # pyright: ignore[reportArgumentType] torch runs on plain tensors too
        if self.frozen:
            self._cast_up(p)
        for number, part in enumerate(self.random):
            part.key = None if key is None else counted.key(key, "module", number)
        for _, part, _ in self.running:
            part.share = share
        shape = getattr(x, "shape", None)  # a workload may give its network several tensors
        if key is None or shape in self.without:
            return self.module(x)
        with KeyedFunctions(key) as functions:
            out = self.module(x)
        if functions.met:
            self.draws = True
        else:
            self.without.add(shape)
        return out

    def _cast_up(self, p: Params) -> None:
        """Have modules cast their frozen parameters up to the type of the first tensor, where any is narrower."""
        wide = next(iter(p.values())).dtype
        if self.narrow is None:
            if not any(is_narrower(p[name].dtype, wide) for name in self.frozen):
                return
            self.narrow = cast_up_in(self.module, wide)
        for part in self.narrow:
            part.wide = wide

    def drift(self, p: Params) -> Tensor:
        """A term () of value 0 that gives every running statistic its gradient: the old value minus the one that the
        last call computed; without a gradient where the modules were in `eval()`. See `Workload.buffers`."""
        moves = [(p[name], part.moved[leaf]) for name, part, leaf in self.running if part.training]
        if not moves:
            return next(iter(p.values())).new_zeros(())
        total = torch.stack([((old - new).detach() * old).sum() for old, new in moves]).sum()
        return total - total.detach()


NETWORK: ContextVar[Callable[[nn.Module], Stateless]] = ContextVar("NETWORK", default=Stateless)
"""What makes a module a function of its tensors where a workload first needs its network. The engine sets another one
to find the gradients of the module as it was written."""
