"""The roles of Shakespeare that are clients, and their lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.workloads.data.characters import tokens_of
from fedfleet.workloads.data.roles import FILE, Roles

LINES = [
    *(("hamlet__A", "hamlet", "train", "to be or"), ("hamlet__A", "hamlet", "train", "not to be")),
    *(("hamlet__A", "hamlet", "test", "that is"), ("hamlet__B", "hamlet", "train", "who is there, now or")),
    *(("hamlet__B", "hamlet", "test", "nay"), ("macbeth__C", "macbeth", "train", "when shall we three")),
    *(("macbeth__C", "macbeth", "test", "meet again"), ("macbeth__D", "macbeth", "train", "double double toil")),
    *(("macbeth__D", "macbeth", "test", "trouble"), ("tempest__E", "tempest", "train", "x")),
]
"""The characters of training text are 17, 20, 19, 18 and 1."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    names = ("user", "play", "split", "text")
    pq.write_table(pa.table(dict(zip(names, zip(*LINES, strict=True), strict=True))), tmp_path / FILE)
    return str(tmp_path / FILE)


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, "ABCDE"),
        ({"plays": ("hamlet", "tempest")}, "ABE"),
        ({"without_plays": ("hamlet", "tempest")}, "CD"),
        ({"plays": ("hamlet", "macbeth"), "without_plays": ("macbeth",)}, "AB"),
        ({"least": 18}, "BCD"),
        ({"largest": 2}, "BC"),
        ({"largest": 2, "without_plays": ("hamlet",)}, "CD"),
        ({"largest": 9, "least": 2}, "ABCD"),
    ],
)
def test_roles_are_chosen(settings: dict[str, Any], roles: str, path: str):
    found = [name for name, _, _ in Roles(path=path, **settings).of_clients()]
    assert [name[-1] for name in found] == [*roles]


def test_of_equal_roles_the_first_by_name_are_chosen(tmp_path: Path):
    lines = [(f"hamlet__{role}", "hamlet", "train", "word") for role in "CBA"]
    names = ("user", "play", "split", "text")
    pq.write_table(pa.table(dict(zip(names, zip(*lines, strict=True), strict=True))), tmp_path / FILE)
    found = [name[-1] for name, _, _ in Roles(path=str(tmp_path / FILE), largest=2).of_clients()]
    assert found == ["A", "B"]


def test_roles_with_test_lines_alone_are_no_clients(path: str):
    """Nor are those whose training lines are empty."""
    lines = [*LINES, ("tempest__F", "tempest", "test", "nothing else"), ("tempest__G", "tempest", "train", "")]
    names = ("user", "play", "split", "text")
    pq.write_table(pa.table(dict(zip(names, zip(*lines, strict=True), strict=True))), path)
    workload = Roles(path=path, length=4)
    assert (workload.split(0, 5).client_index.sizes > 0).all()
    with pytest.raises(ValueError, match="got clients=6 and 5 natural clients"):
        workload.split(0, 6)


def test_roles_may_be_numbered(tmp_path: Path):
    names, lines = ("user", "play", "split", "text"), [(role, "hamlet", "train", "word " * role) for role in (1, 2)]
    pq.write_table(pa.table(dict(zip(names, zip(*lines, strict=True), strict=True))), tmp_path / FILE)
    assert [name for name, _, _ in Roles(path=str(tmp_path / FILE), largest=1).of_clients()] == ["2"]


def test_the_lines_of_a_role_are_one_document(path: str):
    """Its training lines, and its test lines by themselves; the stream of a role ends with the end of a text."""
    train, test = Roles(path=path, largest=1, plays=("macbeth",), length=4).load()
    held_out = train["held_out"]
    for rows, text in ((~held_out, "when shall we three"), (held_out, "meet again")):
        stream = tokens_of(text)
        inputs = train["input"][rows].ravel()[: len(stream) - 1]
        assert inputs.tolist() == stream[:-1].tolist()
    assert (test["input"] == train["input"][held_out]).all()
    first = Roles(path=path, plays=("hamlet",), length=40).load()[0]
    assert first["input"][0][:18].tolist() == tokens_of("to be or\nnot to be").tolist()[:18]


def test_a_run_of_roles(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch):
    """The file is found in the data root, too."""
    (tmp_path / "shakespeare").mkdir()
    Path(path).rename(tmp_path / "shakespeare" / FILE)
    monkeypatch.setenv("FEDFLEET_DATA", str(tmp_path))
    model = {"name": "gpt", "width": 8, "depth": 1, "heads": 2}
    asked = {
        "workload": {"name": "roles", "without_plays": ["tempest"], "length": 8, "model": model},
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 4, "cohort": 2, "rounds": 1, "weights": "tokens", "local": {"steps": 1, "batch": 2}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    assert {"eval/perplexity", "eval/clients/test_loss"} <= set(run(experiment(asked)).rows[-1])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"plays": ("hamlett",)}, "plays: no play is called hamlett; nearest are hamlet"),
        ({"without_plays": ("temptest",)}, "without_plays: no play is called temptest; nearest are tempest"),
        ({"least": 21}, "least: a role must have so many characters, got least=21 of 20 at most; lower it"),
        ({"least": -1}, "least >= 0 must hold, got least=-1"),
        ({"largest": 0}, "largest >= 1 must hold, got largest=0; leave it out for all roles"),
        ({"client": "play"}, "client=user and split_column=split must hold, as in the file, got client=play"),
    ],
)
def test_choices_that_mean_nothing_are_refused(settings: dict[str, Any], told: str, path: str):
    with pytest.raises(ValueError, match=told):
        Roles(path=path, **settings).load()


def test_a_missing_file_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"shakespeare needs shakespeare_roles.parquet in .*, got no such files"):
        Roles(data_root=str(tmp_path)).check()


def test_the_roles_of_the_study(real_set: Callable[[str], Path]):
    """Those that tools.shakespeare_clients writes for language/shakespeare are those that these settings choose."""
    from tools.shakespeare_clients import IN_BASE, chosen

    file = real_set("shakespeare") / FILE
    found = [name for name, _, _ in Roles(path=str(file), without_plays=IN_BASE, largest=100).of_clients()]
    assert found == sorted(set(chosen(pq.read_table(file))["user"].to_pylist()))
