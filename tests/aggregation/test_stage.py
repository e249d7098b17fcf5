"""The stage as a whole, on random messages with every field: the engine's two ways through it against a slow reference,
with client weights that differ; and stages that change nothing, which are the mean.

TOLERANCE: float64. An answer is a sum of S = 9 products; its weights come from Gram matrices of rows with P = 700
numbers at most, whose relative rounding error is below P 2^-53 = 8e-14, and a weight of the geometric median or of
FLTrust is a quotient of two such numbers. The reference stops the geometric median at a gradient of 1e-13, the engine
at 1e-12. 1e-9 leaves three digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fedfleet.algorithms.aggregation.contract import Aggregator, ByCoordinate
from fedfleet.algorithms.aggregation.messages import Answer, Messages
from fedfleet.algorithms.contract import Algorithm, Message, Round, Server
from fedfleet.engine.aggregation.message_rows import vector_leaves, with_vector_leaves
from fedfleet.engine.aggregation.passes import PassTask
from fedfleet.engine.aggregation.stage import StageRunner
from fedfleet.engine.aggregation.staged import StagedMessages
from fedfleet.engine.api import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.reduction.accumulator import block_sums
from fedfleet.engine.reduction.tree import RoundTotals
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.state.folders import message_folder
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.workload import Model
from tests.engine.test_client_weights import Few, whole_batches
from tests.reference import byzantine, robust_rules
from tests.reference import stage as reference

torch.set_num_threads(1)

TOLERANCE = 1e-9
S = 9
WEIGHTS = np.array([0.2, 0.5, 3.0, 1.0, 0.3, 0.7, 2.0, 0.9, 0.4])
ROOT = np.random.default_rng(99)


class Everything(Algorithm):
    """Its messages have every field that a message can have."""

    def server_init(self, x: Any) -> Server:
        return Server(x)

    def client_init(self, public: Any) -> Any:
        return ()

    def client_begin(self, public: Any, client: Any) -> Any:
        return public

    def client_step(self, public: Any, client: Any, local: Any, oracle: Any) -> Any:
        return local - 0.1 * oracle(local)

    def client_finish(self, public: Any, client: Any, local: Any) -> tuple[Message, Any]:
        delta = local - public
        norm2 = delta.norm2()
        return Message(delta, 2.0 * delta, {"norm2": norm2}, 3.0 * delta, norm2), ()

    def server_update(self, server: Server, mean: Message, round: Round) -> Server:
        return Server(server.public + mean.delta + mean.sent + mean.averaged)

    def model(self, server: Server) -> Any:
        return server.public


@dataclass(frozen=True)
class Normalised(Model):
    """A network with running statistics."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), BatchNorm(3), nn.Linear(3, classes))


def spec(aggregate: Any, store: Path | None = None, **more: Any) -> Experiment:
    return experiment(
        {
            "workload": Digits(model=Normalised()),
            "method": Everything(),
            "aggregate": aggregate,
            "federation": {"clients": 20, "cohort": S, "weights": "examples", **more.pop("federation", {})},
            "engine": {"backend": "local", "dtype": "float64", "store": str(store) if store else None},
            "tracking": {"uri": "none"},
            **more,
        }
    )


class Stage:
    """The stage of one round in this process, on S random messages."""

    def __init__(self, made: Experiment, weights: np.ndarray, seed: int = 0) -> None:
        self.run_spec, self.weights = RunSpec.of("stage", made), weights
        self.state_spec = StateSpec(self.run_spec.method(), self.run_spec.initial_model())
        self.message = self.state_spec.message
        random = np.random.default_rng(seed)
        common = [random.normal(size=tuple(leaf.shape)) for leaf in vector_leaves(self.message)]
        scale = np.array([1, 2, 0.5, 9, 1, 0.7, 0.4, 1.5, 1])
        self.leaves = [
            torch.from_numpy(np.stack([each * (one + random.normal(size=one.shape)) for each in scale]))
            for one in common
        ]
        plan = self.run_spec.stage_plan
        folder = str(message_folder(self.run_spec.state_folder)) if plan.collects else ""
        self.runner = StageRunner(plan, self._run_pass, folder)
        if folder:
            self.runner.make_rows(self.run_spec.method(), self.run_spec.initial_model())
        self.staged = StagedMessages(plan, self.message, folder)
        self.state = self.runner.init(self.state_spec)

    def _run_pass(self, tasks: Any) -> Any:
        assert self.staged.files is not None
        assert all(isinstance(task, PassTask) for task in tasks)
        return [task.run(self.staged.files, self.staged.parts) for task in tasks]

    def write_trusted(self) -> np.ndarray:
        """Write what the server's own training gave. Returns its displacement, without statistics."""
        own = [torch.from_numpy(ROOT.normal(size=(1, *leaf.shape[1:]))) + leaf.mean(0) for leaf in self.leaves]
        assert self.staged.files is not None
        self.staged.files.write([self.runner.extra_row], own)
        return own[0].numpy()[0][: -self.state_spec.statistics]

    def answer(self) -> dict[str, np.ndarray]:
        """field -> the answer, (P,)."""
        norms2 = self.staged.norms2(self.leaves)
        facts = [torch.zeros((), dtype=torch.float64)]
        if self.staged.files is not None:
            self.staged.files.write(range(S), self.leaves)
            sums = [leaf.numpy() for leaf in facts]
        else:
            added = with_vector_leaves(self.message, self.staged.contributions(self.leaves))
            added = added._replace(facts={"norm2": torch.zeros(S, dtype=torch.float64)})
            each = pytree.tree_leaves(added)
            sums = [leaf.numpy() for leaf in block_sums(each, self.weights, self.state_spec.weighted)]
        totals = RoundTotals(sums, {"weight": self.weights.sum()}, {"id": np.arange(S), "norms2": norms2}, ())
        round, sampled = Round(1, 1, S, 20), np.arange(S)
        found = self.runner.aggregate(self.state_spec, self.state, round, sampled, self.weights, totals)
        self.state, self.columns = found.state, found.columns
        return self.fields([leaf.unsqueeze(0) for leaf in vector_leaves(found.mean)], squeeze=True)

    def fields(self, leaves: list[torch.Tensor], squeeze: bool = False) -> dict[str, np.ndarray]:
        flat = [leaf.reshape(len(leaf), -1).numpy() for leaf in leaves]
        count = self.state_spec.statistics
        found = dict(zip(reference.FIELDS, flat, strict=True))
        found |= {"delta": flat[0][:, :-count], "statistics": flat[0][:, -count:]}
        return {name: each[0] for name, each in found.items()} if squeeze else found

    def expected(self, trust: Any, vectors: str) -> dict[str, np.ndarray]:
        return reference.stage(self.fields(self.leaves), self.weights, trust, vectors)


CLIP = {"name": "clip", "c": 1e9}
RULES: dict[str, tuple[dict[str, Any], Any]] = {
    "mean, collected": ({"name": "mean", "before": [CLIP]}, reference.mean),
    "norm clipping, added up": ({"name": "norm_clipping", "c": 5.0}, reference.norm_clipping(5.0)),
    "norm clipping, collected": (
        {"name": "norm_clipping", "c": 5.0, "before": [CLIP]},
        reference.norm_clipping(5.0),
    ),
    "Multi-Krum": ({"name": "multi_krum", "f": 2, "keep": 4}, reference.multi_krum(2, 4)),
    "Multi-Krum of all": ({"name": "multi_krum", "f": 0, "keep": S, "before": [CLIP]}, reference.mean),
    "MDA": ({"name": "mda", "f": 2}, reference.least_diameter(2)),
    "geometric median": ({"name": "geometric_median", "tol": 1e-12}, reference.nearest_by_distance),
}


@pytest.mark.parametrize("vectors", ["each", "joint", "joined"])
@pytest.mark.parametrize("name", RULES)
def test_weights_of_clients_count_where_the_contract_says(name: str, vectors: str, tmp_path: Path):
    """`sent` is averaged uniformly, everything else with the client weights, whichever vectors the rule decides on."""
    rule, trust = RULES[name]
    stage = Stage(spec({**rule, "vectors": vectors}, tmp_path), WEIGHTS)
    found, expected = stage.answer(), stage.expected(trust, vectors)
    for field, value in expected.items():
        np.testing.assert_allclose(found[field], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=field)


def test_fltrust_gives_statistics_the_weights_of_a_mean(tmp_path: Path):
    """Its weights of messages may sum to more than 1: it makes messages as long as the server's own."""
    stage = Stage(spec("fltrust", tmp_path, federation={"weights": "uniform"}), np.ones(S))
    trust = reference.trusted(stage.write_trusted())
    assert trust(stage.fields(stage.leaves)["delta"], np.ones(S)).sum() > 1.01
    found, expected = stage.answer(), stage.expected(trust, "joint")
    for field, value in expected.items():
        np.testing.assert_allclose(found[field], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=field)


@pytest.mark.parametrize("before", [[], [CLIP]], ids=["added up", "collected"])
@pytest.mark.parametrize("vectors", ["each", "joined"])
def test_signs_of_statistics_are_not_counted(before: list[Any], vectors: str, tmp_path: Path):
    rule = {"name": "sign_vote", "scale": 0.3, "vectors": vectors, "before": before}
    stage = Stage(spec(rule, tmp_path, federation={"weights": "uniform"}), np.ones(S))
    found, messages = stage.answer(), stage.fields(stage.leaves)
    for field in reference.FIELDS:
        np.testing.assert_array_equal(found[field], 0.3 * np.sign(np.sign(messages[field]).sum(axis=0)))
    mean = messages["statistics"].mean(axis=0)
    np.testing.assert_allclose(found["statistics"], mean, rtol=TOLERANCE, atol=TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class Extrapolates(Aggregator):
    """Twice the mean, less the first message."""

    called = "a rule that extrapolates"

    def aggregate(self, x: Messages) -> Answer:
        weights = np.full(x.count, 2 / x.count)
        weights[0] -= 1
        return x.sum(weights)


@dataclass(frozen=True, kw_only=True)
class Farthest(ByCoordinate):
    """In each coordinate three times the least value."""

    called = "a rule that goes too far"

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return 3 * x[0]


@pytest.mark.parametrize("rule", [Extrapolates(), Farthest()], ids=str)
def test_no_rule_moves_statistics_farther_than_the_messages_do(rule: Aggregator, tmp_path: Path):
    """Then the new statistics are a mean of what clients measured and of what was there, and no variance is negative.
    Other numbers get what the rule says."""
    stage = Stage(spec(rule, tmp_path, federation={"weights": "uniform"}), np.ones(S))
    found, messages = stage.answer(), stage.fields(stage.leaves)
    delta, statistics = messages["delta"], messages["statistics"]
    expected = 3 * delta.min(axis=0) if isinstance(rule, Farthest) else 2 * delta.mean(axis=0) - delta[0]
    np.testing.assert_allclose(found["delta"], expected, rtol=TOLERANCE, atol=TOLERANCE)
    least, most = np.minimum(statistics.min(axis=0), 0), np.maximum(statistics.max(axis=0), 0)
    assert ((least <= found["statistics"]) & (found["statistics"] <= most)).all()


@pytest.mark.parametrize("before", [[], [CLIP]], ids=["added up", "collected"])
@pytest.mark.parametrize("field", range(4))
def test_a_message_with_one_broken_field_is_left_out(field: int, before: list[Any], tmp_path: Path):
    """Joint: the message whose field is infinite is left out as a whole, as if it had not been sent."""
    rule = {"name": "norm_clipping", "c": 5.0, "vectors": "joint", "before": before}
    stage = Stage(spec(rule, tmp_path), WEIGHTS)
    stage.leaves[field][3].view(-1)[0] = torch.inf
    messages = {name: np.delete(each, 3, axis=0) for name, each in stage.fields(stage.leaves).items()}
    expected = reference.stage(messages, np.delete(WEIGHTS, 3), reference.norm_clipping(5.0), "joint")
    found = stage.answer()
    assert stage.columns["robust/broken"] == 1
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("vectors", ["each", "joint"])
def test_centred_clipping_begins_where_it_ended(vectors: str, tmp_path: Path):
    """v <- v + (1/S) sum of s_i (x_i - v) in every field: also what follows `delta` begins at its own last answer.
    Running statistics have no last answer, since a change that was made once would be made again."""
    rule = {"name": "centred_clipping", "tau": 4.0, "vectors": vectors}
    stage = Stage(spec(rule, tmp_path, federation={"weights": "uniform"}), np.ones(S))
    messages = stage.fields(stage.leaves)
    v = {field: np.zeros(messages[field].shape[1]) for field in reference.FIELDS}
    for _ in range(2):
        found, changed = stage.answer(), {}
        for field in reference.FIELDS:
            on = "delta" if vectors == "joint" else field
            away = np.sqrt(np.square(messages[on] - v[on]).sum(axis=1))
            s = np.minimum(1.0, 4.0 / away)
            changed[field] = v[field] + (s[:, None] * (messages[field] - v[field])).mean(axis=0)
            if field == "delta":
                statistics = (s[:, None] * messages["statistics"]).mean(axis=0)
        v = changed
        for field in reference.FIELDS:
            np.testing.assert_allclose(found[field], v[field], rtol=TOLERANCE, atol=TOLERANCE, err_msg=field)
        np.testing.assert_allclose(found["statistics"], statistics, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rule", ["multi_krum", "mda"])
@pytest.mark.parametrize("name", ["optimal_ipm", "optimal_alie"])
def test_an_attack_searches_against_the_rule_as_it_will_be(name: str, rule: str, tmp_path: Path):
    """An honest message is not finite: the rule will leave it out and lower its f by one, and the attacker knows."""
    attack = {"name": name, "clients": [0]}
    made = spec({"name": rule, "f": 2}, tmp_path, attack=attack, federation={"weights": "uniform"})
    stage = Stage(made, np.ones(S))
    stage.leaves[0][3].view(-1)[0] = torch.inf
    honest = np.delete(stage.fields(stage.leaves)["delta"], [0, 3], axis=0)
    stage.answer()
    search, defence = getattr(byzantine, name), getattr(robust_rules, rule)
    factor = {f: search(honest, 1, partial(defence, f=f))[1] for f in (1, 2)}
    assert factor[1] != pytest.approx(factor[2])
    assert stage.columns["attack/factor"] == pytest.approx(factor[1])
    assert stage.columns["robust/broken"] == 1


# --- whole runs -------------------------------------------------------------------------------------------------------
ENGINE = {"engine": {"block": 2}}
IDLE: dict[str, dict[str, Any]] = {
    "norm clipping": {"name": "norm_clipping", "c": 1e9},
    "norm clipping, collected": {"name": "norm_clipping", "c_relative": 1e9},
    "mean after clipping": {"name": "mean", "before": [CLIP]},
    "Multi-Krum of all": {"name": "multi_krum", "f": 0, "before": [CLIP]},
    "DnC of all": {"name": "dnc", "f": 0},
}
METHODS = ["scaffold", {"name": "stem", "start": "zeros"}, {"name": "fedexp", "floor": False}]


@pytest.mark.parametrize("vectors", ["each", "joint", "joined"])
@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_stage_that_changes_nothing_is_the_mean(name: str, vectors: str, method: Any):
    """Clients of 2, 3 and 7 rows and their weights. To the bit where messages are added up; where they are collected,
    the sums of three products differ by their rounding, which three rounds of steps of size 0.1 enlarge little: below
    100 units of 2^-53 at numbers of size 1."""
    made = whole_batches(method, Few(), 3, "examples", **ENGINE)
    mean = run(made).model
    found = run(made.model_copy(update={"aggregate": {**IDLE[name], "vectors": vectors}})).model
    for leaf, value in mean.items():
        if name == "norm clipping":
            assert torch.equal(found[leaf], value), leaf
        torch.testing.assert_close(found[leaf], value, rtol=0, atol=100 * 2**-53)


@pytest.mark.parametrize("before", [[], [CLIP]], ids=["added up", "collected"])
def test_votes_of_signs_leave_variances_positive(before: list[Any]):
    """A network with running statistics, trained by votes of signs: its evaluations are numbers."""
    rule = {"name": "sign_vote", "scale": 0.5, "before": before}
    more = {"federation": {"weights": "uniform", "rounds": 6, "local": {"steps": 1, "batch": 8}}}
    result = run(spec(rule, None, method={"name": "fedavg"}, **more))
    assert np.isfinite(result.metrics["eval/loss"])
    assert float(result.model["2.running_var"].min()) > 0


def test_a_geometric_median_that_was_not_found_is_told_once(tmp_path: Path):
    rule = {"name": "geometric_median", "iterations": 2}
    made = spec(rule, None, method={"name": "fedavg"}, federation={"rounds": 3, "local": {"steps": 1, "batch": 8}})
    result = run(made, tmp_path / "run")
    assert all(row["robust/residual"] > 1e-8 for row in result.rows)
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("the geometric median was not found in 2 iterations, its residual was ") == 1
