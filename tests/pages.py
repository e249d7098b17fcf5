"""Executes the blocks of code of a page of the documentation, in the current folder.

A block whose first line is a comment with a file name is written to that file. Other blocks of Python run in one
namespace for the page, commands run in their order, YAML and TOML are parsed, and `text` is not looked at. All blocks
of a page share an empty folder. Comments in a page say what is different:

    <!-- page: long, REASON -->             all of the page is executed by `make test-all` only
    <!-- page: long, cluster -->            the same, by tests/cluster/test_tutorial.py
    <!-- page: long, needs PACKAGE: … -->   the same, where this package is installed
    <!-- run: no, REASON -->                the next block is only parsed
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from click.testing import CliRunner

from fedfleet.tune.cli import COMMANDS, main

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


def why_long(page: Path) -> str:
    """The reason for which a page is executed by `make test-all` only, empty if `make test` executes it."""
    found = PAGE.search(page.read_text(encoding="utf-8"))
    return found[1] if found else ""


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make a folder the current one, for the blocks of one page. Modules that they import are removed afterwards."""
    modules, path, before = set(sys.modules), list(sys.path), os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as `python script.py` does
    yield
    os.chdir(before)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


class Runner:
    """Executes the blocks of a page."""

    def __init__(self, page: Path) -> None:
        self.page, self.names = page, {"__name__": "page"}
        self.reason = why_long(page)

    def all(self) -> None:
        for block in blocks(self.page):
            if not block.not_run and block.file:
                Path(block.file).write_text(block.text, encoding="utf-8")
            self.parse(block)
            if not block.not_run:
                self.run(block)

    def parse(self, block: Block) -> None:
        """Check that a block can be parsed, also one that is not run."""
        if block.language == "yaml":
            assert yaml.safe_load(block.text)
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        elif block.language == "console":
            assert all(line.startswith("$ ") for line in block.text.splitlines()), block.text
            for program, *arguments in block.commands:
                if program == "fedfleet":
                    assert arguments[0] in COMMANDS, block.text
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
        local = ["engine.backend=local"] if name == "run" and not self.reason else []
        place = 1 + (name in TRACKED)  # before the settings of the page, which come later and count more
        words = [*arguments[:place], *local, *quiet, *arguments[place:]]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
        if name in ("list", "show"):
            assert len(done.stdout.splitlines()) > 1, f"{name} {others}"
