"""The works that only these benchmarks need, as a plug-in. Their data are noise, as those of `fedfleet bench`.

cnn4           CNN4 with BatchNorm, 390,880   100 clients of 64 rows
many_lenet     LeNet, 61,706 parameters       any number of clients of 10 rows
many_mlp       MLP 64-133-10, 9,985           any number of clients of 2 rows, 1 x 8 x 8
many_logistic  logistic regression, 650       the same clients
"""

from __future__ import annotations

from fedfleet.tune.bench.works import Noise
from fedfleet.workloads.models.convolutional import Cnn4
from fedfleet.workloads.models.small import LeNet, Logistic, Mlp

SMALL = (1, 8, 8)
"""The shape of an image."""

WORKLOADS = {
    "cnn4": lambda: Noise(Cnn4(), examples=6400),
    "many_lenet": lambda clients: Noise(LeNet(), examples=10 * clients),
    "many_mlp": lambda clients: Noise(Mlp((133,)), examples=2 * clients, shape=SMALL),
    "many_logistic": lambda clients: Noise(Logistic(), examples=2 * clients, shape=SMALL),
}
