"""Settings out of range are refused at construction, by name and value."""

import pytest

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedmuon_bc import fedmuon_bc
from fedfleet.algorithms.local_muon import local_muon
from fedfleet.algorithms.parts.muon import NewtonSchulz, Sign, Spectral, lmo, muon
from fedfleet.algorithms.parts.rules import Adam, Clip, Momentum, Normalised, Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.scaffold import scaffold

# builder, setting, refused value, key to be named in the message
BAD = [
    (Sgd, "lr", 0.0, "lr"),
    (Sgd, "lr", -0.5, "lr"),
    (Sgd, "lr", float("nan"), "lr"),
    (Momentum, "lr", -0.5, "lr"),
    (Momentum, "mu", 1.0, "mu"),
    (Momentum, "mu", -0.25, "mu"),
    (Adam, "lr", -0.5, "lr"),
    (Adam, "eps", 0.0, "eps"),
    (Adam, "betas", (1.0, 0.9), "beta1"),
    (Adam, "betas", (0.9, -0.5), "beta2"),
    (Adam, "weight_decay", -0.5, "weight_decay"),
    (Normalised, "lr", -0.5, "lr"),
    (Normalised, "eps", 0.0, "eps"),
    (Clip, "radius", 0.0, "radius"),
    (Sign, "lr", -0.5, "lr"),
    (Spectral, "lr", -0.5, "lr"),
    (Spectral, "scale", "huge", "scale"),
    (Spectral, "weight_decay", -0.5, "weight_decay"),
    (NewtonSchulz, "scheme", "newton", "scheme"),
    (NewtonSchulz, "iterations", -1, "iterations"),
    (NewtonSchulz, "iterations", 11, "iterations"),
    (NewtonSchulz, "dtype", "float8", "dtype"),
    (muon, "lr", -0.5, "lr"),
    (muon, "mu", 1.5, "mu"),
    (muon, "scale", "huge", "scale"),
    (lmo, "norm", "nuclear", "norm"),
    (lmo, "matrix_lr", -0.5, "matrix_lr"),
    (lmo, "vector_lr", -0.5, "vector_lr"),
    (Mean, "over", "some", "over"),
    (Mean, "lr", -0.5, "lr"),
    (fedavg, "carry", "drop", "carry"),
    (fedavg, "over", "some", "over"),
    (fedavg, "server_lr", -0.5, "(server_)?lr"),
    (scaffold, "control", "first", "control"),
    (scaffold, "start", "warm", "start"),
    (scaffold, "over", "some", "over"),
    *[
        (method, *case)
        for method in (local_muon, fedmuon_bc)
        for case in (
            ("alpha", 0.0, "alpha"),
            ("alpha", 1.5, "alpha"),
            ("norm", "nuclear", "norm"),
            ("start", "warm", "start"),
            ("over", "some", "over"),
            ("scale", "huge", "scale"),
            ("matrix_lr", -0.5, "matrix_lr"),
            ("vector_lr", -0.5, "vector_lr"),
        )
    ],
]


@pytest.mark.parametrize(("build", "setting", "value", "key"), BAD, ids=lambda v: getattr(v, "__name__", str(v)))
def test_bad_settings_are_refused_by_name_and_value(build, setting, value, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b") as refused:
        build(**{setting: value})
    shown = value[0 if key == "beta1" else 1] if isinstance(value, tuple) else value
    assert str(shown) in str(refused.value)
