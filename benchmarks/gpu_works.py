"""The works of benchmarks/gpu.py, as a plug-in: synthetic rows, since only the speed matters, and networks of plain
torch, since a bare machine with a GPU has no torchvision.

    cnn        two convolutions of 5 x 5 and a layer of 384 on 3 x 32 x 32, 1,631,754 parameters
    resnet18   ResNet-18 with GroupNorm of two groups on 3 x 32 x 32, 11,173,962 parameters
    vit        the vision transformer of the model table on 3 x 32 x 32, 9,523,722 parameters
    lstm       two layers of 256 LSTM cells on 80 x 64, 79 classes, 875,343 parameters
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from fedfleet.tune.bench.works import COLOUR, Noise
from fedfleet.tune.bench.works import FEDERATIONS as CPU_FEDERATIONS
from fedfleet.tune.bench.works import WORKLOADS as CPU_WORKLOADS
from fedfleet.workloads.models.recurrent import Lstm
from fedfleet.workloads.models.transformer import Vit
from fedfleet.workloads.workload import Model


@dataclass(frozen=True)
class Cnn(Model):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        first = [nn.Conv2d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*first, *second, nn.Linear(4096, 384), nn.ReLU(), nn.Linear(384, classes))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm beside a shortcut: (B, inputs, h, w) -> (B, outputs, h / s, w / s)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)
        same = inputs == outputs and stride == 1
        projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(2, outputs))
        self.shortcut = nn.Identity() if same else projection

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.GroupNorm(2, 64)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        pairs = [(Residual(a, b, stride), Residual(b, b, 1)) for a, b, stride in widths]
        self.stages = nn.Sequential(*[block for pair in pairs for block in pair])
        self.out = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.stages(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


@dataclass(frozen=True)
class ResNet18(Model):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return ResNet(shape[0], classes)


CHARACTERS = (80, 64)
"""The shape of 80 embedded characters."""

WORKLOADS = {
    **{f"gpu_{name}": CPU_WORKLOADS[name] for name in ("w1", "w2", "w3")},
    "gpu_cnn": lambda examples=50_000: Noise(Cnn(), examples=examples, shape=COLOUR),
    "gpu_resnet18": lambda examples=50_000: Noise(ResNet18(), examples=examples, shape=COLOUR),
    "gpu_vit": lambda examples=10_000: Noise(Vit(), examples=examples, shape=COLOUR),
    "gpu_lstm": lambda examples=10_000: Noise(Lstm(), examples=examples, classes=79, shape=CHARACTERS),
}

FEDERATIONS = {
    **CPU_FEDERATIONS,
    "resnet18": {"clients": 100, "cohort": 20, "local": {"steps": 5, "batch": 50}},
    "vit": {"clients": 100, "cohort": 20, "local": {"steps": 5, "batch": 20}},
    "lstm": {"clients": 100, "cohort": 20, "local": {"steps": 5, "batch": 20}},
}


def workload_of(work: str, examples: int) -> str | dict[str, object]:
    """The workload of a work, by its name in FEDERATIONS. examples: the number of training rows, where it is free."""
    return f"gpu_{work}" if work in ("w1", "w2", "w3") else {"name": f"gpu_{work}", "examples": examples}
