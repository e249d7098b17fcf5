"""SAGDA: local descent-ascent with control variates, the mean gradients of each client's last round.

Yang, Liu, Zhang, Liu, NeurIPS 2022 ("SAGDA: achieving O(eps^-2) communication complexity in federated min-max
learning"), arXiv:2210.00611. F-SAGDA in Zhang and Gao 2025.

Choose it for min-max problems whose clients differ and can keep a vector of the model's size: it is SCAFFOLD with
descent on the primal and ascent on the dual. It costs twice the traffic of LocalSGDA.

    K times: x_i <- x_i - lr_x (g_x - v_x,i + v_x),  y_i <- y_i + lr_y (g_y - v_y,i + v_y)
    v_i <- mean of the K gradients g;  v <- v + |S|/N mean(change of v_i)
    x   <- x + server_lr_x mean(x_i - x),  y <- y + server_lr_y mean(y_i - y)

The workload reverses the sign of the dual's gradient, so that this is `scaffold` with plain steps, to the bit. The
federation's client weights are those of the mean displacement alone; v is the plain mean of all v_i in any case.

Uncertain: the paper's algorithm was not read. How it samples clients for the control variates and for the updates may
differ; under full participation the two are equal, up to the staleness of v.

Departures:
- One set of clients serves both control variates and updates.
- The dual is not projected.
"""

from __future__ import annotations

from .local import LocalMethod
from .parts.groups import Number
from .parts.rules import Sgd
from .parts.servers import Mean
from .scaffold import ControlVariates


def sagda(lr: Number = 0.1, server_lr: Number = 1.0) -> LocalMethod:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; server_lr: step size along the mean
    displacement, or one for each group."""
    return LocalMethod(Sgd(lr), ControlVariates(), Mean(server_lr))
