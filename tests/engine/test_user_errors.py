"""The message of an exception in a plug-in has the plug-in's file and line, in process and on Ray; the log has the
whole traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.api import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ClientFailed, ConfigError, EvaluationFailed, FedFleetError, MethodFailed, RemoteCause
from fedfleet.workloads.workload import Split
from tests.tune.commands import error_in, invoke

PLUGIN = '''
from dataclasses import dataclass

import numpy as np

from fedfleet.algorithms.contract import Deferred
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.local import LocalMethod
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp

WHERE = "{where}"


class Trouble(Exception):
    """A class of exceptions that no other module knows."""


def raises(here):
    if here == WHERE:
        raise {kind}("first\\nsecond")


@dataclass(frozen=True)
class Method(LocalMethod):
    def server_init(self, x):
        raises("server_init")
        return super().server_init(x)

    def client_step(self, public, client, local, oracle):
        raises("client_step")
        return super().client_step(public, client, local, oracle)

    def server_update(self, server, mean, round):
        if round.number == 2:
            raises("server_update")
        return super().server_update(server, mean, round)

    def server_metrics(self, server, mean, round):
        if WHERE == "server_metrics" and mean.delta.norm2() > 0:
            raises("server_metrics")
        return super().server_metrics(server, mean, round)


class Later(Deferred):
    def build(self, context):
        raises("build")
        return method()


def method():
    raises("factory")
    plain = fedavg()
    return Method(plain.rule, plain.estimator, plain.server)


def later():
    return Later() if WHERE == "build" else method()


@dataclass(frozen=True)
class Work(Digits):
    model: Mlp = Mlp((3,))

    def check(self):
        raises("check")

    def init(self, seed):
        raises("init")
        return super().init(seed)

    def load(self):
        raises("load")
        return super().load()

    def losses(self, p, batch):
        raises("losses")
        return super().losses(p, batch)

    def report(self, p, batch):
        raises("report")
        return super().report(p, batch)

    def summary(self, means, columns):
        raises("summary")
        return super().summary(means, columns)


METHODS = {{"own": later}}
WORKLOADS = {{"work": Work}}
'''

CONFIG = ["factory", "build", "check", "init", "load", "server_init"]
"""Functions that are called before anything starts."""
LATER: dict[str, type[FedFleetError]] = {
    "client_step": ClientFailed,
    "losses": ClientFailed,
    "server_update": MethodFailed,
    "server_metrics": MethodFailed,
    "report": EvaluationFailed,
    "summary": EvaluationFailed,
}


def written(folder: Path, where: str, kind: str = "Trouble") -> Path:
    path = folder / "own.py"
    path.write_text(PLUGIN.format(where=where, kind=kind))
    return path


def described(plugin: Path, **engine: Any) -> Experiment:
    return experiment(
        {
            "plugins": str(plugin),
            "workload": "work",
            "method": "own",
            "federation": {"clients": 6, "cohort": 3, "rounds": 2, "local": {"steps": 1, "batch": 4}},
            "engine": {"backend": "local", **engine},
            "tracking": {"uri": "none"},
        }
    )


def line_of(plugin: Path, text: str) -> int:
    lines = plugin.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def names_the_line(message: str, plugin: Path, where: str, kind: str = "Trouble") -> None:
    assert "\n" not in message
    raised, called = line_of(plugin, f"raise {kind}"), line_of(plugin, f'raises("{where}")')
    assert f'{plugin}, line {raised} in raises: raise {kind}("first' in message, message
    assert f"called from {plugin}, line {called} in " in message, message
    assert "fedfleet/" not in message.replace(str(plugin), "")


@pytest.mark.parametrize("where", CONFIG)
@pytest.mark.parametrize("kind", ["Trouble", "ValueError", "KeyError", "OSError", "MemoryError"])
def test_before_anything_starts(tmp_path: Path, where: str, kind: str):
    plugin = written(tmp_path, where, kind)
    with pytest.raises(ConfigError) as caught:
        run(described(plugin))
    names_the_line(str(caught.value), plugin, where, kind)
    assert str(caught.value).startswith(("method: ", "workload: "))
    assert type(caught.value.__cause__).__name__ == kind


@pytest.mark.parametrize("where", LATER)
@pytest.mark.parametrize("vectorise", [True, False])
def test_while_it_runs(tmp_path: Path, where: str, vectorise: bool):
    plugin = written(tmp_path, where)
    with pytest.raises(LATER[where]) as caught:
        run(described(plugin, vectorise=vectorise), tmp_path / "run")
    names_the_line(str(caught.value), plugin, where)
    assert "Trouble: first" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "Trouble"
    check_log(tmp_path / "run", plugin)


def check_log(folder: Path, plugin: Path) -> None:
    log = (folder / "run.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert f'File "{plugin}", line' in log
    assert "engine/" in log  # whole: not the user's lines alone
    assert "Trouble: first\nsecond" in log


@pytest.mark.parametrize("where", ["client_step", "load", pytest.param("server_update", marks=pytest.mark.long)])
def test_on_ray(tmp_path: Path, where: str):
    plugin = written(tmp_path, where)
    with pytest.raises(LATER.get(where, ConfigError)) as caught:
        run(described(plugin, backend="ray", workers=1, cpus=0.5), tmp_path / "run")
    names_the_line(str(caught.value), plugin, where)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteCause)
    assert f'File "{plugin}", line' in str(cause)
    assert "Trouble: first\nsecond" in str(cause)
    if where in LATER:
        check_log(tmp_path / "run", plugin)
    else:  # a run that never began leaves no folder behind
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("where", "status"), [("factory", 2), ("load", 2), ("client_step", 1), ("server_metrics", 1)])
def test_on_the_command_line(tmp_path: Path, where: str, status: int, monkeypatch: pytest.MonkeyPatch):
    plugin = written(tmp_path, where)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.yaml").write_text("workload: work\nmethod: own\nplugins: own.py\n")
    small = ("federation.clients=6", "federation.cohort=3", "federation.rounds=2", "federation.local.batch=4")
    done = invoke("run", "e.yaml", "engine.backend=local", "tracking.uri=none", *small)
    assert done.exit_code == status, done.output
    line = error_in(done.stderr)
    assert line.startswith("error: ")
    names_the_line(line, plugin, where)


def test_a_split_that_is_none(tmp_path: Path):
    plugin = written(tmp_path, "")
    plugin.write_text(
        plugin.read_text().replace(
            "    def check(self):\n",
            "    def split(self, seed, clients):\n        return None\n\n    def check(self):\n",
        )
    )
    with pytest.raises(ConfigError, match=r"^workload: split must return a workloads\.workload\.Split, got NoneType"):
        run(described(plugin))
    assert Split._fields == ("train", "test", "client_index")
