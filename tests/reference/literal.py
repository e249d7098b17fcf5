"""Two methods that are written line by line from their papers, in numpy. They share nothing with the engine: neither
code, nor the reading of where a step begins, nor factors, norms or weights.

FedMuon with momentum averaging: Zhang, Gao 2025, arXiv:2510.03866, Algorithm 1, with exact U V^T.
FedExP over truncated decompositions: Jhunjhunwala et al. 2023, Algorithm 1, whose clients train as those of FedHM (Yao
et al. 2021), with weights of the clients.
"""

import numpy as np


def polar(m):
    """U V^T of m = U S V^T, of full rank."""
    u, _, vt = np.linalg.svd(m, full_matrices=False)
    return u @ vt


def fedmuon_ma(gradient, x0, clients, steps, lr, lr_vectors, beta):
    """steps: tau of each round. gradient(i, x, r, k): client i's gradient at x on its k-th batch of round r.

    Line 1 takes one batch before the loop of round 0, so that this round takes steps[0] + 1 batches: the first one for
    m_i, then one after each of the steps. Vectors move by lr_vectors along their momentum, which the paper leaves open.
    """
    x, momentum, path = dict(x0), None, []
    for r, tau in enumerate(steps):
        ends, momenta = [], []
        for i in range(clients):
            y, k = dict(x), 0
            if momentum is None:
                m, k = gradient(i, y, r, 0), 1  # line 1
            else:
                m = dict(momentum)
            for _ in range(tau):
                for name, v in m.items():  # line 4
                    if v.ndim >= 2:
                        y[name] = y[name] - lr * polar(v.reshape(len(v), -1)).reshape(v.shape)
                    else:
                        y[name] = y[name] - lr_vectors * v
                g = gradient(i, y, r, k)  # line 5, at the new y, on the next batch
                m = {name: (1 - beta) * m[name] + beta * g[name] for name in m}
                k += 1
            ends.append(y)
            momenta.append(m)
        x = {name: sum(y[name] for y in ends) / clients for name in x}  # line 7
        momentum = {name: sum(m[name] for m in momenta) / clients for name in x}
        path.append(x)
    return path


def fedexp(gradients, w, b, weights, rounds, steps, lr, epsilon, rank=None):
    """The path of (w, b), a matrix and a vector, and of the global step sizes.

    gradients: of each client, (w, b) -> (gradient of w, of b). weights: of the clients, they add up to 1. rank: of the
    decomposition of w that is sent down, None for w itself. What comes up is made into a whole matrix before its norm
    is measured and before it is averaged.
    """
    path, sizes = [], []
    for _ in range(rounds):
        if rank is not None:
            p, s, qt = np.linalg.svd(w, full_matrices=False)
            u0, v0 = p[:, :rank] * np.sqrt(s[:rank]), qt[:rank].T * np.sqrt(s[:rank])
            w = u0 @ v0.T
        moves = []
        for gradient in gradients:
            if rank is None:
                wi, bi = w, b
                for _ in range(steps):
                    gw, gb = gradient(wi, bi)
                    wi, bi = wi - lr * gw, bi - lr * gb
            else:
                u, v, bi = u0, v0, b
                for _ in range(steps):
                    gw, gb = gradient(u @ v.T, bi)
                    u, v, bi = u - lr * gw @ v, v - lr * gw.T @ u, bi - lr * gb
                wi = u @ v.T
            moves.append((wi - w, bi - b))
        squares = [(dw**2).sum() + (db**2).sum() for dw, db in moves]
        mean_w = sum(a * dw for a, (dw, _) in zip(weights, moves, strict=True))
        mean_b = sum(a * db for a, (_, db) in zip(weights, moves, strict=True))
        below = 2 * ((mean_w**2).sum() + (mean_b**2).sum() + epsilon)
        size = sum(a * square for a, square in zip(weights, squares, strict=True)) / below
        w, b = w + size * mean_w, b + size * mean_b
        path.append((w, b))
        sizes.append(size)
    return path, sizes
