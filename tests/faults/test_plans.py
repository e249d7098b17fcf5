"""The execution plan of a resumed run (block size and kernels) is that of its checkpoint, so that no bit changes,
whatever happens to plan.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.kernels.library import why_no_kernels
from fedfleet.engine.planning import execution_plan
from fedfleet.engine.run_spec import ExecutionPlan
from fedfleet.engine.state.checkpoint import checkpoints_in
from fedfleet.engine.state.checkpoint_store import Damaged
from fedfleet.engine.storage.sha256 import sha256_of_json

from .runs import EVERY, Watch, checkpoint_file, interrupt, same, small

MEASURED = ExecutionPlan(5, "torch")


@pytest.fixture(scope="module", autouse=True)
def measured(tmp_path_factory):
    """Plans are measured, and blocks of five clients are the fastest; the rule for short runs would choose another
    block size."""
    why_no_kernels()  # they are in this machine's cache folder, and would be compiled anew for another one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDFLEET_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(execution_plan, "WORTH", 0)
        patch.setattr("fedfleet.engine.runs.host.measure", lambda *_: {MEASURED: 1.0})
        yield


def chosen(faults: Path, **checkpoint):
    return small(faults, checkpoint={**EVERY, **checkpoint}, block="auto")


@pytest.fixture(scope="module")
def expected(tmp_path_factory, measured):
    return run(chosen(tmp_path_factory.mktemp("none"), every=0))


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory, measured) -> Path:
    folder = tmp_path_factory.mktemp("broken") / "out"
    with pytest.raises(Interrupted):
        run(chosen(folder), folder, [Watch(r5=interrupt)])
    return folder


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "another block": lambda file: file.write_text('{"block": 9, "kernels": "torch"}'),
    "other kernels": lambda file: file.write_text('{"block": 5, "kernels": "native"}'),
    "an infinite block": lambda file: file.write_text('{"block": Infinity, "kernels": "torch"}'),
    "empty": lambda file: file.write_text(""),
    "a list": lambda file: file.write_text("[]"),
    "not UTF-8": lambda file: file.write_bytes(b"\xff\xfe{"),
    "deeply nested": lambda file: file.write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_becomes_of_path_json_resuming_moves_no_bit(damage, out, broken_off, expected):
    before = json.loads((out / "plan.json").read_text())
    DAMAGES[damage](out / "plan.json")
    same(resume(chosen(broken_off), out), expected)
    after = json.loads((out / "plan.json").read_text())
    assert {after[key] == before[key] for key in ("block", "kernels")} == {True}
    log = (out / "run.log").read_text()
    assert "blocks of 5 clients" in log
    assert "and is restored from the checkpoint" in log


def test_a_path_json_that_is_a_folder_is_told(out, broken_off):
    (out / "plan.json").unlink()
    (out / "plan.json").mkdir()
    with pytest.raises(ConfigError, match=r"plan.json cannot be written"):
        resume(chosen(broken_off), out)


def test_the_manifests_digest_covers_the_plan(out, broken_off, expected):
    """A manifest whose plan was changed counts as damaged; with a new digest it has another plan, which is refused."""
    newest = checkpoint_file(out / "checkpoints", 5, "manifest")
    manifest = json.loads(newest.read_text())
    assert manifest["plan"] == MEASURED._asdict()
    manifest["plan"]["block"] = 9
    newest.write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match="manifest does not match its digest"):
        checkpoints_in(out).read(5)
    same(resume(chosen(broken_off), out), expected)


def test_checkpoints_of_two_plans_are_not_mixed(out, broken_off):
    for file in sorted((out / "checkpoints").glob("round-*.json"))[:-1]:
        manifest = json.loads(file.read_text())
        manifest["plan"]["block"] = 9
        del manifest["digest"]
        file.write_text(json.dumps({**manifest, "digest": sha256_of_json(manifest)}))
    # so that the checkpoint before it is used
    checkpoint_file(out / "checkpoints", 5, "server.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="with blocks of 9 clients and torch kernels, this run has blocks"):
        resume(chosen(broken_off), out)


def test_a_run_that_another_machine_goes_on_with(tmp_path, expected):
    """The folder of the run has only the files that its copies contain."""
    copies = {"folder": str(tmp_path / "copies")}
    with pytest.raises(Interrupted):
        run(chosen(tmp_path, **copies), tmp_path / "out", [Watch(r5=interrupt)])
    for name in ("checkpoints", "state"):
        shutil.rmtree(tmp_path / "out" / name)
    (tmp_path / "out" / "plan.json").unlink()
    same(resume(chosen(tmp_path, **copies), tmp_path / "out"), expected)


def test_without_a_checkpoint_nothing_is_touched(out, broken_off):
    shutil.rmtree(out / "checkpoints")
    (out / "plan.json").unlink()
    with pytest.raises(ConfigError, match="has no checkpoint to resume from"):
        resume(chosen(broken_off), out)
    assert not (out / "plan.json").exists()
