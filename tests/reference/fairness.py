"""Means that weigh clients by their losses, in numpy float64, from the papers; shares no code with the engine.

agnostic    Mohri, Sivek, Suresh 2019, arXiv:1902.00146, with K local steps of all clients in each round
term        Li, Beirami, Sanjabi, Smith 2021, arXiv:2007.01162, with clients as groups
qffl        Li, Sanjabi, Beirami, Smith 2020, arXiv:1905.10497, Algorithm 2
"""

import numpy as np

from tests.reference.trees import add, copy, zeros


def onto_simplex(v, floor=0.0):
    """The nearest point with entries of at least `floor` that sum to 1, by bisection of what is subtracted."""
    low, high = v.min() - 1.0, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, floor).sum() > 1 else (low, middle)
    return np.maximum(v - (low + high) / 2, floor)


def agnostic(problem, sizes, groups, rounds, K, lr, gamma, floor=0.0):
    """(x after each round, lambda after each round). problem: has start, gradient and loss; sizes: examples of each
    client. lambda starts in proportion to the groups' examples."""
    number = max(groups) + 1
    own = [[i for i, group in enumerate(groups) if group == g] for g in range(number)]
    examples = np.array([sum(sizes[i] for i in members) for members in own])
    x, lam = copy(problem.start), examples / sum(sizes)
    path, weights = [], []
    for r in range(rounds):
        losses = [sum(sizes[i] / examples[g] * problem.loss(i, x) for i in own[g]) for g in range(number)]
        moved = zeros(x)
        for i, g in enumerate(groups):
            y = copy(x)
            for k in range(K):
                y = add(y, problem.gradient(i, y, r, k), -lr)
            moved = add(moved, add(y, x, -1.0), lam[g] * sizes[i] / examples[g])
        x = add(x, moved)
        lam = onto_simplex(lam + gamma * np.array(losses), floor)
        path.append(x)
        weights.append(lam)
    return path, weights


def term(problem, sizes, cohorts, K, lr, tilt, weights="uniform"):
    """x after each round. weights: uniform, or by examples."""
    x, path = copy(problem.start), []
    for r, cohort in enumerate(cohorts):
        moved, total = zeros(x), 0.0
        for i in cohort:
            y = copy(x)
            for k in range(K):
                y = add(y, problem.gradient(i, y, r, k), -lr)
            weight = (sizes[i] if weights == "examples" else 1.0) * np.exp(tilt * problem.loss(i, x))
            moved, total = add(moved, add(y, x, -1.0), weight), total + weight
        x = add(x, moved, 1 / total)
        path.append(x)
    return path


def qffl(problem, sizes, cohorts, steps, lr, q, weights="uniform"):
    """x after each round. steps: (round, client) -> K. weights: uniform, or by examples."""
    x, path, L = copy(problem.start), [], 1 / lr
    for r, cohort in enumerate(cohorts):
        moved, h = zeros(x), 0.0
        for i in cohort:
            y = copy(x)
            for k in range(steps[r, i]):
                y = add(y, problem.gradient(i, y, r, k), -lr)
            loss, weight = problem.loss(i, x) + 1e-10, sizes[i] if weights == "examples" else 1.0
            delta = add(zeros(x), add(x, y, -1.0), L)
            square = sum(float((value**2).sum()) for value in delta.values())
            moved = add(moved, delta, weight * loss**q)
            h += weight * (q * loss ** (q - 1) * square + L * loss**q)
        x = add(x, moved, -1 / h)
        path.append(x)
    return path
