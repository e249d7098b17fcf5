"""Slow, independent federated methods: numpy float64, one client after another, one dict of arrays each.

Written from the papers' formulas; shares no code with the engine. A tree is a dict name -> array, `gradient(i, x, r,
k)` the gradient of client i at x in round r at local step k, `cohorts[r]` the clients of round r, `steps[r, i]` their
numbers of local steps, `rule` one of `rules`. The warm start, in which every client takes its gradient at x0, has r =
-1, k = 0.

    fedavg      McMahan et al. 2017, arXiv:1602.05629
    scaffold    Karimireddy et al. 2020, arXiv:1910.06378
    local_muon  Takezawa et al. 2025, Algorithm 4
    fedmuon_bc  Takezawa et al. 2025, Algorithm 1
"""

from typing import NamedTuple

import numpy as np

from tests.reference.trees import add, copy, mean, times, zeros


class History(NamedTuple):
    """The states after each round: the server's x and c, and what each client keeps (c_i, or m_i)."""

    x: list
    c: list
    own: list


def server_step(x, deltas, clients, over, server_lr):
    """over="cohort": x + server_lr (1/S) sum of the deltas; over="all": 1/N in place of 1/S."""
    divisor = {"cohort": len(deltas), "all": clients}[over]
    return add(x, mean(deltas, divisor), server_lr)


def opening(gradient, x, clients, start):
    """What every client keeps before the first round: zeros, or its gradient at x0."""
    return [copy(gradient(i, copy(x), -1, 0)) if start == "gradient" else zeros(x) for i in range(clients)]


def fedavg(gradient, x0, clients, cohorts, steps, rule, server_lr=1.0, over="cohort", carry="reset"):
    """carry: the rule's state after a round is dropped, kept by the client, or averaged over the cohort for all."""
    x, history = copy(x0), History([], [], [])
    kept = [rule.start(x) for _ in range(clients)]
    shared = rule.start(x)
    for r, cohort in enumerate(cohorts):
        deltas, states = [], []
        for i in cohort:
            y = copy(x)
            state = {"reset": rule.start(x), "keep": kept[i], "average": shared}[carry]
            for k in range(steps[r, i]):
                y, state = rule.step(y, gradient(i, y, r, k), state)
            deltas.append(add(y, x, -1.0))
            states.append(state)
            kept[i] = state
        shared = {key: mean([state[key] for state in states]) for key in shared}
        x = server_step(x, deltas, clients, over, server_lr)
        history.x.append(x)
    return history


def scaffold(
    gradient,
    x0,
    clients,
    cohorts,
    steps,
    rule,
    server_lr=1.0,
    over="cohort",
    control="mean",
    start="zeros",
    carry="reset",
):
    """y <- rule(g - c_i + c); c_i <- mean (or last) of the raw gradients; c <- c + (1/N) sum of the changes.

    control="literal": c_i <- c_i - c + (x - y_K) / (K lr). "normalised": K is replaced by the displacement that K steps
    of the rule make along the direction 1 with lr = 1.
    """
    x, history = copy(x0), History([], [], [])
    kept = [rule.start(x) for _ in range(clients)]
    own = opening(gradient, x, clients, start)
    c = mean(own)
    for r, cohort in enumerate(cohorts):
        deltas, changes = [], []
        for i in cohort:
            y, state, seen = copy(x), {"reset": rule.start(x), "keep": kept[i]}[carry], []
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                seen.append(g)
                y, state = rule.step(y, add(add(g, own[i], -1.0), c), state)
            kept[i] = state
            if control in ("normalised", "literal"):
                length = rule.lr * (steps[r, i] if control == "literal" else way_of_ones(rule, steps[r, i]))
                new = add(add(own[i], c, -1.0), add(x, y, -1.0), 1 / length)
            else:
                new = mean(seen) if control == "mean" else seen[-1]
            deltas.append(add(y, x, -1.0))
            changes.append(add(new, own[i], -1.0))
            own[i] = new
        x = server_step(x, deltas, clients, over, server_lr)
        c = add(c, mean(changes, clients))
        history.x.append(x)
        history.c.append(c)
        history.own.append(list(own))
    return history


def way_of_ones(rule, steps):
    """The displacement that the rule makes along the direction 1 in `steps` steps, divided by lr."""
    y, one = {"y": np.zeros(1)}, {"y": np.ones(1)}
    state = rule.start(y)
    for _ in range(steps):
        y, state = rule.step(y, one, state)
    return -float(y["y"][0]) / rule.lr


def local_muon(gradient, x0, clients, cohorts, steps, rule, alpha, server_lr=1.0, over="all", start="zeros"):
    """m_i <- (1 - alpha) m_i + alpha g; y <- rule(m_i); the client keeps m_i."""
    x, history = copy(x0), History([], [], [])
    own = opening(gradient, x, clients, start)
    for r, cohort in enumerate(cohorts):
        deltas = []
        for i in cohort:
            y, state = copy(x), rule.start(x)
            for k in range(steps[r, i]):
                own[i] = add(times(own[i], 1 - alpha), gradient(i, y, r, k), alpha)
                y, state = rule.step(y, own[i], state)
            deltas.append(add(y, x, -1.0))
        x = server_step(x, deltas, clients, over, server_lr)
        history.x.append(x)
        history.own.append(list(own))
    return history


def fedmuon_bc(gradient, x0, clients, cohorts, steps, rule, alpha, server_lr=1.0, over="all", start="zeros"):
    """c_i = m_i for the round; m_i <- (1 - alpha) m_i + alpha g; y <- rule(m_i - c_i + c); c as in SCAFFOLD."""
    x, history = copy(x0), History([], [], [])
    own = opening(gradient, x, clients, start)
    c = mean(own)
    for r, cohort in enumerate(cohorts):
        deltas, changes = [], []
        for i in cohort:
            y, m, c_i, state = copy(x), own[i], own[i], rule.start(x)
            for k in range(steps[r, i]):
                m = add(times(m, 1 - alpha), gradient(i, y, r, k), alpha)
                y, state = rule.step(y, add(add(m, c_i, -1.0), c), state)
            deltas.append(add(y, x, -1.0))
            changes.append(add(m, c_i, -1.0))
            own[i] = m
        x = server_step(x, deltas, clients, over, server_lr)
        c = add(c, mean(changes, clients))
        history.x.append(x)
        history.c.append(c)
        history.own.append(list(own))
    return history
