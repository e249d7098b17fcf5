"""Slow, independent methods against client drift and towards flat minima: numpy float64, one client after another.

Written from the papers' variables and equations; shares no code with the engine. Conventions as in `methods`.

    feddyn    Acar et al. 2021, arXiv:2111.04263
    feddc     Gao et al. 2022, arXiv:2203.11751
    fedadmm   Gong, Li, Freris 2022, arXiv:2204.03529
    mifa      Gu et al. 2021, arXiv:2106.04159
    fedsam    Qu et al. 2022, arXiv:2206.02618, and the momentum of MoFedSAM and FedCM
"""

import numpy as np

from tests.reference.trees import add, copy, mean, norm, times, zeros
from tests.reference.variance_reduced import Path


def feddyn(gradient, x0, clients, cohorts, steps, rule, alpha):
    """The paper's L_i (the gradient of client i at its last model, by first-order optimality) and h.

    own: L_i. shared: h, and the mean of the cohort's models."""
    x, h, path = copy(x0), zeros(x0), Path([], [], [])
    own = [zeros(x0) for _ in range(clients)]
    for r, cohort in enumerate(cohorts):
        models = []
        for i in cohort:
            y, state = copy(x), rule.start(x)
            for k in range(steps[r, i]):
                g = add(add(gradient(i, y, r, k), own[i], -1.0), add(y, x, -1.0), alpha)
                y, state = rule.step(y, g, state)
            own[i] = add(own[i], add(y, x, -1.0), -alpha)
            models.append(y)
        h = add(h, mean([add(y, x, -1.0) for y in models], clients), -alpha)
        x = add(mean(models), h, -1 / alpha)
        path.x.append(x)
        path.shared.append({"h": h, "mean": mean(models)})
        path.own.append(list(own))
    return path


def feddc(gradient, x0, clients, cohorts, steps, lr, alpha, control="mean"):
    """The code's variables: the drift h_i, the control variates by displacements of plain steps, and the cohort's mean
    model corrected by the mean drift of all clients. own: h_i and c_i. shared: c."""
    x, c, path = copy(x0), zeros(x0), Path([], [], [])
    drift, own = ([zeros(x0) for _ in range(clients)] for _ in range(2))
    for r, cohort in enumerate(cohorts):
        models, changes = [], []
        for i in cohort:
            y, away = copy(x), add(x, drift[i], -1.0)  # the pull is towards x - h_i
            correction = add(c, own[i], -1.0) if control == "mean" else zeros(x)
            for k in range(steps[r, i]):
                g = add(gradient(i, y, r, k), add(y, away, -1.0), alpha)
                y = add(y, add(g, correction), -lr)
            drift[i] = add(drift[i], add(y, x, -1.0))
            if control == "mean":
                new = add(add(own[i], c, -1.0), add(x, y, -1.0), 1 / (lr * steps[r, i]))
                changes.append(add(new, own[i], -1.0))
                own[i] = new
            models.append(y)
        x = add(mean(models), mean(drift))
        if changes:
            c = add(c, mean(changes, clients))
        path.x.append(x)
        path.shared.append({"c": c})
        path.own.append([{"h": h, "c": c_i} for h, c_i in zip(drift, own, strict=True)])
    return path


def fedadmm(gradient, x0, clients, cohorts, steps, rule, rho, server_lr=1.0, **options):
    """A client sends the change of its augmented model w_i + p_i / rho. options: over, begin, message. own: w and p."""
    over, begin = options.get("over", "cohort"), options.get("begin", "own")
    x, path = copy(x0), Path([], [], [])
    own = [{"w": copy(x0), "p": zeros(x0)} for _ in range(clients)]
    for r, cohort in enumerate(cohorts):
        sent = []
        for i in cohort:
            before = own[i]
            w, state = copy(before["w"] if begin == "own" else x), rule.start(x)
            for k in range(steps[r, i]):
                g = add(add(gradient(i, w, r, k), before["p"]), add(w, x, -1.0), rho)
                w, state = rule.step(w, g, state)
            own[i] = {"w": w, "p": add(before["p"], add(w, x, -1.0), rho)}
            if options.get("message") == "twice":
                sent.append(times(add(w, x, -1.0), 2.0))
            else:
                sent.append(add(augmented(own[i], rho), augmented(before, rho), -1.0))
        x = add(x, mean(sent, len(cohort) if over == "cohort" else clients), server_lr)
        path.x.append(x)
        path.own.append(list(own))
    return path


def augmented(own, rho):
    return add(own["w"], own["p"], 1 / rho)


def mifa(gradient, x0, clients, cohorts, steps, lr, over="all"):
    """The mean over all clients of the last updates, summed anew in every round. lr: one number, or one a round."""
    rates = lr if isinstance(lr, list) else [lr] * len(cohorts)
    x, path, seen = copy(x0), Path([], [], []), set()
    own = [zeros(x0) for _ in range(clients)]
    for r, cohort in enumerate(cohorts):
        for i in cohort:
            y = copy(x)
            for k in range(steps[r, i]):
                y = add(y, gradient(i, y, r, k), -rates[r])
            own[i] = times(add(x, y, -1.0), 1 / rates[r])
        seen |= set(cohort)
        x = add(x, mean(own, clients if over == "all" else len(seen)), -rates[r])
        path.x.append(x)
        path.own.append(list(own))
    return path


def worst_nearby(y, g, rho, kind="sam", eta=0.2):
    """The point at which the second gradient is taken."""
    if kind == "sam":
        return add(y, g, rho / (norm(g) + 1e-16))
    scale = {name: np.abs(v) + eta if name.endswith("weight") else np.ones_like(v) for name, v in y.items()}
    size = norm({name: scale[name] * g[name] for name in g}) + 1e-16
    return {name: y[name] + rho * scale[name] ** 2 * g[name] / size for name in y}


def fedsam(gradient, x0, clients, cohorts, steps, rule, rho, beta=None, server_lr=1.0, **nearby):
    """beta: weight of the new gradient, with a momentum that all clients share; None for no momentum. rho = 0 takes one
    gradient. With the momentum the displacements are divided by the clients' numbers of steps. shared: G."""
    x, shared, path = copy(x0), zeros(x0), Path([], [], [])
    for r, cohort in enumerate(cohorts):
        deltas, ways, counts = [], [], [steps[r, i] for i in cohort]
        for i, count in zip(cohort, counts, strict=True):
            y, state, taken = copy(x), rule.start(x), []
            for k in range(count):
                g = gradient(i, y, r, k)
                if rho:
                    g = gradient(i, worst_nearby(y, g, rho, **nearby), r, k)
                u = g if beta is None else add(times(g, beta), shared, 1 - beta)
                y, state = rule.step(y, u, state)
                taken.append(u)
            factor = 1.0 if beta is None else np.mean(counts) / count
            deltas.append(times(add(y, x, -1.0), factor))
            ways.append(mean(taken))
        x, shared = add(x, mean(deltas), server_lr), mean(ways)
        path.x.append(x)
        path.shared.append({"momentum": shared})
    return path
