"""LocalSGDA: local descent on the primal and ascent on the dual, then the mean of both.

Deng, Mahdavi, AISTATS 2021, arXiv:2102.13152. With a server's step size it is FSGDA of Yang et al. 2022.

Choose it as the baseline for min-max problems, such as the workload `auc`. It is enough where clients are alike or take
few local steps.

    x_i <- x, y_i <- y;  K times: x_i <- x_i - lr_x g_x,  y_i <- y_i + lr_y g_y     one batch for both
    x   <- x + server_lr_x mean(x_i - x),  y <- y + server_lr_y mean(y_i - y)

The workload reverses the sign of the dual's gradient, so that this is FedAvg with two step sizes; without a dual group
it is FedAvg to the bit. server_lr = 1 is the paper's.

Uncertain: the paper itself was not read. In theory the step size of the primal must be much the smaller one; no value
is stated. The variant Local SGDA+, which takes the dual's gradient at an older x, is not here.

Departures:
- The dual is not projected.
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
- server_lr is Yang et al.'s.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod
from .parts.groups import Number
from .parts.rules import Sgd
from .parts.servers import Mean


def local_sgda(lr: Number = 0.1, server_lr: Number = 1.0) -> LocalMethod:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; server_lr: step size along the mean
    displacement, or one for each group."""
    return LocalMethod(Sgd(lr), Plain(), Mean(server_lr))
