"""Study files: how they are read, the cells that they give, and what is refused."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedfleet.engine.errors import ConfigError
from fedfleet.tune.report.findings import chosen_by
from fedfleet.tune.study.cells import Cell, Score, cells, digest, grid, levels, trial_of, trials
from fedfleet.tune.study.check import checked, resolve, with_direction
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.kept_results import number
from fedfleet.tune.study.searches import searches
from fedfleet.tune.study.spec import Study, load, shipped
from fedfleet.tune.study_run.runner import refuse_own_file

from .commands import invoke
from .small_study import STUDY, written


def test_cells_are_methods_times_levels_times_seeds(tmp_path: Path):
    found = cells(load(written(tmp_path)))
    assert [(c.method, c.place, c.seed) for c in found] == [
        (method, (f"beta = {beta}",), seed)
        for method in ("FedAvg", "SCAFFOLD")
        for beta in (0.5, 2.0)
        for seed in (0, 1)
    ]
    assert len({c.key for c in found}) == 8
    data = found[1].data
    assert (data["seed"], data["workload"]["beta"], data["method"]["rule"]["lr"]) == (1, 0.5, 0.1)
    assert data["engine"]["backend"] == "local"


def test_the_best_trial_is_the_cell(tmp_path: Path):
    """If trials have the full number of rounds, a cell's best trial is the cell itself, and nothing is run again."""
    study = load(written(tmp_path, tune={"each": "cell"}))
    offered = trials(study)
    assert len(offered) == 8  # FedAvg's two points at two levels and two seeds; SCAFFOLD has nothing to tune
    value = {cell.key: i for i, cell in enumerate(offered)}  # later is better
    tuned = [c for c in cells(study, lambda cell: value[cell.key]) if c.method == "FedAvg"]
    assert [c.settings for c in tuned] == [{"method.rule.lr": 0.01}] * 4
    assert {c.key for c in tuned} <= set(value)


def scored(table: dict[tuple[float, str, int], float]) -> Any:
    """A score function from a table (step size, level, seed) -> value."""
    return lambda cell: table[cell.data["method"]["rule"]["lr"], cell.place[0], cell.seed]


@pytest.mark.parametrize("best", ["max", "min"])
def test_of_equal_trials_the_first_one_decides_also_where_others_were_kept(tmp_path: Path, best: str):
    """A trial that is read from cells.jsonl has twelve digits of the value that an equal one has here."""
    sign = 1 if best == "max" else -1
    study = load(written(tmp_path, tune={"each": "level"}))
    chosen = []
    for kept in (0.1, 0.01):
        at = {rate: number(17 / 18) if rate == kept else 17 / 18 for rate in (0.1, 0.01)}
        tuned = cells(study, lambda cell, at=at: sign * at[cell.data["method"]["rule"]["lr"]])
        chosen += [cell.data["method"]["rule"]["lr"] for cell in tuned if cell.method == "FedAvg"]
    assert chosen == [0.1] * 8


def test_what_decides(tmp_path: Path):
    """0.1 is best at level 0.5 with seed 0, and 0.01 in all other cells; by the mean of a level, 0.1 is best at 0.5; by
    the mean of all, 0.01."""
    a, b, nothing = "beta = 0.5", "beta = 2.0", -float("inf")
    table = {(0.1, a, 0): 9.0, (0.1, a, 1): 1.0, (0.1, b, 0): 1.0, (0.1, b, 1): 1.0}
    table |= {(0.01, a, 0): 1.0, (0.01, a, 1): 2.0, (0.01, b, 0): 9.0, (0.01, b, 1): 9.0}
    expected = {"cell": [0.1, 0.01, 0.01, 0.01], "level": [0.1, 0.1, 0.01, 0.01], "once": [0.01] * 4, "none": [0.1] * 4}

    def rates(each: str, **more: Any) -> list[float]:
        study = load(written(tmp_path, tune={"each": each, **more}))
        tuned = [c for c in cells(study, scored(table)) if c.method == "FedAvg"]
        return [c.data["method"]["rule"]["lr"] for c in tuned]

    assert {each: rates(each) for each in expected} == expected
    assert rates("level", seeds=[1]) == [0.01, 0.01, 0.01, 0.01]  # of seed 1 alone, for both
    table[0.01, b, 1] = nothing  # it diverged once
    assert rates("level") == [0.1, 0.1, 0.1, 0.1]


def chosen_anew(study: Study, score: Score) -> list[tuple[str, dict[str, Any]]]:
    """(key, settings) of all cells, for each of which the trials that decide are planned and scored anew."""
    tune, made = study.tune, []
    for method in study.methods:
        for place, here in levels(study):
            for seed in study.seeds:
                offered = [*grid(study, method, place, here, seed)]
                at = [level for level in levels(study) if tune.each == "once" or level[0] == place]
                seeds = [seed] if tune.each == "cell" and tune.seeds is None else tune.seeds or study.seeds
                values = []
                for i in range(len(offered)):
                    runs = [[*grid(study, method, *level, one)][i] for level in at for one in seeds]
                    values.append(sum(score(trial_of(run, study)) for run in runs) / len(runs))
                best = offered[values.index(max(values))]
                made.append((best.key, best.settings))
    return made


@pytest.mark.parametrize("each", ["cell", "level", "once"])
@pytest.mark.parametrize("more", [{}, {"seeds": [7, 8], "rounds": 3}])
def test_each_trial_is_scored_once(tmp_path: Path, each: str, more: dict[str, Any]):
    """The choice is that of an implementation which plans and scores the trials of a group again for each cell."""
    rates = {"search": "grid", "values": [0.1, 0.03, 0.01]}
    methods = {
        "A": {"name": "fedavg", "rule": {"name": "sgd", "lr": rates}, "server_lr": {**rates, "values": [1, 2]}},
        "B": {"name": "fedprox", "rule": {"name": "sgd", "lr": rates}},
        "C": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
    }
    axes = {"beta": {"key": "workload.beta", "values": [0.5, 1, 2]}, "kind": {"a": {}, "b": {"workload.rows": 30}}}
    study = load(written(tmp_path, methods=methods, axes=axes, seeds=[0, 1, 2], tune={"each": each, **more}))
    scored = Counter[str]()

    def score(cell: Cell) -> float:
        """The same number for the same trial, in which many trials are equal and some have diverged."""
        value = int(cell.key, 16) % 7
        return float(value) if value or each == "once" else -math.inf

    def counted(cell: Cell) -> float:
        scored[cell.key] += 1
        return score(cell)

    found = cells(study, counted)
    assert [(cell.key, cell.settings) for cell in found] == chosen_anew(study, score)
    assert scored == Counter(cell.key for cell in trials(study))
    assert len({str(cell.settings) for cell in found}) > 2


@pytest.mark.parametrize("lr", [0.5, {"search": "grid", "values": [1, 2, 3]}])
def test_one_point_for_levels_with_other_grids(tmp_path: Path, lr: Any):
    """There is no point with the same number at all levels. This is told before a trial has been run."""
    change = {"axes": {"size": {"small": {}, "large": {"methods": {"FedAvg": {"method.rule.lr": lr}}}}}}
    done = invoke("study", written(tmp_path, **change, tune={"each": "once"}), "--out", str(tmp_path / "out"))
    assert done.exit_code == 2, done.output
    large = 1 if lr == 0.5 else 3
    pair = sorted([(2, "small"), (large, "large")])
    told = " and ".join(f"{count} at {level}" for count, level in pair)
    assert f"got once, where methods.FedAvg has {told}; change it" in done.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="got once"):
        checked(load(written(tmp_path, **change, tune={"each": "once"})))
    for each in ("level", "cell"):
        study = load(written(tmp_path, **change, tune={"each": each}))
        assert len(trials(study)) == 2 * (2 + (large if large > 1 else 0))
        assert len(cells(study, lambda _: 0.0)) == 8


def test_trials_may_be_shorter_and_on_other_seeds(tmp_path: Path):
    offered = trials(load(written(tmp_path, tune={"each": "level", "rounds": 3, "seeds": [7]})))
    assert [(c.seed, c.data["federation"]["rounds"]) for c in offered] == [(7, 3)] * 4


def test_the_key_is_of_what_moves_numbers(tmp_path: Path):
    data = cells(load(written(tmp_path)))[0].data
    same = {**data, "name": "other", "tracking": {"uri": "auto"}, "engine": {"backend": "ray", "workers": 3}}
    assert digest(same) == digest(data)
    for other in ({"seed": 5}, {"evaluate": {"every": 1}}, {"engine": {"backend": "local", "dtype": "float64"}}):
        assert digest({**data, **other}) != digest(data)


def test_the_key_follows_a_plugins_content(tmp_path: Path):
    plugin = tmp_path / "own.py"
    plugin.write_text("from fedfleet.algorithms.fedavg import fedavg\nMETHODS = {'mine': fedavg}\n")
    file = written(tmp_path, plugins=["own.py"], methods={"Mine": "mine"})
    before = cells(load(file))[0].key
    assert before == cells(load(file))[0].key
    (tmp_path / "elsewhere").mkdir()
    for path in (plugin, Path(file)):
        shutil.copy(path, tmp_path / "elsewhere")
    assert before == cells(load(str(tmp_path / "elsewhere" / Path(file).name)))[0].key
    plugin.write_text(plugin.read_text() + "# changed\n")
    assert before != cells(load(file))[0].key


def test_levels_by_label_and_for_single_methods(tmp_path: Path):
    axes = {
        "beta": {"key": "workload.beta", "values": [0.5]},
        "kind": {
            "plain": {},
            "prox": {"federation.local.epochs": 1, "methods": {"SCAFFOLD": {"method.server_lr": 0.5}}},
        },
        "strength": {"key": {"FedAvg": "method.server_lr"}, "values": [1.0, 2.0]},
    }
    found = cells(load(written(tmp_path, axes=axes, seeds=[0])))
    assert [c.place[1:] for c in found[:4]] == [(k, f"strength = {s}") for k in ("plain", "prox") for s in (1.0, 2.0)]
    prox = [c for c in found if c.place[1] == "prox"]
    assert all(c.data["federation"]["local"] == {"epochs": 1, "batch": 10} for c in prox)
    assert [c.data["method"].get("server_lr") for c in prox] == [1.0, 2.0, 0.5, 0.5]


def test_smaller_studies_say_so(tmp_path: Path):
    overrides = ["seeds=[0]", "experiment.federation.local.batch=5"]
    study = load(written(tmp_path), overrides, {"scale": 0.5, "clients": 4})
    federation = cells(study)[0].data["federation"]
    assert (federation["rounds"], federation["clients"], federation["cohort"]) == (3, 4, 2)
    assert cells(study)[0].data["evaluate"] == {"every": 1}
    assert study.notes == (
        "rounds × 0.5",
        "4 clients, in full 8, the cohort in proportion",
        "experiment.federation.local.batch is 5, in the file 10",
        "seeds is [0], in the file [0, 1]",
    )


@pytest.mark.parametrize(
    ("reduced", "rounds", "of_trials", "told"),
    [
        ({"scale": 0.1}, 2, 1, "trials of 1 round, in full 10"),
        ({"scale": 0.5}, 10, 5, "trials of 5 rounds, in full 10"),
        ({"rounds": 4}, 4, 2, "trials of 2 rounds, in full 10"),
        ({"scale": 0.001}, 1, 1, "trials of 1 round, in full 10"),
        ({"clients": 4}, 20, 10, ""),
    ],
)
def test_trials_of_a_smaller_study_are_shorter(
    tmp_path: Path, reduced: dict[str, Any], rounds: int, of_trials: int, told: str
):
    """Of grids and of ranges, by the same fraction as the cells; the notes and the report say how long they were."""
    federation = {**STUDY["experiment"]["federation"], "rounds": 20}
    ranged = {"name": "fedprox", "rule": {"name": "sgd", "lr": {"search": "loguniform", "low": 1e-3, "high": 0.1}}}
    study = load(
        written(
            tmp_path,
            methods={**STUDY["methods"], "Ranged": ranged},
            tune={"each": "level", "rounds": 10},
            **with_section("federation", federation),
        ),
        reduced=reduced,
    )
    assert {cell.data["federation"]["rounds"] for cell in cells(study)} == {rounds}
    assert {cell.data["federation"]["rounds"] for cell in trials(study)} == {of_trials}
    assert {data["federation"]["rounds"] for data in searches(study).values()} == {of_trials}
    assert {cell.key for cell in trials(study)} == {cell.key for cell in scored_by(study)}
    assert chosen_by(study).endswith(f", in trials of {of_trials} round{'s' * (of_trials > 1)}")
    assert [note for note in study.notes if note.startswith("trials")] == ([told] if told else [])


def test_a_trial_has_no_more_rounds_than_its_cell(tmp_path: Path):
    """Where a level or a method has fewer rounds than trials have, its trials are runs of full length."""
    axes = {"length": {"short": {"federation.rounds": 2}, "long": {"federation.rounds": 20}}}
    study = load(written(tmp_path, axes=axes, tune={"each": "level", "rounds": 5}))
    rounds = {(cell.place, cell.data["federation"]["rounds"]) for cell in trials(study)}
    assert rounds == {(("short",), 2), (("long",), 5)}
    assert {cell.key for cell in trials(study)} == {cell.key for cell in scored_by(study)}


def scored_by(study: Study) -> list[Cell]:
    """The trials whose values the choice asks for."""
    asked: list[Cell] = []
    cells(study, lambda cell: asked.append(cell) or 0.0)
    return asked


def test_an_override_of_epochs_removes_the_steps(tmp_path: Path):
    study = load(written(tmp_path), ["experiment.federation.local.epochs=1"])
    assert study.experiment["federation"]["local"] == {"epochs": 1, "batch": 10}
    checked(study)


def test_rounds_that_are_no_number_are_told(tmp_path: Path):
    file = written(tmp_path, tune={"each": "level", "rounds": 3}, **with_section("federation", {"rounds": "x"}))
    done = invoke("study", file, "--rounds", "2", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "experiment.federation.rounds must be a whole number of at least 1, got 'x'" in done.output


def test_a_study_on_top_of_another(tmp_path: Path):
    written(tmp_path)
    top = tmp_path / "top.yaml"
    top.write_text(f"base: {tmp_path / 'small.yaml'}\nmethods: [SCAFFOLD]\nexperiment: {{evaluate: {{every: 3}}}}\n")
    study = load(str(top))
    assert (study.name, study.title, list(study.methods)) == ("top", STUDY["title"], ["SCAFFOLD"])
    assert study.experiment["evaluate"] == {"every": 3}
    assert study.experiment["federation"] == STUDY["experiment"]["federation"]


PLUGIN = "from fedfleet.algorithms.fedavg import fedavg\nMETHODS = {{'{0}': fedavg}}\n"


def test_plugins_of_the_base_and_of_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of the base, of the file and of their experiment files are there, each beside the file that names it; so is
    the base, wherever the command is started."""
    for name in ("first", "second", "third"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(PLUGIN.format(name))
    (tmp_path / "third" / "own.yaml").write_text(yaml.safe_dump({**STUDY["experiment"], "plugins": ["third.py"]}))
    written(tmp_path / "first", plugins=["first.py"], experiment="../third/own.yaml")
    top = tmp_path / "second" / "top.yaml"
    further = {"plugins": "second.py", "methods": {name: name for name in ("first", "second", "third")}}
    top.write_text(yaml.safe_dump({"base": "../first/small.yaml", **further}))
    monkeypatch.chdir(tmp_path)
    study = load("second/top.yaml")
    assert [Path(name).relative_to(tmp_path).as_posix() for name in study.plugins] == [
        "first/first.py",
        "third/third.py",
        "second/second.py",
    ]
    assert cells(study)[0].data["plugins"] == list(study.plugins)
    checked(study)
    (tmp_path / "more.py").write_text(PLUGIN.format("more"))
    assert load("second/top.yaml", ["experiment.plugins=[more.py]"]).plugins == (
        *study.plugins,
        str(tmp_path / "more.py"),
    )


def test_the_base_beside_the_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A study of the same name in the current folder is another one, and serves only where there is none beside."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    top = tmp_path / "below" / "top.yaml"
    top.write_text("base: small.yaml\n")
    written(tmp_path, title="in the current folder")
    assert load(str(top)).title == "in the current folder"
    written(tmp_path / "below", title="beside")
    assert load(str(top)).title == "beside"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base: demo\nexperiment:\n", "experiment must be a mapping of keys such as workload and federation, got None"),
        ("base: demo\nexperiment: [digits]\n", "experiment must be a mapping of keys such as workload and federation"),
        ("experiment: listed.yaml\nmethods: {A: fedavg}\n", "experiment: listed.yaml must hold a mapping of keys"),
        (
            "base: bare.yaml\nmethods: [A]\n",
            "methods must be a mapping of labels over a base without methods, got ['A']",
        ),
        ("base: top.yaml\n", "base must name another study than "),
    ],
)
def test_what_cannot_build_on_another(tmp_path: Path, text: str, told: str):
    (tmp_path / "bare.yaml").write_text("experiment: digits\n")
    (tmp_path / "listed.yaml").write_text("[1, 2]\n")
    (tmp_path / "top.yaml").write_text(text)
    done = invoke("study", str(tmp_path / "top.yaml"), "--out", str(tmp_path / "out"))
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit), done.output
    assert told in done.output
    assert len(done.output.splitlines()) == 1


def with_section(name: str, section: Any) -> dict[str, Any]:
    return {"experiment": {**STUDY["experiment"], name: section}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sedes": [1]}, "sedes is not a key; did you mean seeds?"),
        ({"seeds": [1, 1]}, "seeds: must not repeat a seed"),
        ({"seeds": [-1]}, "error: seeds: must not be negative; choose others, got [-1]"),
        ({"seeds": []}, "error: seeds must have at least 1 entry, got []"),
        ({"seeds": ["a"]}, "unable to parse string as an integer, got 'a'\n"),
        ({"seeds": 0}, "error: seeds must be a list, got 0"),
        ({"tune": {"seeds": []}}, "error: tune.seeds must have at least 1 entry, got []"),
        ({"tune": {"seeds": [3, 3]}}, "error: tune.seeds: must not repeat a seed"),
        ({"reduced": {"scale": 1e300}}, "reduced.scale must be less than or equal to 2147483647, got 1e+300"),
        ({"methods": ["fedavg"]}, "error: methods must be a mapping of keys, got ['fedavg']"),
        ({"methods": {" ": "fedavg"}}, "error: methods: has a method whose label is empty; give it one"),
        (with_section("search", {"trials": 1}), "error: experiment.search is not a key; valid: "),
        ({"axes": {"x": {"key": "nosuch.y", "values": [1]}}}, "error: experiment.nosuch is not a key; "),
        (
            {"axes": {"x": {"key": "", "values": [1]}}},
            "axes.x: levels must change keys of an experiment, got the key ",
        ),
        ({"axes": {"x": {"a": {"federation.rounds=5": 1}}}}, "got the key 'federation.rounds=5'; write one as in "),
        ({"name": "../../elsewhere"}, "name: must be the name of a folder, without .. and not empty"),
        ({"methods": {}}, "methods"),
        ({"methods": {"A": "fedavgg"}}, "no method is called fedavgg; did you mean fedavg?"),
        ({"tune": {"each": "all"}}, "tune.each must be 'none', 'cell', 'level' or 'once'"),
        ({"axes": {"x": {"a": 1}}}, "axes.x.a must be a mapping of overrides, got 1"),
        ({"axes": {"x": {"key": {"FedAv": "a"}, "values": [1]}}}, "the study has no method FedAv"),
        ({"report": {"level_axis": "alpha"}}, "level_axis must be an axis of the study, got alpha"),
        ({"methods": {"A": {"name": "fedavg", "rule": {"name": "sgd", "lr": {"search": "grid"}}}}}, "needs values"),
        ({"experiment": "digit"}, "there is no experiment digit; did you mean digits?"),
        ({"axes": {"x": {}}}, "axes.x has no level; give it some, or drop the axis"),
        ({"axes": {"x": {"key": "workload.beta", "values": []}}}, "axes.x has no level"),
        ({"axes": {"x": {"key": "workload.beta", "values": [1, 1]}}}, "axes.x.values must be different, got [1, 1]"),
        ({"axes": {"x": {"key": "seed", "values": [1, 2]}}}, "seed is set by the study's seeds; give them there"),
        ({"axes": {"x": {"a": {"method": "fedavg"}}}}, "method is set by the study's methods; give them there"),
        ({"axes": {"x": {"a": {"methods": {"FedAvg": 3}}}}}, "axes.x.a.methods.FedAvg must be a mapping of overrides"),
        (with_section("federation", 5), "experiment.federation must be a mapping of keys, got 5"),
        (with_section("federation", None), "experiment.federation must be a mapping of keys, got None"),
        (
            with_section("federation", {"rounds": "x"}),
            "experiment.federation.rounds must be a whole number of at least 1",
        ),
        (
            with_section("federation", {"rounds": 1.5}),
            "experiment.federation.rounds must be a whole number of at least 1",
        ),
        (
            with_section("federation", {"clients": 0}),
            "experiment.federation.clients must be a whole number of at least 1",
        ),
        (with_section("evaluate", {"every": -3}), "experiment.evaluate.every must be a whole number of at least 0"),
        (with_section("engine", 4), "experiment.engine must be a mapping of keys, got 4"),
        (
            {"methods": {"A": {"name": "fedavg", "rule": {"search": ["grid"]}}}, "tune": {"each": "cell"}},
            "there is no range ['grid']",
        ),
        (
            {
                "methods": {
                    "A": {
                        "name": "fedavg",
                        "rule": {"name": "sgd", "lr": {"search": "grid", "values": [0.1, "oops", 0.3]}},
                    }
                }
            },
            "methods.A.rule.lr must be a valid number, unable to parse string as a number, got 'oops'",
        ),
    ],
)
def test_what_cannot_run_is_told_in_a_sentence(tmp_path: Path, changes: dict[str, Any], told: str):
    done = invoke("study", written(tmp_path, **changes), "--out", str(tmp_path / "out"))
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit), done.output
    assert told in done.output
    assert done.output.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_file_for_another_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    Path("one.yaml").write_text("workload: digits\nmethod: fedavg\n")
    StudyFolder(Path("mine")).keep(load("small.yaml"))
    for given, told in (
        (("run", "small.yaml"), "small.yaml holds a study, and no single experiment; start it by `fedfleet study "),
        (("search", "small.yaml"), "small.yaml holds a study, and no single experiment; start it by `fedfleet study "),
        (("study", "one.yaml"), "one.yaml holds an experiment, and no study; start it by `fedfleet run one.yaml`"),
        (("study", "mine"), "to go on with it: fedfleet study mine/study.yaml --out mine"),
    ):
        done = invoke(*given)
        assert (done.exit_code, done.exception.__class__) == (2, SystemExit), done.output
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_study_is_not_written_over_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that was written by hand has comments and names of its own. That of a study's folder may be run again."""
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(Path(written(tmp_path)).read_text() + "# mine\n")
    text = Path("study.yaml").read_text()
    done = invoke("study", "study.yaml", "--out", ".", "seeds=[0]")
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit), done.output
    assert "--out .: the study would be written over its own file, study.yaml; choose another folder" in done.stderr
    assert Path("study.yaml").read_text() == text
    StudyFolder(Path("mine")).keep(load("small.yaml"))
    refuse_own_file("mine/study.yaml", Path("mine"))
    refuse_own_file("study.yaml", Path("mine"))


def test_an_unknown_study_is_told():
    done = invoke("study", "heterogenity")
    assert done.exit_code == 2
    assert "there is no study heterogenity; did you mean heterogeneity?" in done.output


def test_studies_are_listed():
    done = invoke("list", "studies")
    assert done.exit_code == 0
    assert {line.split()[0] for line in done.output.splitlines()[1:]} == set(shipped())


def write_tables(folder: Path) -> None:
    """Tables with the columns of those that users make for the studies personal/natural and personal/har."""
    rows: dict[str, Any] = {"label": [0, 1] * 50, "client": [0, 1] * 50}
    pq.write_table(pa.table({"image": [[0] * 784] * 100, **rows}), folder / "writers.parquet")
    pq.write_table(
        pa.table({"input": [[[0.0] * 128] * 9] * 100, "held_out": [False] * 100, **rows}), folder / "har.parquet"
    )


@pytest.mark.parametrize("name", shipped())
def test_shipped_studies_resolve(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every name and argument is resolved, at both ends of every grid; the data sets need not be on this machine, nor
    the weights that another study makes."""
    write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    study = load(name)
    if "adapter" in study.experiment.get("workload", ()):
        study = load(name, ["experiment.workload.model.weights=null"])
    assert study.title
    known = {", ".join(place) for place, _ in levels(study)}
    for table in (study.published.values, study.published.settings):
        assert set(table) <= set(study.methods)
        assert {level for of_method in table.values() for level in of_method} <= known
    once = study.model_copy(update={"seeds": study.seeds[:1]})
    points = {(cell.method, cell.place): cell for cell in trials(once)}  # the last of each grid
    for cell in [*cells(once), *points.values()]:
        resolve(cell)


IMAGES = {"cifar10", "cifar100", "femnist"}


@pytest.mark.parametrize("name", [name for name in shipped() if name.startswith("feddua/")])
def test_feddua_has_its_papers_weight_decay_on_images(name: str):
    """Weight decay of 1e-4 is in every gradient on images, and in none on other data (Takakura et al. 2025)."""
    study = load(name)
    for cell in cells(study, lambda _: 0.0):
        workload = cell.data["workload"]
        inner = workload["of"]["name"] if isinstance(workload, dict) and workload["name"] == "regularised" else None
        if inner is None:
            assert (workload if isinstance(workload, str) else workload["name"]) in {"shakespeare", "linear"}
        else:
            assert inner in IMAGES
            assert workload["decay"] == 1e-4


@pytest.mark.parametrize(
    ("report", "best"),
    [
        ({}, "max"),
        ({"metric": "eval/loss"}, "min"),
        ({"metric": "train/loss", "best": "auto"}, "min"),
        ({"metric": "eval/clients/loss_worst"}, "min"),
        ({"metric": "eval/mae"}, "min"),
        ({"metric": "eval/clients/test_mae"}, "min"),
        ({"metric": "train/mae"}, "max"),
        ({"metric": "eval/loss", "best": "max"}, "max"),
        ({"metric": "eval/accuracy", "best": "min"}, "min"),
    ],
)
def test_which_values_are_better_follows_from_the_metric(tmp_path: Path, report: dict[str, Any], best: str):
    """The workload says that lower values of its metric `mae` are better."""
    (tmp_path / "absolute.py").write_text(
        "from fedfleet.workloads.data.digits import Digits\n\n\nclass Absolute(Digits):\n"
        "    lower = ('loss', 'mae')\n\n\nWORKLOADS = {'absolute': Absolute}\n"
    )
    experiment = {"workload": "absolute", "federation": {"clients": 8, "cohort": 4}}
    axes = {"part": {"key": "workload.partition", "values": ["iid"]}}
    changes = {"plugins": ["absolute.py"], "experiment": experiment, "axes": axes, "tune": {"each": "cell"}}
    study = with_direction(load(written(tmp_path, **changes, report=report)))
    assert study.report.best == best
    kept = StudyFolder(tmp_path / "kept")
    kept.keep(study)
    assert kept.study.report.best == best


def test_a_study_is_tuned_for_the_lowest_loss(tmp_path: Path):
    """The best of two step sizes at which the losses are 0.9 and 0.2."""
    study, folder = (
        with_direction(load(written(tmp_path, tune={"each": "cell"}), ["report.metric=eval/loss"])),
        StudyFolder(tmp_path / "out"),
    )
    folder.final = lambda cell, metric, by: {0.1: 0.9, 0.01: 0.2}[cell.data["method"]["rule"]["lr"]]
    tuned = cells(study, lambda cell: folder.score(cell, study))
    assert {c.data["method"]["rule"]["lr"] for c in tuned if c.method == "FedAvg"} == {0.01}


def test_a_study_that_goes_on_with_another_metric_has_its_direction(tmp_path: Path):
    """The file in its folder has the direction of the first metric."""
    folder = StudyFolder(tmp_path / "out")
    folder.keep(with_direction(load(written(tmp_path, tune={"each": "cell"}))))
    expected = {
        (): ("max", "max"),
        ("report.metric=eval/loss",): ("min", "min"),
        ("tune.metric=eval/loss",): ("max", "min"),
        ("report.best=min",): ("min", "min"),
    }
    for overrides, directions in expected.items():
        study = with_direction(load(str(folder.path / "study.yaml"), overrides))
        assert (study.report.best, study.deciding_best) == directions
        StudyFolder(tmp_path / "again").keep(study)
        kept = StudyFolder(tmp_path / "again").study
        assert (kept.report.best, kept.deciding_best) == directions


def test_metrics_that_are_better_in_two_directions(tmp_path: Path):
    """Settings are chosen by the direction of the metric that decides, also where the report has another one."""
    changes = {"tune": {"each": "cell", "metric": "eval/accuracy"}, "report": {"metric": "eval/loss"}}
    study = with_direction(load(written(tmp_path, **changes)))
    assert (study.report.best, study.deciding_best) == ("min", "max")
    folder = StudyFolder(tmp_path / "out")
    folder.keep(study)
    folder.final = lambda cell, metric, by: 0.7
    assert (folder.study.deciding_best, folder.score(cells(study)[0], study)) == ("max", 0.7)
    assert with_direction(load(written(tmp_path, **changes), ["report.best=min"])).deciding_best == "min"


@pytest.mark.parametrize(
    ("report", "final"),
    [({}, 0.5), ({"last": 2}, 0.6), ({"best_round": True}, 0.9), ({"best": "min", "best_round": True}, 0.2)],
)
def test_the_final_value_of_a_run(tmp_path: Path, report: dict[str, Any], final: float):
    """Of the evaluations 0.2, 0.9, 0.7 and 0.5."""
    study = with_direction(load(written(tmp_path, report=report)))
    assert study.report.final(np.array([0.2, 0.9, 0.7, 0.5])) == pytest.approx(final, abs=1e-12)  # rounding of a mean
    assert study.tune.final(np.array([0.9, 0.5])) == 0.5


def test_the_best_round_is_no_mean(tmp_path: Path):
    done = invoke("study", written(tmp_path, report={"last": 3, "best_round": True}), "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "report: has last: 3 and best_round: true, which contradict each other; drop one" in done.output


def test_the_best_round_on_test_rows_is_refused_where_there_are_rows_for_validation(tmp_path: Path):
    chosen = {**STUDY["experiment"], "evaluate": {"every": 2, "held_out": 0.2, "validation": 0.2}}
    given = written(tmp_path, experiment=chosen, report={"best_round": True})
    done = invoke("study", given, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert (
        "error: report.best_round: choices are made on validation rows, got eval/accuracy; leave it out, or set "
        "report.best_of_test"
    ) in done.output
    assert not (tmp_path / "out").exists()
