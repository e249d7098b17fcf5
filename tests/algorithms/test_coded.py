"""Coded messages and SparseLoCo: golden values, the slow reference, and settings under which two methods are one.

Golden values come from another program, with a tolerance of 1e-9. The other comparisons are exact, or have ROUNDING,
float64 with some 100 roundings of values near 1.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.data_parallel import data_parallel
from fedfleet.algorithms.diloco import diloco
from fedfleet.algorithms.fedadam import fedadam
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedexp import fedexp
from fedfleet.algorithms.local import Rule
from fedfleet.algorithms.muloco import muloco
from fedfleet.algorithms.parts.codecs import Coder, Identity
from fedfleet.algorithms.parts.coded import Coding
from fedfleet.algorithms.parts.compression import Compressed, hadamard
from fedfleet.algorithms.parts.quantisers import (
    AbsMax,
    Cast,
    E3m0,
    Largest,
    Linear,
    Natural,
    Qsgd,
    Sign,
    SparseChunks,
    Statistical,
)
from fedfleet.algorithms.parts.rules import Clip, Sgd, adamw
from fedfleet.algorithms.scaffold import scaffold
from fedfleet.algorithms.sparse_loco import sparse_loco
from fedfleet.engine.method_form.state_spec import StateSpec
from tests.algorithms.driver import run, tree
from tests.algorithms.identities import ROUNDING
from tests.algorithms.problems import Quadratic, everyone, partial
from tests.reference import low_communication as slow
from tests.reference import quantisers

GOLDEN = json.loads((Path(slow.__file__).parent / "low_communication.json").read_text())
RULE = Clip(adamw(0.3, (0.9, 0.95), 0.5, 0.1), 1.0)


@dataclass(frozen=True)
class Bowl:
    """F_i(x) = sum h_ij (x_j - c_ij)^2 / 2 on one tensor, from 0."""

    h: tuple[tuple[float, ...], ...]
    c: tuple[tuple[float, ...], ...]

    @property
    def clients(self):
        return len(self.h)

    @cached_property
    def start(self):
        return {"x": np.zeros(len(self.h[0]))}

    def gradient(self, i, x, r, k):
        return {"x": np.array(self.h[i]) * (x["x"] - np.array(self.c[i]))}


BOWL = Bowl(*(tuple(tuple(row) for row in GOLDEN["diloco"][name]) for name in "hc"))
ONE = Bowl(BOWL.h[:1], BOWL.c[:1])


def build(method: Any, problem: Any = BOWL) -> Any:
    context = RunContext(problem.clients, problem.clients, 3, None, 3, tree(problem.start).layout)
    return method.build(context) if isinstance(method, Compressed) else method


def trained(method: Any, problem: Any = BOWL, rounds: int = 3, steps: int = 3) -> Any:
    return run(build(method, problem), problem, *everyone(problem.clients, rounds, steps))


def coded(codec: Coder, memory: Any = "none", decay: float | None = None, **more: Any) -> Coding:
    return Coding(codec, memory, decay, **{"whole": "never", **more})


SPARSE = SparseChunks(4, 0.5, 2)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (diloco(RULE), {"outer": 0.7, "mu": 0.9}),
    "mu0_outer1": (diloco(RULE, 1.0, 0.0), {}),
    "sparse_chunk4_density.5_2bit_decay.95_outer1_mu0": (
        diloco(RULE, 1.0, 0.0, compression=coded(SPARSE, "error", 0.95)),
        {"code": lambda v: quantisers.sparse(v, 4, 0.5, 2), "memory": "error", "decay": 0.95},
    ),
    "the_same_mean_over_those_sent": (
        diloco(RULE, 1.0, 0.0, compression=coded(SPARSE, "error", 0.95, mean="sent")),
        {
            "code": lambda v: quantisers.sparse(v, 4, 0.5, 2),
            "sent": lambda v: quantisers.sparse_places(v, 4, 0.5),
            "memory": "error",
            "decay": 0.95,
        },
    ),
    "statistical_2_decay.9": (
        diloco(RULE, compression=coded(Statistical(2), "error", 0.9)),
        {"code": lambda v: quantisers.statistical(v, 2), "memory": "error", "decay": 0.9, "outer": 0.7, "mu": 0.9},
    ),
    "linear_8_no_feedback": (
        diloco(RULE, compression=coded(Linear(8))),
        {"code": lambda v: quantisers.linear(v, 8), "outer": 0.7, "mu": 0.9},
    ),
    "sign_decay1": (
        diloco(RULE, compression=coded(Sign(), "error")),
        {"code": quantisers.sign, "memory": "error", "outer": 0.7, "mu": 0.9},
    ),
}
"""Golden case -> (the method, the arguments of the reference)."""


@pytest.mark.parametrize("name", CASES)
def test_golden_values_of_diloco(name):
    method, arguments = CASES[name]
    path = trained(method)
    arguments = {"outer": 1.0, "mu": 0.0, **arguments}
    reference = slow.diloco(
        lambda i, x: BOWL.gradient(i, {"x": x}, 0, 0)["x"], np.zeros(4), 2, 3, 3, slow.AdamW(0.3), **arguments
    )
    for golden, model, clients, (x, kept) in zip(
        GOLDEN["diloco"][name], path.models(), path.clients, reference, strict=True
    ):
        np.testing.assert_allclose(x, golden["x"], rtol=1e-9)
        np.testing.assert_allclose(model["x"], golden["x"], rtol=1e-9)
        if arguments.get("memory"):
            np.testing.assert_allclose(kept, golden["errors"], rtol=1e-9, atol=1e-14)
            np.testing.assert_allclose([c.memory["x"] for c in clients], golden["errors"], rtol=1e-9, atol=1e-14)


def test_golden_values_of_one_worker():
    for golden, model in zip(GOLDEN["diloco"]["one_worker"], trained(diloco(RULE), ONE).models(), strict=True):
        np.testing.assert_allclose(model["x"], golden["x"], rtol=1e-9)


def bowl(size: int) -> Bowl:
    """The golden problem with other numbers of coordinates."""
    places = np.arange(size)
    h = [1 + 0.5 * np.sin(1 + i + 0.9 * places) for i in range(2)]
    c = [2 * np.sin(1 + 0.7 * (3 + i) + 0.37 * places) for i in range(2)]
    return Bowl(*(tuple(tuple(row.tolist()) for row in rows) for rows in (h, c)))


def test_golden_values_of_data_parallel_training():
    for golden, model in zip(
        GOLDEN["data_parallel"], trained(data_parallel(RULE), rounds=4, steps=1).models(), strict=True
    ):
        np.testing.assert_allclose(model["x"], golden, rtol=1e-9)


def test_data_parallel_clients_are_one_worker_with_all_their_batches():
    """Two batches of one client are a batch of both; K workers with equal data and draws are one."""
    twice = Bowl(BOWL.h[:1] * 2, BOWL.c[:1] * 2)
    one = trained(data_parallel(RULE), ONE, 4, 1).models()
    for problem, steps in ((ONE, 2), (twice, 1)):
        for left, right in zip(one, trained(data_parallel(RULE), problem, 4, steps).models(), strict=True):
            torch.testing.assert_close(left.flat, right.flat, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("make", [fedavg, data_parallel])
@pytest.mark.parametrize("memory", ["none", "error", "ef21"])
def test_golden_values_of_memories(memory, make):
    """A step of plain descent moves by its gradient times the step size, and data-parallel clients send the gradient;
    the memory is in these units. The codec commutes with the step size."""
    golden, unit = GOLDEN["feedback"][f"top2_{memory}"], 1.0 if make is fedavg else 0.3
    path = trained(make(Sgd(0.3), compression=coded(Largest(0.34), memory)), bowl(6), len(golden), 1)
    for row, model, clients in zip(golden, path.models(), path.clients, strict=True):
        np.testing.assert_allclose(model["x"], row["x"], rtol=1e-9, atol=1e-14)
        if memory != "none":
            np.testing.assert_allclose([unit * c.memory["x"] for c in clients], row["memory"], rtol=1e-9, atol=1e-14)


# --- the way down -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("codec", "code"),
    [
        (AbsMax(4), lambda v: quantisers.absmax(v, 4)),
        (Largest(0.5), lambda v: quantisers.top_k(v, 0.5)),
        (Cast("float16"), lambda v: v.astype(np.float16).astype(np.float64)),
    ],
    ids=["absmax", "top_k", "cast"],
)
def test_codes_both_ways(codec, code):
    """Clients hold the sum of the codes that came down; the server's step is from its own model."""
    method = diloco(RULE, compression=coded(Sign(), "error", 0.9, down=codec))
    gradient = lambda i, x: BOWL.gradient(i, {"x": x}, 0, 0)["x"]  # noqa: E731
    reference = slow.diloco(
        *(gradient, np.zeros(4), 2, 5, 3, slow.AdamW(0.3), 0.7, 0.9, quantisers.sign, "error", 0.9), down=code
    )
    path = trained(method, rounds=5)
    for model, clients, (x, kept) in zip(path.models(), path.clients, reference, strict=True):
        np.testing.assert_allclose(model["x"], x, rtol=ROUNDING, atol=ROUNDING)
        np.testing.assert_allclose([c.memory["x"] for c in clients], kept, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("memory", ["error", "ef21"])
def test_the_identity_downwards_is_no_code(memory):
    """Also after a pass of gradients before round 1."""
    problem = Quadratic()
    for make in (
        lambda compression: scaffold(Sgd(0.05), start="gradient", compression=compression),
        lambda compression: fedadam(compression=compression),
    ):
        plain, ours = (
            run(build(make(coded(AbsMax(4), memory, down=down)), problem), problem, *everyone(5, 3, 3)).models()
            for down in (None, Identity())
        )
        for one, other in zip(plain, ours, strict=True):
            torch.testing.assert_close(one.flat, other.flat, rtol=ROUNDING, atol=ROUNDING)


def test_bytes_both_ways():
    x = tree({"W": np.zeros((8, 8), np.float32), "b": np.zeros(1, np.float32)})
    made: Any = diloco(compression=Coding(Sign(), down=AbsMax(8)))
    method = made.build(RunContext(8, 8, 40, 30, 0, x.layout))
    spec = StateSpec(method, x)
    assert (spec.up, spec.down) == (8 + 4 + 4, 64 + 4 + 4)


# --- settings under which two methods are one -------------------------------------------------------------------------
@pytest.mark.parametrize("memory", ["none", "error", "ef21"])
@pytest.mark.parametrize(
    "make",
    [
        lambda compression: diloco(RULE, compression=compression),
        lambda compression: muloco(compression=compression),
        lambda compression: fedadam(compression=compression),
        lambda compression: scaffold(Sgd(0.05), start="gradient", compression=compression),
        lambda compression: fedavg(RULE, carry="average", compression=compression),
    ],
    ids=["diloco", "muloco", "fedadam", "scaffold", "averaged"],
)
def test_the_identity_is_no_code(make, memory):
    """To the bit without a memory of what arrives; ef21 adds the differences up again, which rounds."""
    problem = Quadratic()
    plan = everyone(5, 3, 3) if memory == "ef21" else partial()
    ours = run(build(make(Coding(Identity(), memory, whole="never")), problem), problem, *plan).models()
    plain = run(make(None), problem, *plan).models()
    for one, other in zip(ours, plain, strict=True):
        if memory == "ef21":
            torch.testing.assert_close(one.flat, other.flat, rtol=ROUNDING, atol=ROUNDING)
        else:
            assert torch.equal(one.flat, other.flat)


def test_one_worker_with_a_plain_outer_step_is_the_inner_rule():
    y, state = tree(ONE.start), RULE.init(tree(ONE.start))
    for _ in range(9):
        y, state = RULE.step(y, tree(ONE.gradient(0, {"x": y["x"].numpy()}, 0, 0)), state)
    for method in (diloco(RULE, 1.0, 0.0), diloco(RULE, 1.0, 0.0, compression=Coding(Identity(), "error"))):
        torch.testing.assert_close(trained(method, ONE).models()[-1].flat, y.flat, rtol=ROUNDING, atol=ROUNDING)


def test_diloco_with_a_plain_outer_step_is_fedavg_with_kept_states():
    for one, other in zip(
        trained(diloco(RULE, 1.0, 0.0)).models(), trained(fedavg(RULE, carry="keep")).models(), strict=True
    ):
        torch.testing.assert_close(one.flat, other.flat, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("codec", [Statistical(2), SPARSE, Sign()], ids=str)
def test_workers_with_equal_data_are_one_worker(codec):
    twice = Bowl(BOWL.h[:1] * 2, BOWL.c[:1] * 2)
    method = diloco(RULE, compression=coded(codec, "error", 0.9))
    for one, both in zip(trained(method, ONE).models(), trained(method, twice).models(), strict=True):
        torch.testing.assert_close(one.flat, both.flat, rtol=ROUNDING, atol=ROUNDING)


ALL = [Identity(), Linear(4), Statistical(2), Sign(), Qsgd(3), Natural(), E3m0(), Largest(0.3), SPARSE]


@dataclass(frozen=True)
class Resting(Rule):
    """A rule that does not move."""

    def step(self, y, v, state):
        return y, state


@pytest.mark.parametrize("memory", ["none", "error", "ef21"])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_who_does_not_move_sends_nothing_and_remembers_nothing(codec, memory):
    problem = Quadratic()
    path = run(build(fedavg(Resting(), compression=coded(codec, memory)), problem), problem, *everyone(5, 2, 2))
    assert torch.equal(path.models()[-1].flat, tree(problem.start).flat)
    assert memory == "none" or not any(client.memory.flat.any() for client in path.clients[-1])


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_what_was_sent_and_what_is_remembered_is_what_was_moved(codec):
    """With decay 1 and plain means: what all clients moved is what all messages say and what all memories still have.
    The rule takes one step along a fixed direction, which does not depend on what was sent."""
    problem = Quadratic(clients=1)

    @dataclass(frozen=True)
    class Fixed(Rule):
        def step(self, y, v, state):
            return y.map(lambda name, leaf: leaf - torch.linspace(-1, 2, leaf.numel()).view(leaf.shape)), state

    path = run(build(fedavg(Fixed(), compression=coded(codec, "error")), problem), problem, *everyone(1, 6, 1))
    start = tree(problem.start)
    moved = (start - Fixed().step(start, start, ())[0]) * 6
    sent = start - path.models()[-1]
    torch.testing.assert_close((sent + path.clients[-1][0].memory).flat, moved.flat, rtol=ROUNDING, atol=1e-11)


def test_remembered_errors_of_signs_are_bounded():
    """A constant displacement: e of signs stays below a bound that does not grow with the rounds."""
    problem = bowl(6)

    @dataclass(frozen=True)
    class Constant(Rule):
        def step(self, y, v, state):
            return y.map(lambda name, leaf: leaf - torch.arange(1.0, 7.0)), state

    path = trained(fedavg(Constant(), compression=coded(Sign(), "error")), problem, 100, 1)
    sizes = [float(clients[0].memory.norm()) for clients in path.clients]
    assert max(sizes[50:]) <= max(sizes[:50])


def test_sparse_loco_is_diloco_without_momentum_and_with_a_code():
    problem = Quadratic()
    ours = sparse_loco(RULE, size=8, density=0.25)
    same = diloco(RULE, 1.0, 0.0, compression=Coding(SparseChunks(8, 0.25, 2), "error", 0.95))
    for one, other in zip(*(run(build(m, problem), problem, *partial()).models() for m in (ours, same)), strict=True):
        torch.testing.assert_close(one.flat, other.flat, rtol=ROUNDING, atol=ROUNDING)
    names = build(ours, problem).names
    assert {"W", "V", "U", "kernel"} >= names, "a vector of three numbers is sent as it is"


def test_who_is_not_sampled_remembers_as_before():
    problem, (cohorts, steps) = Quadratic(), partial()
    path = run(build(diloco(RULE, compression=coded(Sign(), "error", 0.5)), problem), problem, cohorts, steps)
    for cohort, before, after in zip(cohorts[1:], path.clients, path.clients[1:], strict=False):
        for i in range(5):
            assert torch.equal(before[i].memory.flat, after[i].memory.flat) == (i not in cohort)


UP = [
    (Cast(), 695_808),
    (Statistical(8), 370_480),
    (AbsMax(8), 348_012),
    (Linear(8), 348_120),
    (Statistical(4), 175_788),
    (E3m0(), 174_060),
    (Statistical(2), 87_516),
    (Sign(), 43_596),
    (SparseChunks(density=1 / 16), 38_575),
    (SparseChunks(density=1 / 32), 19_558),
    (SparseChunks(), 10_057),
]
"""Codec -> bytes of one message of a small GPT, counted for the study of low communication by another program."""


@pytest.mark.parametrize(("codec", "expected"), UP, ids=str)
def test_bytes_of_a_small_gpt(codec, expected):
    """Width 96, 3 layers, 97 tokens, windows of 64: 347,904 numbers. Norms are sent as they are where a code is no
    smaller."""
    block = {"norm1": (96,), **dict.fromkeys("qkv", (96, 96)), "out": (96, 96), "norm2": (96,)}
    block |= {"up": (384, 96), "down": (96, 384)}
    shapes = {"tokens": (97, 96), "positions": (64, 96), "norm": (96,)}
    shapes |= {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
    x = tree({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    made: Any = diloco(compression=Coding(codec))
    method = made.build(RunContext(8, 8, 40, 30, 0, x.layout))
    assert StateSpec(method, x).up == expected


# --- what is coded, and what is refused -------------------------------------------------------------------------------
def test_tensors_whose_code_has_no_fewer_bytes_are_sent_as_they_are():
    problem = Quadratic()  # 12, 12, 3, 12 and 24 numbers; statistical with 2 bits costs 20 bytes and the bits
    auto, every = (build(fedavg(compression=Coding(Statistical(2), whole=w)), problem) for w in ("auto", "never"))
    assert auto.names == {"W", "V", "U", "kernel"}
    assert every.names == set(problem.start)
    some = build(fedavg(compression=Coding(Statistical(2), only=("k*", "U"))), problem)
    assert some.names == {"U", "kernel"}
    path = run(auto, problem, *partial())
    assert all(not client.memory["b"].any() for client in path.clients[-1])
    assert any(client.memory["W"].any() for client in path.clients[-1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Coding(Sign(), mean="sent"), r"mean: sent is for codecs that leave places out \(top_k, sparse\)"),
        (
            lambda: Coding(Sign(), "ef21", 0.9),
            "decay has no effect here, .* it is error feedback's, and memory is ef21",
        ),
        (lambda: Coding(Largest(), "ef21", mean="sent"), "mean: sent has no meaning with ef21"),
        (lambda: Coding(Sign(), decay=1.5), r"0 < decay <= 1 must hold, got decay=1\.5"),
        (lambda: data_parallel(compression=hadamard()), "compression: clients send gradients, which only coded is for"),
        (lambda: build(fedavg(compression=Coding(Sign(), only=("w*",)))), "only: no tensor is called so, got w"),
        (lambda: build(fedexp(compression=Coding(Sign(), "ef21"))), "memory: ef21 gives no norms"),
        (lambda: build(fedexp(compression=Coding(Largest(), mean="sent"))), "mean: sent gives no norms"),
    ],
)
def test_refused_in_a_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()
