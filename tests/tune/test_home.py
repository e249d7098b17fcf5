"""A ~ in a path is the home folder, in every option and key, also where no shell replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import fedfleet
from fedfleet.engine import Experiment
from fedfleet.tune.cli import COMMANDS, loaded
from fedfleet.tune.commands.options import Out
from fedfleet.tune.search.plan import SearchSettings

from .commands import LOCAL, invoke

THERE = {"submit"}
"""Commands whose paths are those of another machine."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    for name in COMMANDS:
        for parameter in loaded(name).params:
            if isinstance(parameter.type, click.Path | Out) or parameter.name in ("out", "html"):
                yield name, parameter


def test_every_option_that_is_a_path_is_expanded(home):
    found = list(parameters())
    assert {"run", "resume", "fork", "study", "report", "compare", "search", "bench"} <= {name for name, _ in found}
    for name, parameter in found:
        value = parameter.type.convert("~/a", parameter, None)
        assert value == (Path("~/a") if name in THERE else home / "a"), (name, parameter.name)


def test_keys_that_are_paths(home):
    experiment = Experiment(
        workload="digits",
        method="fedavg",
        engine={"store": "~/store"},
        checkpoint={"folder": "~/copies"},
        tracking={"uri": "sqlite:///~/mlflow.db"},
    )
    assert experiment.engine.store == f"{home}/store"
    assert experiment.checkpoint.folder == f"{home}/copies"
    assert experiment.tracking.uri == f"sqlite:///{home}/mlflow.db"
    search = SearchSettings(storage="sqlite:///~/a.db", warm_start=["~/b", "sqlite:///~/c.db#study"])
    assert search.storage == f"sqlite:///{home}/a.db"
    assert search.warm_start == (f"{home}/b", f"sqlite:///{home}/c.db#study")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("file:///~/a", "file:///{0}/a"),
        ("sqlite:///a~b", "sqlite:///a~b"),
        ("s3://bucket/~/a", "s3://bucket/~/a"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("a/~", "a/~"),
        ("~", "{0}"),
    ],
)
def test_addresses(address, found, home):
    experiment = Experiment(workload="digits", method="fedavg", tracking={"uri": address})
    assert experiment.tracking.uri == found.format(home)


def test_an_unknown_user_is_told():
    done = invoke("run", "digits", "--out", "~nobody-here/a")
    assert done.exit_code == 2
    told = "~nobody-here stands for the home folder of a user who is not known here"
    assert done.stderr.startswith(f"error: ~nobody-here/a: {told}")


def test_commands_and_the_python_api_use_the_home_folder(home):
    file = home / "mine.yaml"
    file.write_text((Path(fedfleet.tune.__file__).parent / "experiments" / "digits.yaml").read_text())
    done = invoke("run", "~/mine.yaml", *LOCAL, "checkpoint.every=1", "--out=~/runs/a")
    assert done.exit_code == 0, done.output
    result = fedfleet.run(fedfleet.load("~/runs/a", LOCAL), out="~/runs/b")
    assert fedfleet.Result.load("~/runs/b").model_sha256 == result.model_sha256
    assert len(fedfleet.compare(["~/runs/a", "~/runs/b"]))
    for command in (["report", "~/runs/a"], ["compare", "~/runs/a", "~/runs/b"], ["show", "~/runs/a"]):
        assert invoke(*command).exit_code == 0
    assert {path.name for path in (home / "runs").iterdir()} == {"a", "b"}
    assert not list(Path.cwd().iterdir())
