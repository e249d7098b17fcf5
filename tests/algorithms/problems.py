"""Small heterogeneous problems in numpy, float64, and plans of which clients take part in which round with how many
steps."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

SHAPES = {"W": (3, 4), "V": (4, 3), "b": (3,), "U": (3, 4), "kernel": (2, 3, 2, 2)}


def unflatten(flat, shapes):
    tree, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tree[name], at = flat[at : at + size].reshape(shape), at + size
    return tree


def flatten(tree):
    return np.concatenate([np.ravel(value) for value in tree.values()])


@dataclass(frozen=True)
class Quadratic:
    """F_i(x) = (x - a_i)' H_i (x - a_i) / 2, eigenvalues of H_i in [0.2, 2]; noise drawn by (client, round, step)."""

    clients: int = 5
    noise: float = 0.3
    seed: int = 0
    small: bool = False

    @property
    def shapes(self):
        return {"W": (2, 2), "b": (2,)} if self.small else SHAPES

    @cached_property
    def size(self):
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @cached_property
    def parts(self):
        """H_i and a_i of every client."""
        rng, parts = np.random.default_rng(self.seed), []
        for _ in range(self.clients):
            q, _ = np.linalg.qr(rng.normal(size=(self.size, self.size)))
            parts.append((q @ np.diag(rng.uniform(0.2, 2.0, self.size)) @ q.T, rng.normal(size=self.size)))
        return parts

    @cached_property
    def start(self):
        return unflatten(np.random.default_rng(self.seed + 1).normal(size=self.size), self.shapes)

    @cached_property
    def optimum(self):
        """Solves sum H_i (x - a_i) = 0."""
        return np.linalg.solve(sum(h for h, _ in self.parts), sum(h @ a for h, a in self.parts))

    def gradient(self, i, x, r, k):
        h, a = self.parts[i]
        if not self.noise:
            return unflatten(h @ (flatten(x) - a), self.shapes)
        noise = np.random.default_rng((self.seed, i, r + 1, k)).normal(size=self.size)
        return unflatten(h @ (flatten(x) - a) + self.noise * noise, self.shapes)

    def loss(self, i, x):
        h, a = self.parts[i]
        return float((flatten(x) - a) @ h @ (flatten(x) - a) / 2)


@dataclass(frozen=True)
class Logistic:
    """Softmax regression with 3 classes and 4 features. Each client has 12 examples, of classes of its own, in batches
    of 4."""

    clients: int = 5
    seed: int = 3

    @cached_property
    def data(self):
        rng, data = np.random.default_rng(self.seed), []
        for i in range(self.clients):
            labels = rng.choice(3, 12, p=np.roll([0.7, 0.2, 0.1], i))
            data.append((rng.normal(size=(12, 4)) + labels[:, None], labels))
        return data

    @cached_property
    def start(self):
        return {"W": np.random.default_rng(self.seed).normal(size=(3, 4)), "b": np.zeros(3)}

    def gradient(self, i, x, r, k):
        features, labels = self.data[i]
        batch = np.random.default_rng((self.seed, i, r + 1, k)).choice(12, 4, replace=False)
        features, labels = features[batch], labels[batch]
        scores = features @ x["W"].T + x["b"]
        wrong = np.exp(scores - scores.max(1, keepdims=True))
        wrong = wrong / wrong.sum(1, keepdims=True) - np.eye(3)[labels]
        return {"W": wrong.T @ features / 4, "b": wrong.mean(0)}


@dataclass(frozen=True)
class Regression:
    """F_i = mean of (prediction - target)^2 / 2 over all rows of client i, of a linear layer of two features.

    rows: of each client, [feature, feature, target]; at: the starting model, [weight, weight, bias]."""

    rows: list[list[list[float]]]
    at: list[float]

    @property
    def clients(self):
        return len(self.rows)

    @property
    def start(self):
        return {"out.weight": np.array([self.at[:2]]), "out.bias": np.array(self.at[2:])}

    def wrong(self, i, x):
        """(features (n, 2) of client i, prediction - target (n,))."""
        *features, target = np.array(self.rows[i], dtype=np.float64).T
        features = np.stack(features, 1)
        return features, features @ x["out.weight"][0] + x["out.bias"][0] - target

    def loss(self, i, x):
        return float((self.wrong(i, x)[1] ** 2).mean() / 2)

    def gradient(self, i, x, r, k):
        features, wrong = self.wrong(i, x)
        return {"out.weight": wrong[None] @ features / len(wrong), "out.bias": wrong.mean(keepdims=True)}


@dataclass(frozen=True)
class Line:
    """A problem in one dimension with two clients: F_i(x) = h_i (x - a_i)^2 / 2, starting at x = at."""

    h: tuple[float, float]
    a: tuple[float, float]
    at: float
    clients: int = 2

    @property
    def start(self):
        return {"x": np.array([self.at])}

    def gradient(self, i, x, r, k):
        return {"x": self.h[i] * (x["x"] - self.a[i])}


def partial(clients=5, sampled=3, rounds=6, seed=2):
    """(cohorts in random order, unequal numbers of local steps from 1 to 4)."""
    rng = np.random.default_rng(seed)
    cohorts = [[int(i) for i in rng.permutation(clients)[:sampled]] for _ in range(rounds)]
    return cohorts, {(r, i): int(rng.integers(1, 5)) for r in range(rounds) for i in range(clients)}


def everyone(clients, rounds, steps):
    """(cohorts with all clients, numbers of local steps). `steps`: one number, or one number for each client."""
    per_client = [steps] * clients if isinstance(steps, int) else steps
    return [list(range(clients))] * rounds, {(r, i): per_client[i] for r in range(rounds) for i in range(clients)}
