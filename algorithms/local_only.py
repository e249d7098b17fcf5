"""Local training: every client trains a model of its own, and nothing is sent.

The baseline of personalised methods. Ditto (Li, Hu, Beirami, Smith, ICML 2021, arXiv:2012.04221) with lambda = 0 trains
the same models.

Choose it as the baseline beside every method that gives clients models of their own. It is hard to beat where each
client has rows of few labels.

    y <- y_i;  K times: y <- y - step(g(y));  y_i <- y

y_i is the model before round 1, the same for all clients, until client i takes part. A visit is one of federated
training: with S of N clients in each of R rounds, a client takes K R S / N steps on average.

Departures:
- There is no paper.
"""

from __future__ import annotations

from typing import Literal

from .local import Rule, check_carry
from .parts.checks import one_of
from .parts.own_model import OwnModel
from .parts.rules import Sgd


def local_only(rule: Rule = Sgd(0.1), carry: Literal["reset", "keep"] = "reset") -> OwnModel:
    """rule: the local optimiser; carry: what becomes of its state after a visit, it is reset, or kept by the client."""
    one_of("reset", "keep", carry=carry)
    check_carry(rule, carry)
    return OwnModel(rule, carry == "keep")
