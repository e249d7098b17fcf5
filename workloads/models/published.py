"""Networks of torchvision and timm by their names, with the inputs and the classes of the workload.

Nothing is downloaded. Initial weights are drawn as the package draws them, or read from a safetensors file. Its last
layer is used only if it has the workload's number of classes. For grey images the weights of the first convolution are
added up over the colours, so that a grey image gives what the colour image with three such channels would give; for
other numbers of channels than three they are taken in turns and scaled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..files.vision import torchvision_models
from ..stateless import parameters_of
from ..workload import Model
from .convert import GROUPS, convert
from .stored import StoredTensors, headers_of


@dataclass(frozen=True)
class Published(Model):
    """A network of a package by its name. `network`: the name, such as resnet18. `norm`: what takes the place of
    BatchNorm: batch, the same function, whose running statistics the server averages, or group. `groups`: the largest
    number of groups of channels of GroupNorm. `weights`: a safetensors file with initial weights. `arguments`: further
    arguments of the package's function."""

    network: str = "resnet18"
    norm: Literal["batch", "group"] = "batch"
    groups: int = GROUPS
    weights: str | None = None
    arguments: dict[str, Any] | None = field(default=None, hash=False)

    package: ClassVar[str]

    def files(self) -> Mapping[str, Path]:
        return {} if self.weights is None else {"weights": Path(self.weights).expanduser()}

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The names of all networks of the package. Raises ValueError if the package is not installed."""

    @abstractmethod
    def made(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The package's network for images of this size with three channels."""

    def adapted(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        """Change the network for images of this shape."""
        take_channels(net, shape[0])

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 3:
            raise ValueError(f"{self.network} needs inputs (channels, height, width), got shape={shape}; choose mlp")
        known = list(self.names())
        if self.network not in known:
            near = get_close_matches(self.network, known, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"{self.package}.list_models() has their names"
            raise ValueError(f"network must be one of {len(known)} of {self.package}, got {self.network!r}; {hint}")
        for name in self.arguments or {}:
            if "weights" in name or "pretrained" in name or "checkpoint" in name:
                raise ValueError(f"arguments must not have {name}: nothing is downloaded; give a file as `weights`")
        try:
            net = self.made(shape, classes)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{self.network} does not take arguments={self.arguments}: {error}") from error
        if self.weights is not None:
            load(net, Path(self.weights).expanduser())
        self.adapted(net, shape)
        return convert(net, self.norm, self.groups).module if self.norm == "group" else net


@dataclass(frozen=True)
class Torchvision(Published):
    """A network of torchvision for images. `small`: for images of at most 64 pixels or so, a ResNet begins with a
    3 x 3 convolution and has no pooling behind it, as in the experiments of He et al. 2016 with CIFAR."""

    small: bool = False
    package: ClassVar[str] = "torchvision"

    def names(self) -> Iterable[str]:
        models = torchvision_models()
        return models.list_models(module=models)

    def made(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        more: dict[str, Any] = {"num_classes": classes}
        if self.network.startswith("vit_"):
            more["image_size"] = shape[1]
        elif self.network in ("googlenet", "inception_v3"):  # one tensor of logits, and weights that are quick to draw
            more |= {"aux_logits": False, "init_weights": False}
        return torchvision_models().get_model(self.network, **{**more, **(self.arguments or {})})

    def adapted(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        if not self.small:
            return super().adapted(net, shape)
        first = getattr(net, "conv1", None)
        if not isinstance(first, nn.Conv2d) or not hasattr(net, "maxpool"):
            raise ValueError(f"small is for ResNets, which have conv1 and maxpool, got {self.network}; leave it out")
        net.conv1 = nn.Conv2d(shape[0], first.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.maxpool = nn.Identity()


@dataclass(frozen=True)
class Timm(Published):
    """A network of timm (PyTorch Image Models) for images; it needs `pip install timm`."""

    package: ClassVar[str] = "timm"

    def names(self) -> Iterable[str]:
        return timm().list_models()

    def made(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return timm().create_model(self.network, pretrained=False, num_classes=classes, **(self.arguments or {}))


def timm() -> Any:
    """The package. Raises ValueError if it is not installed."""
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError("model timm needs the package timm, got no such module; run: pip install timm") from error
    return timm


def load(net: nn.Module, path: Path) -> None:
    """Give a network the weights of a safetensors file; its last layer only if it has the same shape there. A network
    on the device "meta" stays as it is. Raises ValueError if a tensor of another layer is missing or has another
    shape."""
    from safetensors import SafetensorError, safe_open

    own = {name: value for name, value in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    last = list(dict(net.named_parameters()))[-1].rpartition(".")[0]
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
            fit = [name for name, value in own.items() if shapes.get(name) == tuple(value.shape)]
            for name, value in own.items():
                if name not in fit and name.rpartition(".")[0] != last:
                    got = f"the shape {shapes[name]}" if name in shapes else "no such tensor"
                    raise ValueError(
                        f"weights must be those of this network, got {got} for {name}, {tuple(value.shape)}, in {path}"
                    )
            if torch.get_default_device().type != "meta":
                net.load_state_dict({name: file.get_tensor(name) for name in fit}, strict=False)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"weights must be a safetensors file, got {path}: {error}") from error


def stored_in(path: Path, net: nn.Module) -> StoredTensors | None:
    """The parameters that `load` takes from a file, each read when it is asked for; None where they have several types
    in the network, which may be on any device."""
    there, own = headers_of(path), {name: value for name, (value, _) in parameters_of(net).items()}
    fit = [name for name, value in own.items() if name in there and there[name].shape == tuple(value.shape)]
    types = {value.dtype for value in own.values()}
    return StoredTensors({name: there[name] for name in fit}, (*types,)) if len(types) == 1 else None


def take_channels(net: nn.Module, channels: int) -> None:
    """Have the first convolution take images of so many channels. Raises ValueError if that is impossible."""
    first = next((part for part in net.modules() if isinstance(part, nn.Conv2d)), None)
    if first is None or first.in_channels == channels:
        return
    if first.groups != 1:
        raise ValueError(
            f"the network takes images of {first.in_channels} channels, got {channels}; choose another network"
        )
    first.weight = nn.Parameter(over_channels(first.weight.detach(), channels))
    first.in_channels = channels


def over_channels(weight: Tensor, channels: int) -> Tensor:
    """(out, channels, h, w) from (out, c, h, w): the weights in turns, scaled by c / channels; for one channel their
    sum."""
    if channels == 1:
        return weight.sum(1, keepdim=True)
    before = weight.shape[1]
    repeated = weight.repeat(1, -(-channels // before), 1, 1)[:, :channels]
    return repeated * (before / channels)
