"""Views: what clients find of the broadcast before they train. Blocks, statistics, personal tensors, refusals."""

from __future__ import annotations

import re

import pytest
import torch

from fedfleet.algorithms.ifca import Ifca
from fedfleet.engine import run
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from tests.engine.test_personal import HEAD, NORMED, small

FEDERATION = {"clients": 12, "cohort": 5, "rounds": 2, "local": {"steps": 4, "batch": 8}}
QFFL = {"name": "qffl", "q": 2.0}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param(QFFL, {}, marks=pytest.mark.long),
        (QFFL, {"workload": NORMED}),
        pytest.param(QFFL, {"personal": HEAD}, marks=pytest.mark.long),
        ("ifca", {"workload": NORMED}),
    ],
    ids=["plain", "statistics", "head", "chosen"],
)
def test_alone_as_in_a_block(method, more):
    """Running statistics and personal tensors belong to the models whose losses are found."""
    engine = {"backend": "local", "dtype": "float64", "kernels": "torch"}
    one, two = (
        run(small(method=method, **more, federation=FEDERATION, engine={**engine, "block": block})) for block in (1, 3)
    )
    for name, value in one.model.items():
        torch.testing.assert_close(value, two.model[name], rtol=1e-9, atol=1e-12)
    rows = [row["client/looks"] for row in one.rows]
    assert rows == [row["client/looks"] for row in two.rows]
    assert all(rows)


def test_a_client_knows_its_share_of_the_rows():
    """Alone and in a block, where clients have unequal numbers of rows, and in float32."""
    partition = {"name": "dirichlet", "beta": 0.5}
    uneven = {"name": "digits", "model": {"name": "mlp", "hidden": [8]}, "partition": partition}

    def trained(block, dtype="float64", alpha_by="examples"):
        method = {"name": "feddyn", "alpha": 0.1, "alpha_by": alpha_by}
        engine = {"backend": "local", "kernels": "torch", "block": block, "dtype": dtype}
        found = run(small(method=method, workload=uneven, federation=FEDERATION, engine=engine)).model
        return torch.cat([leaf.flatten() for leaf in found.values()])

    one, two = trained(1), trained(3)
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert not torch.equal(two, trained(3, alpha_by="none"))
    torch.testing.assert_close(trained(3, "float32").double(), two, rtol=1e-4, atol=1e-5)


def test_models_of_clusters_are_drawn_once():
    """Where the step size has a schedule, the method is built again for every round."""
    lr = {"schedule": "linear", "start": 0.1, "end": 0.01}
    spec = RunSpec.of("x", small(method={"name": "ifca", "clusters": 3, "rule": {"name": "sgd", "lr": lr}}))
    first, second = spec.method(1), spec.method(2)
    assert isinstance(first, Ifca)
    assert isinstance(second, Ifca)
    assert first != second
    assert [x is y for x, y in zip(first.drawn, second.drawn, strict=True)] == [True, True]


def test_runs_without_views_have_no_column_of_them():
    assert "client/looks" not in run(small()).rows[-1]
    assert "client/looks" not in run(small(method={"name": "qffl", "q": 0.0})).rows[-1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"aggregate": "median"}, "aggregate: the method divides by a mean that the rule does not guard"),
        (
            {"federation": {**FEDERATION, "mean": "unbiased"}},
            "federation.mean: unbiased is of one mean, and the method divides one by another",
        ),
        (
            {"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-3}},
            "it weighs clients by their losses, for which there is no bound",
        ),
        ({"workload": "quadratic"}, "method.name: qffl needs the loss of each row in the workload's report, got"),
    ],
    ids=["rule", "mean", "privacy", "report"],
)
def test_refusals(sections, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(small(method=QFFL, **sections))
