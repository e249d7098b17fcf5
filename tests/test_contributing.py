"""Executes CONTRIBUTING.md: its method is added to a copy of the repository, and the commands of the page succeed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fedfleet
from tests.pages import blocks

ROOT = Path(__file__).parents[1]
PAGE = blocks(ROOT / "CONTRIBUTING.md")
FILES = {block.file: block.text for block in PAGE if block.file}
PARTS = ("algorithms", "engine", "workloads", "tune")
COMMANDS = [
    line.removeprefix("$ ")
    for block in PAGE
    if block.language == "console"
    for line in block.text.splitlines()
    if line.startswith("$ python")
]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the repository with the files of the page. It is what `import fedfleet` finds there."""
    for name in (*PARTS, "src", "tests", "tools", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name, text in FILES.items():
        assert not (tmp_path / name).exists(), f"{name} exists already"
        (tmp_path / name).write_text(text)
    (row,) = [block.text.partition("\n")[2] for block in PAGE if block.text.startswith("# a row of")]
    table = tmp_path / "algorithms/table.py"
    before, fedprox, after = table.read_text().partition('        ("fedprox",')
    assert fedprox
    table.write_text(before + row + fedprox + after)
    return tmp_path


@pytest.mark.long
def test_the_page_leads_to_a_method(clone: Path):
    assert sorted(FILES) == ["algorithms/fedleash.py", "tests/algorithms/test_fedleash.py"]
    assert len(COMMANDS) == 2
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    for command in COMMANDS:
        command = command.replace("python", shlex.quote(sys.executable), 1)
        done = subprocess.run(command, shell=True, cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert " passed" in done.stdout or "[100%]" in done.stdout
    checks = [[sys.executable, "-m", "ruff", *check] for check in (["check", *FILES], ["format", "--check", *FILES])]
    for command in checks:
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fedfleet.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_changelog_has_this_version():
    assert f"\n## {fedfleet.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
