"""An axis of a study whose levels are forks of the cells of one of its levels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedfleet
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.tune.study.cells import cells
from fedfleet.tune.study.check import checked
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.spec import Study, load

from .commands import shell
from .small_study import STUDY, written

ATTACK: dict[str, Any] = {"fork": 3, "none": {}, "quiet": {"attack": {"name": "drop", "share": 0.25}}}
PLAIN = {"methods": {"FedAvg": "fedavg", "SCAFFOLD": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}}}}


def study(attack: dict[str, Any] = ATTACK, **more: Any) -> Study:
    axes = {"beta": {"key": "workload.beta", "values": [0.5, 2.0]}, "attack": attack}
    return Study.model_validate({"name": "forked", **STUDY, **PLAIN, "axes": axes, **more})


def test_the_level_without_overrides_is_the_parent_of_the_others():
    all_cells = cells(study())
    by_key = {cell.key: cell for cell in all_cells}
    assert len(by_key) == len(all_cells) == 2 * 2 * 2 * 2
    forks = [cell for cell in all_cells if cell.fork]
    assert {cell.place[1] for cell in forks} == {"quiet"}
    for cell in forks:
        assert cell.fork is not None
        parent = by_key[cell.fork.parent]
        assert (parent.method, parent.seed, parent.place) == (cell.method, cell.seed, (cell.place[0], "none"))
        assert parent.data["checkpoint"]["every"] == cell.fork.round == 3
        assert parent.data["engine"]["keep_state"]
    plain = cells(study({key: level for key, level in ATTACK.items() if key != "fork"}))
    assert {cell.key for cell in all_cells if not cell.fork} < {cell.key for cell in plain}
    assert not {cell.key for cell in forks} & {cell.key for cell in plain}
    assert {cell.fork.round for cell in cells(study(reduced={"rounds": 2})) if cell.fork} == {1}


@pytest.mark.parametrize(
    ("attack", "more", "why"),
    [
        ({**ATTACK, "fork": 0}, {}, r"axes\.attack\.fork must be the number of a round, at least 1, got 0"),
        ({**ATTACK, "fork": 6}, {}, r"fork < 6 must hold"),
        ({**ATTACK, "none": {"federation.cohort": 2}}, {}, r"axes\.attack must have one level without overrides"),
        (ATTACK, {"tune": {"each": "cell"}}, r"axes\.attack\.fork goes with tune\.each: none, got cell"),
        ({**ATTACK, "more": {"federation.clients": 9}}, {}, r"federation\.clients must stay as it is in a fork"),
    ],
)
def test_refusals(attack, more, why):
    with pytest.raises(ConfigError, match=why):
        checked(study(attack, **more))


@pytest.mark.long
def test_cells_are_the_forks_and_their_parents_keep_nothing_when_all_is_over(tmp_path: Path):
    file = written(tmp_path, **PLAIN, axes={"attack": ATTACK}, seeds=[0])
    done = shell(tmp_path, "study", file, "--out", "out", "--jobs", "2", timeout=500)
    assert done.returncode == 0, done.stderr
    folder = StudyFolder(tmp_path / "out")
    all_cells = cells(load(file))
    for cell in all_cells:
        place = folder.of(cell)
        assert folder.status(cell) == "finished"
        assert not (place / "state").exists()
        assert not (place / "checkpoints").exists()
        if cell.fork is None:
            continue
        parent = fedfleet.run(experiment(next(c for c in all_cells if c.key == cell.fork.parent).data), tmp_path / "p")
        fork = fedfleet.fork(parent, 3, experiment(cell.data), tmp_path / cell.key)
        summary = json.loads((place / "result.json").read_text())
        assert summary["model_sha256"] == fork.model_sha256 != parent.model_sha256
        break
    again = shell(tmp_path, "study", file, "--out", "out", timeout=500)
    assert again.returncode == 0, again.stderr
