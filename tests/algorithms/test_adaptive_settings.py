"""Settings out of range are refused by the server-adaptive, heavy-tail and Muon methods, as in `test_settings`."""

import pytest

from fedfleet.algorithms.adagrad_biclip import adagrad_biclip
from fedfleet.algorithms.adam_biclip import adam_biclip
from fedfleet.algorithms.avg_biclip import avg_biclip
from fedfleet.algorithms.bi2clip import bi2clip
from fedfleet.algorithms.diloco import diloco
from fedfleet.algorithms.fedadagrad import fedadagrad
from fedfleet.algorithms.fedadam import fedadam
from fedfleet.algorithms.fedavgm import fedavgm
from fedfleet.algorithms.feddu_adagrad import feddu_adagrad
from fedfleet.algorithms.feddu_adam import feddu_adam
from fedfleet.algorithms.fedexp import fedexp
from fedfleet.algorithms.fedexp_m import fedexp_m
from fedfleet.algorithms.fedmuon_ma import fedmuon_ma
from fedfleet.algorithms.fedyogi import fedyogi
from fedfleet.algorithms.muloco import muloco
from fedfleet.algorithms.parts.biclip import BiClip
from fedfleet.algorithms.parts.muon_adamw import muon_adamw
from fedfleet.algorithms.rmsprop_biclip import rmsprop_biclip

FEDOPT = (fedadagrad, fedadam, fedyogi, adagrad_biclip, adam_biclip, rmsprop_biclip)
ADAPTED = (fedavgm, fedadagrad, fedadam, fedyogi, fedexp, fedexp_m, feddu_adagrad, feddu_adam)
BAD = [
    *[(m, *case) for m in ADAPTED for case in (("local", "sgd", "local"), ("evaluate", "best", "evaluate"))],
    *[(m, "mu", -0.5, "mu") for m in ADAPTED],
    *[
        (m, *case)
        for m in FEDOPT
        for case in (("server_lr", 0.0, "server_lr"), ("tau", -0.5, "tau"), ("v_init", -0.5, "v_init"))
    ],
    *[(m, "betas", (1.0, 0.9), "beta1") for m in (fedadam, fedyogi, adam_biclip, feddu_adam)],
    *[(m, "betas", (0.9, 1.5), "beta2") for m in (fedadam, fedyogi, adam_biclip, feddu_adam)],
    (rmsprop_biclip, "beta2", 1.0, "beta2"),
    (fedavgm, "beta", 1.0, "beta"),
    (fedexp_m, "beta", 1.0, "beta"),
    *[(m, "epsilon", -0.5, "epsilon") for m in (fedexp, fedexp_m, feddu_adagrad, feddu_adam)],
    *[(m, "epsilon_g", -0.5, "epsilon_g") for m in (feddu_adagrad, feddu_adam)],
    (BiClip, "lr", 0.0, "lr"),
    (BiClip, "d", -0.5, "d"),
    (BiClip, "d", 0.5, "d <= u"),
    (BiClip, "u", 0.0, "u"),
    (BiClip, "mode", "rows", "mode"),
    (BiClip, "weight_decay", -0.5, "weight_decay"),
    (avg_biclip, "server_lr", -0.5, "(server_)?lr"),
    (bi2clip, "server_lr", -0.5, "server_lr"),
    (bi2clip, "server_d", 0.5, "server_d"),
    (bi2clip, "server_u", -0.5, "server_u"),
    (bi2clip, "server_mode", "rows", "server_mode"),
    *[(m, "outer_lr", 0.0, "outer_lr") for m in (diloco, muloco)],
    *[(m, "outer_mu", 1.0, "outer_mu") for m in (diloco, muloco)],
    *[(m, "carry", "drop", "carry") for m in (diloco, muloco)],
    (muon_adamw, "lr", 0.0, "lr"),
    (muon_adamw, "mu", 1.0, "mu"),
    (muon_adamw, "scale", "huge", "scale"),
    (fedmuon_ma, "matrix_lr", 0.0, "matrix_lr"),
    (fedmuon_ma, "vector_lr", -0.5, "vector_lr"),
    (fedmuon_ma, "beta", 0.0, "beta"),
    (fedmuon_ma, "beta", 1.5, "beta"),
    (fedmuon_ma, "start", "warm", "start"),
    (fedmuon_ma, "scale", "huge", "scale"),
    (fedmuon_ma, "weight_decay", -0.5, "weight_decay"),
]


@pytest.mark.parametrize(("build", "setting", "value", "key"), BAD, ids=lambda v: getattr(v, "__name__", str(v)))
def test_bad_settings_are_refused_by_name_and_value(build, setting, value, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b") as refused:
        build(**{setting: value})
    shown = value[0 if key == "beta1" else 1] if isinstance(value, tuple) else value
    assert str(shown) in str(refused.value)
