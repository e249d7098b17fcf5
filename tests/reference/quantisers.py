"""Slow, independent codecs of what clients have moved, on float64 arrays, number by number.

Each function returns what a vector decodes to; `u` has one uniform number for each number of the vector. `sizes` has
the bytes of the codes. Golden values of `low_communication.json` come from another program.
"""

import math

import numpy as np


def rint(x):
    """The nearest whole number; of two equally near ones the even one."""
    below = math.floor(x)
    if x - below == 0.5:
        return below if below % 2 == 0 else below + 1
    return below + (x - below > 0.5)


def clip(q, least, most):
    return max(least, min(most, q))


def in_groups(encode, v, per, u=None):
    """`encode` on groups of `per` numbers."""
    u = np.zeros(len(v)) if u is None else u
    parts = [encode(v[at : at + per], u[at : at + per]) for at in range(0, len(v), per)]
    return np.concatenate(parts)


def linear(v, bits):
    low, most = min(v), 2**bits - 1
    unit = (max(v) - low) / most or 1.0
    return np.array([low + clip(rint((x - low) / unit), 0, most) * unit for x in v])


def statistical(v, bits):
    n, bins = len(v), 2**bits
    mean = sum(v) / n
    c = [x - mean for x in v]
    deviation = math.sqrt(sum(x * x for x in c) / (n - 1)) if n > 1 else 0.0
    unit = 6 * deviation / bins or 1.0
    q = [clip(rint(x / unit + bins / 2), 0, bins - 1) for x in c]
    lookup = {}
    for j in set(q):
        members = [x for x, at in zip(c, q, strict=True) if at == j]
        lookup[j] = sum(members) / len(members)
    return np.array([lookup[at] + mean for at in q])


def absmax(v, bits):
    most = 2 ** (bits - 1) - 1
    unit = max(abs(x) for x in v) / most or 1.0
    return np.array([clip(rint(x / unit), -most, most) * unit for x in v])


def sign(v):
    size = sum(abs(x) for x in v) / len(v)
    return np.array([size if x >= 0 else -size for x in v])


def qsgd(v, bits, u):
    most, norm = 2 ** (bits - 1) - 1, math.sqrt(sum(x * x for x in v))
    out = []
    for x, draw in zip(v, u, strict=True):
        a = abs(x) * most / norm if norm else 0.0
        level = min(most, math.floor(a) + (draw < a - math.floor(a)))
        out.append(math.copysign(level * norm / most, x) if level else 0.0)
    return np.array(out)


def natural(v, u):
    out = []
    for x, draw in zip(v, u, strict=True):
        if x == 0:
            out.append(0.0)
            continue
        e = math.frexp(x)[1] - 1
        f = abs(x) / 2.0**e - 1
        out.append(math.copysign(2.0 ** (e + 1) if draw < f else 2.0**e, x))
    return np.array(out)


def e3m0(v):
    unit = max(abs(x) for x in v)
    levels = [0.0, *(2.0**e for e in range(-6, 1))]
    out = []
    for x in v:
        a = abs(x) / unit if unit else 0.0
        best = min(levels, key=lambda level: (abs(level - a), level))
        out.append(math.copysign(best * unit, x))
    return np.array(out)


def largest(v, k):
    """The places of the k largest magnitudes, of equal ones the lower, in rising order."""
    return sorted(sorted(range(len(v)), key=lambda j: (-abs(v[j]), j))[:k])


def top_k(v, ratio):
    out = np.zeros(len(v))
    for j in largest(v, max(1, math.floor(ratio * len(v)))):
        out[j] = v[j]
    return out


def sparse_places(v, size, density):
    places = []
    for at in range(0, len(v), size):
        chunk = v[at : at + size]
        places += [at + j for j in largest(chunk, max(1, math.floor(density * len(chunk) + 0.5)))]
    return places


def sparse(v, size, density, bits):
    places, out = sparse_places(v, size, density), np.zeros(len(v))
    kept = [v[j] for j in places]
    out[places] = statistical(kept, bits) if bits else kept
    return out


# ---------------------------------------------------------------- Bytes


def width(n):
    return max(1, (n - 1).bit_length())


def up(bits):
    """Whole bytes."""
    return -(-bits // 8)


def grid_bytes(n, bits, floats, per=None):
    return up(n * bits) + 4 * floats * (1 if per is None else -(-n // per))


def sizes(name, n, **settings):
    """The bytes of the code of n numbers."""
    bits, per = settings.get("bits"), settings.get("per")
    if name in ("linear", "absmax", "qsgd"):
        return grid_bytes(n, bits, 2 if name == "linear" else 1, per)
    if name == "statistical":
        return grid_bytes(n, bits, 1 + 2**bits, per)
    if name in ("sign", "e3m0"):
        return grid_bytes(n, 1 if name == "sign" else 4, 1, per)
    if name == "natural":
        return up(9 * n)
    if name == "top_k":
        k = max(1, math.floor(settings["ratio"] * n))
        return 4 * k + up(k * width(n))
    if name == "sparse":
        size = settings["size"]
        k = len(sparse_places(np.zeros(n), size, settings["density"]))
        return up(k * width(min(size, n))) + (grid_bytes(k, bits, 1 + 2**bits) if bits else 4 * k)
    return {"identity": 4, "cast": 2}[name] * n
