"""The stage in the engine: the same bits on every backend, drops, resumed runs, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.attacks.poisoning import Backdoor
from fedfleet.algorithms.table import AGGREGATORS, ATTACKS
from fedfleet.engine import Result, resume, run
from fedfleet.engine.aggregation.message_rows import vectors_of
from fedfleet.engine.config.registry import resolve, signature
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Diverged
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.run_spec import RunSpec
from tests.faults.runs import cohort_of, plan, rule, setting

NNM_KRUM = {"name": "multi_krum", "f": 2, "before": ["nnm"]}


def spec(
    aggregate: Any, backend: str = "local", method: Any = "scaffold", attack: Any = None, **federation: Any
) -> Experiment:
    return experiment(
        {
            "workload": {"name": "digits"},
            "method": method,
            "aggregate": aggregate,
            "attack": attack,
            "federation": {
                "clients": 20, "cohort": 10, "rounds": 3, "local": {"steps": 2, "batch": 8}, **federation,
            },
            "engine": {"backend": backend, "workers": 2, "block": 3},
            "tracking": {"uri": "none"},
            "evaluate": {"every": 0},
        }
    )  # fmt: skip


def same(one: Result, other: Result) -> bool:
    return all(torch.equal(one.model[name], other.model[name]) for name in one.model)


@pytest.mark.parametrize("rule", [{"name": "trimmed_mean", "f": 0}, {"name": "multi_krum", "f": 0, "keep": 10}])
def test_rules_that_are_the_mean_have_its_bits(rule: dict[str, Any]):
    assert same(run(spec("mean")), run(spec(rule)))


def test_all_rules_run():
    """Every rule of the table runs for two rounds."""
    for name in AGGREGATORS:
        needs_f = "f" in signature(resolve(AGGREGATORS[name]))[1]
        result = run(spec({"name": name, "f": 1} if needs_f else name, rounds=2))
        assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values()), name


BOTH = [(NNM_KRUM, {"name": "optimal_alie", "share": 0.2})]
BOTH_TOO = [
    ("centred_clipping", {"name": "mimic", "share": 0.2, "warmup": 2}),
    ("fltrust", {"name": "sign_flip", "share": 0.2}),
    ({"name": "dnc", "f": 2}, {"name": "backdoor", "share": 0.2, "size": 2}),
]
BOTH_SLOW = [
    ({"name": "bulyan", "f": 1}, None),
    ("signguard", {"name": "min_max", "share": 0.2}),
    ("sign_vote", {"name": "gaussian", "share": 0.2}),
    ("median", {"name": "drop", "share": 0.3}),
]


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(
    ("rule", "attack"),
    [
        *BOTH,
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in BOTH_TOO),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in BOTH_SLOW),
    ],
)
def test_same_bits_in_one_process_and_in_two(rule: Any, attack: Any):
    assert same(run(spec(rule, attack=attack)), run(spec(rule, "ray", attack=attack)))


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_runs(name: str):
    """Each attack runs against the median, which resists it, and the record has the attack's columns."""
    extra = {"size": 2} if name == "backdoor" else {}
    result = run(spec("median", attack={"name": name, "share": 0.2, **extra}, rounds=2))
    row = result.rows[-1]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())
    assert 0 <= row["robust/byzantine"] <= 4
    assert row["robust/broken"] == (row["robust/byzantine"] if name in ("infinite", "nan") else 0)
    assert ("eval/backdoor" in row) == (name == "backdoor")


def test_cohorts_have_as_many_byzantine_clients_as_the_run():
    """The number B_t of Byzantine clients differs between rounds, and its mean is S b / N, which is 2 here."""
    rows = run(spec("mean", attack={"name": "zero", "share": 0.2}, rounds=60, local={"steps": 1, "batch": 1})).rows
    counts = np.array([row["robust/byzantine"] for row in rows])
    assert counts.mean() == pytest.approx(2, abs=4 * np.sqrt(0.842 / 60))  # the hypergeometric's variance
    assert counts.min() < 2 < counts.max()


def test_expected_faults_are_rounded_up_exactly():
    """ceil(S b / N) for S = N = 100: b, also where b / N is not a binary fraction."""
    for count in (6, 7, 14, 28, 55):
        attack = {"name": "sign_flip", "clients": list(range(count))}
        of = RunSpec.of("x", spec({"name": "trimmed_mean", "f": "expected"}, attack=attack, clients=100, cohort=100))
        assert of.stage_plan.faults(rows=100, drawn=100, known=0) == count


def test_a_backdoor_replaces_the_mean_of_those_who_take_part(monkeypatch: pytest.MonkeyPatch):
    """Of 20 clients, 4 of them Byzantine, three are left out: the attacker multiplies by 17, not by 20 / 4."""
    seen = []
    send = Backdoor.send
    monkeypatch.setattr(Backdoor, "send", lambda self, own, to: seen.append(to) or send(self, own, to))
    attack = {"name": "backdoor", "clients": [0, 1, 2, 3], "size": 2}
    run(spec("mean", attack=attack, cohort=20, rounds=1, without=[0, 1, 2]))
    assert seen
    assert {(to.cohort, to.byzantine) for to in seen} == {(17, 1)}


def test_an_attack_takes_place_in_its_rounds():
    rows = run(spec("mean", attack={"name": "zero", "clients": list(range(10)), "rounds": "2-2"})).rows
    assert [row["robust/byzantine"] > 0 for row in rows] == [False, True, False]


def test_known_faults_keep_scaffold_finite():
    attack = {"name": "ipm", "epsilon": 100.0, "share": 0.2}
    krum = run(spec({"name": "krum", "f": "known"}, attack=attack, rounds=5))
    mean = run(spec("mean", attack=attack, rounds=5))
    assert krum.rows[-1]["eval/loss"] < 10 < mean.rows[-1]["eval/loss"]
    assert sum(row["robust/kept_byzantine"] for row in krum.rows) == 0


def test_mean_of_rows_is_the_mean_of_sums():
    """An attack whose rounds are never reached makes the run collect messages, which changes only the rounding."""
    one, other = run(spec("mean")), run(spec("mean", attack={"name": "ipm", "share": 0.2, "rounds": "9-9"}))
    for name in one.model:
        torch.testing.assert_close(one.model[name], other.model[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in AGGREGATORS if resolve(AGGREGATORS[name]).adds])
def test_what_stands_before_a_rule_that_adds_counts(name: str):
    """Messages of length 1e-6 at most move the model by as little, or, with signs, give it other bits. An attack whose
    rounds are never reached changes only the rounding, which is larger relative to such steps: 2e-8 for a weight of
    about 0.1."""
    rule = {"name": name, "before": [{"name": "clip", "c": 1e-6}], **({"c": 1.0} if name == "norm_clipping" else {})}
    clipped, plain = run(spec(rule, method="fedavg")), run(spec({**rule, "before": []}, method="fedavg"))
    collected = run(spec(rule, method="fedavg", attack={"name": "ipm", "share": 0.2, "rounds": "9-9"}))
    assert not same(clipped, plain)
    for name in clipped.model:
        torch.testing.assert_close(clipped.model[name], collected.model[name], rtol=0, atol=2e-8)


def test_label_flip_and_trigger_are_in_the_data():
    flip = {"name": "label_flip", "clients": [3]}
    flipped, plain = (RunSpec.of("x", spec("mean", attack=attack)).split() for attack in (flip, None))
    index = plain.client_index
    own = index.rows[index.offsets[3] : index.offsets[4]]
    changed = flipped.train["label"] != plain.train["label"]
    assert np.array_equal(flipped.train["label"][own], 9 - plain.train["label"][own])
    assert set(np.flatnonzero(changed)) <= set(own)
    backdoor = {"name": "backdoor", "clients": [3], "poison": 1.0, "size": 2, "value": 7.0, "target": 4}
    poisoned = RunSpec.of("x", spec("mean", attack=backdoor)).split()
    assert (poisoned.train["input"][own][..., :2, :2] == 7).all()
    assert (poisoned.train["label"][own] == 4).all()
    assert (poisoned.test["triggered"][..., :2, :2] == 7).all()
    assert np.array_equal(poisoned.test["input"], plain.test["input"])


def test_resumed_attack_has_the_same_bits(tmp_path: Path):
    """The checkpoint contains the rule's last answer and the state of the attack."""
    setting = {"aggregate": "centred_clipping", "attack": {"name": "mimic", "warmup": 9, "share": 0.2}}
    whole = run(spec(**setting, rounds=4))
    short = with_checkpoints(spec(**setting, rounds=4))
    with pytest.raises(KeyboardInterrupt):
        run(short, tmp_path / "run", [StopsAfter(2)])
    assert same(whole, resume(short, tmp_path / "run"))


ALSO_THE_MEAN = ["median", {"name": "centred_clipping", "tau": 1e9}, {"name": "norm_clipping", "c_relative": 99.0}]


@pytest.mark.parametrize("vectors", ["each", "joined"])
@pytest.mark.parametrize("rule", ALSO_THE_MEAN)
def test_rules_that_give_the_mean_of_two_rows(rule: Any, vectors: str):
    """With two clients in a round, the answer that is computed from rows agrees with the sums, up to rounding."""
    rule = {"vectors": vectors, **({"name": rule} if isinstance(rule, str) else rule)}
    one, other = (run(spec(each, cohort=2)) for each in ("mean", rule))
    for name in one.model:
        torch.testing.assert_close(one.model[name], other.model[name], rtol=1e-5, atol=1e-6)


def test_min_max_methods_have_a_vector_for_each_group():
    workload = {"name": "robust", "of": {"name": "digits", "model": "logistic"}}
    method = {"name": "sagda"}
    made = spec("median", method=method, rounds=2).model_copy(update={"workload": workload})
    run_spec = RunSpec.of("x", made)
    message = StateSpec(run_spec.method(), run_spec.initial_model()).message
    assert [vector.name for vector in vectors_of(message, "each", 0)][:2] == ["delta", "delta.dual"]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in run(made).model.values())


@pytest.mark.parametrize("method", [{"name": "fedlmt", "layers": "all", "ratio": 0.25}, "fedexp", "stem"])
def test_other_methods(method: Any):
    """Low-rank messages are aggregated in the form in which they are sent, and the messages of a warm start are
    aggregated by the rule too."""
    result = run(spec({"name": "trimmed_mean", "f": 1}, method=method, attack={"name": "ipm", "share": 0.1}, rounds=2))
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())


def test_a_bound_on_norms_that_no_message_reaches_is_the_mean():
    assert same(run(spec("mean")), run(spec({"name": "norm_clipping", "c": 1e9})))


def with_checkpoints(experiment: Experiment) -> Experiment:
    return experiment.model_copy(update={"checkpoint": experiment.checkpoint.model_copy(update={"every": 1})})


def test_resumed_run_has_the_same_bits(tmp_path: Path):
    whole = spec("clipped_clustering", rounds=4)
    with pytest.raises(KeyboardInterrupt):
        run(with_checkpoints(whole), tmp_path / "run", [StopsAfter(2)])
    assert same(run(whole), resume(with_checkpoints(whole), tmp_path / "run"))


RESISTS = {"aggregate": NNM_KRUM, "attack": {"name": "min_max", "share": 0.2}}


@pytest.mark.parametrize("block", [1, 4])
def test_a_client_that_fails_at_first_changes_nothing(block: int, tmp_path: Path):
    """The messages of its task are written again, with the same bytes."""
    data = setting(tmp_path / "faults", rounds=3, block=block) | RESISTS
    expected = run(experiment(data))
    client = int(cohort_of(2)[3])
    plan(tmp_path / "faults", rule(client, "raise", times=1))
    assert same(run(experiment(data)), expected)


def test_drop_is_a_failure_that_is_left_out(tmp_path: Path):
    """Clients that send nothing count as clients that fail under on_failure: drop."""
    silent = cohort_of(1)[[1, 4]].tolist() + cohort_of(2)[:1].tolist()
    data = setting(tmp_path / "faults", rounds=3) | {"aggregate": NNM_KRUM}
    dropped = run(experiment({**data, "attack": {"name": "drop", "clients": silent}}))
    plan(tmp_path / "faults", *(rule(client, "raise") for client in silent))
    data["engine"]["on_failure"] = "drop"
    assert same(run(experiment(data)), dropped)
    assert dropped.rows[0]["client/dropped"] == len(set(silent) & set(cohort_of(1).tolist()))


def test_a_divergence_names_the_attack():
    with pytest.raises(Diverged, match=r"messages were Byzantine; .* choose a rule with aggregate"):
        run(spec("mean", attack={"name": "infinite", "share": 0.5}))


class StopsAfter:
    """An observer that interrupts the run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def record(self, row: dict[str, Any]) -> None:
        if row["round"] == self.round:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_no_files_of_messages_stay(tmp_path: Path):
    run(spec("median"), tmp_path / "run")
    assert not list(tmp_path.rglob("*messages*"))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {"name": "trimmed_mean", "f": 5},
            "aggregate.f: a trimmed mean needs 2 f < S, got f=5 with federation.cohort=10; lower aggregate.f or raise "
            "federation.cohort",
        ),
        ({"name": "mda", "f": 24}, "aggregate.f: MDA needs 2 f < S"),
        ({"name": "bulyan", "f": 2}, "aggregate.f: Bulyan needs S >= 4 f + 3, got f=2"),
        ({"name": "median", "vectors": "joint"}, "aggregate.vectors: joint is for rules that find weights"),
        (
            {"name": "mean", "before": [{"name": "nnm", "f": 2}]},
            "aggregate.before: the rule tolerates no Byzantine message that mixing spreads",
        ),
        ({"name": "krum"}, "aggregate.f is missing"),
        ("crum", "aggregate.name: no aggregator is called crum"),
        ({"name": "krum", "f": -1}, "aggregate.f: f >= 0 must hold"),
        (
            {"name": "median", "before": ["nnm"]},
            "aggregate.before: a part needs f, which the rule does not have: nearest-neighbour mixing",
        ),
    ],
)
def test_refused_before_anything_starts(rule: Any, words: str):
    with pytest.raises(ConfigError) as error:
        run(spec(rule))
    assert str(error.value).startswith(words)


def test_median_has_no_weights():
    with pytest.raises(ConfigError, match=r"has no weights: the median, .*; set federation.weights: uniform"):
        run(spec("median", weights="examples"))


def test_records_the_distance_from_the_mean():
    rows = run(spec("median")).rows
    assert 0 < rows[-1]["robust/error"] < np.inf
    assert rows[-1]["robust/broken"] == 0
