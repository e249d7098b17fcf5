"""The stage in the engine: the same bits on every backend, drops, resumed runs, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.table import AGGREGATORS
from fedfleet.engine.api import resume, run
from fedfleet.engine.config.registry import resolve, signature
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.result import Result

NNM_KRUM = {"name": "multi_krum", "f": 2, "before": ["nnm"]}


def spec(aggregate: Any, backend: str = "local", method: Any = "scaffold", **federation: Any) -> Any:
    return experiment(
        {
            "workload": {"name": "digits"},
            "method": method,
            "aggregate": aggregate,
            "federation": {
                "clients": 20, "cohort": 10, "rounds": 3, "local": {"steps": 2, "batch": 8}, **federation,
            },
            "engine": {"backend": backend, "workers": 2, "block": 3},
            "tracking": {"uri": "none"},
            "evaluate": {"every": 0},
        }
    )  # fmt: skip


def same(one: Result, other: Result) -> bool:
    return all(torch.equal(one.model[name], other.model[name]) for name in one.model)


@pytest.mark.parametrize("rule", [{"name": "trimmed_mean", "f": 0}, {"name": "multi_krum", "f": 0, "keep": 10}])
def test_rules_that_are_the_mean_have_its_bits(rule: dict[str, Any]):
    assert same(run(spec("mean")), run(spec(rule)))


def test_all_rules_run():
    """Every rule of the table, two rounds."""
    for name in AGGREGATORS:
        needs_f = "f" in signature(resolve(AGGREGATORS[name]))[1]
        result = run(spec({"name": name, "f": 1} if needs_f else name, rounds=2))
        assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values()), name


@pytest.mark.parametrize(
    "rule", [NNM_KRUM, "median", {"name": "bulyan", "f": 1}, "centred_clipping", "fltrust", "signguard", "sign_vote"]
)
def test_same_bits_in_one_process_and_in_two(rule: Any):
    assert same(run(spec(rule)), run(spec(rule, "ray")))


def test_a_bound_on_norms_that_no_message_reaches_is_the_mean():
    assert same(run(spec("mean")), run(spec({"name": "norm_clipping", "c": 1e9})))


def test_resumed_run_has_the_same_bits(tmp_path: Path):
    whole = run(spec("clipped_clustering", rounds=4))
    short = spec("clipped_clustering").model_copy(update={"checkpoint": whole.experiment.checkpoint.model_copy(
        update={"every": 1})})  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(short, tmp_path / "run", [StopsAfter(2)])
    longer = short.model_copy(update={"federation": whole.experiment.federation})
    assert same(whole, resume(longer, tmp_path / "run"))


class StopsAfter:
    """An observer that interrupts the run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def record(self, row: dict[str, Any]) -> None:
        if row["round"] == self.round:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_no_files_of_messages_stay(tmp_path: Path):
    run(spec("median"), tmp_path / "run")
    assert not list(tmp_path.rglob("*messages*"))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {"name": "trimmed_mean", "f": 5},
            "aggregate.f: a trimmed mean needs 2 f < S, got f=5 with federation.cohort=10; lower aggregate.f or raise "
            "federation.cohort",
        ),
        ({"name": "mda", "f": 24}, "aggregate.f: MDA needs 2 f < S"),
        ({"name": "bulyan", "f": 2}, "aggregate.f: Bulyan needs S >= 4 f + 3, got f=2"),
        ({"name": "median", "vectors": "joint"}, "aggregate.vectors: joint is for rules that find weights"),
        ({"name": "mean", "before": [{"name": "nnm", "f": 2}]}, "aggregate.before: the mean after nearest-neighbour"),
        ({"name": "krum"}, "aggregate.f is missing"),
        ("crum", "aggregate.name: no aggregator is called crum"),
        ({"name": "krum", "f": -1}, "aggregate.f: f >= 0 must hold"),
    ],
)
def test_refused_before_anything_starts(rule: Any, words: str):
    with pytest.raises(ConfigError) as error:
        run(spec(rule))
    assert str(error.value).startswith(words)


def test_median_has_no_weights():
    with pytest.raises(ConfigError, match=r"the median has no weights; set federation.weights: uniform"):
        run(spec("median", weights="examples"))


def test_records_the_distance_from_the_mean():
    rows = run(spec("median")).rows
    assert 0 < rows[-1]["robust/error"] < np.inf
    assert rows[-1]["robust/broken"] == 0
