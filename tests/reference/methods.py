"""Slow, independent federated methods: numpy float64, one client after another, one dict of arrays each.

Written from the papers' formulas; shares no code with the engine. A tree is a dict name -> array, `gradient(i, x, r,
k)` the gradient of client i at x in round r at local step k, `cohorts[r]` the clients of round r, `steps[r, i]` their
numbers of local steps. The opening pass, which asks every client for a gradient at x0, has r = -1, k = 0.

    fedavg      McMahan et al. 2017, arXiv:1602.05629
    scaffold    Karimireddy et al. 2020, arXiv:1910.06378
    local_muon  Takezawa et al. 2025, Algorithm 4
    fedmuon_bc  Takezawa et al. 2025, Algorithm 1
"""

from typing import NamedTuple

import numpy as np

from tests.reference.newton_schulz import orthogonalise, scale


class History(NamedTuple):
    """What was there after each round: the server's x and c, and what each client keeps (c_i, or m_i)."""

    x: list
    c: list
    own: list


# Trees


def copy(x):
    return {name: np.array(value, dtype=np.float64) for name, value in x.items()}


def zeros(x):
    return {name: np.zeros(np.shape(value)) for name, value in x.items()}


def norm(x):
    return np.sqrt(sum(float((value * value).sum()) for value in x.values()))


def add(x, y, factor=1.0):
    return {name: x[name] + factor * y[name] for name in x}


def times(x, factor):
    return {name: factor * value for name, value in x.items()}


def mean(trees, divisor=None):
    total = trees[0]
    for tree in trees[1:]:
        total = add(total, tree)
    return times(total, 1.0 / (len(trees) if divisor is None else divisor))


# Rules of a local step: `start(x)` is the state, a dict of trees; `step(y, d, state)` moves y against the direction d.


class Sgd:
    def __init__(self, lr, weight_decay=0.0):
        self.lr, self.weight_decay = lr, weight_decay

    def start(self, x):
        return {}

    def step(self, y, d, state):
        y = times(y, 1 - self.lr * self.weight_decay)
        return add(y, d, -self.lr), {}


class Normalised:
    """Length lr in the direction of d, all of the model as one vector; zero stays."""

    def __init__(self, lr):
        self.lr = lr

    def start(self, x):
        return {}

    def step(self, y, d, state):
        size = norm(d)
        return (y if size == 0 else add(y, d, -self.lr / size)), {}


class Clip:
    """lr d, but d no longer than `limit`."""

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


# Methods


def server_step(x, deltas, clients, over, server_lr):
    """over="cohort": x + server_lr (1/S) sum of the deltas; over="all": 1/N in place of 1/S."""
    divisor = {"cohort": len(deltas), "all": clients}[over]
    return add(x, mean(deltas, divisor), server_lr)


def opening(gradient, x, clients, start):
    """What every client keeps at first: zeros, or its gradient at x0."""
    return [copy(gradient(i, copy(x), -1, 0)) if start == "gradient" else zeros(x) for i in range(clients)]


def fedavg(gradient, x0, clients, cohorts, steps, rule, server_lr=1.0, over="cohort", carry="reset"):
    """carry: the rule's state after a round is dropped, kept by the client, or averaged over the cohort for all."""
    x, history = copy(x0), History([], [], [])
    kept = [rule.start(x) for _ in range(clients)]
    shared = rule.start(x)
    for r, cohort in enumerate(cohorts):
        deltas, states = [], []
        for i in cohort:
            y = copy(x)
            state = {"reset": rule.start(x), "keep": kept[i], "average": shared}[carry]
            for k in range(steps[r, i]):
                y, state = rule.step(y, gradient(i, y, r, k), state)
            deltas.append(add(y, x, -1.0))
            states.append(state)
            kept[i] = state
        shared = {key: mean([state[key] for state in states]) for key in shared}
        x = server_step(x, deltas, clients, over, server_lr)
        history.x.append(x)
    return history


def scaffold(
    gradient,
    x0,
    clients,
    cohorts,
    steps,
    rule,
    server_lr=1.0,
    over="cohort",
    control="mean",
    start="zeros",
):
    """y <- rule(g - c_i + c); c_i <- mean (or last) of the raw gradients; c <- c + (1/N) sum of the changes."""
    x, history = copy(x0), History([], [], [])
    own = opening(gradient, x, clients, start)
    c = mean(own)
    for r, cohort in enumerate(cohorts):
        deltas, changes = [], []
        for i in cohort:
            y, state, seen = copy(x), rule.start(x), []
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                seen.append(g)
                y, state = rule.step(y, add(add(g, own[i], -1.0), c), state)
            new = mean(seen) if control == "mean" else seen[-1]
            deltas.append(add(y, x, -1.0))
            changes.append(add(new, own[i], -1.0))
            own[i] = new
        x = server_step(x, deltas, clients, over, server_lr)
        c = add(c, mean(changes, clients))
        history.x.append(x)
        history.c.append(c)
        history.own.append(list(own))
    return history


def local_muon(gradient, x0, clients, cohorts, steps, rule, alpha, server_lr=1.0, over="all", start="zeros"):
    """m_i <- (1 - alpha) m_i + alpha g; y <- rule(m_i); the client keeps m_i."""
    x, history = copy(x0), History([], [], [])
    own = opening(gradient, x, clients, start)
    for r, cohort in enumerate(cohorts):
        deltas = []
        for i in cohort:
            y, state = copy(x), rule.start(x)
            for k in range(steps[r, i]):
                own[i] = add(times(own[i], 1 - alpha), gradient(i, y, r, k), alpha)
                y, state = rule.step(y, own[i], state)
            deltas.append(add(y, x, -1.0))
        x = server_step(x, deltas, clients, over, server_lr)
        history.x.append(x)
        history.own.append(list(own))
    return history


def fedmuon_bc(gradient, x0, clients, cohorts, steps, rule, alpha, server_lr=1.0, over="all", start="zeros"):
    """c_i = m_i for the round; m_i <- (1 - alpha) m_i + alpha g; y <- rule(m_i - c_i + c); c as in SCAFFOLD."""
    x, history = copy(x0), History([], [], [])
    own = opening(gradient, x, clients, start)
    c = mean(own)
    for r, cohort in enumerate(cohorts):
        deltas, changes = [], []
        for i in cohort:
            y, m, c_i, state = copy(x), own[i], own[i], rule.start(x)
            for k in range(steps[r, i]):
                m = add(times(m, 1 - alpha), gradient(i, y, r, k), alpha)
                y, state = rule.step(y, add(add(m, c_i, -1.0), c), state)
            deltas.append(add(y, x, -1.0))
            changes.append(add(m, c_i, -1.0))
            own[i] = m
        x = server_step(x, deltas, clients, over, server_lr)
        c = add(c, mean(changes, clients))
        history.x.append(x)
        history.c.append(c)
        history.own.append(list(own))
    return history
