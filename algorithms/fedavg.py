"""FedAvg: local steps of any optimiser, then the mean.

McMahan et al., AISTATS 2017, arXiv:1602.05629; as parallel restarted SGD, Yu, Yang, Zhu, AAAI 2019, arXiv:1807.06629.

Choose it as the baseline of every comparison. It is enough where clients are alike or take few local steps; where they
differ, many local steps move its fixed point away from the minimum.

    y <- x;  K times: y <- LocalOpt(y, g(y))
    x <- x + server_lr * mean of (y_K - x)

The optimiser's state starts anew every round (carry = "reset"), so that clients are stateless. With "keep" the client
keeps it between rounds, with "average" it is averaged and sent down. The papers that compare against "FedAvg (Adam)" do
not say which of these they use.

Departures:
- The paper weighs the mean by the clients' numbers of examples; here the weights are the federation's, uniform unless
  it says otherwise.
- `over`, `carry`, `server_lr` and a local optimiser other than SGD are not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contract import Oracle
from .local import Carry, Estimator, LocalMethod, Rule, check_carry
from .parts.compression import Compressed, Compression, compressed
from .parts.groups import Number
from .parts.rules import Sgd
from .parts.servers import Mean, Over
from .tree import Tree


@dataclass(frozen=True)
class Plain(Estimator):
    """The direction is the gradient."""

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Any, trace: Any) -> tuple[Tree, Any]:
        return oracle(y), trace

    def constant_shift(self, c: Any, c_i: Any) -> tuple[()]:
        return ()


def fedavg(
    rule: Rule = Sgd(0.1),
    server_lr: Number = 1.0,
    over: Over = "cohort",
    carry: Carry = "reset",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; server_lr: step size along the mean displacement; over: the mean is over the cohort,
    or over all clients, where those that were not sampled count as not having moved; carry: what becomes of the rule's
    state after a round, it is reset, kept by the client (keep), or averaged (average); compression: makes what is sent
    smaller, one of `fedfleet list compressions`."""
    check_carry(rule, carry)
    return compressed(LocalMethod(rule, Plain(), Mean(server_lr, over), carry), compression)
