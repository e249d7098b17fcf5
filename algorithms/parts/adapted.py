"""A server rule around any local training: how all server-adaptive methods are composed.

    local     plain: FedAvg's;  scaffold: SCAFFOLD's, option II;  prox: FedProx's, with weight mu
    evaluate  last: x;  last_two: the mean of the last two x, while training goes on from x

SCAFFOLD's control variates are means of gradients, whatever step the server takes (Takakura et al. 2025, section on
other local training). FedExP and FedDuA are evaluated at the mean of the last two iterates (Jhunjhunwala et al. 2023;
Takakura et al. 2025), because extrapolation makes x oscillate. That costs the server one tree more and no traffic.
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


class LastTwoState(NamedTuple):
    x: Tree  # before the last step
    rule: Any  # the wrapped rule's state


@dataclass(frozen=True)
class LastTwo(ServerRule):
    """The wrapped rule, where the model that is evaluated is (x_t + x_{t-1}) / 2. State: x_{t-1} and the rule's
    state."""

    rule: ServerRule

    @property
    def uses_norm2(self) -> bool:
        return self.rule.uses_norm2

    def init(self, x: Tree) -> LastTwoState:
        return LastTwoState(x, self.rule.init(x))

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: LastTwoState, round: Round) -> tuple[Tree, LastTwoState]:
        new, inner = self.rule.step(x, delta, norm2, state.rule, round)
        return new, LastTwoState(x, inner)

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: LastTwoState, round: Round) -> Tensor | float:
        return self.rule.rate(x, delta, norm2, state.rule, round)

    def model(self, x: Tree, state: LastTwoState) -> Tree:
        return self.rule.model(x, state.rule).lerp(self.rule.model(state.x, state.rule), 0.5)


def adapted(
    server: ServerRule, rule: Rule, local: Work, mu: float | None, evaluate: Shown, compression: Compression | None
) -> LocalMethod | Compressed:
    """A server rule around the local training that `local` names. `rule`: the local optimiser; `mu`: weight of prox,
    0.1 unless given, refused where `local` is not prox; `evaluate`: last or last_two."""
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
