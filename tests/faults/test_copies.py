"""Copies of checkpoints in a folder that other machines can read: they are complete, only rows that changed are
written, and damage is found. The folder is a local one, or on an S3 server on loopback."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, DriverDied, Interrupted
from fedfleet.engine.runs.restore import bring
from fedfleet.engine.storage.object_store import RemoteFolder, join_url, open_folder, split_url
from fedfleet.engine.storage.sha256 import sha256_of_file, sha256_of_json
from fedfleet.tune.files import load

from ..tune.commands import COMMAND, error_in, invoke
from .runs import METHODS, Watch, checkpoint_file, interrupt, kill_driver, same, setting, small

SECRET = "s3cr3t-of-nobody"
EVERY = {"every": 2, "keep": 2}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket; its credentials are in the environment."""
    moto = pytest.importorskip("moto.server", reason="needs moto[s3]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ACCESS_KEY_ID": "nobody",
            "SECRET_ACCESS_KEY": SECRET,
            "EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(f"AWS_{name}", value)
        query = f"?scheme=http&endpoint_override={quote(f'{host}:{port}', safe='')}"
        RemoteFolder(f"s3://runs{query}&allow_bucket_creation=true").files.create_dir("runs")
        yield f"s3://runs/deep/er{query}"
    server.stop()


@pytest.fixture(params=["file", "path", "s3"])
def url(request, tmp_path) -> str:
    if request.param == "s3":
        return request.getfixturevalue("bucket")
    return (tmp_path / "shared").as_uri() if request.param == "file" else str(tmp_path / "shared")


def broken_off(tmp_path: Path, url: str, **more) -> tuple[Path, str]:
    """(the folder of a run that Ctrl-C ended in round 6, the address of its copies of the rounds 4 and 5)."""
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        run(small(tmp_path, checkpoint={**EVERY, "folder": url}, **more), out, [Watch(r5=interrupt)])
    return out, join_url(url, json.loads((out / "run.json").read_text())["run_id"])


def names(url: str) -> list[str]:
    return [name for name in open_folder(url).names() if name.startswith("round-")]


def test_another_machine_goes_on_to_the_same_bits(url, tmp_path, expected):
    """The run's folder was removed, so everything comes from the URL."""
    out, there = broken_off(tmp_path, url)
    assert names(there) == ["round-000004.json", "round-000005.json"]
    shutil.rmtree(out)
    other = bring(there, tmp_path / "other")
    config = load(str(other / "config.yaml"))
    same(resume(config, other), expected)
    log = (other / "run.log").read_text()
    assert f"round 5 is restored from {there}" in log
    assert "resumes after round 5" in log
    assert names(there) == []


ANCHORED = """
from fedfleet.algorithms.local import Estimator, LocalMethod
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean

class Anchored(Estimator):
    def own_init(self, x):
        return x  # the server's model in the client's first round

    def begin(self, x, c, c_i):
        return c_i

    def estimate(self, oracle, y, c, c_i, trace):
        return oracle(y) + 0.1 * (y - trace), trace

METHODS = {"anchored": lambda: LocalMethod(Sgd(0.1), Anchored(), Mean(1.0))}
"""


def test_another_machine_need_not_have_the_given_first_model(tmp_path, expected):
    """First states of clients come from the server's model of their first round, which the copies have."""
    (tmp_path / "anchored.py").write_text(ANCHORED)

    def anchored(faults: Path, **checkpoint: Any) -> Experiment:
        data = setting(faults, checkpoint=checkpoint)
        return experiment({**data, "plugins": [*data["plugins"], str(tmp_path / "anchored.py")], "method": "anchored"})

    wanted = anchored(tmp_path, **EVERY, folder=str(tmp_path / "shared"))
    whole = run(anchored(tmp_path / "none"), initial_model=expected.model)
    with pytest.raises(Interrupted):
        run(wanted, tmp_path / "out", [Watch(r5=interrupt)], initial_model=expected.model)
    shutil.rmtree(tmp_path / "out")
    same(resume(wanted, bring(str(tmp_path / "shared"), tmp_path / "other")), whole)


def test_a_folder_whose_state_is_gone(url, tmp_path, expected):
    out, there = broken_off(tmp_path, url)
    shutil.rmtree(out / "state")
    shutil.rmtree(out / "checkpoints")
    same(resume(small(tmp_path, checkpoint={**EVERY, "folder": url}), out), expected)
    assert f"round 5 is restored from {there}" in (out / "run.log").read_text()


@pytest.mark.parametrize("method", [m if m == "scaffold" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_a_driver_killed_on_ray_goes_on_elsewhere_in_one_process(method, tmp_path, ray_here):
    url, out = str(tmp_path / "shared"), tmp_path / "out"
    chosen = {"checkpoint": {"every": 1, "keep": 2, "folder": url}}
    with pytest.raises(DriverDied):
        run(small(tmp_path, method, **chosen, backend="ray", workers=2), out, [Watch(r4=kill_driver)])
    shutil.rmtree(out)
    other = bring(url, tmp_path / "other")
    same(resume(small(tmp_path, method, **chosen), other), run(small(tmp_path / "none", method)))


@pytest.mark.long
def test_by_the_command_line_and_without_a_trace_of_credentials(bucket, tmp_path):
    """No credentials are in anything that a run with a bucket writes: its files, the log, the output, MLflow's
    database."""
    (tmp_path / "run.yaml").write_text(
        json.dumps({**setting(tmp_path, checkpoint={**EVERY, "folder": bucket}), "tracking": {"uri": "auto"}})
    )
    whole = invoke_in(tmp_path, "run", "run.yaml", "--out", "whole", "--json")
    out, there = broken_off(tmp_path, bucket)
    shutil.rmtree(out)
    resumed = invoke_in(tmp_path, "resume", there, "tracking.uri=auto", "--out", "elsewhere", "--json")
    digests = [json.loads(done.stdout.splitlines()[-1])["model_sha256"] for done in (whole, resumed)]
    assert digests[0] == digests[1]
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert SECRET.encode() not in path.read_bytes(), path
    assert all(SECRET not in done.stdout + done.stderr for done in (whole, resumed))
    assert bucket in (tmp_path / "whole" / "config.yaml").read_text()


def invoke_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done


# --- what is there ----------------------------------------------------------------------------------------------------
def test_a_row_is_written_once(tmp_path):
    """9 of 30 clients change in each round: a checkpoint writes this number of rows, and the rows that are left in
    mostly outdated packs."""
    url, written = str(tmp_path / "shared"), []

    def look() -> None:
        written.append({path.name for path in Path(url).glob("*/blobs/*")})

    watch = Watch(**{f"r{number}": look for number in range(2, 13)})
    chosen = small(tmp_path, rounds=12, checkpoint={"every": 1, "keep": 1, "folder": url}, keep_state=True)
    run(chosen, tmp_path / "out", [watch])
    assert len(written) == 11
    (folder,) = Path(url).iterdir()
    (last,) = folder.glob("round-*.json")
    table = load_file(checkpoint_file(folder, 11, "table.safetensors"))
    manifest = json.loads(last.read_text())
    packs, alive = manifest["packs"], int((table["row"] >= 0).sum())
    assert alive > 20
    named = {*manifest["files"].values(), *(digest for digest, _ in packs)}
    assert named == {path.name for path in folder.glob("blobs/*")}
    assert sum(rows for _, rows in packs) <= 2 * alive
    assert max(rows for _, rows in packs) < alive  # not all of them anew each time


def test_only_what_has_changed(tmp_path):
    """Further checkpoints of a run that makes no rounds write no pack."""
    url = tmp_path / "shared"
    out, there = broken_off(tmp_path, str(url))
    before = {path: path.stat().st_mtime_ns for path in Path(there).glob("blobs/*")}
    again = small(tmp_path, checkpoint={**EVERY, "folder": str(url)}, backend="local")
    with pytest.raises(RuntimeError, match="stop here"):
        resume(again, out, [Stop()])
    assert before
    assert {path: path.stat().st_mtime_ns for path in Path(there).glob("blobs/*")} == before


class Stop(Watch):
    """An observer that stops the run before the first round."""

    def event(self, text: str) -> None:
        if text.startswith("resumes after"):
            raise RuntimeError("stop here")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": halve, "remove": Path.unlink}
FILES = ("server.safetensors", "table.safetensors", "rounds-000.safetensors", "manifest", "rows")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_a_damaged_one_is_used(file, damage, tmp_path, expected):
    out, there = broken_off(tmp_path, str(tmp_path / "shared"))
    shutil.rmtree(out)
    if file == "rows":
        mine, before = (
            {name for name, _ in json.loads((Path(there) / each).read_text())["packs"]} for each in names(there)[::-1]
        )
        DAMAGES[damage](Path(there) / "blobs" / min(mine - before))
    else:
        DAMAGES[damage](checkpoint_file(Path(there), 5, file))
    other = bring(there, tmp_path / "other")
    same(resume(load(str(other / "config.yaml")), other), expected)
    log = (other / "run.log").read_text()
    if (damage, file) != ("remove", "manifest"):
        assert f"checkpoint round-000005 in {there} is damaged" in log
    assert "resumes after round 4" in log


def test_all_damaged_is_one_sentence(tmp_path):
    _, there = broken_off(tmp_path, str(tmp_path / "shared"))
    for name in names(there):
        flip(Path(there) / name)
    done = invoke("resume", Path(there).as_uri())
    assert done.exit_code == 2
    assert "holds no sound checkpoint" in error_in(done.stderr)


def test_a_folder_that_fails_costs_copies_and_not_the_run(tmp_path, expected):
    shared = tmp_path / "shared"

    def break_it() -> None:
        (there,) = shared.iterdir()
        shutil.rmtree(there)
        there.write_text("in the way")

    watch = Watch(r1=break_it)
    same(run(small(tmp_path, checkpoint={**EVERY, "folder": str(shared)}), tmp_path / "out", [watch]), expected)
    told = [text for text in watch.told if "no copy in" in text]
    assert [text.partition(":")[0] for text in told] == ["round 2", "round 4"]


# --- formats ----------------------------------------------------------------------------------------------------------
def in_the_old_format(store: Path, number: int) -> None:
    """Rewrite checkpoints as versions before format 5 wrote them: files beside the manifest under their names, packs in
    `rows/`, and in the table of a copy the pack and the place of each row."""
    for file in store.glob("round-*.json"):
        manifest, folder = json.loads(file.read_text()), file.with_suffix("")
        folder.mkdir()
        for name, digest in manifest["files"].items():
            shutil.copy(store / "blobs" / digest, folder / name)
        if "packs" in manifest:
            (store / "rows").mkdir(exist_ok=True)
            for digest, _ in manifest["packs"]:
                shutil.copy(store / "blobs" / digest, store / "rows" / f"{digest}.safetensors")
            begins = np.cumsum([0, *(count for _, count in manifest["packs"])])
            table = load_file(folder / "table.safetensors")
            row = table.pop("row")
            pack = np.searchsorted(begins, row, "right") - 1
            save_file({**table, "pack": pack, "place": row - begins[pack]}, folder / "table.safetensors")
            manifest["files"]["table.safetensors"] = sha256_of_file(folder / "table.safetensors")
        del manifest["digest"]
        manifest["format"] = number
        (folder / "manifest.json").write_text(json.dumps({**manifest, "digest": sha256_of_json(manifest)}))
        file.unlink()
    shutil.rmtree(store / "blobs")


def test_checkpoints_and_copies_of_the_formats_before(tmp_path, expected):
    out, there = broken_off(tmp_path, str(tmp_path / "shared"))
    in_the_old_format(out / "checkpoints", 4)
    in_the_old_format(Path(there), 3)
    chosen = small(tmp_path, checkpoint={**EVERY, "folder": str(tmp_path / "shared")})
    for lost in (False, True):
        shutil.copytree(tmp_path / "shared", tmp_path / "kept", dirs_exist_ok=True)
        shutil.copytree(out, tmp_path / "again")
        if lost:
            shutil.rmtree(tmp_path / "again" / "checkpoints")
        same(resume(chosen, tmp_path / "again"), expected)
        assert ("round 5 is restored from" in (tmp_path / "again" / "run.log").read_text()) == lost
        shutil.rmtree(tmp_path / "again")
        shutil.copytree(tmp_path / "kept", tmp_path / "shared", dirs_exist_ok=True)


def test_a_format_that_is_not_known_names_the_remedy(tmp_path):
    out, _ = broken_off(tmp_path, str(tmp_path / "shared"))
    for file in (out / "checkpoints").glob("round-*.json"):
        manifest = {**json.loads(file.read_text()), "format": 9}
        del manifest["digest"]
        file.write_text(json.dumps({**manifest, "digest": sha256_of_json(manifest)}))
    with pytest.raises(ConfigError, match="its format is 9, use the version of FedFleet that wrote it"):
        resume(small(tmp_path, checkpoint={"every": 2, "keep": 2}), out)


# --- addresses --------------------------------------------------------------------------------------------------------
WRONG = {
    "s3://id:hush@bucket/x": "must hold no secret",
    "s3://bucket/x?secret_key=hush": "must hold no secret",
    "nosuch://x/hush": "give a path, file:///… or s3://bucket/…",
}


@pytest.mark.parametrize("address", WRONG)
def test_an_address_that_is_refused(address, tmp_path):
    done = invoke("run", "digits", "engine.backend=local", f"checkpoint.folder={address}", "--out", str(tmp_path / "o"))
    assert done.exit_code == 2
    line = error_in(done.stderr)
    assert WRONG[address] in line
    assert "checkpoint.folder" in line
    assert "hush" not in line or address.startswith("nosuch")
    assert not (tmp_path / "o").exists()


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    done = invoke(
        "run", "digits", "engine.backend=local", f"checkpoint.folder={tmp_path / 'file'}", "--out", str(tmp_path / "o")
    )
    assert done.exit_code == 2
    assert "cannot be written to" in error_in(done.stderr)
    assert not (tmp_path / "o").exists()


def test_what_cannot_be_brought(tmp_path):
    shared = tmp_path / "shared"
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        bring(str(shared))
    _, there = broken_off(tmp_path / "a", str(shared))
    broken_off(tmp_path / "b", str(shared))
    with pytest.raises(ConfigError, match="holds several runs"):
        bring(str(shared))
    out = bring(there, tmp_path / "here")
    assert bring(there, out) == out
    (out / "run.json").write_text('{"run_id": "another"}\n')
    with pytest.raises(ConfigError, match="holds another run"):
        bring(there, out)
    done = invoke("resume", str(tmp_path / "a" / "out"), "--out", str(tmp_path / "c"))
    assert done.exit_code == 2
    assert "--out is only for a run that is resumed from a URL" in done.stderr


def test_addresses():
    assert join_url("s3://b/x/?a=1", "y") == "s3://b/x/y?a=1"
    assert split_url("s3://b/x/y?a=1") == ("s3://b/x?a=1", "y")
    assert split_url("/a/b") == ("/a", "b")
    data = setting(Path("none"), checkpoint={"folder": "s3://b/x"})
    assert experiment(data).plain()["checkpoint"]["folder"] == "s3://b/x"
    assert np.all([experiment({**data, "checkpoint": {"folder": f"{scheme}x@y/z"}}) for scheme in ("gs://", "abfs://")])
