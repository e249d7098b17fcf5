"""Plug-ins are found by path, by name and by entry point, every worker loads them, and errors in them are one-line
messages."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.engine import Result, run
from fedfleet.engine.config.registry import Registry, find_plugin
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.client_index import ClientIndex, check_index

from ..bare import bare_python

ROOT = Path(__file__).parents[2]

METHOD = """
from dataclasses import dataclass
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.local import Rule
from fedfleet.algorithms.parts.rules import Sgd

def halved(rule: Rule = Sgd(0.1)):
    "fedavg with half a step of the server"
    return fedavg(rule, server_lr=0.5)

METHODS = {"halved": halved}
"""
RULE = """
from __future__ import annotations
from dataclasses import dataclass
from fedfleet.algorithms.local import Rule

@dataclass(frozen=True)
class Signed(Rule):
    "y - lr sign(v)"
    lr: float = 0.01

    def step(self, y, v, state):
        return y.add(v.sign(), -self.lr), state

RULES = {"signed": Signed}
"""
WORKLOAD = """
from dataclasses import dataclass
import numpy as np
from torch import nn
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.workload import Model, Partition
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Iid

@dataclass(frozen=True)
class Bars(Classification):
    "which half of a row of 4 is larger"
    classes, shape = 2, (4,)
    model: Model = Logistic()
    partition: Partition = Iid()

    def load(self):
        x = np.sin(np.arange(240.0)).astype(np.float32).reshape(60, 4)
        columns = {"input": x, "label": (x[:, :2].sum(1) > x[:, 2:].sum(1)).astype(np.int64)}
        return columns, columns

@dataclass(frozen=True)
class Scaled(Model):
    "linear, then a norm"
    def build(self, shape, classes):
        return nn.Sequential(nn.Linear(shape[0], classes), nn.LayerNorm(classes))

@dataclass(frozen=True)
class Rounds(Partition):
    "row r to client r mod N"
    def deal(self, labels, clients, seed):
        return ClientIndex.of([np.arange(i, len(labels), clients) for i in range(clients)])

WORKLOADS = {"bars": Bars}
MODELS = {"scaled": Scaled}
PARTITIONS = {"rounds": Rounds}
"""
SPEC = {
    "workload": {"name": "bars", "model": "scaled", "partition": "rounds"},
    "method": {"name": "halved", "rule": {"name": "signed", "lr": 0.02}},
}
PLAN = {
    "federation": {"clients": 6, "cohort": 4, "rounds": 2, "local": {"steps": 2, "batch": 8}},
    "tracking": {"uri": "none"},
}


def described(plugins: list[str], spec: dict[str, Any] = SPEC, **engine: Any) -> Experiment:
    return experiment({"plugins": plugins, **spec, **PLAN, "engine": {"backend": "local", "block": 2, **engine}})


def finished(plugins: list[str], spec: dict[str, Any] = SPEC, **engine: Any) -> Result:
    return run(described(plugins, spec, **engine))


def refused(plugins: list[str], spec: dict[str, Any] = SPEC) -> str:
    with pytest.raises(ConfigError) as caught:
        finished(plugins, spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which has the plug-ins as files and also in a package."""
    package = tmp_path / "mine" / "parts"
    package.mkdir(parents=True)
    for name, text in {"method": METHOD, "rule": RULE, "workload": WORKLOAD}.items():
        (tmp_path / f"own_{name}.py").write_text(text)
        (package / f"{name}.py").write_text(text)
    (tmp_path / "mine" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "from .method import METHODS\nfrom .rule import RULES\nfrom .workload import MODELS, PARTITIONS, WORKLOADS\n"
    )
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("mine", "own_method", "own_rule", "own_workload", "broken"):
            del sys.modules[name]


BY_PATH = ["own_method.py", "own_rule.py", "own_workload.py"]
BY_NAME = ["own_method", "own_rule", "own_workload"]


# --- where it may be --------------------------------------------------------------------------------------------------
def test_path_name_and_package_are_alike():
    results = [finished(plugins) for plugins in (BY_PATH, BY_NAME, ["mine.parts"])]
    assert len({result.model_sha256 for result in results}) == 1
    assert set(results[0].metrics) == {"train/loss", "eval/loss", "eval/accuracy", "eval/auc"}


def test_named_again_in_the_same_process(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """This also works after the user has imported the module, and the module's classes stay the same objects."""
    monkeypatch.syspath_prepend(str(folder))
    import own_workload  # pyright: ignore[reportMissingImports]

    first, second = finished(BY_NAME), finished(BY_NAME)
    assert first.model_sha256 == second.model_sha256
    assert sys.modules["own_workload"] is own_workload


def test_an_edited_file_is_loaded_anew(folder: Path):
    before = finished(BY_NAME).model_sha256
    (folder / "own_method.py").write_text(METHOD.replace("0.5", "0.25"))
    assert finished(BY_NAME).model_sha256 == finished(BY_PATH).model_sha256 != before


def test_files_of_one_name_in_two_folders(folder: Path):
    """The classes of each file use the names of their own module."""
    (folder / "other").mkdir()
    (folder / "other" / "own_rule.py").write_text(METHOD)
    parts = RunSpec.of("", described(["own_rule.py", "other/own_rule.py"])).registry
    built = parts.build("METHODS", {"name": "halved", "rule": "signed"}, "method")
    assert type(built.rule).__name__ == "Signed"


def test_path_beside_the_experiment_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from fedfleet.tune.files import load

    (folder / "e.yaml").write_text(json.dumps({"plugins": BY_PATH, **SPEC}))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    loaded = load("../e.yaml", ["engine.backend=local", "tracking.uri=none", "federation.clients=20"])
    assert run(loaded).metrics


# --- entry points -----------------------------------------------------------------------------------------------------
SCRIPT = """
import json
import os
import sys
from dataclasses import dataclass

import ray
from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.workloads.problems.quadratic import Quadratic

@dataclass(frozen=True)
class Near(Quadratic):
    "defined in the script itself"
    heterogeneity: float = 0.1

def sha(data, backend, workers):
    engine = {"backend": backend, "workers": workers, "block": 2}
    return run(experiment({**data, "engine": engine})).model_sha256

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
os.chdir(sys.argv[1])
data = json.loads(sys.argv[2])
own = {**data, "workload": Near(), "method": "halved"}
print(sha(data, "local", 1), sha(data, "ray", 2))
print(sha(own, "local", 1), sha(own, "ray", 1))
"""


def installed(folder: Path, value: str) -> dict[str, str]:
    """Environment variables with which a distribution with one entry point is installed."""
    info = folder / "own_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fedfleet.plugins]\nown = {value}\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.long
def test_every_worker_has_them(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """Workers have plug-ins that are given by path, by name, from a package, and by an entry point that no experiment
    names. Ray is started in one folder and the run in another, which Ray's processes do not know. A class that is
    defined in the script itself is sent too."""
    ours, elsewhere = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("elsewhere")
    (ours / "by_entry_point.py").write_text(RULE)
    (elsewhere / "script.py").write_text(SCRIPT)
    data = {"plugins": ["own_method.py", "mine.parts.workload", "own_workload"], **SPEC, **PLAN}
    command = [sys.executable, "script.py", str(folder), json.dumps(data)]
    env = installed(ours, "by_entry_point")
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[0] == first[1] == finished(BY_PATH).model_sha256
    assert second[0] == second[1] != first[0]


def test_entry_point_that_cannot_be_loaded(folder: Path):
    code = "from fedfleet.tune.cli import main; main(['list', 'rules'])"
    env = installed(folder, "mine.absent")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: plugins: the entry point own = mine.absent cannot be loaded: ModuleNotFound")
    assert done.stderr.count("\n") == 1


def test_the_own_parts_are_found_without_an_installed_package(tmp_path: Path):
    """The package is only on the path, as on a bare machine: there are no entry points of it."""
    python, env = bare_python(tmp_path / "packages")
    (tmp_path / "packages" / "fedfleet").symlink_to(ROOT / "src/fedfleet")
    code = """
from importlib import metadata
from fedfleet.engine.config.registry import TABLES, Registry

assert not [point for point in metadata.entry_points(group="fedfleet.plugins") if point.value.startswith("fedfleet.")]
tables = Registry().tables
print(*[table for table in TABLES if not tables[table]])
print("fedavg" in tables["METHODS"], "digits" in tables["WORKLOADS"], "mlflow" in tables["TRACKERS"])
"""
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\nTrue True True\n"


# --- tables -----------------------------------------------------------------------------------------------------------
def test_tables_are_extended_and_shadowed(folder: Path):
    """Of entries with the same name, that of the plug-in that is named last is used; all other entries of the package
    stay."""
    (folder / "first.py").write_text(METHOD.replace('{"halved": halved}', '{"fedavg": halved, "halved": halved}'))
    (folder / "last.py").write_text(METHOD.replace("0.5", "0.25"))
    own = Registry([find_plugin("first.py"), find_plugin("last.py")])
    for table, entries in Registry().tables.items():
        assert entries.keys() <= own.tables[table].keys()
    assert own.build("METHODS", "fedavg", "method").server.lr == 0.5
    assert own.build("METHODS", "halved", "method").server.lr == 0.25
    assert Registry().build("METHODS", "fedavg", "method").server.lr == 1.0


@pytest.mark.parametrize(
    ("entry", "built"),
    [
        ("functools.partial(halved, Sgd(0.3))", 0.3),
        ("functools.partial(halved, rule=Sgd(0.3))", 0.3),
        ("lambda **more: halved(Sgd(0.3))", 0.3),
        ("'own_method:halved'", 0.1),
    ],
)
def test_kinds_of_entries(folder: Path, entry: str, built: float):
    (folder / "kinds.py").write_text(f"import functools\n{METHOD}\nMETHODS = {{'k': {entry}}}\n")
    parts = Registry([find_plugin("kinds.py"), find_plugin("own_method")])
    assert parts.build("METHODS", "k", "method").rule.lr == built


def test_a_class_with_an_init_of_its_own(folder: Path):
    own = RULE.replace("@dataclass(frozen=True)\n", "").replace(
        "    lr: float = 0.01\n", "    def __init__(self, lr: float = 0.01):\n        self.lr = lr\n"
    )
    (folder / "init.py").write_text(own)
    parts = Registry([find_plugin("init.py")])
    assert parts.build("RULES", {"name": "signed", "lr": 1}, "rule").lr == 1.0
    with pytest.raises(ConfigError, match=r"rule\.lr must be a valid number"):
        parts.build("RULES", {"name": "signed", "lr": "much"}, "rule")


# --- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["absent.py", "absent", "mine.absent", "absent.parts", "a/b"])
def test_missing(name: str):
    assert name in (said := refused([name]))
    assert said.endswith("give a path to a .py file or a module's name")


@pytest.mark.parametrize("name", ["broken.py", "broken", "mine"])
def test_without_tables(folder: Path, name: str):
    (folder / "broken.py").write_text("METHOD = {}\n")
    assert "has none of the tables METHODS, RULES" in refused([name])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nraise RuntimeError('no\\nluck')", "cannot be loaded (line 2): RuntimeError: no"),
        ("def f(:", "cannot be loaded: SyntaxError: invalid syntax"),
        ("import absent_package", "cannot be loaded (line 1): ModuleNotFoundError: No module named 'absent_package'"),
        ("METHODS = ['a']", "must be a table, name -> callable, got ['a']"),
    ],
)
def test_broken(folder: Path, text: str, said: str):
    (folder / "broken.py").write_text(text)
    (folder / "mine" / "__init__.py").write_text(text)
    for name in ("broken.py", "broken", "mine"):
        message = refused([name])
        assert message.startswith("plugins: ")
        assert said.replace(" (line 1)", "").replace(" (line 2)", "").split(": ")[-1] in message
        assert name in message
        if name != "mine":
            assert said in message


def test_package_that_breaks_on_the_way(folder: Path):
    (folder / "mine" / "__init__.py").write_text("import absent_package\n")
    assert refused(["mine.parts"]) == (
        "plugins: mine.parts cannot be loaded: ModuleNotFoundError: No module named 'absent_package'"
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("dict", "method.name: bad cannot be built: no signature found"),
        ("5", "method.name: bad cannot be built: 5 is not a callable object"),
        ("'absent_package:f'", "method.name: bad cannot be built: No module named 'absent_package'"),
        ("Half", "method.name: bad cannot be built: it does not define client_begin, client_finish"),
        ("lambda: {}", "is not a method; give a name or an Algorithm"),
        ("unknown", "method.name: bad cannot be built: name 'Absent' is not defined"),
    ],
)
def test_entries_that_cannot_be_built(folder: Path, entry: str, said: str):
    (folder / "bad.py").write_text(
        "from fedfleet.algorithms.contract import Algorithm\n"
        "class Half(Algorithm): ...\n"
        "def unknown(mu: 'Absent' = 1): ...\n"
        f"METHODS = {{'bad': {entry}}}\n"
    )
    assert said in refused(["bad.py"], {"workload": "quadratic", "method": "bad"})


def test_a_workload_that_is_none(folder: Path):
    (folder / "bad.py").write_text("WORKLOADS = {'bad': lambda: {}}\n")
    assert "is not a workload" in refused(["bad.py"], {"workload": "bad", "method": "fedavg"})


def test_a_model_that_is_a_module(folder: Path):
    (folder / "bad.py").write_text("from torch import nn\nMODELS = {'flat': nn.Flatten}\n")
    assert refused(["bad.py"], {"workload": {"name": "digits", "model": "flat"}, "method": "fedavg"}) == (
        "workload.model is a Flatten, which has no method build, got 'flat'; "
        "an entry of MODELS must give a subclass of Model"
    )


PARTITION = """
from dataclasses import dataclass
from numpy import arange, array
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.workload import Partition

@dataclass(frozen=True)
class Bad(Partition):
    def deal(self, labels, clients, seed):
        return {0}

PARTITIONS = {{"bad": Bad}}
"""


@pytest.mark.parametrize(
    ("dealt", "said"),
    [
        ("[arange(9), arange(9, 20)]", "a partition must return a ClientIndex, got list; return ClientIndex.of("),
        (
            "ClientIndex(array([0, 5, 9]), [*range(9)])",
            "rows of a ClientIndex must be whole numbers of shape (n,), got l",
        ),
        (
            "ClientIndex(array([0, 5.0, 9]), arange(9))",
            "offsets of a ClientIndex must be whole numbers of shape (n,), got",
        ),
        (
            "ClientIndex(array([1, 5, 9]), arange(9))",
            "offsets of a ClientIndex must ascend from 0 to the number of its",
        ),
        ("ClientIndex(array([0, 5, 10]), arange(9))", "its rows, 9, got [ 0 5 10]; ClientIndex.of makes them"),
        ("ClientIndex(array([0, 10, 9]), arange(9))", "its rows, 9, got [ 0 10 9]; ClientIndex.of makes them"),
        ("ClientIndex.of([arange(9), arange(9, 1443)])", "0 <= row < 1442 must hold, the number of training rows"),
        ("ClientIndex.of([arange(9), arange(-1, 5)])", "for the rows of a ClientIndex, got -1; give row numbers"),
        ("ClientIndex.of([arange(9), arange(8, 20)])", "got row 8 of the clients 0 and 1; give it to one of them"),
    ],
)
@pytest.mark.parametrize("over", [None, "auc"])
def test_what_a_partition_returns(folder: Path, dealt: str, said: str, over: str | None):
    (folder / "bad.py").write_text(PARTITION.format(dealt))
    inner = {"name": "digits", "partition": "bad"}
    data = {"workload": inner if over is None else {"name": over, "of": inner}, "method": "fedavg"}
    found = refused(["bad.py"], {**data, "federation": {"clients": 2, "cohort": 1}})
    assert found.startswith("workload: ")
    assert said in found
    assert "Error" not in found


def test_a_row_of_two_clients_of_a_workload(folder: Path):
    """The workload deals its rows itself. A row may be twice in the rows of one client."""
    (folder / "bare.py").write_text(WORKLOAD.replace("arange(i, len(labels), clients)", "arange(i, i + 2)"))
    said = refused(["own_method", "own_rule", "bare.py"])
    assert (
        said == "workload: no row may belong to two clients, got row 1 of the clients 0 and 1; give it to one of them"
    )
    check_index(ClientIndex.of([np.array([0, 0, 3]), np.array([1, 2])]), 4)


def test_a_client_without_rows(folder: Path):
    (folder / "bare.py").write_text(
        WORKLOAD.replace("arange(i, len(labels), clients)", "arange(i, len(labels) * (i > 1), clients)")
    )
    said = refused(["own_method", "own_rule", "bare.py"])
    assert said == "workload: every client must have a row, got rows for 4 of 6 clients; lower federation.clients"
