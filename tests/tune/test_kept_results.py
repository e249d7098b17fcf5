"""A study goes on, and is reported, from cells.jsonl alone: nothing is run twice, and the numbers are the same."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import fedfleet
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.lineage import Lineage, lineage_of, write_lineage
from fedfleet.tune import units
from fedfleet.tune.run_files import Columns, read_columns
from fedfleet.tune.study import kept_results
from fedfleet.tune.study.folder import FINISHED, StudyFolder, points_of
from fedfleet.tune.study.kept_results import (
    ADDED_UP,
    CLIENTS,
    NAME,
    check_restored,
    keep,
    line_of,
    restore,
    restore_line,
    rows_of,
)

from .commands import invoke, shell
from .small_study import written

pytestmark = pytest.mark.usefixtures("here", "one_fork_server")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a study with tuning was run, into the folder `out`."""
    folder = tmp_path_factory.mktemp("finished")
    file = written(folder, tune={"each": "cell"})
    done = shell(folder, "study", file, "--out", "out", timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def copied(finished: Path, to: Path) -> Path:
    """A copy of the study's folder that has only what is kept in a repository."""
    to.mkdir()
    for name in ("study.yaml", NAME):
        shutil.copy(finished / "out" / name, to)
    return to


def numbers_of(report: str) -> list[str]:
    """The tables of a report."""
    return [line for line in report.splitlines() if line.startswith("|")]


def test_the_report_is_the_same_without_the_folders_of_runs(finished: Path, tmp_path: Path):
    folder = copied(finished, tmp_path / "kept")
    done = invoke("report", "kept")
    assert done.exit_code == 0, done.stderr
    first, again = ((path / "report.md").read_text() for path in (finished / "out", folder))
    assert numbers_of(first)
    assert numbers_of(again) == numbers_of(first)
    assert (folder / NAME).stat().st_size < 0.2 * sum(f.stat().st_size for f in finished.glob("out/cells/*/*"))


def test_plugins_are_kept_without_their_folders(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text('{"rounds": 1}')
    (tmp_path / "run/config.yaml").write_text(f"plugins: [{tmp_path}/own.py, a.module]\nmethod: mine\n")
    line = line_of(tmp_path / "run", set())
    assert line is not None
    assert yaml.safe_load(line["config"]) == {"plugins": ["own.py", "a.module"], "method": "mine"}


def test_runs_are_compared_without_their_folders(finished: Path, tmp_path: Path):
    folder = copied(finished, tmp_path / "kept")
    tables = [invoke("compare", str(path)).stdout for path in (finished / "out", folder)]
    assert "0.1" in tables[0]
    assert tables[0] == tables[1]


def test_runs_without_models_are_compared_in_python_and_in_pairs(finished: Path, tmp_path: Path):
    """The cells of a study leave no models, and those that were restored no training losses either."""
    folder = copied(finished, tmp_path / "kept")
    finals: dict[tuple[str, str, str], dict[int, float]] = {}
    for result in sorted(finished.glob("out/cells/*/result.json")):
        config = yaml.safe_load((result.parent / "config.yaml").read_text())
        setting = (config["method"]["name"], config["method"]["rule"]["lr"], config["workload"]["beta"])
        loss = json.loads(result.read_text())["metrics"]["eval/loss"]
        finals.setdefault(tuple(map(units.setting, setting)), {})[config["seed"]] = loss
    labels = ["{}, rule.lr {}, workload.beta {}".format(*setting) for setting in finals]
    losses = dict(zip(labels, finals.values(), strict=True))
    base = next(
        path.parent
        for path in finished.glob("out/cells/*/config.yaml")
        if yaml.safe_load(path.read_text())["workload"]["beta"] == 2.0
    )
    for study in (finished / "out", folder):
        table = fedfleet.compare([study], "eval/loss")
        assert table["eval/loss"].to_dict() == pytest.approx({one: np.mean([*losses[one].values()]) for one in losses})
        assert set(table["runs"]) == {2}
        pairs = fedfleet.compare([study / "cells" / base.name, study], "eval/loss", paired=True)
        (first,) = set(labels) - set(pairs.index)
        assert first.endswith("workload.beta 2")
        for label in pairs.index:
            apart = [losses[label][seed] - losses[first][seed] for seed in (0, 1)]
            assert pairs["difference"][label] == pytest.approx(np.mean(apart), rel=1e-9)  # 12 digits are kept
        assert pairs["models apart"].isna().all()
        assert pairs["equal rounds"].isna().all() == (study == folder)
        done = invoke("compare", "--paired", str(study), "--metric", "eval/loss")
        assert done.exit_code == 0, done.stderr
        assert "nan" not in done.stdout
        assert (done.stdout.splitlines()[-1].split()[-1] == "–") == (study == folder)


def test_a_study_goes_on_and_runs_nothing_twice(finished: Path, tmp_path: Path):
    folder = copied(finished, tmp_path / "kept")
    lines = (folder / NAME).read_text().splitlines()
    dropped = json.loads(lines.pop())["key"]
    (folder / NAME).write_text("".join(f"{line}\n" for line in lines))
    store = f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"
    done = invoke("study", str(folder / "study.yaml"), store, "--out", "kept")
    assert done.exit_code == 0, done.output
    assert [path.parent.name for path in folder.glob("cells/*/partition.json")] == [dropped]
    shas = [
        {key: json.loads((path / "cells" / key / "result.json").read_text())["model_sha256"] for key in keys}
        for path, keys in ((path, sorted(p.name for p in path.glob("cells/*/"))) for path in (finished / "out", folder))
    ]
    assert shas[0] == shas[1]
    assert numbers_of((folder / "report.md").read_text()) != []
    kept, before = ((path / NAME).read_text().splitlines() for path in (folder, finished / "out"))
    for mine, first in zip(kept, before, strict=True):  # the seconds of the one that ran again are its own
        a, b = json.loads(mine), json.loads(first)
        assert a["key"] == b["key"]
        assert a["rows"]["eval/accuracy"] == b["rows"]["eval/accuracy"]
        assert a["rows"]["comm/bytes_up"] == b["rows"]["comm/bytes_up"]


def test_a_run_whose_folder_was_removed_is_run_again(finished: Path, tmp_path: Path):
    """The file counts only where there are no folders at all: whoever removes one wants that run again."""
    folder = copied(finished, tmp_path / "kept")
    assert invoke("report", "kept").exit_code == 0
    study = StudyFolder(folder)
    gone = study.of(study.cells()[0])
    shutil.rmtree(gone)
    done = invoke("study", str(folder / "study.yaml"), "--out", "kept")
    assert done.exit_code == 0, done.output
    assert (gone / "partition.json").is_file()


@pytest.mark.parametrize("left", ["an empty folder", "a part", "a run with a damaged result"])
def test_lines_without_folders_are_never_dropped(finished: Path, tmp_path: Path, left: str):
    """As after a restoration that was killed, which an earlier version could leave half done."""
    folder = copied(finished, tmp_path / "kept")
    lines = (folder / NAME).read_text().splitlines()
    if left == "an empty folder":
        (folder / "cells").mkdir()
    else:
        assert invoke("report", "kept").exit_code == 0
        first, *others = sorted((folder / "cells").glob("*/"))
        if left == "a part":
            for run in others:
                shutil.rmtree(run)
        else:
            (first / "result.json").write_text('{"rou')
    keep(folder, set())
    assert [json.loads(line)["key"] for line in (folder / NAME).read_text().splitlines()] == [
        json.loads(line)["key"] for line in lines
    ]
    if left == "an empty folder":
        assert restore(folder) == len(lines)


def test_nothing_is_restored_or_all_is(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = copied(finished, tmp_path / "kept")
    real, made = kept_results.restore_line, []

    def no_room(place: Path, line: Any) -> None:
        made.append(place)
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(place, line)

    monkeypatch.setattr(kept_results, "restore_line", no_room)
    with pytest.raises(
        ConfigError, match=r"cannot be restored from cells\.jsonl \(No space left on device\); make room"
    ):
        restore(folder)
    assert sorted(path.name for path in folder.iterdir()) == [NAME, "study.yaml"]


NUMBERS = [1.072e-12, 4.926e-13, 1.7e23, 400000.0, 0.1 + 0.2, -(2.0**60), float("inf"), None, 3.0]


def test_numbers_of_all_sizes_are_kept(tmp_path: Path):
    run, metric = tmp_path / "cells" / "a1", "eval/loss"
    rows = [(number + 1, value) for number, value in enumerate(NUMBERS)]
    columns = {"round": [n for n, _ in rows], metric: [v for _, v in rows]}
    columns |= {name: [1.0] * len(rows) for name in ADDED_UP}
    run.mkdir(parents=True)
    pq.write_table(pa.table(columns), run / "rounds.parquet")
    (run / "result.json").write_text('{"rounds": 9}')
    keep(tmp_path, set())
    shutil.rmtree(tmp_path / "cells")
    assert restore(tmp_path) == 1
    found = read_columns(run)[metric]
    expected = [value for value in NUMBERS if value is not None and np.isfinite(value)]
    np.testing.assert_allclose(found[np.isfinite(found)], expected, rtol=1e-11)


def test_searches_of_ranges_are_kept(tmp_path: Path):
    (tmp_path / "cells" / "a1").mkdir(parents=True)
    (tmp_path / "cells" / "a1" / "result.json").write_text('{"rounds": 1}')
    (tmp_path / "searches" / "b2").mkdir(parents=True)
    (tmp_path / "searches" / "b2" / "result.json").write_text('{"best": {"params": {"method.lr": 0.25}}, "trials": 3}')
    keep(tmp_path, set())
    for part in ("cells", "searches"):
        shutil.rmtree(tmp_path / part)
    assert restore(tmp_path) == 2
    assert StudyFolder(tmp_path).searched("b2") == {"method.lr": 0.25}


def test_searches_that_are_there_do_not_keep_runs_from_being_restored(tmp_path: Path):
    (tmp_path / "cells" / "a1").mkdir(parents=True)
    (tmp_path / "cells" / "a1" / "result.json").write_text('{"rounds": 1}')
    (tmp_path / "searches" / "b2").mkdir(parents=True)
    (tmp_path / "searches" / "b2" / "result.json").write_text('{"best": {"params": {"method.lr": 0.25}}, "trials": 3}')
    keep(tmp_path, set())
    shutil.rmtree(tmp_path / "cells")
    restore(tmp_path)
    assert (tmp_path / "cells" / "a1" / "result.json").is_file()
    assert json.loads((tmp_path / "searches" / "b2" / "result.json").read_text())["trials"] == 3


def test_a_column_that_another_study_has_kept_stays(tmp_path: Path):
    run = tmp_path / "cells" / "a1"
    columns = {"round": [1, 2], "train/loss": [2.5, 1.5], "eval/loss": [None, 3.5]}
    run.mkdir(parents=True)
    pq.write_table(pa.table(columns | {name: [1.0, 1.0] for name in ADDED_UP}), run / "rounds.parquet")
    (run / "result.json").write_text('{"rounds": 2}')
    keep(tmp_path, {"train/loss"})
    first = (tmp_path / NAME).read_text()
    keep(tmp_path, {"eval/loss"})
    assert (tmp_path / NAME).read_text() == first
    assert json.loads(first)["rows"]["train/loss"] == [2.5, 1.5]


def test_what_clients_get_is_kept_by_the_metrics_of_studies_alone(tmp_path: Path):
    """Also where the study is over and its command is given again."""
    run = tmp_path / "cells" / "a1"
    columns = {"round": [1], "eval/own/test_loss": [0.5], "eval/server/test_loss": [0.25]}
    run.mkdir(parents=True)
    pq.write_table(pa.table(columns | {name: [1.0] for name in ADDED_UP}), run / "rounds.parquet")
    pq.write_table(pa.table({"client": [0], "own_test_loss": [0.5], "server_test_loss": [0.25]}), run / CLIENTS)
    (run / "result.json").write_text('{"rounds": 1}')
    texts = []
    for metrics in ({"eval/own/test_loss"}, {"eval/own/test_loss"}, {"eval/server/test_loss"}, {"eval/own/test_loss"}):
        keep(tmp_path, metrics)
        texts.append((tmp_path / NAME).read_text())
    assert list(json.loads(texts[0])["clients"]) == ["client", "own_test_loss"]
    assert list(json.loads(texts[2])["clients"]) == ["client", "own_test_loss", "server_test_loss"]
    assert (texts[1], texts[3]) == (texts[0], texts[2])


def test_sums_over_rounds_are_no_values_of_single_rounds(tmp_path: Path):
    """A study that reports the seconds of a round keeps all rounds; from another one their sums are restored."""
    metric, seconds = "time/seconds", [1.0, 2.0, 4.0]
    run = tmp_path / "cells" / "a1"
    columns = {"round": [1, 2, 3], "eval/loss": [None, 3.0, 2.0]}
    run.mkdir(parents=True)
    pq.write_table(pa.table(columns | {name: seconds for name in ADDED_UP}), run / "rounds.parquet")
    (run / "result.json").write_text('{"rounds": 3}')
    for metrics, values in (({"eval/loss"}, None), ({metric}, seconds), ({"eval/loss"}, seconds)):
        keep(tmp_path, metrics)
        (line,) = map(json.loads, (tmp_path / NAME).read_text().splitlines())
        kept = tmp_path / "kept" / "cells" / "a1"
        shutil.rmtree(tmp_path / "kept", ignore_errors=True)
        restore_line(kept, line)
        points = points_of(kept, metric)
        assert (None if points is None else points.values.tolist()) == values
        assert read_columns(kept)[metric].sum() == sum(seconds)
        if values is None:
            with pytest.raises(ConfigError, match="has not kept time/seconds"):
                check_restored(tmp_path / "kept", [metric])
        else:
            check_restored(tmp_path / "kept", [metric])


def test_a_fork_is_kept_as_a_fork(tmp_path: Path):
    run = tmp_path / "cells" / "b2"
    run.mkdir(parents=True)
    (run / "result.json").write_text('{"rounds": 3}')
    write_lineage(run, Lineage("id", str(tmp_path / "cells" / "a1"), 2, ["method.rule.lr was 0.1, is 0.2"]))
    line = line_of(run, set())
    assert line is not None
    restore_line(tmp_path / "kept", line)
    found = lineage_of(tmp_path / "kept")
    assert found == Lineage("id", "a1", 2, ["method.rule.lr was 0.1, is 0.2"])


def test_methods_may_be_reported_by_columns_that_others_lack(tmp_path: Path):
    """As fine-tuning, of which only the adapted models count."""
    for name, column in (("a1", "eval/own/test_loss"), ("b2", "eval/adapted/test_loss")):
        run = tmp_path / "cells" / name
        run.mkdir(parents=True)
        pq.write_table(pa.table({"round": [1], column: [0.5]}), run / "rounds.parquet")
        (run / "result.json").write_text('{"rounds": 1}')
    check_restored(tmp_path, ["eval/own/test_loss", "eval/adapted/test_loss"])
    with pytest.raises(ConfigError, match="has not kept eval/chosen/test_loss"):
        check_restored(tmp_path, ["eval/chosen/test_loss"])


def test_a_metric_that_was_not_kept_is_told(finished: Path, tmp_path: Path):
    folder = copied(finished, tmp_path / "kept")
    text = (folder / NAME).read_text()
    done = invoke("study", str(folder / "study.yaml"), "report.metric=train/loss", "--out", "kept")
    assert done.exit_code == 2, done.stderr
    assert "has not kept train/loss (kept: eval/accuracy, eval/loss); choose one of these" in done.stderr
    assert (folder / NAME).read_text() == text


def test_further_metrics_have_a_table_and_curves(finished: Path, tmp_path: Path):
    """The table is that of a study which reports by the further metric, and nothing else of the report changes."""
    first = numbers_of((finished / "out" / "report.md").read_text())
    tables = []
    for given in ("report.also=[eval/loss]", "report.metric=eval/loss"):
        folder = copied(finished, tmp_path / given[:11])
        done = invoke("study", str(folder / "study.yaml"), given, "tune.metric=eval/accuracy", "--out", str(folder))
        assert done.exit_code == 0, done.stderr
        tables.append(numbers_of((folder / "report.md").read_text().replace("**", "")))
    both, loss = tables
    rows = next(i for i, line in enumerate(loss) if line.startswith("| SCAFFOLD")) + 1
    assert loss[:rows] == both[rows : 2 * rows]
    assert both[:rows] + both[2 * rows :] == [line.replace("**", "") for line in first]
    assert (tmp_path / "report.also" / "charts" / "also-1.svg").is_file()


def test_further_metrics_are_checked(finished: Path, tmp_path: Path):
    file = str(copied(finished, tmp_path / "kept") / "study.yaml")
    for also, told in (("train/los", "report.also[0]: no run will record train/los"), ("eval/accuracy", "second time")):
        done = invoke("study", file, f"report.also=[{also}]", "--out", "other")
        assert (done.exit_code, told in done.stderr) == (2, True), done.stderr


def test_a_damaged_record_is_told(finished: Path, tmp_path: Path):
    folder = copied(finished, tmp_path / "kept")
    assert invoke("report", "kept").exit_code == 0
    record = next(folder.glob("cells/*/rounds.parquet"))
    record.write_bytes(record.read_bytes()[:40])
    done = invoke("report", "kept")
    assert done.exit_code == 2, done.stderr
    assert f"remove the folder kept/cells/{record.parent.name} to run it again" in done.stderr


NO_NUMBERS = '{"key": "a1", "config": "", "result": {}, "failure": {}, "environment": {}, "privacy": "", "rows": %s}'


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"key": "../x"}',
        '{"key": "a1", "result": {}, "failure": {}}',
        NO_NUMBERS % '{"round": ["1"]}',
        NO_NUMBERS % '{"round": "1"}',
        NO_NUMBERS % '{"eval/loss": [1]}',
    ],
)
def test_a_damaged_file_is_told_and_nothing_is_lost(finished: Path, tmp_path: Path, damage: str):
    folder = copied(finished, tmp_path / "kept")
    text = (folder / NAME).read_text() + damage + "\n"
    (folder / NAME).write_text(text)
    for command in (("report", "kept"), ("study", str(folder / "study.yaml"), "tracking.uri=none", "--out", "kept")):
        done = invoke(*command)
        assert done.exit_code == 2, done.stderr
        assert "is damaged; restore the file" in done.stderr
        assert (folder / NAME).read_text() == text
        assert not (folder / "cells").exists()


def test_rows_between_evaluations_are_added_up():
    columns: Columns = {
        "round": np.arange(1.0, 6),
        "eval/accuracy": np.array([np.nan, 0.5, np.nan, 0.75, np.nan]),
        "train/loss": np.array([5.0, 4, 3, 2, 1]),
        "comm/bytes_up": np.array([1.0, 2, 4, 8, 16]),
        "time/seconds": np.array([0.5, 0.5, 0.25, 0.25, 0.125]),
        "system/clock": np.array([1.0, 3, 6, 10, 15]),
    }
    assert rows_of(columns, set()) == {
        "round": [2, 4, 5],
        "system/clock": [3, 10, 15],
        "eval/accuracy": [0.5, 0.75, None],
        "comm/bytes_up": [3, 12, 16],
        "time/seconds": [1, 0.5, 0.125],
    }
    assert rows_of(columns, {"train/loss"})["train/loss"] == [5, 4, 3, 2, 1]
    assert rows_of({}, set()) == {}


def test_diverged_runs_are_kept_and_failed_ones_are_not(tmp_path: Path):
    for key, status in (("a1", "diverged"), ("b2", "failed")):
        (tmp_path / "cells" / key).mkdir(parents=True)
        (tmp_path / "cells" / key / "failure.json").write_text(json.dumps({"status": status, "reason": "round 5"}))
    keep(tmp_path, set())
    (line,) = map(json.loads, (tmp_path / NAME).read_text().splitlines())
    assert line["key"] == "a1"
    assert line["failure"]["reason"] == "round 5"
    assert line["rows"] == {}
    assert FINISHED not in line["failure"].values()
