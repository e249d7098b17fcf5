"""FedMuon: Muon steps on a bias-corrected momentum.

Takezawa et al. 2025 ("FedMuon: Federated Learning with Bias-corrected LMO-based Optimization"), arXiv:2509.26337,
Algorithm 1.

Choose it when the weights are matrices and clients differ: control variates correct the bias that LocalMuon has there.
It costs twice the traffic of LocalMuon, with the same state on the clients.

    line 8    m_i <- (1 - alpha) m_i + alpha g(y)
    line 9    y   <- y - step(m_i - c_i + c)     step: -lmo of a norm's ball, lr U V^T per matrix; plain SGD on vectors
    line 11   c_i <- m_i
    line 17   c   <- c + |S|/N mean(change of c_i)
    line 18   x   <- x + |S|/N mean(y_K - x)     clients that were not sampled count as not having moved

c_i and m_i agree whenever a client is idle (lines 11 and 15) and start equal, so that a client keeps one tree, not two.
start = "gradient" is the theory's choice: m_i is the gradient of F_i at x0 and c their mean. "zeros" is the default.
The federation's client weights are those of the mean displacement alone; c is the plain mean of all c_i in any case,
since the correction rests on that. alpha = 0.1 is ours, the paper's experiments do not state it.

kappa = true records kappa and p of theorem 3 (`parts.inexact` has them) of each round, as means over its clients, whose
numbers the engine adds up. The theorem's are the least kappa and the largest p over all clients and rounds, which are
known where one client takes part in a round; with more clients the means bound them from one side.

Departures:
- A client keeps one tree, since m_i and c_i agree between its rounds, where the paper keeps two.
- over = "cohort", scales other than moonlight, other coefficients and aux are options that the paper does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .contract import Oracle, Round
from .local import LocalMethod, Rule
from .local_muon import OwnMomentum
from .parts.checks import refuse
from .parts.inexact import Inexact
from .parts.muon import Ball, Spectral, lmo
from .parts.renamed import renamed
from .parts.servers import Mean, Over
from .parts.warm_start import Start
from .tree import Tree


@dataclass(frozen=True)
class CorrectedMomentum(OwnMomentum):
    """The direction is m_i - c_i + c. c_i is m_i at the end of the client's last round; the trace is m_i within the
    round; sent is the change of c_i."""

    def shared_init(self, x: Tree) -> Tree:
        return x.zeros()

    def estimate(self, oracle: Oracle, y: Tree, c: Tree, c_i: Tree, trace: Tree) -> tuple[Tree, Tree]:
        m = trace.lerp(oracle(y), self.alpha)
        return m - c_i + c, m

    def finish(self, c: Tree, c_i: Tree, trace: Tree, steps: Tensor, delta: Tree) -> tuple[Tree, Tree]:
        return trace, trace - c_i

    def update(self, c: Tree, sent: Tree, delta: Tree, round: Round) -> Tree:
        return c.add(sent, round.share)

    def shared_from_gradient(self, gradient: Tree) -> Tree:
        return gradient


@renamed(matrices="matrix_lr", vectors="vector_lr")
def fedmuon_bc(
    matrix_lr: float = 0.001,
    vector_lr: float | Rule | None = None,
    alpha: float = 0.1,
    norm: Literal["spectral", "euclidean", "max"] = "spectral",
    start: Start = "zeros",
    ball: Ball | None = None,
    scale: str | None = None,
    over: Over = "all",
    aux: tuple[str, ...] = (),
    kappa: bool = False,
) -> LocalMethod:
    """matrix_lr: step size of matrices; vector_lr: step size of everything else, 0.1 unless given, or a rule for it;
    alpha: weight of the new gradient; norm, ball, aux: see `lmo`; scale: factor of a matrix's step by its shape, see
    `lmo`, moonlight unless given; start: m_i = 0 (zeros), or one pass over all clients for m_i = gradient at x0
    (gradient); over: see `fedavg`; kappa: the record has kappa and the order p of theorem 3, for which each step takes
    a singular value decomposition."""
    rule = lmo(norm, matrix_lr, vector_lr, ball, scale, aux)
    if isinstance(rule, Spectral):
        rule = Inexact(rule) if kappa else rule
    else:
        refuse({"kappa": kappa or None}, f"norm={norm} takes no step by matrices", "leave it out, or choose spectral")
    return LocalMethod(rule, CorrectedMomentum(alpha, start), Mean(1.0, over))
