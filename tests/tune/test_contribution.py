"""What clients contribute: the values of games that are known, and forks of a small run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import fedfleet
from fedfleet.engine import run
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune import contribution
from fedfleet.tune.contribution import Coalitions, contributions, interval, leave_one_out, shapley, text
from tests.engine.test_personal import small

WORTH = {0: 3.0, 1: -1.0, 2: 0.5, 3: 0.0}


def additive(without: Iterable[int]) -> float:
    return sum(WORTH.values()) - sum(WORTH[client] for client in without)


def glove(without: Iterable[int]) -> float:
    """Client 0 has a left glove, clients 1 and 2 have right ones; a pair is worth 1. The Shapley values are 2/3, 1/6
    and 1/6."""
    here = {0, 1, 2} - {*without}
    return float(0 in here and len(here) > 1)


def test_an_additive_game():
    for client, marginals in shapley(additive, [*WORTH], 5, 0, 0.0).items():
        assert marginals == pytest.approx([WORTH[client]] * 5)


def test_the_glove_game():
    """The mean of 600 orders, with a tolerance of five deviations: a marginal is 0 or 1."""
    found = {client: float(np.mean(each)) for client, each in shapley(glove, [0, 1, 2], 600, 0, 0.0).items()}
    for client, value in {0: 2 / 3, 1: 1 / 6, 2: 1 / 6}.items():
        assert found[client] == pytest.approx(value, abs=5 * np.sqrt(value * (1 - value) / 600))
    assert sum(found.values()) == pytest.approx(1.0)


def test_an_order_ends_near_the_whole():
    """Clients behind the point where nothing is left to gain have 0, and are not asked for."""
    asked = []

    def value(without: Iterable[int]) -> float:
        asked.append(left := tuple(without))
        return min(4 - len(left), 1)

    found = shapley(value, [0, 1, 2, 3], 1, 0, 0.01)
    assert sorted(each[0] for each in found.values()) == [0, 0, 0, 1]
    assert sorted(map(len, asked)) == [0, 3, 4]


def test_intervals():
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6)
    assert np.isnan(interval([1.0])[1])


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    plan = {"clients": 4, "cohort": 2, "rounds": 2, "local": {"steps": 2, "batch": 8}}
    run(small(federation=plan), tmp_path / "run")
    return tmp_path / "run"


def test_forks_of_a_run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Values are those of forks without the client; they are kept, so that nothing is computed twice."""
    game = Coalitions(finished, 0, "eval/loss", tmp_path / "out")
    found = leave_one_out(game, [0, 1, 2, 3])
    other = fedfleet.fork(finished, 0, out=tmp_path / "fork", without_clients=[2], progress=False)
    whole = fedfleet.Result.load(finished)
    assert found[2] == pytest.approx(other.rows[-1]["eval/loss"] - whole.rows[-1]["eval/loss"], abs=1e-12)
    assert not (tmp_path / "out" / "fork").exists()
    monkeypatch.setattr(contribution, "fork", None)
    again = Coalitions(finished, 0, "eval/accuracy", tmp_path / "out")
    assert leave_one_out(again, [0, 1, 2, 3]).keys() == found.keys()
    assert "Contributions to test accuracy (points), by forks after round 0: 4 forks of 1 run" in text(
        contributions([again], [0, 1, 2, 3], 0, 0, 0.0), [again]
    )
    with pytest.raises(ConfigError, match="has values of another run or round; give another folder"):
        Coalitions(finished, 1, "eval/loss", tmp_path / "out")
    with pytest.raises(ConfigError, match="has files, but no values of a contribution; give another folder"):
        Coalitions(finished, 0, "eval/loss", tmp_path)
    with pytest.raises(ConfigError, match="the run has no column eval/los; did you mean eval/loss"):
        Coalitions(finished, 0, "eval/los", tmp_path / "out")


@pytest.mark.long
def test_shapley_values_add_up(finished: Path, tmp_path: Path):
    """To the difference between the model with all clients and the one before round 1."""
    game = Coalitions(finished, 0, "eval/loss", tmp_path / "out")
    found = shapley(game.value, [0, 1, 2, 3], 1, 0, 0.0)
    result = fedfleet.Result.load(finished)
    first = dict(RunSpec.of("test", result.experiment).initial_model().items())
    gained = result.evaluate(model=first)["eval/loss"] - result.rows[-1]["eval/loss"]
    assert sum(each[0] for each in found.values()) == pytest.approx(gained, abs=1e-9)
