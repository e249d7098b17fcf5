"""Clients' own models in reports: the distribution of a run, and runs client by client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine import run
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.client_models import FILE
from fedfleet.engine.records.metrics import default_column, nearest_column
from fedfleet.tune.by_client import (
    ByClient,
    by_client,
    compared,
    differences,
    distribution,
    populations,
    scatters,
    seen_and_unseen,
)
from fedfleet.tune.comparison.data_frame import compare
from fedfleet.tune.comparison.findings import compare_runs
from fedfleet.tune.page.content import Curve
from fedfleet.tune.run_report import page_of
from tests.engine.test_own_models import OWN
from tests.engine.test_personal import small

ROWS = {"client": np.arange(4.0), "rows_training": np.array([5.0, 6.0, 7.0, 8.0])}


def table(label: str, own: list[float], seed: int = 0, **more: list[float]) -> ByClient:
    columns = {**ROWS, "own_test_accuracy": np.array(own), **{name: np.array(each) for name, each in more.items()}}
    return ByClient(label, seed, columns)


def test_shares_of_clients():
    """Strict comparisons, pooled over the seeds that both have, without a client that has no such rows."""
    runs = [
        table("fedavg", [0.5, 0.5, 0.5, 0.5]),
        table("ditto", [0.6, 0.5, 0.4, np.nan]),
        table("fedavg", [0.1, 0.1, 0.1, 0.1], seed=1),
        table("ditto", [0.2, 0.2, 0.2, 0.2], seed=1),
        table("ditto", [1.0, 1.0, 1.0, 1.0], seed=2),
    ]
    ((label, *cells),) = (
        [cell.text for cell in row] for row in differences(runs, "eval/own/test_accuracy_worst", "max").rows
    )
    assert label == "ditto"
    assert cells == [f"{5 / 7:.1%}", f"{1 / 7:.1%}", f"{1 / 7:.1%}", f"{100 * 0.4 / 7:+.4g}", "7"]


def test_smaller_losses_are_better():
    runs = [table("a", [0.0] * 4, own_test_loss=[1.0] * 4), table("b", [0.0] * 4, own_test_loss=[0.5] * 4)]
    (row,) = differences(runs, "eval/own/test_loss", "min").rows
    assert [cell.text for cell in row] == ["b", "100.0%", "0.0%", "0.0%", "-0.5", "4"]


def test_clients_with_other_rows_are_not_compared():
    other = table("b", [0.5] * 4)._replace(columns={**table("b", [0.5] * 4).columns, "rows_training": np.ones(4)})
    assert not differences([table("a", [0.5] * 4), other], "eval/own/test_accuracy", "max").rows
    assert not scatters([table("a", [0.5] * 4), other], "eval/own/test_accuracy").charts


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("eval/own/test_accuracy_q05", "own_test_accuracy"),
        ("eval/accuracy", "own_test_accuracy"),
        ("eval/adapted/test_accuracy", None),
        ("eval/unseen/own/test_accuracy_decile", "own_test_accuracy"),
        ("eval/loss", None),
    ],
)
def test_which_column_is_compared(metric: str, name: str | None):
    assert compared([table("a", [0.5] * 4)], metric) == name


def test_a_run_has_its_distribution():
    """A curve for each model, from its worst client to its best one."""
    run = table("", [0.2, 0.9, np.nan, 0.4], server_test_accuracy=[0.1, 0.2, 0.3, 0.4])
    (chart,) = distribution(run).charts
    server, own = chart.series
    assert (server.name, own.name) == ("server", "own")
    assert isinstance(own, Curve)
    assert own.x["% of the clients"] == [0.0, 50.0, 100.0]
    assert own.mean == [20.0, 40.0, 90.0]


def test_a_run_says_whether_its_rows_are_drawn_or_marked():
    run = table("", [0.2, 0.9, 0.1, 0.4], rows_test=[1.0] * 4, rows_validation=[2.0] * 4)
    drawn = distribution(run, {"held_out": 0.2, "validation": 0.1}).note
    assert drawn.endswith(
        "The test rows are 20% of each client's rows, drawn at random. "
        "The validation rows are 10% of each client's rows, drawn at random."
    )
    assert "The test rows are those that a column of the data marks." in distribution(run).note
    assert "rows are" not in distribution(table("", [0.2, 0.9, 0.1, 0.4])).note


def test_unseen_clients_are_beside_the_others():
    """In the curves of a run, in the shares and means of a comparison, and as points of their own."""
    unseen = np.array([False, False, False, True])
    first = table("a", [0.2, 0.4, 0.6, 0.1], rows_test=[1.0, 1.0, 2.0, 3.0])._replace(unseen=unseen)
    second = table("b", [0.3, 0.4, 0.6, 0.05], rows_test=[1.0, 1.0, 2.0, 3.0])._replace(unseen=unseen)
    assert [[cell.text for cell in row] for row in populations(first).rows] == [
        ["own", "test accuracy (%)", "45", "10", "+35"]
    ]
    assert [
        [cell.text for cell in row] for row in seen_and_unseen([first, second], "eval/unseen/own/test_accuracy").rows
    ] == [
        ["a", "45", "10", "+35"],
        ["b", "47.5", "5", "+42.5"],
    ]
    rows = differences([first, second], "eval/own/test_accuracy_gap", "max").rows
    assert [[cell.text for cell in row][:4] for row in rows] == [
        ["b", "33.3%", "66.7%", "0.0%"],
        ["b, unseen", "0.0%", "0.0%", "100.0%"],
    ]
    section = scatters([first, second], "eval/own/test_accuracy")
    assert section.legend["b"][3] != section.legend["b, unseen"][3]
    (chart,) = section.charts
    assert [marks.name for marks in chart.series] == ["equal", "b", "b, unseen"]
    (chart,) = distribution(first).charts
    assert [curve.name for curve in chart.series] == ["own"]  # a curve needs two clients


def test_the_table_of_a_run_with_unseen_clients_is_read(tmp_path: Path):
    columns = {
        "client": [0, 1],
        "population": ["seen", "unseen"],
        "rows_test": [3, 4],
        "adapted@2_test_loss": [0.5, 0.7],
    }
    pq.write_table(pa.table(columns), tmp_path / FILE)
    found = by_client(tmp_path)
    assert found is not None
    assert [some.tolist() for some in found.populations.values()] == [[True, False], [False, True]]
    ((model, *_),) = ([cell.text for cell in row] for row in populations(found).rows)
    assert model == "adapted@2"


@pytest.mark.long
def test_pages_of_runs(tmp_path: Path):
    for method in ("fedavg", "ditto"):
        run(small(method=method, **OWN), tmp_path / method)
    page = page_of(tmp_path / "ditto")
    assert "Clients' models" in [section.title for section in page.sections]
    curves = next(section for section in page.sections if section.title == "Learning curves")
    assert not [chart.title for chart in curves.charts if chart.title.endswith(("_q05", "_std"))]
    text = compare_runs(
        [tmp_path / "fedavg", tmp_path / "ditto"], "eval/own/test_accuracy", False, (), tmp_path / "page.html"
    )
    assert "Clients that are better or worse off: test accuracy (%) of each client's model, against fedavg" in text
    assert (tmp_path / "page-charts" / "clients-1.svg").is_file()


def test_runs_whose_clients_alone_have_models_are_compared_by_these(tmp_path: Path):
    """Without a metric, and beside a run that has the server's model, too. A loss is better when it is smaller."""
    for method in ("local_only", "fedavg"):
        own = {**OWN["evaluate"], "server": method != "local_only"}
        run(small(method=method, evaluate=own), tmp_path / method)
    alone, beside = [tmp_path / "local_only"], [tmp_path / "local_only", tmp_path / "fedavg"]
    for folders in (alone, beside):
        chosen = compare_runs(folders, None, False, (), None)
        assert chosen == compare_runs(folders, "eval/own/test_accuracy", False, (), None)
        assert "–" not in chosen.split("Results", 1)[1].split("\n\n")[0]
    assert compare(alone)["eval/own/test_accuracy"].notna().all()
    assert default_column(["eval/own/never", "eval/own/test_loss", "eval/auc"]) == "eval/own/test_loss"
    assert default_column(["eval/accuracy", "eval/loss"], ["eval/loss"]) == "eval/loss"
    assert default_column(["eval/accuracy"], ["eval/loss"]) == "eval/accuracy"


def test_an_unknown_column_is_answered_by_the_nearest_ones(tmp_path: Path):
    """Of some hundred columns a message names the nearest ones, and how many there are in each folder."""
    run(small(method="ditto", **OWN), tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        compare_runs([tmp_path / "run"], "eval/own/test_acuracy_worst", False, (), None)
    message = str(refused.value)
    assert "; did you mean eval/own/test_accuracy_worst or " in message
    assert "eval/own/… (" in message
    assert len(message) < 500
    assert nearest_column("eval/auc", ["eval/loss"]) == "did you mean eval/loss? valid: eval/loss"
    assert nearest_column("x", []) == "none is known"


@pytest.mark.long
def test_the_page_of_a_private_run_says_what_is_private(tmp_path: Path):
    privacy = {"clip": 1.0, "noise": 1.0, "delta": 0.01}
    for name, personal in (("all", None), ("head", {"tensors": "head"})):
        run(small(personal, privacy=privacy), tmp_path / name)
        (note,) = (section.note for section in page_of(tmp_path / name).sections if section.title == "Privacy")
        told = note.endswith("a client's own model is not private against somebody who sees it.")
        assert told == (personal is not None)


def test_a_damaged_table_says_so(tmp_path: Path):
    assert by_client(tmp_path) is None
    pq.write_table(pa.table({"client": [0]}), tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"clients\.parquet is damaged"):
        by_client(tmp_path)
