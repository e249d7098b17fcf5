"""Slow, independent compressors of messages and EF21-P, which is built on two of them; conventions as in `compression`.

    ef21_p  Gruntkowska, Tyurin, Richtarik 2023, arXiv:2209.15218, with local steps and partial participation

`layers` has the names of the compressed layers; everything else is sent in full. FedBAT, which learns its binary code,
is in `fedbat`.
"""

import math
from typing import NamedTuple

import numpy as np

from tests.reference.compression import shares, visit, weighted
from tests.reference.trees import add, copy, zeros

# ---------------------------------------------------------------- One vector


def rand_k(v, chosen, scaled=False):
    """v where chosen (mask or indices), 0 elsewhere; scaled by d / k it is unbiased over uniform choices."""
    chosen = np.asarray(chosen)
    if chosen.dtype != bool:
        chosen, at = np.zeros(v.shape, dtype=bool), chosen
        chosen[at] = True
    k = int(chosen.sum())
    return np.where(chosen, v, 0.0) * (v.size / k if scaled and k else 1.0)


def top_k(v, k):
    """The k entries of largest magnitude; of equal ones, the earlier."""
    order = sorted(range(v.size), key=lambda j: (-abs(v[j]), j))
    out = np.zeros(v.size)
    for j in order[:k]:
        out[j] = v[j]
    return out


def binary(u, alpha, uniform):
    """+alpha where `uniform` in [0, 1) is below clip((1 + u/alpha)/2, 0, 1), else -alpha."""
    if alpha == 0:
        return np.zeros(u.shape)
    return np.where(uniform < np.clip((1 + u / alpha) / 2, 0, 1), alpha, -alpha)


def binary_back(g, u, alpha, out):
    """The gradients in u and in alpha, if the gradient in `out` = binary(u, alpha) is g."""
    inside = np.abs(u) <= alpha
    slope = np.where(inside, np.sign(out) - u / alpha, np.sign(u))
    return np.where(inside, g, 0.0), float((g * slope).sum())


# ---------------------------------------------------------------- Bytes, by packing


def pack_values(x):
    """4 bytes for each number."""
    return b"".join(np.asarray(value, dtype="<f4").tobytes() for value in x.values())


def pack_signs(v):
    """One bit for each number, set if it is positive; the last byte is padded."""
    return np.packbits(np.ravel(v) > 0).tobytes()


def pack_indices(at, d):
    """ceil(log2 d) bits for each index, one after another."""
    bits = math.ceil(math.log2(d)) if d > 1 else 0
    return np.packbits([(int(j) >> b) & 1 for j in at for b in reversed(range(bits))]).tobytes() if bits else b""


def pack_top_k(v, k):
    """Values and indices of what `top_k` keeps; a kept entry that is zero is sent too."""
    at = sorted(sorted(range(v.size), key=lambda j: (-abs(v[j]), j))[:k])
    return v[at].astype("<f4").tobytes() + pack_indices(at, v.size)


def pack_binary(x, layers):
    """For binary layers, the bits of all of them in one row and one scale for each; for other layers, 4 bytes for each
    number."""
    scales = {name: np.abs(x[name]).max() for name in layers}
    rest = {name: value for name, value in x.items() if name not in layers}
    signs = np.concatenate([np.ravel(x[name]) for name in layers]) if layers else np.zeros(0)
    return pack_signs(signs) + pack_values(scales) + pack_values(rest)


# ---------------------------------------------------------------- EF21-P


class Lagged(NamedTuple):
    """After each round: the model evaluated, x, x^, what each client of the cohort sent, the broadcast, all h_i."""

    x: list
    exact: list
    lagged: list
    sent: list
    broadcast: list
    shifts: list


def flat(x, names):
    return np.concatenate([np.ravel(x[name]) for name in names])


def unflat(v, x, names):
    out, at = {}, 0
    for name in names:
        out[name] = v[at : at + x[name].size].reshape(x[name].shape)
        at += x[name].size
    return out


def budgets(x, layers, ratio, scope="global", of="compressed", least=0):
    """[(names of a group, its k)]: k = floor(ratio d) over all `layers` together or for each.

    of="model": d is the whole model's size, and k is reduced by what is sent in full (global only).
    """
    groups = [list(layers)] if scope == "global" else [[name] for name in layers]
    out = []
    for names in groups:
        d, spent = sum(x[name].size for name in names), 0
        if of == "model":
            spent = sum(value.size for name, value in x.items() if name not in names)
        out.append((names, min(d, max(least, math.floor(ratio * (d + spent)) - spent))))
    return out


def compressed(x, groups, compressor):
    """x with each group's long vector compressed: `compressor(group's place, vector, k)`."""
    out = copy(x)
    for place, (names, k) in enumerate(groups):
        out |= unflat(compressor(place, flat(x, names), k), x, names)
    return out


def ef21_p(
    gradient,
    x0,
    clients,
    cohorts,
    steps,
    rule,
    layers,
    ratio,
    draw,
    scope="global",
    of="compressed",
    least=0,
    scaled=False,
    shift=None,
    evaluate="lagged",
    weights=None,
    server_lr=1.0,
):
    """Clients take their steps from x^ and send Rand-k; x moves by the mean of these; x^ moves by Top-k of x - x^,
    which is broadcast.

    draw(r, i, group, "mask", (d,)): the k entries client i sends, as mask or indices; group is None (scope "global")
    or the layer; not asked for k = d. shift: DIANA's step, None sends Rand-k of the change itself.
    """
    exact, lagged, path = copy(x0), copy(x0), Lagged([], [], [], [], [], [])
    own = [zeros(exact) for _ in range(clients)]
    groups = budgets(exact, layers, ratio, scope, of, least)

    def up(r, i, place, v, k):
        if k == v.size:
            return v
        chosen = np.asarray(draw(r, i, None if scope == "global" else groups[place][0][0], "mask", v.shape))
        assert (chosen.sum() if chosen.dtype == bool else len(set(chosen.tolist()))) == k
        return rand_k(v, chosen, scaled)

    for r, cohort in enumerate(cohorts):
        h = weighted(own, [1 / clients] * clients)
        sent = []
        for i in cohort:
            y = visit(lambda x, k, i=i, r=r: gradient(i, x, r, k), lagged, steps[r, i], rule, copy, lambda p, g: g)
            message = add(add(y, lagged, -1.0), own[i], -1.0)
            sent.append(compressed(message, groups, lambda place, v, k, i=i, r=r: up(r, i, place, v, k)))
        exact = add(exact, add(h, weighted(sent, shares(weights, r, cohort))), server_lr)
        for i, message in zip(cohort, sent, strict=True):
            if shift is not None:
                own[i] = {name: h_i + shift * message[name] * (name in layers) for name, h_i in own[i].items()}
        broadcast = compressed(add(exact, lagged, -1.0), groups, lambda place, v, k: top_k(v, k))
        lagged = add(lagged, broadcast)
        path.x.append({"lagged": lagged, "exact": exact}[evaluate])
        path.exact.append(exact)
        path.lagged.append(lagged)
        path.sent.append(sent)
        path.broadcast.append(broadcast)
        path.shifts.append([copy(h_i) for h_i in own])
    return path
