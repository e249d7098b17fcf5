"""Slow, independent attacks of Byzantine clients: numpy float64; conventions as in `robust_rules`.

`honest`: (h, P), the rows that the attacker knows. Most attacks return the one vector, (P,), that all Byzantine clients
send; the ones that change a client's own message take and return this message. What an attack draws is an argument.

    sign_flip, gaussian, noise, label_flip, zero
    ipm                             Xie, Koyejo, Gupta 2020, inner-product manipulation
    alie                            Baruch, Baruch, Goldberg 2019, "a little is enough"
    mimic                           Karimireddy, He, Jaggi 2022
    min_max, min_sum                Shejwalkar, Houmansadr 2021
    optimal_ipm, optimal_alie       the best factor against a given defence, by a line search
    signguard_noise, half_negated   variations against SignGuard
    directed                        Fang et al. 2020
    byz_mean                        Xu et al. 2022
    backdoor                        Bagdasaryan et al. 2020
"""

import math
from statistics import NormalDist

import numpy as np

from tests.reference.robust_rules import distances, norm, norms


def centre(honest):
    return honest.mean(axis=0)


def deviation(honest):
    """Per coordinate, divisor h - 1; 0 if there is one row."""
    return honest.std(axis=0, ddof=1) if len(honest) > 1 else np.zeros(honest.shape[1])


def more_than(clients, byzantine, cohort, k):
    """The probability that a cohort drawn without replacement has more than k Byzantine clients."""
    ways = sum(
        math.comb(byzantine, b) * math.comb(clients - byzantine, cohort - b)
        for b in range(k + 1, min(byzantine, cohort) + 1)
    )
    return ways / math.comb(clients, cohort)


# ---------------------------------------------------------------- A client's own message or data


def label_flip(labels, classes):
    return classes - 1 - np.asarray(labels)


def sign_flip(own, k=1.0):
    return -k * own


def sign_flip_of_mean(honest, k=1.0):
    return -k * centre(honest)


def gaussian(normals, mean=0.0, std=0.1):
    """`normals`: (P,), standard normals of this client."""
    return mean + std * normals


def gaussian_relative(honest, normals, mean=0.0, std=0.1):
    """The deviation is `std` times the root mean square of a coordinate of the known rows."""
    return mean + std * math.sqrt(np.mean(norms(honest) ** 2) / honest.shape[1]) * normals


def noise(own, normals, std=0.5):
    return own + std * normals


def zero(own):
    return own * 0.0


# ---------------------------------------------------------------- One vector for all


def ipm(honest, eps):
    return -eps * centre(honest)


def alie(honest, z=1.5, sign=-1):
    return centre(honest) + sign * z * deviation(honest)


def z_max(rows, byzantine):
    """The largest z with which, on average, enough honest values lie beyond the attackers' value."""
    honest = rows - byzantine
    supporters = math.floor(rows / 2 + 1) - byzantine
    p = min((honest - supporters) / honest, 1 - 1 / honest)
    return max(0.0, NormalDist().inv_cdf(p)) if p > 0 else 0.0


def mimic(honest, client=0):
    return honest[client].copy()


class MimicWarmUp:
    """Mimic whose target has the largest part along a direction that is learnt in the first rounds.

    `first`: (P,), standard normals. `target(honest)` is called once in each round, with the rows of the same clients,
    and returns a position. From round `warmup` on the last target stays.
    """

    def __init__(self, first, warmup=1):
        self.first, self.warmup, self.round = first, warmup, 0

    def target(self, honest):
        self.round += 1
        t = self.round
        if t == 1:
            self.middle = centre(honest)
            z = sum(np.sum((row - self.middle) * self.first) * (row - self.middle) for row in honest)
            self.z = z / norm(z)
        elif t < self.warmup:
            self.middle = (t * self.middle + centre(honest)) / (1 + t)
            u = sum(np.sum((row - self.middle) * self.z) * (row - self.middle) for row in honest)
            self.z = (t * self.z + u / norm(u)) / (1 + t)
            self.z = self.z / norm(self.z)
        if t == 1 or t < self.warmup:
            self.last = int(np.argmax([np.sum(row * self.z) for row in honest]))
        return self.last


def direction(honest, p="std"):
    """The direction of the perturbation in `min_max` and `min_sum`."""
    if p == "std":
        return deviation(honest)
    middle = centre(honest)
    if p == "unit":
        return middle / norm(middle) if norm(middle) > 0 else middle
    return np.sign(middle)


def min_max_allows(honest, v):
    """True if no honest row is farther from v than two honest rows are from each other."""
    return max(np.sum((v - row) ** 2) for row in honest) <= distances(honest).max()


def min_sum_allows(honest, v, bound="max"):
    """True if the sum of squared distances to v is at most the largest (or least) such sum of an honest row."""
    sums = distances(honest).sum(axis=1)
    return sum(np.sum((v - row) ** 2) for row in honest) <= (sums.max() if bound == "max" else sums.min())


def largest_gamma(honest, p, allowed):
    """The largest gamma for which `allowed(mean - gamma p)` holds, by bisection to the last bit."""
    if not np.any(p):
        return 0.0
    middle, low, high = centre(honest), 0.0, 1.0
    while allowed(middle - high * p):
        low, high = high, 2 * high
    for _ in range(200):
        half = (low + high) / 2
        low, high = (half, high) if allowed(middle - half * p) else (low, half)
    return low


def gamma_min_max(honest, p):
    """The largest gamma of `min_max_allows` in closed form, by the quadratic equation of each row."""
    if not np.any(p):
        return 0.0
    middle, most = centre(honest), distances(honest).max()
    b = [np.sum(p * (middle - row)) for row in honest]
    room = [np.sum(p * p) * (most - np.sum((row - middle) ** 2)) for row in honest]
    return min(b_i + math.sqrt(b_i**2 + r) for b_i, r in zip(b, room, strict=True)) / np.sum(p * p)


def gamma_min_sum(honest, p, bound="max"):
    """The largest gamma of `min_sum_allows` in closed form."""
    if not np.any(p):
        return 0.0
    away = [norm(row - centre(honest)) for row in honest]
    return (max(away) if bound == "max" else min(away)) / norm(p)


def min_max(honest, p="std"):
    along = direction(honest, p)
    return centre(honest) - gamma_min_max(honest, along) * along


def min_sum(honest, p="std", bound="max"):
    along = direction(honest, p)
    return centre(honest) - gamma_min_sum(honest, along, bound) * along


# ---------------------------------------------------------------- Against a known defence


def search(value, evals=20, start=0.0, delta=10.0, ratio=0.8):
    """(argument, value) of the best of `evals` evaluations of value(t): steps that double while they help, then ones
    that shrink. The evaluation of `start` counts."""
    best, top, step, left = start, value(start), delta, evals - 1
    while left > 0:
        tried, left = value(best + step), left - 1
        if tried <= top:
            step *= ratio
            break
        best, top, step = best + step, tried, 2 * step
    while left > 0:
        tried, left = value(best + step), left - 1
        if tried > top:
            best, top = best + step, tried
        step *= ratio
    return best, top


def error(honest, sent, count, defence):
    """|F(honest rows and `count` copies of `sent`) - mean of the honest rows|. `defence`: rows -> vector."""
    return norm(defence(np.vstack([honest, *([sent] * count)])) - centre(honest))


def optimal_ipm(honest, count, defence, **options):
    """(vector, factor, error): -t mean for the best t found against `defence`, with `count` Byzantine rows."""
    t, far = search(lambda t: error(honest, ipm(honest, t), count, defence), **options)
    return ipm(honest, t), t, far


def optimal_alie(honest, count, defence, sign=-1, **options):
    t, far = search(lambda t: error(honest, alie(honest, t, sign), count, defence), **options)
    return alie(honest, t, sign), t, far


# ---------------------------------------------------------------- Variations


def signguard_noise(honest, magnitudes, order, match=None):
    """A vector with as many positive, negative and zero entries as the mean. `magnitudes`: (P,) uniform in [0, 1);
    entry j of the answer is entry order[j] of the signs (positive ones first, then negative) times magnitudes.
    match="norm": scaled to the median norm of the honest rows."""
    middle = centre(honest)
    signs = np.concatenate([np.ones((middle > 0).sum()), -np.ones((middle < 0).sum()), np.zeros((middle == 0).sum())])
    out = (signs * magnitudes)[list(order)]
    return out * float(np.median(norms(honest))) / norm(out) if match == "norm" else out


def half_negated_alie(honest, z=1.5, sign=-1):
    """`alie` with the deviation negated in the first half of the coordinates."""
    std, half = deviation(honest), honest.shape[1] // 2
    std[:half] = -std[:half]
    return centre(honest) + sign * z * std


def half_negated_min_max(honest):
    """`min_max` along the deviation, negated in the first half of the coordinates."""
    p, half = deviation(honest), honest.shape[1] // 2
    p[:half] = -p[:half]
    return centre(honest) - gamma_min_max(honest, p) * p


def directed(honest, uniform, b=2.0):
    """Beyond the range of the honest values, on the side away from the mean's sign. `uniform`: (P,) in [0, 1); a
    coordinate whose mean is 0 becomes 0."""
    out = np.zeros(honest.shape[1])
    for p, u in enumerate(uniform):
        middle, low, high = honest[:, p].mean(), honest[:, p].min(), honest[:, p].max()
        if middle < 0:
            a, z = (high, b * high) if high > 0 else (high, high / b)
        elif middle > 0:
            a, z = (low / b, low) if low > 0 else (b * low, low)
        else:
            continue
        out[p] = a + u * (z - a)
    return out


def byz_mean(honest, count, known=None):
    """(count, P): floor(count / 2) rows e = mean - 0.5 deviation of the `known` rows (None: the honest ones), and
    others, all alike, with which the mean of all rows, honest ones included, is e."""
    known = honest if known is None else known
    e, first = centre(known) - 0.5 * deviation(known), count // 2
    rest = ((len(honest) + count) * e - honest.sum(axis=0) - first * e) / (count - first)
    return np.array([e] * first + [rest] * (count - first))


def trigger(images, size=5, value=1.0):
    """Images (n, channels, height, width) with a square patch at the top left."""
    out = np.array(images)
    out[..., :size, :size] = value
    return out


def backdoor_scale(own, rows, byzantine, server_lr=1.0, scale="replace", bound=math.inf):
    """The factor gamma of a Byzantine message: S / (B lr) for scale="replace", else a number; at most bound / |own|."""
    gamma = rows / (byzantine * server_lr) if scale == "replace" else scale
    return min(gamma, bound / norm(own)) if norm(own) > 0 else gamma
