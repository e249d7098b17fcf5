"""Reports: their numbers computed by hand, the same numbers in three forms, texts of users without effect as markup,
and a browser that shows the page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import experiment
from fedfleet.tune.comparison.findings import shared_target
from fedfleet.tune.comparison.labels import labels_of, numeric_settings
from fedfleet.tune.page.content import Axis, Chart, Marks, Page, PageSection, TableCell, numbers, shares, thinned
from fedfleet.tune.page.html import FOLDER, render, script
from fedfleet.tune.page.svg import band
from fedfleet.tune.report import markdown
from fedfleet.tune.report.charts import charts
from fedfleet.tune.report.files import write_page, write_report
from fedfleet.tune.report.findings import Findings, MeasuredRun, chosen_by, facts, findings, mean_curve, undecided
from fedfleet.tune.report.sensitivity import LINES, grids
from fedfleet.tune.report.statistics import front, holm, paired, reached, spread
from fedfleet.tune.report.tables import privacy, spread_as_text, tables
from fedfleet.tune.run_files import ADDED_UP
from fedfleet.tune.search.plan import plan
from fedfleet.tune.search.report import page_of as search_page
from fedfleet.tune.search.trial_store import Trial
from fedfleet.tune.study import kept_results
from fedfleet.tune.study.cells import cells as study_cells
from fedfleet.tune.study.cells import trials
from fedfleet.tune.study.folder import Points, StudyFolder
from fedfleet.tune.study.spec import Published, Report, load
from fedfleet.tune.units import evaluated_rows, in_words, setting, with_unit
from fedfleet.workloads.table import WORKLOADS

from .commands import invoke
from .small_study import written

NASTY = '<script>alert(1)</script> $x_1$ | **b** & ~~"c"~~'


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_spread_by_hand():
    """The numbers 1, 2, 6 have the mean 3, and squared deviations 4 + 1 + 9 = 14, so the variance is 14 / 2 = 7."""
    assert spread([1.0, 2.0, 6.0]) == (3.0, math.sqrt(7.0), 3)
    assert spread([1.0])[0] == 1.0
    assert math.isnan(spread([1.0]).std)
    assert spread([]).n == 0


def test_paired_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, t = 2 sqrt 3 at two degrees of freedom, for which
    p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14), and t(0.975) = 4.302653 (any table)."""
    found = paired({0: 2.0, 1: 4.0, 2: 6.0, 9: 5.0}, {0: 1.0, 1: 2.0, 2: 3.0, 8: 7.0})
    assert (found.difference, found.n) == (2.0, 3)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
    assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.low + found.high == pytest.approx(4.0)


def test_paired_without_a_spread():
    assert paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).p == 1.0
    assert math.isnan(paired({0: 2.0}, {0: 1.0}).p)


def test_equal_differences_have_no_interval():
    """Two seeds whose accuracies differ by one test row each are no evidence, although the formula of the t test has a
    p-value of 0 for them."""
    pair = paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert (pair.difference, pair.n) == (1.0, 2)
    assert (pair.low, pair.high) == (1.0, 1.0)
    assert math.isnan(pair.p)
    assert math.isnan(paired({0: 0.8 + 0.005, 1: 0.7 + 0.005}, {0: 0.8, 1: 0.7}).p)  # they differ in the last digits
    runs = [made(name, "", seed, 0.5 + 0.25 * (name == "A")) for name in "AB" for seed in (0, 1)]
    (table,) = [
        one for one in tables(Findings("", Report(best="max"), ["A", "B"], [("",)], runs)) if one.title == "Differences"
    ]
    assert cells(table) == [["A", "B", "25.0", "–", "2", "–"]]
    assert not any(cell.best for row in table.rows for cell in row)


@pytest.mark.parametrize(
    ("values", "digits", "text"),
    [
        ((0.0021, 0.0023), 1, "0.0022 ± 0.0001"),
        ((0.031,), 1, "0.031"),
        ((0.0,), 1, "0.0"),
        ((0.06, 0.08), 1, "0.1 ± 0.0"),
        ((1234.5,), 1, "1,234.5"),
        ((0.3,), 0, "0.30"),
    ],
)
def test_small_costs_are_not_zero(values: tuple[float, ...], digits: int, text: str):
    assert spread_as_text(values, digits) == text


def test_a_kept_value_is_equal_to_the_one_that_it_was():
    """Of equal methods the first one stands out and there is no difference, also if one of them was read from what was
    kept; a target is reached by a value that is the same in the digits that are kept."""
    values, place = [2 / 3, 17 / 18, 0.7 + 0.2], ("",)
    kept = [kept_results.number(value) for value in values]
    for first, other in ((values, kept), (kept, values)):
        runs = [made(name, "", i, one) for name, some in (("A", first), ("B", other)) for i, one in enumerate(some)]
        for best in ("max", "min"):
            found = Findings("", Report(best=best), ["A", "B"], [place], runs)
            assert found.leader(place) == "A"
            assert not any(found.better(*pair) for pair in zip(first, other, strict=True))
        both = paired(dict(enumerate(first)), dict(enumerate(other)))
        assert (both.difference, both.p) == (0.0, 1.0)
        runs = [run._replace(points=Points(*np.array([[1.0], [run.final], [1.0], [1.0]]))) for run in runs[2::3]]
        assert [shared_target(Findings("", Report(best="max"), ["A"], [place], [run])) for run in runs] == [0.9, 0.9]
        assert all(reached(run.points, target, found.better) for run in runs for target in (0.9, 0.7 + 0.2))
    assert found.better(0.5, 0.5 + 1e-9)


def test_holm_by_hand():
    """0.01 x 3, 0.02 x 2, 0.9 x 1, and never smaller than the one before; nan does not count."""
    assert holm([0.9, 0.01, math.nan, 0.02])[:2] == [0.9, pytest.approx(0.03)]
    assert holm([0.9, 0.01, math.nan, 0.02])[3] == pytest.approx(0.04)
    assert holm([0.04, 0.03]) == [pytest.approx(0.06), pytest.approx(0.06)]


def test_reached_and_front():
    points = Points(*(np.array(row, dtype=float) for row in ([2, 4, 6], [0.5, 0.8, 0.7], [10, 20, 30], [1, 2, 3])))
    points = points._replace(clock=np.array([100.0, 200.0, 300.0]), visits=np.array([5.0, 9.0, 14.0]))
    assert reached(points, 0.7, lambda a, b: a > b) == (4.0, 20.0, 2.0, 200.0, 9.0)
    assert reached(points, 0.5, lambda a, b: a > b) == (2.0, 10.0, 1.0, 100.0, 5.0)
    assert reached(points, 0.9, lambda a, b: a > b) is None
    assert reached(points, 0.6, lambda a, b: a < b) == (2.0, 10.0, 1.0, 100.0, 5.0)
    timeless = reached(points._replace(clock=None), 0.6, lambda a, b: a < b)
    assert timeless is not None
    assert math.isnan(timeless.clock)
    assert front([(1.0, 5.0), (2.0, 4.0), (3.0, 6.0), (3.0, 7.0)], lambda a, b: a > b) == [0, 3]
    assert front([(1.0, 5.0), (2.0, 4.0)], lambda a, b: a < b) == [0, 1]


# --- pages ------------------------------------------------------------------------------------------------------------
def made(method: str, place: str, seed: int, final: float, **more: Any) -> MeasuredRun:
    values = np.array([final / 2, final])
    points = Points(np.array([1.0, 2.0]), values, np.array([1e6, 2e6]), np.array([0.5, 1.0]))
    settings = {"method.matrix_lr": 0.1, "method.vector_lr": 0.01}
    chosen = "matrix_lr 0.1, vector_lr 0.01"
    run = MeasuredRun(method, (place,), seed, "finished", "", settings, chosen, points, final, 1.0, 1.0, 1.0)
    return run._replace(**more)


@pytest.fixture
def found() -> Findings:
    """Findings of two methods, one of them with a name full of markup, at two levels, with one diverged run and the
    trials of a 2 x 2 grid."""
    places = [("β = 10",), ("β = 0.1",)]
    runs = [
        made(method, place[0], seed, value + seed / 100)
        for method, value in ((NASTY, 0.6), ("FedMuon-BC", 0.8))
        for place in places
        for seed in (0, 1, 2)
    ]
    bad = {"status": "diverged", "reason": NASTY, "final": math.nan}
    runs[0] = runs[0]._replace(**bad)
    trials = [
        made("FedMuon-BC", "β = 10", 0, (a + b) / 2, settings={"method.matrix_lr": a, "method.vector_lr": b})
        for a in (0.1, 0.2)
        for b in (0.001, 0.4)
    ]
    trials[0] = trials[0]._replace(**bad)
    published = Published(source=NASTY, values={"FedMuon-BC": {"β = 10": 85.5}}, claims=(NASTY,))
    return Findings(
        NASTY,
        Report(best="max", targets=(0.7,)),
        [NASTY, "FedMuon-BC"],
        places,
        runs,
        {"β": ["β = 10", "β = 0.1"]},
        trials,
        NASTY,
        (NASTY,),
        published=published,
        tuned="cell",
    )


def cells(table: PageSection) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


SEEDED = ("quadratic", "linear", "logistic", "saddle")


@pytest.mark.parametrize("name", SEEDED)
def test_what_a_workload_is_evaluated_on_is_what_its_table_says(name: str):
    """The training rows, rows of their own, or one row that has the optimum of the objective."""
    split = Registry().build("WORKLOADS", {"name": name}, "workload").split(0, 4)
    first = next(iter(split.test.values()))
    same = split.test.keys() == split.train.keys() and all(
        np.array_equal(split.test[column], split.train[column]) for column in split.test
    )
    assert WORKLOADS[name].rows == ("training" if same else "" if len(first) == 1 else "test")
    assert {other for other, entry in WORKLOADS.items() if entry.rows != "test"} <= set(SEEDED)


def test_a_metric_is_called_by_the_rows_that_it_is_of():
    noisy = {"name": "noisy", "of": {"name": "noisy", "of": "quadratic"}}
    assert [evaluated_rows([one]) for one in ("linear", noisy, "digits", {"name": "of_a_plug_in"})] == [
        *("training", "", "test", "test")
    ]
    assert evaluated_rows(["linear", {"name": "linear", "dim": 3}]) == "training"
    assert evaluated_rows(["linear", "digits"]) == ""
    told = {rows: (in_words("eval/loss", rows), with_unit("eval/accuracy", rows)) for rows in ("test", "training", "")}
    assert told == {
        "test": ("test loss", "test accuracy (%)"),
        "training": ("training loss", "training accuracy (%)"),
        "": ("loss", "accuracy (%)"),
    }
    for rows in told:  # whose names say it themselves
        assert in_words("train/loss", rows) == "training loss"
        assert in_words("eval/validation_auc", rows) == "validation AUC"
        assert in_words("eval/own/test_loss", rows) == "own test loss"


def test_a_report_calls_a_metric_by_the_rows_that_it_is_of(found: Findings, tmp_path: Path):
    of_rows = replace(found, rows="training")
    assert (of_rows.what, of_rows.head) == ("training accuracy", "Training accuracy (%)")
    write_page(of_rows, tmp_path / "report.html")
    for file in tmp_path.rglob("*.*"):
        text = file.read_text("utf-8")
        assert "est accuracy" not in text
        assert ("raining accuracy" in text) == (
            file.stem.startswith(("report", "curves", "levels", "bytes", "seconds"))
        )


def test_tables_by_hand(found: Findings):
    by_title = {table.title: table for table in tables(found)}
    assert cells(by_title["Results"]) == [
        [NASTY, "61.5 ± 0.7 (2 of 3)", "61.0 ± 1.0"],
        ["FedMuon-BC", "81.0 ± 1.0", "81.0 ± 1.0"],
    ]
    assert [[cell.best for cell in row] for row in by_title["Results"].rows] == [[False] * 3, [False, True, True]]
    assert cells(by_title["Comparison with the published numbers"]) == [
        ["FedMuon-BC", "β = 10", "85.5", "81.0", "-4.5"]
    ]
    assert cells(by_title["Costs of reaching 70.0 % test accuracy"])[1] == [
        *("β = 10", "FedMuon-BC", "3 of 3", "2 ± 0", "2.0 ± 0.0", "1.0 ± 0.0")
    ]
    differences = cells(by_title["Differences"])
    assert differences[0][:4] == ["β = 10", "FedMuon-BC", NASTY, "20.0"]
    assert differences[0][5] == "2"
    assert cells(by_title["Not finished"]) == [[NASTY, "β = 10", "0", "diverged", NASTY]]
    rounds, mean, std = mean_curve(found.at("FedMuon-BC", ("β = 10",))) or ((), (), ())
    assert list(rounds) == [1, 2]
    assert list(mean) == [pytest.approx(0.405), pytest.approx(0.81)]
    assert list(std) == [pytest.approx(0.005), pytest.approx(0.01)]


def test_the_best_evaluations_on_test_rows_have_a_table_of_their_own(found: Findings):
    """Of two methods whose runs end below their best evaluations; other tables have the last ones."""
    title = "As published, optimistic"
    assert title not in {table.title for table in tables(found)}

    def falling(run: MeasuredRun) -> MeasuredRun:
        assert run.points
        return run._replace(points=run.points._replace(values=run.points.values[::-1]), final=run.final / 2)

    runs = [falling(run) for run in found.runs]
    asked = replace(found, runs=runs, report=found.report.model_copy(update={"best_of_test": True}))
    by_title = {table.title: table for table in tables(asked)}
    assert cells(by_title[title]) == [
        [NASTY, "61.5 ± 0.7", "61.0 ± 1.0"],
        ["FedMuon-BC", "81.0 ± 1.0", "81.0 ± 1.0"],
    ]
    assert "the best evaluation of each run on test rows" in by_title[title].note
    assert [row[1] for row in cells(by_title["Results"])] == ["30.8 ± 0.4 (2 of 3)", "40.5 ± 0.5"]
    assert not any(cell.best for row in by_title[title].rows for cell in row)


class Strict(HTMLParser):
    """A parser that checks that elements are closed in order, and collects the texts of the data tables, ids and
    scripts."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        of = dict(attrs)
        self.ids += [of["id"] or ""] if "id" in of else []
        assert not any(name.startswith("on") for name in of)
        for name in ("src", "href", "xlink:href"):
            assert (of.get(name) or "#").startswith("#"), f"{tag} {name}={of[name]}"
        if tag == "meta" and of.get("http-equiv") == "Content-Security-Policy":
            self.policy = of["content"] or ""
        if tag == "table":
            self.in_data = of.get("class") == "data"
        if tag == "script":
            self.scripts.append("")
        elif tag == "tr" and self.in_data:
            self.rows.append([])
        elif tag in ("td", "th") and self.in_data:
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] in ("td", "th") and self.in_data:
            self.rows[-1][-1] += data


def parsed(page: str) -> Strict:
    made = Strict()
    made.feed(page)
    assert made.open == []
    return made


def test_html_is_whole_and_escaped(found: Findings, tmp_path: Path):
    """The page has only its own two scripts, whose digests are in its policy, and fetches nothing."""
    write_page(found, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen = parsed(page)
    assert not seen.seen & {"b", "iframe", "img", "image", "link", "object"}
    assert len(set(seen.ids)) == len(seen.ids), "an id is used twice"
    assert seen.rows == [row for table in tables(found) for row in [table.heads, *cells(table)]]
    data, library, own = seen.scripts
    assert (library, own) == (script("plotly/plotly-basic.min.js"), script("charts.js"))
    allowed = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, own)]
    assert seen.policy.split("; ")[0] == "default-src 'none'"
    assert seen.policy.endswith("script-src " + " ".join(f"'sha256-{one}'" for one in allowed))
    assert "<" not in data
    assert "http" not in page.replace(library, "").replace("http-equiv", "")
    assert {"Learning curves", "Sensitivity"} <= set(re.findall(r"<h2>(.*?)</h2>", page))
    assert len(page.encode()) < 1_300_000


def test_the_library_is_the_published_one():
    """The digest in the README beside it is that of the package plotly.js-basic-dist-min in the registry of npm."""
    folder = FOLDER / "plotly"
    digest = hashlib.sha256((folder / "plotly-basic.min.js").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
    assert "</script" not in script("plotly/plotly-basic.min.js")


def section_of(found: Findings, title: str) -> Any:
    (one,) = [one for one in charts(found).values() if one.title == title]
    return one


def files_of(found: Findings) -> dict[str, str]:
    """Name of a chart of the Markdown page -> its SVG."""
    _, drawn = markdown.text_of(found, tables(found), charts(found), "charts")
    return drawn


def test_a_table_says_what_the_value_of_a_run_is(found: Findings):
    def note(report: Report) -> str:
        return next(iter(tables(replace(found, report=report)))).note

    assert "over seeds. The best value" in note(Report())
    assert "over seeds, each the mean of its last 3 evaluations. The best value" in note(Report(last=3))
    assert "over seeds, each the best of its evaluations. The best value" in note(Report(best_round=True))


def test_interactive_charts_by_hand(found: Findings):
    """The mean of 0.8, 0.81 and 0.82 is 81.0 %, half of it after round 1; the deviations are 1.0 and 0.5."""
    first, second = section_of(found, "Learning curves").charts
    curve = first.series[1]
    assert (curve.name, curve.style, list(curve.mean), list(curve.std)) == ("FedMuon-BC", 1, [40.5, 81.0], [0.5, 1.0])
    assert curve.x == {"round": [1.0, 2.0], "MB up and down": [1.0, 2.0], "seconds": [0.5, 1.0]}
    assert curve.seeds["seed 2"] == [41.0, 82.0]
    assert list(first.series[0].seeds) == ["seed 1", "seed 2"], "the diverged run is shown"
    assert second.title == "β = 0.1"

    (heat,) = section_of(found, "Test accuracy by method and level").maps
    assert [[cell.text for cell in row] for _, row in heat.rows] == [["61.5", "61.0"], ["81.0", "81.0"]]
    assert [cell.best for cell in heat.rows[1][1]] == [True, True]
    assert [cell.share for cell in heat.rows[0][1]] == [pytest.approx(0.025), 0.0]
    assert heat.rows[1][1][0].more == "FedMuon-BC, β = 10: 81.0 ± 1.0, seeds: 3"

    (paper,) = section_of(found, "The published numbers beside ours").charts
    theirs, ours, _ = paper.series
    assert (paper.title, list(theirs.x), list(ours.x), list(ours.dx)) == ("β = 10", [85.5], [81.0], [1.0])

    for title, cost in (("Test accuracy against bytes", 2.0), ("Test accuracy against seconds", 1.0)):
        line, *methods = section_of(found, title).charts[0].series
        assert [(list(one.x), list(one.y)) for one in methods] == [([cost], [61.5]), ([cost], [81.0])]
        assert list(line.y) == [81.0], "only one of two methods with equal costs is on the front"

    (grid,) = section_of(found, "Sensitivity").maps
    assert [[cell.text for cell in row] for _, row in grid.rows] == [["×", "25.0"], ["10.1", "30.0"]]
    assert [cell.best for cell in grid.rows[1][1]] == [False, True]


def test_a_setting_among_many_has_a_chart(found: Findings):
    """Each setting of a grid over three settings has a chart. At matrix_lr 0.1 the best of 10 and 20 is 20, at 0.2 the
    best of 30 and 40 is 40; the diverged point is a cross at the height of the worst value."""
    points = {(0.1, "a", True): 0.1, (0.1, "b", True): 0.2, (0.2, "a", True): 0.3, (0.2, "b", False): 0.4}
    names = ("method.matrix_lr", "method.kind", "method.flag")
    trials = [
        made("FedMuon-BC", "β = 10", 0, value, settings=dict(zip(names, point, strict=True)))
        for point, value in points.items()
    ]
    lost = dict(zip(names, (0.3, "a", False), strict=True))
    trials.append(trials[0]._replace(status="diverged", final=math.nan, settings=lost))
    figures = section_of(replace(found, trials=trials), "Sensitivity").charts
    assert [figure.x.title for figure in figures] == ["matrix_lr", "kind", "flag"]
    assert [(figure.x.log, figure.x.labels) for figure in figures] == [
        *((True, ()), (False, ("a", "b")), (False, ("False", "True")))
    ]
    line, marks, best, lost = figures[0].series
    assert (list(line.x), list(line.y)) == ([0.1, 0.2, 0.3], [20.0, 40.0, None])
    assert list(marks.y) == [10.0, 20.0, 30.0, 40.0]
    assert (list(best.x), list(best.y), list(lost.x), list(lost.y)) == ([0.2], [40.0], [0.3], [10.0])


SGD, ADAM = {"name": "sgd", "lr": 0.1}, {"name": "adam", "lr": 0.5}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        pytest.param([None, 1.0], [1.0, "None"], marks=pytest.mark.long),
        ([[8], [16, "$x_{$"]], ['[16, "$x_{$"]', "[8]"]),
        pytest.param(
            [SGD, ADAM], ['{"lr": 0.1, "name": "sgd"}', '{"lr": 0.5, "name": "adam"}'], marks=pytest.mark.long
        ),
        ([True, 1, "auto", math.inf], [1, "True", "auto", "inf"]),
    ],
)
def test_grids_over_values_of_all_kinds(found: Findings, tmp_path: Path, values: list[Any], parts: list[Any]):
    """Each value of a grid is a point of its own, over one setting and over two, and so is each level of an axis."""
    name = "a.setting.with.a.long.name"
    one = [made("FedMuon-BC", "β = 10", 0, i / 10, settings={name: value}) for i, value in enumerate(values)]
    two = [
        made("FedMuon-BC", "β = 0.1", 0, (i + j) / 10, settings={"x": x, "y": y})
        for i, x in enumerate(values)
        for j, y in enumerate([*values, 0.5])
    ]
    axes = {name: [f"{name} = {value}" for value in values] for name in ("x", "y")}
    levels = [made("FedMuon-BC", "", 0, 0.5)._replace(place=(x, y)) for x in axes["x"] for y in axes["y"]]
    line, heat = grids(replace(found, trials=[*one, *two]))
    assert (line.ordered(0), len(line.values)) == (parts, len(values))
    assert (heat.ordered(0), len(heat.values)) == (parts, len(values) * (len(values) + 1))
    by_axes = replace(
        found, methods=["FedMuon-BC"], places=[r.place for r in levels], axes=axes, runs=levels, trials=[]
    )
    (of_axes,) = grids(by_axes)
    assert len(of_axes.values) == len(values) ** 2
    for given in (replace(found, trials=[*one, *two]), by_axes):
        write_page(given, tmp_path / "report.html")
    svg = files_of(replace(found, trials=one))["sensitivity-1"]
    told = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]
    assert name in told
    assert all(setting(part).split(" ")[0] in " ".join(told) for part in parts)


def with_statuses(found: Findings, *statuses: str) -> Findings:
    """The findings with trials that differ in one setting at one level, and in two settings at the other one."""
    one, two = [], []
    for i, status in enumerate(statuses, 1):
        final = 0.5 if status == "finished" else math.nan
        one.append(made("FedMuon-BC", "β = 10", 0, final, settings={"x": i}, status=status))
        two += [made("FedMuon-BC", "β = 0.1", 0, final, settings={"x": i, "y": y}, status=status) for y in (1.0, 2.0)]
    return replace(found, trials=[*one, *two])


def test_only_a_run_that_diverged_is_said_to_have(found: Findings):
    """A failed run has a mark of its own, and one that has not been run has none."""
    mixed = with_statuses(found, "finished", "missing", "failed", "diverged")
    section = section_of(mixed, "Sensitivity")
    told = "The best point is framed; × stands for a diverged run; △ stands for a failed run."
    assert section.note == f"Mean over seeds of every point that was run. {told} {LINES}"
    (heat,) = section.maps
    assert [(row, cells[0].text, cells[0].more) for row, cells in heat.rows] == [
        ("1", "50.0", "x 1, y 1: 50.0"),
        ("3", "△", "x 3, y 1: failed"),
        ("4", "×", "x 4, y 1: diverged"),
    ]
    series: Any = section.charts[0].series
    *_, diverged, failed = series
    assert (list(diverged.x), list(diverged.texts)) == ([4], ["x 4\ndiverged"])
    assert (list(failed.x), list(failed.texts)) == ([3], ["x 3\nfailed"])
    assert diverged.symbol != failed.symbol
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", files_of(mixed)["sensitivity-1"])
    assert (texts.count("×"), texts.count("△")) == (2, 2)  # a point has two values of y


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        (("finished", "missing", "finished"), "framed."),
        (("finished", "failed"), "framed; △ stands for a failed run."),
        (("finished", "diverged"), "framed; × stands for a diverged run."),
    ],
)
def test_a_note_explains_the_marks_that_occur(found: Findings, statuses: tuple[str, ...], told: str):
    some = with_statuses(found, *statuses)
    assert section_of(some, "Sensitivity").note.endswith(f"The best point is {told} {LINES}")


def test_one_seed_of_a_point_may_be_missing(found: Findings):
    """Its mean is that of the seeds that were run, and a diverged seed says more than a failed one."""
    first = made("FedMuon-BC", "β = 10", 0, 0.5, settings={"x": 1})
    nothing = {"final": math.nan, "points": None}
    trials = [
        *(first, first._replace(seed=1, status="missing", **nothing)),
        *(run._replace(settings={"x": 2}) for run in (first, first._replace(seed=1, status="failed", **nothing))),
        *(first._replace(settings={"x": 3}, status=status, **nothing) for status in ("failed", "diverged")),
        first._replace(settings={"x": 4}, **nothing),  # it has not measured the metric
    ]
    (grid,) = grids(replace(found, trials=trials))
    assert grid.values[1,] == 0.5
    assert grid.lost == {(2,): "failed", (3,): "diverged"}
    assert set(grid.values) == {(1,), (2,), (3,)}


def test_axes_of_which_nothing_was_run_have_no_chart(found: Findings, tmp_path: Path):
    axes = {name: [f"{name} = 1", f"{name} = 2"] for name in ("x", "y")}
    places = [(x, y) for x in axes["x"] for y in axes["y"]]
    runs = [made("FedMuon-BC", "", 0, math.nan, status="missing")._replace(place=place) for place in places]
    runs += [made(NASTY, "", 0, 0.5)._replace(place=place) for place in places]
    half = replace(found, axes=axes, places=places, runs=runs, trials=[])
    assert [grid.title for grid in grids(half)] == [NASTY]
    write_page(half, tmp_path / "report.html")


def test_a_page_without_charts_has_no_library():
    """Also, texts cannot end the element with the JSON, and numbers that are not finite become null in it."""
    page = render(Page(NASTY, [], [PageSection("One", "", ["a"], [[TableCell(NASTY)]])], problem=NASTY))
    assert len(page) < 40_000
    assert parsed(page).rows == [["a"], [NASTY]]
    assert numbers([1 / 3, math.nan, math.inf]) == [0.333333, None, None]
    assert shares([3.0, 1.0, math.nan], False) == [0.0, 1.0, None]
    assert list(thinned(1001))[:2] == [0, 3]
    assert list(thinned(1001))[-1] == 1000


def unescaped(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", cell.strip().removeprefix("**").removesuffix("**"))


def test_markdown_has_the_same_numbers(found: Findings, tmp_path: Path):
    write_page(found, tmp_path / "report.html")
    page = (tmp_path / "report.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| ")]
    told = [[unescaped(cell) for cell in row] for row in rows if set("".join(row)) != {" ", "-"}]
    flat = " ".join(NASTY.split())
    expected = [row for table in tables(found) for row in [table.heads, *cells(table)]]
    assert told == [[cell.replace(NASTY, flat) for cell in row] for row in expected]
    assert re.search(r"(?<!\\)[$~<]", page.replace("<br>", "")) is None  # neither formulas, struck text nor HTML
    shown = re.findall(r"!\[.*?\]\((charts/.*?)\)", page)
    assert shown
    assert all((tmp_path / path).is_file() for path in shown)
    assert sorted(shown) == sorted(f"charts/{path.name}" for path in (tmp_path / "charts").iterdir())


def test_charts_show_what_there_is(found: Findings):
    drawn = files_of(found)
    assert {"curves-1", "curves-2", "levels-1", "bytes-1", "bytes-2", "sensitivity-1"} <= set(drawn)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn["sensitivity-1"])
    assert {"×", "25.0", "30.0", "0.001"} <= set(texts)  # (0.1, 0.001) diverged; with 0.4, halves of the sums
    assert "5.0" not in texts


def test_runs_that_did_not_finish_are_in_no_table(found: Findings):
    """One of them reached the target before it diverged, and has sent less than the others."""
    first = found.runs[-1]
    early = first._replace(status="diverged", reason="round 3", final=math.nan, up=0.0, down=0.0)
    less = replace(found, runs=[*found.runs[:-1], early])
    by_title = {table.title: cells(table) for table in tables(less)}
    assert [
        row[2] for row in by_title["Costs of reaching 70.0 % test accuracy"] if row[:2] == ["β = 0.1", "FedMuon-BC"]
    ] == ["2 of 3"]
    assert "±" in by_title["Costs"][1][1]
    assert by_title["Costs"][1][1].endswith("± 0.0")


NO_VALUE = "the first point, since none has a value in all its trials"


@pytest.mark.parametrize(("over", "chosen"), [(1, "– (1 of 4 trials)"), (4, f"rule.lr 0.1 ({NO_VALUE})")])
def test_a_choice_is_made_when_all_its_trials_have_ended(tmp_path: Path, over: int, chosen: str):
    """A choice for both seeds of a level, from two points, in the folder of a study that was interrupted. The
    trial with the chosen point is the cell. No trial was evaluated, as if all of them had diverged."""
    folder = StudyFolder(tmp_path / "study")
    folder.keep(load(written(tmp_path, tune={"each": "level"})))
    for number, cell in enumerate(trials(folder.study)):
        if number < over or cell.place != ("beta = 0.5",):
            folder.of(cell).mkdir(parents=True)
            (folder.of(cell) / "result.json").write_text('{"rounds": 6}')
    found = findings(folder)
    table = next(table for table in tables(found) if table.title == "Settings")
    assert cells(table)[0] == ["FedAvg", "beta = 0.5", chosen]
    assert {run.status for run in found.at("FedAvg", ("beta = 0.5",))} == {"missing" if over < 4 else "finished"}
    ended = "2 of 8 cells and 5 of 8 trials" if over < 4 else "4 of 8 cells and 8 of 8 trials"
    assert found.unfinished == f"This study is not finished: {ended} have ended."
    assert found.unfinished in write_report(folder)
    assert found.unfinished in (folder.path / "report.md").read_text("utf-8")


@pytest.mark.parametrize(("seeds", "chosen"), [([1], f"rule.lr 0.1 ({NO_VALUE})"), ([0, 1], "rule.lr 0.01")])
def test_a_point_with_a_value_for_some_of_the_seeds_is_not_chosen(tmp_path: Path, seeds: list[int], chosen: str):
    """The first point has a value for seed 0 only, the second one for `seeds`."""
    folder = StudyFolder(tmp_path / "study")
    folder.keep(load(written(tmp_path, tune={"each": "level"})))
    for cell in trials(folder.study):
        folder.of(cell).mkdir(parents=True)
        (folder.of(cell) / "result.json").write_text('{"rounds": 6}')
        if cell.seed in ([0] if cell.settings["method.rule.lr"] == 0.1 else seeds):
            columns = {"round": [6], "eval/accuracy": [0.5], **{name: [1.0] for name in ADDED_UP}}
            pq.write_table(pa.table(columns), folder.of(cell) / "rounds.parquet")
    table = next(table for table in tables(findings(folder)) if table.title == "Settings")
    assert cells(table)[0] == ["FedAvg", "beta = 0.5", chosen]


def test_the_shorter_trials_of_a_reduced_study_make_its_choices(tmp_path: Path):
    reduced = load(written(tmp_path, tune={"each": "level", "rounds": 4}), reduced={"scale": 0.5})
    folder = StudyFolder(tmp_path / "study")
    folder.keep(reduced)
    for cell in trials(folder.study):
        folder.of(cell).mkdir(parents=True)
        (folder.of(cell) / "result.json").write_text('{"rounds": 2}')
    assert {(why.why, why.over) for why in undecided(folder, folder.study).values()} == {(NO_VALUE, True)}


def test_every_set_of_versions_is_said_once(tmp_path: Path):
    folder, study = StudyFolder(tmp_path / "out"), load(written(tmp_path))
    for place, cell in enumerate(some := study_cells(study)):
        folder.of(cell).mkdir(parents=True)
        environment = {"packages": {"torch": f"2.{min(place, 1)}"}, "python": "3.13"}
        (folder.of(cell) / "environment.json").write_text(json.dumps(environment))
    assert [text for text in facts(folder, some) if "torch" in text] == [
        "torch 2.0, Python 3.13",
        "torch 2.1, Python 3.13",
    ]


@pytest.mark.parametrize(
    ("tune", "says"),
    [
        ({}, "by the reported metric on the test set"),
        ({"metric": "train/loss"}, "by train/loss"),
        ({"metric": "train/loss", "last": 3}, "by train/loss, as the mean of the last 3 evaluations"),
        (
            {"seeds": [7, 8], "rounds": 3},
            "on the test set, in trials with seeds 7, 8, in trials of 3 rounds",
        ),
    ],
)
def test_what_decided_is_said(tmp_path: Path, tune: dict[str, Any], says: str):
    study = load(written(tmp_path, tune={"each": "level", **tune}))
    assert chosen_by(study).endswith(says)


def test_trials_of_a_workload_without_test_rows_are_not_said_to_have_any(tmp_path: Path):
    experiment = {"workload": "linear", "federation": {"clients": 20, "cohort": 20}, "evaluate": {"every": 1}}
    study = load(written(tmp_path, tune={"each": "level"}, experiment=experiment, axes={}))
    assert chosen_by(study) == "by the reported metric on the training rows"


def test_published_numbers_have_the_digits_of_the_metric(found: Findings):
    runs = [run._replace(final=1.2345678) for run in found.runs]
    published = Published(values={"FedMuon-BC": {"β = 10": 0.0456}})
    losses = replace(found, runs=runs, report=Report(metric="eval/loss", best="min"), published=published, paper="")
    (table,) = [t for t in tables(losses) if t.title == "Comparison with the published numbers"]
    assert cells(table) == [["FedMuon-BC", "β = 10", "0.0456", "1.235", "+1.189"]]
    assert table.note.startswith("Test loss. ")


def test_other_files_beside_a_report_stay(found: Findings, tmp_path: Path):
    (tmp_path / "charts").mkdir()
    for name in ("fig1.tex", "mine.svg", "curves-77.svg"):
        (tmp_path / "charts" / name).write_text("x")
    write_page(found, tmp_path / "report.html")
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    assert {"fig1.tex", "mine.svg", "curves-1.svg"} <= names
    assert "curves-77.svg" not in names


def test_the_band_on_a_logarithmic_scale():
    """By hand: 4 with a deviation of 12 reaches to 16, four times as far up, and so to 1, four times as far down. Where
    the deviation is small, both scales have nearly the same band. 0 has no place on a logarithmic scale."""
    mean, std = np.array([4.0, 100.0, 0.0]), np.array([12.0, 1.0, 0.0])
    assert [edge.tolist() for edge in band(mean, std, log=False)] == [[-8, 99, 0], [16, 101, 0]]
    low, high = band(mean, std, log=True)
    assert low.tolist() == [1, pytest.approx(99, abs=0.01), 0]
    assert high.tolist() == [16, 101, 0]
    means = np.linspace(0.001, 1.0, 1000)  # some are below their square divided by themselves, by rounding
    assert (means**2 / means > means).any()
    assert band(means, np.zeros(1000), log=True)[0].tolist() == means.tolist()


def test_no_chart_has_a_band_at_the_bottom_of_a_logarithmic_scale(found: Findings):
    """Three seeds of 0.001, 0.001 and 1 have a deviation of 0.58, above their mean of 0.33."""
    runs = []
    for run, value in zip(found.runs[-3:], (0.001, 0.001, 1.0), strict=True):
        assert run.points is not None
        runs.append(run._replace(points=run.points._replace(values=np.array([value, value]))))
    spread_out = replace(found, runs=runs, report=Report(best="max", log=True))
    svg = files_of(spread_out)["curves-1"]
    area = svg[svg.index("FillBetween") :]
    (corners,) = re.findall(r' d="([^"]*)"', area)[:1]
    moved = float(re.findall(r'<use [^>]*y="([^"]*)"', area)[0])
    heights = {moved + float(y) for y in re.findall(r"[ML] \S+ (\S+)", corners)}
    assert len(heights) == 2
    assert 0 < min(heights) < max(heights) < float(re.findall(r'viewBox="\S+ \S+ \S+ (\S+)"', svg)[0])


def on_a_clock(found: Findings) -> Findings:
    """The same findings on a virtual clock: round 1 ends after 100 to 102 s, round 2 after 200 to 204 s."""
    runs = []
    for run in found.runs:
        assert run.points is not None
        clock = (100.0 + run.seed) * run.points.rounds
        runs.append(run._replace(points=run.points._replace(clock=clock, visits=20 * run.points.rounds)))
    return replace(found, runs=runs)


def test_runs_on_a_virtual_clock(found: Findings):
    """They have curves over it, the virtual seconds and client visits to a target, and a target of their own."""
    assert "clock-1" not in files_of(found)
    timed = on_a_clock(found)
    over = {name: svg for name, svg in files_of(timed).items() if name.startswith("clock")}
    assert set(over) == {"clock-1", "clock-2"}
    assert "virtual seconds" in over["clock-1"]
    of_target, costs = (table for table in tables(timed) if table.heads[-1] == "virtual seconds")
    assert of_target.heads[-2:] == ["client visits", "virtual seconds"]
    assert cells(of_target)[1][-2:] == ["40 ± 0", "202 ± 2"]  # 0.8, 0.81 and 0.82 reach 0.7 in round 2
    assert cells(costs)[1][-1] == "202.0 ± 1.8"
    assert shared_target(timed) == 0.6  # of 0.60 … 0.82; the run that diverged does not count
    lower = replace(timed, report=Report(best="min"))
    assert shared_target(lower) == 0.41  # the first values are half of the last ones


def test_labels_have_what_was_chosen_of_a_pace():
    """Paces of different names have different keys, whose defaults would fill the labels."""
    paces: list[dict[str, Any]] = [{}, {"select": 1.3}, {"name": "buffered", "buffer": 4}, {"name": "fedasync"}]
    made = [
        experiment({"workload": "digits", "method": "fedavg", "systems": {}, "federation": {"pace": pace}}).plain()
        for pace in paces
    ]
    labels = labels_of([numeric_settings(data) for data in made])
    chosen = ["", ", pace.select 1.3", ", pace.buffer 4, pace buffered", ", pace fedasync"]
    assert labels == [f"fedavg{text}" for text in chosen]


# --- a browser --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is here; install Debian's chromium")
    return found


def browse(chromium: str, page: Path, *more: str) -> subprocess.CompletedProcess[str]:
    profile = page.parent / "profile"
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}")
    return subprocess.run([chromium, *fixed, *more, page.as_uri()], capture_output=True, text=True, timeout=500)


WATCH = """<script>
const told = {};
const wait = () => new Promise(done => setTimeout(done, 400));
addEventListener("load", async () => {
  await wait();
  const plots = [...document.querySelectorAll(".plot")], click = found => found.click();
  const titles = () => [...plots[0].querySelectorAll(".xtitle")].map(one => one.textContent);
  told.inner = innerWidth;
  told.scroll = document.documentElement.scrollWidth;
  told.charts = plots.map(plot => plot.querySelector(".main-svg").getBoundingClientRect().width);
  told.ranges = plots.slice(0, 2).map(plot => plot.layout.yaxis.range);
  told.before = [plots[0].data.length, titles(), getComputedStyle(document.body).backgroundColor];
  click(document.querySelector("[data-series]"));
  click(document.querySelector("[data-value=seconds]"));
  click(document.querySelector("[data-flip='log y']"));
  click(document.querySelector("table.data th:nth-child(2)"));
  click(document.getElementById("theme"));
  await wait();
  told.after = [plots[0].data.length, titles(), getComputedStyle(document.body).backgroundColor];
  told.log = plots[0].layout.yaxis.type;
  told.pressed = [...document.querySelectorAll("[data-series]")].map(one => one.getAttribute("aria-pressed"));
  told.first = document.querySelector("table.data tbody td:nth-child(2)").textContent;
  told.curves = [...plots[0].querySelectorAll(".scatterlayer .js-line")].map(one => one.getAttribute("d").length);
  parent.postMessage(btoa(unescape(encodeURIComponent(JSON.stringify(told)))), "*");
});
</script>"""
FRAME = """<body style="margin: 0"><iframe src="copy.html" width="{width}" height="1200" style="border: 0"></iframe>
<script>addEventListener("message", found => document.body.dataset.told = found.data)</script>"""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_and_it_answers(found: Findings, tmp_path: Path, chromium: str, width: int):
    """No part of the page is wider than the window, and clicks on a method, an axis, a scale, a table head and the
    theme have their effects. A script measures this in a copy of the page without the policy, in a frame, because a
    window cannot be as narrow as a phone.
    """
    write_page(found, tmp_path / "report.html")
    page = re.sub(r"<meta http-equiv[^>]*>", "", (tmp_path / "report.html").read_text())
    (tmp_path / "copy.html").write_text(page.replace("</body>", WATCH + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width))
    options = ("--window-size=1400,1300", "--virtual-time-budget=8000", "--dump-dom")
    told = re.search(r'data-told="([^"]*)"', browse(chromium, frame, *options).stdout)
    assert told
    seen = json.loads(base64.b64decode(told[1]))
    assert seen["scroll"] <= seen["inner"] == width
    assert len(seen["charts"]) == 8
    assert all(250 < chart <= width for chart in seen["charts"])
    assert seen["ranges"][0]
    assert seen["ranges"][0] == seen["ranges"][1]  # of the curves of two levels
    assert seen["before"] == [6, ["round"], "rgb(255, 255, 255)"]  # a line and the two edges of a band for each method
    assert seen["after"] == [3, ["seconds"], "rgb(20, 23, 26)"]
    assert seen["log"] == "log"
    assert set(seen["pressed"]) == {"true", "false"}
    assert seen["first"] == "61.5 ± 0.7 (2 of 3)"
    assert all(seen["curves"])


def test_a_browser_has_nothing_to_complain(found: Findings, tmp_path: Path, chromium: str):
    """Under the page's own policy the console has no message, and the curves are drawn in the methods' colours."""
    write_page(found, tmp_path / "report.html")
    shot = tmp_path / "shot.png"
    options = ("--window-size=1280,2400", "--virtual-time-budget=8000", f"--screenshot={shot}")
    said = browse(chromium, tmp_path / "report.html", *options).stderr
    assert "CONSOLE" not in said
    from PIL import Image

    colours = Image.open(shot).convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert {(0, 114, 178), (213, 94, 0)} <= {colour for _, colour in colours}  # the methods' curves


# --- compare ----------------------------------------------------------------------------------------------------------
RUN = (
    *("digits", "engine.backend=local", "tracking.uri=none", "federation.rounds=2", "federation.clients=20"),
    *("federation.cohort=4", "workload.name=logistic", "workload.rows=20", "evaluate.every=1"),
)


def test_compare_runs(tmp_path: Path):
    """Runs that differ only in the seed are one line, and each line is labelled by the settings in which it differs
    from the others."""
    folders = []
    for lr in (0.1, 0.2):
        for seed in (0, 1):
            folders.append(str(tmp_path / f"{lr}-{seed}"))
            options = (f"method.rule.lr={lr}", f"seed={seed}", "--out", folders[-1], "--json")
            done = invoke("run", *RUN, *options)
            assert done.exit_code == 0, done.output
    done = invoke("compare", *folders, "--target", "0.01", "--html", str(tmp_path / "page/all.html"))
    assert done.exit_code == 0, done.output
    finals = [json.loads((Path(f) / "result.json").read_text())["metrics"]["eval/accuracy"] for f in folders]
    for lr, pair in ((0.1, finals[:2]), (0.2, finals[2:])):
        told = f"{100 * np.mean(pair):.1f} ± {100 * np.std(pair, ddof=1):.1f}"
        assert re.search(rf"^scaffold, rule.lr {lr}\s+{re.escape(told)}$", done.output, re.MULTILINE), done.output
    head = "Comparison of runs: scaffold, logistic, 20 clients, 4 of them in each round, 2 rounds"
    assert done.output.startswith(f"{head}\n")
    assert "2 of 2" in done.output
    assert "Results: Test accuracy (%): mean ± standard deviation over seeds\nmethod " in done.output
    assert re.search(r"^method +test accuracy \(%\)$", done.output, re.MULTILINE), done.output
    assert re.search(r"^method +seeds +rounds +MB +seconds$", done.output, re.MULTILINE), done.output
    assert (tmp_path / "page/all.html").is_file()
    assert (tmp_path / "page/all.md").is_file()
    for arguments, told in (
        ((folders[0], "--metric", "eval/auc"), "--metric: no run has a column eval/auc; did you mean eval/"),
        ((str(tmp_path / "none"),), "holds no run; give folders"),
        ((folders[0], "--html", str(tmp_path / "x.pdf")), "must end with .html"),
    ):
        refused = invoke("compare", *arguments)
        assert refused.exit_code == 2, refused.output
        assert told in refused.output
    check_what_stands_beside_the_metric(folders, done.output)
    check_report_of_a_run(Path(folders[0]), finals[0])
    shutil.copytree(folders[0], tmp_path / "again")
    twice = invoke("compare", folders[0], str(tmp_path / "again"))
    assert twice.exit_code == 0, twice.output
    told = f"{100 * finals[0]:.1f}"
    for name in ("0.1-0", "again"):
        assert re.search(rf"^scaffold \({name}\)\s+{re.escape(told)}$", twice.output, re.MULTILINE), twice.output
    (tmp_path / "other").mkdir()
    shutil.copytree(folders[0], tmp_path / "other/again")
    same = invoke("compare", str(tmp_path / "again"), str(tmp_path / "other/again"))
    assert same.exit_code == 0, same.output
    assert f"scaffold ({tmp_path / 'other/again'})" in same.output


def check_what_stands_beside_the_metric(folders: list[str], told: str) -> None:
    """The settings that all runs share, without defaults and without what the title has; and chosen columns."""
    shared = told.partition("\nSettings of all runs")[2]
    assert re.search(r"^workload.rows +20$", shared, re.MULTILINE)
    assert re.search(r"^evaluate.every +1$", shared, re.MULTILINE)
    assert not re.search(r"^(federation|method|seed|tracking)", shared, re.MULTILINE), shared
    chosen = invoke("compare", *folders, "--columns", "seed,method.rule.lr,eval/loss", "--columns", "method.server_lr")
    assert re.search(r"seed +method.rule.lr +eval/loss +method.server_lr$", chosen.output, re.MULTILINE), chosen.output
    assert re.search(r"^scaffold, rule.lr 0.2 .+ 0, 1 +0.2 +\d\S+ ± \S+ +1$", chosen.output, re.MULTILINE)
    for name, remedy in (("eval/los", "did you mean eval/loss?"), ("x", "valid: columns of rounds.parquet, such as")):
        refused = invoke("compare", *folders, "--columns", name)
        assert refused.exit_code == 2
        assert f"--columns: no run has {name}; {remedy}" in refused.output


def check_report_of_a_run(folder: Path, accuracy: float) -> None:
    """`fedfleet report` writes the page of a run, and says why a run has no result."""
    done = invoke("report", str(folder))
    assert (done.exit_code, done.stdout.strip()) == (0, str(folder / "report.html"))
    page = (folder / "report.html").read_text()
    rows = {row[0]: row[1:] for row in parsed(page).rows}
    assert rows["eval/accuracy"][0] == f"{100 * accuracy:.1f} %"
    assert rows["method.rule.lr"] == ["0.1"]
    assert rows["rounds"] == ["2"]
    assert "The run has no result" not in page
    other = folder.parent / "pages" / "run.html"
    done = invoke("report", str(folder), "--out", str(other))
    assert (done.exit_code, done.stdout.strip()) == (0, str(other))
    assert other.read_text() == page
    refused = invoke("report", str(folder), "--out", str(other.with_suffix(".pdf")))
    assert (refused.exit_code, "--out must end with .html, got " in refused.stderr) == (2, True)
    result = (folder / "result.json").read_text()
    (folder / "result.json").unlink()
    (folder / "failure.json").write_text(json.dumps({"status": "failed", "reason": NASTY}))
    assert invoke("report", str(folder)).exit_code == 0
    assert "The run has no result: &lt;script&gt;alert(1)" in (folder / "report.html").read_text()
    (folder / "failure.json").unlink()
    (folder / "result.json").write_text(result)


def test_report_of_a_search():
    """Trial 2 is the best; trial 1 was pruned and is drawn below the others; the values of the choice have positions on
    the axis."""
    data = {
        "name": NASTY,
        "workload": "digits",
        "method": {
            "name": "fedavg",
            "rule": {"name": "sgd", "lr": {"search": "loguniform", "low": 0.001, "high": 1}},
            "server_lr": {"search": "choice", "values": [1.0, 0.5]},
        },
    }
    params = [{"method.rule.lr": lr, "method.server_lr": step} for lr, step in ((0.1, 1.0), (0.9, 0.5), (0.2, 0.5))]
    trials = [
        Trial(0, "finished", params[0], (0.5,), 4),
        Trial(1, "pruned", params[1], (), 2),
        Trial(2, "finished", params[2], (0.75,), 4),
    ]
    reported = {0: {2: 0.4, 4: 0.5}, 1: {2: 0.1}, 2: {2: 0.6, 4: 0.75}}
    page = search_page(plan(data), trials, trials[2:], reported)
    by_title: dict[str, Any] = {section.title: section for section in page.sections}
    assert cells(by_title["Best trial"]) == [["2", "75.0 %", "0.2", "0.5", "4", "finished"]]
    so_far, finished, pruned = by_title["Values by trial"].charts[0].series
    assert (list(so_far.x), list(so_far.y)) == ([0, 2, 2], [50.0, 50.0, 75.0])  # a step where a trial is better
    assert (list(finished.x), list(finished.y)) == ([0, 2], [50.0, 75.0])
    legend = by_title["Values by trial"].legend  # a line for the best so far, points for the trials
    assert (legend["best so far"][1:], legend["finished"][1:]) == ((True, False, ""), (False, True, ""))
    assert not any(key in ("engine.backend", "engine.workers") for key, _ in cells(by_title["Settings"]))
    assert (list(pruned.x), list(pruned.y)) == ([1], [50.0])
    rate, step = by_title["Sensitivity"].charts
    assert (rate.x.log, list(rate.series[0].x), list(rate.series[1].x)) == (True, [0.1, 0.2], [0.2])
    assert (step.x.log, list(step.series[0].x)) == (True, [1.0, 0.5])
    assert [one.name for one in by_title["Curves of the trials"].charts[0].series] == ["trial 2", "trial 0"]
    assert "&lt;script&gt;alert(1)" in render(page)
    assert parsed(render(page)).rows[1] == ["2", "75.0 %", "0.2", "0.5", "4", "finished"]


def test_an_axis_that_begins_at_zero_has_no_logarithmic_scale():
    points = Marks("a", 0, [1.0, 2.0], [1.0, 2.0])
    figure = Chart("marks", "", Axis("share", zero=True), Axis("value"), [points])
    assert PageSection("", "", charts=(figure,)).scales == {"x": None, "y": False}


def test_report_wants_a_study_a_search_or_a_run(tmp_path: Path):
    done = invoke("report", str(tmp_path))
    assert done.exit_code == 2
    assert "holds no study, search or run" in done.output


def test_private_runs_have_a_line_each():
    """Of the first seed; a method without privacy has none."""

    def ran(method: str, seed: int, line: str) -> MeasuredRun:
        return MeasuredRun(method, ("x",), seed, "finished", "", {}, "", None, 0.5, 1.0, 1.0, 1.0, line)

    runs = [ran("a", 0, "epsilon = 1 at delta = 0.1"), ran("a", 1, "epsilon = 2"), ran("b", 0, "")]
    found = Findings(title="t", report=Report(), methods=["a", "b"], places=[("x",)], runs=runs)
    assert [[cell.text for cell in row] for row in privacy(found).rows] == [["x", "a", "epsilon = 1 at delta = 0.1"]]


def test_labels_do_not_have_the_defaults_of_sections_that_others_lack():
    sections: list[dict[str, Any]] = [
        {},
        {"personal": {"tensors": "head"}, "evaluate": {"stop": {"target": 0.9}}},
        {"personal": {"tensors": "head", "carry": "keep"}},
    ]
    plain = [experiment({"workload": "digits", "method": "fedavg", **section}).plain() for section in sections]
    made = [numeric_settings(data) for data in plain]
    assert labels_of(made[::2]) == ["fedavg", "fedavg, personal.carry keep, personal.tensors head"]
    assert labels_of(made) == [
        "fedavg",
        "fedavg, evaluate.stop.target 0.9, personal.carry reset, personal.tensors head",
        "fedavg, personal.carry keep, personal.tensors head",
    ]


def test_labels_have_the_defaults_of_what_a_file_leaves_out():
    """Two runs of FedAvg, one without a rule, one of FedProx, and one of a plug-in whose defaults are not known."""
    runs = [
        {"method.name": "fedavg"},
        {"method.name": "fedavg", "method.rule.name": "sgd", "method.rule.lr": 0.3, "attack.name": "alie"},
        {"method.name": "fedavg", "method.rule": "momentum"},
        {"method.name": "fedprox", "method.rule.name": "sgd", "method.rule.lr": 0.1, "method.mu": 0.5},
        {"method.name": "mine", "method.tau": 3},
        {"method.name": "mine"},
    ]
    assert labels_of(runs) == [
        "fedavg, attack none, rule.lr 0.1, rule.name sgd",
        "fedavg, attack.name alie, rule.lr 0.3, rule.name sgd",
        "fedavg, attack none, rule.lr 0.1, rule.name momentum",
        "fedprox, attack none, mu 0.5, rule.lr 0.1, rule.name sgd",
        "mine, attack none, tau 3",
        "mine, attack none, tau default",
    ]
    same = labels_of([runs[0], {"method.name": "fedavg", "method.rule.name": "sgd", "method.rule.lr": 0.1}])
    assert same == ["fedavg", "fedavg"]
    assert labels_of([{"method.name": "a", "workload.shape": shape} for shape in ([1, 8], (1, 8))]) == ["a", "a"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0316227766, "0.03162"), (1e-9, "1e-09"), (123456, "123456"), (True, "true"), (None, "null"), ("sgd", "sgd")],
)
def test_a_setting_is_written_in_one_way(value: Any, text: str):
    assert setting(value) == text
