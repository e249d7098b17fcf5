"""Streaming and eager DiLoCo: golden values, the slow reference, and settings under which they are DiLoCo.

Golden values come from another program, with a tolerance of 1e-9. The other comparisons have ROUNDING, float64 with
some 100 roundings of values near 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import Deferred, RunContext
from fedfleet.algorithms.diloco import diloco
from fedfleet.algorithms.eager_diloco import eager_diloco
from fedfleet.algorithms.parts.codecs import Coder, Identity
from fedfleet.algorithms.parts.coded import Coding
from fedfleet.algorithms.parts.fragments import by_layers, by_patterns
from fedfleet.algorithms.parts.quantisers import AbsMax, Largest, Sign
from fedfleet.algorithms.streaming_diloco import streaming_diloco
from fedfleet.algorithms.tree import Layout
from fedfleet.engine.method_form.state_spec import StateSpec
from tests.algorithms.driver import run, tree
from tests.algorithms.identities import ROUNDING
from tests.algorithms.problems import everyone
from tests.algorithms.test_coded import GOLDEN, RULE, Bowl
from tests.reference import low_communication as slow
from tests.reference import quantisers


@dataclass(frozen=True)
class Halves(Bowl):
    """The golden problem on two tensors of two numbers each."""

    @property
    def start(self):
        return {"layers.0": np.zeros(2), "layers.1": np.zeros(2)}

    def gradient(self, i, x, r, k):
        whole = self.flat_gradient(i, np.concatenate([x["layers.0"], x["layers.1"]]))
        return {"layers.0": whole[:2], "layers.1": whole[2:]}

    def flat_gradient(self, i, x):
        return np.array(self.h[i]) * (x - np.array(self.c[i]))


HALVES = Halves(*(tuple(tuple(row) for row in GOLDEN["diloco"][name]) for name in "hc"))
ONE = Halves(HALVES.h[:1], HALVES.c[:1])
PLACES = [[0, 1], [2, 3]]


def trained(method: Any, problem: Any = HALVES, rounds: int = 6, steps: int = 2) -> Any:
    context = RunContext(problem.clients, problem.clients, rounds, steps, 3, tree(problem.start).layout)
    built = method.build(context) if isinstance(method, Deferred) else method
    return run(built, problem, *everyone(problem.clients, rounds, steps))


def streaming(**given: Any) -> Any:
    return streaming_diloco(RULE, **{"layers": 1, "compression": None, **given})


def close(one: Any, other: Any) -> None:
    for left, right in zip(one.models(), other.models(), strict=True):
        torch.testing.assert_close(left.flat, right.flat, rtol=ROUNDING, atol=ROUNDING)


# --- streaming --------------------------------------------------------------------------------------------------------
CASES = {
    "F2_K2_tau1_alpha.5": (streaming(), 2, (PLACES, 1, 0.5)),
    "F2_K2_tau0_alpha0": (streaming(overlap=0, alpha=0.0), 2, (PLACES, 0, 0.0)),
    "F1_K3_tau0_alpha0": (streaming(layers=2, overlap=0, alpha=0.0), 3, ([[0, 1, 2, 3]], 0, 0.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_golden_values_of_streaming(name):
    method, steps, how = CASES[name]
    golden = GOLDEN["streaming"][name]
    path = trained(method, rounds=len(golden), steps=steps)
    reference = slow.streaming(
        HALVES.flat_gradient, np.zeros(4), 2, len(golden), steps, slow.AdamW(0.3), 0.7, 0.9, *how
    )
    for row, model, clients, (x, y, _) in zip(golden, path.models(), path.clients, reference, strict=True):
        for found, own in ((model.flat, [client.y.flat for client in clients]), (x, y)):
            np.testing.assert_allclose(found, row["x"], rtol=1e-9, atol=1e-15)
            np.testing.assert_allclose(np.stack(own), row["y"], rtol=1e-9)


@pytest.mark.parametrize(
    ("codec", "code", "decay"),
    [
        (AbsMax(4), lambda v: quantisers.absmax(v, 4), None),
        (Sign(), quantisers.sign, 0.9),
        (Largest(0.5), lambda v: quantisers.top_k(v, 0.5), 1.0),
    ],
    ids=["absmax", "sign", "top_k"],
)
def test_codes_are_of_the_fragment_alone(codec: Coder, code: Any, decay: Any):
    """What is remembered of the other fragments stays as it is."""
    coding = Coding(codec, "none" if decay is None else "error", decay, whole="never")
    path = trained(streaming(compression=coding))
    reference = slow.streaming(
        *(HALVES.flat_gradient, np.zeros(4), 2, 6, 2, slow.AdamW(0.3), 0.7, 0.9, PLACES, 1, 0.5, code, decay)
    )
    for model, clients, (x, y, kept) in zip(path.models(), path.clients, reference, strict=True):
        np.testing.assert_allclose(model.flat, x, rtol=ROUNDING, atol=ROUNDING)
        np.testing.assert_allclose(np.stack([c.method.y.flat for c in clients]), y, rtol=ROUNDING, atol=ROUNDING)
        if decay is not None:
            np.testing.assert_allclose(np.stack([c.memory.flat for c in clients]), kept, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("memory", ["none", "error", "ef21"])
def test_the_identity_is_no_code(memory):
    for make in (streaming, lambda compression=None: eager_diloco(RULE, compression=compression)):
        close(trained(make(compression=Coding(Identity(), memory, whole="never"))), trained(make()))


def test_one_fragment_that_is_taken_at_once_is_diloco():
    close(trained(streaming(layers=2, overlap=0, alpha=0.0), steps=3), trained(diloco(RULE), steps=3))


def test_bytes_are_those_of_fragments():
    """In round 1 the whole model goes down. Over F rounds both ways have the bytes of a model."""
    x = tree({"embed": torch.zeros(5, 4), **{f"layers.{i}.w": torch.zeros(4, 3 + i) for i in range(3)}})
    sizes = [[20, 12], [16], [20]]
    for compression in (None, Coding(AbsMax(8), "none", whole="never")):
        method = streaming(compression=compression).build(RunContext(2, 2, 9, 2, 0, x.layout))
        spec = StateSpec(method, x)
        found = [spec.traffic(method, number) for number in range(1, 8)]
        assert [down for down, _ in found] == [4 * n for n in (68, 32, 16, 20, 32, 16, 20)]
        assert [up for _, up in found] == [
            sum(4 * n if compression is None else n + 4 for n in sizes[t % 3]) for t in range(7)
        ]


# --- fragments --------------------------------------------------------------------------------------------------------
NAMES = ("embed.w", *(f"blocks.{i}.{part}" for i in range(5) for part in ("q", "up")), "norm.g")
LAYOUT = Layout(NAMES, tuple((2,) for _ in NAMES))


def layers(fragments: Any) -> list[list[str]]:
    return [sorted({name.split(".")[1] if name[0] == "b" else name for name in names}) for names in fragments]


def test_fragments_are_layers():
    strided = [["0", "2", "4", "embed.w", "norm.g"], ["1", "3"]]
    assert layers(by_layers(LAYOUT, 3, None, "strided")) == strided
    assert layers(by_layers(LAYOUT, None, 2, "strided")) == strided
    assert layers(by_layers(LAYOUT, None, 2, "sequential")) == [["0", "1", "2", "embed.w"], ["3", "4", "norm.g"]]
    assert sorted(name for names in by_layers(LAYOUT, 2, None, "sequential") for name in names) == sorted(NAMES)
    plain = Layout(("a", "b", "c"), ((1,),) * 3)
    assert by_layers(plain, 1, None, "strided") == (("a",), ("b",), ("c",)), "names without numbers"


def test_fragments_by_patterns():
    assert by_patterns(LAYOUT, [["*.q", "embed*"], ["*"]])[0] == ("embed.w", *(f"blocks.{i}.q" for i in range(5)))
    with pytest.raises(ValueError, match=r"fragments: embed.w is in no fragment; add a pattern"):
        by_patterns(LAYOUT, [["blocks*"], ["norm*"]])
    with pytest.raises(ValueError, match=r"fragments: no tensor is left for \['head\*'\]; the tensors are embed.w"):
        by_patterns(LAYOUT, [["*"], ["head*"]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"overlap": 2}, r"overlap < local.steps must hold, got overlap=2, steps=2; raise steps or lower overlap"),
        ({"layers": None, "fragments": 3}, r"1 <= fragments <= 2 must hold for a model of 2 layers, got fragments=3"),
        ({"fragments": 2}, r"layers has no effect here, got layers=1: fragments says how many there are"),
        ({"layers": None, "fragments": (("*",),), "order": "strided"}, r"order has no effect here"),
    ],
)
def test_what_fits_no_run_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        trained(streaming(**given))


# --- eager ------------------------------------------------------------------------------------------------------------
EAGER = {
    "plain": (eager_diloco(RULE), HALVES, {}),
    "one_worker": (eager_diloco(RULE), ONE, {}),
    "naive_delay": (eager_diloco(RULE, naive=True), HALVES, {"naive": True}),
}


@pytest.mark.parametrize("name", EAGER)
def test_golden_values_of_eager(name):
    method, problem, how = EAGER[name]
    golden = GOLDEN["eager"][name]
    path = trained(method, problem, len(golden), 3)
    reference = slow.eager(
        problem.flat_gradient, np.zeros(4), problem.clients, len(golden), 3, slow.AdamW(0.3), 0.7, 0.9, **how
    )
    for row, model, clients, x in zip(golden, path.models(), path.clients, reference, strict=True):
        np.testing.assert_allclose(model.flat, row["mean"], rtol=1e-9, atol=1e-15)
        for own in ([client.x.flat for client in clients], x):
            np.testing.assert_allclose(np.stack(own), row["x"], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_workers_follow_what_their_codes_stand_for(decay):
    """So that the evaluated model stays the mean of the workers' models."""
    coding = Coding(AbsMax(4), "none" if decay is None else "error", decay, whole="never")
    path = trained(eager_diloco(RULE, compression=coding))
    code = lambda v: np.concatenate([quantisers.absmax(half, 4) for half in (v[:2], v[2:])])  # noqa: E731
    reference = slow.eager(HALVES.flat_gradient, np.zeros(4), 2, 6, 2, slow.AdamW(0.3), 0.7, 0.9, False, code, decay)
    for model, clients, x in zip(path.models(), path.clients, reference, strict=True):
        own = np.stack([client.method.x.flat for client in clients])
        np.testing.assert_allclose(own, x, rtol=ROUNDING, atol=ROUNDING)
        np.testing.assert_allclose(model.flat, own.mean(0), rtol=ROUNDING, atol=ROUNDING)


def test_one_eager_worker_is_diloco():
    close(trained(eager_diloco(RULE), ONE), trained(diloco(RULE), ONE))
