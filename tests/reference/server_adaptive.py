"""Slow, independent servers that adapt: numpy float64, written from the papers' formulas; no code of the engine.

A server gets the list of the clients' displacements y_K - x and returns the next x; `rate` is then the global learning
rate of that step, as the paper defines it. `play` loops over rounds and clients; local training is plain steps,
SCAFFOLD's (option II) or FedProx's.

    FedAvgM                          Hsu et al. 2019, arXiv:1909.06335
    FedAdagrad, FedAdam, FedYogi     Reddi et al. 2021, arXiv:2003.00295, Algorithm 2
    FedExP, FedExPM                  Jhunjhunwala et al. 2023, arXiv:2301.09604; momentum as in their code
    FedDuAdagrad, FedDuAdam          Takakura et al. 2025, arXiv:2505.11126, Algorithm 1
"""

from typing import NamedTuple

import numpy as np

from tests.reference.trees import add, copy, mean, times, zeros


class History(NamedTuple):
    """After each round: the server's x, the model that is evaluated, SCAFFOLD's c and every client's c_i."""

    x: list
    shown: list
    c: list
    own: list


def square(x):
    return {name: value * value for name, value in x.items()}


def total(x):
    return sum(float(value.sum()) for value in x.values())


def divide(a, b):
    """Entry by entry, 0 / 0 = 0."""
    return {n: np.divide(a[n], b[n], out=np.zeros_like(a[n]), where=b[n] > 0) for n in a}


def root_plus(v, epsilon):
    return {name: np.sqrt(value) + epsilon for name, value in v.items()}


class Mean:
    def __init__(self, lr=1.0):
        self.lr = lr

    def step(self, x, deltas):
        return add(x, mean(deltas), self.lr)


class FedAvgM:
    """v <- beta v + delta; x <- x + lr v."""

    def __init__(self, lr, beta):
        self.lr, self.beta, self.v = lr, beta, None
        self.rate = lr

    def step(self, x, deltas):
        self.v = add(mean(deltas), self.v or zeros(x), self.beta)
        return add(x, self.v, self.lr)


class FedOpt:
    """m <- b1 m + (1 - b1) delta; v by kind; x <- x + lr m / (sqrt(v) + tau)."""

    def __init__(self, kind, lr, beta1, beta2, tau, v_init=None, bias_correction=False):
        self.kind, self.lr, self.b1, self.b2, self.tau = kind, lr, beta1, beta2, tau
        self.start = tau**2 if v_init is None else v_init
        self.bias_correction, self.m, self.v, self.t = bias_correction, None, None, 0
        self.rate = lr

    def step(self, x, deltas):
        delta = mean(deltas)
        if self.m is None:
            self.m = zeros(x)
            self.v = {name: np.full(np.shape(value), self.start) for name, value in x.items()}
        self.t += 1
        new = {}
        for n, d in delta.items():
            self.m[n] = self.b1 * self.m[n] + (1 - self.b1) * d
            v = self.v[n]
            if self.kind == "adagrad":
                v = v + d**2
            elif self.kind == "adam":
                v = self.b2 * v + (1 - self.b2) * d**2
            elif self.kind == "yogi":
                v = v - (1 - self.b2) * d**2 * np.sign(v - d**2)
            self.v[n] = v
            lr = self.lr
            if self.bias_correction:
                lr = lr * np.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t)
            new[n] = x[n] + lr * self.m[n] / (np.sqrt(v) + self.tau)
        return new


class FedExP:
    def __init__(self, epsilon, floor=True):
        self.epsilon, self.floor = epsilon, floor

    def step(self, x, deltas):
        delta = mean(deltas)
        lr = np.mean([total(square(d)) for d in deltas]) / (2 * (total(square(delta)) + self.epsilon))
        self.rate = max(1.0, lr) if self.floor else lr
        return add(x, delta, self.rate)


class FedExPM:
    def __init__(self, epsilon, beta):
        self.epsilon, self.beta, self.v, self.r = epsilon, beta, None, 0.0

    def step(self, x, deltas):
        self.v = add(mean(deltas), self.v or zeros(x), self.beta)
        self.r = np.mean([total(square(d)) for d in deltas]) + self.beta / 2 * self.r
        self.rate = self.r / (2 * (total(square(self.v)) + self.epsilon))
        return add(x, self.v, self.rate)


class FedDuAdagrad:
    def __init__(self, epsilon=1e-9, epsilon_g=0.0):
        self.epsilon, self.epsilon_g, self.s, self.v, self.m = epsilon, epsilon_g, None, None, 0.0

    def moments(self, delta, a):
        self.s, self.v, self.m = add(self.s, square(delta)), delta, a / 2

    def step(self, x, deltas):
        if self.s is None:
            self.s, self.v = zeros(x), zeros(x)
        self.moments(mean(deltas), np.mean([total(square(d)) for d in deltas]))
        g = root_plus(self.s, self.epsilon)
        below = total(divide(square(self.v), g))
        if below == 0:
            return x
        self.rate = self.m / (below + self.epsilon_g)
        return add(x, divide(self.v, g), self.rate)


class FedDuAdam(FedDuAdagrad):
    def __init__(self, beta1=0.9, beta2=0.99, epsilon=1e-9, epsilon_g=0.0):
        super().__init__(epsilon, epsilon_g)
        self.b1, self.b2 = beta1, beta2

    def moments(self, delta, a):
        self.s = add(times(self.s, self.b2), square(delta), 1 - self.b2)
        self.v = add(times(self.v, self.b1), delta, 1 - self.b1)
        self.m = self.b1 / 2 * self.m + (1 - self.b1) / 2 * a


def play(gradient, x0, clients, cohorts, steps, rule, server, local="plain", mu=0.0, last_two=False):
    """`server`: a new object, because it keeps its own state; `local`: plain, scaffold or prox (with mu)."""
    x, history = copy(x0), History([], [], [], [])
    own, c = [zeros(x) for _ in range(clients)], zeros(x)
    for r, cohort in enumerate(cohorts):
        deltas, changes = [], []
        for i in cohort:
            y, state, seen = copy(x), rule.start(x), []
            for k in range(steps[r, i]):
                g = gradient(i, y, r, k)
                seen.append(g)
                if local == "scaffold":
                    g = add(add(g, own[i], -1.0), c)
                elif local == "prox":
                    g = add(g, add(y, x, -1.0), mu)
                y, state = rule.step(y, g, state)
            deltas.append(add(y, x, -1.0))
            if local == "scaffold":
                changes.append(add(mean(seen), own[i], -1.0))
                own[i] = mean(seen)
        before, x = x, server.step(x, deltas)
        history.x.append(x)
        history.shown.append(times(add(x, before), 0.5) if last_two else x)
        if local == "scaffold":
            c = add(c, mean(changes, clients))
            history.c.append(c)
            history.own.append(list(own))
    return history
