"""Settings are chosen on rows for validation where an experiment has them, and never on test rows there."""

from __future__ import annotations

from typing import Any

import pytest

from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.metrics import better, on_validation
from fedfleet.tune.report.findings import chosen_by
from fedfleet.tune.search.plan import plan
from fedfleet.tune.study.check import check_metrics
from fedfleet.tune.study.spec import Study, study
from fedfleet.tune.units import in_words, is_share

RATES = {"search": "grid", "values": [0.1, 0.01]}


def of(validation: float, **tune: Any) -> Study:
    data = {
        "name": "s",
        "experiment": {
            "workload": {"name": "digits", "model": "logistic"},
            "federation": {"clients": 4, "cohort": 2, "rounds": 1},
            "evaluate": {"validation": validation},
        },
        "methods": {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": RATES}}},
        "tune": {"each": "level", **tune},
    }
    return study(data)


def test_a_study_decides_by_validation():
    assert of(0.2).deciding == "eval/validation_accuracy"
    assert of(0.0).deciding == "eval/accuracy"
    assert of(0.2, metric="eval/validation_loss").deciding == "eval/validation_loss"
    assert chosen_by(of(0.2)) == "by validation accuracy, on 20% of each client's rows"
    assert chosen_by(of(0.0)) == "by the reported metric on the test set"
    check_metrics(of(0.2))


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/loss"])
def test_a_study_with_validation_does_not_decide_by_test_rows(metric):
    instead = metric.replace("eval/", "eval/validation_")
    with pytest.raises(ConfigError, match=f"tune.metric: choices are made on validation rows, got .*choose {instead}"):
        check_metrics(of(0.2, metric=metric))
    check_metrics(of(0.0, metric=metric))


def test_a_search_decides_by_validation():
    data = {"workload": "digits", "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": RATES}}}
    assert list(plan(data).settings.objectives) == ["eval/accuracy"]
    validated = {**data, "evaluate": {"validation": 0.1}}
    assert list(plan(validated).settings.objectives) == ["eval/validation_accuracy"]
    with pytest.raises(ConfigError, match=r"search\.objectives: choices are made on validation rows, got eval/loss"):
        plan({**validated, "search": {"objectives": {"eval/loss": "min", "bytes": "min"}}})


def test_names_of_metrics():
    assert on_validation("eval/clients/test_accuracy_worst") == "eval/clients/validation_accuracy_worst"
    assert (
        on_validation("train/loss")
        is on_validation("eval/validation_auc")
        is on_validation("eval/clients/loss")
        is None
    )
    assert better("eval/validation_loss") == better("eval/clients/validation_loss_worst") == "min"
    assert better("eval/validation_auc") == "max"
    assert is_share("eval/validation_accuracy")
    assert in_words("eval/validation_auc") == "validation AUC"
