"""LocalMuon: every client runs Muon on its own momentum; the server averages the models.

Takezawa et al. 2025 ("FedMuon: Federated Learning with Bias-corrected LMO-based Optimization"), arXiv:2509.26337,
Algorithm 4.

    m_i <- (1 - alpha) m_i + alpha g(y)
    y   <- y - step(m_i)                 step: -lmo of a norm's ball, lr U V^T per matrix; plain SGD on vectors
    x   <- x + |S|/N mean(y_K - x)       clients that were not sampled count as not having moved

m_i stays with the client over rounds. The paper's line about C_i is unused and left out; alpha is not stated there, 0.1
is ours; nor is what an output head or embeddings are: matrices like any other, unless aux names them. Under
heterogeneity the method need not move at all (its Theorem 1).

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
from .parts.muon import Ball, lmo
from .parts.renamed import renamed
from .parts.servers import Mean
from .tree import Tree


@dataclass(frozen=True)
class OwnMomentum(Estimator):
    """Own: m_i at the end of the last visit, shaped like x. Trace: m_i on the way. Nothing is shared or sent."""

    alpha: float = 0.1
    start: Literal["zeros", "gradient"] = "zeros"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"0 < alpha <= 1 must hold, got alpha={self.alpha}")
        if self.start not in ("zeros", "gradient"):
            raise ValueError(f"start must be zeros or gradient, got {self.start!r}")

    def own_init(self, x: Tree) -> Tree:
        return x.zeros()

    def begin(self, x: Tree, c: Any, c_i: Tree) -> Tree:
        return c_i

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Tree, trace: Tree) -> tuple[Tree, Tree]:
        m = trace.lerp(oracle(y), self.alpha)
        return m, m

    def finish(self, c: Any, c_i: Tree, trace: Tree, steps: Tensor) -> tuple[Tree, Any]:
        return trace, ()

    def shared_warm(self, gradient: Tree) -> Any:
        return ()


@renamed(matrices="matrix_lr", vectors="vector_lr")
def local_muon(
    matrix_lr: float = 0.001,
    vector_lr: float | Rule | None = None,
    alpha: float = 0.1,
    norm: Literal["spectral", "euclidean", "max"] = "spectral",
    start: Literal["zeros", "gradient"] = "zeros",
    ball: Ball | None = None,
    scale: str | None = None,
    over: Literal["cohort", "all"] = "all",
    aux: tuple[str, ...] = (),
) -> LocalMethod:
    """matrix_lr, vector_lr: step sizes, 0.1 of vectors unless given; alpha: weight of the new gradient; norm, ball,
    scale, aux: see `lmo`, scale is moonlight unless given; start: m_i = 0, or one pass over all clients for m_i =
    gradient at x0; over: see `Mean`."""
    rule = lmo(norm, matrix_lr, vector_lr, ball, scale, aux)
    return LocalMethod(rule, OwnMomentum(alpha, start), Mean(1.0, over))
