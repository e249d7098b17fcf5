"""A slow, independent FedBAT: local training of binary updates. Li et al. 2024; conventions as in `compression`.

Warm-up: the model is W + u. Then W + B(u, alpha), one alpha a layer: alpha = clip(alpha0 exp(rho theta), bounds), where
alpha0 is the mean of |u| at the switch; u and theta are trained by the same rule. The server averages W + B(u, alpha).
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tests.reference.codecs import binary, binary_back
from tests.reference.compression import shares, weighted
from tests.reference.trees import add, copy, zeros


class Binary(NamedTuple):
    """After each round: x; the change of each client of the cohort as it was sent; its alphas; the error that the
    server feeds back."""

    x: list
    sent: list
    alphas: list
    error: list


def scale(alpha0, theta, rho, bounds):
    """(alpha, its derivative by theta): the derivative is 0 where the clip holds."""
    with np.errstate(over="ignore"):
        raw = float(alpha0 * np.exp(rho * theta))
    low, high = bounds
    return min(max(raw, low), high), (rho * raw if low < raw < high else 0.0)


def mean_size(u):
    return float(np.abs(u).mean())


class Client:
    """One client's round. `p` has u, theta and the layers that are not binarised; `uniform(layer, name, shape)` gives
    numbers in [0, 1)."""

    def __init__(self, x, layers, rho, bounds, uniform):
        self.x, self.layers, self.rho, self.bounds, self.uniform = x, layers, rho, bounds, uniform
        self.p = {name: np.zeros(value.shape) if name in layers else np.array(value) for name, value in x.items()}
        self.p |= {f"{name}.theta": np.zeros(()) for name in layers}
        self.alpha0 = {}

    def switch(self, alpha0=None):
        self.alpha0 = {name: mean_size(self.p[name]) if alpha0 is None else alpha0 for name in self.layers}

    def scales(self):
        return {name: scale(self.alpha0[name], self.p[f"{name}.theta"], self.rho, self.bounds) for name in self.layers}

    def change(self, draw_name):
        """What is added to W in the binarised layers: u itself in the warm-up or without a name of a draw, else its
        binarisation."""
        if not self.alpha0 or draw_name is None:
            return {name: self.p[name] for name in self.layers}
        return {
            name: binary(self.p[name], alpha, self.uniform(name, draw_name, self.p[name].shape))
            for name, (alpha, _) in self.scales().items()
        }

    def model(self, change):
        return {name: value + change[name] if name in change else self.p[name] for name, value in self.x.items()}

    def back(self, g, change):
        out = dict(g) | {f"{name}.theta": np.zeros(()) for name in self.layers}
        if not self.alpha0:
            return out
        for name, (alpha, slope) in self.scales().items():
            out[name], by_alpha = binary_back(g[name], self.p[name], alpha, change[name])
            out[f"{name}.theta"] = np.array(by_alpha * slope)
        return out

    def train(self, oracle, count, warm, rule):
        state = rule.start(self.p)
        for k in range(count):
            if k == warm:
                self.switch()
            change = self.change(f"forward {k}")
            g = self.back(oracle(self.model(change), k), change)
            self.p, state = rule.step(self.p, g, state)


def steps_before(count, phi):
    """Steps k = 0, 1, ... with k < phi count; phi is read as the decimal it was written as."""
    return math.ceil(Fraction(phi).limit_denominator(10**6) * count)


def lowered(x, layers, uniform, bounds):
    """Q(x): B(x, mean of |x|) layer by layer, alpha clipped to bounds if there are any."""
    out = copy(x)
    for name in layers:
        alpha = mean_size(x[name])
        alpha = alpha if bounds is None else min(max(alpha, bounds[0]), bounds[1])
        out[name] = binary(x[name], alpha, uniform(name, x[name].shape))
    return out


def fedbat(
    gradient,
    x0,
    clients,
    cohorts,
    steps,
    rule,
    layers,
    draw,
    phi=0.5,
    rho=6.0,
    bounds=(5e-4, 5e-2),
    warm=steps_before,
    unswitched=None,
    quantise_up=True,
    down="whole",
    down_bounds=None,
    feedback=False,
    weights=None,
    server_lr=1.0,
):
    """draw(r, i, layer, name, shape): uniform numbers in [0, 1); name is "forward k", "upload" or, for i None, "down".

    warm(K, phi): local steps before the switch. unswitched: alpha0 of the upload where the round ends before the
    switch, None for the mean of |u| then; the authors' program has 0.01. quantise_up=False sends u.
    down="binary": x <- x + Q(mean change), Q = `lowered` with down_bounds; feedback adds what Q lost to the next mean.
    """
    if down not in ("whole", "binary"):
        raise ValueError(down)
    x, path = copy(x0), Binary([], [], [], [])
    error = zeros(x)
    for r, cohort in enumerate(cohorts):
        sent, alphas = [], []
        for i in cohort:
            client = Client(x, layers, rho, bounds, lambda layer, name, shape, i=i, r=r: draw(r, i, layer, name, shape))
            client.train(lambda y, k, i=i, r=r: gradient(i, y, r, k), steps[r, i], warm(steps[r, i], phi), rule)
            if not client.alpha0:
                client.switch(unswitched)
            change = client.change("upload" if quantise_up else None)
            sent.append(add(client.model(change), x, -1.0))
            alphas.append({name: alpha for name, (alpha, _) in client.scales().items()})
        mean = add(zeros(x), weighted(sent, shares(weights, r, cohort)), server_lr)
        if down == "binary":
            wanted = add(mean, error)
            mean = lowered(wanted, layers, lambda layer, shape, r=r: draw(r, None, layer, "down", shape), down_bounds)
            error = add(wanted, mean, -1.0) if feedback else error
        x = add(x, mean)
        path.x.append(x)
        path.sent.append(sent)
        path.alphas.append(alphas)
        path.error.append(error)
    return path
