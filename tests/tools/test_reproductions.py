"""The page of reproductions: it is what the cells say, verdicts follow from criteria, and the inputs are right."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedfleet.engine.config.schema import validated
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.environment import git, own_commit
from fedfleet.tune.report.charts import charts
from fedfleet.tune.report.findings import findings
from fedfleet.tune.report.markdown import text_of
from fedfleet.tune.report.served import Row, Served
from fedfleet.tune.report.tables import tables as report_tables
from fedfleet.tune.study.folder import Points, StudyFolder
from fedfleet.tune.study.kept_results import read_lines, restore
from fedfleet.tune.study.spec import Study, load, shipped
from fedfleet.tune.units import base_workload
from tools.reproductions.claims import NOT_REPRODUCED, NOT_TRIED, REPRODUCED, TIE, compared, verdict
from tools.reproductions.claims import Study as WithCells
from tools.reproductions.inputs import RESULTS, Claim, Listed, Paper, papers, studies
from tools.reproductions.measured import SUMMARIES, Measured, Run, measured, provenance
from tools.reproductions.page import PAGE, coverage, page, section, t_interval
from tools.reproductions.tables import TABLE, Shown, hand_written_pages, made_tables, shown, with_tables
from tools.reproductions.topics import PAGES, topic_page

FILES = sorted(RESULTS.glob("*/cells.jsonl"))


# --- the page and its inputs ------------------------------------------------------------------------------------------
def test_the_page_is_what_the_cells_say():
    assert PAGE.read_text("utf-8") == page(), "run: python -m tools.reproductions"


@pytest.mark.long
@pytest.mark.parametrize("place", PAGES, ids=lambda place: place.stem)
def test_the_page_of_a_topic_is_what_the_cells_say(place: Path):
    assert place.read_text("utf-8") == topic_page(place), "run: python -m tools.reproductions"


def test_every_folder_is_listed():
    listed = [study.folder for study in studies().studies]
    assert sorted(listed) == sorted(path.parent.name for path in RESULTS.glob("*/report.md"))
    assert set(listed) >= {claim.folder for paper in papers().values() for claim in paper.claims} - {None}
    assert set(shipped()) >= {name for one in studies().not_run for name in one.studies}


COLUMNS = {"Dirichlet": "Non-IID-1", "labels": "Non-IID-2", "IID": "IID"}


def test_published_numbers_are_those_of_the_studies():
    """The shipped studies have the same numbers, which were copied from the papers at another time."""
    known, compared_numbers = papers(), 0
    for name in ("fedmud/main", "fedmud/freeze"):
        for method, values in load(name).published.values.items():
            for level, value in values.items():
                data, _, split = level.partition(", ")
                column = f"{data}, {COLUMNS[split]}"
                tables = [t for t in known["li"].tables if column in t.columns and method in t.rows]
                assert [t.rows[method][t.columns.index(column)] for t in tables] == [value]
                compared_numbers += 1
    (table,) = known["takakura"].tables
    for method, values in load("feddua/main").published.values.items():
        column = table.columns.index(method.removeprefix("Fed"))
        assert {row: numbers[column] for row, numbers in table.rows.items()} == values
        compared_numbers += len(values)
    assert compared_numbers == 168 + 32


@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_the_rows_of_every_cell_add_up(file):
    """Also of those that were interrupted and continued."""
    lines = [line for line in read_lines(file) if line.get("result")]
    assert lines
    for line in lines:
        rows, result = line["rows"], line["result"]
        if "search" not in line:
            assert rows["round"][-1] == result["rounds"]
            assert sum(rows["comm/bytes_up"]) == result["bytes_up"]
            assert sum(rows["comm/bytes_down"]) == result["bytes_down"]
            assert sum(rows["time/seconds"]) == pytest.approx(result["seconds"], abs=1e-3)


ALL_KINDS = ("feddua-dimension", "fedmuon-bc-counterexample", "minimax-non-iid", "scaffold-networks")
"""Of training rows, of an objective, of test rows with tuning, and of a study with a plug-in."""


@pytest.mark.parametrize(
    "file",
    # Two minutes of a processor for all of them.
    [pytest.param(file, marks=[] if file.parent.name in ALL_KINDS else pytest.mark.slow) for file in FILES],
    ids=[file.parent.name for file in FILES],
)
def test_a_report_is_what_the_cells_say(file: Path, tmp_path: Path):
    """Also where study.yaml was written by hand and leaves out whether larger values are better."""
    StudyFolder(tmp_path).keep(load(str(file.parent / "study.yaml")))  # which may name plug-ins beside it
    shutil.copy(file, tmp_path)
    restore(tmp_path)
    found = findings(StudyFolder(tmp_path))
    text, _ = text_of(found, report_tables(found), charts(found), "charts")
    assert (file.parent / "report.md").read_text("utf-8") == text, "write it with fedfleet report"


def test_every_folder_has_cells():
    reports = {path.parent.name for path in RESULTS.glob("*/report.md")}
    assert reports == {file.parent.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_every_cell_says_where_it_comes_from(file):
    """Commit, processor, cards, threads, versions, and the digests of the data and of word vectors that it reads."""
    for line in (line for line in read_lines(file) if "key" in line):
        found, config = line["environment"], yaml.safe_load(line["config"])
        assert not re.search(r"(^|\s)(/|~)", line["config"]), "files have no folders, which are of one machine"
        assert found["python"]
        assert found["machine"]
        assert found["processor"]
        assert {"fedfleet", "torch", "numpy"} <= {name for name, version in found["packages"].items() if version}
        assert config["engine"]["threads"] == found["threads"] >= 1
        assert re.fullmatch("[0-9a-f]{40}", found["commit"]), "the sources must not differ from the commit"
        assert isinstance(found["cards"], list)
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in found["data"].values())
        made = {"quadratic", "linear", "saddle"}  # by these, from a seed
        made.add("digits")  # whose file earlier versions did not record
        assert found["data"] or base_workload(config["workload"]) in made
        assert ("word vectors" in found["data"]) == bool(re.search(r"glove: (?!null)", line["config"]))


@pytest.mark.long
def test_commits_are_in_the_repository():
    """A branch that is rebased after a run leaves a commit in the cells that nobody else has."""
    recorded = {line["environment"]["commit"] for file in FILES for line in read_lines(file) if "key" in line}
    if own_commit() and git(RESULTS, "rev-parse", "--is-shallow-repository") == "false":
        assert recorded <= set(git(RESULTS, "rev-list", "HEAD").split())


def test_a_row_has_the_commits_of_its_runs():
    some = with_cells({"a": [80.0, 81.0, 82.0]})["s"]._replace(paper=None)
    runs = some.measured.rows["a", "all"]
    some.measured.rows["a", "all"] = [run._replace(commit=c * 40) for run, c in zip(runs, "aba", strict=True)]
    (row,) = [line for line in section(some).splitlines() if line.startswith("| a |")]
    assert row.endswith("| `aaaaaaaaaaaa`, `bbbbbbbbbbbb` |")


@pytest.mark.parametrize("folder", ["scaffold-momentum", "scaffold-networks"])
def test_the_best_evaluation_is_the_highest_accuracy(folder):
    """Also where the study was written by hand and does not say whether its metric is to be large or small."""
    found = measured(RESULTS / folder)
    values = [run.values for runs in found.rows.values() for run in runs if run.values]
    assert len(values) >= 15
    assert all(value["best"] >= max(value["last"], value["last 5"]) for value in values)


# --- verdicts ---------------------------------------------------------------------------------------------------------
def with_cells(values: dict[str, list[float]], chosen: str = "lr 0.1") -> dict[str, WithCells]:
    """A study "s" whose methods have, for each seed, the same value in all three summaries."""
    paper = Paper.model_validate(
        {"paper": "P", "tables": [{"table": 1, "what": "", "columns": ["c"], "rounds": [5], "rows": {"a": [80.0]}}]}
    )
    study = Study(name="s", experiment={}, methods={method: {"name": "fedavg"} for method in values})
    runs = {
        (method, "all"): [
            Run(seed, 5, chosen, dict.fromkeys(SUMMARIES, value), value, 5, 1.0, 1.0)
            for seed, value in enumerate(seeds)
        ]
        for method, seeds in values.items()
    }
    listed = Listed.model_validate(
        {"folder": "s", "title": "", "command": "", "compared": {"table": 1, "columns": {"all": "c"}}}
    )
    return {"s": WithCells(listed, Measured(study, runs, 0, []), paper)}


def verdict_of(studies: dict[str, WithCells], **criterion) -> str:
    return verdict(Claim.model_validate({"says": "", "folder": "s", **criterion}), studies).verdict


@pytest.mark.parametrize(
    ("better", "expected"), [(91.0, REPRODUCED), (90.4, TIE), (90.0, TIE), (89.6, TIE), (89.0, NOT_REPRODUCED)]
)
def test_an_order_by_a_margin(better, expected):
    some = with_cells({"a": [better], "b": [90.0], "c": [80.0]})
    assert verdict_of(some, order={"methods": ["a", "b"], "margin": 0.5}) == expected
    assert verdict_of(some, order={"methods": ["a", ["c", "b"]], "margin": 0.5}) == expected
    assert verdict_of(some, order={"methods": [["a", "b"], "c"], "margin": 0.5}) == REPRODUCED


def test_an_order_that_depends_on_the_summary_is_a_tie():
    some = with_cells({"a": [91.0], "b": [90.0]})
    run = some["s"].measured.rows["a", "all"][0]
    some["s"].measured.rows["a", "all"][0] = run._replace(values={**run.values, "last 5": 89.0})
    assert verdict_of(some, order={"methods": ["a", "b"], "margin": 0.5}) == TIE


def test_an_interval_over_seeds():
    """Two seeds differ by 1 ± 0.1, whose interval reaches 12.7 standard errors of 0.1 on both sides."""
    close = with_cells({"a": [91.1, 90.9], "b": [90.0, 90.0]})
    assert verdict_of(close, interval={"methods": ["a", "b"]}) == TIE
    far = with_cells({"a": [93.1, 92.9], "b": [90.0, 90.0]})
    assert verdict_of(far, interval={"methods": ["a", "b"]}) == REPRODUCED
    assert verdict_of(far, interval={"methods": ["b", "a"]}) == NOT_REPRODUCED
    assert verdict_of(with_cells({"a": [99.0], "b": [90.0]}), interval={"methods": ["a", "b"]}) == TIE
    assert t_interval([90.0, 92.0]) == "78.29 … 103.71"
    assert t_interval([90.0]) == "–"


def test_other_criteria():
    some = with_cells({"a": [80.6, 80.8], "b": [79.0]})
    assert verdict_of(some, near={"methods": ["a", "b"], "within": 2.0}) == REPRODUCED
    assert verdict_of(some, near={"methods": ["b", "a"], "within": 1.0}) == NOT_REPRODUCED
    assert verdict_of(some, least={"methods": ["a", "b"], "value": 79.0}) == REPRODUCED
    assert verdict_of(some, least={"methods": ["a", "b"], "value": 80.0}) == NOT_REPRODUCED
    assert verdict_of(some, chosen={"method": "a", "settings": {"all": "lr 0.1"}}) == REPRODUCED
    assert verdict_of(some, chosen={"method": "a", "settings": {"all": "lr 1.0"}}) == NOT_REPRODUCED
    alone = with_cells({"a": [80.6, 80.8]})
    assert verdict_of(alone, points={"within": 1.0}) == REPRODUCED
    assert verdict_of(alone, points={"within": 0.5}) == NOT_REPRODUCED


def test_a_method_near_the_best_of_several():
    some = with_cells({"a": [90.0], "b": [90.5], "c": [91.5]})
    assert verdict_of(some, near_best={"method": "a", "among": ["b", "c"], "within": 1}) == NOT_REPRODUCED
    assert verdict_of(some, near_best={"method": "a", "among": ["b", "c"], "within": 2}) == REPRODUCED
    assert verdict_of(some, near_best={"method": "c", "among": ["a", "b"], "within": 0}) == REPRODUCED


def test_an_order_of_what_is_lost_on_unseen_clients():
    """The means over the clients that are trained with are equal, and those over the others differ."""
    some = with_cells({"a": [90.0], "b": [90.0]})
    unseen = {"a": 0.5, "b": 0.75}
    rows = [Row("all", name, {0: Served(0.9, 0.9, 0.1, 0.5, unseen[name], 1.0, "s", {})}) for name in unseen]
    made = {"s": some["s"]._replace(measured=replace(some["s"].measured, clients=rows))}
    criterion = {"margin": 1, "of": "loss on unseen clients"}
    assert verdict_of(made, level="all", order={"methods": ["a", "b"], **criterion}) == REPRODUCED
    assert verdict_of(made, level="all", order={"methods": ["b", "a"], **criterion}) == NOT_REPRODUCED
    assert verdict_of(made, level="all", order={"methods": ["a", "b"], **criterion, "margin": 30}) == TIE


def test_an_interval_of_the_worst_tenth():
    """The worst tenth of "a" is above that of "b" by 20 and by 21 points, and the means are equal."""
    some = with_cells({"a": [90.0, 90.0], "b": [90.0, 90.0]})
    worst = {"a": (0.7, 0.71), "b": (0.5, 0.5)}
    rows = [
        Row("all", name, {seed: Served(0.9, 0.9, 0.1, one, 0.9, 1.0, "s", {}) for seed, one in enumerate(of_seeds)})
        for name, of_seeds in worst.items()
    ]
    made = {"s": some["s"]._replace(measured=replace(some["s"].measured, clients=rows))}
    for methods, expected in ((["a", "b"], REPRODUCED), (["b", "a"], NOT_REPRODUCED)):
        assert verdict_of(made, level="all", interval={"methods": methods, "of": "worst tenth"}) == expected
        assert verdict_of(made, level="all", interval={"methods": methods}) == TIE


def test_an_interval_over_clients():
    """Of one seed. Clients of "b" have 25 points less than those of "a", those of "c" are as often above as below."""
    some = with_cells({name: [90.0] for name in "abc"})
    clients = {"a": [0.5] * 8, "b": [0.25] * 8, "c": [0.25, 0.75] * 4}
    rows = [
        Row("all", name, {0: Served(0.9, 0.9, 0.1, 0.5, 0.9, 1.0, "s", dict(enumerate(values)))})
        for name, values in clients.items()
    ]
    made = {"s": some["s"]._replace(measured=replace(some["s"].measured, clients=rows))}
    for methods, expected in ((["a", "b"], REPRODUCED), (["b", "a"], NOT_REPRODUCED), (["a", "c"], TIE)):
        assert verdict_of(made, interval={"methods": methods, "of": "each client"}) == expected
    told = verdict(
        Claim.model_validate({"says": "", "folder": "s", "interval": {"methods": ["a", "b"], "of": "each client"}}),
        made,
    )
    assert told.evidence == "a − b: +25.00 (+25.00 … +25.00), 8 clients"


def test_a_rate_is_a_slope_over_levels():
    """Two seeds fall as x^-1/2 and as x^-0.3, and the mean of their slopes has an interval of 12.7 x 0.1 on each side;
    with the power 2 the slopes double."""
    some = with_cells({"a": [0.0, 0.0]})
    rows = some["s"].measured.rows
    (first, second) = rows.pop(("a", "all"))
    for x in (1.0, 4.0, 16.0):
        fallen = (first._replace(evaluations=(x**-0.5, x**-0.5)), second._replace(evaluations=(x**-0.3,)))
        rows["a", f"T = {x:g}"] = list(fallen)
        rows["a", f"both = {x:g}"] = [fallen[0], second._replace(evaluations=(x**-0.5,))]

    def decided(bound: float, name: str, **more: float) -> str:
        line = {"bound": bound, "levels": {f"{name} = {x}": x for x in (1, 4, 16)}}
        return verdict_of(some, rate={"method": "a", "within": 0.01, "lines": [line], **more})

    assert decided(-0.5, "both") == REPRODUCED
    assert decided(-0.52, "both") == NOT_REPRODUCED
    assert decided(-1.0, "both", power=2.0) == REPRODUCED
    assert decided(-1.02, "both", power=2.0) == NOT_REPRODUCED
    assert decided(-0.5, "T") == TIE
    assert decided(0.9, "T") == REPRODUCED
    assert decided(-1.7, "T") == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("third", "expected"),
    [(3.0, REPRODUCED), (2.5, REPRODUCED), (2.25, TIE), (1.75, TIE), (1.5, NOT_REPRODUCED), (math.nan, TIE)],
)
def test_values_that_rise_over_levels(third, expected):
    some = with_cells({"a": [0.0]})
    rows = some["s"].measured.rows
    (run,) = rows.pop(("a", "all"))
    for level, value in {"x": 1.0, "y": 2.0, "z": third, "v": 7.0}.items():
        rows["a", level] = [run._replace(values=dict.fromkeys(SUMMARIES, value))]
    line = {"method": "a", "margin": 0.5}
    assert verdict_of(some, rises={**line, "lines": [["x", "y", "z"]]}) == expected
    assert verdict_of(some, rises={**line, "lines": [["x", "y"], ["y", "z"]]}) == expected
    assert verdict_of(some, rises={**line, "lines": [["v", "y"], ["y", "z"]]}) == NOT_REPRODUCED


def test_methods_that_are_sooner():
    some = with_cells({"a": [0.0, 0.0], "b": [0.0, 0.0]})
    rows = some["s"].measured.rows
    for method, first, second in (("a", (5.0, 1.0, 0.1), (5.0, 2.0, 0.5)), ("b", (5.0, 2.0, 1.0), (5.0, 1.0, 1.0))):
        one, two = rows[method, "all"]
        rows[method, "all"] = [one._replace(evaluations=first), two._replace(evaluations=second)]
    assert verdict_of(some, sooner={"methods": ["a", "b"], "values": [0.6]}) == REPRODUCED
    assert verdict_of(some, sooner={"methods": ["a", "b"], "values": [1.0]}) == TIE  # sooner for the first seed alone
    assert verdict_of(some, sooner={"methods": ["a", "b"], "values": [5.0]}) == NOT_REPRODUCED


def test_claims_that_were_not_tried():
    assert verdict(Claim(says=""), {}).verdict == NOT_TRIED
    points = {"points": {"within": 1}}
    for wrong in ({"folder": "s"}, points, {"folder": "s", **points, "interval": {"methods": ["a", "b"]}}):
        with pytest.raises(ConfigError, match="a folder and one criterion, or neither"):
            validated(Claim, {"says": "", **wrong})


def test_coverage_counts_the_papers_rounds_alone():
    some = with_cells({"a": [80.5]})["s"]
    (one,) = compared(some)
    assert (one.published, one.ours, one.difference, one.full) == (80.0, 80.5, 0.5, True)
    assert some.paper is not None
    assert coverage([some], {"p": some.paper}).startswith("Of the 1 accuracies that the 1 papers print, 1 were")
    runs = some.measured.rows["a", "all"]
    runs[0] = runs[0]._replace(rounds=4)
    assert ", 0 were measured" in coverage([some], {"p": some.paper})


def test_provenance_has_the_different_texts_of_all_cells():
    config = "engine: {threads: 2}\n"
    one = {
        **{"processor": "AMD EPYC", "commit": "abc", "cards": [], "python": "3.11"},
        **{"packages": {"torch": "2.13", "ray": None}, "data": {"train.tsv": "0f"}},
    }
    other = {**one, "processor": "Xeon", "cards": ["H100"], "packages": {}}
    lines = [{"key": str(n), "config": config, "environment": each} for n, each in enumerate((one, other, one))]
    assert dict(provenance([*lines, {"search": "3"}])) == {
        "commit": "abc",
        "processor": "AMD EPYC / Xeon",
        "card": "none / H100",
        "threads": "2",
        "versions": "Python 3.11, torch 2.13 / Python 3.11",
        "data (SHA-256)": "`train.tsv` `0f`",
    }


def test_provenance_says_which_data_have_no_files():
    """Those that follow from a seed. The file of the digits was not recorded by earlier versions."""
    environment = {"processor": "AMD EPYC", "commit": "abc", "cards": [], "python": "3.11", "packages": {}, "data": {}}
    for workload, said in {
        "linear": "no files of data",
        "{name: noisy, of: {name: quadratic}}": "no files of data",
        "digits": "not recorded",
        "{name: auc, of: {name: digits}}": "not recorded",
    }.items():
        line = {"key": "1", "config": f"engine: {{threads: 1}}\nworkload: {workload}\n", "environment": environment}
        assert dict(provenance([line]))["data (SHA-256)"] == said


# --- pages whose sentences are written by hand ------------------------------------------------------------------------
@pytest.mark.parametrize("place", hand_written_pages(), ids=lambda place: place.stem)
def test_the_tables_of_a_page_are_what_the_cells_say(place: Path):
    text = place.read_text("utf-8")
    assert text == with_tables(place), "run: python -m tools.reproductions"
    assert [match[1] for match in TABLE.finditer(text)] == [*made_tables()[place.name]]


BY_HAND = {"robustness.md": ["lowest of five attacks"]}  # published figures
"""Page -> the second heads of its tables that are not made from cells. No other one may join them."""


def test_every_other_table_is_made_from_cells():
    generated = {PAGE, *PAGES}
    found = {}
    for place in sorted(set(RESULTS.glob("*.md")) - generated):
        lines = TABLE.sub("", place.read_text("utf-8")).splitlines()
        heads = [above for above, line in pairwise(lines) if re.fullmatch(r"\|( --- \|)+", line)]
        if heads:
            found[place.name] = [head.split(" | ")[1].strip(" |") for head in heads]
    assert found == BY_HAND


def one_study(runs: list[Run], metric: str = "eval/loss", best: str = "min") -> Measured:
    """A study with the method "a" at its only level."""
    study = Study.model_validate(
        {"name": "s", "experiment": {}, "methods": {"a": "fedavg"}, "report": {"metric": metric, "best": best}}
    )
    return Measured(study, {("a", "all"): runs}, 0, [], tried={("a", "all"): runs})


def timed(seed: int, values: list[float], reason: str = "") -> Run:
    """A run of one evaluation in every second round, of 3 visits and 4 virtual seconds each."""
    ends = np.arange(1, len(values) + 1)
    points = Points(2 * ends, np.array(values), 0.0 * ends, 0.0 * ends, 4.0 * ends, 3 * ends)
    last = {} if reason else dict.fromkeys(SUMMARIES, values[-1])
    final = float("nan") if reason else values[-1]
    return Run(seed, 8, f"lr {seed}", last, final, 0, 1.0, 1.0, tuple(values), "", points, reason, "eps; z = 1.5; x")


def test_cells_of_tables_by_hand():
    runs = [timed(0, [4.0, 2.0, 1.0]), timed(1, [4.0, 3.0, 0.5])]
    made = one_study(runs)

    def told(some: Measured = made, **keys: Any) -> str:
        return shown(Shown.model_validate({"method": "a", "folder": "s", **keys}), lambda _: some)

    assert told() == told(show="value") == "0.75"
    assert told(show="spread") == "0.75 ± 0.354"  # 0.5 / sqrt 2
    assert told(show="chosen") == "lr 0 / lr 1"
    assert told(show="trial", chosen="lr 1") == "0.5"
    assert told(show="noise") == "1.5"
    assert told(show="megabytes") == "1"
    assert told(show="text", text={"w": "word"}, word="w") == "word"
    assert told(show="rounds", target=2.0) == "5"  # the mean of 4 and 6
    assert told(show="visits", target=2.0) == "7.5"
    assert told(show="clock", target=2.0, form=".0f") == "10"
    assert told(show="clock", target=0.5) == "12 (1 of 2)"
    assert told(show="clock", target=0.1) == "–"
    assert told(show="clock", target=2.0, base={"target": 4.0}) == "2.5"  # 10 over 4
    assert told(show="pace", slots=6, unit=2.0) == "4"  # 4 seconds for 3 visits
    assert told(show="average", power=2.0) == f"{(21 / 3 + 25.25 / 3) / 2:.3g}"
    ended = one_study([timed(0, [0.5, 0.25], "diverged in round 5: a client"), timed(1, [0.5, 0.75])], "eval/accuracy")
    assert told(ended, form=".2f") == "0.75 (1 of 2)"
    assert told(ended, show="lowest", diverged=0.1) == "0.1"
    assert told(one_study([timed(0, [0.5], "diverged in round 5: a client")])) == "round 5"
    published = {"paper": "li", "table": 1, "column": "FMNIST, Non-IID-1", "row": "FedAvg"}
    assert told(show="published", published=published) == "90.3"


def test_a_slope_in_a_table():
    """Both seeds fall as x^-1/2 from 1 to 16, and one of them is twice the other: the slope has no interval."""
    rows = {
        ("a", f"T = {x}"): [timed(seed, [factor * x**-0.5]) for seed, factor in enumerate((1, 2))] for x in (1, 4, 16)
    }
    made = replace(one_study([]), rows=rows)
    one = {"show": "slope", "method": "a", "level": "T = {}", "over": ["1", "4", "16"], "folder": "s"}
    assert shown(Shown.model_validate(one), lambda _: made) == "−0.500 ± 0.000"
