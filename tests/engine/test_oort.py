"""Oort: its draws against a slow reference, and the losses of single examples that its utility needs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.cohorts.oort import Oort
from fedfleet.engine.cohorts.samplers import Feedback, uniform_draw
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads import counted

from ..reference.oort import Reference, Settings, root_mean_square
from .test_samplers import ask
from .test_samplers import digits as equal_clients
from .test_virtual_clock import digits

CLIENTS, SIZE = 40, 6


def draws_of(seed):
    """The random numbers of the engine for the reference."""

    def uniform(purpose, client, number):
        key = counted.key(seed, purpose, np.array([client]), number)
        return float(counted.uniform(torch.from_numpy(key), 1)[0, 0])

    def choice(purpose, number, clients, count):
        return uniform_draw(ask(number, seed=seed), purpose, np.array(clients), count).tolist()

    return uniform, choice


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 3},
        {"window": 4, "impute": True, "cut": 0.95, "explore": 0.5},
        {"window": 2, "percentile": 90.0, "step": 30.0, "wide": True, "cut": 1.0, "explore_least": 0.0, "among": 1.5},
    ],
)
def test_the_draws_are_those_of_the_reference(settings):
    """60 rounds in which some clients are offline, some of those drawn are cut off, and some losses are 0."""
    random = np.random.default_rng(len(settings))
    sizes = random.integers(1, 90, CLIENTS)
    durations = random.lognormal(0, 1, CLIENTS)
    loss = random.exponential(1, CLIENTS) * (random.random(CLIENTS) < 0.9)
    full = np.minimum(sizes, 5 * 10)
    sampler = Oort(**settings)
    reference = Reference(Settings(**settings), SIZE + 2, full.tolist(), *draws_of(1))
    state, moved, imputed = sampler.start(CLIENTS, SIZE), set(), 0
    for number in range(1, 61):
        eligible = np.sort(random.choice(CLIENTS, 34, replace=False))
        one = ask(number, sizes, SIZE, eligible=eligible, seed=1, spares=2, duration=lambda: durations)
        draw = sampler.draw(state, one)
        assert draw.clients.tolist() == reference.draw(number, eligible.tolist(), durations.tolist())
        order = random.permutation(draw.clients)
        used, late = np.sort(order[:SIZE]), np.sort(order[SIZE + 1 :])  # one of the eight is lost
        value = loss[used] * 0.97**number
        reference.told(number, dict(zip(used.tolist(), value.tolist(), strict=True)), late.tolist())
        imputed += len(late) if sampler.impute else 0
        state = sampler.told(state, one, draw, Feedback(used, np.full(SIZE, np.nan), value, late))
        assert state["percentile"][0] == reference.percentile
        moved.add(reference.percentile)
        for client, utility in reference.utility.items():
            assert state["utility"][client] == pytest.approx(utility, rel=1e-12)
            assert state["last"][client] == reference.last[client]
        assert set(np.flatnonzero(state["last"])) == set(reference.last)
    assert len(moved) > 1
    assert bool(imputed) == sampler.impute


def feedback_of(monkeypatch, made):
    """(the result, what Oort was told after each round) of a run."""
    told, plain = [], Oort.told

    def tell(self, state, ask, draw, feedback):
        told.append(feedback)
        return plain(self, state, ask, draw, feedback)

    monkeypatch.setattr(Oort, "told", tell)
    return run(made), told


WORK = {"local": {"epochs": 2, "batch": 8}, "cohort": 6, "rounds": 2}


def with_oort(lr, oort=None, **engine):
    method = {"name": "fedavg", "rule": {"name": "sgd", "lr": lr}}
    made = equal_clients({"name": "oort", **(oort or {})}, WORK, method=method)
    return made.model_copy(update={"engine": made.engine.model_copy(update=engine)})


@pytest.mark.parametrize("engine", [{"block": 1}, {"block": 4}, {"block": 4, "vectorise": False}], ids=str)
def test_the_root_mean_square_is_that_of_all_examples(monkeypatch, engine):
    """With steps that do not move the model, it is that of the client's rows at the initial model. The clients have
    unequal numbers of rows, and short batches at the end of an epoch."""
    made = with_oort(1e-30, **engine)
    told = feedback_of(monkeypatch, made)[1]
    run_spec = prepare(made, "losses")
    split, model = run_spec.split(), dict(run_spec.initial_model().items())
    offsets, all_rows = split.client_index.offsets, split.client_index.rows
    assert len({size % 8 for size in split.client_index.sizes.tolist()}) > 1
    for feedback in told:
        for client, rms in zip(feedback.clients.tolist(), feedback.rms.tolist(), strict=True):
            rows = all_rows[offsets[client] : offsets[client + 1]]
            batch = {name: torch.as_tensor(column[rows]) for name, column in split.train.items()}
            losses = run_spec.workload.losses(model, batch).tolist()
            assert rms == pytest.approx(root_mean_square([losses]), rel=1e-6)


def test_kernels_and_blocks_agree_and_the_training_is_the_same(monkeypatch):
    found = [feedback_of(monkeypatch, with_oort(0.3, **e))[1][0] for e in ({"block": 1}, {"block": 6})]
    assert found[0].rms == pytest.approx(found[1].rms, rel=1e-4)
    assert (found[0].rms > found[0].loss).all()  # by Jensen's inequality; unequal losses make it strict
    one_round = [with_oort(0.3, {"utility": utility}, block=4) for utility in ("rms", "mean")]
    one_round = [e.model_copy(update={"federation": e.federation.model_copy(update={"rounds": 1})}) for e in one_round]
    assert len({run(made).model_sha256 for made in one_round}) == 1


def test_stragglers_are_told(monkeypatch):
    """With over-selection, those that are cut off are told; lost ones are not."""
    systems = {"devices": {"name": "lognormal", "sigma": 1.0}, "dropout": 0.2}
    plan = {"sampler": {"name": "oort", "impute": True}, "pace": {"select": 1.5}, "rounds": 4}
    result, told = feedback_of(monkeypatch, digits(plan, systems))
    assert [len(feedback.late) for feedback in told] == result.rows.column("client/late")[0].tolist()
    assert sum(len(feedback.late) for feedback in told) > 0
    assert all(not set(feedback.late) & set(feedback.clients) for feedback in told)


def test_chains_have_no_losses_of_single_examples():
    message = "engine.kernels: they give no losses of single examples, which the sampler needs"
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(with_oort(0.1, kernels="chain"), "test")
    assert not Registry().build("SAMPLERS", {"name": "oort", "utility": "mean"}, "federation.sampler").needs_rms
