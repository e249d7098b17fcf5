"""Slow, independent client-level differential privacy: numpy float64, from the definitions; nothing here knows the
engine or an accounting library.

`c`: the clipping bound C. `z`: the noise multiplier. `t`: a round, from 1. `b`: the rounds from one turn of a client to
its next. A noise mechanism is a matrix: row t - 1 has the coefficients of round t's noise on independent standard
normals, so that covariances, variances and sensitivities follow by plain linear algebra.

    clipped, clipped_by_shares                  a message, {group: vector}
    quantile, count_and_model_noise             Andrew et al. 2021
    tree                                        Kairouz et al. 2021; Honaker 2015
    banded                                      Choquette-Choo et al. 2023
    banded_inverse                              arXiv:2505.12128
    participations, sensitivity                 by brute force over clients' rounds
    gaussian_delta, poisson_rdp                 closed forms
"""

import itertools
import math

import numpy as np
from scipy.special import ndtr

# ---------------------------------------------------------------- Clipping


def clipped(message, c, scales=None):
    """(message of joint norm at most c, its norm before): all groups shrink by one factor. `scales`: what each group is
    multiplied by in the norm. A message that is not finite, or larger than 2^100 c, becomes zeros."""
    scales = scales or {}
    size = math.sqrt(sum(scales.get(name, 1.0) ** 2 * float(np.sum(v**2)) for name, v in message.items()))
    if not size <= 2.0**100 * c:
        return {name: np.zeros_like(v) for name, v in message.items()}, size
    factor = 1.0 if size <= c else c / size
    return {name: factor * v for name, v in message.items()}, size


def clipped_by_shares(message, c, shares):
    """Every group by itself to c w / |shares|."""
    whole = math.sqrt(sum(w**2 for w in shares.values()))
    return {name: clipped({name: v}, c * shares[name] / whole)[0][name] for name, v in message.items()}


def quantile(norms, c, count_noise, normal, target=0.5, lr=0.2, cohort=None):
    """(next c, noisy share of clients with norm <= c). `normal`: one standard normal draw; `cohort`: the divisor."""
    cohort = len(norms) if cohort is None else cohort
    bits = sum((1.0 if np.isfinite(n) and n <= c else 0.0) - 0.5 for n in norms)
    below = (bits + count_noise * normal) / cohort + 0.5
    return c * math.exp(-lr * (below - target)), below


def model_noise(z, count_noise):
    """z of the model's sum, so that with the noisy count the whole has the privacy of z."""
    return (z**-2 - (2 * count_noise) ** -2) ** -0.5


# ---------------------------------------------------------------- Matrices of noise


def nodes(rounds):
    """The nodes (h, j) of the binary tree over rounds 1 ... that end within `rounds`."""
    return [(h, j) for h in range(rounds.bit_length()) for j in range(rounds >> h)]


def set_bits(t):
    return [h for h in range(t.bit_length()) if t >> h & 1]


def tree(rounds, honaker):
    """(R, number of nodes): the coefficients of the rounds' noises on the nodes' draws."""
    places = {node: i for i, node in enumerate(nodes(rounds))}

    def estimate(h, j):
        """V(h, j): the node's own draw and half of those of both halves."""
        row = np.zeros(len(places))
        row[places[h, j]] = 1.0
        if honaker and h:
            row += (estimate(h - 1, 2 * j) + estimate(h - 1, 2 * j + 1)) / 2
        return row

    sums = np.zeros((rounds + 1, len(places)))
    for t in range(1, rounds + 1):
        for h in set_bits(t):
            sums[t] += estimate(h, (t >> h) - 1) / ((2 - 2.0**-h) if honaker else 1.0)
    return np.diff(sums, axis=0)


def tree_encoder(rounds):
    """(number of nodes, R): which rounds each node of the tree covers."""
    found = nodes(rounds)
    out = np.zeros((len(found), rounds))
    for i, (h, j) in enumerate(found):
        out[i, j << h : (j + 1) << h] = 1.0
    return out


def root_coefficients(count):
    """The first coefficients of (1 - x)^(-1/2), by their definition as binomials."""
    return np.array([math.comb(2 * j, j) / 4.0**j for j in range(count)])


def toeplitz(coefficients, rounds):
    """(R, R), lower triangular."""
    return np.array(
        [[coefficients[i - j] if 0 <= i - j < len(coefficients) else 0.0 for j in range(rounds)] for i in range(rounds)]
    )


def banded(rounds, bands, coefficients=None):
    """(noise matrix, encoder), both (R, R): C^-1 and C, of which C has `bands` bands and columns of norm 1."""
    c = root_coefficients(bands) if coefficients is None else np.asarray(coefficients)
    encoder = toeplitz(c / np.linalg.norm(c), rounds)
    return np.linalg.inv(encoder), encoder


def banded_inverse(rounds, bands):
    """(noise matrix, encoder): the inverse square root cut to `bands` bands, and its inverse."""
    w = np.linalg.inv(toeplitz(root_coefficients(bands), bands))[:, 0]
    noise = toeplitz(w, rounds)
    return noise, np.linalg.inv(noise)


def variances_of_sums(noise):
    """(R,): the variance of the noise that the sum over all rounds so far carries."""
    return np.sum(np.cumsum(noise, axis=0) ** 2, axis=1)


# ---------------------------------------------------------------- Participation and sensitivity


def participations(rounds, b):
    """All sets of rounds, 0-based, that are at least b apart."""
    return [
        chosen
        for count in range(rounds + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(y - x >= b for x, y in itertools.pairwise(chosen))
    ]


def sensitivity(encoder, b):
    """The largest |encoder u| over clients that send vectors of norm 1 along one direction in rounds that are at least
    b apart. For an encoder without negative entries no other vectors are worse."""
    return max(np.linalg.norm(encoder[:, list(chosen)].sum(axis=1)) for chosen in participations(encoder.shape[1], b))


def cyclic_sensitivity2(encoder, b):
    """The largest squared norm over the b groups of clients, each of which takes part in every b-th round."""
    rounds = encoder.shape[1]
    return max(float(np.sum(encoder[:, g:rounds:b].sum(axis=1) ** 2)) for g in range(min(b, rounds)))


# ---------------------------------------------------------------- Privacy in closed form


def gaussian_delta(epsilon, z):
    """delta of one Gaussian release with multiplier z (Balle, Wang 2018)."""
    return ndtr(0.5 / z - epsilon * z) - math.exp(epsilon) * ndtr(-0.5 / z - epsilon * z)


def gaussian_epsilon(delta, z):
    """The inverse, by bisection."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, z) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, z) > delta else (low, middle)
    return high


def poisson_rdp(q, z, order):
    """Renyi divergence of one Poisson-sampled Gaussian release at an integer order (Mironov, Talwar, Zhang 2019)."""
    terms = [
        math.log(math.comb(order, k)) + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * z * z)
        for k in range(order + 1)
    ]
    top = max(terms)
    return (top + math.log(sum(math.exp(term - top) for term in terms))) / (order - 1)


def rdp_epsilon(orders, divergences, delta):
    """The least epsilon over orders (Canonne, Kamath, Steinke 2020)."""
    return min(
        rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, rho in zip(orders, divergences, strict=True)
    )
