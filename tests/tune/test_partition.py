"""`fedfleet partition`, the part of `fedfleet show` about the data, and the partition in the folder of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.engine.records.heterogeneity import measures, spread
from fedfleet.engine.records.partition_file import partition_digest, read_partition, write_partition
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.files import load
from fedfleet.tune.partition import ordered
from fedfleet.workloads.client_index import ClientIndex
from tests.tune.commands import invoke

LOCAL = ("engine.backend=local", "tracking.uri=none", "federation.rounds=1")


def test_measures_by_hand():
    """Two clients, four labels: one client has 4 rows of a single label, the other one 2 rows of each of two labels.
    Half of all 8 rows have label 0, a quarter label 1 and a quarter label 3, so the total variation of both clients is
    1/2."""
    client_index = ClientIndex(np.array([0, 4, 8]), np.arange(8))
    found = measures(client_index, np.array([0, 0, 0, 0, 1, 3, 1, 3]))
    assert {name: values.tolist() for name, values in found.items()} == {
        "rows": [4, 4],
        "labels": [1, 2],
        "label_entropy": [0, 1],
        "total_variation": [0.5, 0.5],
    }
    assert list(measures(client_index, np.zeros(8))) == ["rows"]


def test_many_clients_are_sorted_by_their_commonest_class():
    counts = np.array([[0, 2], [3, 1], [0, 1], [9, 1]] * 30)
    law = counts / counts.sum(1, keepdims=True)
    shown = law[ordered(counts)]
    assert (np.diff(shown.argmax(1)) >= 0).all()
    assert ordered(counts[:100]).tolist() == list(range(100))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_chart_and_table(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("partition", "digits", "workload.partition.name=iid", "federation.clients=14", "federation.cohort=2",
                  "--out", f"chart.{suffix}")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "14 clients, 1,442 training rows, 355 test rows" in done.stdout
    assert "rows                    103    103     103    103" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [f"chart.{suffix}"]
    head = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert Path(f"chart.{suffix}").read_bytes().startswith(head)


def test_what_differs_besides_the_rows_is_measured_and_drawn(tmp_path: Path):
    """A rate of 0.25 at every client, images turned by 0 or 90 degrees, and rows that drift."""
    drifting = "{name: drifting, of: iid, window: 0.5, move: 0.1}"
    turned = f"{{name: feature_skew, rotate: [0, 90], of: {{name: digits, partition: {drifting}}}}}"
    asked = (f"workload={{name: label_noise, low: 0.25, high: 0.25, of: {turned}}}", "federation.clients=10")
    page = tmp_path / "page.html"
    done = invoke("partition", "digits", *asked, "federation.cohort=2", "--out", str(page))
    assert done.exit_code == 0, done.output
    cells = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    assert cells["label noise"] == ["0.250"] * 4
    assert cells["rotation, degrees"] == ["0", "45", "45", "90"]
    assert cells["rows of a round"][0] == "72"
    written = page.read_text()
    assert written.startswith("<!doctype html>")
    assert "label_noise of feature_skew of digits: drifting, of iid, window 0.5, move 0.1; 10 clients" in written
    assert all(text in written for text in ("commonest class of the round", "what clients see", "rotation"))


def test_a_set_without_labels_has_rows_only(tmp_path: Path):
    done = invoke("partition", "digits", "workload.name=quadratic", "--out", str(tmp_path / "q.png"))
    assert done.exit_code == 0, done.output
    assert "entropy" not in done.stdout
    assert (tmp_path / "q.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("digits", "--out", "chart.xyz"), "--out: chart.xyz cannot be written"),
        (("digits", "--out", "none/chart.png"), "--out: none/chart.png cannot be written"),
        (("fashion_mnist",), "workload: data_root must name the folder"),
        (("digits", "workload.model=lenet"), "choose mlp or logistic"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDFLEET_DATA", raising=False)
    done = invoke("partition", *arguments)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert says in done.stderr
    assert not list(tmp_path.iterdir())


def test_show_tells_of_missing_data_and_is_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FEDFLEET_DATA", raising=False)
    done = invoke("show", "fashion_mnist")
    assert done.exit_code == 0
    assert "61,706" in done.stdout
    assert "no data: data_root must name the folder" in done.stdout
    assert "100 clients, 1,442 training rows" in invoke("show", "digits").stdout
    refused = invoke("show", "digits", "workload.model=lenet")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)


def rows_of(folder: Path) -> tuple[dict[str, Any], ClientIndex]:
    return json.loads((folder / "partition.json").read_text()), read_partition(folder)


def test_a_run_keeps_its_partition(tmp_path: Path):
    """The partition in the folder is the one that the same seed gives again; another seed gives another one."""
    for number, seed in enumerate((0, 0, 1)):
        done = invoke("run", "digits", *LOCAL, f"seed={seed}", "--out", str(tmp_path / str(number)))
        assert done.exit_code == 0, done.output
    client_index = RunSpec.of("again", load("digits")).split().client_index
    about, found = rows_of(tmp_path / "0")
    measured = about.pop("heterogeneity")
    assert about == {"clients": 100, "rows": 1442, "sha256": partition_digest(client_index)}
    assert (measured["rows"]["mean"], measured["rows"]["max"]) == (14.42, 66)
    assert 0 < measured["total_variation"]["mean"] < 1
    assert 0 < measured["label_entropy"]["mean"] < math.log2(10)
    assert np.array_equal(found.offsets, client_index.offsets)
    assert np.array_equal(found.rows, client_index.rows)
    assert rows_of(tmp_path / "1")[0] == {**about, "heterogeneity": measured}
    assert rows_of(tmp_path / "2")[0]["sha256"] != about["sha256"]


def test_too_many_rows_are_kept_by_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client_index = ClientIndex.equal(np.arange(60), 3)
    write_partition(client_index, tmp_path / "whole")
    monkeypatch.setattr("fedfleet.engine.records.partition_file.MOST_NUMBERS", 62)
    write_partition(client_index, tmp_path / "large")
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["partition.json"]
    whole, large = (json.loads((tmp_path / each / "partition.json").read_text()) for each in ("whole", "large"))
    assert {**large, "heterogeneity": {"rows": spread(client_index.sizes)}} == whole
    assert partition_digest(read_partition(tmp_path / "whole")) == partition_digest(client_index)
