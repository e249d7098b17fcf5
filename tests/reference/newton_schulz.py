"""Orthogonalisation of one matrix in numpy float64, written from the textbook formula; no code of the engine.

    X = M / (|M|_F (1 + delta) + eps)     on the orientation with fewer rows
    T times   Y = X X^T;  X = a X + (b Y + c Y^2) X

Jordan et al. 2024; Amsel et al. 2025 (Polar Express), arXiv:2505.16932.
"""

import numpy as np

JORDAN = (3.4445, -4.7750, 2.0315)
CLASSIC = (15 / 8, -5 / 4, 3 / 8)
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_EXPRESS_RAW = (  # as printed; `generate` rebuilds them
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
POLAR_EXPRESS_5 = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
CUSHION = 0.02407327424182761
SCHEMES = ("jordan", "classic", "you", "polar_express", "polar_express_5", "svd")


def apply(triple, s):
    """The odd quintic a s + b s^3 + c s^5."""
    a, b, c = triple
    return a * s + b * s**3 + c * s**5


def remez(low, high):
    """The best uniform odd quintic for the constant 1 on [low, high]."""
    if low / high >= 1 - 5e-6:
        return np.array([15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5])
    q, r, error = (3 * low + high) / 4, (low + 3 * high) / 4, np.inf
    for _ in range(100):
        points, signs = np.array([low, q, r, high]), np.array([1.0, -1.0, 1.0, -1.0])
        system = np.stack([points, points**3, points**5, signs], axis=1)
        a, b, c, new = np.linalg.solve(system, np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)
        q, r = np.sqrt((-3 * b - root) / (10 * c)), np.sqrt((-3 * b + root) / (10 * c))
        if abs(new - error) < 1e-15:
            break
        error = new
    return np.array([a, b, c])


def generate(iterations, low=1e-3, cushion=CUSHION, safety=0.0):
    """The triples of Polar Express for singular values in [low, 1], one row an iteration."""
    high, rows = 1.0, []
    for k in range(iterations):
        triple = remez(max(low, cushion * high), high)
        if cushion * high > low:
            triple = triple * 2 / (apply(triple, low) + apply(triple, high))
        if k < iterations - 1:
            triple = triple / (1 + safety) ** np.array([1, 3, 5])
        rows.append(tuple(triple))
        low = apply(triple, low)
        high = 2 - low
    return rows


def coefficients(scheme, iterations):
    """One triple an iteration; a table that is too short repeats its last row."""
    safe = [np.array(row) / 1.01 ** np.array([1, 3, 5]) for row in POLAR_EXPRESS_RAW[:-1]]
    tables = {
        "jordan": [JORDAN],
        "classic": [CLASSIC],
        "you": YOU,
        "polar_express": [*safe, POLAR_EXPRESS_RAW[-1]],
        "polar_express_5": POLAR_EXPRESS_5,
    }
    table = tables[scheme]
    return [tuple(table[min(k, len(table) - 1)]) for k in range(iterations)]


def delta(scheme):
    return {"polar_express": 0.01, "polar_express_5": 0.02}.get(scheme, 0.0)


def divisor(size, scheme):
    """What M is divided by, as each source has it. Polar Express: its Algorithm 1, 1.01 |M| + 1e-7; the widely copied
    five triples, 1.02 |M| + 1e-6. The others: torch.optim.Muon's max(|M|, 1e-7)."""
    if scheme == "polar_express":
        return 1.01 * size + 1e-7
    if scheme == "polar_express_5":
        return 1.02 * size + 1e-6
    return max(size, 1e-7)


def svd(m):
    """Exact U V^T without the singular values below 1e-7 times the largest."""
    u, s, vt = np.linalg.svd(m, full_matrices=False)
    keep = s > 1e-7 * s[0]
    return u[:, keep] @ vt[keep]


def orthogonalise(m, scheme="jordan", iterations=5, eps=None):
    """eps: added to the norm, which each scheme's source does in its own way otherwise, see `divisor`."""
    m = np.asarray(m, dtype=np.float64)
    if scheme == "svd":
        return svd(m) if m.any() else np.zeros_like(m)
    tall = m.shape[0] > m.shape[1]
    x = m.T if tall else m
    size = np.sqrt((x * x).sum())
    x = x / (divisor(size, scheme) if eps is None else size * (1 + delta(scheme)) + eps)
    for a, b, c in coefficients(scheme, iterations):
        y = x @ x.T
        x = a * x + (b * y + c * (y @ y)) @ x
    return x.T if tall else x


def scale(rule, rows, columns):
    """The factor of one layer."""
    return {
        "none": 1.0,
        "jordan": np.sqrt(max(1.0, rows / columns)),
        "moonlight": 0.2 * np.sqrt(max(rows, columns)),
        "spectral": np.sqrt(rows / columns),
    }[rule]
