"""PAdaMFed and PAdaMFed-VR: SCAFFOLD-M and SCAFFOLD-VR by normalised steps, whose sizes follow from S, K and R alone.

Yan, Zhang, Wang, Cao, ICLR 2025 ("Problem-parameter-free federated learning").

    y   <- y - lr u / |u|,  g = g(y), g' = g(x_prev) on the same batch, |.| over the whole model
           PAdaMFed      u = beta (g - c_i + c) + (1 - beta) G
           PAdaMFed-VR   u = g - beta (c_i - c) + (1 - beta) (G - g')
    c_i <- mean of the K gradients g
    x   <- x - gamma mean of (x - y_K) / (lr K)
    G   <- beta (mean change of c_i + c) + (1 - beta) G          "plain"; c of before the next line
    c   <- c + |S|/N mean(change of c_i)

The machinery is that of `cheng`. Uncertain: no official code was found and the rules come from third-party code,
reviews and successors. All default sizes are: lr = 1 / (K sqrt R), gamma = (S K)^(1/4) / R^(3/4), beta = (S K /
R)^(1/2); with VR lr = 1 / (K R), gamma = beta = (S K)^(1/3) / R^(2/3); an alternative for lr without VR is 1 / (K R).
So is the momentum of VR: "direction_mean", the mean over clients and steps of u (one vector more up), is the default
since it is STORM's; "plain" is the line above, as in the third-party code; without VR both are the same. x_prev is the
server's model before the last, also where not all take part.

Departures:
- The opening is a pass over all data and not one batch.
- beta is cut at 1.
- eps, which is ours, only guards u = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .cheng import Direction, ServerStep, SharedMomentum, Start
from .contract import Deferred, RunContext
from .parts.rules import Normalised, positive

Momentum = Literal["direction_mean", "plain"]


class Sizes(NamedTuple):
    lr: float
    gamma: float
    beta: float


def parameter_free(context: RunContext, reduced: bool) -> Sizes:
    """The step sizes that know nothing of the problem."""
    if context.steps is None:
        raise ValueError("lr, gamma and beta must be given with federation.local.epochs: K differs between clients")
    k, rounds, both = context.steps, context.rounds, context.cohort * context.steps
    if reduced:
        size = both ** (1 / 3) / rounds ** (2 / 3)
        return Sizes(1 / (k * rounds), size, min(1.0, size))
    return Sizes(1 / (k * rounds**0.5), both**0.25 / rounds**0.75, min(1.0, (both / rounds) ** 0.5))


@dataclass(frozen=True)
class Given:
    """Sizes that replace the parameter-free ones; server_lr is gamma / (lr K)."""

    lr: float | None = None
    gamma: float | None = None
    beta: float | None = None
    server_lr: float | None = None

    def __post_init__(self) -> None:
        positive(**{name: value for name, value in vars(self).items() if value is not None})
        if self.gamma is not None and self.server_lr is not None:
            raise ValueError(f"give gamma or server_lr, got gamma={self.gamma}, server_lr={self.server_lr}")
        Direction(1.0 if self.beta is None else self.beta)

    def all(self, context: RunContext, reduced: bool) -> Sizes:
        """gamma means nothing where server_lr is given."""
        gamma = 1.0 if self.server_lr is not None else self.gamma
        if self.lr is not None and gamma is not None and self.beta is not None:
            return Sizes(self.lr, gamma, self.beta)
        free = parameter_free(context, reduced)
        return Sizes(self.lr or free.lr, gamma or free.gamma, self.beta or free.beta)


@dataclass(frozen=True)
class ParameterFree(Deferred):
    given: Given
    reduced: bool
    momentum: Momentum
    start: Start = "gradient"
    eps: float = 1e-12

    def __post_init__(self) -> None:
        positive(eps=self.eps)
        if self.start not in ("zeros", "gradient"):
            raise ValueError(f"start must be zeros or gradient, got {self.start!r}")
        if self.momentum not in ("direction_mean", "plain"):
            raise ValueError(f"momentum must be direction_mean or plain, got {self.momentum!r}")

    def build(self, context: RunContext) -> SharedMomentum:
        lr, gamma, beta = self.given.all(context, self.reduced)
        momentum = "directions" if self.momentum == "direction_mean" else "controls"
        server_lr = self.given.server_lr
        server = ServerStep(gamma, 1.0, momentum) if server_lr is None else ServerStep(None, server_lr, momentum)
        direction = Direction(beta, controlled=True, reduced=self.reduced)
        return SharedMomentum(direction, Normalised(lr, self.eps), server, self.start)


def padamfed(
    lr: float | None = None,
    gamma: float | None = None,
    beta: float | None = None,
    server_lr: float | None = None,
    start: Start = "gradient",
    eps: float = 1e-12,
) -> ParameterFree:
    """lr: length of a local step, 1 / (K sqrt R) unless given; gamma: server's step, (S K)^(1/4) / R^(3/4) unless
    given; beta: weight of the new gradient, (S K / R)^(1/2) unless given; server_lr: in the place of gamma, 1 applies
    the mean displacement; start: one pass over all clients for c_i = gradient at x0, or zeros; eps: guards u = 0."""
    return ParameterFree(Given(lr, gamma, beta, server_lr), False, "plain", start, eps)


def padamfed_vr(
    lr: float | None = None,
    gamma: float | None = None,
    beta: float | None = None,
    server_lr: float | None = None,
    momentum: Momentum = "direction_mean",
    start: Start = "gradient",
    eps: float = 1e-12,
) -> ParameterFree:
    """lr: length of a local step, 1 / (K R) unless given; gamma: server's step, (S K)^(1/3) / R^(2/3) unless given;
    beta: weight of the new gradient, as gamma unless given; server_lr: in the place of gamma, 1 applies the mean
    displacement; momentum: G is the mean of u, or follows from control variates; start: one pass over all clients for
    c_i = gradient at x0, or zeros; eps: guards u = 0."""
    return ParameterFree(Given(lr, gamma, beta, server_lr), True, momentum, start, eps)
