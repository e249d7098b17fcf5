"""PAdaMFed: SCAFFOLD-M with normalised steps, whose sizes follow from S, K and R alone.

Yan, Zhang, Wang, Cao, ICLR 2025 ("Problem-parameter-free federated learning").

Choose it when step sizes cannot be tuned: they follow from the size of the cohort and the numbers of local steps and
rounds, by formulas that are uncertain, see the notes. Traffic and state are those of SCAFFOLD.

    y   <- y - lr u / |u|,  u = beta (g(y) - c_i + c) + (1 - beta) G          K times; |.| over the whole model
    c_i <- mean of the K gradients g
    x   <- x - gamma mean of (x - y_K) / (lr K)
    G   <- beta (mean change of c_i + c) + (1 - beta) G          with c of before the next line
    c   <- c + |S|/N mean(change of c_i)

    lr = 1 / (K sqrt R),  gamma = (S K)^(1/4) / R^(3/4),  beta = (S K / R)^(1/2)

The machinery is in `parts/parameter_free.py` and `parts/shared_momentum.py`. Uncertain: no official code was found, and
the rules come from third-party code, reviews and successors. All default sizes are uncertain; an alternative for lr is
1 / (K R).

Departures:
- The first pass of start = "gradient" is over all data and not over one batch.
- beta is cut at 1.
- eps, which is ours, only guards u = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from .parts.parameter_free import Given, ParameterFree, Sizes
from .parts.warm_start import Start
from .scaffold_m import ControlledDirection


@dataclass(frozen=True)
class PAdaMFed(ParameterFree):
    def parameter_free(self, cohort: int, steps: int, rounds: int) -> Sizes:
        both = cohort * steps
        return Sizes(1 / (steps * rounds**0.5), both**0.25 / rounds**0.75, min(1.0, (both / rounds) ** 0.5))

    def direction(self, beta: float) -> ControlledDirection:
        return ControlledDirection(beta)


def padamfed(
    lr: float | None = None,
    gamma: float | None = None,
    beta: float | None = None,
    server_lr: float | None = None,
    start: Start = "gradient",
    eps: float = 1e-12,
) -> PAdaMFed:
    """lr: length of a local step, 1 / (K sqrt R) unless given; gamma: the server's step size, (S K)^(1/4) / R^(3/4)
    unless given; beta: weight of the new gradient, (S K / R)^(1/2) unless given; server_lr: multiple of the mean
    displacement that the server applies, given instead of gamma; start: one pass over all clients for c_i = gradient at
    x0 (gradient), or c_i = 0 (zeros); eps: norms below it count as it, which guards u = 0."""
    return PAdaMFed(Given(lr, gamma, beta, server_lr), "plain", start, eps)
