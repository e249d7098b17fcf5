"""PAdaMFed-VR: SCAFFOLD-VR with normalised steps, whose sizes follow from S, K and R alone.

Yan, Zhang, Wang, Cao, ICLR 2025 ("Problem-parameter-free federated learning").

Choose it when step sizes cannot be tuned and the noise of the batches limits PAdaMFed. It takes two gradients per step,
and three vectors of the model's size in each direction; its formulas are as uncertain as those of PAdaMFed.

    y   <- y - lr u / |u|,  u = g(y) - beta (c_i - c) + (1 - beta) (G - g(x_prev))          K times; one batch for both
    c_i <- mean of the K gradients g(y)
    x   <- x - gamma mean of (x - y_K) / (lr K);  x_prev <- the x before
    G   <- mean over clients and steps of u                        momentum = "direction_mean"
           beta (mean change of c_i + c) + (1 - beta) G            momentum = "plain", with c of before the next line
    c   <- c + |S|/N mean(change of c_i)

    lr = 1 / (K R),  gamma = beta = (S K)^(1/3) / R^(2/3)

The machinery is in `parts/parameter_free.py` and `parts/shared_momentum.py`. Uncertain: no official code was found, and
the rules come from third-party code, reviews and successors. All default sizes are uncertain, and so is the momentum:
"direction_mean", for which clients send one vector more, is the default since it is STORM's; "plain" is what the
third-party code has. x_prev is the server's model before the last, also with partial participation.

Departures:
- The first pass of start = "gradient" is over all data and not over one batch.
- beta is cut at 1.
- eps, which is ours, only guards u = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from .parts.parameter_free import Given, Momentum, ParameterFree, Sizes
from .parts.warm_start import Start
from .scaffold_vr import ControlledReducedDirection


@dataclass(frozen=True)
class PAdaMFedVR(ParameterFree):
    def parameter_free(self, cohort: int, steps: int, rounds: int) -> Sizes:
        size = (cohort * steps) ** (1 / 3) / rounds ** (2 / 3)
        return Sizes(1 / (steps * rounds), size, min(1.0, size))

    def direction(self, beta: float) -> ControlledReducedDirection:
        return ControlledReducedDirection(beta)


def padamfed_vr(
    lr: float | None = None,
    gamma: float | None = None,
    beta: float | None = None,
    server_lr: float | None = None,
    momentum: Momentum = "direction_mean",
    start: Start = "gradient",
    eps: float = 1e-12,
) -> PAdaMFedVR:
    """lr: length of a local step, 1 / (K R) unless given; gamma: the server's step size, (S K)^(1/3) / R^(2/3) unless
    given; beta: weight of the new gradient, by default the value of gamma, at most 1; server_lr: multiple of the mean
    displacement that the server applies, given instead of gamma; momentum: G is the mean of all directions u
    (direction_mean), or follows from the control variates (plain); start: one pass over all clients for c_i = gradient
    at x0 (gradient), or c_i = 0 (zeros); eps: norms below it count as it, which guards u = 0."""
    return PAdaMFedVR(Given(lr, gamma, beta, server_lr), momentum, start, eps)
