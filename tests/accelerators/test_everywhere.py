"""Runs with parts that work on messages or on the order of rounds, on the processor and on a card: the same tests.

Tolerances: all is computed in float64. A block and its clients alone, and a card and the processor, add the same
numbers in other orders, as in tests/test_conformance.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fedfleet
from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import Interrupted
from fedfleet.engine.kernels.recorded_visit import PROVEN_ROUNDS
from fedfleet.engine.run_spec import RunSpec

from ..faults.runs import Watch, asynchronous, interrupt, same, setting
from ..test_conformance import alike, few
from .test_convolutions import WORKLOAD

ON_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
DEVICES = [
    pytest.param(("cpu", "torch"), marks=pytest.mark.long, id="cpu"),
    pytest.param(("cuda", "torch"), marks=ON_A_CARD, id="cuda"),
    pytest.param(("cuda", "graph"), marks=ON_A_CARD, id="graph"),
    pytest.param(("cuda", "streams"), marks=ON_A_CARD, id="streams"),
]
PARTS: dict[str, dict[str, Any]] = {
    "trimmed_mean": {
        "aggregate": {"name": "trimmed_mean", "f": 2, "before": ["nnm"]},
        "attack": {"name": "alie", "share": 0.2},
    },
    "krum": {"aggregate": {"name": "multi_krum", "f": 2}, "attack": {"name": "ipm", "share": 0.2}},
    "centred_clipping": {"aggregate": {"name": "centred_clipping"}},
    "private": {"privacy": {"clip": 1.0, "noise": 0.5, "delta": 1e-3}},
    "asynchronous": {},
}
ROUNDS = PROVEN_ROUNDS + 3


def made(part: str, faults: Any, device: tuple[str, str], **more: Any) -> Experiment:
    """A run with a part, by SCAFFOLD where the part allows states of clients. device: (device, kernels)."""
    name, kernels = device
    settings = {"device": name, "kernels": kernels, "dtype": "float64", **more}
    data = (
        setting(faults, "scaffold", ROUNDS, **settings)
        if part != "asynchronous"
        else asynchronous(faults, ROUNDS, **settings)
    )
    if part == "private":
        data["method"] = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    return experiment({**data, **PARTS[part]})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "krum"])
def test_parts_repeat_and_agree(part, device, tmp_path):
    """To the bit when they are repeated; within rounding with clients alone in their blocks, and with the processor."""
    found = run(made(part, tmp_path, device))
    same(run(made(part, tmp_path, device)), found)
    alike(run(made(part, tmp_path, ("cpu", "torch"), block=1)), found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["trimmed_mean", "asynchronous"])
def test_resumed(part, device, tmp_path):
    folder = {"checkpoint": {"every": 2, "keep": 9}}
    expected = run(made(part, tmp_path / "none", device))
    with pytest.raises(Interrupted):
        run(made(part, tmp_path, device, **folder), tmp_path / "out", [Watch(r3=interrupt)])
    same(resume(tmp_path / "out"), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_without_a_change_has_the_parents_bits(device, tmp_path):
    parent = run(
        made("krum", tmp_path, device, checkpoint={"every": 1, "keep": 9}, keep_state=True), tmp_path / "parent"
    )
    same(fedfleet.fork(tmp_path / "parent", 3, out=tmp_path / "fork"), parent)


@pytest.mark.parametrize("device", DEVICES)
def test_runs_of_several_threads(device, tmp_path):
    """They take turns on the device and share nothing that changes a bit."""
    parts = ("krum", "private")
    expected = {part: run(made(part, tmp_path, device)) for part in parts}
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda part: run(made(part, tmp_path, device)), parts))
    for part, result in zip(parts, found, strict=True):
        same(result, expected[part])


def on_a_card(kernels: str, block: int = 3, **engine: Any) -> Experiment:
    plan = {"device": "cuda", "kernels": kernels, "block": block, **engine}
    return few("scaffold", WORKLOAD, ROUNDS, engine=plan)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize(("kernels", "block"), [("products", 3), ("streams", 1), ("streams", 4), ("graph", 4)])
def test_convolutions_on_a_card(kernels, block):
    """Strided, padded, grouped and without bias: recorded, repeated to the bit, and as on the processor."""
    watch = Watch()
    found = run(on_a_card(kernels, block), observers=[watch])
    assert f"plan: blocks of {block} clients, {kernels} kernels (as given)" in watch.told
    assert not [text for text in watch.told if "replayed" in text or "deterministic" in text]
    same(run(on_a_card(kernels, block)), found)
    alike(run(few("scaffold", WORKLOAD, ROUNDS, engine={"device": "cpu"})), found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("workload", ["digits", WORKLOAD], ids=["mlp", "convolutions"])
def test_a_plan_by_default_is_measured_and_kept(workload, tmp_path, monkeypatch):
    """float32: convolutions are proven. The second run finds the plan in the cache."""
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    asked = few("fedavg", workload, engine={"device": "auto", "dtype": "float32", "block": "auto", "kernels": "auto"})
    first, second = Watch(), Watch()
    found = run(asked, observers=[first])
    assert found.experiment.engine.device == "cuda"
    assert "measured, ms per client" in first.told[0]
    same(run(asked, observers=[second]), found)
    assert "measured before" in second.told[0]
    assert RunSpec.of("run", found.experiment).device.type == "cuda"
