"""DiLoCo, MuLoCo, FedMuon with momentum averaging, SCAFFOLD's option I: numpy float64, client after client.

diloco      Douillard et al. 2023, arXiv:2311.08105: inner state kept by the client, Nesterov outside
muloco      Therien et al. 2025, arXiv:2505.23725: the same with `MuonAdamW` inside
fedmuon_ma  Zhang, Gao 2025, arXiv:2510.03866, Algorithm 1: move along the momentum, then estimate; both are averaged
option_one  Karimireddy et al. 2020, Algorithm 1, option I, on the round's own batches
"""

from fnmatch import fnmatch

from tests.reference.methods import History
from tests.reference.trees import add, copy, mean, times, zeros


class MuonAdamW:
    """Hidden matrices by `hidden`, everything else by `rest`: scalars, vectors, names that match a pattern."""

    def __init__(self, hidden, rest, aux=()):
        self.hidden, self.rest, self.aux = hidden, rest, aux

    def is_hidden(self, name, value):
        return value.ndim >= 2 and not any(fnmatch(name, pattern) for pattern in self.aux)

    def split(self, x, y):
        """The entries of y whose leaf in x is hidden, and the others."""
        names = [name for name in x if self.is_hidden(name, x[name])]
        return {n: y[n] for n in names}, {n: y[n] for n in y if n not in names}

    def start(self, x):
        hidden, rest = self.split(x, x)
        states = {"hidden": self.hidden.start(hidden), "rest": self.rest.start(rest)}
        return {f"{part}.{key}": value for part, state in states.items() for key, value in state.items()}

    def step(self, y, d, state):
        moved, states = {}, {}
        points, slopes = self.split(y, y), self.split(y, d)
        for part, rule, point, slope in zip(("hidden", "rest"), (self.hidden, self.rest), points, slopes, strict=True):
            own = {k.partition(".")[2]: v for k, v in state.items() if k.startswith(part + ".")}
            new, own = rule.step(point, slope, own)
            moved.update(new)
            states.update({f"{part}.{key}": value for key, value in own.items()})
        return {name: moved[name] for name in y}, states


def diloco(gradient, x0, clients, cohorts, steps, rule, outer_lr, outer_mu, carry="keep"):
    """D = x - mean y; b <- mu b + D; x <- x - lr (D + mu b)."""
    x, history = copy(x0), History([], [], [])
    kept, b = [rule.start(x) for _ in range(clients)], zeros(x)
    for r, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            y, state = copy(x), kept[i] if carry == "keep" else rule.start(x)
            for k in range(steps[r, i]):
                y, state = rule.step(y, gradient(i, y, r, k), state)
            kept[i] = state
            ends.append(y)
        d = add(x, mean(ends), -1.0)
        b = add(d, b, outer_mu)
        x = add(x, add(d, b, outer_mu), -outer_lr)
        history.x.append(x)
    return history


def fedmuon_ma(gradient, x0, clients, cohorts, steps, rule, beta, start="batch"):
    """A step: y <- rule(y, m); m <- (1 - beta) m + beta g(y).

    start: "batch", m_i is the gradient at x0 on the first batch of the first round, a step that does not move;
    "gradient", m is the mean over all clients of the gradients of an opening pass (r = -1); "zeros".
    """
    x, m, history = copy(x0), zeros(x0), History([], [], [])
    if start == "gradient":
        m = mean([gradient(i, copy(x), -1, 0) for i in range(clients)])
    for r, cohort in enumerate(cohorts):
        ends, momenta = [], []
        for i in cohort:
            y, m_i, state, first = copy(x), m, rule.start(x), 0
            if r == 0 and start == "batch":
                m_i, first = gradient(i, y, r, 0), 1
            for k in range(first, steps[r, i]):
                y, state = rule.step(y, m_i, state)
                m_i = add(times(m_i, 1 - beta), gradient(i, y, r, k), beta)
            ends.append(y)
            momenta.append(m_i)
        x, m = mean(ends), mean(momenta)
        history.x.append(x)
        history.c.append(m)
    return history


def option_one(gradient, x0, clients, cohorts, steps, rule, server_lr=1.0):
    """SCAFFOLD with c_i <- mean over the round's batches of the gradient at the server's model."""
    x, history = copy(x0), History([], [], [])
    own, c = [zeros(x) for _ in range(clients)], zeros(x)
    for r, cohort in enumerate(cohorts):
        deltas, changes = [], []
        for i in cohort:
            y, state = copy(x), rule.start(x)
            for k in range(steps[r, i]):
                y, state = rule.step(y, add(add(gradient(i, y, r, k), own[i], -1.0), c), state)
            new = mean([gradient(i, x, r, k) for k in range(steps[r, i])])
            deltas.append(add(y, x, -1.0))
            changes.append(add(new, own[i], -1.0))
            own[i] = new
        x = add(x, mean(deltas), server_lr)
        c = add(c, mean(changes, clients))
        history.x.append(x)
        history.c.append(c)
        history.own.append(list(own))
    return history
