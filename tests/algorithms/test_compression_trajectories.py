"""Whole trajectories of the methods that compress equal the slow reference, which gets the same random factors: partial
participation, unequal local steps, noisy gradients, convolutions and matrices. TOLERANCE: see `keyed`."""

import pytest

from fedfleet.algorithms.ef21_p import ef21_p
from fedfleet.algorithms.fedbat import fedbat
from fedfleet.algorithms.fedhm import fedhm
from fedfleet.algorithms.fedlmt import fedlmt
from fedfleet.algorithms.fedmud import fedmud
from fedfleet.algorithms.fedmud_aad import fedmud_aad
from fedfleet.algorithms.fedmud_bkd import fedmud_bkd
from fedfleet.algorithms.fedmud_bkd_aad import fedmud_bkd_aad
from fedfleet.algorithms.fedmud_bkd_f import fedmud_bkd_f
from fedfleet.algorithms.fedmud_f import fedmud_f
from fedfleet.algorithms.fedpara import fedpara
from fedfleet.algorithms.parts.codecs import RandK
from fedfleet.algorithms.parts.rules import Momentum, Sgd
from fedfleet.workloads import counted
from tests.algorithms.compressed import SEED, draw, forms, last_key, pieces, play, step_key, trained
from tests.algorithms.driver import arrays
from tests.algorithms.keyed import LAYERS, same_paths
from tests.reference import codecs, compression, rules
from tests.reference import fedbat as slow_fedbat

INNER = ["V", "U"]
RULE = Sgd(0.05)


def paths(method):
    return [arrays(model) for model in trained(method).models()]


MUD = {
    "mud": (fedmud, "mud"),
    "bkd": (fedmud_bkd, "mud"),
    "aad": (fedmud_aad, "aad"),
    "bkd_aad": (fedmud_bkd_aad, "aad"),
    "f": (fedmud_f, "frozen"),
    "bkd_f": (fedmud_bkd_f, "frozen"),
}


@pytest.mark.parametrize("reset", [1, 2, 0])
@pytest.mark.parametrize("name", MUD)
def test_fedmud(name, reset):
    recipe, couple = MUD[name]
    method = recipe(RULE, 0.8, 0.7, reset, layers="all", nearest=True)
    slow = play(compression.fedmud, forms(method), draw(method, reset), couple=couple, reset=reset or 99)
    same_paths(paths(method), slow.x)


def test_fedmud_permuted_inner_momentum_and_server_step():
    method = fedmud_aad(Momentum(0.05, 0.5), 0.9, 0.7, 1, "permuted", nearest=True, server_lr=0.7)
    assert list(forms(method)) == INNER
    rule = rules.Momentum(0.05, 0.5)
    slow = play(compression.fedmud, forms(method, "permuted"), draw(method, 1), rule=rule, couple="aad", server_lr=0.7)
    same_paths(paths(method), slow.x)


def test_fedlmt():
    method = fedlmt(RULE, 0.8, 0.7, layers="all", nearest=True)
    same_paths(paths(method), play(compression.fedlmt, forms(method, "permuted"), draw(method)).x)


@pytest.mark.parametrize("form", ["tensor", "matrix"])
def test_fedpara(form):
    method = fedpara(RULE, 0.9, 0.9, form=form, layers="all", nearest=True)
    made = forms(method, kind="hadamard")
    if form == "matrix":
        made["kernel"] = type(made["V"])(made["kernel"].rank)
    same_paths(paths(method), play(compression.fedpara, made, draw(method)).x)


def test_fedhm():
    method = fedhm(RULE, 0.8, layers="all", nearest=True)
    same_paths(paths(method), play(compression.fedhm, forms(method, "permuted")).x)


# --- codecs -----------------------------------------------------------------------------------------------------------
def masks(groups, ratio):
    """The entries that a client sends."""

    def draw(r, i, group, name, shape):
        number = groups.index(group) if group else 0
        key = counted.key(counted.key(last_key(i, r), "up"), number)
        return RandK(ratio).places(key, shape[0]).numpy()

    return draw


@pytest.mark.parametrize("evaluate", ["x_hat", "x"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_ef21_p(scope, evaluate):
    method = ef21_p(RULE, 0.3, unbiased=scope == "layer", masks=scope, layers="all", evaluate=evaluate)
    slow = play(
        codecs.ef21_p,
        LAYERS,
        0.3,
        masks(LAYERS, 0.3),
        scope=scope,
        scaled=scope == "layer",
        evaluate={"x_hat": "lagged", "x": "exact"}[evaluate],
    )
    same_paths(paths(method), slow.x)


def test_ef21_p_with_shifts():
    method = ef21_p(RULE, 0.4, "shift", 0.3)
    slow = play(codecs.ef21_p, INNER, 0.4, masks(INNER, 0.4), shift=0.3)
    same_paths(paths(method), slow.x)


def uniforms(names):
    def draw(r, i, layer, name, shape):
        if name == "down":
            key = counted.key(counted.key(SEED, "downlink", r + 2), names.index(layer))
            return (
                counted.uniform(key, int(shape[0] * shape[1] * (shape[2] * shape[3] if len(shape) == 4 else 1)))
                .view(shape)
                .numpy()
            )
        if name == "upload":
            return pieces(counted.key(last_key(i, r), "up"), names)[layer]
        return pieces(counted.key(step_key(i, r, int(name.split()[1])), "binarise"), names)[layer]

    return draw


@pytest.mark.parametrize(("both_ways", "feedback"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("layers", ["inner", "all"])
def test_fedbat(layers, both_ways, feedback):
    method = fedbat(RULE, 0.5, 6.0, both_ways, feedback, layers)
    names = LAYERS if layers == "all" else INNER
    slow = play(slow_fedbat.fedbat, names, uniforms(names), down="binary" if both_ways else "whole", feedback=feedback)
    same_paths(paths(method), slow.x)


@pytest.mark.parametrize("phi", [0.0, 1.0])
def test_fedbat_never_or_always_binarises(phi):
    method = fedbat(Momentum(0.05, 0.5), phi, layers="all")
    slow = play(slow_fedbat.fedbat, LAYERS, uniforms(LAYERS), phi=phi, rho=2.0, rule=rules.Momentum(0.05, 0.5))
    same_paths(paths(method), slow.x)
