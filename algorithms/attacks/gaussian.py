"""Random messages, each Byzantine client its own: N(mean, std^2) in every coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ...workloads import counted
from . import draws
from .contract import CohortAttack, Columns, OwnAttack, Plan, Seen, Sender


@dataclass(frozen=True, kw_only=True)
class Gaussian(OwnAttack):
    """mean: of every coordinate. std: the standard deviation of every coordinate."""

    mean: float = 0.0
    std: float = 0.1
    called: ClassVar[str] = "gaussian"

    def send(self, own: Tensor, sender: Sender) -> Tensor:
        return (self.mean + self.std * counted.normal(sender.key, own.numel())).to(own.dtype)


@dataclass(frozen=True, kw_only=True)
class RelativeGaussian(CohortAttack):
    """std: in units of the root mean square of a coordinate of the known messages."""

    mean: float = 0.0
    std: float = 1.0
    called: ClassVar[str] = "gaussian"

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        return Plan((self.std * float(np.sqrt(seen.norms2.mean() / seen.length)),))

    def forge(self, x: Columns) -> np.ndarray:
        (std,), keys = x.numbers, [counted.key(x.key, place) for place in range(x.byzantine)]
        return np.stack([self.mean + std * draws.normal(key, x.length, x.begin, x.end).numpy() for key in keys])


def gaussian(
    mean: float = 0.0,
    std: float = 0.1,
    relative: float | None = None,
    share: float | None = None,
    clients: tuple[int, ...] | None = None,
    rounds: str | None = None,
) -> Gaussian | RelativeGaussian:
    """Random messages.

    mean: of every coordinate. std: the standard deviation of every coordinate. relative: the standard deviation in
    units of the root mean square of a coordinate of the honest messages, instead of `std`.
    """
    if relative is not None:
        return RelativeGaussian(mean=mean, std=relative, share=share, clients=clients, rounds=rounds)
    return Gaussian(mean=mean, std=std, share=share, clients=clients, rounds=rounds)
