"""Slow, independent methods with shared momenta and variance reduction: numpy float64, one client after another.

Written from the methods' equations alone; shares no code with the engine. Conventions as in `methods`: `gradient(i, x,
r, k)` is client i's gradient at x on the batch of round r and local step k, and the same batch at another point if
asked twice; `cohorts[r]` the clients of round r; `steps[r, i]` their numbers of local steps.

    local_sgdm                            Yu, Jin, Yang 2019, arXiv:1905.03817
    local_adaalter                        Xie, Koyejo, Gupta, Lin 2019, arXiv:1911.09030
    fedprox                               Li et al. 2020, arXiv:1812.06127
    fedavg_m, fedavg_vr, scaffold_m, _vr  Cheng et al. 2024, arXiv:2306.16504
    padamfed, padamfed_vr                 Yan et al. 2025
    stem                                  Khanduri et al. 2021, arXiv:2106.10435
    fafed                                 Wu et al. 2023, arXiv:2212.00974
"""

from typing import NamedTuple

import numpy as np

from tests.reference.trees import add, copy, mean, norm, times, zeros


class Path(NamedTuple):
    """After each round: x, the server's other vectors by name, and what each client keeps (c_i or p_i)."""

    x: list
    shared: list
    own: list


def local_sgdm(gradient, x0, clients, cohorts, steps, lr, mu, nesterov=False, server_lr=1.0):
    """x_i = x, u_i = u; K times u_i = mu u_i + g, x_i -= lr u_i (or lr (mu u_i + g)); both are averaged."""
    x, u, path = copy(x0), zeros(x0), Path([], [], [])
    for r, cohort in enumerate(cohorts):
        models, momenta = [], []
        for i in cohort:
            y, u_i = copy(x), copy(u)
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                u_i = add(times(u_i, mu), g)
                way = add(times(u_i, mu), g) if nesterov else u_i
                y = add(y, way, -lr)
            models.append(y)
            momenta.append(u_i)
        x = add(x, add(mean(models), x, -1.0), server_lr)
        u = mean(momenta)
        path.x.append(x)
        path.shared.append({"u": u})
    return path


def local_adaalter(gradient, x0, clients, cohorts, steps, lr, eps=1.0, b0=0.0, weights=None):
    """x_i = x, A2_i = B2; in local step t' = 1, 2, ...: x_i -= lr g / sqrt(B2 + t' eps^2), A2_i += g^2, entry by entry;
    then x and B2 are the means of the x_i and of the A2_i. weights: of the clients in both means, None for equal ones;
    B2 is b0^2 at first."""
    weights = np.ones(clients) if weights is None else np.asarray(weights, dtype=np.float64)
    x, B2, path = copy(x0), {name: np.full(np.shape(value), b0**2) for name, value in x0.items()}, Path([], [], [])
    for r, cohort in enumerate(cohorts):
        total, models, sums = sum(weights[i] for i in cohort), zeros(x0), zeros(x0)
        for i in cohort:
            x_i, A2 = copy(x), copy(B2)
            for t in range(1, steps[r, i] + 1):
                g = gradient(i, x_i, r, t - 1)
                for name in x_i:
                    x_i[name] = x_i[name] - lr * g[name] / np.sqrt(B2[name] + t * eps**2)
                    A2[name] = A2[name] + g[name] * g[name]
            models, sums = add(models, x_i, weights[i] / total), add(sums, A2, weights[i] / total)
        x, B2 = models, sums
        path.x.append(x)
        path.shared.append({"squares": B2})
    return path


def fedprox(gradient, x0, clients, cohorts, steps, rule, mu, server_lr=1.0):
    """Local steps on f_i(y) + mu |y - x|^2 / 2."""
    x, path = copy(x0), Path([], [], [])
    for r, cohort in enumerate(cohorts):
        models = []
        for i in cohort:
            y, state = copy(x), rule.start(x)
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                pulled = {name: g[name] + mu * (y[name] - x[name]) for name in g}
                y, state = rule.step(y, pulled, state)
            models.append(y)
        x = add(x, add(mean(models), x, -1.0), server_lr)
        path.x.append(x)
    return path


def direction(variant, beta, g, g_prev, c_i, c, momentum):
    """The table of directions, entry by entry."""
    formulas = {
        "fedavg_m": lambda n: beta * g[n] + (1 - beta) * momentum[n],
        "fedavg_vr": lambda n: g[n] + (1 - beta) * (momentum[n] - g_prev[n]),
        "scaffold_m": lambda n: beta * (g[n] - c_i[n] + c[n]) + (1 - beta) * momentum[n],
        "scaffold_vr": lambda n: g[n] - beta * (c_i[n] - c[n]) + (1 - beta) * (momentum[n] - g_prev[n]),
    }
    return {n: formulas[variant](n) for n in g}


def warm(gradient, x0, clients, start):
    """(what every client keeps, G) before the first round."""
    if start == "zeros":
        return [zeros(x0) for _ in range(clients)], zeros(x0)
    own = [copy(gradient(i, copy(x0), -1, 0)) for i in range(clients)]
    return own, mean(own)


def shared_momentum(
    gradient, x0, clients, cohorts, steps, variant, lr, beta, gamma=None, server_lr=1.0, start="zeros", rule=None
):
    """The four methods. beta: one number, or one a round. gamma None: server_lr * lr * K, K the mean over the cohort.
    With a rule of its own (not plain steps of lr) G is the mean of the directions, and the model moves by server_lr K
    times the mean of (x_i - x) / K_i.
    """
    betas = beta if isinstance(beta, list) else [beta] * len(cohorts)
    x, previous, path = copy(x0), copy(x0), Path([], [], [])
    own, momentum = warm(gradient, x0, clients, start)
    if "scaffold" not in variant:
        own = [zeros(x0) for _ in range(clients)]
    c = mean(own)
    for r, cohort in enumerate(cohorts):
        pseudo, means, changes, per_step = [], [], [], []
        for i in cohort:
            y, seen, ways = copy(x), [], []
            state = None if rule is None else rule.start(x)
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                g_prev = gradient(i, previous, r, k) if variant.endswith("vr") else None
                u = direction(variant, betas[r], g, g_prev, own[i], c, momentum)
                y, state = (add(y, u, -lr), None) if rule is None else rule.step(y, u, state)
                seen.append(g)
                ways.append(u)
            means.append(mean(ways))
            per_step.append(times(add(y, x, -1.0), 1 / steps[r, i]))
            if rule is None:
                pseudo.append(times(add(x, y, -1.0), 1 / (lr * steps[r, i])))
            if "scaffold" in variant:
                new = mean(seen)
                changes.append(add(new, own[i], -1.0))
                own[i] = new
        k_mean = float(np.mean([steps[r, i] for i in cohort]))
        previous = x
        if rule is None:
            momentum = mean(pseudo)
            x = add(x, momentum, -(server_lr * lr * k_mean if gamma is None else gamma))
        else:
            momentum = mean(means)
            x = add(x, mean(per_step), server_lr * k_mean)
        if changes:
            c = add(c, mean(changes, clients))
        path.x.append(x)
        path.shared.append({"momentum": momentum, "control": c, "previous": previous})
        path.own.append(list(own))
    return path


def padamfed(gradient, x0, clients, cohorts, steps, lr, gamma, beta, reduced=False, momentum="plain", start="gradient"):
    """Steps lr u / |u|; x = x - gamma mean of (x - x_i) / (lr K_i); G by the control variates, or the mean of u."""
    x, previous, path = copy(x0), copy(x0), Path([], [], [])
    own, big_g = warm(gradient, x0, clients, start)
    c = mean(own)
    for r, cohort in enumerate(cohorts):
        moves, ways, changes = [], [], []
        for i in cohort:
            y, seen, us = copy(x), [], []
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                u = {n: beta * (g[n] - own[i][n] + c[n]) + (1 - beta) * big_g[n] for n in g}
                if reduced:
                    old = gradient(i, previous, r, k)
                    u = {n: g[n] - beta * (own[i][n] - c[n]) + (1 - beta) * (big_g[n] - old[n]) for n in g}
                size = norm(u)
                y = add(y, u, -lr / size) if size > 0 else y
                seen.append(g)
                us.append(u)
            moves.append(times(add(x, y, -1.0), 1 / (lr * steps[r, i])))
            ways.append(mean(us))
            new = mean(seen)
            changes.append(add(new, own[i], -1.0))
            own[i] = new
        previous = x
        x = add(x, mean(moves), -gamma)
        controls = add(times(add(mean(changes), c), beta), big_g, 1 - beta)
        big_g = controls if momentum == "plain" else mean(ways)
        c = add(c, mean(changes, clients))
        path.x.append(x)
        path.shared.append({"momentum": big_g, "control": c, "previous": previous})
        path.own.append(list(own))
    return path


def free(variant, cohort, steps, rounds):
    """(lr, gamma, beta) from S, K and R alone."""
    sk = cohort * steps
    if variant == "padamfed":
        return 1 / (steps * rounds**0.5), sk**0.25 / rounds**0.75, min(1.0, (sk / rounds) ** 0.5)
    return 1 / (steps * rounds), sk ** (1 / 3) / rounds ** (2 / 3), min(1.0, sk ** (1 / 3) / rounds ** (2 / 3))


def stem(gradient, x0, clients, cohorts, steps, rates, start="gradient", prev="own", first=None):
    """rates(t): (a_t, eta_t), t counting local steps from 1 (the extra first step is t = 0).

    A client that was not there in the round before, S < N, takes p_i = x.
    """
    x, path = copy(x0), Path([], [], [])
    d = zeros(x0)
    if start == "gradient":
        d = mean([gradient(i, copy(x0), -1, 0) for i in range(clients)])
        x = add(x0, d, -(rates(0)[1] if first is None else first))
    own, last, average, before = [copy(x0) for _ in range(clients)], [-1] * clients, copy(x0), 0.0
    for r, cohort in enumerate(cohorts):
        models, directions, points = [], [], []
        for i in cohort:
            y, d_i = copy(x), copy(d)
            p = average if prev == "server" else own[i] if last[i] == r - 1 else x
            for k in range(steps[r, i]):
                a, eta = rates(1 + before + k)
                fresh, old = gradient(i, y, r, k), gradient(i, p, r, k)
                d_i = {n: fresh[n] + (1 - a) * (d_i[n] - old[n]) for n in fresh}
                p = y
                y = add(y, d_i, -eta)
            models.append(y)
            directions.append(d_i)
            points.append(p)
            own[i], last[i] = p, r
        x, d, average = mean(models), mean(directions), mean(points)
        before += float(np.mean([steps[r, i] for i in cohort]))
        path.x.append(x)
        path.shared.append({"direction": d})
        path.own.append(list(own))
    return path


def fafed(
    gradient,
    x0,
    clients,
    cohorts,
    steps,
    lr,
    alpha=0.1,
    beta=0.999,
    rho=1e-3,
    start="gradient",
    first="plain",
    previous="own",
):
    """K - 1 preconditioned local steps, the K-th by the server with the new preconditioner."""
    x, m, v, path = copy(x0), zeros(x0), zeros(x0), Path([], [], [])
    if start == "gradient":
        initial = [gradient(i, copy(x0), -1, 0) for i in range(clients)]
        m = mean(initial)
        v = mean([{n: g[n] ** 2 for n in g} for g in initial])
    own, last, average = [copy(x0) for _ in range(clients)], [-1] * clients, copy(x0)
    for r, cohort in enumerate(cohorts):
        scale = {n: np.sqrt(v[n]) + rho for n in v}
        models, firsts, seconds = [], [], []
        for i in cohort:
            y, m_i, v_i = copy(x), copy(m), copy(v)
            if r == 0 and start == "gradient":
                y = {n: y[n] - lr * m[n] / (scale[n] if first == "preconditioned" else 1.0) for n in y}
            p = average if previous == "server" else own[i] if last[i] == r - 1 else y
            for k in range(steps[r, i]):
                g, g_old = gradient(i, y, r, k), gradient(i, p, r, k)
                m_i = {n: g[n] + (1 - alpha) * (m_i[n] - g_old[n]) for n in g}
                v_i = {n: beta * v_i[n] + (1 - beta) * g[n] ** 2 for n in g}
                p = y
                if k < steps[r, i] - 1:
                    y = {n: y[n] - lr * m_i[n] / scale[n] for n in y}
            models.append(y)
            firsts.append(m_i)
            seconds.append(v_i)
            own[i], last[i] = p, r
        m, v, x, average = mean(firsts), mean(seconds), mean(models), mean([own[i] for i in cohort])
        x = {n: x[n] - lr * m[n] / (np.sqrt(v[n]) + rho) for n in x}
        path.x.append(x)
        path.shared.append({"m": m, "v": v})
        path.own.append(list(own))
    return path
