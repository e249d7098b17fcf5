"""Modules are in training mode in training and in evaluation mode in evaluations; a module that draws from a global
generator is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedfleet.engine import Experiment, Result, run
from fedfleet.engine.clients.modules import evaluating
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.convolutional import Dropout
from fedfleet.workloads.models.functional import KeyedFunctions
from fedfleet.workloads.objectives import cross_entropy
from fedfleet.workloads.problems.auc import Auc
from fedfleet.workloads.stateless import Stateless
from fedfleet.workloads.workload import Model, Params, Workload
from fedfleet.workloads.wrappers.noisy import Noisy


class Body(nn.Module):
    """A linear layer 64 -> 64, a module that may draw random numbers, and a linear layer 64 -> classes."""

    def __init__(self, between: nn.Module, classes: int = 10) -> None:
        super().__init__()
        self.first, self.between, self.out = nn.Linear(64, 64), between, nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.between(self.first(x.flatten(1)).relu()))


@dataclass(frozen=True)
class With(Model):
    between: Callable[[], nn.Module]

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return Body(self.between(), classes)


def experiment_of(workload: Workload, rounds: int = 2, **engine: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {"clients": 12, "cohort": 6, "rounds": rounds, "local": {"steps": 4, "batch": 16}},
            "engine": {"backend": "local", **engine},
            "tracking": {"uri": "none"},
        }
    )


def trained(workload: Workload, **engine: Any) -> Result:
    return run(experiment_of(workload, **engine))


# --- draws ------------------------------------------------------------------------------------------------------------
class Feature(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.alpha_dropout(x, 0.3, self.training)


class Normal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.random() < 0.5)


class Python(nn.Module):
    """A layer that is skipped at random, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x * 2


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return input * torch.bernoulli(torch.full_like(input, 1 - self.p)) if self.training else input


TORCH = "torch's global generator"
DRAWS: list[tuple[Callable[[], nn.Module], str, str, str]] = [
    (OwnDropout, r"between \(OwnDropout\)", TORCH, "stateless.Keyed"),
    (lambda: nn.Sequential(nn.Tanh(), OwnDropout()), r"between.1 \(OwnDropout\)", TORCH, "dropout.Dropout"),
    (Feature, r"between \(Feature\)", TORCH, "stateless.Keyed"),
    (Normal, r"between \(Normal\)", TORCH, "stateless.Keyed"),
    (Numpy, r"between \(Numpy\)", "NumPy's global generator", "stateless.Keyed"),
    (Python, r"between \(Python\)", "Python's module random", "stateless.Keyed"),
]


@pytest.mark.parametrize(("between", "name", "drawn", "remedy"), DRAWS, ids=lambda value: str(value)[:24])
def test_a_module_that_draws_from_a_global_generator_is_refused_by_name(between, name, drawn, remedy):
    Digits().load()  # scikit-learn draws from Python's generator when it is imported
    states = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy(), random.getstate()
    with pytest.raises(ConfigError, match=rf"workload: module {name} must draw .* {drawn}; .*{remedy}"):
        trained(Digits(model=With(between)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], states[1])
    assert random.getstate() == states[2]


@pytest.mark.parametrize("around", [Noisy, Auc], ids=lambda kind: kind.__name__)
def test_it_is_refused_inside_other_workloads(around):
    with pytest.raises(ConfigError, match=r"module between \(OwnDropout\) must draw"):
        trained(around(Digits(model=With(OwnDropout))))


def test_what_could_be_converted_is_refused_in_a_network_that_a_workload_builds_by_itself():
    workload = OwnModules(model=With(nn.Identity))
    workload.body().between = nn.Dropout(0.5)
    with pytest.raises(ConfigError, match=r"between \(Dropout\) must .*; call fedfleet.convert on the network"):
        trained(workload)


def test_an_input_that_draws_is_refused():
    class Blurred(Digits):
        def inputs(self, batch: Any, dtype: torch.dtype) -> Tensor:
            return super().inputs(batch, dtype) + torch.rand(1)

    with pytest.raises(ConfigError, match=r"losses draw from torch's global generator.*counted"):
        trained(Blurred())


@pytest.mark.parametrize("between", [lambda: nn.Dropout(0.0), lambda: Dropout(0.5), nn.Tanh], ids=["none", "keyed", ""])
def test_a_module_without_such_draws_is_taken(between):
    first, second = (trained(Digits(model=With(between))) for _ in range(2))
    assert first.model_sha256 == second.model_sha256
    assert first.metrics == second.metrics


def test_keyed_dropout_of_whole_channels():
    drop = Stateless(Dropout(0.5, channels=True))
    x = torch.ones(4, 64, 3, 3)
    kept = drop({}, x, torch.tensor(7))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(kept, kept[..., :1, :1].expand_as(kept))
    assert torch.equal(kept, drop({}, x, torch.tensor(7)))
    assert torch.equal(drop({}, x), x)


class Functional(nn.Module):
    """Words of width 4 from the 16 inputs: dropout and attention by functions. always: also in evaluations."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        draws = self.training or self.always
        x = F.dropout(x, 0.3, draws)
        words = x.unflatten(-1, (-1, 4)).unsqueeze(1)
        words = F.scaled_dot_product_attention(words, words, words, dropout_p=0.2 if draws else 0.0, is_causal=True)
        return F.dropout1d(words.flatten(0, 1), 0.1, draws).flatten(1)


def test_functions_that_drop_draw_from_the_key():
    """A run in blocks and one of clients alone agree within the roundings of float32 over two rounds."""
    blocks, alone = (trained(Digits(model=With(Functional)), block=block).model for block in (4, 1))
    assert all(torch.allclose(value, alone[name], atol=1e-5) for name, value in blocks.items())
    without = trained(Digits(model=With(nn.Identity))).model
    assert any(not torch.allclose(value, blocks[name], atol=1e-3) for name, value in without.items())


def test_functions_draw_the_same_for_a_key_and_nothing_in_evaluations():
    network, x = Stateless(Functional()), torch.randn(1, 16)
    assert torch.equal(network({}, x), Functional().eval()(x))
    states = torch.get_rng_state()
    first, again = (network({}, x, torch.tensor(3)) for _ in range(2))
    assert network.draws
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("mask", [None, "causal", "bits", "numbers"])
def test_attention_with_dropout_is_torchs_where_nothing_is_dropped(mask):
    """The rate is so small that none of the 2 x 3 x 5 x 5 weights is dropped, and 1 / (1 - rate) rounds to 1."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=random, dtype=torch.float64) for _ in range(3))
    bits = torch.rand(5, 5, generator=random) > 0.3
    bits.fill_diagonal_(True)
    given = {"bits": bits, "numbers": torch.where(bits, 0.5, -1.0).double()}.get(str(mask))
    wanted = F.scaled_dot_product_attention(q, k, v, given, is_causal=mask == "causal", scale=0.3)
    with KeyedFunctions(torch.tensor(1)):
        got = F.scaled_dot_product_attention(q, k, v, given, 1e-17, mask == "causal", scale=0.3)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_functions_that_drop_in_evaluations_are_refused():
    with pytest.raises(ConfigError, match=r"F\.dropout must draw in training alone, .*training=self\.training"):
        trained(Digits(model=With(lambda: Functional(always=True))))


# --- modes ------------------------------------------------------------------------------------------------------------
class ModeShift(nn.Module):
    """Adds a number to every logit in training mode, which evaluations must not have. It draws no random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return -x if self.training else x


def test_evaluations_are_in_eval_mode_and_training_in_train_mode():
    """The mode depends only on the call, not on the calls before it."""
    network = Stateless(nn.Sequential(ModeShift(), nn.Sequential(ModeShift(), ModeShift())).eval())
    x, key = torch.ones(2, 3), torch.tensor(1)
    for _ in range(2):
        assert torch.equal(network({}, x), x)
        assert torch.equal(network({}, x, key), -x)
    frozen = nn.Sequential(ModeShift())
    frozen[0].eval()  # a module that somebody left in another mode
    assert torch.equal(Stateless(frozen)({}, x, key), -x)


@pytest.mark.parametrize("vectorise", [True, False])
def test_a_run_evaluates_what_eval_mode_computes(vectorise):
    """There is keyed dropout in training; the report is exactly that of the final model without dropout."""
    workload = Digits(model=With(lambda: Dropout(0.7)))
    result = trained(workload, vectorise=vectorise)
    module = workload.build().eval()
    test = workload.load()[1]
    with torch.no_grad():
        logits = functional_call(module, result.model, (torch.from_numpy(test["input"]),))
    right = (logits.argmax(1) == torch.from_numpy(test["label"])).double().mean()
    assert result.metrics["eval/accuracy"] == pytest.approx(float(right), abs=1e-12)


@dataclass(frozen=True)
class OwnModules(Digits):
    """A workload that builds its own module on first use and calls it as a function of the parameters."""

    def body(self) -> Any:
        if not hasattr(self, "kept"):
            object.__setattr__(self, "kept", Body(nn.Sequential(ModeShift(), ModeShift(), ModeShift())))
        return getattr(self, "kept")  # noqa: B009 no field of the dataclass

    def logits(self, p: Params, batch: Any, key: Tensor | None = None) -> Tensor:
        return functional_call(self.body(), dict(p), (batch["input"].flatten(1).to(next(iter(p.values())).dtype),))

    def losses(self, p: Params, batch: Any) -> Tensor:
        assert self.body().training
        return cross_entropy(self.logits(p, batch), batch["label"])

    def report(self, p: Params, batch: Any) -> dict[str, Tensor]:
        logits = self.logits(p, batch)
        assert not self.body().between[0].training
        return {"loss": cross_entropy(logits, batch["label"])}


def test_modules_that_a_workload_keeps_by_itself_are_evaluated_in_eval_mode():
    workload = OwnModules(model=With(nn.Identity))
    result = trained(workload, vectorise=False)
    assert np.isfinite(result.metrics["eval/loss"])
    assert workload.body().training


def test_evaluating_leaves_every_module_in_its_own_mode():
    body = Body(nn.Sequential(ModeShift(), ModeShift()))
    body.out.eval()
    modes = [part.training for part in body.modules()]

    def evaluation_that_fails() -> None:
        with evaluating():
            body(torch.ones(1, 64))
            assert not any(part.training for part in body.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluation_that_fails()
    assert [part.training for part in body.modules()] == modes
