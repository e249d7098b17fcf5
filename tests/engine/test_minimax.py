"""Min-max problems in the engine: sign and groups under vmap, the points that methods reach or miss on saddles,
resuming, Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.runs.prepare import prepare
from fedfleet.tune.cli import main
from tests.faults.runs import Watch, interrupt

METHODS = (
    "local_sgda",
    "local_sgdam",
    "fed_sgda_m",
    "sagda",
    "fess_gda",
    "fed_nsgda_m",
    "fedmuon_da",
    "fed_sgda_clip",
)
methods = pytest.mark.parametrize("method", METHODS)
RATES = {"primal": 0.02, "dual": 0.1}


def made(workload: Any, method: dict[str, Any], plan: dict[str, Any], **engine: Any) -> Experiment:
    return experiment(
        {
            "workload": workload,
            "method": method,
            "federation": {"local": {"steps": 5, "batch": 1}, **plan},
            "engine": {"backend": "local", "dtype": "float64", **engine},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


def auc(method: str, rounds: int = 2, **engine: Any) -> Experiment:
    """An experiment with 6 clients that have different shares of positives, and therefore unequal sizes; 4 of them in
    each round."""
    ratios = [0.02, 0.04, 0.05, 0.06, 0.07, 0.09]
    rare = {"name": "positive_ratio", "ratios": ratios, "positive": 3}
    of = {"name": "digits", "model": {"name": "mlp", "hidden": [8]}, "partition": rare}
    plan = {"clients": 6, "cohort": 4, "rounds": rounds, "local": {"steps": 3, "batch": 16}}
    return made({"name": "auc", "of": of, "positive": 3}, {"name": method, "lr": RATES}, plan, **{"block": 2, **engine})


# --- AUC --------------------------------------------------------------------------------------------------------------
@methods
def test_alone_equals_together(method):
    """A block adds up in another order than one client alone, which Newton-Schulz iterations amplify: the tolerance in
    float64 is 1e-9."""
    together, alone = run(auc(method)), run(auc(method, block=1, vectorise=False))
    start = prepare(auc(method), "test").initial_model()
    for name, value in together.model.items():
        np.testing.assert_allclose(value, alone.model[name], 1e-9, 1e-9, err_msg=name)
        assert not torch.equal(value, start[name]), f"{name} did not move"
    assert together.metrics["eval/auc"] == pytest.approx(alone.metrics["eval/auc"], abs=1e-12)


@methods
def test_resumed(method, tmp_path):
    with pytest.raises(Interrupted):
        run(auc(method), tmp_path / "run", [Watch(r1=interrupt)])
    assert resume(auc(method), tmp_path / "run").model_sha256 == run(auc(method)).model_sha256


def test_two_workers_on_ray(ray_here):
    on_ray = run(auc("fed_nsgda_m", backend="ray", workers=2, cpus=1))
    assert on_ray.model_sha256 == run(auc("fed_nsgda_m")).model_sha256


def test_it_learns():
    """The AUC rises from about a half to 0.95 and more, and w1, w2 and w3 in [-1, 1] are near their best values."""
    longer = auc("fed_nsgda_m", 40, block="auto")
    first, last = run(auc("fed_nsgda_m", 1)).metrics["eval/auc"], run(longer)
    assert first < 0.8
    assert last.metrics["eval/auc"] > 0.95
    assert last.metrics["eval/w_gap"] < 0.25


def test_show_has_the_groups(tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "workload: {name: auc, of: {name: digits, model: {name: mlp, hidden: [8]}}}\nmethod: fed_nsgda_m\n", "utf-8"
    )
    text = CliRunner().invoke(main, ["show", str(path)]).stdout
    lines = {line.split()[0]: line.split() for line in reversed(text.splitlines()) if line.strip()}
    assert lines["dual.w3"][1:] == ["()", "1", "vector"]
    assert (lines["primal"][1], lines["dual"][1], lines["total"][1]) == ("612", "1", "613")
    assert f"down {2 * 613 * 4:,} B" in text


# --- saddles ----------------------------------------------------------------------------------------------------------
SADDLE = {"name": "saddle", "heterogeneity": 3.0, "condition": 4.0}
LR, STEPS = {"primal": 0.1, "dual": 0.2}, 5


def saddle(method: dict[str, Any], copies: int = 1, rounds: int = 100, **federation: Any) -> Experiment:
    plan = {"clients": 8, "cohort": 8, "rounds": rounds, **federation}
    return made({**SADDLE, "copies": copies}, method, plan)


def stop(copies: int) -> tuple[np.ndarray, np.ndarray]:
    """(where LocalSGDA rests, the solution), (2 d,) each, in (u, v). A client's K steps are affine: its end is
    z_i + (I - D J_i)^K (z - z_i) with D the step sizes, so that the mean rests where mean_i (I - (I - D J_i)^K)
    (z - z_i) = 0. With copies, a step in u is the same as with one."""
    workload: Any = prepare(saddle({"name": "local_sgda"}, copies), "test").workload
    system = workload.system(0, 8)
    eye = np.eye(2 * workload.dim)
    rates = np.diag(np.repeat([LR["primal"], LR["dual"]], workload.dim))
    moves = np.stack([eye - np.linalg.matrix_power(eye - rates @ field, STEPS) for field in system.fields])
    return np.linalg.solve(moves.sum(0), np.einsum("nij,nj->i", moves, system.own)), system.solution


def reached(result: Any) -> np.ndarray:
    """(u, v) of a run's model."""
    return np.concatenate([(m := result.model[name].numpy()).sum(0) / len(m) ** 0.5 for name in ("primal.x", "dual.y")])


@pytest.mark.parametrize("copies", [1, 3], ids=["strongly convex and concave", "PL"])
def test_local_sgda_rests_at_a_biased_point(copies):
    """T16. Eigenvalues are at least 1/4: 100 rounds of five contractions by 1 - 0.1 / 4 leave 4e-6 of the distance."""
    biased, solution = stop(copies)
    assert np.linalg.norm(biased - solution) > 0.2
    end = reached(run(saddle({"name": "local_sgda", "lr": LR}, copies)))
    np.testing.assert_allclose(end, biased, atol=1e-5)


@pytest.mark.parametrize("cohort", [8, 3])
@pytest.mark.parametrize("method", ["sagda", "fed_sgda_clip"])
def test_controlled_methods_reach_the_solution(method, cohort):
    """T16, with copies and exact gradients; clipping has no effect in the end because directions shrink. All clients,
    or three of eight in each round; a plain loop over the same matrices is within 1e-6 after 100 rounds for any
    cohorts."""
    more = {"radius": 1.0} if method == "fed_sgda_clip" else {}
    end = reached(run(saddle({"name": method, "lr": LR, **more}, 3, cohort=cohort)))
    np.testing.assert_allclose(end, stop(3)[1], atol=1e-4)


@pytest.mark.parametrize("method", ["fed_nsgda_m", "fedmuon_da"])
def test_normalised_methods_end_nearer_than_the_bias(method):
    """Their steps have a fixed length, which must go to zero: it is multiplied by 0.95 in every round, from 0.1 to
    6e-4. The remaining distance is of the order of some steps of the last rounds, at most a third of LocalSGDA's
    bias."""
    biased, solution = stop(3)
    lr = {"schedule": "exponential", "start": 0.1, "decay": 0.95}
    end = reached(run(saddle({"name": method, "lr": lr}, 3)))
    assert np.linalg.norm(end - solution) < np.linalg.norm(biased - solution) / 3


def test_a_dual_that_goes_the_same_way_diverges():
    """The sign is in the workload: without it, both groups would descend, and the model would be far from the
    saddle."""
    workload: Any = prepare(saddle({"name": "local_sgda"}), "test").workload
    system = workload.system(0, 8)
    wrong = system.fields.mean(0)
    wrong[workload.dim :] *= -1
    assert np.linalg.eigvals(wrong).real.min() < 0 < np.linalg.eigvals(system.fields.mean(0)).real.min()


# --- mistakes ---------------------------------------------------------------------------------------------------------
MISTAKES = [
    ({"name": "local_sgda", "lr": {"primal": 0.1}}, "method.lr.dual is missing; give primal and dual"),
    ({"name": "local_sgda", "lr": {"primal": 0.1, "duel": 1, "dual": 1}}, "method.lr.duel is not a key"),
    ({"name": "local_sgda", "lr": {"primal": "a", "dual": 1}}, "method.lr.primal must be a valid number"),
    ({"name": "local_sgda", "lr": {"primal": 0.1, "dual": 0}}, "lr > 0 must hold"),
    ({"name": "fed_nsgda_m", "beta": {"primal": 0.1, "dual": 2}}, "0 < beta <= 1 must hold"),
    ({"name": "fed_sgda_m", "a": 1.5}, "0 <= a <= 1 must hold, got a=1.5"),
    ({"name": "local_sgda", "lr": "fast"}, "method.lr must be a valid number"),
]


@pytest.mark.parametrize(("method", "said"), MISTAKES)
def test_mistakes_are_told(method, said):
    with pytest.raises(ConfigError) as told:
        prepare(made("saddle", method, {"clients": 4, "cohort": 4, "rounds": 1}), "test").method()
    assert said in str(told.value)


def test_fess_gda_with_epochs():
    told = made("saddle", {"name": "fess_gda"}, {"clients": 4, "cohort": 4, "local": {"epochs": 1}})
    with pytest.raises(ConfigError, match=r"method: rho > 0 needs federation\.local\.steps, got epochs, rho=0\.1"):
        prepare(told, "test").method()


def test_a_schedule_for_each_group():
    method = {"name": "local_sgda", "lr": {"primal": {"schedule": "exponential", "start": 1, "decay": 0.5}, "dual": 3}}
    run_spec = prepare(made("saddle", method, {"clients": 4, "cohort": 4}), "test")
    rates: Any = [run_spec.method(round) for round in (1, 3)]
    assert [(m.rule.lr.primal, m.rule.lr.dual) for m in rates] == [(1.0, 3.0), (0.25, 3.0)]
