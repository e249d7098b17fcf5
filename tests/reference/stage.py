"""A slow, independent stage between the clients' messages and the server's update: numpy float64, the S messages of a
round as rows of one array for each field. Written from the definitions alone; nothing here knows the engine.

A message has the fields of the contract: `delta`, `sent`, `averaged`, `norm2`, and `statistics`, the running statistics
that a model has. `sent` is averaged uniformly, all others with the client weights. `vectors` says on what a rule
decides: on each field by itself ("each"), on `delta` alone for all fields ("joint"), or on all of them as one row
("joined"). Running statistics take no part in a decision. They get the weights of `delta`, as far as these are weights
of a mean; a rule whose answer is a step instead leaves them their mean.
"""

import numpy as np

from tests.reference.robust_rules import geometric_median, krum_scores, mda, norm, norms, smallest

FIELDS = ("delta", "sent", "averaged", "norm2")


def stage(messages, w, trust, vectors="each"):
    """The message that takes the place of the mean. messages: field -> (S, P). w: (S,), the client weights. trust(x,
    w): (S,), the weights that a rule gives to the rows of x, (S, P), of clients with weights w."""
    here = [field for field in FIELDS if field in messages]
    uniform = np.ones(len(w))
    decide_on = {
        "each": lambda field: messages[field],
        "joint": lambda field: messages["delta"],
        "joined": lambda field: np.hstack([messages[each] for each in here]),
    }[vectors]
    found = {}
    for field in here:
        found[field] = trust(decide_on(field), uniform if field == "sent" else w) @ messages[field]
    if "statistics" in messages:
        found["statistics"] = mean_weights(trust(decide_on("delta"), w)) @ messages["statistics"]
    return found


def mean_weights(a):
    """Weights of a mean of the rows and of 0: none is negative, and they sum to at most one."""
    a = np.maximum(a, 0.0)
    return a / a.sum() if a.sum() > 1 else a


# ---------------------------------------------------------------- Rules as weights of rows


def mean(x, w):
    return w / w.sum()


def of_chosen(chosen, w):
    a = np.zeros(len(w))
    a[list(chosen)] = w[list(chosen)] / w[list(chosen)].sum()
    return a


def norm_clipping(c):
    return lambda x, w: w * np.array([min(1.0, c / norm(row)) if norm(row) else 1.0 for row in x]) / w.sum()


def multi_krum(f, keep):
    return lambda x, w: of_chosen(smallest(krum_scores(x, f), keep), w)


def least_diameter(f):
    """The rows of `mda`, found by its answer for rows with a unit vector behind each of them, which is too short to
    change an order of distances."""

    def trust(x, w):
        marked = np.hstack([x, 1e-7 * np.eye(len(x))])
        return of_chosen(np.flatnonzero(mda(marked, f)[x.shape[1] :] > 0), w)

    return trust


def nearest_by_distance(x, w):
    """The geometric median as weights: z = sum of a_i x_i with a_i in proportion to w_i / |x_i - z|, or a row."""
    z = geometric_median(x, w)
    away = norms(x - z)
    a = (away == 0).astype(float) if (away == 0).any() else w / away
    return a / a.sum()


def trusted(root):
    """FLTrust's weights, for what the server's own training gave: (P,)."""

    def trust(x, w):
        score = np.array([max(0.0, row @ root / (norm(row) * norm(root))) for row in x])
        return score * norm(root) / norms(x) / score.sum()

    return trust
