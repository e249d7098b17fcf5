"""Local steps in numpy: `start(x)` returns the first state, a dict of trees; `step(y, d, state)` moves y against the
direction d."""

import numpy as np

from tests.reference.newton_schulz import orthogonalise, scale
from tests.reference.trees import add, norm, times, zeros


class Sgd:
    def __init__(self, lr, weight_decay=0.0):
        self.lr, self.weight_decay = lr, weight_decay

    def start(self, x):
        return {}

    def step(self, y, d, state):
        y = times(y, 1 - self.lr * self.weight_decay)
        return add(y, d, -self.lr), {}


class Normalised:
    """A step of length lr in the direction of d, with the whole model as one vector; d = 0 makes no step."""

    def __init__(self, lr):
        self.lr = lr

    def start(self, x):
        return {}

    def step(self, y, d, state):
        size = norm(d)
        return (y if size == 0 else add(y, d, -self.lr / size)), {}


class Clip:
    """A step lr d, where d is clipped to the norm `limit`."""

    def __init__(self, lr, limit):
        self.lr, self.limit = lr, limit

    def start(self, x):
        return {}

    def step(self, y, d, state):
        size = norm(d)
        return add(y, d, -self.lr * (1.0 if size <= self.limit else self.limit / size)), {}


class Momentum:
    """u <- mu u + d, u zero at first; y <- y - lr u, or with Nesterov y - lr (d + mu u)."""

    def __init__(self, lr, mu, nesterov=False, weight_decay=0.0):
        self.lr, self.mu, self.nesterov, self.weight_decay = lr, mu, nesterov, weight_decay

    def start(self, x):
        return {"u": zeros(x)}

    def step(self, y, d, state):
        u = add(d, state["u"], self.mu)
        way = add(d, u, self.mu) if self.nesterov else u
        y = times(y, 1 - self.lr * self.weight_decay)
        return add(y, way, -self.lr), {"u": u}


class EmaMomentum:
    """m <- mu m + (1 - mu) d; y <- y - lr m, or with Nesterov y - lr ((1 - mu) d + mu m)."""

    def __init__(self, lr, mu, nesterov=True):
        self.lr, self.mu, self.nesterov = lr, mu, nesterov

    def start(self, x):
        return {"m": zeros(x)}

    def step(self, y, d, state):
        m = add(times(state["m"], self.mu), d, 1 - self.mu)
        way = add(times(d, 1 - self.mu), m, self.mu) if self.nesterov else m
        return add(y, way, -self.lr), {"m": m}


class Adam:
    """Adam with bias correction, the counter 1 in the first step; `weight_decay` decoupled (AdamW)."""

    def __init__(self, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay

    def start(self, x):
        return {"m": zeros(x), "v": zeros(x), "t": {"t": np.zeros(())}}

    def step(self, y, d, state):
        t = state["t"]["t"] + 1
        m, v, new = {}, {}, {}
        for name in y:
            m[name] = self.beta1 * state["m"][name] + (1 - self.beta1) * d[name]
            v[name] = self.beta2 * state["v"][name] + (1 - self.beta2) * d[name] ** 2
            m_hat = m[name] / (1 - self.beta1**t)
            v_hat = v[name] / (1 - self.beta2**t)
            decayed = y[name] * (1 - self.lr * self.weight_decay)
            new[name] = decayed - self.lr * m_hat / (np.sqrt(v_hat) + self.eps)
        return new, {"m": m, "v": v, "t": {"t": t}}


class Lmo:
    """A step against the unit ball's most aligned element: y <- y - lr s orth(d), without any state.

    spectral: every tensor of two or more axes as a matrix rows x rest, by `scheme`, times the layer's scale; scalars
    and vectors by plain steps of `vectors`. euclidean: d / |d|, all of the model as one vector. max: signs.
    """

    def __init__(self, ball, lr, vectors=None, scheme="svd", iterations=5, scaling="none", **norms):
        self.ball, self.lr, self.vectors, self.scheme = ball, lr, vectors, scheme
        self.iterations, self.scaling, self.norms = iterations, scaling, norms

    def start(self, x):
        return {}

    def matrix(self, d):
        flat = d.reshape(d.shape[0], -1)
        o = orthogonalise(flat, self.scheme, self.iterations, **self.norms)
        return (scale(self.scaling, *flat.shape) * o).reshape(d.shape)

    def step(self, y, d, state):
        if self.ball == "euclidean":
            return Normalised(self.lr).step(y, d, state)
        new = {}
        for name in y:
            if self.ball == "max":
                new[name] = y[name] - self.lr * np.sign(d[name])
            elif d[name].ndim >= 2:
                new[name] = y[name] - self.lr * self.matrix(d[name])
            else:
                new[name] = y[name] - self.vectors * d[name]
        return new, {}


class Muon:
    """m <- mu m + (1 - mu) d; o = m, or with Nesterov (1 - mu) d + mu m; W <- W (1 - lr decay) - lr s orth(o).

    `vectors` is the rule of the scalars and vectors.
    """

    def __init__(self, lr, mu, vectors, nesterov=True, weight_decay=0.0, **ball):
        self.lr, self.mu, self.vectors, self.nesterov, self.weight_decay = lr, mu, vectors, nesterov, weight_decay
        self.lmo = Lmo("spectral", lr, **ball)

    def start(self, x):
        matrices, vectors = self.split(x)
        return {"m": zeros(matrices), **{f"vectors.{key}": v for key, v in self.vectors.start(vectors).items()}}

    @staticmethod
    def split(x):
        return ({n: v for n, v in x.items() if v.ndim >= 2}, {n: v for n, v in x.items() if v.ndim < 2})

    def step(self, y, d, state):
        matrices, vectors = self.split(y)
        m, new = {}, {}
        for name in matrices:
            m[name] = self.mu * state["m"][name] + (1 - self.mu) * d[name]
            o = (1 - self.mu) * d[name] + self.mu * m[name] if self.nesterov else m[name]
            new[name] = y[name] * (1 - self.lr * self.weight_decay) - self.lr * self.lmo.matrix(o)
        rest = {key.removeprefix("vectors."): value for key, value in state.items() if key != "m"}
        moved, rest = self.vectors.step(vectors, {name: d[name] for name in vectors}, rest)
        new = {name: {**new, **moved}[name] for name in y}
        return new, {"m": m, **{f"vectors.{key}": value for key, value in rest.items()}}
