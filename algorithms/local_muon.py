"""LocalMuon: every client runs Muon on its own momentum; the server averages the models.

Takezawa et al. 2025 ("FedMuon: Federated Learning with Bias-corrected LMO-based Optimization"), arXiv:2509.26337,
Algorithm 4.

Choose it when the weights are matrices and clients are alike. Where they differ it may never move towards the minimum,
as its paper proves by an example; there it is the baseline of FedMuon-BC.

    m_i <- (1 - alpha) m_i + alpha g(y)
    y   <- y - step(m_i)                 step: -lmo of a norm's ball, lr U V^T per matrix; plain SGD on vectors
    x   <- x + |S|/N mean(y_K - x)       clients that were not sampled count as not having moved

The client keeps m_i between rounds. The paper's line about C_i is unused and left out. The paper does not state alpha,
0.1 is ours; nor does it say what happens to an output head or to embeddings: here they are matrices like any other,
unless aux names them. Under heterogeneity the method need not move at all (its Theorem 1).

Departures:
- None of the algorithm; start = "gradient", over = "cohort", scales other than moonlight, other coefficients and aux
  are options beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .contract import Oracle
from .local import Estimator, LocalMethod, Rule
from .parts.checks import one_of, positive_fraction
from .parts.muon import Ball, lmo
from .parts.renamed import renamed
from .parts.servers import Mean, Over
from .parts.warm_start import Start
from .tree import Tree


@dataclass(frozen=True)
class OwnMomentum(Estimator):
    """The direction is the client's own momentum. c_i is m_i at the end of the client's last round, shaped like x; the
    trace is m_i within the round. Nothing is shared or sent."""

    alpha: float = 0.1
    start: Start = "zeros"

    def __post_init__(self) -> None:
        positive_fraction(alpha=self.alpha)
        one_of("zeros", "gradient", start=self.start)

    def own_init(self, x: Tree) -> Tree:
        return x.zeros()

    def begin(self, x: Tree, c: Any, c_i: Tree) -> Tree:
        return c_i

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Tree, trace: Tree) -> tuple[Tree, Tree]:
        m = trace.lerp(oracle(y), self.alpha)
        return m, m

    def finish(self, c: Any, c_i: Tree, trace: Tree, steps: Tensor, delta: Tree) -> tuple[Tree, Any]:
        return trace, ()

    def shared_from_gradient(self, gradient: Tree) -> Any:
        return ()


@renamed(matrices="matrix_lr", vectors="vector_lr")
def local_muon(
    matrix_lr: float = 0.001,
    vector_lr: float | Rule | None = None,
    alpha: float = 0.1,
    norm: Literal["spectral", "euclidean", "max"] = "spectral",
    start: Start = "zeros",
    ball: Ball | None = None,
    scale: str | None = None,
    over: Over = "all",
    aux: tuple[str, ...] = (),
) -> LocalMethod:
    """matrix_lr: step size of matrices; vector_lr: step size of everything else, 0.1 unless given, or a rule for it;
    alpha: weight of the new gradient; norm, ball, aux: see `lmo`; scale: factor of a matrix's step by its shape, see
    `lmo`, moonlight unless given; start: m_i = 0 (zeros), or one pass over all clients for m_i = gradient at x0
    (gradient); over: see `fedavg`."""
    rule = lmo(norm, matrix_lr, vector_lr, ball, scale, aux)
    return LocalMethod(rule, OwnMomentum(alpha, start), Mean(1.0, over))
