"""Reports: their numbers by hand, one truth in three forms, no markup of a user's, and a browser that shows them."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.tune.report.charts import groups
from fedfleet.tune.report.findings import Findings, Run, mean_curve
from fedfleet.tune.report.page import write_page
from fedfleet.tune.report.statistics import front, holm, paired, reached, spread
from fedfleet.tune.report.tables import Table, tables
from fedfleet.tune.study.folder import Points
from fedfleet.tune.study.spec import Published, Report

from .commands import invoke

NASTY = '<script>alert(1)</script> $x_1 | **b** & "c"'


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_spread_by_hand():
    """Of 1, 2, 6: mean 3, squares of the deviations 4 + 1 + 9 = 14, 14 / 2 = 7."""
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
    assert paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}).p == 0.0
    assert math.isnan(paired({0: 2.0}, {0: 1.0}).p)


def test_holm_by_hand():
    """0.01 x 3, 0.02 x 2, 0.9 x 1, never falling; what is not known does not count."""
    assert holm([0.9, 0.01, math.nan, 0.02])[:2] == [0.9, pytest.approx(0.03)]
    assert holm([0.9, 0.01, math.nan, 0.02])[3] == pytest.approx(0.04)
    assert holm([0.04, 0.03]) == [pytest.approx(0.06), pytest.approx(0.06)]


def test_reached_and_front():
    points = Points(*(np.array(row, dtype=float) for row in ([2, 4, 6], [0.5, 0.8, 0.7], [10, 20, 30], [1, 2, 3])))
    assert reached(points, 0.7, lambda a, b: a > b) == (4.0, 20.0, 2.0)
    assert reached(points, 0.5, lambda a, b: a > b) == (2.0, 10.0, 1.0)
    assert reached(points, 0.9, lambda a, b: a > b) is None
    assert reached(points, 0.6, lambda a, b: a < b) == (2.0, 10.0, 1.0)
    assert front([(1.0, 5.0), (2.0, 4.0), (3.0, 6.0), (3.0, 7.0)], lambda a, b: a > b) == [0, 3]
    assert front([(1.0, 5.0), (2.0, 4.0)], lambda a, b: a < b) == [0, 1]


# --- pages ------------------------------------------------------------------------------------------------------------
def made(method: str, place: str, seed: int, final: float, **more: Any) -> Run:
    values = np.array([final / 2, final])
    points = Points(np.array([1.0, 2.0]), values, np.array([1e6, 2e6]), np.array([0.5, 1.0]))
    settings = {"method.matrix_lr": 0.1, "method.vector_lr": 0.01}
    chosen = "matrix_lr 0.1, vector_lr 0.01"
    run = Run(method, (place,), seed, "finished", "", settings, chosen, points, final, 1e6, 1e6, 1.0)
    return run._replace(**more)


@pytest.fixture
def found() -> Findings:
    """Two methods, one of them with a nasty name, at two levels; one run diverged; trials of a 2 x 2 grid."""
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
        Report(targets=(0.7,)),
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


def cells(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


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


class Strict(HTMLParser):
    """Elements that are opened and closed in order; tables' text; ids."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not any(name.startswith("on") for name, _ in attrs)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith("#"), f"{tag} {name}={value}"
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
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
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_html_is_whole_and_escaped(found: Findings, tmp_path: Path):
    write_page(found, tmp_path)
    page = (tmp_path / "report.html").read_text()
    parsed = Strict()
    parsed.feed(page)
    assert parsed.open == []
    assert not parsed.seen & {"script", "b", "iframe", "img", "image", "link", "object"}
    assert len(set(parsed.ids)) == len(parsed.ids), "an id is used twice"
    assert parsed.rows == [row for table in tables(found) for row in [table.heads, *cells(table)]]
    assert "http:" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    for name in re.findall(r'(?:url\(|href=")#([^)"]+)', page):
        assert name in parsed.ids
    assert {"Learning curves", "Sensitivity"} <= set(re.findall(r"<h2>(.*?)</h2>", page))


def unescaped(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", cell.strip().removeprefix("**").removesuffix("**"))


def test_markdown_has_the_same_numbers(found: Findings, tmp_path: Path):
    write_page(found, tmp_path)
    page = (tmp_path / "report.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| ")]
    told = [[unescaped(cell) for cell in row] for row in rows if set("".join(row)) != {" ", "-"}]
    flat = " ".join(NASTY.split())
    expected = [row for table in tables(found) for row in [table.heads, *cells(table)]]
    assert told == [[cell.replace(NASTY, flat) for cell in row] for row in expected]
    assert "<script" not in page.replace(r"\<script", "")
    shown = re.findall(r"!\[.*?\]\((charts/.*?)\)", page)
    assert shown
    assert all((tmp_path / path).is_file() for path in shown)
    assert sorted(shown) == sorted(f"charts/{path.name}" for path in (tmp_path / "charts").iterdir())


def test_charts_show_what_there_is(found: Findings):
    names = {chart.name for group in groups(found) for chart in group.charts}
    assert {"curves-1", "curves-2", "levels-1", "bytes-1", "bytes-2", "sensitivity-1"} <= names
    (heat,) = [c for g in groups(found) for c in g.charts if c.name == "sensitivity-1"]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", heat.svg)
    assert {"×", "25.0", "30.0", "0.001"} <= set(texts)  # (0.1, 0.001) diverged; with 0.4, halves of the sums
    assert "5.0" not in texts


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
    return subprocess.run([chromium, *fixed, *more, page.as_uri()], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it(found: Findings, tmp_path: Path, chromium: str, width: int):
    """No message on the console, no part wider than the window, charts drawn; measured by a script in a copy."""
    write_page(found, tmp_path)
    page = (tmp_path / "report.html").read_text()
    measure = """<script>document.body.dataset.told = btoa(JSON.stringify({
        inner: innerWidth, scroll: document.documentElement.scrollWidth,
        charts: [...document.querySelectorAll('.charts svg')].map(s => s.getBoundingClientRect().width)}))</script>"""
    copy = tmp_path / "copy.html"
    copy.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", measure + "</body>"))
    size = f"--window-size={width},1600"
    told = re.search(r'data-told="([^"]*)"', browse(chromium, copy, size, "--dump-dom").stdout)
    assert told
    seen = json.loads(base64.b64decode(told[1]))
    assert seen["scroll"] <= seen["inner"]
    assert len(seen["charts"]) >= 6
    assert all(250 < chart <= seen["inner"] for chart in seen["charts"])
    shot = tmp_path / "shot.png"
    said = browse(chromium, tmp_path / "report.html", size, f"--screenshot={shot}").stderr
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
    """Runs that differ in the seed alone are one line; each line is called after what sets it apart."""
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
    assert "2 of 2" in done.output
    assert (tmp_path / "page/all.html").is_file()
    assert (tmp_path / "page/all.md").is_file()
    for arguments, told in (
        ((folders[0], "--metric", "eval/auc"), "--metric: no run has a column eval/auc; the first run has"),
        ((str(tmp_path / "none"),), "holds no run; give folders"),
        ((folders[0], "--html", str(tmp_path / "x.pdf")), "must end with .html"),
    ):
        refused = invoke("compare", *arguments)
        assert refused.exit_code == 2, refused.output
        assert told in refused.output
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


def test_report_wants_a_study(tmp_path: Path):
    done = invoke("report", str(tmp_path))
    assert done.exit_code == 2
    assert "holds no study" in done.output
