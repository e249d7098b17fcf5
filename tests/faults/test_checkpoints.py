"""Checkpoints that are damaged, cannot be written, or belong to another run, and files that are left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted, StoreFull
from fedfleet.engine.state.checkpoint import checkpointed_rounds, checkpoints_in
from fedfleet.engine.state.row_files import DIGEST
from fedfleet.engine.state.row_table import RowTable

from ..tune.commands import COMMAND, error_in, invoke, until
from .disks import enlarge, fill
from .runs import EVERY, Watch, checkpoint_file, interrupt, rounds_with_checkpoints, row_at, same, setting, small

NEWEST, BEFORE = 5, 4


def again(broken_off: Path, **more) -> object:
    return small(broken_off, **{"checkpoint": EVERY, **more})


# --- damage -----------------------------------------------------------------------------------------------------------
def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 16
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "remove": Path.unlink}
FILES = ("server.safetensors", "table.safetensors", "rounds-000.safetensors", "manifest")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(file, damage, out, broken_off, expected):
    DAMAGES[damage](checkpoint_file(out / "checkpoints", NEWEST, file))
    same(resume(again(broken_off), out), expected)
    log = (out / "run.log").read_text()
    if (damage, file) != ("remove", "manifest"):  # without a manifest there is no checkpoint
        assert f"checkpoint round-000005 is damaged ({'' if damage != 'remove' else file + ' is missing'}" in log
        assert "the one before it is used" in log
    assert "resumes after round 4" in log


def only_in_the_newest(out: Path) -> int:
    newest, before = map(checkpoints_in(out).read, (NEWEST, BEFORE))
    return max(set(newest.row[newest.row >= 0].tolist()) - set(before.row.tolist()))


def test_a_bit_of_one_clients_state(out, broken_off, expected):
    path, begin, _ = row_at(out, only_in_the_newest(out))
    flip(path, begin + 17)
    same(resume(again(broken_off), out), expected)
    assert "checkpoint round-000005 is damaged (the states of 1 clients do not match" in (out / "run.log").read_text()


def test_states_that_are_cut_off(out, broken_off):
    for path in (out / "state").iterdir():
        os.truncate(path, 100)
    with pytest.raises(ConfigError, match=r"no checkpoint to resume from .*the states of \d+ clients"):
        resume(again(broken_off), out)


def test_all_damaged_is_one_sentence_and_nothing_is_thrown_away(out):
    before = sorted(out.rglob("*"))
    for number in checkpointed_rounds(out):
        flip(checkpoint_file(out / "checkpoints", number, "server.safetensors"))
    done = invoke("resume", str(out))
    assert done.exit_code == 2
    line = error_in(done.stderr)
    assert line.startswith("error: ")
    assert line.count("server.safetensors does not match its digest") == 3
    assert sorted(out.rglob("*")) == before


def test_a_half_written_one_is_ignored(out, broken_off, expected):
    """Its process died before it wrote the manifest, or while it wrote a blob."""
    (out / "checkpoints" / ".round-000099.json").write_text("{")
    (out / "checkpoints" / "blobs" / "0123").write_bytes(b"a blob")
    (out / "checkpoints" / "blobs" / ".4567").write_bytes(b"half of a blob")
    same(resume(again(broken_off), out), expected)
    assert rounds_with_checkpoints(out) == [6]
    blobs = checkpoints_in(out).manifest(6)["files"].values()
    assert {path.name for path in (out / "checkpoints").rglob("*")} == {"blobs", "round-000006.json", *blobs}


# --- how many, of what ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep(keep, tmp_path):
    out = tmp_path / "out"
    chosen = small(tmp_path, rounds=9, checkpoint={"every": 1, "keep": keep}, keep_state=True)
    run(chosen, out)
    assert rounds_with_checkpoints(out) == [*range(10 - keep, 10)]
    assert len(list((out / "checkpoints" / "blobs").iterdir())) == 3 * keep


def test_fewer_may_be_kept_after_resuming(out, broken_off, expected):
    chosen = again(broken_off, checkpoint={"every": 1, "keep": 1})
    same(resume(chosen, out), expected)
    assert "damaged" not in (out / "run.log").read_text()


def test_rounds_may_not_change_where_the_methods_settings_follow_from_them(tmp_path):
    chosen = experiment({**setting(tmp_path, checkpoint=EVERY), "method": {"name": "padamfed"}})
    with pytest.raises(Interrupted):
        run(chosen, tmp_path / "out", [Watch(r3=interrupt)])
    done = invoke("resume", str(tmp_path / "out"), "federation.rounds=9")
    assert done.exit_code == 2
    assert "federation.rounds must stay 6 to resume, got 9" in error_in(done.stderr)
    assert len(resume(chosen, tmp_path / "out").rows) == 6


def test_another_configuration_is_refused(out):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = invoke("resume", str(out), "method.rule.lr=0.2", "seed=3", "engine.block=2")
    assert done.exit_code == 2
    line = error_in(done.stderr)
    for told in ("engine.block was 4, is 2", "method.rule.lr was 0.1, is 0.2", "seed was 0, is 3"):
        assert told in line
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_pinned_rows_are_never_written(tmp_path):
    """Random rounds and checkpoints, compared with plain dictionaries: client -> value, and a copy of it for each
    checkpoint."""
    random, clients, keep = np.random.default_rng(0), 12, 3
    for trial in range(40):
        spare = 5 + (keep + 1) * clients
        table = RowTable((np_state(0),), clients, spare, str(tmp_path / str(trial)), digests=True)
        content = np.full(table.capacity, -1)  # the value in each row
        model: dict[int, int] = {}
        kept: list[tuple[np.ndarray, dict[int, int]]] = []
        for value in range(60):
            cohort = np.sort(random.choice(clients, random.integers(1, 6), replace=False))
            read_rows, fresh = table.reserve(cohort)
            assert len(set(fresh.tolist())) == len(fresh)
            assert [content[row] if row >= 0 else None for row in read_rows] == [model.get(c) for c in cohort.tolist()]
            content[fresh] = value
            if random.random() < 0.3:
                table.abort()
            else:
                without = tuple(c for c in cohort.tolist() if random.random() < 0.2)
                table.commit(np.zeros((len(cohort), DIGEST), np.uint8), without)
                model.update({c: value for c in cohort.tolist() if c not in without})
            if random.random() < 0.4:
                table.pin(table.row)
                kept.append((table.row.copy(), dict(model)))
            while len(kept) > keep or (kept and random.random() < 0.1):
                table.unpin(kept.pop(0)[0])
            for row, then in [*kept, (table.row, model)]:
                assert {c: content[r] for c, r in enumerate(row.tolist()) if r >= 0} == then
            used = {r for row, _ in [*kept, (table.row, model)] for r in row.tolist() if r >= 0}
            assert not used & set(table.free)
            assert len(set(table.free)) == len(table.free) == table.used - len(used)
        table.remove()


def np_state(value: int):
    import torch

    return torch.full((2,), float(value))


# --- full disks -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_full_store_is_one_sentence_and_leaves_a_checkpoint(backend, disk, tmp_path, expected, request):
    if backend == "ray":
        request.getfixturevalue("ray_here")
    out, folder = tmp_path / "out", disk(96)
    chosen = small(tmp_path, store=str(folder), backend=backend, workers=1)
    with pytest.raises(StoreFull, match=r"^no room for the states of .*No space left.*engine\.store"):
        run(chosen, out)
    assert rounds_with_checkpoints(out)
    enlarge(folder)
    same(resume(chosen, out), expected)
    assert not list(folder.iterdir())


def test_a_full_disk_costs_checkpoints_and_not_the_run(disk, tmp_path, expected):
    out = disk(1024) / "out"
    watch = Watch(r3=lambda: fill(out.parent), r5=(out.parent / "filler").unlink)
    # all checkpoints are kept, because removing one would make space for the next
    chosen = small(tmp_path, checkpoint={"every": 1, "keep": 6}, store=str(tmp_path))
    same(run(chosen, out, [watch]), expected)
    (told,) = [text for text in watch.told if "no checkpoint could be written" in text][:1]
    assert "No space left on device" in told
    assert "the one before it stays" in told
    assert (out / "result.json").is_file()


def test_checkpoints_that_cannot_be_written_are_told_and_the_run_goes_on(tmp_path, expected):
    out = tmp_path / "out"
    watch = Watch(r1=lambda: (out / "checkpoints").write_text("in the way"))
    same(run(small(tmp_path, checkpoint={"every": 2}), out, [watch]), expected)
    log = (out / "run.log").read_text()
    assert log.count("no checkpoint could be written") == 3
    assert "round 2: no checkpoint" in log
    assert "round 4: no checkpoint" in log


# --- states -----------------------------------------------------------------------------------------------------------
def test_bfloat16_states_are_half_as_large_and_resume_to_the_same_bits(tmp_path):
    whole = run(small(tmp_path, state_dtype="bfloat16", keep_state=True), tmp_path / "whole")
    run(small(tmp_path, keep_state=True), tmp_path / "wide")
    sizes = [sum(path.stat().st_size for path in (tmp_path / name / "state").iterdir()) for name in ("whole", "wide")]
    assert 2 * sizes[0] == sizes[1]
    with pytest.raises(Interrupted):
        run(small(tmp_path, state_dtype="bfloat16"), tmp_path / "out", [Watch(r3=interrupt)])
    same(resume(small(tmp_path, state_dtype="bfloat16"), tmp_path / "out"), whole)


# --- what is left -----------------------------------------------------------------------------------------------------
@pytest.fixture
def short():
    """A temporary folder with a short name: it holds Ray's sockets, whose paths may have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ff") as folder:
        yield Path(folder)


def start(folder: Path, temporary: Path, **engine) -> subprocess.Popen[str]:
    (folder / "run.yaml").write_text(yaml.safe_dump(setting(folder, rounds=5000, **engine)))
    return subprocess.Popen(
        [*COMMAND, "run", "run.yaml", "--out", "out"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("local", signal.SIGINT),
        ("local", signal.SIGTERM),
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("ray", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_nothing_else(backend, number, tmp_path, short):
    """SIGINT is sent to the whole process group, as a terminal does on Ctrl-C; SIGTERM to the command alone, as `kill`
    does."""
    before = set(os.listdir("/dev/shm"))
    process = start(tmp_path, short, backend=backend, workers=2)
    family: list[psutil.Process] = []
    try:
        log = tmp_path / "out" / "run.log"
        until(lambda: process.poll() is not None or (log.is_file() and "round=3 " in log.read_text()), "round 3")
        assert process.poll() is None, process.communicate()
        family = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        stdout, stderr = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(300)
    assert process.returncode == 128 + number
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "interrupted; checkpoint after round" in stderr
    assert "fedfleet resume out" in stderr
    assert len(rounds_with_checkpoints(tmp_path / "out")) == 1
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive
    assert not list(short.glob("fedfleet-*"))
    until(lambda: set(os.listdir("/dev/shm")) <= before, "shared memory to go")


def test_nothing_is_left_of_a_run_that_finishes_or_fails(tmp_path, ray_here):
    run(small(tmp_path, checkpoint={"every": 1, "last": False}), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.yaml",
        "environment.json",
        "model.safetensors",
        "partition.arrow",
        "partition.json",
        "plan.json",
        "result.json",
        "rounds.parquet",
        "run.json",
        "run.log",
    }
    store = tmp_path / "store"
    store.mkdir()
    (store / "mine").write_text("a user's own file")
    for backend in ("local", "ray"):
        run_id = f"{backend}-{os.getpid()}"
        with pytest.raises(RuntimeError, match="stop here"):
            run(small(tmp_path, backend=backend, workers=1), None, [Watch(r2=stop_here)], run_id)
        assert not list(Path(tempfile.gettempdir()).glob(f"fedfleet-*{run_id}*"))
    run(small(tmp_path, rounds=2, store=str(store)))
    assert [path.name for path in store.iterdir()] == ["mine"]


def stop_here() -> None:
    raise RuntimeError("stop here")
