"""The samplers that set the weights of the mean, of agnostic federated learning and of TERM: golden values, the draws
by lambda, what they are the same as."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.cohorts.agnostic import Agnostic, onto_simplex
from fedfleet.engine.cohorts.tilted import Tilted
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.fleet.table import SAMPLERS
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.client_index import ClientIndex, Drift
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp
from fedfleet.workloads.partitions.natural import Domains
from fedfleet.workloads.workload import Split, Workload
from tests.algorithms.golden import CASES, DIGITS, PROBLEM, equal
from tests.reference import fairness as reference

from .test_samplers import ask, digits, play

GOLDEN = ("agnostic", "agnostic over two groups, floor")
LENGTHS = [len(rows) for rows in PROBLEM.rows]


@dataclass(frozen=True)
class Rows(Workload):
    """The regression of the golden values."""

    def split(self, seed, clients):
        rows = {"row": np.concatenate([np.array(rows, dtype=np.float64) for rows in PROBLEM.rows])}
        return Split(rows, rows, ClientIndex(np.cumsum([0, *LENGTHS]), np.arange(sum(LENGTHS))))

    def init(self, seed):
        return {name: torch.from_numpy(value) for name, value in PROBLEM.start.items()}

    def losses(self, p, batch):
        x = batch["row"].to(p["out.weight"].dtype)
        return (x[:, :2] @ p["out.weight"][0] + p["out.bias"][0] - x[:, 2]) ** 2 / 2

    def report(self, p, batch):
        return {"loss": self.losses(p, batch)}


def of_case(name):
    """(the golden values, the sampler's settings, the path of the slow reference)."""
    case = CASES[name]
    settings = {key: value for key, value in case.settings.items() if key != "lr"}
    slow = {**settings, "groups": settings.get("groups", range(4)), "rounds": 3, "K": case.K, "lr": 0.1}
    return case.expected, settings, reference.agnostic(PROBLEM, LENGTHS, **slow)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    """lambda is what the sampler makes of the losses at the golden models."""
    expected, settings, (path, lam) = of_case(name)
    for x, weights, golden, golden_weights in zip(path, lam, expected["x"], expected["lam"], strict=True):
        equal(x, golden)
        np.testing.assert_allclose(weights, golden_weights, rtol=0, atol=DIGITS)
    given = {**settings, "groups": tuple(settings["groups"])} if "groups" in settings else settings
    sampler, models = Agnostic(**given), [PROBLEM.start, *path]
    state = sampler.start(4, 4)
    for number, golden in enumerate(expected["lam"], 1):
        probe = lambda clients, rows, x=models[number - 1]: np.array([PROBLEM.loss(i, x) for i in clients])  # noqa: E731
        draw = sampler.draw(state, ask(number, np.array(LENGTHS), 4, probe=probe))
        if number > 1:
            recorded = [draw.columns[f"sampler/lambda_{group}"] for group in range(len(state["lambda"]))]
            assert recorded == state["lambda"].tolist()
            assert draw.columns["sampler/lambda_max"] == max(recorded)
        state = dict(draw.note)
        np.testing.assert_allclose(state["lambda"], golden, rtol=0, atol=DIGITS)


def final(sampler, workload=Rows(), evaluate=None, **federation):
    """The model of a run of three rounds of two local steps on all rows."""
    given = {"clients": 4, "cohort": 4, "rounds": 3, "local": {"steps": 2, "batch": 8}, "sampler": sampler}
    made = experiment(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {**given, **federation},
            "engine": {"backend": "local", "dtype": "float64", "block": 2, "kernels": "torch"},
            "evaluate": evaluate or {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    return {name: value.numpy() for name, value in run(made).model.items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_of_runs(name):
    expected, settings, _ = of_case(name)
    equal(final({"name": "agnostic", **settings}), expected["x"][-1])


@dataclass(frozen=True)
class InRegions(Rows):
    """The clients 0 and 2 are of one region, and the others of another one."""

    def split(self, seed, clients):
        split = super().split(seed, clients)
        return split._replace(train={**split.train, "region": np.repeat([7, 5, 7, 5], LENGTHS)})


def test_groups_may_be_the_values_of_a_column():
    """Bit for bit the groups that are given by numbers, in the order of the values, also with rows held out."""
    settings, held_out = {"name": "agnostic", "gamma": 0.25, "floor": 0.1}, {"every": 0, "held_out": 0.3}
    for evaluate in ({"every": 0}, held_out):
        one, other, apart = (
            final({**settings, "groups": groups}, InRegions(), evaluate) for groups in ([1, 0, 1, 0], "region", None)
        )
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert not np.array_equal(one["out.weight"], apart["out.weight"])


def test_groups_of_a_column_go_with_unseen_clients():
    """Those alone that are trained with have groups; the unseen ones are evaluated with them."""
    evaluate = {"every": 0, "held_out": 0.3, "clients": {"own": True}}
    one, other = (
        final({"name": "agnostic", "groups": groups}, InRegions(), evaluate, clients=3, cohort=3, unseen=[3])
        for groups in ([1, 0, 1], "region")
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_rows_of_later_windows_count_too():
    """Client 0 has one value in the window of round 1, and another one later."""
    index = ClientIndex.equal(np.arange(8), 2)._replace(drift=Drift(window=0.5, move=0.5)).in_windows()
    assert index.with_common("domain", np.array([1, 1, 2, 2, 3, 3, 3, 3])).common == {}
    found = index.with_common("domain", np.array([1, 1, 1, 1, 3, 3, 3, 3])).common
    assert found["domain"].tolist() == [1, 3]


class OfWriters(Digits):
    """Each of its rows is of one of four writers."""

    def load(self):
        train, test = super().load()
        return {**train, "client": np.arange(len(train["label"])) % 4}, test


def test_groups_of_the_domains_of_a_partition():
    """The column `client` is known of the clients, though training does not see it. Its groups have five clients each,
    in turns."""
    runs = [
        run(digits({"name": "agnostic", "groups": groups}, {"cohort": 20}, workload=OfWriters(Mlp((4,)), Domains())))
        for groups in ("client", [i % 4 for i in range(20)])
    ]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert "sampler/lambda_3" in runs[0].rows.columns
    assert "sampler/lambda_4" not in runs[0].rows.columns


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": "regions"}, "groups must name a training column, got regions; valid: client, input, label"),
        ({"groups": "input"}, "groups must name a column of single values, got input, whose values are several"),
        ({"groups": "label"}, "groups: all rows of a client must have one value of the column label, and some have"),
        ({"groups": "client", "floor": 0.3}, "0 <= floor <= 1 / 4 groups must hold, got 0.3; lower it"),
    ],
)
def test_mistakes_about_columns_are_one_sentence(settings, message, tmp_path):
    made = digits({"name": "agnostic", **settings}, {"cohort": 20}, workload=OfWriters(Mlp((4,)), Domains()))
    with pytest.raises(ConfigError, match=f"^federation.sampler: {re.escape(message)}"):
        run(made, tmp_path / "run")


@dataclass(frozen=True)
class Fixed(Tilted):
    """The cohorts of a case: in each round these clients alone can be drawn."""

    cohorts: tuple[tuple[int, ...], ...] = ()

    def draw(self, state, ask):
        return super().draw(state, ask._replace(eligible=np.array(self.cohorts[ask.number - 1])))


@pytest.mark.parametrize("name", ["term", "term, negative tilt, weights by examples"])
def test_golden_values_of_term(name, monkeypatch):
    case = CASES[name]
    tilt, weights = case.settings["tilt"], case.settings.get("weights", "uniform")
    path = reference.term(PROBLEM, LENGTHS, case.cohorts, case.K, 0.1, tilt, weights)
    for x, golden in zip(path, case.expected["x"], strict=True):
        equal(x, golden)
    monkeypatch.setitem(SAMPLERS, "fixed", Fixed)
    sampler = {"name": "fixed", "tilt": tilt, "cohorts": case.cohorts}
    equal(final(sampler, cohort=2, weights=weights), case.expected["x"][-1])


def test_a_tilt_of_zero_is_the_plain_mean():
    assert run(digits({"name": "tilted", "tilt": 0.0})).model_sha256 == run(digits()).model_sha256


def test_a_large_tilt_leaves_the_client_with_the_largest_loss():
    draw = Tilted(1e6).draw({}, ask(1, size=3))  # the loss of client i is i
    assert draw.weights is not None
    assert draw.weights[draw.clients].tolist() == [0.0, 0.0, 3.0]


def test_the_projection():
    """Golden values, then random points against bisection."""
    for v, floor, expected in (
        ([0.5, 0.7, -0.2], 0.0, [0.4, 0.6, 0.0]),
        ([0.2, 0.3, 0.5], 0.0, [0.2, 0.3, 0.5]),
        ([2.0, 0.1, 0.0, 0.0], 0.01, [0.97, 0.01, 0.01, 0.01]),
        ([1.0, 1.0], 0.0, [0.5, 0.5]),
    ):
        np.testing.assert_allclose(onto_simplex(np.array(v), floor), expected, rtol=0, atol=1e-15)
    for v in np.random.default_rng(0).normal(size=(50, 7)):
        np.testing.assert_allclose(onto_simplex(v, 0.02), reference.onto_simplex(v, 0.02), rtol=0, atol=1e-12)


def test_draws_by_lambda_are_right_on_average():
    """Without steps of lambda, the mean over the draws of sum w_i v_i / D is sum q_i v_i, with an error of 0.01."""
    sizes, values = np.arange(1, 11), np.linspace(-1, 1, 10)
    draws = play(Agnostic(gamma=0.0, floor=0.001, by="lambda"), 1000, sizes=sizes, size=3)
    assert all(len(draw.clients) == 3 for draw in draws)
    means = [float(draw.weights[draw.clients] @ values[draw.clients]) / draw.divisor for draw in draws]
    assert np.mean(means) == pytest.approx(float(sizes @ values) / sizes.sum(), abs=0.04)


def test_lambda_that_does_not_move_is_fedavg_by_examples():
    everyone = {"cohort": 20}
    by_lambda = run(digits({"name": "agnostic", "gamma": 0.0}, everyone)).model
    by_examples = run(digits(plan={**everyone, "weights": "examples"})).model
    for name, value in by_lambda.items():
        torch.testing.assert_close(value, by_examples[name], rtol=1e-5, atol=1e-6)  # float32, three rounds


@pytest.mark.parametrize(
    ("settings", "plan", "message"),
    [
        ({}, {}, "by=all needs every client, got cohort 6 of 20; choose by: lambda"),
        ({}, {"cohort": 20, "weights": "examples"}, "it sets the weights itself, got federation.weights=examples;"),
        ({"by": "lambda"}, {}, "floor > 0 must hold with by=lambda, got 0.0; choose 0.001"),
        ({"floor": 0.1}, {"cohort": 20}, "0 <= floor <= 1 / 20 groups must hold, got 0.1; lower it"),
        ({"gamma": -1.0}, {"cohort": 20}, "gamma >= 0 must hold, got -1.0; choose 0 or more"),
        ({"groups": [0, 2]}, {"cohort": 20}, "groups must give each of 20 clients a group, numbered from 0 without"),
    ],
)
def test_mistakes_are_one_sentence(settings, plan, message):
    with pytest.raises(ConfigError, match=f"^federation.sampler: {re.escape(message)}"):
        prepare(digits({"name": "agnostic", **settings}, plan), "test")
