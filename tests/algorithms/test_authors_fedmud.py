"""The update of one client beside the program of FedMUD's authors, at equal draws.

Li et al. published their code (github.com/Leopold1423/fedmud-icml25, commit 284e36e). The numbers below are what its
classes in decompose/dmu.py compute in float64, trained by torch's SGD as in train/trainer.py: a convolution, a
compressed one and a linear layer, one client, two rounds of four full-batch steps of 0.1, with the merge and the new
draws between the rounds. Its factors were given the values that are drawn here; it chose the same ranks and blocks
for the ratio. `MODELS` has the sum, the sum of squares and the first entry of the compressed weight, merged with its
update, after each of the two rounds.

TOLERANCE: the numbers are written with 12 digits.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.fedmud_aad import fedmud_aad
from fedfleet.algorithms.fedmud_bkd import fedmud_bkd
from fedfleet.algorithms.fedmud_bkd_aad import fedmud_bkd_aad
from fedfleet.algorithms.fedmud_bkd_f import fedmud_bkd_f
from fedfleet.algorithms.fedmud_f import fedmud_f
from fedfleet.algorithms.parts.rules import Sgd
from tests.algorithms.driver import run, tree

TOLERANCE = 1e-10
SHAPES = {"first": (3, 1, 3, 3), "middle": (4, 3, 3, 3), "last": (3, 4)}
STEPS, RATE, A, RATIO, SEED = 4, 0.1, 0.5, 0.6, 3
METHODS = {
    "mat ab": fedmud,
    "mat fab": fedmud_f,
    "mat fab+cfd": fedmud_aad,
    "kron ab": fedmud_bkd,
    "kron fab": fedmud_bkd_f,
    "kron fab+cfd": fedmud_bkd_aad,
}
"""The authors' dmu_type and dmu_pattern -> the method here."""


def start() -> dict[str, np.ndarray]:
    """Weights 0.5 sin(1 + 1.7 j), where j counts all entries of the model."""
    made, begin = {}, 0
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        made[name] = 0.5 * np.sin(1 + 1.7 * np.arange(begin, begin + size)).reshape(shape)
        begin += size
    return made


IMAGES = torch.from_numpy(np.cos(0.9 * np.arange(5 * 16)).reshape(5, 1, 4, 4))
LABELS = torch.arange(5) % 3


def logits(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x = F.relu(F.conv2d(IMAGES, p["first"], padding=1))
    x = F.relu(F.conv2d(x, p["middle"], padding=1))
    return x.mean((2, 3)) @ p["last"].T


def gradient(i: int, x: dict[str, np.ndarray], r: int, k: int) -> dict[str, np.ndarray]:
    p = {name: torch.from_numpy(np.array(value)).requires_grad_() for name, value in x.items()}
    found = torch.autograd.grad(F.cross_entropy(logits(p), LABELS), [*p.values()])
    return {name: value.numpy() for name, value in zip(p, found, strict=True)}


def built(name: str):
    layout = tree(start()).layout
    return METHODS[name](Sgd(RATE), RATIO, A).build(RunContext(1, 1, 2, None, SEED, layout))


def ours(name: str) -> list[np.ndarray]:
    """The compressed weight after each round."""
    problem = SimpleNamespace(start=start(), clients=1, gradient=gradient)
    return [
        model["middle"].numpy()
        for model in run(built(name), problem, [[0], [0]], {(0, 0): STEPS, (1, 0): STEPS}).models()
    ]


MODELS = {
    "mat ab": [[0.198670949421, 13.4303587772, 0.111133574685], [0.198008747334, 13.435401676, 0.111242551876]],
    "mat fab": [[0.154845307369, 13.4116471658, 0.110896127353], [0.186507605786, 13.4101112189, 0.109613243636]],
    "mat fab+cfd": [[0.179696006521, 13.4042137327, 0.110236334975], [0.19136081375, 13.4024449837, 0.110511826623]],
    "kron ab": [[0.153061883823, 13.4072008269, 0.110627064124], [0.153474359012, 13.4049516445, 0.110452113209]],
    "kron fab": [[0.164655388862, 13.4100634383, 0.111026313253], [0.16392408833, 13.4117229925, 0.111008902756]],
    "kron fab+cfd": [[0.155585268779, 13.4066964875, 0.110592830524], [0.157818213362, 13.4062584849, 0.110539615263]],
}


@pytest.mark.parametrize("name", METHODS)
def test_the_update_is_that_of_the_authors_program(name):
    found = [[w.sum(), (w**2).sum(), w.flat[0]] for w in ours(name)]
    np.testing.assert_allclose(found, MODELS[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert abs(found[1][1] - found[0][1]) > 1e-4, "nothing moved in the second round"
