"""Modules of torch that a federated run cannot train as they are, and what takes their place.

    BatchNorm1d, 2d, 3d, SyncBatchNorm   `norms.BatchNorm`, the same function, whose running statistics the server
                                         averages; or GroupNorm, which has none
    Dropout, Dropout1d, 2d, 3d           `dropout.Dropout`, which draws from the key of the batch
    MultiheadAttention with dropout      `dropout.Attention`, also inside nn.TransformerEncoderLayer and its like
    StochasticDepth, DropPath            `dropout.Dropout` of whole rows (of torchvision and of timm)
    inplace=True                         inplace=False, because vectorised code writes nothing in place

Parameters keep their names and values, and an evaluation gives the same numbers, unless BatchNorm becomes GroupNorm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from .dropout import Attention, Dropout
from .norms import BatchNorm

CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (nn.Dropout, *CHANNELS)
GROUPS = 32
"""The largest number of groups of channels of GroupNorm, that of Wu and He 2018."""
KEYED = "a subclass of fedfleet.workloads.stateless.Keyed that draws from counted.uniform(self.key, count)"
DRAWING = (
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
"""Modules of torch that draw from its global generator, and for which nothing of ours takes their place."""


class Change(NamedTuple):
    """A module that was replaced. `name`: its name in the network, `was` and `now`: what it was, and what it is now."""

    name: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: {self.was} -> {self.now}"


class Converted(NamedTuple):
    """A network that a run can train, and what was changed in it."""

    module: nn.Module
    changes: tuple[Change, ...]

    @property
    def summary(self) -> str:
        """The changes in one line, such as "20 BatchNorm2d -> BatchNorm (bn1, …)"; "" without any."""
        counts = Counter((change.was, change.now) for change in self.changes)
        first = {(change.was, change.now): change.name for change in reversed(self.changes)}
        return "; ".join(
            f"{count} {was} -> {now} ({first[was, now]}{', …' if count > 1 else ''})"
            for (was, now), count in counts.items()
        )


def convert(module: nn.Module, norm: Literal["batch", "group"] = "batch", groups: int = GROUPS) -> Converted:
    """Make a network of torch one that a run can train; the key `model` of an experiment does so unasked.

        net, changes = fedfleet.convert(torchvision.models.resnet18(num_classes=10))

    The module itself is changed, unless it is replaced as a whole. Parameters keep their names and values, running
    statistics too, but for the counts of batches. norm: what takes the place of torch's BatchNorm: "batch", which
    computes the same, and whose running statistics the server averages, or "group", GroupNorm with `groups` of
    channels, or the greatest common divisor of that and their number, in which rows are normalised by themselves.

    Raises ValueError, with the name of the module, for what cannot be converted: a BatchNorm with momentum=None or
    with a forward of its own, an InstanceNorm with running statistics, dropout between the layers of nn.LSTM, nn.GRU
    and nn.RNN, and other modules of torch that draw from its global generator.
    """
    if norm not in ("batch", "group"):
        raise ValueError(f"norm must be batch or group, got norm={norm!r}")
    if groups < 1:
        raise ValueError(f"groups >= 1 must hold, got groups={groups}")
    changes: list[Change] = []
    batch_axes = {each: axis for part in module.modules() for each, axis in batch_axes_of(part)}

    def counterpart_of(part: nn.Module) -> nn.Module:
        return counterpart(part, norm, groups, batch_axes.get(part, 0))

    return Converted(converted(module, "", counterpart_of, {}, changes), tuple(changes))


def converted(
    part: nn.Module,
    name: str,
    counterpart_of: Callable[[nn.Module], nn.Module],
    replaced: dict[nn.Module, nn.Module],
    changes: list[Change],
) -> nn.Module:
    """What takes the place of a module and of the modules in it; `replaced` and `changes` get what is done. name: of
    the module in the network. It is no function in `convert`, which would refer to itself and to the network, so that
    this would stay in memory until Python's collector of garbage finds it."""
    if part not in replaced:
        was = type(part).__name__
        try:
            replaced[part] = now = counterpart_of(part)
        except ValueError as error:
            where = f"module {name} ({was})" if name else f"module {was}"
            raise ValueError(f"{where} {error}") from None
        if now is not part or type(now).__name__ != was:
            vars(now).update({key: value for key, value in vars(part).items() if "_hooks" in key})
            ours = "fedfleet's " if type(now).__module__.startswith("fedfleet.") else ""
            changes.append(Change(name, was, ours + type(now).__name__))
        if getattr(now, "inplace", False) is True:
            now.inplace = False  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
            changes.append(Change(name, f"{was}(inplace=True)", "inplace=False"))
        for key, inner in list(now._modules.items()):
            if inner is not None:
                path = f"{name}.{key}" if name else key
                now._modules[key] = converted(inner, path, counterpart_of, replaced, changes)
    return replaced[part]


def batch_axes_of(part: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """(dropout, axis of the examples in its inputs) for those of torch's layers of transformers, which have the words
    first unless they are told otherwise."""
    if isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and not part.self_attn.batch_first:
        yield from ((each, 1) for each in part.children() if isinstance(each, nn.Dropout))


def counterpart(part: nn.Module, norm: str, groups: int, batch: int) -> nn.Module:
    """What takes the place of a module: itself where it can be trained as it is. Raises ValueError, without the name of
    the module, if there is nothing. batch: the axis of the examples."""
    if isinstance(part, _BatchNorm) and part.track_running_stats:
        return normalisation(part, norm, groups)
    if isinstance(part, _NormBase) and part.track_running_stats:
        raise ValueError("has running statistics, which only BatchNorm may have; set its track_running_stats to False")
    if isinstance(part, DROPOUTS) and keeps(part, *DROPOUTS) and part.p:
        return Dropout(part.p, channels=isinstance(part, CHANNELS), batch=batch)
    if isinstance(part, nn.MultiheadAttention) and keeps(part, nn.MultiheadAttention) and part.dropout:
        Attention.become_keyed(part)
    elif isinstance(part, nn.RNNBase) and part.dropout and part.num_layers > 1:
        raise ValueError(
            "draws its dropout between layers inside of torch, got "
            f"dropout={part.dropout:g}; set it to 0, or stack modules of one layer with nn.Dropout between them"
        )
    elif isinstance(part, DRAWING) and getattr(part, "p", 1):
        raise ValueError(f"draws from torch's global generator; use nn.Dropout or {KEYED} in its place")
    elif (rate := depth_rate(part)) is not None:
        return Dropout(rate, rows=True)
    elif getattr(part, "fused_attn", False) and rate_of(getattr(part, "attn_drop", None)):
        part.fused_attn = False  # pyright: ignore  timm's attention; the fused one draws by itself, the other calls attn_drop
    return part


def keeps(part: nn.Module, *of: type[nn.Module]) -> bool:
    """Whether a module has the forward of one of these classes, and none of its own."""
    return any(type(part).forward is each.forward for each in of)


def rate_of(part: Any) -> float:
    """The rate of a module of dropout; 0 for everything else."""
    return part.p if isinstance(part, nn.Dropout | Dropout) else 0.0


def depth_rate(part: nn.Module) -> float | None:
    """The rate of a module of stochastic depth that drops rows, of torchvision or timm; None for all others, and where
    nothing is dropped."""
    kind = f"{type(part).__module__.partition('.')[0]}.{type(part).__name__}"
    if kind == "torchvision.StochasticDepth" and part.mode == "row":
        return part.p or None  # pyright: ignore[reportReturnType]
    if kind == "timm.DropPath" and part.scale_by_keep:
        return part.drop_prob or None  # pyright: ignore[reportReturnType]
    return None


# --- normalisation ----------------------------------------------------------------------------------------------------
class ThenActivated(nn.Module):
    """A normalisation that has its own dropout and activation behind it, as timm's BatchNormAct2d. `drop`, `act`:
    these two."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))  # pyright: ignore[reportAttributeAccessIssue] a class beside this


class BatchNormAct(ThenActivated, BatchNorm):
    """`BatchNorm` with dropout and an activation."""


class GroupNormAct(ThenActivated, nn.GroupNorm):
    """GroupNorm with dropout and an activation."""


def normalisation(part: _BatchNorm, norm: str, groups: int) -> nn.Module:
    """What takes the place of a BatchNorm with running statistics. Raises ValueError, without the name of the module,
    if nothing can."""
    activated = type(part).__name__ == "BatchNormAct2d" and type(part).__module__.startswith("timm.")
    if not activated and not keeps(part, nn.BatchNorm1d, nn.SyncBatchNorm):
        raise ValueError("has a forward of its own, which has no counterpart; put fedfleet's BatchNorm in its place")
    channels = part.num_features
    if norm == "group":
        kind = GroupNormAct if activated else nn.GroupNorm
        made: nn.Module = kind(gcd(groups, channels), channels, part.eps, part.affine)
    elif part.momentum is None:
        raise ValueError("has momentum=None, a mean over all batches, which the server cannot average; set one, as 0.1")
    else:
        made = (BatchNormAct if activated else BatchNorm)(channels, part.eps, part.momentum, part.affine)
        made._buffers.update({name: part._buffers[name] for name in made._buffers})
    made._parameters.update(part._parameters)
    if activated:
        made.drop, made.act = part.get_submodule("drop"), part.get_submodule("act")
    return made.train(part.training)
