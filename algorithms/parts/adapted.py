"""A server's rule around any local training, as all server-adaptive methods are made.

    local     plain: FedAvg's;  scaffold: SCAFFOLD's, option II;  prox: FedProx's, with weight mu
    evaluate  last: x;  last_two: the mean of the last two x, while training goes on from x

SCAFFOLD's control variates are means of gradients, whatever step the server takes (Takakura et al. 2025, section on
other local training). The mean of the last two iterates is how FedExP and FedDuA are evaluated (Jhunjhunwala et al.
2023; Takakura et al. 2025): extrapolation makes x oscillate. It costs the server one tree more and nothing on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..contract import Round
from ..fedavg import Plain
from ..fedprox import Prox
from ..local import Estimator, LocalMethod, Rule, ServerRule
from ..scaffold import ControlVariates
from ..tree import Tree
from .checks import one_of, refuse
from .compression import Compressed, Compression, compressed

Work = Literal["plain", "scaffold", "prox"]
Shown = Literal["last", "last_two"]


class Before(NamedTuple):
    x: Tree
    rule: Any


@dataclass(frozen=True)
class LastTwo(ServerRule):
    """The wrapped rule; evaluated is (x_t + x_{t-1}) / 2. State: the previous x and the rule's."""

    rule: ServerRule

    @property
    def uses_norm2(self) -> bool:
        return self.rule.uses_norm2

    def init(self, x: Tree) -> Before:
        return Before(x, self.rule.init(x))

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Before, round: Round) -> tuple[Tree, Before]:
        new, inner = self.rule.step(x, delta, norm2, state.rule, round)
        return new, Before(x, inner)

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Before, round: Round) -> Tensor | float:
        return self.rule.rate(x, delta, norm2, state.rule, round)

    def model(self, x: Tree, state: Before) -> Tree:
        return self.rule.model(x, state.rule).lerp(self.rule.model(state.x, state.rule), 0.5)


def adapted(
    server: ServerRule, rule: Rule, local: Work, mu: float | None, evaluate: Shown, compression: Compression | None
) -> LocalMethod | Compressed:
    """mu: 0.1 unless given, and refused where `local` is not prox."""
    works: dict[str, Estimator] = {
        "plain": Plain(),
        "scaffold": ControlVariates(),
        "prox": Prox() if mu is None else Prox(mu),
    }
    one_of(*works, local=local)
    one_of("last", "last_two", evaluate=evaluate)
    if local != "prox":
        refuse({"mu": mu}, f"it is the weight of prox, and local is {local}", "leave it out, or choose local: prox")
    method = LocalMethod(rule, works[local], LastTwo(server) if evaluate == "last_two" else server)
    return compressed(method, compression)
