"""DiLoCo: an inner AdamW whose state stays with the client, and Nesterov momentum outside.

Douillard et al. 2023, arXiv:2311.08105, Algorithm 1.

Choose it when a few strong clients train one large model, as data centres do, with hundreds of local steps per round,
and all of them take part. Each client keeps both moments of AdamW.

    y <- AdamW(y, g(y) clipped at norm 1)                    H times
    D <- x - mean y
    b <- mu b + D;  x <- x - outer_lr (D + mu b)             SGD with Nesterov, sum form

mu = 0 and outer_lr = 1 is FedAvg with an inner state that clients keep; mu = 0 with one client is Lookahead. carry =
"reset" is for clients that are sampled now and then; in the paper all clients take part and never reset. The inner
settings are the paper's.

Departures:
- No schedule is set; the paper's warm-up and cosine over local steps are `{schedule: cosine, start: …, end: …, warmup:
  …, over: steps}` in place of lr.
- Where clients are sampled, the mean is over the cohort, and a client that was idle goes on with its old inner state.
"""

from __future__ import annotations

from typing import Literal

from .fedavg import Plain
from .fedavgm import ServerMomentum
from .local import LocalMethod, Rule, check_carry
from .parts.checks import fraction, positive
from .parts.compression import Compressed, Compression, compressed
from .parts.rules import Clip, adamw

Carry = Literal["reset", "keep", "average"]


def diloco(
    rule: Rule = Clip(adamw(4e-4, (0.9, 0.95), 1e-8, 0.1), 1.0),
    outer_lr: float = 0.7,
    outer_mu: float = 0.9,
    carry: Carry | None = None,
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the inner optimiser; outer_lr, outer_mu: of the outer Nesterov step; carry: the inner state, keep unless
    given; compression: makes what is sent smaller, as `coded` does."""
    check_carry(rule, carry)
    positive(outer_lr=outer_lr)
    fraction(outer_mu=outer_mu)
    server = ServerMomentum(outer_lr, outer_mu, nesterov=True)
    return compressed(LocalMethod(rule, Plain(), server, "keep" if carry is None else carry), compression)
