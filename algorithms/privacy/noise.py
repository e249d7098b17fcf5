"""Noise on the sum of the clients' bounded messages, with a fixed divisor.

    mean_t = (sum over the cohort of the bounded messages + z_t C_t n_t) / S

n_t is what the mechanism makes of counted standard normal numbers. S is the configured size of the cohort, whatever the
number of clients that took part: with the number itself as divisor, a client that is absent would move the mean by more
than its bound. With a quantile (Andrew et al. 2021; TensorFlow Privacy) the server also learns, with noise, how many
messages were within the bound, and moves the bound:

    z_model = (z^-2 - (2 sigma_b)^-2)^(-1/2)           both releases together cost as much as z
    below_t = (sum of (b_i - 1/2) + sigma_b xi) / S + 1/2
    C_(t+1) = C_t exp(-lr (below_t - below))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...workloads import counted
from ..aggregation.contract import Noise, Released
from ..contract import Message, Round
from .clipping import Factors, WithCount, group_names
from .mechanism import Mechanism

PIECE = 1 << 20
"""Numbers that are drawn with one key. Pieces are part of the definition: numbers depend on the length of theirs."""


@dataclass(frozen=True)
class Quantile:
    """The bound follows a quantile of the norms.

    `start`: C_1. `below`: the share of messages that shall be within the bound. `lr`: the step size. `count_noise`:
    sigma_b, the standard deviation of the noise on the count, of which a cohort that stands for a larger one adds the
    share `shrunk`.
    """

    start: float = 0.1
    below: float = 0.5
    lr: float = 0.2
    count_noise: float = 0.0
    shrunk: float = 1.0


class NoiseState(NamedTuple):
    """bound: (), C of the next round; NaN without a quantile. multiplier: (), float64, the noise multiplier that was
    configured or calibrated; NaN if it follows a schedule. mechanism: the state of the mechanism."""

    bound: Tensor
    multiplier: Tensor
    mechanism: Any


@dataclass(frozen=True)
class ClientNoise(Noise):
    """Noise for client-level differential privacy.

    `cohort`: S. `rounds`: R. `multiplier_of`: t -> z_t; 0 in all rounds unless `noisy`, and else the same in all rounds
    unless `scheduled`. `bound_of`: t -> C_t without a quantile. `shrunk`: a factor on the noise of the sum, for a
    cohort that stands for a larger one. `scales`, `shares`: see `Clipped`. `dtype`: of the model, in which a quantile's
    bound is sent.
    """

    seed: int
    cohort: int
    rounds: int
    mechanism: Mechanism
    multiplier_of: Callable[[int], float]
    bound_of: Callable[[int], float]
    noisy: bool = True
    scheduled: bool = False
    quantile: Quantile | None = None
    shrunk: float = 1.0
    scales: Factors = ()
    shares: Factors = ()
    dtype: torch.dtype = torch.float32

    def init(self, sample: Message) -> NoiseState:
        zeros = [torch.zeros(tuple(leaf.shape), dtype=torch.float64) for leaf in noisy_leaves(sample)]
        bound = torch.tensor(self.quantile.start if self.quantile else math.nan, dtype=self.dtype)
        multiplier = math.nan if self.scheduled else self.multiplier_of(1)
        state = self.mechanism.init(zeros, self.rounds) if self.noisy else ()
        return NoiseState(bound, torch.tensor(multiplier, dtype=torch.float64), state)

    def release(self, sums: Message, state: NoiseState, round: Round) -> Released:
        t, leaves = round.number, noisy_leaves(sums)
        z = self.multiplier_of(t) if self.scheduled else float(state.multiplier)
        bound = float(state.bound) if self.quantile else self.bound_of(t)
        factors = self._factors(group_names(sums))
        columns = {"privacy/clip": bound}
        after, within = state, None
        if self.quantile is not None:
            below, following = self._moved(self.quantile, float(sums.sent.within), bound, z, t)
            within = torch.tensor(following, dtype=self.dtype)
            columns["privacy/below"] = below
            after = after._replace(bound=within)
            z = model_multiplier(z, self.quantile.count_noise)
        means = [leaf / self.cohort for leaf in leaves]
        if z != 0:
            noise, kept = self.mechanism.noise(
                t, Draws(self.seed, [tuple(leaf.shape) for leaf in leaves]), state.mechanism
            )
            deviation = z * bound * self.shrunk / self.cohort
            columns |= self._columns(means, factors, deviation * self.mechanism.deviation(t, self.rounds))
            scale = z * bound * self.shrunk
            means = [
                (leaf + scale * factor * drawn) / self.cohort
                for leaf, factor, drawn in zip(leaves, factors, noise, strict=True)
            ]
            after = after._replace(mechanism=kept)
        return Released(self._message(sums, means, within, round.cohort), after, columns)

    def _moved(self, quantile: Quantile, count: float, bound: float, z: float, t: int) -> tuple[float, float]:
        """(noisy share of messages within the bound, the next bound)."""
        drawn = (
            quantile.count_noise * float(counted.normal(counted.key(self.seed, "privacy", "below", t), 1)) if z else 0.0
        )
        below = (count + drawn) / self.cohort + 0.5
        return below, bound * math.exp(-quantile.lr * (below - quantile.below))

    def _factors(self, names: list[str]) -> list[float]:
        """For each leaf: the standard deviation of its noise over z C."""
        scales, shares = dict(self.scales), dict(self.shares)
        if not shares:
            return [1 / scales.get(name, 1.0) for name in names]
        whole = sum(share**2 for share in shares.values()) ** 0.5
        return [math.sqrt(len(shares)) * shares[name] / whole for name in names]

    def _columns(self, means: list[Tensor], factors: list[float], deviation: float) -> dict[str, float]:
        """noise: the standard deviation of one coordinate of the first leaf's noise. snr: the norm of that leaf's mean
        without noise over the norm that noise has, about."""
        deviation *= factors[0]
        size = float(torch.linalg.vector_norm(means[0]))
        return {"privacy/noise": deviation, "client/snr": size / (math.sqrt(means[0].numel()) * deviation)}

    def _message(self, sums: Message, means: list[Tensor], within: Tensor | None, count: int) -> Message:
        sent = sums.sent.sent if isinstance(sums.sent, WithCount) else sums.sent
        spec = pytree.tree_structure((sums.delta, sent, sums.averaged))
        delta, sent, averaged = pytree.tree_unflatten(means, spec)
        facts = {name: total / max(count, 1) for name, total in sums.facts.items()}
        facts["nonfinite"] = sums.facts["nonfinite"]  # a number of messages
        return Message(delta, sent if within is None else WithCount(sent, within), facts, averaged)


class Draws:
    """Standard normal numbers for leaves of these shapes, see `mechanism.Draw`."""

    def __init__(self, seed: int, shapes: list[tuple[int, ...]]) -> None:
        self.seed, self.shapes = seed, shapes

    def __call__(self, purpose: str, *where: int) -> list[Tensor]:
        return [self._leaf(leaf, shape, purpose, *where) for leaf, shape in enumerate(self.shapes)]

    def _leaf(self, leaf: int, shape: tuple[int, ...], purpose: str, *where: int) -> Tensor:
        size = math.prod(shape)
        pieces = []
        for piece, begin in enumerate(range(0, size, PIECE)):
            key = counted.key(self.seed, "privacy", purpose, *where, leaf, piece)
            pieces.append(counted.normal(key, min(PIECE, size - begin)))
        return torch.cat(pieces).view(shape) if pieces else torch.zeros(shape, dtype=torch.float64)


def noisy_leaves(message: Message) -> list[Tensor]:
    """The leaves of (delta, sent, averaged), without the count for the quantile."""
    sent = message.sent.sent if isinstance(message.sent, WithCount) else message.sent
    return pytree.tree_leaves((message.delta, sent, message.averaged))


def model_multiplier(z: float, count_noise: float) -> float:
    """z of the sum of the messages, where the noisy count and the sum together cost as much as z."""
    return (z**-2 - (2 * count_noise) ** -2) ** -0.5 if z else 0.0
