"""Every argument of every method changes what the method does, or is refused: no argument is ignored silently.

For each method of the table and each of its arguments, other values are given one at a time: all other options of a
choice, both truth values, other numbers. Either the models of a small run differ from those of the defaults, or the
value is refused in a sentence that names the argument. An argument that is refused has an effect in the setting of
NEEDS.

The run has convolutions, matrices, vectors and gradient noise, three of five clients in each of four rounds, and three
local steps.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedfleet.algorithms.contract import Deferred, RunContext
from fedfleet.engine.config.registry import Registry, resolve, signature
from fedfleet.engine.errors import ConfigError
from tests.algorithms.driver import run, tree
from tests.algorithms.problems import Quadratic
from tests.methods import ON_ANY_MODEL as METHODS

ROUNDS, STEPS = 4, 3
TOLD = 16
"""The rounds that methods are told of: some need more of them than are run here."""
IN_GROUPS = {"per_fedavg": 6}
"""The local steps of methods that take them in groups."""
COHORTS = [[0, 1, 2], [1, 3, 4], [0, 2, 4], [0, 1, 3]]
EVERYONE = {"cfl": [[*range(5)]] * ROUNDS}
"""The cohorts of methods that compare the messages of all clients."""
SHAPES = {"first": (3, 4), "kernel": (4, 3, 2, 3), "dense": (12, 10), "b": (5,), "last.weight": (2, 5)}


@dataclass(frozen=True)
class Mixed(Quadratic):
    noise: float = 0.3

    @property
    def shapes(self):
        return SHAPES

    @property
    def rows(self):
        """Clients have 2, 3, … rows."""
        return [range(2 + i) for i in range(self.clients)]


PROBLEM = Mixed()
TABLES = Registry()

RATIO = {"ratio": 0.8}
NEAREST = {"ratio": 0.8, "nearest": True}
BASE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["fedmud", "fedmud_aad", "fedmud_f", "fedhm", "fedlmt"], RATIO),
    **dict.fromkeys(["fedmud_bkd", "fedmud_bkd_aad", "fedmud_bkd_f"], NEAREST),
    "fedpara": {**NEAREST, "rule": {"name": "sgd", "lr": 0.001}},  # its normal draws are large on so small layers
    "ef21_p": {"ratio": 0.3},
    "sparse_loco": {"density": 0.25},
    "fedbat": {"rule": {"name": "sgd", "lr": 0.003}},  # scales within their bounds
    "cfl": {"eps1": 100.0, "eps2": 0.0, "after": 0, "most": 3},  # cuts in the first rounds
}
"""Settings that all runs of a method have: ratios that this small model can reach."""

VALUES: dict[str, Any] = {
    "a": 0.3, "alpha": 0.3, "beta": 0.35, "beta2": 0.5, "betas": (0.5, 0.6), "epsilon": 0.5, "epsilon_g": 0.5,
    "eps": 50.0, "eta": 0.5, "first_lr": 0.02, "gamma": 0.05, "lr": 0.03, "matrix_lr": 0.03, "mu": 0.4, "outer_lr": 0.4,
    "outer_mu": 0.4, "phi": 0.3, "radius": 0.5, "ratio": 0.5, "rho": 0.3, "server_d": 0.005, "server_lr": 0.4,
    "server_u": 0.02, "sigma2": 3.0, "tau": 0.05, "v_init": 0.3, "vector_lr": 0.03, "w": 2.0, "weight_decay": 0.1,
    "c": 0.4, "condition": 3.0, "density": 0.5, "size": 16, "bits": 3, "decay": 0.35, "layers": 1, "fragments": 3,
    "overlap": 2, "reset": 2, "scale": "spectral", "aux": ("dense",), "ball": "svd",
    "rule": {"name": "momentum", "lr": 0.04, "mu": 0.5},
    "personal_rule": {"name": "momentum", "lr": 0.04, "mu": 0.5},
    "delta": 0.01, "lam": 0.4, "inner_steps": 2, "lr_inner": 0.3, "lr_alpha": 0.05, "alpha_decay": 0.5,
    "compression": {"name": "factors", "ratio": 0.8, "nearest": True}, "clusters": 4, "spread": 0.1, "q": 2.0, "L": 4.0,
    "base": "scaffold", "split": (1, 2), "floor": 0.1, "eps1": 1e-3, "eps2": 100.0, "least": 4, "after": 2, "most": 2,
    "tiles": 2, "b0": 0.6,
}  # fmt: skip
"""A value other than the default for each argument that is not a choice. It lies in the range of every method."""

OWN: dict[tuple[str, str], Any] = {
    ("fedmud_bkd_f", "ratio"): 0.2,
    ("fedpara", "ratio"): 0.3,
    **{
        (method, "compression"): {"name": "coded", "codec": "sign"}
        for method in ("data_parallel", "streaming_diloco", "eager_diloco")
    },
    ("mifa", "rule"): {"name": "sgd", "lr": 0.04},
    ("apfl", "rule"): {"name": "sgd", "lr": 0.04},
}
"""The same for single methods."""

UNLESS_GIVEN = {
    ("fafed", "first"): "plain",
    ("fednova", "effective"): "norm",
    **{(method, "scale"): "moonlight" for method in ("local_muon", "fedmuon_bc")},
    **{(method, "carry"): "keep" for method in ("diloco", "muloco")},
    ("streaming_diloco", "order"): "strided",
}
"""The value that an argument with the default None takes when it is not given."""

SCALES = ("none", "jordan", "moonlight", "spectral")
STATEFUL = {"rule": {"name": "momentum", "lr": 0.04, "mu": 0.5}}
SERVERS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedexp", "fedexp_m", "feddu_adagrad", "feddu_adam")
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    **{(method, "mu"): {"local": "prox"} for method in SERVERS},
    **{(method, "carry"): STATEFUL for method in ("fedavg", "fedprox", "scaffold", "local_only")},
    **{("stem", name): {"schedule": "stem"} for name in ("w", "sigma2", "c")},
    ("ef21_p", "beta"): {"memory": "shift"},
    ("fedbat", "feedback"): {"both_ways": True},
    ("fednova", "effective"): STATEFUL,
    ("fedsam", "eta"): {"kind": "asam"},
    ("ditto", "base"): {"personal_rule": {"name": "sgd", "lr": 0.1}},
    ("per_fedavg", "delta"): {"variant": "hf"},
    **{(method, "condition"): {"parameter_free": True} for method in ("fed_nsgda_m", "fedmuon_da")},
}
"""The setting in which an argument has an effect, if it is refused together with the defaults."""

COINCIDE = {("scaffold", "control"): STATEFUL, ("ifca", "clusters"): {"spread": 0.3}}
"""The setting in which all choices of an argument differ, if some of them agree under the defaults: without momentum,
SCAFFOLD's control variates from the displacement are the means of the gradients, and all clients choose the first one
of IFCA's models where the others begin too far away."""
NEEDS |= COINCIDE

RECORDED = {("fedmuon_bc", "kappa")}
"""Arguments that change the record alone."""

INERT = {
    ("stem", "a"): {"schedule": "stem"},
    ("stem", "first_lr"): {"start": "zeros"},
    ("fafed", "first"): {"start": "zeros"},
    ("fess_gda", "beta"): {"rho": 0.0},
    ("fedlmt", "a"): {"draw": "fan_out"},
    ("fedpara", "a"): {"draw": "fan_in"},
    ("fedbat", "rho"): {"phi": 1.0},
    ("fedbat", "feedback"): {"both_ways": False},
    ("ef21_p", "beta"): {"memory": "error"},
    ("fedsam", "eta"): {"kind": "sam"},
    ("qffl", "floor"): {"q": 0.0},
    **{("apfl", name): {"update": "never"} for name in ("lr_alpha", "alpha_decay")},
    **{
        (method, name): {"parameter_free": True}
        for method in ("fed_nsgda_m", "fedmuon_da")
        for name in ("lr", "gamma", "beta")
    },
    ("fedmuon_ma", "matrix_lr"): {"parameter_free": True},
    ("fedmuon_ma", "vector_lr"): {"parameter_free": True},
    ("fedmuon_ma", "beta"): {"parameter_free": True},
    **{(method, "server_lr"): {"gamma": 0.2} for method in ("fedavg_m", "fedavg_vr", "scaffold_m", "scaffold_vr")},
    **{(method, "server_lr"): {"gamma": 0.2} for method in ("padamfed", "padamfed_vr")},
    **{
        (method, name): {"norm": norm}
        for method in ("local_muon", "fedmuon_bc")
        for name, norm in (("vector_lr", "max"), ("ball", "max"), ("scale", "euclidean"), ("aux", "euclidean"))
    },
    ("fedmuon_bc", "kappa"): {"norm": "euclidean"},
    **{(method, "carry"): {"rule": {"name": "sgd", "lr": 0.1}} for method in ("diloco", "muloco")},
    ("streaming_diloco", "layers"): {"fragments": 2},
    ("streaming_diloco", "order"): {"fragments": [["*"]]},
}
"""The setting in which an argument can have no effect, and must be refused."""


@functools.cache
def arguments(method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return signature(resolve(METHODS[method]))


def others(method: str, name: str) -> list[Any]:
    """Values of an argument other than its default."""
    hints, parameters = arguments(method)
    hint, default = hints[name], UNLESS_GIVEN.get((method, name), parameters[name].default)
    options = [option for part in (hint, *typing.get_args(hint)) for option in literals(part)]
    if options:
        return [option for option in dict.fromkeys(options) if option != default]
    if hint is bool:
        return [not default]
    if name == "scale":
        return [scale for scale in SCALES if scale != default]
    assert name in VALUES, f"{method}.{name} is a new argument: give it a value in VALUES"
    return [OWN.get((method, name), VALUES[name])]


def literals(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def another(seed: int) -> Any:
    """Another model before round 1."""
    return tree(PROBLEM.start) * (1 + 0.1 * (seed % 7))


def outcome(method: str, **given: Any) -> torch.Tensor:
    """The models after all rounds, and those of the clients at the end; ConfigError if the arguments are refused."""
    spec, count = {"name": method, **BASE.get(method, {}), **given}, IN_GROUPS.get(method, STEPS)
    try:
        built = TABLES.build("METHODS", spec, "method")
        if isinstance(built, Deferred):
            built = built.build(RunContext(3, 5, TOLD, count, 3, tree(PROBLEM.start).layout, drawn=another))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    cohorts = EVERYONE.get(method, COHORTS)
    result = run(built, PROBLEM, cohorts, {(r, i): count for r, cohort in enumerate(cohorts) for i in cohort})
    models = torch.cat([model.flat for model in [*result.models(), *result.own_models()]])
    assert models.isfinite().all(), f"{spec} diverges, and NaN equals nothing: choose other values"
    return models


@functools.cache
def by_default(method: str) -> torch.Tensor:
    """The models after all rounds with the defaults of all arguments."""
    return outcome(method)


CASES = [(method, name) for method in METHODS for name in arguments(method)[1]]


@pytest.mark.parametrize(("method", "name"), CASES, ids=lambda part: part)
def test_an_argument_has_an_effect_or_is_refused(method: str, name: str):
    if name == "nearest":
        return  # see below
    context = NEEDS.get((method, name), {})
    before = outcome(method, **context) if context else by_default(method)
    for value in others(method, name):
        if (method, name) not in COINCIDE and context:
            with pytest.raises(ConfigError, match=rf"\b{name}\b"):
                outcome(method, **{name: value})
        told = f"{method}.{name} has no effect: {value!r}"
        same = torch.equal(outcome(method, **context, **{name: value}), before)
        assert same == ((method, name) in RECORDED), told


@pytest.mark.parametrize(("method", "name"), INERT, ids=lambda part: part)
def test_an_argument_is_refused_where_it_can_have_no_effect(method: str, name: str):
    """`carry: reset` is accepted for a rule without a state, because such a rule is reset anyway."""
    context = INERT[method, name]
    outcome(method, **context)
    for value in others(method, name):
        if name == "carry" and value == "reset":
            continue
        with pytest.raises(ConfigError, match=rf"\b{name}\b"):
            outcome(method, **context, **{name: value})


COMPRESSED = [method for method, name in CASES if name == "nearest"]


@pytest.mark.parametrize("method", COMPRESSED)
def test_nearest_takes_a_ratio_that_cannot_be_reached(method: str):
    with pytest.raises(ConfigError, match="nearest: true"):
        outcome(method, ratio=0.01, nearest=False)
    assert outcome(method, ratio=0.01, nearest=True).isfinite().all()
