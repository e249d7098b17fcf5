"""Experiment files and overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.config.yaml_text import parse
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.saved_files import saved_config
from fedfleet.tune.files import load, override, shipped

from .commands import invoke

FILE = """
seed: 3
workload: {name: digits, model: {name: mlp, hidden: [16]}, partition: {name: dirichlet, beta: 0.5}}
method: {name: scaffold, rule: {name: momentum, lr: 0.1, beta: 0.8}}
federation: {clients: 12, cohort: 4, rounds: 7, local: {steps: 2, batch: 8}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    return str(path)


def refused(source: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    return str(caught.value)


def written(folder: Path, text: str) -> str:
    path = folder / "written.yaml"
    path.write_text(text)
    return str(path)


# --- precedence and types ---------------------------------------------------------------------------------------------
def test_command_line_over_file_over_default(file: str):
    experiment = load(file, ["federation.rounds=9"])
    assert experiment.federation.rounds == 9
    assert experiment.federation.clients == 12
    assert experiment.seed == 3
    assert experiment.evaluate.every == 5
    assert experiment.name == "mine"


def test_the_last_of_equal_overrides_wins(file: str):
    assert load(file, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1e3),
        ("-.5e+2", -50.0),
        ("1.0e-3", 1e-3),
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("[1, 2]", [1, 2]),
        ("{name: adam, lr: 1e-2}", {"name": "adam", "lr": 0.01}),
        ("sqlite:///a/b.db", "sqlite:///a/b.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("a=b", "a=b"),
        ("1e", "1e"),
        ("e3", "e3"),
    ],
)
def test_types_of_values(text: str, value: Any):
    assert override({}, [f"key={text}"]) == {"key": value}
    assert type(override({}, [f"key={text}"])["key"]) is type(value)


def test_a_files_1e_minus_3_is_a_number():
    assert parse("lr: 1e-3", "here") == {"lr": 1e-3}


# --- overrides of parts -----------------------------------------------------------------------------------------------
def method(file: str, *overrides: str) -> Any:
    return load(file, overrides).method


def test_an_argument_of_a_nested_part(file: str):
    assert method(file, "method.rule.lr=0.2")["rule"] == {"name": "momentum", "lr": 0.2, "beta": 0.8}


def test_another_name_drops_the_old_parts_arguments(file: str):
    assert method(file, "method.rule.name=sgd") == {"name": "scaffold", "rule": {"name": "sgd"}}
    assert method(file, "method.name=fedavg") == {"name": "fedavg"}


def test_the_same_name_keeps_them(file: str):
    assert method(file, "method.rule.name=momentum")["rule"]["beta"] == 0.8


@pytest.mark.parametrize("turned", [False, True])
def test_the_order_of_overrides_does_not_matter(file: str, turned: bool):
    given = ["method.rule.lr=0.2", "method.rule.name=sgd", "method.name=fedavg"]
    assert method(file, *given[:: -1 if turned else 1]) == {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.2}}


@pytest.mark.parametrize("turned", [False, True])
def test_a_whole_part_comes_before_its_arguments(file: str, turned: bool):
    given = ["method.rule.lr=0.2", "method.rule=sgd"]
    assert method(file, *given[:: -1 if turned else 1])["rule"] == {"name": "sgd", "lr": 0.2}


def test_a_bare_name_becomes_a_mapping(file: str):
    assert load(file, ["workload=digits", "workload.model=mlp", "workload.model.hidden=[8]"]).workload == {
        "name": "digits",
        "model": {"name": "mlp", "hidden": [8]},
    }


def test_steps_and_epochs_exclude_each_other(file: str):
    local = load(file, ["federation.local.epochs=3"]).federation.local
    assert (local.epochs, local.steps, local.batch) == (3, None, 8)
    both = refused(file, "federation.local.epochs=3", "federation.local.steps=3")
    assert both == "federation.local.steps: give either steps or epochs, not both, got 3 with epochs=3; drop one"


def test_an_alias_is_overridden_in_one_place(tmp_path: Path):
    both = "workload: quadratic\nmethod: {name: x, rule: &r {name: sgd, lr: 1.0}, inner: *r}"
    assert load(written(tmp_path, both), ["method.inner.lr=2"]).method == {
        "name": "x",
        "rule": {"name": "sgd", "lr": 1.0},
        "inner": {"name": "sgd", "lr": 2},
    }


def test_a_number_has_no_keys(file: str):
    assert refused(file, "federation.clients.many=3") == (
        "federation.clients is 12, which has no keys of its own; write federation.clients=value"
    )
    assert "workload.model.hidden is [16]" in refused(file, "workload.model.hidden.0=3")


@pytest.mark.parametrize("text", ["rounds", "=3", "a..b=3", ".a=3", "a.=3"])
def test_malformed_overrides(file: str, text: str):
    assert refused(file, text) == f"{text} is not an override; write key=value, as in federation.rounds=100"


# --- files that are refused -------------------------------------------------------------------------------------------
def test_a_key_given_twice(tmp_path: Path):
    path = written(tmp_path, "seed: 0\nworkload: digits\nmethod: fedavg\nseed: 1\n")
    assert refused(path) == f"{path} is not valid YAML, line 4: the key seed is given twice"
    nested = written(tmp_path, "workload: digits\nmethod: {name: fedavg, rule: {lr: 1,\n  lr: 2}}\n")
    assert "line 3: the key lr is given twice" in refused(nested)


def test_merged_keys_are_defaults(tmp_path: Path):
    path = written(tmp_path, "workload: &w {name: digits, model: mlp}\nmethod: {<<: *w, name: fedavg}\n")
    assert load(path).method == {"name": "fedavg", "model": "mlp"}


@pytest.mark.parametrize(
    ("text", "line"), [("seed: 0\nworkload: {name: digits\nmethod: x\n", 3), ("seed: 0\n\tmethod: x\n", 2)]
)
def test_invalid_yaml_names_the_line(tmp_path: Path, text: str, line: int):
    path = written(tmp_path, text)
    assert f"{path} is not valid YAML, line {line}: " in refused(path)


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir ['{0}/made']", "!!python/name:os.system", "!!python/tuple [1, 2]", "!env A"]
)
def test_yaml_constructs_no_objects(tmp_path: Path, tag: str, file: str):
    value = tag.format(tmp_path)
    path = written(tmp_path, f"workload: digits\nmethod: fedavg\nseed: {value}\n")
    assert "line 3: could not determine a constructor" in refused(path)
    assert "could not determine a constructor" in refused(file, f"seed={value}")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("2026-02-30", "'2026-02-30' is no timestamp"),
        ("!!int x", "'x' is no int"),
        ("!!int ''", "'' is no int"),
        ("!!float x", "'x' is no float"),
        ("!!bool x", "'x' is no bool"),
        ("!!timestamp x", "'x' is no timestamp"),
        ("7" * 5000, "'7777777777777777777777777777777777777777' is no int"),
        ("{[1, 2]: 3}", "found unhashable key"),
        ("!!binary é", "failed to convert base64 data"),
    ],
)
def test_values_that_are_not_what_they_look_like(tmp_path: Path, value: str, told: str, file: str):
    path = written(tmp_path, f"workload: digits\nmethod: fedavg\nname: {value}\n")
    assert refused(path).startswith(f"{path} is not valid YAML, line 3: {told}")
    shown = f"name={value}" if len(value) < 200 else f"name={value}"[:200] + "…"
    assert refused(file, f"name={value}").startswith(f"{shown} is not valid YAML, line 1: {told}")


def doubled(first: str, inner: str) -> str:
    """40 lines, each of which has the line before twice: 2^40 values without their aliases. inner: such a line."""
    return "".join([f"a0: &a0 {first}\n", *(f"a{n}: &a{n} {inner.format(n - 1)}\n" for n in range(1, 41))])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (doubled("[x, y]", "[*a{0}, *a{0}]"), "has more than 100,000 values when its aliases are replaced"),
        (doubled("{x: y}", "{{b: *a{0}, c: *a{0}}}"), "has more than 100,000 values when its aliases are replaced"),
        (doubled("{x: y}", "{{<<: [*a{0}, *a{0}]}}"), "<< makes more than 100,000 keys"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "it is nested too deeply"),
    ],
    ids=["lists", "mappings", "merged keys", "brackets"],
)
def test_a_text_that_would_grow_without_bounds_is_refused(tmp_path: Path, text: str, told: str):
    """Without a bound these would take longer than any test may."""
    assert told in refused(written(tmp_path, text))
    with pytest.raises(ConfigError, match=re.escape(told)):
        saved_config_of(tmp_path, text)


def saved_config_of(folder: Path, text: str) -> Any:
    (folder / "config.yaml").write_text(text)
    return saved_config(folder)


@pytest.mark.parametrize("text", ["", "- a\n", "digits\n"])
def test_not_a_mapping(tmp_path: Path, text: str):
    assert "must hold a mapping of keys such as method and workload, got " in refused(written(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path):
    binary = tmp_path / "model.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    assert "cannot be read" in refused(str(binary))
    assert "there is no experiment" in refused(str(tmp_path))
    assert "an alias contains itself" in refused(
        written(tmp_path, "workload: &w {name: digits, again: *w}\nmethod: fedavg\n")
    )


# --- unknown names ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sead=1", "sead is not a key; did you mean seed? valid: seed, name,"),
        ("federation.cohrt=1", "federation.cohrt is not a key; did you mean cohort? valid: clients, cohort,"),
        ("federation.local.stepz=1", "federation.local.stepz is not a key; did you mean steps? valid: steps, epochs"),
        ("tracking.url=x", "tracking.url is not a key; did you mean uri? valid: name, uri, "),
        ("rounds=5", "rounds is not a key; did you mean federation.rounds? valid: seed, "),
        ("lr=1", "lr is not a key; did you mean method.rule.lr? valid: seed, "),
        ("hidden=3", "hidden is not a key; did you mean workload.model.hidden? valid: seed, "),
        (
            "federation.steps=5",
            "federation.steps is not a key; did you mean federation.local.steps or evaluate.clients.adapt.steps? ",
        ),
        ("federation.num_clients=5", "federation.num_clients is not a key; did you mean clients? valid: clients, "),
        ("engine.backend=rey", "engine.backend must be 'auto', 'ray' or 'local', got 'rey'"),
        ("engine.device=gpu", "engine.device: must be auto, cpu, cuda, cuda:0, xpu or mps, got 'gpu'"),
        ("engine.workers=0", "engine.workers: must be a positive integer or auto, got 0"),
        ("federation=5", "federation must be a mapping of keys, got 5"),
        ("plugins=3", "plugins.0 must be a valid string, got 3"),
        ("workload=5", "workload: must be a name or {name: …, arguments}, got 5"),
    ],
)
def test_unknown_keys_and_wrong_values(file: str, text: str, message: str):
    assert refused(file, text).startswith(message)


def test_an_unknown_experiment():
    assert refused("digts") == (
        f"there is no experiment digts; did you mean digits? valid: {', '.join(shipped())}, or the path of a YAML file"
    )


# --- plug-ins ---------------------------------------------------------------------------------------------------------
def test_a_plugin_is_found_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text("")
    path = written(tmp_path, "workload: digits\nmethod: fedavg\nplugins: mine.py\n")
    monkeypatch.chdir("/")
    assert load(path).plugins == (str(tmp_path / "mine.py"),)


# --- shipped experiments ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", shipped())
def test_shipped_experiments_validate_and_show(name: str, data_root: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDFLEET_DATA", data_root)
    assert isinstance(load(name), Experiment)
    shown = invoke("show", name)
    assert shown.exit_code == 0, shown.output
    assert f"name: {name}" in shown.stdout
    assert "total" in shown.stdout
