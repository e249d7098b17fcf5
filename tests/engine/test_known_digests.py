"""Digests of large files are computed once, as long as the files stay as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedfleet.engine.storage.known_digests import known
from fedfleet.workloads.models.stored import StoredTensors, headers

LONG_AGO = 1_000_000_000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counting(answers: list[int]):
    """A function whose calls give 1, 2, … and are noted in a list."""

    def find() -> dict[str, int]:
        answers.append(len(answers) + 1)
        return {"answer": answers[-1]}

    return find


def made(folder: Path, content: str = "abc", when: int = LONG_AGO) -> Path:
    file = folder / "base.bin"
    file.write_text(content)
    os.utime(file, (when, when))
    return file


def test_a_file_is_read_once(tmp_path: Path, cache: Path):
    file, answers = made(tmp_path), []
    assert [known([file], ["a"], counting(answers))["answer"] for _ in range(3)] == [1, 1, 1]
    assert known([file], ["b"], counting(answers)) == {"answer": 2}  # for other settings
    os.utime(file, (LONG_AGO + 1, LONG_AGO + 1))
    assert known([file], ["a"], counting(answers)) == {"answer": 3}
    made(tmp_path, "abcd", LONG_AGO + 1)
    assert known([file], ["a"], counting(answers)) == {"answer": 4}
    other = made(cache, "abcd", LONG_AGO + 1)
    assert known([other], ["a"], counting(answers)) == {"answer": 5}


def test_a_file_with_the_size_and_the_time_of_another_one_is_read(tmp_path: Path, cache: Path):
    """As from an archive in which all files have the same time."""
    file, answers = made(tmp_path, "abc"), []
    known([file], [], counting(answers))
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # a clock of some milliseconds
        made(tmp_path, "abd")
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert known([file], [], counting(answers)) == {"answer": 2}


def test_a_file_that_was_just_changed_is_not_trusted(tmp_path: Path, cache: Path):
    file, answers = tmp_path / "base.bin", []
    file.write_text("abc")
    assert [known([file], [], counting(answers))["answer"] for _ in range(2)] == [1, 2]
    assert not cache.exists()


def test_a_file_that_changes_while_it_is_read_is_not_trusted(tmp_path: Path, cache: Path):
    file = made(tmp_path)
    known([file], [], lambda: {"answer": len(made(tmp_path, "longer", LONG_AGO).read_text())})
    made(tmp_path)
    assert known([file], [], lambda: {"answer": 3}) == {"answer": 3}


def test_a_damaged_entry_is_made_again(tmp_path: Path, cache: Path):
    file, answers = made(tmp_path), []
    known([file], [], counting(answers))
    (entry,) = cache.rglob("*.json")
    for damage in ("", "[]", json.dumps({"facts": {"answer": 9}, "sha256": "0"})):
        entry.write_text(damage)
        assert known([file], [], counting(answers)) == {"answer": answers[-1]}
    assert answers == [1, 2, 3, 4]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "file"))
    answers: list[int] = []
    assert [known([made(tmp_path)], [], counting(answers))["answer"] for _ in range(2)] == [1, 2]


def test_an_outline_says_what_the_numbers_depend_on(tmp_path: Path):
    """Beside the files: which tensors there are, under which names, and in which types."""
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    there = headers(tmp_path)
    whole = StoredTensors(there)
    outlines = [
        whole.outline,
        whole.some(("a",)).outline,
        whole.to(torch.float64).outline,
        whole.as_in_files(torch.float64).outline,
        StoredTensors({"a": there["b"], "b": there["a"]}).outline,
    ]
    assert len({json.dumps(outline) for outline in outlines}) == len(outlines)
    assert whole.files == {tmp_path / "model.safetensors"}
