"""Ranges in experiments, and the section `search`: how they are read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.tune.files import load, load_data
from fedfleet.tune.ranges import KINDS, corners, decided, points, ranges
from fedfleet.tune.search.optuna_storage import suggested
from fedfleet.tune.search.plan import SearchPlan, plan

from .commands import invoke

FILE = """
workload: {name: quadratic, dim: {search: int, low: 2, high: 8, log: true}}
method:
  name: fedavg
  rule:
    search: choice
    values: [{name: sgd, lr: 0.1}, {name: adam, lr: 0.001}]
  server_lr: {schedule: cosine, start: {search: loguniform, low: 1e-3, high: 1}}
federation:
  clients: 8
  cohort: {search: int, low: 2, high: 8, step: 2}
  local: {steps: {search: grid, values: [1, 5]}}
engine: {backend: local}
search:
  trials: 7
  start: [{federation.cohort: 4, federation.local.steps: 5}]
"""


def data(text: str = FILE) -> dict[str, Any]:
    from fedfleet.engine.config.yaml_text import parse

    return parse(text, "here")


def small(lr: Any, **search: Any) -> dict[str, Any]:
    return {"workload": "quadratic", "method": {"name": "fedprox", "mu": lr}, "search": search}


def test_ranges_of_any_field():
    assert [(r.key, r.kind) for r in ranges(data())] == [
        ("workload.dim", "int"),
        ("method.rule", "choice"),
        ("method.server_lr.start", "loguniform"),
        ("federation.cohort", "int"),
        ("federation.local.steps", "grid"),
    ]


def test_decided_is_an_experiment():
    made = plan(data())
    first, last = (made.experiment(values) for values in corners(made.ranges))
    assert (first.workload["dim"], last.workload["dim"]) == (2, 8)
    assert (first.method["rule"]["name"], last.method["rule"]["name"]) == ("sgd", "adam")
    assert first.method["server_lr"] == {"schedule": "cosine", "start": 1e-3}
    assert (first.federation.cohort, last.federation.cohort) == (2, 8)
    assert decided(made.data, {"federation.cohort": 6})["federation"]["cohort"] == 6
    assert made.data["federation"]["cohort"] == {"search": "int", "low": 2, "high": 8, "step": 2}


def test_what_is_saved_is_read_again():
    made = plan(data())
    again = plan(yaml.safe_load(yaml.safe_dump(made.plain())))
    assert again == made
    assert again.settings.trials == 7


def test_suggestions_are_in_their_ranges():
    import optuna

    found = ranges(data())
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = [{r.key: suggested(r, trial) for r in found} for trial in (study.ask() for _ in range(40))]
    assert {values["federation.cohort"] for values in seen} == {2, 4, 6, 8}
    assert {values["federation.local.steps"] for values in seen} == {1, 5}
    assert {values["method.rule"]["name"] for values in seen} == {"sgd", "adam"}
    rates = sorted(values["method.server_lr.start"] for values in seen)
    assert 1e-3 <= rates[0] < 1e-2 < rates[20] < 0.2 < rates[-1] <= 1  # a uniform draw would put nine in ten above 0.1


def test_points_of_a_grid():
    found = ranges({"a": {"search": "grid", "values": [1, 2]}, "b": {"c": {"search": "choice", "values": ["x", None]}}})
    assert list(points(found)) == [{"a": a, "b.c": c} for a in (1, 2) for c in ("x", None)]


def test_who_proposes_and_how_many():
    grid = {"search": "grid", "values": [0.1, 0.2, 0.3]}
    range_ = {"search": "uniform", "low": 0, "high": 1}
    made: list[SearchPlan] = [
        plan(small(grid)),
        plan(small(range_)),
        plan(small(grid, trials=2)),
        plan(small(grid, sampler="tpe")),
    ]
    assert [(p.sampler, p.trials) for p in made] == [("grid", 3), ("tpe", 20), ("grid", 2), ("tpe", 20)]


UNIFORM = {"search": "uniform", "low": 0.0, "high": 1.0}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (small(0.1), "no value is a range"),
        (small({"search": "lognormal", "low": 0, "high": 1}), "method.mu.search: there is no range lognormal"),
        (small({"search": "uniform", "low": 0}), "method.mu: uniform needs high"),
        (small({"search": "uniform", "low": 1, "high": 0}), r"low < high must hold, got low=1, high=0"),
        (
            small({"search": "uniform", "low": 0, "hihg": 1}),
            "method.mu.hihg is not an argument of uniform; did you mean high",
        ),
        (small({"search": "loguniform", "low": 0, "high": 1}), "low > 0 must hold for a logarithm"),
        (small({"search": "uniform", "low": "a", "high": 1}), "method.mu.low must be a number, got 'a'"),
        (small({"search": "int", "low": 1, "high": 2.5}), "method.mu.high must be a whole number, got 2.5"),
        (small({"search": "grid", "values": []}), "grid needs a list of values"),
        (small({"search": "grid", "values": [1, 1]}), "grid has a value twice"),
        (small({"search": "choice", "values": [{"a": UNIFORM}]}), "cannot contain a range"),
        (small([UNIFORM]), "a range cannot be an item of a list"),
        (small(UNIFORM, trails=3), "search.trails is not a key; did you mean trials"),
        (small(UNIFORM, trials=0), "search.trials must be greater than or equal to 1, got 0"),
        (small(UNIFORM, trials=True), "search.trials: must not be true"),
        (small(UNIFORM, sampler="grid"), "grid needs lists of values, and method.mu is a range"),
        (small(UNIFORM, sampler="cmaes"), "cmaes needs at least two ranges"),
        (small(UNIFORM, objectives={"bytes": "min", "eval/loss": "min"}, pruner="asha"), "asha needs one objective"),
        (small(UNIFORM, objectives={}), "search.objectives: needs an objective"),
        (small(UNIFORM, start=[{"mu": 0.1}]), "mu is not a range of this search; valid: method.mu"),
        (small(UNIFORM, start=[{"method.mu": 2.0}]), r"method.mu must lie in \[0, 1\], got 2.0"),
        (small(UNIFORM) | {"search": 3}, "search must be a mapping"),
        (small(UNIFORM) | {"seeed": 3}, "seeed is not a key; did you mean seed"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        plan(wrong)


def test_a_search_is_no_run(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match="holds a search; start it by `fedfleet search"):
        load(str(path))
    assert len(ranges(load_data(str(path), ["method.rule={name: sgd, lr: 0.1}"]))) == 4


def test_overrides_are_ranges_too():
    made = load_data("digits", ["method.rule.lr={search: loguniform, low: 1e-3, high: 1}", "search.trials=3"])
    assert plan(made).trials == 3
    assert experiment(decided(plan(made).data, {"method.rule.lr": 0.5})).method["rule"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["digits"], "there is nothing to search"),
        (["digits", "method.rule.lr={search: grid, values: [0.1, -1]}"], "lr"),
        (
            ["digits", "federation.cohort={search: int, low: 50, high: 200}"],
            "cohort <= clients must hold, got 200 with clients=100",
        ),
        (["digits", "--paper-grid", "method.name=stem"], "no paper gives a grid for stem"),
        (["nowhere", "--resume"], "nowhere holds no search"),
        (["digits", "--resume", "--paper-grid"], "--resume takes only the search's folder"),
        (["digits", "--paper-grid", "search.storage=nowhere://x"], "search.storage: nowhere://x cannot be opened"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = invoke("search", *arguments)
    assert done.exit_code == 2, done.output
    assert told in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_page_has_every_kind_of_range():
    page = (Path(__file__).parents[2] / "docs/howto/search.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")]
    kinds = [yaml.safe_load(row[0].strip("`"))["search"] for row in rows if row[0].startswith("`{search")]
    assert kinds == list(KINDS)
