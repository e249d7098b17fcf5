"""The works of the benchmarks, as a plug-in. Their data are synthetic images, since only the speed matters.

    w1   LeNet, 61,706 parameters           1000 clients, cohorts of 100, 5 steps of 10
    w2   MLP 784-200-200-10, 199,210        1000 clients, cohorts of 100, 5 steps of 10
    w3   FEMNIST's CNN, 1,206,590           200 clients, cohorts of 20, 5 steps of 20
    w4   CNN4 with BatchNorm, 390,880       40 clients, cohorts of 8, 3 steps of 64
    w5   tanh RNN 300-64-64-2, T = 60       100 clients, cohorts of 20, 4 steps of 20
    w6   ResNet-18 with GroupNorm           10 clients, cohorts of 4, 2 steps of 20, 3 x 32 x 32
    w7   LSTM 256, two layers, T = 80       10 clients, cohorts of 4, 2 steps of 50, 79 classes
    w8   vision transformer, 9,523,722      10 clients, cohorts of 4, 2 steps of 16, 3 x 32 x 32

Inputs are standard normal, images of 1 x 28 x 28 if nothing else is said, with uniform labels; a client has exactly the
rows of one round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from ...workloads import counted
from ...workloads.classification import Classification
from ...workloads.client_index import ClientIndex
from ...workloads.models.convolutional import Cnn4, ResNet18
from ...workloads.models.recurrent import Lstm, Rnn
from ...workloads.models.small import LeNet, Mlp
from ...workloads.models.transformer import Vit
from ...workloads.workload import Columns, Model, Partition


@dataclass(frozen=True)
class Consecutive(Partition):
    """Client i has the rows from i n / N to (i + 1) n / N - 1."""

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        return ClientIndex.equal(np.arange(len(labels)), clients)


@dataclass(frozen=True)
class FemnistCnn(Model):
    """The convolutional network of FEMNIST, 1,206,590 parameters for 62 classes."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        features = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*features, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, classes))


@dataclass(frozen=True)
class Noise(Classification):
    """Classification of standard normal inputs. `examples`: number of training rows."""

    model: Model = LeNet()
    partition: Partition = Consecutive()
    examples: int = 50_000
    classes: int = 10  # pyright: ignore[reportIncompatibleVariableOverride]
    shape: tuple[int, ...] = (1, 28, 28)  # pyright: ignore[reportIncompatibleVariableOverride]

    def load(self) -> tuple[Columns, Columns]:
        return self._draw("train", self.examples), self._draw("test", 1000)

    def _draw(self, what: str, examples: int) -> Columns:
        rng = np.random.default_rng(int(counted.key(1, what)) & (1 << 63) - 1)
        label = rng.integers(0, self.classes, examples)
        return {"input": rng.standard_normal((examples, *self.shape), dtype=np.float32), "label": label}


COLOUR = (3, 32, 32)
"""The shape of small colour images."""

WORKLOADS = {
    "w1": lambda: Noise(LeNet()),
    "w2": lambda: Noise(Mlp((200, 200))),
    "w3": lambda: Noise(FemnistCnn(), examples=20_000, classes=62),
    "w4": lambda: Noise(Cnn4(), examples=7680),
    "w5": lambda: Noise(Rnn(64), examples=8000, classes=2, shape=(60, 300)),
    "w6": lambda: Noise(ResNet18(), examples=400, shape=COLOUR),
    "w7": lambda: Noise(Lstm(256), examples=1000, classes=79, shape=(80, 256)),
    "w8": lambda: Noise(Vit(), examples=320, shape=COLOUR),
}

FEDERATIONS = {
    "w1": {"clients": 1000, "cohort": 100, "local": {"steps": 5, "batch": 10}},
    "w2": {"clients": 1000, "cohort": 100, "local": {"steps": 5, "batch": 10}},
    "w3": {"clients": 200, "cohort": 20, "local": {"steps": 5, "batch": 20}},
    "w4": {"clients": 40, "cohort": 8, "local": {"steps": 3, "batch": 64}},
    "w5": {"clients": 100, "cohort": 20, "local": {"steps": 4, "batch": 20}},
    "w6": {"clients": 10, "cohort": 4, "local": {"steps": 2, "batch": 20}},
    "w7": {"clients": 10, "cohort": 4, "local": {"steps": 2, "batch": 50}},
    "w8": {"clients": 10, "cohort": 4, "local": {"steps": 2, "batch": 16}},
}
