"""FedDyn: a proximal term that moves with the client, so that all clients come to rest at the server's model.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, ICLR 2021, arXiv:2111.04263, Algorithm 1.

Choose it when clients differ and can keep a vector of the model's size, and the traffic must stay that of FedAvg. What
a client keeps is as old as its last visit, as in SCAFFOLD.

    y   <- y - step(g(y) + alpha (y - x + d_i))      K times
    d_i <- d_i + y_K - x
    d   <- d + |S|/N mean(y_K - x)
    x   <- x + mean(y_K - x) + d

In the paper's letters, d_i is -1/alpha times the gradient of client i's loss at its last model, which follows from the
optimality of that model, and d = -h/alpha. With alpha_by = "examples", as in the authors' code, alpha of a client with
n_i of n rows is alpha n / (N n_i). At rest the displacements and the sum of all clients' gradients are 0. The
machinery, which FedDC shares, is in `parts/drift.py`.

Departures:
- The paper asks for the minimiser of the local problem; here it is K steps of any rule.
- The code clips gradients to the norm 10 (here the rule `clip` clips the whole direction) and has a weight decay of
  0.001.
- evaluate = "mean" is the mean of the cohort's models, which the code reports beside x; the mean of all clients'
  models, which it reports too, is left out.
- Means are uniform, whatever the federation's client weights are.
"""

from __future__ import annotations

from typing import Literal

from .local import LocalMethod, Rule
from .parts.drift import AlphaBy, ByExamples, Drift, Drifted, drifting
from .parts.rules import Sgd


def feddyn(
    rule: Rule = Sgd(0.1),
    alpha: float = 0.01,
    evaluate: Literal["server", "mean"] = "server",
    alpha_by: AlphaBy = "none",
) -> LocalMethod | ByExamples:
    """rule: the local optimiser, which steps along the gradient of the regularised loss; alpha: weight of the proximal
    term; evaluate: the model that is evaluated is the server's, or the mean of the cohort's models; alpha_by: alpha is
    the same for all clients (none), or smaller for those with many rows, in inverse proportion (examples)."""
    return drifting(LocalMethod(rule, Drift(alpha), Drifted(evaluate)), alpha_by)
