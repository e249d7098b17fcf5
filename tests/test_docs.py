"""Executes the documentation: docs/extending.md block by block, and the commands and tables of the README."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import Experiment
from fedfleet.tune.cli import main
from fedfleet.tune.files import shipped

ROOT = Path(__file__).parents[1]
EXTENDING = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file name in the comment of the first line, if there is one."""
        named = re.match(r"# (\S+\.\w+)\n", self.text)
        return named[1] if named else None


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]


FILES = {block.file: block.text for block in blocks(EXTENDING) if block.file}


def commands(page: str) -> list[list[str]]:
    """The arguments of every line `$ fedfleet …`."""
    lines = [line for block in blocks(page) if block.language == "console" for line in block.text.splitlines()]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("$ fedfleet ")]


def call(*arguments: str) -> str:
    """The standard output of a command, which must succeed."""
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, f"{' '.join(arguments)}\n{done.output}\n{done.exception!r}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the files of the page."""
    here = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (here / name).write_text(text, encoding="utf-8")
    modules, path, before = set(sys.modules), list(sys.path), os.getcwd()
    os.chdir(here)
    yield here
    os.chdir(before)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if f"{name}.py" in FILES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def runs(folder: Path, ray_here: None) -> dict[str, dict[str, Any]]:
    """The results of the runs of the page, by their commands."""
    made = {}
    for arguments in commands(EXTENDING):
        if arguments[0] == "run":
            untracked = [*arguments, "tracking.uri=none", "--json", "--out", f"runs/{len(made)}"]
            made[" ".join(arguments)] = json.loads(call(*untracked).splitlines()[-1])
    return made


def test_every_block_is_executed():
    for block in blocks(EXTENDING):
        assert block.file or block.language == "console", f"neither a named file nor commands:\n{block.text}"
        assert block.language != "console" or all(line.startswith("$ fedfleet ") for line in block.text.splitlines())
    assert len(FILES) == len([block for block in blocks(EXTENDING) if block.file]), "a file name is used twice"


@pytest.mark.parametrize("name", ["my_method.py", "my_workload.py"])
def test_under_30_lines(name: str):
    assert len(FILES[name].splitlines()) < 30


def test_ray_and_in_process_give_the_same_model(runs: dict[str, dict[str, Any]]):
    ray = runs["run my_experiment.yaml"]
    local = runs["run my_experiment.yaml engine.backend=local"]
    assert yaml.safe_load(FILES["my_experiment.yaml"])["engine"] == {"backend": "ray", "workers": 2, "cpus": 1}
    assert ray["model_sha256"] == local["model_sha256"]
    assert ray["metrics"] == local["metrics"]


def test_other_runs_are_other_models(runs: dict[str, dict[str, Any]]):
    assert len({result["model_sha256"] for result in runs.values()}) == len(runs) - 1


def test_lists_and_shows(folder: Path):
    for arguments in commands(EXTENDING):
        if arguments[0] != "run":
            assert "fedleash" in call(*arguments)


def test_the_pages_tests_pass(folder: Path):
    tests = [f for name, f in runpy.run_path("test_my_plugins.py").items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_script_gives_the_files_model(folder: Path, runs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(folder))  # as python my_script.py has it
    with contextlib.redirect_stdout(io.StringIO()):
        names = runpy.run_path("my_script.py", run_name="__main__")
    assert names["result"].model_sha256 == runs["run my_experiment.yaml"]["model_sha256"]
    assert len(names["frame"]) == 20


def test_the_pages_parts_shadow_nothing():
    """A reader must not have to ask which of two parts with one name a run used."""
    mine = {name for path in FILES if path.startswith("my_") and path.endswith(".py") for name in tables_of(path)}
    built_in = {name for table in Registry().tables.values() for name in table}
    assert mine
    assert not mine & built_in


def tables_of(path: str) -> set[str]:
    """The names in the tables of a plug-in."""
    found = re.findall(r"^[A-Z]+ = \{(.*?)\}$", FILES[path], re.MULTILINE)
    return {name for table in found for name in re.findall(r'"(\w+)":', table)}


def test_entry_point_of_the_page():
    assert '[project.entry-points."fedfleet.plugins"]' in FILES["pyproject.toml"]


# --- README -----------------------------------------------------------------------------------------------------------
def rows(header: str) -> list[list[str]]:
    """The cells, without backquotes, of the table of the README whose header begins with these columns."""
    lines = README.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {header} |")]
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def test_readme_commands():
    """The examples and their overrides are valid: runs are resolved but not started."""
    seen = 0
    for arguments in commands(README):
        if arguments[0] == "run" and arguments[1] in shipped():
            overrides = [a for a in arguments[1:] if not a.startswith("-") and ("=" in a or a == arguments[1])]
            call("show", *overrides)
            seen += 1
        elif arguments[0] in ("show", "list"):
            call(*arguments)
            seen += 1
    assert seen >= 5


def test_readme_names_what_exists():
    tables = Registry().tables
    for header, table in (("method", "METHODS"), ("workload", "WORKLOADS"), ("rule", "RULES")):
        names = {row[0] for row in rows(header)}
        assert names
        assert names <= set(tables[table])


def defaults(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, default) of all keys of a section and of its sections; the default of a required key is None."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from defaults(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, None if field.is_required() else field.default


def test_readme_has_every_key_and_its_default():
    documented = {row[0]: row[1] for row in rows("key")}
    actual = dict(defaults(Experiment)) | {"federation.local.steps": 5}  # unless epochs is given
    missing, gone = set(actual) - set(documented), set(documented) - set(actual)
    assert not missing | gone, f"README.md, table of keys: add {sorted(missing)}, remove {sorted(gone)}"
    for key, default in actual.items():
        if documented[key]:
            assert yaml.safe_load(documented[key]) == (list(default) if isinstance(default, tuple) else default), key
        else:
            assert default in (None, ""), key


def test_the_readme_says_how_to_call_the_command():
    """`make demo` and `make test` install it into .venv, which is not on the path."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = readme.index("$ make demo")
    called = readme.index("$ fedfleet run")
    assert "source .venv/bin/activate" in readme[first:called]
    assert ".venv/bin/fedfleet" in readme[first:called]
