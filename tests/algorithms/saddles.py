"""A small heterogeneous minimax problem in numpy, float64, strongly convex in x and strongly concave in y."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.algorithms.problems import flatten, unflatten

SHAPES = {
    "primal.W": (3, 4),
    "primal.b": (3,),
    "primal.s": (),
    "dual.Y": (2, 3),
    "dual.w": (),
}


def spectrum(rng, size, low, high):
    """A symmetric matrix with eigenvalues in [low, high]."""
    q, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return q @ np.diag(rng.uniform(low, high, size)) @ q.T


@dataclass(frozen=True)
class Saddle:
    """f_i = (x-a_i)' H_i (x-a_i) / 2 + x' B_i y - (y-c_i)' G_i (y-c_i) / 2, eigenvalues of H_i, G_i in [0.5, 2].

    Noise is drawn by (client, round, step). `alike`: every client has the data and the noise of client 0.
    """

    clients: int = 5
    noise: float = 0.3
    seed: int = 0
    alike: bool = False
    shapes: tuple = tuple(SHAPES.items())

    @cached_property
    def sizes(self):
        """(dimension of x, dimension of y)."""
        count = {n: int(np.prod(shape)) for n, shape in self.shapes}
        dual = sum(size for n, size in count.items() if n.startswith("dual."))
        return sum(count.values()) - dual, dual

    @cached_property
    def parts(self):
        """M_i and m_i of every client, with which (g_x, g_y) = M_i z - m_i."""
        rng, parts, (p, d) = np.random.default_rng(self.seed), [], self.sizes
        for _ in range(self.clients):
            h, g, b = spectrum(rng, p, 0.5, 2), spectrum(rng, d, 0.5, 2), rng.normal(size=(p, d)) / (p + d) ** 0.5
            matrix = np.block([[h, b], [b.T, -g]])
            parts.append((matrix, np.concatenate([h @ rng.normal(size=p), -g @ rng.normal(size=d)])))
        return parts

    @cached_property
    def start(self):
        return unflatten(np.random.default_rng(self.seed + 1).normal(size=sum(self.sizes)), dict(self.shapes))

    @cached_property
    def saddle(self):
        """Solves sum (M_i z - m_i) = 0."""
        return np.linalg.solve(sum(matrix for matrix, _ in self.parts), sum(m for _, m in self.parts))

    def gradient(self, i, z, r, k):
        """(g_x, g_y), the gradient of f_i: x descends along g_x, and y ascends along g_y."""
        i = 0 if self.alike else i
        matrix, m = self.parts[i]
        flat = matrix @ flatten(z) - m
        if self.noise:
            flat = flat + self.noise * np.random.default_rng((self.seed, i, r + 1, k)).normal(size=flat.size)
        return unflatten(flat, dict(self.shapes))

    def descent(self, i, z, r, k):
        """(g_x, -g_y), a direction of descent for both groups."""
        return {n: -g if n.startswith("dual.") else g for n, g in self.gradient(i, z, r, k).items()}


@dataclass(frozen=True)
class Descent(Saddle):
    """The saddle with the sign of the dual's gradient reversed, as workloads have it. Gradients are multiplied by
    `factor`."""

    factor: float = 1.0

    def gradient(self, i, z, r, k):
        up = super().gradient(i, z, r, k)
        return {n: self.factor * (-g if n.startswith("dual.") else g) for n, g in up.items()}
