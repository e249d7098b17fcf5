"""Block-wise Kronecker products: q blocks U_b (x) V_b of z^2 x z^2, U_b and V_b of z x z. Li et al. 2025, section 3.2.

layout="stacked" (the authors' program): the blocks, flattened one after another; the first m n entries are the matrix.
layout="grid" (their paper): the blocks on a k x k grid, q = k^2; the first m n entries of the k z^2 x k z^2 matrix.
"""

import math

import numpy as np

from tests.reference.lowrank import matrix, sides, weight


def kron_back(g, u, v):
    """Gradients of u and v (z, z) where that of np.kron(u, v) is g (z^2, z^2)."""
    z = len(u)
    gu, gv = np.zeros((z, z)), np.zeros((z, z))
    for i in range(z):
        for j in range(z):
            piece = g[i * z : (i + 1) * z, j * z : (j + 1) * z]
            gu[i, j] = (piece * v).sum()
            gv += u[i, j] * piece
    return gu, gv


class Blocks:
    """U, V (q, z, z)."""

    def __init__(self, q, z, layout="stacked", reshape="raw"):
        self.q, self.z, self.layout, self.reshape = q, z, layout, reshape
        if layout not in ("stacked", "grid"):
            raise ValueError(layout)
        if layout == "grid" and math.isqrt(q) ** 2 != q:
            raise ValueError(f"a grid needs a square number of blocks, got {q}")

    def shapes(self, shape):
        m, n = sides(shape)
        if self.q * self.z**4 < m * n:
            raise ValueError(f"{self.q} blocks of {self.z}^4 entries do not fill {m} x {n}")
        return {"U": (self.q, self.z, self.z), "V": (self.q, self.z, self.z)}

    def flat(self, blocks):
        """(q, z^2, z^2) in the order of the long vector."""
        if self.layout == "stacked":
            return blocks.reshape(-1)
        k = math.isqrt(self.q)
        return np.block([[blocks[a * k + b] for b in range(k)] for a in range(k)]).reshape(-1)

    def unflat(self, flat):
        side = self.z**2
        if self.layout == "stacked":
            return flat.reshape(self.q, side, side)
        k = math.isqrt(self.q)
        whole = flat.reshape(k * side, k * side)
        return np.stack(
            [whole[a * side : (a + 1) * side, b * side : (b + 1) * side] for a in range(k) for b in range(k)]
        )

    def product(self, u, v, shape):
        m, n = sides(shape)
        blocks = np.stack([np.kron(u[b], v[b]) for b in range(self.q)])
        return weight(self.flat(blocks)[: m * n].reshape(m, n), shape, self.reshape)

    def back(self, g, u, v):
        g = matrix(g, self.reshape).reshape(-1)
        padded = np.concatenate([g, np.zeros(self.q * self.z**4 - g.size)])
        pairs = [kron_back(block, u[b], v[b]) for b, block in enumerate(self.unflat(padded))]
        return np.stack([gu for gu, _ in pairs]), np.stack([gv for _, gv in pairs])
