"""Methods that compress, run by the engine: settings that are refused, bytes beside running statistics, blocks, and the
output of `fedfleet show`.

TOLERANCE: float64, sums in another order, whose rounding batch normalisation of a few examples amplifies somewhat.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.engine.api import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare
from fedfleet.tune.show import compression
from fedfleet.workloads import counted
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.models.convolutional import Cnn4
from fedfleet.workloads.partitions.standard import Iid
from fedfleet.workloads.workload import Model, Partition

TOLERANCE = 1e-7


@dataclass(frozen=True)
class Pictures(Classification):
    """24 images of noise, 16 x 16, with random labels."""

    classes, shape = 4, (1, 16, 16)
    model: Model = Cnn4()
    partition: Partition = Iid()

    def load(self):
        random = counted.numpy_generator("pictures")
        rows = {"input": random.normal(size=(32, 1, 16, 16)).astype(np.float32), "label": random.integers(4, size=32)}
        return {k: v[:24] for k, v in rows.items()}, {k: v[24:] for k, v in rows.items()}


def few(method: Any, workload: Any = None, **engine: Any) -> Experiment:
    return experiment(
        {
            "workload": workload or {"name": "digits", "model": {"name": "mlp", "hidden": [16, 16]}},
            "method": method,
            "federation": {"clients": 4, "cohort": 3, "rounds": 2, "local": {"steps": 2, "batch": 4}},
            "engine": {"backend": "local", "dtype": "float64", **engine},
            "tracking": {"uri": "none"},
        }
    )


UPDATES = {"name": "updates", "ratio": 0.9, "nearest": True}
STAY = {"name": "factors", "ratio": 0.9, "nearest": True}


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"name": "fedadam", "compression": UPDATES}, r"its server rule .* keeps a state .* drawn anew; give reset: 0"),
        ({"name": "scaffold", "compression": UPDATES}, "its estimator or rule shares a state .* drawn anew"),
        ({"name": "scaffold", "compression": {"name": "decomposition", "nearest": True}}, "decomposed anew"),
        ({"name": "scaffold", "compression": "binarisation"}, "only x is binarised"),
        ({"name": "fedprox", "compression": "binarisation"}, "gradients alone"),
        ({"name": "fedavg", "rule": "adam", "carry": "keep", "compression": "sparsification"}, "clients keep a state"),
        ({"name": "fedmud"}, r"ratio=0.03125 cannot be reached on this model: 0\.\d+ is the smallest"),
        ({"name": "fedmud", "ratio": 1.5}, "0 < ratio <= 1 must hold, got ratio=1.5"),
        ({"name": "fedmud", "reset": -1}, "reset >= 0 must hold, got reset=-1"),
        ({"name": "fedbat", "phi": 2.0}, "0 <= phi <= 1 must hold, got phi=2.0"),
        ({"name": "ef21_p", "memory": "sum"}, "memory must be"),
        ({"name": "diloco", "compression": {"name": "coded", "codec": "sgn"}}, "codec.*did you mean sign"),
        (
            {"name": "diloco", "compression": {"name": "coded", "codec": "sign", "down": "sgn"}},
            "down.name: no codec is called sgn; did you mean sign",
        ),
        ({"name": "diloco", "compression": 3}, "compression must be a name or {name: …, arguments}, got 3"),
        ({"name": "diloco", "compression": "coded"}, "codec is missing: coded needs it"),
        (
            {"name": "eager_diloco", "compression": {"name": "coded", "codec": "sign", "down": "sign"}},
            "down: codes of changes are for methods whose clients begin with the server's model; leave it out",
        ),
        (
            {"name": "diloco", "compression": {"name": "coded", "codec": {"name": "statistical", "bits": 1}}},
            "2 <= bits <= 8 must hold for statistical, got bits=1, which would send the mean alone; choose sign",
        ),
    ],
)
def test_refused_in_a_sentence(method: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=f"^method.*{said}") as told:
        prepare(few(method), "refused")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedadam", "compression": STAY},
        {"name": "scaffold", "compression": STAY, "start": "gradient"},
        {"name": "scaffold", "compression": {**UPDATES, "reset": 0}},
        {"name": "feddu_adam", "compression": {"name": "decomposition", "ratio": 0.9, "nearest": True}},
        {"name": "fedexp", "compression": {"name": "sparsification", "ratio": 0.2}},
        {"name": "fedadam", "compression": {"name": "binarisation", "both_ways": True}},
        {"name": "fedprox", "compression": {"name": "hadamard", "ratio": 0.9, "nearest": True}},
        {"name": "diloco", "compression": {"name": "coded", "codec": {"name": "qsgd", "bits": 3}, "down": "natural"}},
        {
            "name": "scaffold",
            "compression": {"name": "coded", "codec": "natural", "memory": "ef21"},
            "start": "gradient",
        },
        {"name": "fedexp", "compression": {"name": "coded", "codec": {"name": "cast", "to": "bfloat16"}}},
        {"name": "sparse_loco", "rule": {"name": "adam", "lr": 0.01}, "mean": "sent"},
        {"name": "fedmud", "ratio": 0.9, "nearest": True, "rule": {"name": "adam", "lr": 0.01}},
        {"name": "fedmud_aad", "ratio": 0.9, "nearest": True, "rule": {"name": "muon", "lr": 0.01}},
    ],
)
def test_together_with_other_rules(method: dict[str, Any]):
    """These combinations train, and a client gives the same result in a block as alone."""
    whole, alone = run(few(method, block=3)), run(few(method, block=1, vectorise=False))
    first = prepare(few(method), "first").initial_model()
    assert max(float((whole.model[name] - first[name]).abs().max()) for name in first) > 1e-4
    for name, value in whole.model.items():
        np.testing.assert_allclose(value, alone.model[name], TOLERANCE, TOLERANCE, err_msg=name)


@pytest.mark.parametrize("name", ["fedmud_bkd_aad", "fedhm", "ef21_p", "fedbat"])
def test_beside_running_statistics(name: str):
    """The bytes of running statistics are counted separately, every round records both numbers, and blocks agree with
    single clients."""
    method = {"name": name, "nearest": True} if name in ("fedmud_bkd_aad", "fedhm") else {"name": name}
    whole, alone = (run(few(method, Pictures(), block=block)) for block in (3, 1))
    for key, value in whole.model.items():
        np.testing.assert_allclose(value, alone.model[key], TOLERANCE, TOLERANCE, err_msg=key)
    run_spec = RunSpec.of("bytes", few(method, Pictures()))
    state_spec = StateSpec(run_spec.method(), run_spec.initial_model())
    assert state_spec.buffers == 8 * 2 * (32 + 64 + 128 + 256)
    for row in whole.rows:
        assert (row["comm/bytes_up"], row["comm/bytes_down"]) == (3 * state_spec.up, 3 * state_spec.down)
        assert row["comm/bytes_buffers_up"] == 3 * state_spec.buffers
    total = 8 * sum(value.numel() for value in whole.model.values()) - state_spec.buffers
    assert state_spec.up < total / 10


def test_the_papers_bytes():
    """CNN4 on 28 x 28: Kronecker blocks (2, 10), (8, 10), (31, 10) and 3,808 other numbers are 12,008 of 390,880."""
    workload = {"name": "fashion_mnist", "model": "cnn4"}
    run_spec = RunSpec.of("bytes", few({"name": "fedmud_bkd_aad"}, workload, dtype="float32"))
    state_spec = StateSpec(run_spec.method(), run_spec.initial_model())
    assert (state_spec.up, state_spec.down) == (48_032, 48_040)
    shown = "\n".join(compression(run_spec.method(), StateSpec(run_spec.method(), run_spec.checked_initial_model())))
    for part in ("conv2.weight", "192 x 96", "31 blocks of 10 x 10", "6,200", "0.0307"):
        assert part in shown


def test_codes_in_the_record_and_in_words():
    """The record counts the bytes of codes, where tensors whose code would not be smaller are sent as they are."""
    coded = {"name": "coded", "codec": {"name": "statistical", "bits": 4}}
    (first, *_) = run(few({"name": "diloco", "compression": coded}, dtype="float32")).rows
    sizes = {"net.1.weight": 64 * 16, "net.3.weight": 16 * 16, "net.5.weight": 16 * 10}
    vectors = 4 * (16 + 16 + 10)  # a table of 68 bytes is more than they are
    assert first["comm/bytes_up"] == 3 * (vectors + sum(n // 2 + 68 for n in sizes.values()))
    run_spec = RunSpec.of("words", few({"name": "diloco", "compression": coded}, dtype="float32"))
    shown = "\n".join(compression(run_spec.method(), StateSpec(run_spec.method(), run_spec.checked_initial_model())))
    assert shown.count("4 bits each") == 3


@pytest.mark.parametrize(("codec", "memory", "told"), [("sign", "none", 1), ("sign", "error", 0), ("qsgd", "none", 0)])
def test_the_log_says_that_biased_codes_lose_something(codec: str, memory: str, told: int, tmp_path: Path):
    coded = {"name": "coded", "codec": codec, "memory": memory}
    run(few({"name": "diloco", "compression": coded}), tmp_path / "run")
    assert (tmp_path / "run/run.log").read_text().count("codes of sign are biased") == told


def test_robust_rules_see_decoded_messages_and_private_runs_have_no_memories():
    coded = {"name": "diloco", "compression": {"name": "coded", "codec": "sign"}}
    robust = few(coded).model_copy(update={"aggregate": {"name": "median"}})
    assert np.isfinite(run(robust).rows[-1]["client/norm2"])
    private = experiment({**few(coded).plain(), "privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-3}})
    with pytest.raises(ConfigError, match="coded messages have no bounded sensitivity with memory; give memory: none"):
        prepare(private, "private")


@pytest.mark.parametrize("memory", ["error", "ef21"])
def test_memories_in_asynchronous_runs(memory: str):
    """Errors go with buffered updates, and what the server follows of all clients does not."""
    coded = {"name": "coded", "codec": {"name": "top_k", "ratio": 0.1}, "memory": memory}
    plain = few({"name": "fedavg", "compression": coded}).plain()
    plain["federation"]["pace"] = {"name": "buffered", "buffer": 2}
    buffered = experiment({**plain, "systems": {}})
    if memory == "error":
        assert np.isfinite(run(buffered).rows[-1]["client/norm2"])
    else:
        with pytest.raises(ConfigError, match="the method has no asynchronous form: ef21's server follows"):
            prepare(buffered, "buffered")


def test_nothing_is_shown_of_what_is_not_compressed():
    plain = RunSpec.of("none", few("fedavg"))
    assert compression(plain.method(), StateSpec(plain.method(), plain.checked_initial_model())) == []
