"""FedDC: FedDyn with control variates; a client's drift from the server's model is decoupled and corrected.

Gao, Fu, Li, Chen, Xu, Xu, CVPR 2022, arXiv:2203.11751.

Choose it when clients differ and FedDyn's correction is not enough: the local steps have control variates as well, as
in SCAFFOLD. State and traffic are twice those of FedDyn.

    u   = g(y) + alpha (y - x + h_i);  y <- y - step(u + c - c_i)          K times
    h_i <- h_i + y_K - x
    c_i <- mean of the K directions u
    d   <- d + |S|/N mean(y_K - x)
    x   <- x + mean(y_K - x) + d
    c   <- c + |S|/N mean(change of c_i)

Under plain descent c_i is c_i - c + (x - y_K) / (lr K), as the authors' code has it. The server's new model is the mean
of the cohort's models plus the mean drift d of all clients. The machinery, which FedDyn shares, is in `parts/drift.py`,
where the drift h_i is d_i.

Uncertain: the paper states the correction by its last and mean updates G_i and G, which were not read in the PDF. The
code divides by the number of steps of the mean client; here it is each client's own number.

Departures:
- control = "none" is FedDyn; it is an option of ours.
- The authors' code weighs alpha, c and the sums by the clients' numbers of examples; here alpha_by = "examples" does so
  with alpha, and all means are uniform, whatever the federation's client weights are.
- With other rules than plain descent c_i is the mean of the directions, where the code's displacement would be another
  vector.
"""

from __future__ import annotations

from typing import Literal

from .local import LocalMethod, Rule
from .parts.checks import one_of
from .parts.drift import AlphaBy, ByExamples, Drift, Drifted, drifting
from .parts.rules import Sgd


def feddc(
    rule: Rule = Sgd(0.1),
    alpha: float = 0.01,
    control: Literal["mean", "none"] = "mean",
    alpha_by: AlphaBy = "none",
) -> LocalMethod | ByExamples:
    """rule: the local optimiser, which steps along the corrected gradient; alpha: weight of the pull towards the
    server's model minus the drift; control: control variates that are means of the directions (mean), or none, which is
    FedDyn; alpha_by: see `feddyn`."""
    one_of("mean", "none", control=control)
    return drifting(LocalMethod(rule, Drift(alpha, control == "mean"), Drifted()), alpha_by)
