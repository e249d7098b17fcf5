"""Methods with a shared momentum and normalised steps, whose sizes follow from S, K and R alone: PAdaMFed, PAdaMFed-VR.

Yan, Zhang, Wang, Cao, ICLR 2025 ("Problem-parameter-free federated learning").

Local steps are y <- y - lr u / |u|, |.| the norm over the whole model; everything else is in `shared_momentum`. Each
size that is not given is the method's own function of the cohort S, the local steps K and the rounds R.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..contract import Deferred, RunContext
from .checks import one_of, positive, positive_fraction
from .rules import Normalised
from .shared_momentum import Direction, ServerStep, SharedMomentum
from .warm_start import Start

Momentum = Literal["direction_mean", "plain"]


class Sizes(NamedTuple):
    lr: float
    gamma: float
    beta: float


@dataclass(frozen=True)
class Given:
    """Sizes that replace the parameter-free ones. server_lr = gamma / (lr K) stands for gamma."""

    lr: float | None = None
    gamma: float | None = None
    beta: float | None = None
    server_lr: float | None = None

    def __post_init__(self) -> None:
        positive(**{name: value for name, value in vars(self).items() if value is not None})
        if self.gamma is not None and self.server_lr is not None:
            raise ValueError(f"give gamma or server_lr, got gamma={self.gamma}, server_lr={self.server_lr}")
        if self.beta is not None:
            positive_fraction(beta=self.beta)


@dataclass(frozen=True)
class ParameterFree(Deferred):
    """`momentum`: G is the mean over clients and steps of u ("direction_mean"), or follows from the control variates
    ("plain"); `eps`: norms below it count as it."""

    given: Given
    momentum: Momentum
    start: Start = "gradient"
    eps: float = 1e-12

    def __post_init__(self) -> None:
        positive(eps=self.eps)
        one_of("zeros", "gradient", start=self.start)
        one_of("direction_mean", "plain", momentum=self.momentum)

    @abstractmethod
    def parameter_free(self, cohort: int, steps: int, rounds: int) -> Sizes:
        """The sizes for S, K and R, which need no knowledge of the problem."""

    @abstractmethod
    def direction(self, beta: float) -> Direction:
        """u, with control variates."""

    def sizes(self, context: RunContext) -> Sizes:
        """What is given, and the parameter-free sizes for the rest. gamma has no meaning where server_lr is given."""
        given = self.given
        gamma = 1.0 if given.server_lr is not None else given.gamma
        if given.lr is not None and gamma is not None and given.beta is not None:
            return Sizes(given.lr, gamma, given.beta)
        if context.steps is None:
            raise ValueError(
                "lr, gamma and beta must be given with federation.local.epochs, by which K differs between clients; "
                "give them, or federation.local.steps"
            )
        free = self.parameter_free(context.cohort, context.steps, context.rounds)
        return Sizes(given.lr or free.lr, gamma or free.gamma, given.beta or free.beta)

    def build(self, context: RunContext) -> SharedMomentum:
        lr, gamma, beta = self.sizes(context)
        momentum = "directions" if self.momentum == "direction_mean" else "controls"
        server_lr = self.given.server_lr
        server = ServerStep(gamma, 1.0, momentum) if server_lr is None else ServerStep(None, server_lr, momentum)
        return SharedMomentum(self.direction(beta), Normalised(lr, self.eps), server, self.start)
