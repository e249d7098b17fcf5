"""Any value for any key gives a result, or status 2 with one sentence that names the key, and never a traceback. The
values are drawn from a fixed seed. Some of them are valid for their key; then the command must succeed.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from click.testing import Result

from fedfleet.algorithms.table import METHODS
from fedfleet.engine.config.registry import Registry, resolve, signature
from fedfleet.engine.config.schema import Experiment, Section
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.storage.expanded import check_folder
from fedfleet.engine.workload.model import check_size
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp

from .commands import LOCAL, invoke

pytestmark = pytest.mark.usefixtures("here")

VALUES = [
    *("-1", "0", "1.5", "-0.5", "1e18", "1e30", "-1e30", "1180591620717411303424", "-1180591620717411303424"),
    *(".inf", "-.inf", ".nan", "true", "false", "null", "''", "x", "'1'", "é☃", "a b", "[]", "{}", "[1, 2]", "['']"),
    *("{name: null}", "{name: x}", "{name: [1]}", "{x: 1}", "{schedule: cosine}", "{schedule: nosuch, start: 1}"),
    *("{schedule: cosine, start: x}", "{schedule: exponential, start: 1, decay: 1e300}", "[[[]]]", "2020-01-01"),
    *("2026-02-30", "!!int x", "7" * 5000, r'"\ud800"', r'{name: "x\ud800"}', r'{"\ud800": 1}'),
]
CASES = 400
SECONDS = 20.0


def keys(section: type[Section] = Experiment, path: tuple[str, ...] = ()) -> list[str]:
    """All dotted keys of a configuration, sections included."""
    found = []
    for name, field in section.model_fields.items():
        found.append(".".join((*path, name)))
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += keys(field.annotation, (*path, name))
    return found


def arguments(table: str, name: str) -> list[str]:
    return list(signature(resolve(Registry().tables[table][name]))[1])


def one_sentence(done: Result, what: str) -> None:
    """Check that the command succeeded, or that it ended with a one-line message."""
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{what}: {done.exception!r}"
    if done.exit_code == 0:
        return
    assert done.exit_code == 2, f"{what}: {done.exit_code}, {done.stderr}"
    (line,) = [text for text in done.stderr.splitlines() if not text.startswith("changed: ")]
    assert line.startswith("error: "), f"{what}: {line}"
    assert "Traceback" not in line
    assert len(line) < 1500, f"{what}: {line}"


# --- anything for any key ---------------------------------------------------------------------------------------------
def test_any_value_for_any_key_of_the_configuration(here: Path):
    drawn = random.Random(29)
    pairs = [(key, value) for key in keys() for value in VALUES]
    refused, began = 0, time.process_time()
    for key, value in drawn.sample(pairs, CASES):
        done = invoke("show", "digits", f"{key}={value}")
        one_sentence(done, f"{key}={value}")
        if done.exit_code == 2:
            refused += 1
            assert key.partition(".")[0] in done.stderr, f"{key}={value}: {done.stderr}"
    assert refused > CASES / 2
    assert time.process_time() - began < 10 * SECONDS  # processor time; some seconds
    assert set(here.iterdir()) == set()


@pytest.mark.parametrize("table", ["METHODS", "WORKLOADS", "MODELS", "PARTITIONS", "RULES"])
def test_any_value_for_any_argument_of_a_part(table: str, here: Path):
    drawn = random.Random(table)
    place = {"METHODS": "method", "WORKLOADS": "workload", "MODELS": "workload.model"}
    where = {**place, "PARTITIONS": "workload.partition", "RULES": "method.rule"}[table]
    names = [
        name for name in Registry().tables[table] if table != "WORKLOADS" or name in ("digits", "quadratic", "saddle")
    ]
    pairs = [(name, key, value) for name in names for key in arguments(table, name) for value in VALUES]
    base = ("method=fedavg",) if table == "RULES" else ()
    for name, key, value in drawn.sample(pairs, min(60, len(pairs))):
        what = (f"{where}.name={name}", f"{where}.{key}={value}")
        done = invoke("show", "digits", *base, *what)
        one_sentence(done, " ".join(what))


@pytest.mark.parametrize("table", ["METHODS", "RULES"])
def test_runs_of_any_argument_end_in_a_sentence(table: str):
    """The command also makes a round, so that status 1 is allowed: a run may fail, for example diverge."""
    drawn = random.Random(31)
    where = "method" if table == "METHODS" else "method.rule"
    base = ("method=fedavg",) if table == "RULES" else ()
    tiny = ("federation.clients=4", "federation.cohort=2", "federation.rounds=1", "federation.local.steps=1")
    names = list(Registry().tables[table])
    pairs = [(name, key, value) for name in names for key in arguments(table, name) for value in VALUES]
    for number, (name, key, value) in enumerate(drawn.sample(pairs, 40)):
        what = (f"{where}.name={name}", f"{where}.{key}={value}", "workload.model={name: mlp, hidden: [4]}")
        done = invoke("run", "digits", *LOCAL, *base, *tiny, *what, "--out", f"run-{number}")
        assert done.exception is None or isinstance(done.exception, SystemExit), f"{what}: {done.exception!r}"
        assert done.exit_code in (0, 1, 2), what
        assert "Traceback" not in done.stderr, what


# --- cases that were met ----------------------------------------------------------------------------------------------
BEYOND = 2**70


@pytest.mark.parametrize(
    ("override", "says"),
    [
        *((f"workload={{name: parquet_text, classes: {n}}}", "classes >= 2") for n in (-1, 0, 1)),
        *((f"workload={{name: {name}, classes: 1e18}}", "classes=1") for name in ("idx", "parquet_text")),
        *((f"{key}={BEYOND}", f"{key} must be less than") for key in ("seed", "engine.threads", "evaluate.every")),
        *((f"federation.local.{key}={BEYOND}", f"federation.local.{key} must be less") for key in ("steps", "batch")),
        *((f"federation.{key}={BEYOND}", f"federation.{key} must be less") for key in ("rounds", "clients")),
        *((f"engine.{key}={BEYOND}", f"engine.{key}: must be at most") for key in ("workers", "block")),
        ("workload.model={name: mlp, hidden: [1000000000000]}", "workload.model: the model must fit into memory"),
        ("workload.model={name: mlp, hidden: [1000000000000000000]}", "hidden=1000000000000000000; lower it"),
        *(
            (f"method={{name: {name}, tau: 1e30}}", "got method.tau=1e+30; lower it")
            for name in METHODS
            if "tau" in arguments("METHODS", name)
        ),
        ("engine.store=/proc/nowhere", "engine.store: no folder can be made here"),
        ("engine.store=/dev/null/x", "engine.store: no folder can be made here"),
        (f"engine.store={'x' * 300}", "engine.store: no folder can be made here (File name too long)"),
    ],
)
def test_met(override: str, says: str, here: Path):
    done = invoke("run", "digits", "engine.backend=local", "tracking.uri=none", override)
    one_sentence(done, override)
    assert done.exit_code == 2
    assert says in done.stderr, done.stderr
    assert set(here.iterdir()) == set()


@pytest.mark.parametrize("out", ["/proc/nowhere", "/dev/null/x", "x" * 300, "a/" + "x" * 300])
@pytest.mark.parametrize("command", ["run", "study"])
def test_an_out_where_no_folder_can_be(command: str, out: str, here: Path):
    source = "digits" if command == "run" else "heterogeneity"
    done = invoke(command, source, *(LOCAL if command == "run" else ()), "--out", out)
    one_sentence(done, out)
    assert done.exit_code == 2
    assert "--out" in done.stderr
    assert set(here.iterdir()) == set()


def test_folders_are_tried_without_a_trace(here: Path):
    check_folder("x", here / "a" / "b")
    check_folder("x", here)
    assert set(here.iterdir()) == set()
    (here / "file").touch()
    with pytest.raises(ConfigError, match=r"^x: no folder can be made here \(.*file is a file\), got "):
        check_folder("x", here / "file" / "below")


def test_a_model_that_fits(monkeypatch: pytest.MonkeyPatch):
    workload = Digits(model=Mlp((100,)))  # 7,510 parameters
    monkeypatch.setattr("fedfleet.engine.workload.model.physical_memory", lambda: 4 * 7510)
    check_size(workload.outline)
    monkeypatch.setattr("fedfleet.engine.workload.model.physical_memory", lambda: 4 * 7510 - 1)
    with pytest.raises(ConfigError, match="got 7,510 parameters"):
        check_size(workload.outline)


@pytest.mark.parametrize("file", ["/proc/x.db", "/dev/null/x.db", "/dev/null"])
def test_a_store_where_no_file_can_be_costs_no_minutes(file: str, here: Path, monkeypatch: pytest.MonkeyPatch):
    tiny = ("federation.clients=4", "federation.cohort=2", "federation.rounds=1", "engine.backend=local")
    invoke("run", "digits", *tiny, "tracking.uri=sqlite:///warm.db")  # MLflow is imported
    asked, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: asked.append(seconds) or sleep(seconds))
    done = invoke("run", "digits", *tiny, f"tracking.uri=sqlite:///{file}")
    assert sum(asked) < 10, "MLflow waits for 100 s before its last attempt to open a file"
    assert done.exit_code == 0
    assert "warning: not tracked in MLflow: tracking.uri: " in done.stderr
