"""A fixed sample of the random faults; `make chaos` runs all 200."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import chaos
from .chaos import POINTS, SAMPLE, Missed, NoDisk, Point, survive, undisturbed

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize(
    "point",
    [point for point in POINTS if point.number < SAMPLE[point.kind]],
    ids=lambda point: f"{point.kind}-{point.number}",
)
@pytest.mark.timeout(600)
def test_a_fault_at_random(point, tmp_path, expected, request):
    if point.kind in ("worker", "driver"):
        request.getfixturevalue("ray_here")
    try:
        survive(point, tmp_path, expected)
    except NoDisk as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("kind", [kind for kind in chaos.KINDS if kind not in ("worker", "driver")])
def test_a_fault_that_never_takes_effect_does_not_pass(kind, tmp_path, expected, monkeypatch):
    """Faults without effect: rules that never apply, a disk that is large enough, damage that changes nothing."""
    monkeypatch.setattr(chaos, "DRAWS", 2)
    monkeypatch.setattr(chaos, "CALLS", 1 << 20)
    monkeypatch.setattr(chaos, "mounted", large)
    monkeypatch.setattr(chaos, "enlarge", lambda folder: None)
    monkeypatch.setattr(chaos, "fill", lambda folder: (folder / "filler").touch())
    with pytest.raises((AssertionError, Missed), match="none of 2 draws"):
        survive(Point(kind, 1), tmp_path, expected)


@contextmanager
def large(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir()
    yield folder


@pytest.mark.parametrize("kind", ["worker", "driver"])
def test_a_process_that_is_never_killed_does_not_pass(kind, tmp_path, expected, monkeypatch, ray_here):
    monkeypatch.setattr(chaos, "DRAWS", 1)
    monkeypatch.setattr(chaos, "kill_one", lambda case: None)
    monkeypatch.setattr(chaos, "kill_driver", lambda: None)
    with pytest.raises(AssertionError, match="none of 1 draws"):
        survive(Point(kind, 1), tmp_path, expected)


def test_there_are_two_hundred():
    assert len(POINTS) == 200
    assert sum(SAMPLE.values()) == 20
