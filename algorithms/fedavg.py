"""FedAvg: local steps of any optimiser, then the mean.

McMahan et al., AISTATS 2017, arXiv:1602.05629; as parallel restarted SGD, Yu, Yang, Zhu, AAAI 2019, arXiv:1807.06629.

    x_i <- x;  K times: x_i <- LocalOpt(x_i, g(x_i))
    x   <- x + server_lr * mean of (x_i - x)

The optimiser's state starts anew every round (carry = "reset", stateless clients). "keep" leaves it with the client,
"average" sends it through the server; the papers that compare against "FedAvg (Adam)" do not say which they use.

Departures:
- The paper weighs the mean by the clients' numbers of examples; here the weights are the federation's, uniform unless
  it says otherwise.
- `over`, `carry`, `server_lr` and a local optimiser other than SGD are not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .contract import Oracle
from .local import Estimator, LocalMethod, Rule, check_carry
from .parts.compression import Compressed, Compression, compressed
from .parts.groups import Number
from .parts.rules import Sgd
from .parts.servers import Mean
from .tree import Tree


@dataclass(frozen=True)
class Plain(Estimator):
    """The gradient itself."""

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Any, trace: Any) -> tuple[Tree, Any]:
        return oracle(y), trace

    def constant(self, c: Any, c_i: Any) -> tuple[()]:
        return ()


def fedavg(
    rule: Rule = Sgd(0.1),
    server_lr: Number = 1.0,
    over: Literal["cohort", "all"] = "cohort",
    carry: Literal["reset", "keep", "average"] = "reset",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; over: "all" counts idle clients as not having moved; carry: the rule's state;
    compression: of what is sent, see `compression`."""
    check_carry(rule, carry)
    return compressed(LocalMethod(rule, Plain(), Mean(server_lr, over), carry), compression)
