"""The documentation: every block of code of the README and of the pages below docs/ is executed, page by page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.config.registry import Registry

from .pages import DOCS, ROOT, WRITTEN, Runner, blocks, why_long, working_in

pytestmark = pytest.mark.usefixtures("one_fork_server")


def parameters() -> list[Any]:
    """The pages that have blocks; pages that take long are marked. The page on clusters is tested in tests/cluster/."""
    pages = [p for p in [ROOT / "README.md", *WRITTEN] if any(b.language != "text" for b in blocks(p))]
    here = [p for p in pages if why_long(p) != "cluster"]
    marks = {p: [pytest.mark.long] if why_long(p) else [] for p in here}
    return [pytest.param(p, id=str(p.relative_to(ROOT)), marks=marks[p]) for p in here]


@pytest.mark.parametrize("page", parameters())
def test_page(page: Path, tmp_path: Path, request: pytest.FixtureRequest):
    if why_long(page):
        request.getfixturevalue("ray_here")
    with working_in(tmp_path):
        Runner(page).all()


# --- what the pages say -----------------------------------------------------------------------------------------------
def test_a_method_and_a_workload_take_under_30_lines():
    files = {b.file: b.text for page in WRITTEN for b in blocks(page) if b.file}
    for name in ("my_method.py", "my_workload.py"):
        assert len(files[name].splitlines()) < 30


def test_the_parts_of_the_pages_shadow_nothing():
    """Otherwise a reader could not tell which of two parts with the same name a run used."""
    tables = [b.text for page in WRITTEN for b in blocks(page) if b.language == "python"]
    found = [
        name
        for text in tables
        for table in re.findall(r"^[A-Z]+ = \{(.*?)\}$", text, re.M)
        for name in re.findall(r'"(\w+)":', table)
    ]
    built_in = {name for table in Registry().tables.values() for name in table}
    assert len(found) >= 6
    assert not set(found) & built_in


def test_a_package_of_plug_ins_has_its_entry_point():
    page = (DOCS / "howto/plugins.md").read_text(encoding="utf-8")
    assert '[project.entry-points."fedfleet.plugins"]' in page


def test_the_readme_says_how_to_call_the_command():
    """`make demo` and `make test` install it into .venv, which is not on the path."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, called = readme.index("$ make demo"), readme.index("$ fedfleet run")
    assert "source .venv/bin/activate" in readme[first:called]
    assert ".venv/bin/fedfleet" in readme[first:called]


def test_the_links_of_the_readme_lead_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", readme)
    local = [a or b for a, b in links if not (a or b).startswith("http")]
    assert len(local) >= 5
    for link in local:
        assert (ROOT / link).exists(), link


def test_reasons_are_given():
    for page in WRITTEN:
        for block in blocks(page):
            assert not block.not_run or len(block.not_run) > 10, block.text
