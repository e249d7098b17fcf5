"""Methods of adapters whose server changes the weights, FLoRA and FedEx-LoRA: golden values of two rounds, identities,
bytes, and how runs go on. TOLERANCE of `close`: 1e-9, float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves as tensors_of

from fedfleet import fork
from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.fedavg import Plain
from fedfleet.algorithms.fedex_lora import fedex_lora
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.flora import Flora, flora
from fedfleet.algorithms.parts.exact_mean import OfAdapters
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.planning.as_written import Forms, near
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.cli import main
from fedfleet.workloads import counted
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.models.adapters import Lora
from fedfleet.workloads.pair import Pair
from fedfleet.workloads.workload import Partition
from tests.engine.setups import driver_here, next_round
from tests.engine.test_adapters import BEFORE, GOLDEN, LORA, Waves, digits, trained, waves, weight
from tests.faults.runs import Watch, interrupt
from tests.workloads.test_adapters import close, wave


@dataclass(frozen=True)
class Waved(Flora):
    """FLoRA whose factors of round t are wave((2, 4), 6 + t, 0.5) and 0, as those of the golden values."""

    def next_factors(self, x: Tree, round: int) -> Tree:
        return Tree.of({"0.lora_a": wave((2, 4), 6 + round, 0.5), "0.lora_b": torch.zeros(3, 2, dtype=torch.float64)})


METHODS = {"flora": OfAdapters(Waved(Sgd(0.3), Plain(), Mean()), "flora"), "fedex": fedex_lora(Sgd(0.3))}
names = pytest.mark.parametrize("name", METHODS)


def of_blocks(name: str, block: int, **more: Any) -> Experiment:
    engine = {"backend": "local", "dtype": "float64", "block": block, "kernels": "torch"}
    return waves(method=METHODS[name], engine=engine, **more)


@names
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("block", [1, 2])
def test_rounds_have_the_golden_values(name: str, rounds: int, block: int):
    made = of_blocks(name, block, rounds=rounds)
    result, golden = run(made, initial_model=BEFORE), GOLDEN[name]["rounds"][rounds - 1]
    p = result.model
    close(weight(made, p), golden["merged"])
    if name == "fedex":
        close(p["0.lora_a"], golden["a"])
        close(p["0.lora_b"], golden["b"])
    else:
        assert not p["0.lora_b"].any()
    assert result.rows[-1]["server/missed"] == pytest.approx(golden["residual_norm"], rel=1e-9)


# --- identities -------------------------------------------------------------------------------------------------------
def rows_of(client: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a client of `waves`."""
    return wave((5, 4), client, 1.0), wave((5, 3), 5 + client, 1.0)


def descend(client: int, p: dict[str, Tensor], steps: int, lr_of_a: float = 0.3) -> dict[str, Tensor]:
    """The factors after steps of plain descent, written out. p: the model before them."""
    w, (x, y) = p["0.weight"], rows_of(client)
    a, b = p["0.lora_a"], p["0.lora_b"]
    for _ in range(steps):
        g = (x @ (w + 2 * b @ a).T - y).T @ x / 5
        a, b = a - lr_of_a * 2 * b.T @ g, b - 0.3 * 2 * g @ a.T
    return {"0.weight": w, "0.lora_a": a, "0.lora_b": b}


def merged(p: dict[str, Tensor]) -> Tensor:
    return p["0.weight"] + 2 * p["0.lora_b"] @ p["0.lora_a"]


START = {**BEFORE, "0.lora_b": wave((3, 2), 3)}
"""A model whose change is not 0."""


@pytest.mark.parametrize("start", [BEFORE, START], ids=["zero", "not-zero"])
@pytest.mark.parametrize("name", ["flora", "fedex", "ffa"])
def test_the_model_is_the_mean_of_the_clients_models(name: str, start: dict[str, Tensor]):
    """FFA-LoRA by its frozen A, the others by the weights that the server changes."""
    made = waves(rounds=1, personal={"frozen": ["*.lora_a"]}) if name == "ffa" else of_blocks(name, 1, rounds=1)
    models = [merged(descend(client, start, 4, lr_of_a=0.0 if name == "ffa" else 0.3)) for client in (0, 1)]
    close(weight(made, trained(made, start)), 0.25 * models[0] + 0.75 * models[1])


@dataclass(frozen=True)
class Alone(Partition):
    """One client, the first one of `waves`."""

    by_class = False

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        return ClientIndex(np.array([0, 5]), np.arange(5))


def alone(method: Any, steps: int = 4) -> Experiment:
    federation = {"clients": 1, "cohort": 1, "rounds": 1, "local": {"steps": steps, "batch": 5}}
    return waves(method=method, workload=Waves(partition=Alone(), adapter=LORA), federation=federation)


FEDIT = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.3}}


def test_with_one_client_all_are_its_local_training():
    expected = merged(descend(0, START, 4))
    for method in (FEDIT, *METHODS.values()):
        result = run(made := alone(method), initial_model=START)
        close(weight(made, result.model), expected)
        assert result.rows[0].get("server/missed", 0) < 1e-15


def test_the_first_step_from_zero_moves_b_alone():
    """W moves by -lr s^2 G A^T A, where G is the gradient at W."""
    x, y = rows_of(0)
    w, a = BEFORE["0.weight"], BEFORE["0.lora_a"]
    p = trained(made := alone(FEDIT, steps=1))
    assert torch.equal(p["0.lora_a"], a)
    close(weight(made, p), w - 0.3 * 4 * ((x @ w.T - y).T @ x / 5) @ a.T @ a)


def test_fedmud_without_merges_is_fedavg_of_factors():
    """Its U, which is drawn, is B, and V = 0 is the transposed A."""
    mud = fedmud(Sgd(0.3), ratio=1.0, reset=0, layers="all")
    whole = waves(None, method=mud)
    start = {"0.weight": BEFORE["0.weight"]}
    spec = RunSpec.of("x", whole, initial_model=start)
    u = spec.method().server_init(spec.initial_model()).public.method.x["0.weight.u"]
    lora = waves(Lora(targets=("0",), rank=1, alpha=1.0))
    p = {**start, "0.lora_a": torch.zeros(1, 4, dtype=torch.float64), "0.lora_b": u}
    close(weight(lora, trained(lora, p)), trained(whole, start)["0.weight"])


# --- runs -------------------------------------------------------------------------------------------------------------
ADAMW = {"name": "adamw", "lr": 0.01}
RUNS = {
    "flora": {"name": "flora", "rule": ADAMW},
    "fedex_lora": {"name": "fedex_lora", "rule": ADAMW, "carry": "keep"},
}
ENGINE = {"backend": "local", "block": 2, "dtype": "float64"}
runs = pytest.mark.parametrize("name", RUNS)


def test_bytes_are_those_of_factors():
    """Targets of 16 x 64 and 12 x 16 with rank 3, and a last layer of 12 x 10 that is trained as it is; 5 clients."""
    factors, dense, rest = (3 * (16 + 64), 3 * (12 + 16)), (16 * 64, 12 * 16), 12 * 10 + 10
    last = sum(min(mn, 5 * pair) for mn, pair in zip(dense, factors, strict=True))
    for name, sent in (("flora", rest), ("fedex_lora", rest + sum(factors))):
        result = run(made := digits(method=RUNS[name]))
        assert [row["comm/bytes_up"] for row in result.rows] == [5 * 8 * (sum(factors) + rest)] * 3
        assert [row["comm/bytes_down"] / 40 for row in result.rows] == [sent, sent + last, sent + last]
        spec = RunSpec.of("x", made)
        assert spec.held == ("fc1.weight", "fc2.weight")
        assert {*spec.frozen} == {"fc1.bias", "fc2.bias"}
        kept = StateSpec(spec.method(), spec.initial_model())
        assert sum(leaf.numel() for leaf in tensors_of(kept.client)) == (
            0 if name == "flora" else 2 * (sum(factors) + rest) + 1
        )


@runs
def test_blocks_compute_the_same(name: str):
    """TOLERANCE: sums in another order, float64."""
    federation = {"clients": 6, "cohort": 4, "rounds": 2, "local": {"steps": 2, "batch": 8}}
    models = [
        run(digits(method=RUNS[name], federation=federation, engine={**ENGINE, "block": block})).model
        for block in (1, 3)
    ]
    for tensor, value in models[0].items():
        torch.testing.assert_close(models[1][tensor], value, rtol=1e-11, atol=1e-12)


@pytest.mark.long
@runs
def test_runs_that_are_resumed_or_forked_have_the_same_bits(name: str, tmp_path: Path):
    made = digits(method=RUNS[name], checkpoint={"every": 1, "keep": 3}, engine={**ENGINE, "keep_state": True})
    whole = run(made, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r2=interrupt)])
    assert resume(made, tmp_path / "run").model_sha256 == whole.model_sha256
    assert fork(whole, 2, out=tmp_path / "fork").model_sha256 == whole.model_sha256


OF_WORKERS: dict[str, dict[str, Any]] = {
    **{name: {"method": method} for name, method in RUNS.items()},
    "ffa": {"method": {"name": "fedavg", "rule": ADAMW}, "personal": {"frozen": ["*.lora_a"]}},
    "fedsa": {"method": {"name": "fedavg", "rule": ADAMW}, "personal": {"tensors": ["*.lora_b"]}},
}


@pytest.mark.long
@pytest.mark.parametrize("name", OF_WORKERS)
def test_workers_change_no_bit(name: str, ray_here: None):
    """Of clients with ranks of their own, where the method has such."""
    ranks = {"ranks": [3, 1]} if name == "fedex_lora" else {"rank": 3}
    adapter = {"name": "lora", "targets": ["fc1", "fc2"], "train": ["out.*"], **ranks}
    here, there = (
        run(digits(adapter, **OF_WORKERS[name], engine={**ENGINE, **more}))
        for more in ({}, {"backend": "ray", "workers": 2, "cpus": 0.5})
    )
    assert there.model_sha256 == here.model_sha256


def test_the_merged_model_is_written_and_the_adapter_alone_is_refused(tmp_path: Path):
    made = digits(method=RUNS["fedex_lora"])
    result = run(made, tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(main, [*arguments, "--as", "merged"]).exit_code == 0
    p, merged = {name: value.double() for name, value in result.model.items()}, load_file(tmp_path / "out")
    change = 16 / 3 * p["fc1.lora_b"] @ p["fc1.lora_a"]
    torch.testing.assert_close(merged["fc1.weight"], p["fc1.weight"] + change, check_dtype=False)
    refused = CliRunner().invoke(main, [*arguments, "--as", "adapter"])
    assert refused.exit_code == 2
    assert "--as adapter has the factors alone, and fedex_lora has changed the weights, too; give --as merged" in (
        refused.stderr
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"method": {"name": "flora", "carry": "keep"}},
            "flora draws its factors anew in every round, so that no state",
        ),
        ({"aggregate": "median"}, "aggregate: products of factors are added to the weights, where only a mean has"),
        ({"personal": {"tensors": ["out.*"]}}, "personal.tensors: does not go with a method that changes the weights"),
        ({"personal": {"frozen": ["*.lora_a"]}}, r"flora needs all factors, got fc1.lora_a frozen or personal"),
        ({"evaluate": {"clients": {"adapt": {"steps": 2}}}}, "adapt: would train the weights that the method's server"),
        ({"systems": {}, "federation": {"pace": {"name": "buffered"}}}, "the method has no asynchronous form"),
        (
            {"privacy": {"clip": 1.0, "noise": 1.0, "delta": 0.01}},
            "flora has no private form: the server adds products",
        ),
        ({"workload": {"name": "digits"}}, "flora needs adapters, got a model without; give workload.adapter, or"),
    ],
)
def test_what_has_no_meaning_is_refused(more: dict[str, Any], told: str, tmp_path: Path):
    federation = {"clients": 12, "cohort": 5, "rounds": 2, "local": {"steps": 4, "batch": 8}}
    given = {"method": RUNS["flora"], **more, "federation": {**federation, **more.get("federation", {})}}
    with pytest.raises(ConfigError, match=told):
        run(digits(**{"workload": digits().workload, **given}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_weight_that_other_modules_have_is_refused():
    pairs = (Pair("w", "w.lora_a", "w.lora_b", 1.0, tied=True),)
    with pytest.raises(ValueError, match="fedex_lora changes the weights beside factors, got w, which other modules"):
        fedex_lora().build(RunContext(1, 1, 1, 1, layout=Tree.of({"w": torch.zeros(2, 2)}).layout, pairs=pairs))


def test_weights_that_the_server_changes_are_proven_too():
    """Plain autograd on the module has their gradients, although its own parameters are frozen, and the form for one
    client is compared with it and not with itself. TOLERANCE: sums of at most 64 terms in float64."""
    spec = RunSpec.of("x", digits(method="flora"))
    columns = {name: torch.from_numpy(column[:5]) for name, column in spec.split().train.items()}
    batch, forms = {**columns, "key": torch.tensor(3)}, Forms(spec)
    point = next(near(spec))
    (plain, _), (alone, _) = forms.plain(point, batch), forms.alone(point, batch)
    assert forms.as_written is not None
    assert forms.as_written.networks
    torch.testing.assert_close(plain, alone, rtol=1e-12, atol=1e-12)
    assert Tree(plain, forms.layout)["fc1.weight"].any()


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("start", [BEFORE, START], ids=["zero", "not-zero"])
def test_clients_may_draw_factors_of_their_own(start: dict[str, Tensor], block: int):
    """A new A for each client and round, from the seed; B is 0, and what it had before round 1 is in the weights."""
    made = of_blocks("flora", block).model_copy(update={"method": flora(Sgd(0.3), redraw="client")})
    with driver_here(made, initial_model=start) as driver:
        w = merged(start)
        for number in (1, 2):
            record = next_round(driver)
            models, factors = [], []
            for client in (0, 1):
                u = counted.uniform(counted.key(made.seed, "adapter", 0, "a", number, client), 8)
                begun = {
                    "0.weight": w,
                    "0.lora_a": (u.double() - 0.5).view(2, 4),
                    "0.lora_b": torch.zeros_like(w[:, :2]),
                }
                factors.append(descend(client, begun, 4))
                models.append(merged(factors[-1]))
            mean_a, mean_b = (0.25 * factors[0][name] + 0.75 * factors[1][name] for name in ("0.lora_a", "0.lora_b"))
            missed = (0.25 * models[0] + 0.75 * models[1] - w - 2 * mean_b @ mean_a).norm()
            w = 0.25 * models[0] + 0.75 * models[1]
            close(driver.tensors()["0.weight"], w)
            assert not driver.tensors()["0.lora_b"].any()
            assert record["server/missed"] == pytest.approx(float(missed), rel=1e-9)


@pytest.mark.long
def test_clients_that_draw_go_on_to_the_same_bits(tmp_path: Path):
    made = digits(method={**RUNS["flora"], "redraw": "client"}, checkpoint={"every": 1}, engine=ENGINE)
    whole = run(made, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r2=interrupt)])
    assert resume(made, tmp_path / "run").model_sha256 == whole.model_sha256
    assert whole.model_sha256 != run(digits(method=RUNS["flora"], engine=ENGINE)).model_sha256


def test_parts_of_a_weight_are_changed_together():
    """Two parts of one weight with factors; each is sent as factors, or as the part where that is smaller."""
    shapes = {"w": (6, 4), "q.a": (2, 4), "q.b": (2, 2), "v.a": (2, 4), "v.b": (2, 2)}
    x = Tree.of({name: wave(shape, number) for number, (name, shape) in enumerate(shapes.items())})
    pairs = tuple(Pair("w", f"{part}.a", f"{part}.b", 2.0, rows=rows) for part, rows in (("q", (0, 2)), ("v", (4, 6))))
    method = Flora(Sgd(0.3), Plain(), Mean(), layout=x.layout, pairs=pairs, cohort=3)
    change = method.changes(x)["w"]
    assert torch.equal(change[:2], 2 * x["q.b"] @ x["q.a"])
    assert not change[2:4].any()
    assert torch.equal(change[4:], 2 * x["v.b"] @ x["v.a"])
    spec = StateSpec(method, x)
    assert [spec.traffic(method, number)[0] for number in (1, 2)] == [0, 2 * 8 * min(2 * 4, 3 * 2 * (4 + 2))]


def test_embeddings_and_convolutions_begin_anew():
    """FLoRA draws A anew, and for an embedding B; the other factor is 0, so that the model stays the mean."""
    shapes = {"e.lora_a": (2, 5), "e.lora_b": (3, 2), "c.lora_a": (2, 2, 3, 3), "c.lora_b": (4, 2, 1, 1)}
    x = Tree.of({name: torch.ones(shape) for name, shape in shapes.items()})
    pairs = (Pair("e", "e.lora_a", "e.lora_b", 1.0, True, "b"), Pair("c", "c.lora_a", "c.lora_b", 1.0))
    method = Flora(Sgd(0.3), Plain(), Mean(), pairs=pairs, seed=4)
    first, second = dict(method.next_factors(x, 2).items()), dict(method.next_factors(x, 3).items())
    assert not first["e.lora_a"].any()
    assert not first["c.lora_b"].any()
    assert first["c.lora_a"].abs().max() <= 18**-0.5
    assert first["e.lora_b"].abs().max() > 18**-0.5
    assert not any(torch.equal(first[name], second[name]) for name in ("e.lora_b", "c.lora_a"))
