"""Native kernels are used only if they compute what torch computes, which is decided from the structure of the network
and by a comparison on the run's own data. Each case is also trained to the end, with the kernels that the run
chooses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fedfleet.engine import run
from fedfleet.engine.backends.local import LocalPool
from fedfleet.engine.clients.worker import Data
from fedfleet.engine.config import schema
from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.kernels import library
from fedfleet.engine.kernels.agreement import Disagreement
from fedfleet.engine.kernels.channels_last import ChannelsLast
from fedfleet.engine.kernels.fused_chain import Chain, FusedChain, NotAChain, chain_from
from fedfleet.engine.kernels.operators import Native
from fedfleet.engine.planning import execution_plan, kernel_proof
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.engine.state.row_files import StateLayout
from fedfleet.workloads import counted
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.recurrent import PackedTanh
from fedfleet.workloads.partitions.standard import Iid
from fedfleet.workloads.workload import Batch, Chained, Params, Partition

from ..faults.runs import Watch
from .setups import STEPS, Built, digits

pytestmark = pytest.mark.usefixtures("own_kernels")

TOLERANCE = 1e-5
"""Float32 sums in another order, relative to the largest weight."""


def layers() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)]


def plain() -> nn.Module:
    return nn.Sequential(*layers())


def one_relu_twice() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), relu, nn.Linear(12, 12), relu, nn.Linear(12, 10))


def one_linear_twice() -> nn.Module:
    twice = nn.Linear(12, 12)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(12, 10)
    )


class Halved(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def inner_forward() -> nn.Module:
    first, *rest = layers()
    return nn.Sequential(first, Halved(*rest[:2]), *rest[2:])


def changed(change: Callable[[list[nn.Module]], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        parts = layers()
        change(parts)
        return nn.Sequential(*parts)

    return make


def own_forward(parts: list[nn.Module]) -> None:
    relu = parts[2]
    relu.forward = lambda x: F.relu(x) + 0.5 * x  # pyright: ignore[reportAttributeAccessIssue]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "a Sequential with a forward of its own": lambda: Halved(*layers()),
    "one inside": inner_forward,
    "a layer with a forward of its own": lambda: nn.Sequential(nn.Flatten(), Scaled(64, 10)),
    "a forward put on a module": changed(own_forward),
    "a hook": changed(lambda parts: parts[1].register_forward_hook(lambda module, given, y: y / 3)),
    "a hook before": changed(lambda parts: parts[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))),
    "a hook of gradients": changed(
        lambda parts: parts[2].register_full_backward_hook(lambda module, into, out: (into[0] / 2,))
    ),
    "a parametrisation": changed(lambda parts: weight_norm(parts[1])),
    "a layer used twice": one_linear_twice,
}
"""Networks that are not chains, although they consist of layers that a chain may have."""


def noisy(self: Any, batch: Batch, dtype: torch.dtype) -> Tensor:
    """The function of NoisyDigits in docs/howto/vectorised.md."""
    x = Digits.inputs(self, batch, dtype)
    if "key" not in batch:
        return x
    places = torch.arange(len(x), device=x.device)
    xi = counted.normal(counted.key(batch["key"], "noise", places), x[0].numel())
    return x + 0.1 * xi.to(dtype).view(x.shape)


def smoothed(self: Any, p: Params, batch: Batch) -> Tensor:
    return F.cross_entropy(
        self.logits(p, batch, batch.get("key")), batch["label"], reduction="none", label_smoothing=0.1
    )


def sharper(self: Any, p: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
    return 2 * Classification.logits(self, p, batch, key)


OVERRIDDEN = {"inputs": noisy, "losses": smoothed, "logits": sharper}


def said(self: Any) -> Chained:
    """Declares that a workload is a chain, whatever it computes."""
    return Chained(self.network.module, self.shape, lambda batch, dtype: Digits.inputs(self, batch, dtype))


def made(make: Callable[[], nn.Module] = plain, **functions: Any) -> Digits:
    Own = type("Own", (Digits,), functions)
    return Own(Built(make), Iid())


def experiment(workload: Any, method: Any = "fedavg", **engine: Any) -> Experiment:
    base = digits(method, STEPS, **{"block": 4, "kernels": "auto", **engine})
    return base.model_copy(update={"workload": workload})


@pytest.fixture
def worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are measured, and a cache folder of the test is used."""
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(execution_plan, "WORTH", 0)

    def own_ones(run_spec: RunSpec, split: Any, candidates: list[ExecutionPlan]) -> dict[ExecutionPlan, float]:
        return {candidates[-1]: 1.0}  # torch's kernels come first

    monkeypatch.setattr("fedfleet.engine.runs.host.measure", own_ones)


def flat(model: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in model.values()])


def far(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return float((flat(first) - flat(second)).abs().max() / flat(second).abs().max())


WRONG = {
    **{name: (make, {}) for name, make in NETWORKS.items()},
    **{f"{name} overridden": (plain, {name: own}) for name, own in OVERRIDDEN.items()},
    **{
        f"{name} overridden, said to be a chain": (plain, {name: own, "chained": property(said)})
        for name, own in OVERRIDDEN.items()
    },
}


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(("make", "functions"), WRONG.values(), ids=WRONG)
def test_what_is_no_chain_is_trained_as_torch_trains_it_and_the_run_says_why(make, functions, tmp_path: Path):
    workload, log = made(make, **functions), Watch()
    by_torch = run(experiment(workload, kernels="torch"))
    auto = run(experiment(workload), tmp_path / "run", [log])
    assert far(auto.model, by_torch.model) < TOLERANCE
    kept = json.loads((tmp_path / "run/plan.json").read_text())
    assert kept["kernels"] != "chain"
    (line,) = [text for text in log.told if text.startswith("plan: ")]
    assert "chain kernels refused: " in line
    assert "chain kernels refused: " in kept["how"]
    assert "\n" not in line
    with pytest.raises(ConfigError, match=r"^engine\.kernels.*; choose "):
        run(experiment(workload, kernels="chain"))


def test_hooks_of_all_modules_are_seen():
    workload = made()
    run_spec = RunSpec.of("run", experiment(workload, kernels="chain"))
    assert chain_from(workload, run_spec.initial_model().layout)
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, y: y)
    try:
        with pytest.raises(NotAChain, match="all modules"):
            chain_from(workload, run_spec.initial_model().layout)
    finally:
        hook.remove()


@pytest.mark.usefixtures("worth")
def test_a_module_used_twice_is_computed_twice():
    workload = made(one_relu_twice)
    own = run(experiment(workload, kernels="chain"))
    assert far(own.model, run(experiment(workload, kernels="torch")).model) < TOLERANCE


def test_a_tensor_put_on_the_workload_itself_is_seen():
    workload = made()
    vars(workload)["losses"] = lambda p, batch: 2 * Digits.losses(workload, p, batch)
    with pytest.raises(NotAChain, match="losses"):
        chain_from(workload, RunSpec.of("run", experiment(workload)).initial_model().layout)


def test_columns_of_another_size_than_declared_are_refused():
    """The workload declares 8 x 8 and its columns have 4 x 4: torch raises the error, and no kernel reads beyond the
    columns."""

    class Small(Digits):
        def load(self) -> Any:
            return tuple({**columns, "input": columns["input"].reshape(-1, 64)[:, :16]} for columns in super().load())

    workload = Small(Built(plain), Iid())
    texts = []
    for kernels in ("torch", "chain"):
        with pytest.raises(Exception, match="16") as error:
            run(experiment(workload, kernels=kernels))
        texts.append((type(error.value), str(error.value).split(" failed on ")[0]))
    assert texts[0] == texts[1]


def test_a_resumed_run_is_proven_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = experiment(made(), kernels="auto")
    run_spec = replace(RunSpec.of("run", asked, str(tmp_path), resume=True))
    split = run_spec.split()
    assert execution_plan.prove_or_fall_back(run_spec, split, ExecutionPlan(4, "chain"), "as the run began") == (
        (4, "chain"),
        "as the run began",
    )
    other = replace(RunSpec.of("run", experiment(made(inputs=noisy)), str(tmp_path), resume=True))
    with pytest.raises(ConfigError, match=r"the run began with chain kernels.*resume it on a machine"):
        execution_plan.prove_or_fall_back(other, split, ExecutionPlan(4, "chain"), "as the run began")


def test_a_worker_elsewhere_proves_by_itself(monkeypatch: pytest.MonkeyPatch):
    run_spec = RunSpec.of("run", experiment(made(), kernels="chain"))
    split = run_spec.split()
    planned, _ = execution_plan.plan_execution(run_spec, split, lambda *_: {})
    data, rows = Data.of(split.train, split.test, split.client_index), StateLayout("", 0, False, False)
    proofs = []
    real = kernel_proof.prove
    monkeypatch.setattr(kernel_proof, "prove", lambda *given: proofs.append(given) or real(*given))
    LocalPool(planned, data, rows, lambda: None)
    assert not proofs  # the same library on the same processor
    LocalPool(replace(planned, proven_kernels="another machine"), data, rows, lambda: None)
    assert len(proofs) == 1
    wrong = RunSpec.of("run", experiment(made(inputs=noisy), kernels="chain")).with_plan(
        ExecutionPlan(4, "chain"), "another machine"
    )
    with pytest.raises(library.NoKernels, match="chain kernels do not compute here what torch's compute"):
        LocalPool(wrong, data, rows, lambda: None)


def test_padding_that_is_passed_over_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """A recurrent layer whose gradient forgets the recurrent weights."""
    asked = {
        "workload": {"name": "sst2", "stand_in": 60, "model": {"name": "rnn", "hidden": 6}, "length": 12},
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 3, "cohort": 2, "rounds": 1, "local": {"steps": 2, "batch": 8}},
        "engine": {"backend": "local", "kernels": "native", "block": 1},
        "tracking": {"uri": "none"},
    }
    run_spec = RunSpec.of("run", schema.experiment(asked))
    split = run_spec.split()
    given = split._replace(test={})
    kernel_proof.prove(run_spec, given, Native())
    right, calls = PackedTanh.backward, []

    def wrong(ctx: Any, *grads: Tensor) -> Any:
        calls.append(1)
        of_drives, of_w, _ = right(ctx, *grads)
        return of_drives, 0.99 * of_w, None

    monkeypatch.setattr(PackedTanh, "backward", staticmethod(wrong))
    with pytest.raises(Disagreement, match=r"weight_hh_l.* off torch's"):
        kernel_proof.prove(run_spec, given, Native())
    assert calls


PLUGIN = """
from fedfleet.engine.kernels.contract import Kernels
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

class Longer(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * FACTOR if func is F.linear else result

class Own(Kernels):
    name = "own"

    def around_losses(self):
        return Longer()

KERNELS = {"own": Own}
"""


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_kernels_of_a_plugin_are_chosen_only_if_they_are_proven(factor: float, tmp_path: Path):
    plugin = tmp_path / "own.py"
    plugin.write_text(PLUGIN.replace("FACTOR", str(factor)))
    asked = digits("fedavg", STEPS, kernels="auto").model_copy(update={"plugins": (str(plugin),)})
    result = run(asked, tmp_path / "run")
    kept = json.loads((tmp_path / "run/plan.json").read_text())
    assert (kept["kernels"] == "own") == (factor == 1.0)
    assert ("own kernels refused: " in kept["how"]) == (factor != 1.0)
    assert far(result.model, run(digits("fedavg", STEPS, kernels="torch")).model) < TOLERANCE


def test_an_unknown_kind_of_kernels_is_told():
    with pytest.raises(ConfigError, match=r"^engine\.kernels\.name: no kind of kernels is called chains; .*chain"):
        run(digits("fedavg", STEPS, kernels="chains"))


# --- a library that is wrong ------------------------------------------------------------------------------------------
DEFECTS = {
    "native.h": [
        ("gb[c * O + o] = rest + sum(lanes);", "gb[c * O + o] = sum(lanes);"),
        ("if (N == 3) sum += double(c[i]);", "if (N == 3) sum += double(b[i]);"),
    ],
    "batched.h": [("larger(top, which, a[t][3], 3)", "larger(top, which, a[t][3], 2)")],
    "chain.h": [("y[i] -= lr * (g[i] + shift[i]);", "y[i] -= lr * g[i];")],
    "winograd.h": [("bottom[k] = a - b - at(3);", "bottom[k] = a - b + at(3);")],
    "orthogonal.h": [
        ("right_g, w, 1, a, g)", "right_g, w, 1, a * 1.001f, g)"),
        ("_mm512_dpbf16_ps((__m512)sum,", "_mm512_dpbf16_ps((__m512)(sum * 1.0005f),"),
    ],
}
"""file -> (text, replacement): each is an error that a compiler or a processor might make too."""


@pytest.fixture(scope="module")
def wrong_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for source in library.source_files():
        text = source.read_text()
        for old, new in DEFECTS.get(source.name, ()):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / source.name).write_text(text)
    return folder


@pytest.fixture
def wrong_library(wrong_sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses the wrong library, which is built once for this module, until the test is over."""
    monkeypatch.setattr(library, "SOURCES", wrong_sources)
    monkeypatch.setattr(library, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in library.FLAGS))
    monkeypatch.setenv("FEDFLEET_CACHE", str(wrong_sources / "cache"))
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def test_padding_is_proven_wherever_the_run_can_have_it(monkeypatch: pytest.MonkeyPatch):
    """The batches of the clients that are compared are full, and only those of others are short."""

    @dataclass(frozen=True)
    class LastIsShort(Partition):
        def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
            return ClientIndex.of(np.split(np.arange(16 * clients - 7), 16 * np.arange(1, clients)))

    asked = {
        "workload": Digits(Built(plain), LastIsShort()),
        "method": "fedavg",
        "federation": {"clients": 9, "cohort": 2, "rounds": 2, "local": {"steps": 1, "batch": 16}},
        "engine": {"backend": "local", "block": 2, "kernels": "chain"},
        "tracking": {"uri": "none"},
    }
    run_spec = RunSpec.of("run", schema.experiment(asked))
    split = run_spec.split()
    given = split._replace(test={})
    proving = kernel_proof.Proof(run_spec, given, FusedChain())
    assert proving.drawn.weight is None
    kernel_proof.prove(run_spec, given, FusedChain())
    real = Chain.gradient

    def wrong(self: Chain, point: Tensor, batch: Batch, *more: Any) -> tuple[Tensor, Tensor]:
        gradient, loss = real(self, point, batch, *more)
        padded = "weight" in batch and not bool(batch["weight"].all())
        return (1.01 * gradient if padded else gradient), loss

    monkeypatch.setattr(Chain, "gradient", wrong)
    with pytest.raises(Disagreement, match=r"in a block .* off torch's"):
        kernel_proof.prove(run_spec, given, FusedChain())
    kernel_proof.prove(run_spec, given, FusedChain(), blocks=False)


def lenet_proof(kernels: str, method: str = "scaffold") -> tuple[RunSpec, kernel_proof.Proof]:
    from .test_kernels import lenet

    run_spec = RunSpec.of("run", lenet(method=method, kernels=kernels))
    split = run_spec.split()
    return run_spec, kernel_proof.Proof(run_spec, split._replace(test={}), run_spec.kernels)


@pytest.mark.usefixtures("wrong_library")
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (lambda proving: kernel_proof.check_sums(100), "sum of 3 messages"),
        (lambda proving: proving.gradients("here", proving.x.flat, proving.batches()[0]), "is .* off torch's"),
        (lambda proving: proving.descent(proving.x.flat, proving.batches()[0]), "two steps"),
    ],
    ids=["add_up", "native", "descend"],
)
def test_a_library_that_computes_something_else_is_found_out(part, reason):
    kernels = "chain" if reason == "two steps" else "native"
    with torch.no_grad(), pytest.raises(Disagreement, match=reason):
        part(lenet_proof(kernels)[1])


@pytest.mark.usefixtures("wrong_library")
def test_matrices_that_are_orthogonalised_otherwise_are_found_out():
    run_spec = RunSpec.of("run", digits("local_muon", STEPS, kernels="native"))
    split = run_spec.split()
    proving = kernel_proof.Proof(run_spec, split._replace(test={}), Native())
    with torch.no_grad(), pytest.raises(Disagreement, match="Newton-Schulz"):
        proving.orthogonalised(proving.batches()[0][0])


@pytest.mark.usefixtures("wrong_library")
def test_results_in_bfloat16_that_are_all_a_little_too_long_are_found_out():
    if "bfloat16" not in library.instruction_set():
        pytest.skip("this processor has no products of bfloat16")
    with torch.no_grad(), pytest.raises(Disagreement, match="too long by"):
        lenet_proof("native")[1].compare_length(("classic", 5, torch.bfloat16), torch.randn(64, 96))


@pytest.mark.usefixtures("wrong_library")
def test_a_run_that_asks_for_them_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"engine\.kernels=native must compute what torch's .*; choose torch"):
        run(digits("fedavg", STEPS, kernels="native"))


@pytest.mark.parametrize(("batch", "width"), [(16, 2048), (48, 2048)])
def test_batches_of_large_models_are_proven_as_they_are_computed(
    batch: int, width: int, monkeypatch: pytest.MonkeyPatch
):
    """An error of convolutions with examples in lanes alone, which the chain uses where a batch fills them. Batches of
    large models are cut."""

    def network() -> nn.Module:
        convolution = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*convolution, nn.Linear(576, width), nn.ReLU(), nn.Linear(width, 10))

    asked = {
        "workload": Digits(Built(network), Iid()),
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 12, "cohort": 2, "rounds": 1, "local": {"steps": 2, "batch": batch}},
        "engine": {"backend": "local", "block": 1, "kernels": "chain"},
        "tracking": {"uri": "none"},
    }
    run_spec = RunSpec.of("run", schema.experiment(asked))
    split = run_spec.split()
    given = split._replace(test={})
    kernel_proof.prove(run_spec, given, FusedChain())
    right, sizes = Chain._call, []

    def wrong(self: Any, name: str, tensors: Any, label: Tensor, *more: Any) -> None:
        sizes.append(label.shape[-1])
        right(self, name, tensors, label, *more)
        if sizes[-1] == batch:
            tensors[0 if name == "chain_descend" else 4].mul_(1.01)

    monkeypatch.setattr(Chain, "_call", wrong)
    with pytest.raises(Disagreement, match=r"is .* off torch's"):
        kernel_proof.prove(run_spec, given, FusedChain())
    assert batch in sizes


@pytest.mark.parametrize("everywhere", [False, True], ids=["at the initial model", "everywhere"])
def test_a_kink_is_no_error_of_kernels(everywhere: bool, monkeypatch: pytest.MonkeyPatch):
    """Gradients that are off at a model and right beside it are those of a kink; others are wrong."""
    real, off = kernel_proof.Proof.alone, []

    def alone(self: kernel_proof.Proof, point: Tensor, batch: Any) -> list[tuple[Tensor, Tensor]]:
        found = real(self, point, batch)
        if everywhere or torch.equal(point, self.x.flat):
            off.append(point)
            return [(1.001 * gradient, loss) for gradient, loss in found]
        return found

    monkeypatch.setattr(kernel_proof.Proof, "alone", alone)
    run_spec, proving = lenet_proof("chain")
    given = proving.given
    if everywhere:
        with pytest.raises(Disagreement, match=r"the gradient at the initial model .* off torch's"):
            kernel_proof.prove(run_spec, given, FusedChain())
    else:
        kernel_proof.prove(run_spec, given, FusedChain())
    assert off


# --- no false alarm ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernels", ["chain", "native"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local_muon"])
def test_what_is_right_is_proven(method, kernels):
    for seed in range(4):
        run_spec = RunSpec.of(
            "run", digits(method, {"epochs": 1, "batch": 7}, kernels=kernels).model_copy(update={"seed": seed})
        )
        split = run_spec.split()
        kernel_proof.prove(run_spec, split._replace(test={}), run_spec.kernels)


@pytest.mark.parametrize("method", ["fed_nsgda_m", "fedmuon_da", "fedmuon_bc", "fafed", "stem", "muloco"])
def test_methods_whose_server_sends_less_than_its_state_are_proven(method):
    base = digits("fedavg", STEPS, kernels="native")
    made = {"name": "auc", "positive": 3, "of": {"name": "digits", "model": {"name": "mlp", "hidden": [8]}}}
    asked = {**base.model_dump(mode="json"), "workload": made, "method": method}
    run_spec = RunSpec.of("run", schema.experiment(asked))
    split = run_spec.split()
    kernel_proof.prove(run_spec, split._replace(test={}), Native())


def dead(self: Any, seed: int) -> dict[str, Tensor]:
    """A model in which no hidden unit is ever active, so that all gradients of the first layer are zero."""
    p = Classification.init(self, seed)
    return {name: torch.full_like(value, -100.0) if name == "1.bias" else value for name, value in p.items()}


def test_a_dead_start_proves_nothing_by_itself():
    def halved_hidden(self: Any, p: Params, batch: Batch, key: Tensor | None = None) -> Tensor:
        return Classification.logits(self, {**p, "1.weight": p["1.weight"] / 2}, batch, key)

    workload = made(init=dead, logits=halved_hidden, chained=property(said))
    run_spec = RunSpec.of("run", experiment(workload, kernels="chain"))
    split = run_spec.split()
    right = RunSpec.of("run", experiment(made(init=dead), kernels="chain"))
    kernel_proof.prove(right, split._replace(test={}), FusedChain())
    with pytest.raises(Disagreement):
        kernel_proof.prove(run_spec, split._replace(test={}), FusedChain())


@pytest.mark.usefixtures("wrong_library")
def test_convolutions_with_examples_in_lanes_are_found_out():
    """Batches of 16 examples fill the vectors, so that the chain computes convolutions with batched.h."""
    from .test_kernels import lenet

    run_spec = RunSpec.of("run", lenet(kernels="chain", batch=16))
    split = run_spec.split()
    proving = kernel_proof.Proof(run_spec, split._replace(test={}), FusedChain())
    with torch.no_grad(), pytest.raises(Disagreement, match=r"the gradient .*here .* is .* off torch's"):
        proving.gradients("here", proving.x.flat, proving.batches()[0])


@pytest.mark.usefixtures("wrong_library")
def test_convolutions_by_fewer_products_are_found_out():
    from .test_channels_last import asked

    def wide() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * 64, 10)),
        )

    run_spec = RunSpec.of("run", asked(wide))
    split = run_spec.split()
    given = split._replace(test={})
    proving = kernel_proof.Proof(run_spec, given, ChannelsLast())
    with torch.no_grad(), pytest.raises(Disagreement, match=r"the gradient .*here .* is .* off torch's"):
        proving.gradients("here", proving.x.flat, proving.batches()[0])
