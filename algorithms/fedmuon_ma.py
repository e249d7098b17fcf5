"""FedMuon with momentum averaging: Muon steps whose momenta are averaged with the models.

Zhang, Gao 2025 ("On Provable Benefits of Muon in Federated Learning"), arXiv:2510.03866, Algorithm 1.

Choose it when the weights are matrices and clients can keep no state: momenta are sent and averaged as models are, at
twice the traffic of FedAvg. With `parameter_free: true` step sizes follow from the run's sizes; in the paper all
clients take part.

    line 1   m_i <- gradient of F_i at x0 on the first batch
    line 4   y   <- y - step(m_i)                          step: lr U V^T per matrix
    line 5   m_i <- (1 - beta) m_i + beta g(y)             at the new y, on the next batch
    line 7   x   <- mean y,  m <- mean m_i                 after K (tau) steps

The method moves before it estimates, so that it is written on the contract. Line 1 uses a batch of the first round: the
first of its K steps estimates and does not move. With start = "gradient" the mean gradient of a pass over all clients
is everyone's first momentum; "zeros" begins at m = 0. beta is the weight of the NEW gradient; the paper's experiments
say 0.9 for every method, read here as the weight of the old one. Weight decay is decoupled, W <- W (1 - lr
weight_decay), on matrices as in `muon`; the cosine decay of the experiments is a schedule. The layer scale is `none`,
as in Algorithm 1. Which Newton-Schulz coefficients are used is not said there, so that they are those of `UNNAMED` in
`muon`.

parameter_free sets lr = N^(1/4) / T^(3/4), of matrices and of vectors, and beta = N^(1/2) / T^(1/2) (Corollary 5.2). T
is the run's number of local iterations, rounds times steps, and N the number of clients that take part, the cohort;
`local_steps` is the corollary's K, for federation.local.steps. Corollaries 5.4 and 5.8 have the same sizes, written as
functions of the accuracy that T iterations reach.

Departures:
- The first round takes K - 1 steps and not K, since line 1 uses up its first batch.
- Vectors take plain steps along the momentum, of a size of their own or by a rule of their own; the paper treats
  matrices alone.
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
- start = "gradient" and start = "zeros" are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .contract import Algorithm, Client, Deferred, Local, Message, Oracle, Public, Round, RunContext, Server
from .local import Rule
from .parts.checks import closed_fraction, one_of, positive, positive_fraction, refuse
from .parts.groups import Number
from .parts.muon import UNNAMED, Ball, Spectral
from .parts.renamed import renamed
from .parts.rules import Sgd
from .parts.warm_start import WarmStart, WarmStarted
from .tree import Tree

FirstMomentum = Literal["batch", "gradient", "zeros"]
"""Where the first momentum comes from: the first batch of round 1, a warm start, or zero."""


class PublicState(NamedTuple):
    x: Tree
    m: Tree
    begun: Tensor  # (), 0.0 until there is a momentum, then 1.0


class LocalState(NamedTuple):
    y: Tree
    m: Tree
    rule: Any  # the rule's state
    begun: Tensor  # (), 0.0 until there is a momentum, then 1.0


@dataclass(frozen=True)
class FedMuonMA(WarmStarted):
    """Move along the momentum, then estimate it at the new point. Clients keep nothing and send m_i, which is averaged
    as x is. `rule`: the local step along m_i; `reduced`: STORM's estimate instead of line 5, see `fed_sgda_m`."""

    rule: Rule
    beta: Number = 0.1
    start: FirstMomentum = "batch"
    reduced: bool = False
    warm_start_averaged = True

    def __post_init__(self) -> None:
        if self.reduced:
            closed_fraction(a=self.beta)
        else:
            positive_fraction(beta=self.beta)
        one_of("batch", "gradient", "zeros", start=self.start)

    def server_init(self, x: Tree) -> Server:
        return Server(PublicState(x, x.zeros(), x.flat.new_full((), float(self.start != "batch"))))

    def client_init(self, public: Public) -> Client:
        return ()

    def client_begin(self, public: Public, client: Client) -> Local:
        return LocalState(public.x, public.m, self.rule.init(public.x), public.begun)

    def client_step(self, public: Public, client: Client, local: Local, oracle: Oracle) -> Local:
        begun = local.begun > 0
        moved = self.rule.step(local.y, local.m, local.rule)
        y, rule = pytree.tree_map(lambda new, old: torch.where(begun, new, old), moved, (local.y, local.rule))
        g = oracle(y)
        m = g.add(local.m - oracle(local.y), 1 - self.beta) if self.reduced else local.m.lerp(g, self.beta)
        m = Tree(torch.where(begun, m.flat, g.flat), g.layout)
        return LocalState(y, m, rule, torch.ones_like(local.begun))

    def client_finish(self, public: Public, client: Client, local: Local) -> tuple[Message, Client]:
        delta = local.y - public.x
        return Message(delta, (), {"norm2": delta.norm2()}, local.m), client

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        public = server.public
        return Server(PublicState(public.x + mean.delta, mean.averaged, torch.ones_like(public.begun)))

    def model(self, server: Server) -> Tree:
        return server.public.x

    @property
    def warm_start(self) -> Algorithm | None:
        return WarmStart(self) if self.start == "gradient" else None

    def warm_started_server(self, server: Server, mean: Any) -> Server:
        return server._replace(public=server.public._replace(m=mean))


def local_steps(iterations: int, clients: int) -> int:
    """K of Corollary 5.2, T^(1/4) / N^(3/4) rounded, at least 1; `iterations`: T."""
    return max(1, round(iterations**0.25 / clients**0.75))


def _build(matrix_lr: float, vector_lr: float | Rule, beta: float, start: FirstMomentum, **spectral: Any) -> FedMuonMA:
    """The method with these step sizes; `spectral`: other settings of `Spectral`."""
    positive(matrix_lr=matrix_lr)
    if not isinstance(vector_lr, Rule):
        positive(vector_lr=vector_lr)
        vector_lr = Sgd(vector_lr)
    return FedMuonMA(Spectral(matrix_lr, vector_lr, **spectral), beta, start)


@dataclass(frozen=True)
class ParameterFree(Deferred):
    """The method with step sizes and beta from the run's sizes, by Corollary 5.2; `settings`: the other arguments of
    `fedmuon_ma`."""

    settings: tuple[tuple[str, Any], ...]

    def build(self, context: RunContext) -> FedMuonMA:
        if context.steps is None:
            raise ValueError("parameter_free needs federation.local.steps, got epochs; give steps")
        iterations = context.rounds * context.steps
        if context.cohort > iterations:
            raise ValueError(
                f"parameter_free needs cohort <= rounds * steps, got cohort={context.cohort}, rounds={context.rounds}, "
                f"steps={context.steps}; raise rounds"
            )
        lr, beta = context.cohort**0.25 / iterations**0.75, (context.cohort / iterations) ** 0.5
        return _build(lr, lr, beta, **dict(self.settings))


@renamed(problem_free="parameter_free", matrices="matrix_lr", vectors="vector_lr")
def fedmuon_ma(
    matrix_lr: float | None = None,
    vector_lr: float | Rule | None = None,
    beta: float | None = None,
    start: FirstMomentum = "batch",
    ball: Ball = UNNAMED,
    scale: str = "none",
    weight_decay: float = 0.0,
    parameter_free: bool = False,
    aux: tuple[str, ...] = (),
) -> FedMuonMA | ParameterFree:
    """matrix_lr: step size of matrices, 0.01 unless given; vector_lr: step size of everything else, 0.1 unless given,
    or a rule for it; beta: weight of the new gradient, 0.1 unless given; start: the first momentum is the gradient on
    the first batch (batch), the mean gradient of one pass over all clients (gradient), or 0 (zeros); ball: how matrices
    are orthogonalised; scale, aux: see `lmo`; weight_decay: decoupled weight decay of matrices; parameter_free:
    `matrix_lr`, `vector_lr` and `beta` follow from the run's sizes and may not be given."""
    spectral = {"ball": ball, "scale": scale, "weight_decay": weight_decay, "aux": aux}
    given = {"matrix_lr": matrix_lr, "vector_lr": vector_lr, "beta": beta}
    if parameter_free:
        refuse(given, "parameter_free=true sets it from the run's sizes", "leave it out, or parameter_free")
        # The other settings are checked now, before the run's sizes are known.
        _build(0.01, 0.1, 0.1, start, **spectral)
        return ParameterFree(tuple({"start": start, **spectral}.items()))
    return _build(
        0.01 if matrix_lr is None else matrix_lr,
        0.1 if vector_lr is None else vector_lr,
        0.1 if beta is None else beta,
        start,
        **spectral,
    )
