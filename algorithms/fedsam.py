"""FedSAM: local steps along the gradient at the worst point nearby, towards flat minima. FedASAM with kind = "asam".

Qu et al., ICML 2022, arXiv:2206.02618; Caldarola, Caputo, Ciccone, ECCV 2022, arXiv:2203.11834.

Choose it when the model fits the training rows and does badly on others, and two gradients per step can be afforded.
With `kind: asam` it is FedASAM, where a larger weight is moved farther in the search for the worst point.

    y <- x;  K times: e = rho g(y) / |g(y)|,  y <- LocalOpt(y, g(y + e))      both gradients on the same batch
    x <- x + server_lr * mean of (y_K - x)

FedASAM has the adaptive neighbourhood of ASAM, e = rho T^2 g(y) / |T g(y)| with T = |y| + eta in the tensors whose name
ends in `weight` and T = 1 in the others. With rho = 0 the method is FedAvg at twice its gradients. The machinery is in
`parts/sharpness.py`.

Uncertain: T of the biases; Caldarola et al.'s code has T = 1 there, which is what is done here. Their values on
CIFAR-10 are rho = 0.1 for FedSAM and rho = 0.7, eta = 0.2 for FedASAM; the default rho is ours.

Departures:
- The papers' mean weighs clients by their numbers of examples; here the weights are the federation's.
- A local optimiser other than SGD, server_lr and `over` are not in the papers.
- Stochastic weight averaging, which Caldarola et al. add at the end of training, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contract import Oracle
from .local import Estimator, LocalMethod, Rule
from .parts.checks import refuse
from .parts.groups import Number
from .parts.rules import Sgd
from .parts.servers import Mean, Over
from .parts.sharpness import Kind, Sharpness
from .tree import Tree


@dataclass(frozen=True)
class Sharp(Estimator):
    """The direction is the gradient at the worst point nearby."""

    sharpness: Sharpness = Sharpness()

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Any, trace: Any) -> tuple[Tree, Any]:
        return self.sharpness.around(oracle)(y), trace


def fedsam(
    rule: Rule = Sgd(0.1),
    rho: float = 0.05,
    kind: Kind = "sam",
    eta: float | None = None,
    server_lr: Number = 1.0,
    over: Over = "cohort",
) -> LocalMethod:
    """rule: the local optimiser, which steps along the gradient at the worst point nearby; rho: how far away this point
    is; kind: the distance is Euclidean (sam), or measured in units of the weights (asam); eta: added to the magnitudes
    of the weights with kind = asam, 0.2 unless given; server_lr: step size along the mean displacement; over: see
    `fedavg`."""
    if kind == "sam":
        refuse({"eta": eta}, "kind=sam has no scales of weights", "leave it out, or choose kind: asam")
    return LocalMethod(rule, Sharp(Sharpness(rho, kind, 0.2 if eta is None else eta)), Mean(server_lr, over))
