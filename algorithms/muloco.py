"""MuLoCo: DiLoCo with Muon inside, whose state stays with the client.

Therien, Huang, Rish, Belilovsky 2025, arXiv:2505.23725.

Choose it where you would choose DiLoCo and most weights are hidden matrices, as in transformers: its paper reports
lower losses with Muon. For these matrices a client keeps one momentum instead of AdamW's two, and every step must
orthogonalise them.

    y <- Muon(y, g(y)) on hidden matrices, AdamW on the rest          H times
    D <- x - mean y
    b <- mu b + D;  x <- x - outer_lr (D + mu b)                      SGD with Nesterov, sum form

The inner settings are the paper's: lr 0.02, momentum 0.95 without Nesterov, five `you` iterations, scale `spectral`.
outer_lr 0.9 and mu 0.8 are those of its configurations with several workers (one worker: 0.7 and 0.6). carry = "reset"
is for clients that are sampled now and then; in the paper all clients take part and never reset.

Departures:
- No schedule is set; the paper's warm-up and cosine over local steps are `{schedule: cosine, start: …, end: …, warmup:
  …, over: steps}` in place of lr.
- AdamW's lr of 3e-4 is Jordan's.
- Where clients are sampled, the mean is over the cohort, and a client that was idle goes on with its old inner state.
- A convolution is orthogonalised as one flattened matrix, where the paper's program orthogonalises each kernel window.
"""

from __future__ import annotations

from .diloco import Carry, diloco
from .local import LocalMethod, Rule
from .parts.compression import Compressed, Compression
from .parts.muon_adamw import muon_adamw


def muloco(
    rule: Rule = muon_adamw(),
    outer_lr: float = 0.9,
    outer_mu: float = 0.8,
    carry: Carry | None = None,
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the inner optimiser, muon_adamw unless given; outer_lr, outer_mu: of the outer Nesterov step; carry: the
    inner state, keep unless given; compression: makes what is sent smaller, as `coded` does."""
    return diloco(rule, outer_lr, outer_mu, carry, compression)
