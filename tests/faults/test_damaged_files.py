"""Damaged files in a run's folder: the message is one sentence with the file and the remedy, without a traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.errors import ConfigError, NotSaved
from fedfleet.engine.runs.result import model_digest
from fedfleet.engine.state.checkpoint import checkpointed_rounds, checkpoints_in
from fedfleet.engine.state.checkpoint_store import Damaged
from fedfleet.engine.storage.sha256 import sha256_of_json

from ..tune.commands import error_in, invoke
from .disks import NoDisk, fill, mounted
from .runs import EVERY, Watch, checkpoint_file, same, small

DEEP = "[" * 100_000 + "]" * 100_000


def told(*words: str, arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert error_in(done.stderr).startswith("error: ")
    for word in words:
        assert word in done.stderr


def resealed(path: Path, **changes: Any) -> str:
    """Change a manifest and correct its own digest. Returns its text."""
    manifest = {**json.loads(path.read_text()), **changes}
    manifest.pop("digest")
    return json.dumps({**manifest, "digest": sha256_of_json(manifest)})


ANYTHING: dict[str, str | bytes] = {
    "empty": "",
    "null": "null",
    "text": '"text"',
    "a number": "17",
    "infinity": "Infinity",
    "a list": "[]",
    "an object": "{}",
    "nested": DEEP,
    "half": '{"run_id": "2026',
    "not UTF-8": b"\xff\xfe\x00",
    "zeros": b"\0" * 100,
}


def put(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


# --- manifests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", ANYTHING.values(), ids=ANYTHING)
def test_a_manifest_that_is_anything(content, out, broken_off, expected):
    put(checkpoint_file(out / "checkpoints", 5, "manifest"), content)
    with pytest.raises(Damaged, match="the manifest"):
        checkpoints_in(out).read(5)
    same(resume(small(broken_off, checkpoint=EVERY), out), expected)
    assert "checkpoint round-000005 is damaged" in (out / "run.log").read_text()


@pytest.mark.parametrize(
    "changes",
    [{"files": []}, {"files": None}, {"files": {"server.safetensors": 7}}, {"round": "x"}, {"round": 1e400}],
    ids=str,
)
def test_a_manifest_whose_parts_are_anything(changes, out, broken_off, expected):
    path = checkpoint_file(out / "checkpoints", 5, "manifest")
    put(path, resealed(path, **changes))
    same(resume(small(broken_off, checkpoint=EVERY), out), expected)


@pytest.mark.parametrize("content", ANYTHING.values(), ids=ANYTHING)
def test_all_manifests_damaged_is_a_sentence(content, out):
    for manifest in (out / "checkpoints").glob("*.json"):
        put(manifest, content)
    told(str(out), "no checkpoint to resume from", "start the run anew", arguments=("resume", str(out)))


# --- small files ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", ANYTHING.values(), ids=ANYTHING)
@pytest.mark.parametrize("file", ["run.json", "config.yaml"])
def test_a_small_file_that_is_anything(file, content, out):
    put(out / file, content)
    empty = file == "config.yaml" and content == "{}"  # it can be read, but lacks necessary keys
    told("workload" if empty else str(out / file), arguments=("resume", str(out)))
    assert (out / "checkpoints" / "round-000005.json").is_file()
    assert list((out / "state").iterdir())


BLOCKS = {f"a block of {block}": f'{{"block": {block}, "kernels": "torch"}}' for block in ("Infinity", "1e400", "-1")}


@pytest.mark.parametrize("content", [*ANYTHING.values(), *BLOCKS.values()], ids=[*ANYTHING, *BLOCKS])
def test_what_path_json_says_does_not_matter_to_resuming(content, out, broken_off, expected):
    """Resuming reads block and kernels from the checkpoint, which has digests; the file plan.json is only for
    readers."""
    put(out / "plan.json", content)
    same(resume(small(broken_off, checkpoint=EVERY), out), expected)
    assert json.loads((out / "plan.json").read_text())["block"] == 4


@pytest.mark.parametrize("command", ["resume", "attach"])
@pytest.mark.parametrize("run_id", ["x/../../../victim", "..", "", "a b", "/etc", ".hidden", 7, None, "x" * 200])
def test_a_runs_id_names_folders_and_so_must_be_a_name(run_id, command, out, tmp_path):
    """With engine.store, the client states are in a folder that is named after the run's id and is removed with
    them."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "rows00.bin").write_text("mine")
    put(out / "run.json", json.dumps({"run_id": run_id}))
    told("run.json is damaged", "run.log", arguments=(command, str(out)))
    assert (tmp_path / "victim" / "rows00.bin").read_text() == "mine"


def test_the_same_of_an_id_that_python_gives(tmp_path):
    with pytest.raises(ConfigError, match="run_id must be"):
        run(small(tmp_path, store=str(tmp_path / "store")), run_id="../victim")


@pytest.mark.parametrize("file", ["mlflow.json"])
@pytest.mark.parametrize("content", ANYTHING.values(), ids=ANYTHING)
def test_what_names_the_run_in_mlflow_is_anything(file, content, tmp_path):
    from fedfleet.tune.tracking.mlflow_writer import kept

    put(tmp_path / file, content)
    assert kept(tmp_path) == {}


# --- the end of a run -------------------------------------------------------------------------------------------------
def check(out: Path, expected: Any) -> None:
    from safetensors.torch import load_file

    from fedfleet.engine.runs.saved_files import read_rows

    assert model_digest(load_file(out / "model.safetensors")) == expected.model_sha256
    assert json.loads((out / "result.json").read_text())["model_sha256"] == expected.model_sha256
    assert [row["round"] for row in read_rows(out / "rounds.parquet")] == [row["round"] for row in expected.rows]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert checkpointed_rounds(out) in ([], [len(expected.rows)])


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "local") for name in ("model.safetensors", "rounds.parquet", "result.json")),
        ("result.json", "ray"),
        *(pytest.param(name, "ray", marks=pytest.mark.long) for name in ("model.safetensors", "rounds.parquet")),
    ],
)
def test_a_folder_in_the_way_of_the_result(name, backend, tmp_path, expected, request):
    """The run is over and nothing is lost: when the folder in the way has been removed, resuming only writes the
    result."""
    if backend == "ray":
        request.getfixturevalue("ray_here")
    out = tmp_path / "out"
    watch = Watch(r4=lambda: (out / name / "inner").mkdir(parents=True))
    with pytest.raises(NotSaved, match=rf"could not be written to .*out .*kept in .*fedfleet resume {out}") as caught:
        run(small(tmp_path, backend=backend, workers=1), out, [watch])
    assert "take away what is in the way" in str(caught.value)
    shutil.rmtree(out / name)
    watch = Watch()
    same(resume(small(tmp_path), out, [watch]), expected)
    check(out, expected)
    assert not any(text.startswith("resumes after") for text in watch.told)  # no round was run again


def test_a_disk_that_is_full_at_the_end_costs_nothing(tmp_path, expected):
    """Disk space for the result is reserved when the run begins."""
    try:
        with mounted(tmp_path / "disk", 2048) as disk:
            out = disk / "out"
            same(run(small(tmp_path, store=str(tmp_path / "store")), out, [Watch(r6=lambda: fill(disk))]), expected)
            check(out, expected)
    except NoDisk as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("again", [False, True], ids=["one try", "full for a while"])
def test_a_disk_that_is_full_although_room_was_taken(again, tmp_path, expected, monkeypatch):
    """Another process has filled the reserved space too: the result is kept in the system's temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    try:
        with mounted(tmp_path / "disk", 2048) as disk:
            out = disk / "out"

            def full() -> None:
                (out / ".reserve").unlink()
                fill(disk)

            chosen = small(tmp_path, store=str(tmp_path / "store"))
            with pytest.raises(NotSaved, match=r"No space left.*it is kept in .*temporary.*make room"):
                run(chosen, out, [Watch(r6=full)])
            if again:
                with pytest.raises((NotSaved, OSError)):
                    resume(chosen, out)
            (disk / "filler").unlink()
            same(resume(chosen, out), expected)
            check(out, expected)
            assert not list((tmp_path / "temporary").iterdir())
    except NoDisk as reason:
        pytest.skip(str(reason))


def test_a_disk_without_room_for_the_result_is_told_before_round_1(tmp_path):
    from fedfleet.engine.errors import StoreFull

    try:
        with mounted(tmp_path / "disk", 64) as disk:
            with pytest.raises(StoreFull, match=r"no room for the model and the record .* choose another --out"):
                run(small(tmp_path, store=str(tmp_path / "store")), disk / "out")
            assert not (disk / "out").exists()
    except NoDisk as reason:
        pytest.skip(str(reason))


def test_another_users_result_is_not_taken(tmp_path, out, broken_off, expected, monkeypatch):
    """Every user can make a folder of that name in the system's temporary folder, so its owner is checked."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    run_id = json.loads((out / "run.json").read_text())["run_id"]
    forged = tmp_path / "temporary" / f"fedfleet-{run_id}-result"
    other = run(small(tmp_path, rounds=6).model_copy(update={"seed": 1}), tmp_path / "other", run_id=run_id)
    forged.mkdir(parents=True)
    for name in ("model.safetensors", "rounds.parquet", "result.json"):
        shutil.copy(tmp_path / "other" / name, forged / f".{name}")
    assert other.model_sha256 != expected.model_sha256
    try:
        os.chown(forged, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can give a folder to somebody else")
    same(resume(small(broken_off, checkpoint=EVERY), out), expected)
