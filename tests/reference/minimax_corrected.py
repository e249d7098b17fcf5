"""Slow, independent minimax methods with control variates and a momentum frozen during the round.

Zhang, Gao 2025, arXiv:2511.04456, Algorithms 1 to 3 and equation 21. Conventions as in `minimax`.

    line 5        u_k  = beta (g - h_i + h) + (1 - beta) u
    line 6        x_i -= eta_x step(u_k),  y_i += eta_y step(v_k)
    line 8        h_i  = mean of the K raw g
    line 10       h   += (1/N) sum over the cohort of the change of h_i; with all clients, the mean of h_i
    line 11       x   += gamma_x / (eta_x K) mean(x_i - x), and so y
    line 12       u    = beta h + (1 - beta) u

    fed_nsgda_m    step(u) = u / |u|, of all of x, of all of y            (section 4.6, Algorithm 1)
    fedmuon_da     step(U) = P Q^T of each matrix U = P S Q^T             (section 4.7, Algorithms 2 and 3)
    fed_sgda_clip  step(u) = min(1, tau / |u|) u                          (section 4.8, equation 21)
"""

import numpy as np

from tests.reference.minimax import is_dual, move, opening, part
from tests.reference.newton_schulz import orthogonalise
from tests.reference.trees import add, copy, mean, norm, times, zeros
from tests.reference.variance_reduced import Path

GUARD = 1e-12
LITERAL = (0.9, 0.9)


def by_group(step):
    """`step`: (u of one group, its place in a pair) -> the direction of that group."""

    def of(u):
        x = {n: value for n, value in u.items() if not is_dual(n)}
        y = {n: value for n, value in u.items() if is_dual(n)}
        both = {**step(x, 0), **step(y, 1)}
        return {n: both[n] for n in u}

    return of


def unit(u):
    """u / |u| of one array, nothing where |u| <= GUARD; of a number, its sign."""
    size = np.sqrt((u * u).sum())
    return u / size if size > GUARD else np.zeros_like(u)


def polar(u, scheme="svd", iterations=5):
    """P Q^T of one matrix; more than two dimensions: (first, the others). scheme "jordan": Newton-Schulz."""
    if np.sqrt((u * u).sum()) <= GUARD:
        return np.zeros_like(u)
    return orthogonalise(u.reshape(u.shape[0], -1), scheme, iterations).reshape(u.shape)


def mean_move(z, ends, counts, lr, per):
    """(1/S) sum of (z_i - z) / (eta K); K is each client's own, or the mean over the cohort."""
    average = float(np.mean(counts))
    moves = [
        times(add(end, z, -1.0), 1 / (k if per == "own" else average)) for end, k in zip(ends, counts, strict=True)
    ]
    return {n: value / part(lr, n) for n, value in mean(moves).items()}


def frozen_momentum(
    gradient, z0, clients, cohorts, steps, rule, lr, gamma, beta, start="zeros", per="own", fused=False
):
    """`rule`: u -> the step's direction, of x and y at once.

    gamma: a pair; None, plain averaging, gamma = eta K. beta: a pair, the weights of the NEW gradients.
    start: "zeros"; "gradient", h_i is the gradient at z0, h and u their mean.
    per: K of line 11 when clients differ, see `mean_move`. fused: u_k = beta (g - h_i) + c, where
    c = beta h + (1 - beta) u is formed once a round.
    path.shared["directions"]: the mean over the cohort of each client's mean u_k.
    """
    z, u, path = copy(z0), zeros(z0), Path([], [], [])
    own = [zeros(z0) for _ in range(clients)]
    if start == "gradient":
        own = opening(gradient, z, clients)
        u = mean(own)
    h = mean(own)
    for r, cohort in enumerate(cohorts):
        c = {n: part(beta, n) * h[n] + (1 - part(beta, n)) * u[n] for n in u}
        ends, changes, ways = [], [], []
        for i in cohort:
            y, seen, us = copy(z), [], []
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                if fused:
                    u_k = {n: part(beta, n) * (g[n] - own[i][n]) + c[n] for n in g}
                else:
                    corrected = {n: g[n] - own[i][n] + h[n] for n in g}
                    u_k = {n: part(beta, n) * corrected[n] + (1 - part(beta, n)) * u[n] for n in g}
                y = move(y, rule(u_k), lr)
                seen.append(g)
                us.append(u_k)
            ends.append(y)
            ways.append(mean(us))
            changes.append(add(mean(seen), own[i], -1.0))
            own[i] = mean(seen)
        h = add(h, mean(changes, clients))
        if gamma is None:
            z = mean(ends)
        else:
            moved = mean_move(z, ends, [steps[r, i] for i in cohort], lr, per)
            z = {n: z[n] + part(gamma, n) * moved[n] for n in z}
        u = {n: part(beta, n) * h[n] + (1 - part(beta, n)) * u[n] for n in u}
        path.x.append(z)
        path.shared.append({"control": h, "momentum": u, "directions": mean(ways)})
        path.own.append(list(own))
    return path


def fed_nsgda_m(gradient, z0, clients, cohorts, steps, lr, gamma=None, beta=LITERAL, guard=GUARD, **settings):
    """Section 4.6. Norms are of the whole primal and of the whole dual; |u| <= guard makes a zero step."""

    def step(u, _):
        size = norm(u)
        return times(u, 1 / size) if size > guard else zeros(u)

    return frozen_momentum(gradient, z0, clients, cohorts, steps, by_group(step), lr, gamma, beta, **settings)


def fedmuon_da(
    gradient,
    z0,
    clients,
    cohorts,
    steps,
    lr,
    gamma=None,
    beta=LITERAL,
    scheme="svd",
    iterations=5,
    rest=unit,
    **settings,
):
    """Section 4.7. scheme: "svd", or "jordan", the five quintic steps. rest: what vectors and numbers get, by array."""

    def step(u):
        return {n: polar(value, scheme, iterations) if np.ndim(value) > 1 else rest(value) for n, value in u.items()}

    return frozen_momentum(gradient, z0, clients, cohorts, steps, step, lr, gamma, beta, **settings)


def fed_sgda_clip(gradient, z0, clients, cohorts, steps, lr, gamma=None, beta=LITERAL, tau=(0.1, 0.1), **settings):
    """Section 4.8. tau: a pair, the bounds of the whole primal and of the whole dual."""

    def step(u, place):
        size = norm(u)
        return times(u, tau[place] / size) if size > tau[place] else u

    return frozen_momentum(gradient, z0, clients, cohorts, steps, by_group(step), lr, gamma, beta, **settings)


def theorem_sizes(clients, steps, rounds, kappa):
    """The sizes of theorems 1 and 2 (equations 11 and 17), with 1 for the constants in O() and the 10 of Lemma A.5."""
    per_round = clients * steps
    dual = 10 * np.sqrt(np.sqrt(per_round)) / rounds**0.75  # gamma_y = 10 kappa gamma_x
    length, weight = 1 / (steps * np.sqrt(rounds)), np.sqrt(per_round / rounds)
    return {"lr": (length, length), "gamma": (dual / (10 * kappa), dual), "beta": (weight, weight)}
