"""FedMUD: clients train a small factored update of frozen weights; BKD, AAD and +F choose how it is factored.

Li, Luo, Wang, Tang, Xu, Luo, Li, He, Li, ICML 2025 ("The Panaceas for Improving Low-Rank Decomposition in
Communication-Efficient Federated Learning"). The authors' code settles what the text leaves open.

    W~ = W + P(U, V), W frozen;  K local steps on U, V and all that is not compressed;  U <- mean U_i, V <- mean V_i
    every `reset` rounds: W <- W + P(U, V), U drawn anew, V = 0

    fedmud           P = U V^T
    fedmud_bkd       P = blocks of Kronecker products
    fedmud_aad       W~ = W + P(U, V~) + P(U~, V), U~, V~ fixed at random, U = V = 0: the mean of the factors makes
                     exactly the mean of the updates, which the two above miss by a covariance
    fedmud_f         W~ = W + P(U~, V), U~ fixed: twice the rank for the same traffic; exact too
    fedmud_bkd_aad, fedmud_bkd_f

Everything drawn is U(-a, a), counted by the run's seed and the number of the draw. In the compressed layers AAD and +F
depend on the step size and a through lr a^2 alone (with plain SGD). Server rules and rules with states need reset = 0.

Departures:
- The text's ratio 2 (m + n) r / (m n) is (m + n) r / (m n), as in the code.
- Kronecker blocks lie one after the other, as in the code; "kronecker_grid" of the compression `updates` is the text's
  layout.
- All draws are counted by the run's seed; the code draws every layer of the first round with one constant.
- The weights of the mean are the federation's; the code's are numbers of minibatches.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.compression import RATIO, Change, Compressed, updates
from .parts.matrices import Layers, Reshape
from .parts.rules import Sgd
from .parts.servers import Mean


def _recipe(form: Change, blocks: bool, spread: float):
    product = "kronecker" if blocks else "low_rank"

    def recipe(
        rule: Rule = Sgd(0.1),
        ratio: float = RATIO,
        a: float = spread,
        reset: int = 1,
        reshape: Reshape = "raw",
        layers: Layers = "inner",
        nearest: bool = False,
        server_lr: float = 1.0,
    ) -> Compressed:
        """rule: the local optimiser, of the factors and all else; ratio: numbers sent over numbers of the model; a:
        factors are drawn from U(-a, a); reset: rounds between merges, 0 for none; reshape: of convolutions to
        matrices, raw or permuted; layers: inner leaves out the first and the last weight, or all; nearest: where the
        ratio cannot be reached, the least that can."""
        method = LocalMethod(rule, Plain(), Mean(server_lr))
        return Compressed(method, updates(ratio, a, reset, form, product, reshape, layers, nearest))

    return recipe


fedmud = _recipe("pair", False, 0.5)
fedmud_bkd = _recipe("pair", True, 1.0)
fedmud_aad = _recipe("anchored", False, 0.5)
fedmud_bkd_aad = _recipe("anchored", True, 1.0)
fedmud_f = _recipe("frozen", False, 0.5)
fedmud_bkd_f = _recipe("frozen", True, 1.0)
