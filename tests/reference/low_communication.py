"""Schedules, and slow, independent forms of DiLoCo with codes, streaming and eager: AdamW inside, whose state clients
keep, Nesterov outside.

`gradient(i, x)`: of client i at x; all vectors are float64 arrays. `code(v)`: what a vector decodes to; by default it
is sent as it is. `sent(v)`: the places that are sent, for a mean over those that sent a place.
"""

import math
from typing import NamedTuple

import numpy as np


def factor(name, step, total, warmup=0, floor=0.0, decay=0, milestones=(), gamma=0.1):
    """The factor of a rate in a step, from 1, of a run of `total` steps. wsd's name ends with its shape."""
    if step <= warmup:
        return step / warmup
    if name == "step":
        return gamma ** len([m for m in milestones if m < step])
    if name.startswith("wsd"):
        if step <= total - decay:
            return 1.0
        u, name = (step - (total - decay)) / decay, name.removeprefix("wsd_")
    else:
        u = (step - warmup) / (total - warmup)
    fall = {"linear": 1 - u, "cosine": (1 + math.cos(math.pi * u)) / 2, "sqrt": 1 - math.sqrt(u)}[name]
    return floor + (1 - floor) * fall


class AdamW(NamedTuple):
    lr: float
    betas: tuple = (0.9, 0.95)
    eps: float = 0.5
    decay: float = 0.1
    radius: float = 1.0

    def start(self, x):
        return np.zeros_like(x), np.zeros_like(x), 0

    def step(self, y, g, state, factor=1.0):
        """y <- y (1 - lr decay) - lr m / (sqrt(v) + eps), both corrected, on g clipped to the radius."""
        m, v, count = state
        norm = np.sqrt((g * g).sum())
        g = g if norm <= self.radius else g * (self.radius / norm)
        b1, b2 = self.betas
        m, v, count = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, count + 1
        lr = self.lr * factor
        way = (m / (1 - b1**count)) / (np.sqrt(v / (1 - b2**count)) + self.eps)
        return y * (1 - lr * self.decay) - lr * way, (m, v, count)


def diloco(
    gradient,
    start,
    clients,
    rounds,
    steps,
    rule,
    outer,
    mu,
    code=None,
    memory="none",
    decay=1.0,
    sent=None,
    factor=None,
    down=None,
):
    """[(x, the memories of all clients) after each round]. factor(step of the run, from 1): of the inner rate. down(v):
    what the server's codes of its changes decode to; x is then what clients hold."""
    x, u, total = start, np.zeros_like(start), np.zeros_like(start)
    own = x
    states = [rule.start(x) for _ in range(clients)]
    kept = [np.zeros_like(x) for _ in range(clients)]
    path = []
    for r in range(rounds):
        arrived, masks = [], []
        for i in range(clients):
            y = x
            for k in range(steps):
                of_step = 1.0 if factor is None else factor(r * steps + k + 1)
                y, states[i] = rule.step(y, gradient(i, y), states[i], of_step)
            moved = x - y
            z = {"none": moved, "error": decay * kept[i] + moved, "ef21": moved - kept[i]}[memory]
            decoded = z if code is None else code(z)
            arrived.append(decoded)
            if memory != "none":
                kept[i] = z - decoded if memory == "error" else kept[i] + decoded
            if sent is not None:
                masks.append(np.isin(np.arange(len(x)), sent(z)))
        mean = sum(arrived) / clients
        if sent is not None:
            counts = sum(mask.astype(float) for mask in masks)
            mean = np.where(counts > 0, sum(arrived) / np.where(counts > 0, counts, 1), 0.0)
        if memory == "ef21":
            total = mean = total + mean
        u = mu * u + mean
        own = own - outer * (mean + mu * u)
        x = own if down is None else x + down(own - x)
        path.append((x, [k.copy() for k in kept]))
    return path


def streaming(
    gradient, start, clients, rounds, steps, rule, outer, mu, fragments, overlap, alpha, code=None, decay=None
):
    """[(x, all y, all e) after each round]. fragments: lists of places. decay: of remembered errors, None for none."""
    x, u = start.copy(), np.zeros_like(start)
    y = [start.copy() for _ in range(clients)]
    states = [rule.start(start) for _ in range(clients)]
    kept = [np.zeros_like(start) for _ in range(clients)]
    path = []
    for r in range(rounds):
        now, before = fragments[r % len(fragments)], fragments[(r - 1) % len(fragments)]
        arrived = []
        for i in range(clients):
            for k in range(steps):
                if r > 0 and k == overlap:
                    y[i] = y[i].copy()
                    y[i][before] = alpha * y[i][before] + (1 - alpha) * x[before]
                y[i], states[i] = rule.step(y[i], gradient(i, y[i]), states[i])
            z = x[now] - y[i][now] + (0 if decay is None else decay * kept[i][now])
            arrived.append(z if code is None else code(z))
            if decay is not None:
                kept[i][now] = z - arrived[-1]
        mean = sum(arrived) / clients
        u[now] = mu * u[now] + mean
        x = x.copy()
        x[now] = x[now] - outer * (mean + mu * u[now])
        path.append((x, [each.copy() for each in y], [each.copy() for each in kept]))
    return path


def eager(gradient, start, clients, rounds, steps, rule, outer, mu, naive=False, code=None, decay=None):
    """[all x_i after each round]. decay: of the remembered error, None for none."""
    x = [start.copy() for _ in range(clients)]
    u = [np.zeros_like(start) for _ in range(clients)]
    states = [rule.start(start) for _ in range(clients)]
    kept = [np.zeros_like(start) for _ in range(clients)]
    late, own = np.zeros_like(start), [np.zeros_like(start) for _ in range(clients)]
    path = []
    for _ in range(rounds):
        sent = []
        for i in range(clients):
            y = x[i]
            for _ in range(steps):
                y, states[i] = rule.step(y, gradient(i, y), states[i])
            z = x[i] - y + (0 if decay is None else decay * kept[i])
            sent.append(z if code is None else code(z))
            kept[i] = z - sent[-1]
            moved = late if naive else sent[i] / clients + late - own[i] / clients
            u[i] = mu * u[i] + moved
            x[i] = x[i] - outer * (moved + mu * u[i])
        late, own = sum(sent) / clients, sent
        path.append([each.copy() for each in x])
    return path
