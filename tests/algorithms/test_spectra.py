"""The published Newton-Schulz schemes map singular values as their papers say.

Ranges and factors are from the published tables, which have three or four digits: the tolerance is half a unit of the
last digit.
"""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.parts.orthogonal import newton_schulz
from tests.algorithms.test_orthogonal import CLOSE, rotation

RANK_ONE = [
    *[("classic", t, 1.0) for t in range(11)],
    *[("jordan", t, f) for t, f in enumerate([1.0, 0.701, 1.1136, 0.7207, 1.0900, 0.6964])],
    ("you", 5, 0.9783),
    *[("polar_express", t, f) for t, f in ((5, 0.8771), (6, 0.9981), (8, 1.0000))],
]


@pytest.mark.parametrize(("scheme", "iterations", "factor"), RANK_ONE)
def test_rank_one(scheme, iterations, factor):
    """s u v^T becomes f u v^T."""
    u, v = rotation(4, 5)[:, :1], rotation(7, 6)[:, :1]
    out = newton_schulz(2.5 * u @ v.T, scheme, iterations)
    assert abs(float(u.T @ out @ v) - factor) < 6e-5
    torch.testing.assert_close(out, float(u.T @ out @ v) * u @ v.T, **CLOSE)


def spectrum(scheme, iterations, low):
    """The values to which singular values s / |M| in [low, 1] are mapped. The matrix diag(cos, sin) has |M| = 1 and
    stays diagonal."""
    angle = torch.linspace(np.arcsin(low), np.pi / 4, 20001, dtype=torch.float64)
    out = newton_schulz(torch.diag_embed(torch.stack([angle.cos(), angle.sin()], -1)), scheme, iterations)
    return torch.cat([out[:, 0, 0], out[:, 1, 1]])


RANGES = [
    ("jordan", 5, 1e-2, 0.682, 1.134, 5e-4),
    ("jordan", 5, 1e-3, 0.47, 1.20, 5e-3),
    ("you", 5, 1e-2, 0.978, 1.032, 5e-4),
    ("polar_express", 5, 1e-3, 0.840, 1.124, 5e-4),
    ("polar_express", 6, 1e-3, 0.9935, 1.0012, 5e-5),
    ("polar_express_5", 5, 1e-3, 0.847, 1.141, 5e-4),
]


@pytest.mark.parametrize(("scheme", "iterations", "low", "least", "most", "digit"), RANGES)
def test_range_of_the_spectrum(scheme, iterations, low, least, most, digit):
    s = spectrum(scheme, iterations, low)
    assert float(s.min()) == pytest.approx(least, abs=digit)
    assert float(s.max()) == pytest.approx(most, abs=digit)


def test_classic_on_a_small_singular_value():
    """0.01 becomes 0.2285 after five iterations and 1 to nine digits after ten."""
    for iterations, value, digit in ((5, 0.2285, 5e-5), (10, 1.0, 1e-9)):
        assert float(spectrum("classic", iterations, 0.01)[20001]) == pytest.approx(value, abs=digit)
