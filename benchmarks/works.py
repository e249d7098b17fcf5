"""The works that only these benchmarks need, as a plug-in. Their data are noise, as those of `fedfleet bench`.

cnn4           CNN4 with BatchNorm, 390,880   100 clients of 64 rows
many_lenet     LeNet, 61,706 parameters       any number of clients of 10 rows
many_mlp       MLP 64-133-10, 9,985           any number of clients of 2 rows, 1 x 8 x 8
many_logistic  logistic regression, 650       the same clients
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfleet.tune.bench.works import Noise
from fedfleet.workloads.models.convolutional import Cnn4
from fedfleet.workloads.models.small import LeNet, Logistic, Mlp


@dataclass(frozen=True)
class SmallNoise(Noise):
    """The same with images of 8 x 8."""

    shape: ClassVar[tuple[int, ...]] = (1, 8, 8)


WORKLOADS = {
    "cnn4": lambda: Noise(Cnn4(), examples=6400),
    "many_lenet": lambda clients: Noise(LeNet(), examples=10 * clients),
    "many_mlp": lambda clients: SmallNoise(Mlp((133,)), examples=2 * clients),
    "many_logistic": lambda clients: SmallNoise(Logistic(), examples=2 * clients),
}
