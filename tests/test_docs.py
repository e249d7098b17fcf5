"""Executes the documentation: every block of code of the README and of the pages below docs/, page by page.

A block whose first line is a comment with a file name is written to that file. Other blocks of Python run in one
namespace for the page, commands run in their order, YAML and TOML are parsed, and `text` is not looked at. All blocks
of a page share an empty folder. Comments in a page say what is different:

    <!-- page: long, REASON -->           all of the page is executed by `make test-all` only
    <!-- page: long, cluster HOST:PORT -->  the same; a cluster of Ray stands for the address
    <!-- run: no, REASON -->              the next block is only parsed
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner

from fedfleet.engine.config.registry import Registry
from fedfleet.tune.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [p for p in sorted(DOCS.rglob("*.md")) if "results" not in p.relative_to(DOCS).parts]
"""The pages that people write; reports of studies are written by the program."""
BLOCK = re.compile(r"(?:<!-- run: no, ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = re.compile(r"<!-- page: long, (.*) -->")
TRACKED = ("run", "search", "study")


class Block(NamedTuple):
    language: str
    text: str
    not_run: str

    @property
    def file(self) -> str | None:
        """The file name in the comment of the first line, or of the second one below a #! line."""
        named = re.match(r"(?:#!.*\n)?# (\S+\.\w+)\n", self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of every line `$ …`."""
        return [shlex.split(line, comments=True)[1:] for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    return [Block(lang, text, reason) for reason, lang, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def parameters() -> list[Any]:
    """The pages with blocks that run, those that take long with their mark."""
    pages = [p for p in [ROOT / "README.md", *WRITTEN] if any(b.language != "text" for b in blocks(p))]
    long = {p: PAGE.search(p.read_text(encoding="utf-8")) for p in pages}
    return [pytest.param(p, id=str(p.relative_to(ROOT)), marks=[pytest.mark.long] * bool(long[p])) for p in pages]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The current folder for the blocks of one page. What they import is forgotten afterwards."""
    modules, path, before = set(sys.modules), list(sys.path), os.getcwd()
    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))  # as `python script.py` has it
    yield tmp_path
    os.chdir(before)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", parameters())
def test_page(page: Path, folder: Path, request: pytest.FixtureRequest):
    Runner(page, request).all()


class Runner:
    """Executes the blocks of a page in the current folder."""

    def __init__(self, page: Path, request: pytest.FixtureRequest) -> None:
        marked = PAGE.search(page.read_text(encoding="utf-8"))
        self.page, self.names, self.address, self.cluster = page, {"__name__": "page"}, "", ""
        if marked and marked[1].startswith("cluster "):
            self.address = marked[1].split()[1]
            self.cluster = request.getfixturevalue("cluster").address
        elif marked:
            request.getfixturevalue("ray_here")

    def all(self) -> None:
        for block in blocks(self.page):
            if not block.not_run and block.file:
                Path(block.file).write_text(block.text, encoding="utf-8")
            self.parse(block)
            if not block.not_run:
                self.run(block)

    def parse(self, block: Block) -> None:
        """Whether a block is well formed, also one that is not run."""
        if block.language == "yaml":
            assert yaml.safe_load(block.text)
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "console":
            assert all(line.startswith("$ ") for line in block.text.splitlines()), block.text
            for program, *arguments in block.commands:
                if program == "fedfleet":
                    assert arguments[0] in main.commands, block.text
        elif block.language == "python":
            compile(block.text, str(self.page), "exec")
        else:
            assert block.language in ("toml", "text"), f"no language: {block.text}"

    def run(self, block: Block) -> None:
        if block.language == "console":
            for program, *arguments in block.commands:
                self.command(program, arguments)
        elif block.language == "python" and block.file and block.file.startswith("test_"):
            tests = [f for name, f in runpy.run_path(block.file).items() if name.startswith("test_")]
            assert tests
            for test in tests:
                test()
        elif block.language == "python" and not block.file:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, str(self.page), "exec"), self.names)

    def command(self, program: str, arguments: list[str]) -> None:
        if program == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(arguments[0], run_name="__main__")
            return
        assert program == "fedfleet", f"a block that runs has only fedfleet and python: {program}"
        name, *others = arguments
        quiet = ["tracking.uri=none"] if name in TRACKED else []
        local = ["engine.backend=local"] if name == "run" and not PAGE.search(self.page.read_text("utf-8")) else []
        place = 1 + (name in TRACKED)  # before the settings of the page, which come later and count more
        words = [*arguments[:place], *local, *quiet, *arguments[place:]]
        if self.cluster:
            self.elsewhere([word.replace(self.address, self.cluster) for word in words])
            return
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
        if name in ("list", "show"):
            assert len(done.stdout.splitlines()) > 1, f"{name} {others}"

    def elsewhere(self, words: list[str]) -> None:
        """Run a command in a process of its own: this one may hold another Ray."""
        script = "from fedfleet.tune.main import main; main()"
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


# --- what the pages say -----------------------------------------------------------------------------------------------
def test_a_method_and_a_workload_take_under_30_lines():
    files = {b.file: b.text for page in WRITTEN for b in blocks(page) if b.file}
    for name in ("my_method.py", "my_workload.py"):
        assert len(files[name].splitlines()) < 30


def test_the_parts_of_the_pages_shadow_nothing():
    """A reader must not have to ask which of two parts with one name a run used."""
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
            assert not block.not_run or len(block.not_run) > 10, textwrap.shorten(block.text, 60)
