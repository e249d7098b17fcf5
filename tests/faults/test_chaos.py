"""A fixed sample of the random faults; `make chaos` runs all 200."""

from __future__ import annotations

import pytest

from .chaos import POINTS, SAMPLE, NoDisk, survive, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize(
    "point",
    [point for point in POINTS if point.number < SAMPLE[point.kind]],
    ids=lambda point: f"{point.kind}-{point.number}",
)
@pytest.mark.timeout(150)
def test_a_fault_at_random(point, tmp_path, expected, request):
    if point.kind in ("host", "driver"):
        request.getfixturevalue("ray_here")
    try:
        survive(point, tmp_path, expected)
    except NoDisk as reason:
        pytest.skip(str(reason))


def test_there_are_two_hundred():
    assert len(POINTS) == 200
    assert sum(SAMPLE.values()) == 20
