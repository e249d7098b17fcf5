"""FedNova in numpy float64, from the paper and the authors' formulas; shares no code with the engine.

fednova     Wang et al. 2020, arXiv:2007.07481
"""

import numpy as np

from tests.reference.methods import History
from tests.reference.trees import add, copy, zeros


def norm(K, momentum=0.0, nesterov=False, gamma=0.0):
    """|a|_1 after K steps: of plain descent, of (Nesterov's) momentum, or of a proximal term with gamma = lr mu."""
    if gamma:
        assert not momentum
        return (1 - (1 - gamma) ** K) / gamma
    if not momentum:
        return float(K)
    if nesterov:
        return norm(K + 1, momentum) - 1
    return (K - momentum * (1 - momentum**K) / (1 - momentum)) / (1 - momentum)


def fednova(gradient, x0, clients, cohorts, steps, rule, norms, mu=0.0, server_lr=1.0):
    """norms: number of local steps -> |a|_1. The weights p_i are uniform."""
    x, history = copy(x0), History([], [], [])
    for r, cohort in enumerate(cohorts):
        total, tau = zeros(x), 0.0
        for i in cohort:
            y, state, K = copy(x), rule.start(x), steps[r, i]
            for k in range(K):
                g = add(gradient(i, y, r, k), add(y, x, -1.0), mu)
                y, state = rule.step(y, g, state)
            total = add(total, add(y, x, -1.0), 1 / (len(cohort) * norms(K)))
            tau += norms(K) / len(cohort)
        x = add(x, total, server_lr * tau)
        history.x.append(x)
    return history


def fixed_point(lr, normalised, rounds=20_000):
    """Two clients with F_i = (x - c_i)^2 / 2, c = (0, 1), K = (1, 10): where rounds with both of them end."""
    x, c, K = 0.5, np.array([0.0, 1.0]), np.array([1, 10])
    for _ in range(rounds):
        moved = (1 - lr) ** K * (x - c) + c - x
        x += (K.mean() * moved / K).mean() if normalised else moved.mean()
    return x
