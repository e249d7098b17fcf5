"""DiLoCo and MuLoCo: an inner optimiser whose state stays with the client, Nesterov momentum outside.

DiLoCo: Douillard et al. 2023, arXiv:2311.08105, Algorithm 1. MuLoCo, the same with Muon inside: Therien, Huang, Rish,
Belilovsky 2025, arXiv:2505.23725.

    H times: y <- InnerOpt(y, g(y))             AdamW with clipping at 1;  Muon on hidden matrices, AdamW on the rest
    D <- x - mean y
    b <- mu b + D;  x <- x - outer_lr (D + mu b)             SGD with Nesterov, sum form

mu = 0 and outer_lr = 1 is FedAvg with a kept inner state; N = 1 and mu = 0 is Lookahead. carry = "reset" is for clients
that are sampled now and then; the papers have all of them take part and never reset. The inner settings are DiLoCo's,
and for MuLoCo lr 0.02, momentum 0.95 without Nesterov, five `you` iterations, scale `spectral`; outer_lr 0.9 and mu 0.8
are of its configurations with several workers (one worker: 0.7 and 0.6).

Departures:
- Schedules change between rounds and not between local steps; the papers warm up and then follow a cosine within
  rounds.
- AdamW's lr of 3e-4 within MuLoCo is Jordan's.
- Where clients are sampled, the mean is over the cohort, and a client that was idle goes on with its old inner state.
- A convolution is orthogonalised as one flattened matrix, where MuLoCo's program orthogonalises each kernel window.
"""

from __future__ import annotations

from typing import Literal

from .fedavg import Plain
from .fedavgm import ServerMomentum
from .local import LocalMethod, Rule, check_carry
from .parts.muon_adamw import muon_adamw
from .parts.rules import Clip, adamw, fraction, positive

Carry = Literal["reset", "keep", "average"]


def diloco(
    rule: Rule = Clip(adamw(4e-4, (0.9, 0.95), 1e-8, 0.1), 1.0),
    outer_lr: float = 0.7,
    outer_mu: float = 0.9,
    carry: Carry | None = None,
) -> LocalMethod:
    """rule: the inner optimiser; outer_lr, outer_mu: of the outer Nesterov step; carry: the inner state, keep unless
    given."""
    check_carry(rule, carry)
    positive(outer_lr=outer_lr)
    fraction(outer_mu=outer_mu)
    return LocalMethod(
        rule, Plain(), ServerMomentum(outer_lr, outer_mu, nesterov=True), "keep" if carry is None else carry
    )


def muloco(
    rule: Rule = muon_adamw(),
    outer_lr: float = 0.9,
    outer_mu: float = 0.8,
    carry: Carry | None = None,
) -> LocalMethod:
    """rule: the inner optimiser, muon_adamw unless given; outer_lr, outer_mu: of the outer Nesterov step; carry: the
    inner state, keep unless given."""
    return diloco(rule, outer_lr, outer_mu, carry)
