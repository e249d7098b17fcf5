"""Slow, independent robust aggregation rules: numpy float64, on messages as the rows of one (S, P) array.

Written from the definitions of the rules alone; nothing here knows the engine. Every function works on the rows
themselves: on differences and coordinates, never on Gram matrices or shards. Of equal candidates the lower row wins.
`x`: (S, P), rows in ascending client number. `f`: how many rows may be Byzantine. `weights`: (S,), the federation's
weights of the clients, where a rule has them; None means uniform. What a rule draws is an argument. The result has
shape (P,).

    mean
    median                Yin et al. 2018
    trimmed_mean          Yin et al. 2018
    meamed                Xie et al. 2018
    geometric_median      Weiszfeld with the step of Vardi, Zhang 2000; as an aggregator Pillutla et al. 2022
    krum, multi_krum      Blanchard et al. 2017
    bulyan                El Mhamdi et al. 2018
    mda                   El Mhamdi et al. 2020, minimum diameter averaging
    centred_clipping      Karimireddy et al. 2021
    norm_clipping
    caf                   Allouah, Guerraoui, Stephan 2025
    sign_vote             Bernstein et al. 2019
    fltrust               Cao et al. 2021
    dnc                   Shejwalkar, Houmansadr 2021
    signguard             Xu et al. 2022
    clipped_clustering    Li et al. 2023
"""

import itertools
import math

import numpy as np


def norm(v):
    return float(np.sqrt(np.sum(np.asarray(v, dtype=np.float64) ** 2)))


def norms(x):
    return np.array([norm(row) for row in x])


def distances(x):
    """(S, S), squared: |x_i - x_j|^2."""
    return np.array([[np.sum((a - b) ** 2) for b in x] for a in x])


def smallest(values, count):
    """Positions of the `count` smallest values; of equal values, the lower position first."""
    return sorted(range(len(values)), key=lambda i: (values[i], i))[:count]


def without_broken(x, f):
    """(rows whose squared norm is finite, f less one for each row that was left out, their number)."""
    with np.errstate(over="ignore", invalid="ignore"):
        sound = [i for i, row in enumerate(x) if np.isfinite(np.sum(row**2))]
    broken = len(x) - len(sound)
    return x[sound], max(0, f - broken), broken


# ---------------------------------------------------------------- Sums


def mean(x, weights=None):
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    return sum(w[i] * x[i] for i in range(len(x))) / w.sum()


def mean_of(x, chosen, weights=None):
    """The mean of the rows `chosen`, in ascending order, with their weights."""
    chosen = sorted(chosen)
    return mean(x[chosen], None if weights is None else np.asarray(weights)[chosen])


# ---------------------------------------------------------------- Coordinate by coordinate


def median(x):
    ordered, middle = np.sort(x, axis=0), len(x) // 2
    return ordered[middle] if len(x) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def trimmed_mean(x, f):
    """The mean of a_(f+1) ... a_(S-f) of each coordinate."""
    if not 0 <= 2 * f < len(x):
        raise ValueError("2 f < S")
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


def meamed(x, f):
    """The mean of the S - f values of each coordinate that are nearest to the median."""
    if not 0 <= 2 * f < len(x):
        raise ValueError("2 f < S")
    return mean_near_median(x, len(x) - f)


def mean_near_median(x, length):
    """The mean of the `length` values of each coordinate nearest to the median: of the windows of so many sorted values
    the one whose farthest value is nearest to the median, and the leftmost of equal ones."""
    out = np.zeros(x.shape[1])
    for p in range(x.shape[1]):
        column, middle = np.sort(x[:, p]), median(x[:, p : p + 1])[0]
        reach = [max(middle - column[j], column[j + length - 1] - middle) for j in range(len(x) - length + 1)]
        j = smallest(reach, 1)[0]
        out[p] = column[j : j + length].mean()
    return out


# ---------------------------------------------------------------- Geometric median


def distance_sum(x, z, weights=None):
    """What the geometric median minimises: the sum of alpha_i |z - x_i|, where the alphas add up to one."""
    alpha = np.ones(len(x)) / len(x) if weights is None else np.asarray(weights) / np.sum(weights)
    return float(sum(a * norm(row - z) for a, row in zip(alpha, x, strict=True)))


def geometric_median(x, weights=None, tol=1e-13, iterations=200_000):
    """The minimiser of `distance_sum`.

    A row is the minimiser if the other rows pull at it with at most its own weight; then the answer is exactly that
    row. Otherwise: Weiszfeld's steps from the mean, shortened by Vardi and Zhang's factor on a row, until the norm of
    the gradient is at most `tol`.
    """
    alpha = np.ones(len(x)) / len(x) if weights is None else np.asarray(weights, dtype=np.float64) / np.sum(weights)
    for j in range(len(x)):
        if pull(x, alpha, x[j])[0] <= pull(x, alpha, x[j])[1]:
            return x[j].copy()
    z = mean(x, alpha)
    for _ in range(iterations):
        force, own = pull(x, alpha, z)
        if max(0.0, force - own) <= tol:
            return z
        apart = [i for i in range(len(x)) if norm(x[i] - z) > 0]
        beta = {i: alpha[i] / norm(x[i] - z) for i in apart}
        target = sum(beta[i] * x[i] for i in apart) / sum(beta.values())
        z = z + max(0.0, 1 - own / force) * (target - z)
    raise ArithmeticError(f"the geometric median did not converge: {pull(x, alpha, z)}")


def pull(x, alpha, z):
    """(norm of the sum of alpha_i (x_i - z) / |x_i - z| over the rows apart from z, sum of the other rows' alphas)."""
    total, own = np.zeros(x.shape[1]), 0.0
    for a, row in zip(alpha, x, strict=True):
        apart = norm(row - z)
        if apart > 0:
            total = total + a * (row - z) / apart
        else:
            own += a
    return norm(total), own


# ---------------------------------------------------------------- Krum and its relatives


def neighbours_count(size, f, neighbours):
    """q, the number of neighbours that count in a score."""
    return max(1, size - f - {"n-f-1": 1, "n-f-2": 2}[neighbours])


def krum_scores(x, f, neighbours="n-f-1"):
    """The sum of the q smallest squared distances of each row to other rows."""
    d, q = distances(x), neighbours_count(len(x), f, neighbours)
    return np.array([sum(sorted(d[i][j] for j in range(len(x)) if j != i)[:q]) for i in range(len(x))])


def krum(x, f, neighbours="n-f-1"):
    return x[smallest(krum_scores(x, f, neighbours), 1)[0]].copy()


def multi_krum(x, f, neighbours="n-f-1", keep=None, weights=None):
    """The mean of the `keep` rows with the least scores; keep None: S - f."""
    keep = len(x) - f if keep is None else keep
    return mean_of(x, smallest(krum_scores(x, f, neighbours), keep), weights)


def bulyan_order(x, f, neighbours="n-f-2"):
    """The S - 2f rows that Krum chooses one after another, each among the rows that are left."""
    left, chosen = list(range(len(x))), []
    for _ in range(len(x) - 2 * f):
        best = left[smallest(krum_scores(x[left], f, neighbours), 1)[0]]
        left.remove(best)
        chosen.append(best)
    return chosen


def bulyan(x, f, neighbours="n-f-2"):
    """Of the chosen rows, in each coordinate, the mean of the S - 4f values nearest to their median."""
    if len(x) < 4 * f + 3:
        raise ValueError("S >= 4 f + 3")
    return mean_near_median(x[bulyan_order(x, f, neighbours)], len(x) - 4 * f)


def mda(x, f, weights=None):
    """The mean of the S - f rows of least diameter; of equal sets the lexicographically first."""
    d = distances(x)
    best, chosen = math.inf, ()
    for rows in itertools.combinations(range(len(x)), len(x) - f):
        diameter = max((d[i][j] for i, j in itertools.combinations(rows, 2)), default=0.0)
        if diameter < best:
            best, chosen = diameter, rows
    return mean_of(x, chosen, weights)


# ---------------------------------------------------------------- Clipping


def shrunk(v, bound):
    """v at a norm of at most `bound`."""
    size = norm(v)
    return v * min(1.0, bound / size) if size > 0 else v * 1.0


def centred_clipping(x, tau=None, tau_relative=1.0, iterations=1, start=None):
    """v <- v + mean of (x_i - v) clipped to norm tau, `iterations` times from `start` (None: 0), which is what the rule
    returned in the round before. tau None: tau_relative times the median of |x_i - start|."""
    v = np.zeros(x.shape[1]) if start is None else np.array(start, dtype=np.float64)
    if tau is None:
        tau = tau_relative * float(np.median(norms(x - v)))
    for _ in range(iterations):
        v = v + sum(shrunk(row - v, tau) for row in x) / len(x)
    return v


def norm_clipping(x, c=None, c_relative=1.0, weights=None):
    """The mean of rows clipped to norm c. c None: c_relative times the median of the norms."""
    bound = c_relative * float(np.median(norms(x))) if c is None else c
    return mean(np.array([shrunk(row, bound) for row in x]), weights)


# ---------------------------------------------------------------- Spectra


def caf(x, f):
    """The weighted mean, of those with more than S - 2f total weight, whose covariance has the least top eigenvalue.

    After each turn every row loses weight in proportion to its squared part along the top eigenvector."""
    if f == 0:
        return mean(x)
    c = np.ones(len(x))
    least, answer = math.inf, None
    while c.sum() > len(x) - 2 * f:
        centre = sum(c[i] * x[i] for i in range(len(x))) / c.sum()
        away = x - centre
        covariance = sum(c[i] * np.outer(away[i], away[i]) for i in range(len(x))) / c.sum()
        values, vectors = np.linalg.eigh(covariance)
        if values[-1] < least:
            least, answer = values[-1], centre
        tau = (away @ vectors[:, -1]) ** 2
        largest = max(tau[i] for i in range(len(x)) if c[i] > 0)
        if values[-1] <= 0 or largest == 0:
            break
        c = np.array([c[i] * (1 - tau[i] / largest) if c[i] > 0 else 0.0 for i in range(len(x))])
    return answer


def dnc(x, f, columns, c=1.0, weights=None):
    """The mean of the rows that are good in every iteration. `columns`: for each iteration, the coordinates drawn."""
    good = set(range(len(x)))
    for chosen in columns:
        part = x[:, list(chosen)]
        part = part - part.mean(axis=0)
        direction = np.linalg.svd(part, full_matrices=False)[2][0]
        scores = (part @ direction) ** 2
        good &= set(smallest(scores, len(x) - math.floor(c * f)))
    return mean_of(x, good, weights)


# ---------------------------------------------------------------- Signs, trust and clusters


def sign_vote(x, scale="median_norm"):
    """scale times the sign of the sum of signs; scale median_norm: the median of |x_i| over the root of P."""
    if scale == "median_norm":
        scale = float(np.median(norms(x))) / math.sqrt(x.shape[1])
    return scale * np.sign(np.sign(x).sum(axis=0))


def fltrust(x, root):
    """`root`: (P,), what the server's own training on its trusted examples gave."""
    total, trust = np.zeros(x.shape[1]), 0.0
    for row in x:
        if norm(row) == 0:
            continue
        score = max(0.0, float(np.sum(row * root)) / (norm(row) * norm(root)))
        total = total + score * norm(root) / norm(row) * row
        trust += score
    return total / trust if trust > 0 else total * 0


def signguard(x, start=0, low=0.1, high=3.0, share=0.1, weights=None):
    """The mean of rows clipped to the median norm, of those of usual norm in the largest cluster of sign statistics.

    `start`: first coordinate of the window of floor(share P) coordinates, which goes round the end of the row.
    """
    sizes, window = norms(x), math.floor(share * x.shape[1])
    middle = float(np.median(sizes))
    usual = {i for i in range(len(x)) if low * middle < sizes[i] < high * middle}
    seen = x[:, [(start + j) % x.shape[1] for j in range(window)]]
    shares = np.array([[np.mean(row > 0), np.mean(row == 0), np.mean(row < 0)] for row in seen])
    kept = usual & largest_cluster(shares / (shares.max(axis=0) + 1e-8))
    if not kept:
        return np.zeros(x.shape[1])
    return mean_of(np.array([shrunk(row, middle) for row in x]), kept, weights)


def largest_cluster(points):
    """Rows of the largest cluster by mean shift with every row as a seed."""
    size = len(points)
    apart = np.sqrt(distances(points))
    width = max(1e-12, float(np.mean([sorted(apart[i])[max(1, size // 2) - 1] for i in range(size)])))
    centres = [shifted(points, seed, width) for seed in points]
    inside = [sum(norm(row - centre) <= width for row in points) for centre in centres]
    kept = []
    for i in smallest([-count for count in inside], size):
        if all(norm(centres[i] - other) > width for other in kept):
            kept.append(centres[i])
    members = [set() for _ in kept]
    for i, row in enumerate(points):
        far = [norm(row - centre) for centre in kept]
        nearest = smallest(far, 1)[0]
        if far[nearest] <= width:
            members[nearest].add(i)
    return members[smallest([-len(rows) for rows in members], 1)[0]]


def shifted(points, centre, width):
    for _ in range(300):
        moved = np.mean([row for row in points if norm(row - centre) <= width], axis=0)
        step, centre = norm(moved - centre), moved
        if step <= 1e-3 * width:
            break
    return centre


def clipped_clustering(x, seen=(), most=1e5, weights=None):
    """(mean of the larger of two clusters of clipped rows by average cosine distance, norms seen so far)."""
    seen = [*seen, *norms(x)]
    rows = np.array([shrunk(row, min(most, float(np.median(seen)))) for row in x])
    clusters = [[i] for i in range(len(x))]
    while len(clusters) > 2:
        pairs = list(itertools.combinations(range(len(clusters)), 2))
        apart = [
            np.mean([cosine_distance(rows[i], rows[j]) for i in clusters[a] for j in clusters[b]]) for a, b in pairs
        ]
        a, b = pairs[smallest(apart, 1)[0]]
        clusters[a] = sorted(clusters[a] + clusters[b])
        del clusters[b]
    larger = max(clusters, key=lambda rows: (len(rows), -rows[0]))
    return mean_of(rows, larger, weights), seen


def cosine_distance(a, b):
    return 2.0 if norm(a) == 0 or norm(b) == 0 else 1 - float(np.sum(a * b)) / (norm(a) * norm(b))
