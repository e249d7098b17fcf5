"""Methods whose clients have models of their own, as plain loops over rounds, clients and steps on flat vectors in
numpy, float64; written from the papers' equations, shares no code with the engine.

partial      some entries stay with the clients: FedPer (arXiv:1912.00818), LG-FedAvg (arXiv:2001.01523), FedRep
             (arXiv:2102.07078), FedBABU (arXiv:2106.06042), FedBN (arXiv:2102.07623), local statistics
             (arXiv:2008.07424)
local_only   every client alone
ditto        Li, Hu, Beirami, Smith 2021, arXiv:2012.04221
pfedme       Dinh, Tran, Nguyen 2020, arXiv:2006.08848
apfl         Deng, Kamani, Mahdavi 2020, arXiv:2003.13461
per_fedavg   Fallah, Mokhtari, Ozdaglar 2020, arXiv:2002.07948
cfl          Sattler, Müller, Samek 2020, arXiv:1910.01991
tuned        a model after some steps on all rows of a client, as fine-tuning and FedBABU have it

`Task` says who takes part when, and on which rows. Each method returns (x, models of all clients at the end).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

MOMENTUM, EPS = 0.1, 1e-5


@dataclass(frozen=True)
class Network:
    """A network of one hidden layer of tanh units with softmax outputs, on a flat vector: W (H, D), b (H,) or, with
    `norm`, the scale and shift (H,) of a normalisation by the batch, then U (C, H), c (C,), and with `norm` the running
    mean and variance (H,)."""

    inputs: int
    hidden: int
    classes: int
    norm: bool = False

    @cached_property
    def places(self):
        d, h, c = self.inputs, self.hidden, self.classes
        sizes = {"W": h * d, "scale": h, "shift": h} if self.norm else {"W": h * d, "b": h}
        sizes |= {"U": c * h, "c": c}
        if self.norm:
            sizes |= {"mean": h, "var": h}
        ends = np.cumsum(list(sizes.values()))
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    def mask(self, *names):
        """Which entries are those of these parts."""
        found = np.zeros(max(place.stop for place in self.places.values()), bool)
        for name in names:
            found[self.places[name]] = True
        return found

    def parts(self, w):
        p = {name: w[place] for name, place in self.places.items()}
        return p | {"W": p["W"].reshape(self.hidden, -1), "U": p["U"].reshape(self.classes, -1)}

    def forward(self, w, inputs, train):
        """(what leaves the hidden layer, log-probabilities, normalised values, 1 / deviation)."""
        p = self.parts(w)
        a, z, inverse = inputs @ p["W"].T, None, None
        if self.norm:
            mean, var = (a.mean(0), a.var(0)) if train else (p["mean"], p["var"])
            inverse = 1 / np.sqrt(var + EPS)
            z = (a - mean) * inverse
            a = p["scale"] * z + p["shift"]
        else:
            a = a + p["b"]
        h = np.tanh(a)
        scores = h @ p["U"].T + p["c"]
        scores = scores - scores.max(1, keepdims=True)
        return h, scores - np.log(np.exp(scores).sum(1, keepdims=True)), z, inverse

    def loss(self, w, inputs, label, train=False):
        _, logs, *_ = self.forward(w, inputs, train)
        return -logs[np.arange(len(label)), label].mean()

    def gradient(self, w, inputs, label):
        """Of the mean loss in training; in the places of running statistics what they move by, old - new."""
        p, n = self.parts(w), len(label)
        h, logs, z, inverse = self.forward(w, inputs, True)
        wrong = (np.exp(logs) - np.eye(self.classes)[label]) / n
        found = {"U": wrong.T @ h, "c": wrong.sum(0)}
        d = (wrong @ p["U"]) * (1 - h * h)
        if self.norm:
            found |= {"scale": (d * z).sum(0), "shift": d.sum(0)}
            dz = d * p["scale"]
            d = inverse * (dz - dz.mean(0) - z * (dz * z).mean(0))
            a = inputs @ p["W"].T
            var = a.var(0, ddof=int(n > 1))  # of one row there is no unbiased variance
            found |= {"mean": MOMENTUM * (p["mean"] - a.mean(0)), "var": MOMENTUM * (p["var"] - var)}
        else:
            found["b"] = d.sum(0)
        found["W"] = d.T @ inputs
        return np.concatenate([np.ravel(found[name]) for name in self.places])


@dataclass(frozen=True)
class Task:
    """rows: (inputs, labels) of each client. visits: of each round, client -> the rows of the batch of each step.
    weights: of the clients in means."""

    network: Network
    x0: np.ndarray
    rows: list
    visits: list
    weights: np.ndarray

    @property
    def clients(self):
        return range(len(self.rows))

    def g(self, i, w, batch):
        inputs, label = self.rows[i]
        return self.network.gradient(w, inputs[batch], label[batch])

    def whole(self, i, w):
        return self.network.gradient(w, *self.rows[i])

    def loss(self, i, w):
        return self.network.loss(w, *self.rows[i])

    def mean(self, changes, weights=None):
        """Of client -> change, by weights."""
        weights = self.weights if weights is None else weights
        return sum(weights[i] * each for i, each in changes.items()) / sum(weights[i] for i in changes)


def partial(task, lr, personal, frozen=None, lr_personal=None, split=None, order="personal"):
    """personal, frozen: which entries. split: (a, b), the parts of a visit that move each side."""
    lr_personal = lr if lr_personal is None else lr_personal
    statistics = task.network.mask("mean", "var") if task.network.norm else np.zeros_like(personal)
    frozen = np.zeros_like(personal) if frozen is None else frozen
    shared = ~personal & ~frozen
    x, own = task.x0.copy(), {}
    for visit in task.visits:
        changes = {}
        for i, batches in visit.items():
            y = np.where(personal, own.get(i, task.x0), x)
            for k, batch in enumerate(batches):
                g = task.g(i, y, batch)
                turns = {"personal", "shared"}
                if split is not None:
                    a, b = split
                    is_first = k * (a + b) < len(batches) * (a if order == "personal" else b)
                    turns = {order if is_first else ({"personal", "shared"} - {order}).pop()}
                rate = lr * shared * ("shared" in turns) + lr_personal * personal * ("personal" in turns)
                # running statistics are no parameters: personal ones move in all steps, shared ones with their side
                rate[statistics & shared] = 1.0 * ("shared" in turns)
                rate[statistics & personal] = 1.0
                y = y - rate * g
            own[i] = y
            changes[i] = np.where(shared, y - x, 0.0)
        x = x + task.mean(changes)
    return x, [np.where(personal, own.get(i, task.x0), x) for i in task.clients]


def local_only(task, lr):
    own = {}
    for visit in task.visits:
        for i, batches in visit.items():
            y = own.get(i, task.x0)
            for batch in batches:
                y = y - lr * task.g(i, y, batch)
            own[i] = y
    return task.x0, [own.get(i, task.x0) for i in task.clients]


def ditto(task, lr, lr_personal, lam, start="current", server_lr=1.0):
    x, own = task.x0.copy(), {}
    for visit in task.visits:
        changes = {}
        for i, batches in visit.items():
            y, v = x, own.get(i, x if start == "current" else task.x0)
            for batch in batches:
                y = y - lr * task.g(i, y, batch)
                v = v - lr_personal * (task.g(i, v, batch) + lam * (v - x))
            own[i], changes[i] = v, y - x
        x = x + server_lr * task.mean(changes)
    return x, [own.get(i, x if start == "current" else task.x0) for i in task.clients]


def pfedme(task, lr, lr_personal, lam, inner_steps, beta=1.0, decay=0.0, begin="server"):
    x, own = task.x0.copy(), {}
    for visit in task.visits:
        changes = {}
        for i, batches in visit.items():
            w = theta = x
            for batch in batches:
                theta = w if begin == "server" else theta
                for _ in range(inner_steps):
                    pull = lam * (theta - w) + decay * theta
                    theta = theta - lr_personal * (task.g(i, theta, batch) + pull)
                w = w - lr * lam * (w - theta)
            own[i], changes[i] = theta, w - x
        x = x + beta * task.mean(changes)
    return x, [own.get(i, x) for i in task.clients]


def apfl(task, lr, lr_personal, alpha, update="first", lr_alpha=None, alpha_decay=0.0, start="current"):
    x, own = task.x0.copy(), {}
    for visit in task.visits:
        changes = {}
        for i, batches in visit.items():
            y = x
            v, share = own.get(i, (x if start == "current" else task.x0, alpha))
            for k, batch in enumerate(batches):
                mixed = task.g(i, share * v + (1 - share) * y, batch)
                moved = share
                if update == "every" or (update == "first" and k == 0):
                    slope = (v - y) @ mixed + alpha_decay * share
                    moved = min(1.0, max(0.0, share - (lr if lr_alpha is None else lr_alpha) * slope))
                y, v, share = y - lr * task.g(i, y, batch), v - lr_personal * share * mixed, moved
            own[i], changes[i] = (v, share), y - x
        x = x + task.mean(changes)
    fresh = (x if start == "current" else task.x0, alpha)
    return x, [share * v + (1 - share) * x for v, share in (own.get(i, fresh) for i in task.clients)]


def per_fedavg(task, lr, lr_inner, variant, delta=1e-3, server_lr=1.0):
    """The models of clients are those after one step on all of their rows."""
    x, group = task.x0.copy(), {"fo": 2, "hf": 3}[variant]
    for visit in task.visits:
        changes = {}
        for i, batches in visit.items():
            y = x
            for m in range(0, len(batches), group):
                first, second, *third = batches[m : m + group]
                o = task.g(i, y - lr_inner * task.g(i, y, first), second)
                if third:
                    apart = task.g(i, y + delta * o, third[0]) - task.g(i, y - delta * o, third[0])
                    o = o - lr_inner * apart / (2 * delta)
                y = y - lr * o
            changes[i] = y - x
        x = x + server_lr * task.mean(changes)
    return x, [tuned(task, i, x, 1, lr_inner) for i in task.clients]


def tuned(task, i, begin, steps, lr, prox=0.0, moves=True):
    """moves: which entries do; True for all."""
    z = begin
    for _ in range(steps):
        z = z - lr * moves * (task.whole(i, z) + prox * (z - begin))
    return z


def bipartition(changes, linkage):
    """Two lists of clients. changes: client -> its update. Of all pairs of parts those are joined whose closest
    (single) or farthest (complete) members have the largest cosine; of equal ones the first."""

    def cosine(i, j):
        lengths = np.sqrt(changes[i] @ changes[i]) * np.sqrt(changes[j] @ changes[j])
        return changes[i] @ changes[j] / lengths if lengths else 0.0

    parts = [[i] for i in sorted(changes)]
    while len(parts) > 2:
        best = None
        for a in range(len(parts)):
            for b in range(a + 1, len(parts)):
                cosines = [cosine(i, j) for i in parts[a] for j in parts[b]]
                found = max(cosines) if linkage == "single" else min(cosines)
                if best is None or found > best[0]:
                    best = (found, a, b)
        _, a, b = best
        parts[a] = sorted(parts[a] + parts.pop(b))
    return parts


def cfl(task, lr, eps1, eps2, least, after, most, linkage="single"):
    """Also the clusters, lists of clients, after each round."""
    clusters, models, path = [list(task.clients)], [task.x0.copy()], []
    for number, visit in enumerate(task.visits, 1):
        taken, found = len(clusters), []
        for members, x in zip(clusters, models, strict=True):
            changes = {}
            for i in members:
                y = x.copy()
                for batch in visit[i]:
                    y = y - lr * task.g(i, y, batch)
                changes[i] = y - x
            short = np.linalg.norm(task.mean(changes)) < eps1
            long = max(np.linalg.norm(change) for change in changes.values()) > eps2
            parts = [members]
            if short and long and len(members) > least and number > after and taken < most:
                parts, taken = bipartition(changes, linkage), taken + 1
            found += [(part, x + task.mean({i: changes[i] for i in part})) for part in parts]
        clusters, models = [part for part, _ in found], [x for _, x in found]
        path.append(clusters)
    own = {i: x for part, x in found for i in part}
    return models[0], [own[i] for i in task.clients], path
