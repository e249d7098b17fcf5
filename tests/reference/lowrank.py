"""Weights made of small factors, and the factors' gradients by the chain rule: numpy float64, one layer at a time.

A form has `shapes(shape)`, the factors of a weight of that shape; `product(*factors, shape)`, the weight; and
`back(g, *factors)`, the gradients of the factors where the weight's gradient is g.

    Matrix          U V^T                                Li et al. 2025; FedLMT, FedHM with reshape="permuted"
    HadamardMatrix  (X1 Y1^T) * (X2 Y2^T), elementwise   FedPara, linear layers
    HadamardTensor  W1 * W2, W_j = T_j x O_j x I_j       FedPara, convolutions
"""

import numpy as np


def matrix(w, reshape="raw"):
    """(o, i, kh, kw) as (o kh, i kw): "raw" keeps the memory's order, "permuted" orders axes as (o, kh, i, kw) first.

    (m, n) stays as it is.
    """
    if w.ndim == 2:
        return w
    o, i, kh, kw = w.shape
    if reshape == "permuted":
        w = np.transpose(w, (0, 2, 1, 3))
    elif reshape != "raw":
        raise ValueError(reshape)
    return np.ascontiguousarray(w).reshape(o * kh, i * kw)


def weight(a, shape, reshape="raw"):
    """The inverse of `matrix`."""
    if len(shape) == 2:
        return a.reshape(shape)
    o, i, kh, kw = shape
    if reshape == "permuted":
        return np.transpose(a.reshape(o, kh, i, kw), (0, 2, 1, 3))
    return a.reshape(shape)


def sides(shape):
    """(m, n) of the matrix of a weight."""
    return tuple(shape) if len(shape) == 2 else (shape[0] * shape[2], shape[1] * shape[3])


class Matrix:
    """U (m, r), V (n, r)."""

    def __init__(self, rank, reshape="raw"):
        self.rank, self.reshape = rank, reshape

    def shapes(self, shape):
        m, n = sides(shape)
        return {"U": (m, self.rank), "V": (n, self.rank)}

    def product(self, u, v, shape):
        return weight(u @ v.T, shape, self.reshape)

    def back(self, g, u, v):
        g = matrix(g, self.reshape)
        return g @ v, g.T @ u

    def split(self, w):
        """Truncated SVD P S Q^T of the weight's matrix, shared evenly: U = P_r S_r^1/2, V = Q_r S_r^1/2."""
        p, s, qt = np.linalg.svd(matrix(w, self.reshape), full_matrices=False)
        root = np.sqrt(s[: self.rank])
        return p[:, : self.rank] * root, qt[: self.rank].T * root


class HadamardMatrix:
    """X1, X2 (m, R), Y1, Y2 (n, R)."""

    def __init__(self, rank, reshape="permuted"):
        self.rank, self.reshape = rank, reshape

    def shapes(self, shape):
        m, n = sides(shape)
        return {"X1": (m, self.rank), "Y1": (n, self.rank), "X2": (m, self.rank), "Y2": (n, self.rank)}

    def product(self, x1, y1, x2, y2, shape):
        return weight((x1 @ y1.T) * (x2 @ y2.T), shape, self.reshape)

    def back(self, g, x1, y1, x2, y2):
        g = matrix(g, self.reshape)
        g1, g2 = g * (x2 @ y2.T), g * (x1 @ y1.T)
        return g1 @ y1, g1.T @ x1, g2 @ y2, g2.T @ x2


class HadamardTensor:
    """T_j (R, R, kh, kw), O_j (R, o), I_j (R, i): W_j[o, i] = sum over a, b of T_j[a, b] O_j[a, o] I_j[b, i]."""

    def __init__(self, rank):
        self.rank = rank

    def shapes(self, shape):
        o, i, kh, kw = shape
        one = {"T": (self.rank, self.rank, kh, kw), "O": (self.rank, o), "I": (self.rank, i)}
        return {f"{name}{j}": size for j in (1, 2) for name, size in one.items()}

    @staticmethod
    def part(t, o, i):
        return np.einsum("abhw,ao,bi->oihw", t, o, i)

    @staticmethod
    def part_back(g, t, o, i):
        return (
            np.einsum("oihw,ao,bi->abhw", g, o, i),
            np.einsum("oihw,abhw,bi->ao", g, t, i),
            np.einsum("oihw,abhw,ao->bi", g, t, o),
        )

    def product(self, t1, o1, i1, t2, o2, i2, shape):
        assert (o1.shape[1], i1.shape[1], *t1.shape[2:]) == tuple(shape)
        return self.part(t1, o1, i1) * self.part(t2, o2, i2)

    def back(self, g, t1, o1, i1, t2, o2, i2):
        first, second = self.part(t1, o1, i1), self.part(t2, o2, i2)
        return *self.part_back(g * second, t1, o1, i1), *self.part_back(g * first, t2, o2, i2)
