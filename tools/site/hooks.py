"""Hooks of MkDocs: they add the generated pages, the charts and MathJax to the site, without writing into `docs/`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # MkDocs loads this file by its path, and not as a part of the package `tools`

from fedfleet.engine.config.registry import Registry  # noqa: E402
from fedfleet.engine.config.schema import Experiment  # noqa: E402
from tools.site import charts, commands, configuration, identities, inserts, measured, methods, parts, record  # noqa: E402

METHODS = "reference/methods/"
FROM_ROOT = {
    "results/benchmarks.md": "benchmarks/RESULTS.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/governance.md": "GOVERNANCE.md",
    "assets/grafana.json": "tune/monitoring/grafana.json",
}
"""Pages and files of the site that lie outside of docs/."""
WEIGHTS = {
    "getting-started": 2,
    "tutorials/": 2,
    "howto/": 2,
    "reference/python": 0.2,
    "results/": 0.2,
    "project/": 0.2,
}
"""Beginnings of the paths of pages -> their weight in the search."""
MATHJAX = "tex-svg.js"
"""MathJax in one file, with its fonts, from the package sphinx-mathjax-offline."""


def on_config(config: Any) -> Any:
    """Add the pages of all methods to the navigation, by family, below the page that lists them."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    groups = [{family: [f"{METHODS}{name}.md" for name in names]} for family, names in methods.families().items()]
    config.nav = replaced(config.nav, f"{METHODS}index.md", [f"{METHODS}index.md", *groups])
    return config


def replaced(nav: Any, page: str, pages: list[Any]) -> Any:
    """The navigation in which the section that consists of `page` alone has all `pages`."""
    if isinstance(nav, list):
        return pages if nav == [page] else [replaced(item, page, pages) for item in nav]
    return {title: replaced(inner, page, pages) for title, inner in nav.items()} if isinstance(nav, dict) else nav


def on_files(files: Files, config: Any) -> Files:
    for path, content in generated():
        files.append(File.generated(config, path, content=content))
    mathjax = resources.files("sphinx-mathjax-offline") / "static/mathjax" / MATHJAX
    files.append(File.generated(config, f"assets/{MATHJAX}", abs_src_path=str(mathjax)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Give the pages that readers look for first more weight in the search, and those that mention everything less; and
    add what pages get from elsewhere."""
    path = page.file.src_uri
    weight = next((weight for begin, weight in WEIGHTS.items() if path.startswith(begin)), 1)
    page.meta.setdefault("search", {"boost": weight})
    of_root = {source: target for target, source in FROM_ROOT.items()}
    return inserts.with_sections(inserts.with_methods(markdown, path), of_root)


def generated() -> Iterator[tuple[str, str]]:
    """(path below docs/, content) of everything that is made from the code."""
    yield "reference/configuration.md", configuration.page()
    yield "reference/experiment.schema.json", json.dumps(Experiment.model_json_schema(), indent=1)
    yield "reference/commands.md", commands.page()
    yield "reference/record.md", record.page()
    yield "reference/identities.md", identities.page()
    for name in parts.PAGES:
        yield f"reference/{name}.md", parts.page(name)
    yield f"{METHODS}index.md", methods.index()
    for name in Registry().tables["METHODS"]:
        yield f"{METHODS}{name}.md", methods.page(name)
    for name in measured.measured_methods():
        yield f"assets/methods/{name}.svg", charts.learning_curves(name)
    for path, source in FROM_ROOT.items():
        yield path, (ROOT / source).read_text("utf-8")
