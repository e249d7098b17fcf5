"""Which means have the federation's client weights, which are plain means, and the norms that are compared with them.

A weighted mean with whole weights is the plain mean over that many copies of each client. If all means of a method have
the weights of x, the method trains the same model in two cases: on clients of 2, 3 and 7 rows with `weights: examples`,
and with plain means on twelve clients, of which 2, 3 and 7 have the same rows. This test does not depend on how
methods, blocks or workers add up.

TOLERANCE: float64, sums in another order, over some rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedfleet.algorithms.contract import Round
from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.local import LocalMethod, ServerRule
from fedfleet.algorithms.parts.compression import compressed
from fedfleet.algorithms.parts.rules import Momentum, Sgd
from fedfleet.algorithms.table import COMPRESSIONS
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.api import run
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Logistic, Mlp
from fedfleet.workloads.workload import Columns, Model, Partition
from tests.engine.test_compressed import Pictures
from tests.methods import ON_ANY_MODEL as METHODS
from tests.reference.variance_reduced import local_adaalter

torch.set_num_threads(1)

TOLERANCE = 1e-9
SIZES = (2, 3, 7)


@dataclass(frozen=True)
class Hands(Partition):
    """A partition by which client i has the group of rows with the number `of[i]`. A group consists of consecutive
    rows; `sizes` has the sizes of the groups."""

    sizes: tuple[int, ...]
    of: tuple[int, ...]

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        ends = np.cumsum((0, *self.sizes))
        return ClientIndex.of([np.arange(ends[i], ends[i + 1]) for i in self.of])


@dataclass(frozen=True)
class Few(Digits):
    model: Model = Mlp((4,))
    partition: Partition = Hands(SIZES, tuple(range(len(SIZES))))


@dataclass(frozen=True)
class Copies(Digits):
    """The rows of client i of `Few` are there `SIZES[i]` times, each time for another client."""

    model: Model = Mlp((4,))
    partition: Partition = Hands(tuple(n for n in SIZES for _ in range(n)), tuple(range(sum(SIZES))))

    def load(self) -> tuple[Columns, Columns]:
        train, test = super().load()
        ends = np.cumsum((0, *SIZES))
        copies = np.concatenate([np.arange(ends[i], ends[i + 1]) for i, n in enumerate(SIZES) for _ in range(n)])
        return {name: column[copies] for name, column in train.items()}, test


def whole_batches(method: Any, workload: Any, clients: int, weights: str, **more: Any) -> Experiment:
    """An experiment in which all clients take part and a batch has all rows of a client, so that no draw depends on a
    client's number."""
    plan = {"clients": clients, "cohort": clients, "rounds": 2, "local": {"steps": 2, "batch": 64}, "weights": weights}
    return experiment(
        {
            "workload": workload,
            "method": method,
            "federation": {**plan, **more.get("plan", {})},
            "engine": {"backend": "local", "dtype": "float64", "block": 2, **more.get("engine", {})},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


FACTORED = {"ratio": 0.6, "layers": "all", "nearest": True}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["fedmud", "fedmud_bkd", "fedmud_aad", "fedmud_bkd_aad", "fedmud_f", "fedmud_bkd_f"], FACTORED),
    **dict.fromkeys(["fedhm", "fedlmt", "fedpara"], FACTORED),
    "fedexp": {"floor": False},
}
PLAIN_CONTROLS = {"scaffold", "fedmuon_bc", "sagda"}
"""x is averaged with the weights; the control variate c is the plain mean of all clients' c_i in any case, on which its
invariant rests, and the methods' heads say so."""
DRAWS = {"ef21_p", "fedbat"}
"""Methods whose messages are drawn by the number of the client."""
MORE: dict[str, dict[str, Any]] = {
    "fedavg, averaged Adam": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "average"},
    "local_sgdm, Nesterov": {"name": "local_sgdm", "nesterov": True, "server_lr": 0.7},
    "stem, mean points": {"name": "stem", "previous": "server"},
    "stem, no start": {"name": "stem", "start": "zeros"},
    "fafed, mean points": {"name": "fafed", "previous": "server"},
    "fedmuon_ma, warm": {"name": "fedmuon_ma", "start": "gradient"},
    "fed_sgda_m, warm": {"name": "fed_sgda_m", "start": "gradient"},
    "fedexp, FedHM": {
        "name": "fedexp",
        "floor": False,
        "evaluate": "last",
        "compression": {"name": "decomposition", **FACTORED},
    },
}
CASES = {name: {"name": name, **SETTINGS.get(name, {})} for name in METHODS if name not in DRAWS} | MORE


def built(method: dict[str, Any]) -> Any:
    return prepare(whole_batches(method, Few(), 3, "uniform"), "built").method()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_copies(case: str):
    """A client with weight n counts like n copies of it; or the method says `weighted = False`, and then the weights
    change nothing."""
    method = CASES[case]
    weighted = run(whole_batches(method, Few(), 3, "examples")).model
    if not built(method).weighted:
        other = run(whole_batches(method, Few(), 3, "uniform")).model
        assert all(torch.equal(weighted[name], other[name]) for name in weighted)
        return
    copies = run(whole_batches(method, Copies(), sum(SIZES), "uniform")).model
    far = max(float((weighted[name] - copies[name]).abs().max()) for name in weighted)
    assert far > 1e-6 if case in PLAIN_CONTROLS else far <= TOLERANCE, far


# --- identities -------------------------------------------------------------------------------------------------------
def softmax_gradient(w: np.ndarray, b: np.ndarray, x: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(gradient in w, gradient in b) of the mean cross-entropy of the logits x w^T + b, x: (n, d)."""
    scores = x @ w.T + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    wrong = (p / p.sum(1, keepdims=True) - np.eye(len(b))[label]) / len(x)
    return wrong.T @ x, wrong.sum(0)


def rows_of(sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    train, ends = Digits().load()[0], np.cumsum((0, *sizes))
    x = np.asarray(train["input"], dtype=np.float64).reshape(len(train["input"]), -1)
    label = np.asarray(train["label"]).astype(int)
    return [(x[begin:end], label[begin:end]) for begin, end in pairwise(ends)]


def linear(sizes: tuple[int, ...]) -> Any:
    return Few(model=Logistic(), partition=Hands(sizes, tuple(range(len(sizes)))))


ONE_STEP = {"plan": {"rounds": 6, "local": {"steps": 1, "batch": 64}}}


@pytest.mark.parametrize("nesterov", [False, True])
def test_one_local_step_is_heavy_ball_on_the_weighted_objective(nesterov: bool):
    """K = 1 and all clients: u <- mu u + sum_i w_i g_i(x), and the sum is the gradient of the mean loss over all
    rows."""
    method = {"name": "local_sgdm", "lr": 0.2, "mu": 0.8, "nesterov": nesterov}
    found = run(whole_batches(method, linear((2, 38)), 2, "examples", **ONE_STEP)).model
    start = linear((2, 38)).init(0)
    (x, label), rates = [np.concatenate(parts) for parts in zip(*rows_of((2, 38)), strict=True)], (0.2, 0.8)
    point = [np.asarray(start[name], dtype=np.float64) for name in ("out.weight", "out.bias")]
    u = [np.zeros_like(part) for part in point]
    for _ in range(6):
        g = softmax_gradient(point[0], point[1], x, label)
        u = [rates[1] * old + new for old, new in zip(u, g, strict=True)]
        way = [rates[1] * a + new for a, new in zip(u, g, strict=True)] if nesterov else u
        point = [p - rates[0] * a for p, a in zip(point, way, strict=True)]
    for name, value in zip(("out.weight", "out.bias"), point, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_local_adaalter_of_unequal_clients():
    """Two rounds of three steps of clients with 2, 3 and 7 rows, in blocks of two with padded batches: the slow
    reference on gradients by numpy, both of whose means have the weights 2, 3 and 7."""
    method = {"name": "local_adaalter", "lr": 0.4, "eps": 0.5, "b0": 0.3}
    plan = {"plan": {"local": {"steps": 3, "batch": 64}}}
    found = run(whole_batches(method, linear(SIZES), 3, "examples", **plan)).model
    start, rows = {name: value.numpy() for name, value in linear(SIZES).init(0).items()}, rows_of(SIZES)

    def gradient(i: int, x: Any, r: int, k: int) -> dict[str, np.ndarray]:
        w, b = softmax_gradient(x["out.weight"], x["out.bias"], *rows[i])
        return {"out.weight": w, "out.bias": b}

    steps = {(r, i): 3 for r in range(2) for i in range(3)}
    slow = local_adaalter(gradient, start, 3, [[0, 1, 2]] * 2, steps, 0.4, 0.5, 0.3, SIZES)
    plain = local_adaalter(gradient, start, 3, [[0, 1, 2]] * 2, steps, 0.4, 0.5, 0.3)
    for name, value in slow.x[-1].items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert np.abs(slow.x[-1]["out.weight"] - plain.x[-1]["out.weight"]).max() > 1e-3


def test_fedexp_of_clients_with_2_and_38_rows():
    """eta_g equals sum w_i |d_i|^2 / (2 |sum w_i d_i|^2), computed by numpy. It is near 1/2, and not 20 times as large,
    because one client has nearly all of the weight."""
    method = {"name": "fedexp", "rule": {"name": "sgd", "lr": 0.3}, "epsilon": 0.0, "floor": False}
    row = run(whole_batches(method, linear((2, 38)), 2, "examples", **ONE_STEP)).rows[0]
    start = linear((2, 38)).init(0)
    w, b = (np.asarray(start[name], dtype=np.float64) for name in ("out.weight", "out.bias"))
    moves = [-0.3 * np.concatenate([g.ravel() for g in softmax_gradient(w, b, *part)]) for part in rows_of((2, 38))]
    mean = 0.05 * moves[0] + 0.95 * moves[1]
    right = (0.05 * moves[0] @ moves[0] + 0.95 * moves[1] @ moves[1]) / (2 * mean @ mean)
    wrong = (moves[0] @ moves[0] + moves[1] @ moves[1]) / (4 * mean @ mean)
    assert row["server/lr"] == pytest.approx(right, rel=TOLERANCE)
    assert 0.5 <= right < 1 < wrong


# --- norms under compression ------------------------------------------------------------------------------------------
class Spread(ServerRule):
    """FedAvg that reports how much the clients differ: mean |d_i|^2 / |mean d_i|^2, which is at least 1 by Jensen's
    inequality."""

    uses_norm2 = True

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        return x + delta, state

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor:
        return norm2 / delta.norm2()


PARTS: dict[str, Any] = {
    "none": None,
    **{name: {"name": name, **({"nearest": True} if "nearest" in keys else {})} for name, keys in {
        "updates": "nearest", "factors": "nearest", "hadamard": "nearest", "decomposition": "nearest",
        "sparsification": "", "binarisation": "",
    }.items()},
    "anchored": {"name": "updates", "form": "anchored", "nearest": True},
    "sparsification, unbiased": {"name": "sparsification", "unbiased": True},
    "sparsification, errors": {"name": "sparsification", "memory": "error"},
    "sparsification, shifts": {"name": "sparsification", "memory": "shift"},
    "binarisation both ways": {"name": "binarisation", "both_ways": True},
    "coded": {"name": "coded", "codec": {"name": "sparse", "size": 64, "density": 0.1}},
    "coded, forgotten": {"name": "coded", "codec": "qsgd", "memory": "none"},
}  # fmt: skip


def test_every_compression_is_tried():
    assert {part["name"] for part in PARTS.values() if part} == set(COMPRESSIONS)


def spread(part: Any, cohort: int, weights: str = "examples") -> list[float]:
    """The quotient of `Spread` in every round, from the column server/lr. The workload Pictures has running statistics,
    which are in no norm."""
    chosen = None if part is None else Registry().build("COMPRESSIONS", part, "method.compression")
    method = compressed(LocalMethod(Momentum(0.05), Plain(), Spread()), chosen)
    asked = {"plan": {"cohort": cohort, "rounds": 4, "local": {"epochs": 2, "batch": 4}}}
    workload = Pictures(partition=Hands((2, 4, 6, 12), (0, 1, 2, 3)))
    return [row["server/lr"] for row in run(whole_batches(method, workload, 4, weights, **asked)).rows]


@pytest.mark.parametrize("name", PARTS)
def test_one_clients_norm_is_that_of_the_mean(name: str):
    """With a cohort of one client, the norm that the server gets is that of its mean displacement, whatever was encoded
    and decoded."""
    assert spread(PARTS[name], 1) == pytest.approx([1.0] * 4, rel=1e-9)


@pytest.mark.parametrize("weights", [pytest.param("uniform", marks=pytest.mark.long), "examples"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("none", "sparsification, errors") else pytest.param(name, marks=pytest.mark.long)
        for name in PARTS
    ],
)
def test_jensens_bound(name: str, weights: str):
    """sum w_i |d_i|^2 >= |sum w_i d_i|^2, and the codec adds no factor: the quotient is at most 4 for 4 clients of
    equal weights, which is reached by orthogonal messages, and at most 12 for these unequal weights."""
    assert all(1 - 1e-9 <= each <= 12 for each in spread(PARTS[name], 4, weights))


def test_random_entries_do_not_inflate_the_extrapolation():
    """FedExP's eta_g with Rand-k at 1/32 equals that of the same messages when each is decoded separately."""
    rows = []
    method = {"name": "fedexp", "evaluate": "last", "floor": False, "epsilon": 0.0}
    for part in (None, {"name": "sparsification", "down": "identity"}):
        chosen = {**method, "compression": part} if part else method
        plan = {"plan": {"cohort": 4, "rounds": 1, "local": {"steps": 3, "batch": 12}}}
        workload = Pictures(partition=Hands((6, 6, 6, 6), (0, 1, 2, 3)))
        rows.append(run(whole_batches(chosen, workload, 4, "uniform", **plan)).rows[0])
    # The only allowed difference: messages with different entries are more orthogonal than the displacements.
    assert 0.5 <= rows[1]["server/lr"] < 3 * rows[0]["server/lr"] < 6


def test_a_rule_that_does_not_say_that_it_measures_gets_no_number():
    """If it got a number, a plain mean in place of the weighted one would not be noticed."""

    class Silent(Spread):
        uses_norm2 = False

    method: Any = LocalMethod(Sgd(), Plain(), Silent())
    row = run(whole_batches(method, Few(), 3, "examples")).rows[0]
    assert np.isnan(row["server/lr"])
