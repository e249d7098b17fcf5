"""Files that the cells of a study read: a cell is known by their content, not by their paths."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import fedfleet
from fedfleet.engine.config.registry import find_plugin
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.storage.sha256 import sha256_of_json
from fedfleet.tune.identity import effective_settings
from fedfleet.tune.run_files import data_in_part
from fedfleet.tune.run_report import write_run_report
from fedfleet.tune.study.cells import cells
from fedfleet.tune.study.data import with_files
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.kept_results import line_of, restore_line
from fedfleet.tune.study.spec import Study, load
from fedfleet.tune.study_run.runner import run_study
from fedfleet.workloads.data.digits import file_of_digits
from fedfleet.workloads.data.fashion_mnist import FashionMnist
from tests.tune.commands import invoke

SENTENCES = "sentence\tlabel\n" + "".join(f"good {n}\t1\nbad {n}\t0\n" for n in range(8))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with a small SST-2, and word vectors in two places, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "sst2").mkdir(exist_ok=True)
        (tmp_path / "sst2" / name).write_text(SENTENCES)
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("good 1 0\nbad 0 1\n")
    return tmp_path


def study_of(root: Path, vectors: str) -> Study:
    (root / "study.yaml").write_text(
        json.dumps(
            {
                "experiment": {
                    "workload": {
                        **{"name": "sst2", "data_root": str(root), "glove": vectors, "embeddings": "frozen"},
                        **{"model": {"name": "rnn", "hidden": 4}, "length": 3, "vocabulary": 20, "embedding": 2},
                    },
                    "federation": {"clients": 2, "cohort": 2, "rounds": 1},
                    "engine": {"block": 1, "kernels": "torch"},
                },
                "methods": {"FedAvg": "fedavg"},
                "tracking": {"uri": "none"},
                "tune": {"together": True},
            }
        )
    )
    return with_files(load(str(root / "study.yaml")))


def key(study: Study) -> str:
    (cell,) = cells(study)
    return cell.key


def test_a_cell_is_known_by_the_content_of_files(root):
    one, two = study_of(root, "one.txt"), study_of(root, "two.txt")
    assert list(one.files) == ["one.txt"]
    assert key(one) == key(two)
    (root / "two.txt").write_text("good 1 0\nbad 0 2\n")
    assert key(study_of(root, "two.txt")) != key(one)
    assert key(study_of(root, "one.txt")) == key(one)


def test_reports_need_no_files(root):
    """study.yaml has the digests, so that another machine finds the cells."""
    study = study_of(root, "one.txt")
    StudyFolder(root / "kept").keep(study)
    (root / "one.txt").unlink()
    assert key(StudyFolder(root / "kept").study) == key(study)


def test_a_cell_of_an_earlier_version_is_found_by_its_path(root):
    study, folder = study_of(root, "one.txt"), StudyFolder(root / "study")
    (cell,) = cells(study)
    (old,) = cells(study.model_copy(update={"files": {}}))
    assert old.key != cell.key
    assert folder.of(cell).name == cell.key
    (root / "study/cells" / old.key).mkdir(parents=True)
    assert folder.of(cell).name == old.key
    (root / "study/cells" / cell.key).mkdir()
    assert folder.of(cell).name == cell.key


def test_a_cell_with_a_plugin_is_found_by_the_key_that_has_its_path(root):
    plugin = root / "own.py"
    plugin.write_text("from fedfleet.algorithms.fedavg import fedavg\nMETHODS = {'mine': fedavg}\n")
    study, folder = (
        study_of(root, "one.txt").model_copy(update={"plugins": (str(plugin),)}),
        StudyFolder(root / "study"),
    )
    (cell,) = cells(study)
    settings = {**effective_settings(cell.data), "workload.glove": {"sha256": study.files["one.txt"]}}
    old = sha256_of_json([settings, [find_plugin(str(plugin)).module]])[:16]
    assert folder.of(cell).name == cell.key != old
    (root / "study/cells" / old).mkdir(parents=True)
    assert folder.of(cell).name == old


def test_a_study_without_named_files_keeps_its_keys():
    (one, *_), (two, *_) = cells(with_files(load("demo"))), cells(load("demo"))
    assert one.key == two.key
    assert set(one.earlier) == {one.key}


@pytest.mark.long
def test_other_data_are_refused(root):
    study = study_of(root, "one.txt")
    assert run_study(study, root / "out", jobs=1, quiet=True)[0].finished == 1
    run_study(study_of(root, "two.txt"), root / "out", jobs=1, quiet=True)
    assert len([*(root / "out/cells").iterdir()]) == 1
    (root / "sst2/train.tsv").write_text(SENTENCES + "fine\t1\n")
    with pytest.raises(ConfigError, match=r"run with another sst2/train\.tsv than is here .* give another folder"):
        run_study(study, root / "out", jobs=1, quiet=True)
    assert run_study(study, root / "other", jobs=1, quiet=True)[0].finished == 1


# --- fedfleet data check ----------------------------------------------------------------------------------------------
def test_the_data_sets_of_a_study_are_checked(root):
    study_of(root, "one.txt")
    done = invoke("data", "check", "study.yaml")
    assert done.exit_code == 0, done.output
    assert "sst2: in part: Sst2 has 16 of 67,349 training rows and 16 of 872 test rows" in done.output
    assert f"in {root / 'sst2'}" in done.output
    for name, path in {"sst2/train.tsv": "sst2/train.tsv", "word vectors": "one.txt"}.items():
        assert re.search(rf"{name} +\d+ +{hashlib.sha256((root / path).read_bytes()).hexdigest()}", done.output)


def test_a_missing_data_set_is_told(root):
    study_of(root, "one.txt")
    (root / "sst2/dev.tsv").unlink()
    done = invoke("data", "check", "study.yaml")
    assert done.exit_code == 1
    assert f"sst2: not usable, looked for in {root}; sst2 needs SST-2/train.tsv" in done.output
    assert invoke("data", "check", "heavy-tail-rates").output == "quadratic: needs no files of data\n"


def test_word_vectors_that_are_missing_are_told(root):
    study_of(root, "one.txt")
    (root / "one.txt").unlink()
    done = invoke("data", "check", "study.yaml")
    assert done.exit_code == 1
    assert f"sst2: not usable, looked for in {root}; glove must be a file of word vectors, got no file one.txt" in (
        done.output
    )
    done = invoke("data", "check", "study.yaml", "experiment.workload.glove=null")
    assert done.exit_code == 0, done.output
    assert "no file of word vectors (glove): they are drawn at random" in done.output


def test_data_that_are_no_published_set_are_checked_too(root):
    """The digits of scikit-learn, and files that settings name, of which two are two data sets."""
    digits = hashlib.sha256(file_of_digits().read_bytes()).hexdigest()
    done = invoke("data", "check", "demo")
    assert done.output.startswith("digits: found: 1,442 training and 355 test rows\n")
    assert re.search(rf"scikit-learn/digits.csv.gz +[\d,]+ +{digits}\n", done.output)
    for name in ("a.txt", "b.txt"):
        (root / name).write_text(name * 100)
    study = {
        "experiment": {
            "workload": {"name": "characters", "path": "a.txt", "length": 8},
            "federation": {"clients": 2, "cohort": 2, "rounds": 1},
        },
        "methods": {"FedAvg": "fedavg"},
        "axes": {"file": {"a": {"workload.path": "a.txt"}, "b": {"workload.path": "b.txt"}}},
        "tracking": {"uri": "none"},
    }
    (root / "study.yaml").write_text(json.dumps(study))
    done = invoke("data", "check", "study.yaml")
    assert done.exit_code == 0, done.output
    for name in ("a.txt", "b.txt"):
        assert re.search(rf"{name} +500 +{hashlib.sha256((root / name).read_bytes()).hexdigest()}", done.output)
    (root / "b.txt").unlink()
    done = invoke("data", "check", "study.yaml")
    assert done.exit_code == 1
    assert "characters: not usable; path must be a file, got b.txt" in done.output


def test_a_part_of_a_set_is_named_in_the_log_and_the_report(root):
    config = cells(study_of(root, "one.txt"))[0].data
    fedfleet.run(experiment(config), root / "run")
    said = "Sst2 has 16 of 67,349 training rows and 16 of 872 test rows"
    assert data_in_part(root / "run") == said
    line = line_of(root / "run", set())
    assert line is not None
    restore_line(root / "again", line)
    assert data_in_part(root / "again") == said
    assert said in (write_run_report(root / "run")).read_text()


@pytest.mark.parametrize(
    ("rows", "complete"), [((60_000, 10_000), True), ((59_999, 10_000), False), ((60_000, 1), False)]
)
def test_a_part_is_less_of_either(rows, complete):
    assert (FashionMnist().in_part(*rows) == "") is complete


def test_a_table_that_is_missing_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whether larger values are better depends on the labels of the table, which are read before the check."""
    monkeypatch.chdir(tmp_path)
    workload = {"name": "table", "path": "writers.parquet", "test_fraction": 0.1, "model": "mlp"}
    study = {
        "experiment": {"workload": workload, "federation": {"clients": 2, "cohort": 2, "rounds": 1}},
        "methods": {"FedAvg": "fedavg"},
        "report": {"metric": "eval/accuracy"},
        "tracking": {"uri": "none"},
    }
    (tmp_path / "study.yaml").write_text(json.dumps(study))
    done = invoke("study", "study.yaml", "--out", "out")
    assert done.exit_code == 2, done.output
    assert "experiment.workload: path must name a file" in done.stderr
