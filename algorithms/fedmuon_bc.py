"""FedMuon: Muon steps on a bias-corrected momentum.

Takezawa et al. 2025 ("FedMuon: Federated Learning with Bias-corrected LMO-based Optimization"), arXiv:2509.26337,
Algorithm 1.

    line 8    m_i <- (1 - alpha) m_i + alpha g(y)
    line 9    y   <- y - step(m_i - c_i + c)     step: -lmo of a norm's ball, lr U V^T per matrix; plain SGD on vectors
    line 11   c_i <- m_i
    line 17   c   <- c + |S|/N mean(change of c_i)
    line 18   x   <- x + |S|/N mean(y_K - x)     clients that were not sampled count as not having moved

c_i and m_i agree whenever a client is idle (lines 11 and 15) and start equal, so a client keeps one tree, not two.
start = "gradient" is the theory's choice, m_i = gradient of F_i at x0 and c their mean; "zeros" the default.
federation.weights are those of the mean displacement alone; c is the plain mean of all c_i in any case, on which the
correction rests. alpha = 0.1 is ours, the paper's experiments do not state it.

Departures:
- A client keeps one tree, since m_i and c_i agree between its visits, where the paper keeps two.
- over = "cohort", scales other than moonlight, other coefficients and aux are options beside the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .contract import Oracle, Round
from .local import LocalMethod, Rule
from .local_muon import OwnMomentum
from .parts.muon import Ball, lmo
from .parts.renamed import renamed
from .parts.servers import Mean
from .tree import Tree


@dataclass(frozen=True)
class CorrectedMomentum(OwnMomentum):
    """Shared: c. Own: m_i at the end of the last visit, which is c_i too. Trace: m_i on the way. Sent: its change."""

    def shared_init(self, x: Tree) -> Tree:
        return x.zeros()

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Tree) -> tuple[Tree, Tree]:
        m = trace.lerp(oracle(y), self.alpha)
        return m - c_i + c, m

    def finish(self, c: Tree, c_i: Tree, trace: Tree, steps: Tensor) -> tuple[Tree, Tree]:
        return trace, trace - c_i

    def update(self, c: Tree, sent: Tree, delta: Tree, round: Round) -> Tree:
        return c.add(sent, round.share)

    def shared_warm(self, gradient: Tree) -> Tree:
        return gradient


@renamed(matrices="matrix_lr", vectors="vector_lr")
def fedmuon_bc(
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
    return LocalMethod(rule, CorrectedMomentum(alpha, start), Mean(1.0, over))
