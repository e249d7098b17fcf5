"""Members: runs of one process that train their clients together, against the same runs alone."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.engine import Result, resume, run
from fedfleet.engine.api import new_run
from fedfleet.engine.clients import members, worker
from fedfleet.engine.clients.batches import BlockForm, stream
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.clients.members import MembersPublic, MembersTrainer, evaluate_together
from fedfleet.engine.config.schema import Checkpoint, Engine, Experiment, experiment
from fedfleet.engine.errors import ConfigError, Diverged, EvaluationFailed, Interrupted
from fedfleet.engine.method_form.numbers import differing, form, numbers, with_numbers
from fedfleet.engine.method_form.state_spec import some_view
from fedfleet.engine.planning.execution_plan import candidates
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs import members as backend
from fedfleet.engine.runs.prepare import prepare
from fedfleet.engine.runs.shared_data import SharedData
from fedfleet.engine.state.checkpoint import checkpointed_rounds
from fedfleet.tune.executor.executor import check_together, why_not_together
from fedfleet.tune.search.plan import SearchSettings
from fedfleet.tune.study.spec import Tune
from tests.methods import ON_ANY_MODEL as METHODS

from ..test_conformance import spec as with_arguments
from .setups import EPOCHS, STEPS, digits, execute_together
from .test_minimax import auc

METHODS_OF_MEMBERS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"name": "fedavg", "rule": {"name": "momentum", "lr": lr, "mu": mu}} for lr, mu in ((0.1, 0.9), (1, 0))],
    "scaffold": [{"name": "scaffold", "rule": {"name": "sgd", "lr": lr}} for lr in (0.1, 0.5)],
    "fedadam": [
        {"name": "fedadam", "server_lr": server_lr, "rule": {"name": "adam", "lr": lr, "weight_decay": decay}}
        for lr, server_lr, decay in ((0.01, 0.1, 0.01), (0.003, 0.01, 0.0))
    ],
    "clip": [
        {"name": "fedavg", "rule": {"name": "clip", "rule": {"name": "sgd", "lr": 0.5}, "radius": radius}}
        for radius in (0.1, 0.3)
    ],
    "powers": [
        {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01, "betas": betas}}
        for betas in ([0.9, 0.999], [0.5, 0.99])
    ],
    "fedsam": [{"name": "fedsam", "rule": {"name": "sgd", "lr": 0.1}, "rho": rho} for rho in (0.05, 0.3)],
    "fedasam": [
        {"name": "fedsam", "rule": {"name": "sgd", "lr": 0.1}, "kind": "asam", "rho": rho, "eta": eta}
        for rho, eta in ((0.05, 0.2), (0.3, 0.1))
    ],
    "local_muon": [{"name": "local_muon", "matrix_lr": lr, "vector_lr": 2 * lr} for lr in (0.1, 0.03)],
    "schedule over steps": [
        {
            "name": "fedavg",
            "rule": {"name": "momentum", "lr": {"schedule": "cosine", "start": 0.1, "over": "steps"}},
            "server_lr": server_lr,
        }
        for server_lr in (0.9, 1.1)
    ],
    "coded": [
        {
            "name": "diloco",
            "outer_lr": outer_lr,
            "compression": {"name": "coded", "codec": "statistical", "decay": decay},
        }
        for outer_lr, decay in ((0.7, 0.9), (0.8, 0.95))
    ],
    "schedule": [
        {"name": "fedavg", "rule": {"name": "sgd", "lr": {"schedule": "exponential", "start": start, "decay": 0.5}}}
        for start in (0.2, 0.4)
    ],
}


def together(experiments: list[Experiment], folder: Path | None = None) -> list[Any]:
    """The results of some experiments that run together, each with a folder of its own if `folder` is given."""
    specs = [new_run(each, folder and folder / str(i), None) for i, each in enumerate(experiments)]
    return execute_together(specs)


def same(result: Any, alone: Result) -> bool:
    """Whether a run has the same rounds and the same model as the run alone, to the bit."""
    assert isinstance(result, Result), result
    kept = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in each.rows] for each in (result, alone)
    ]
    return kept[0] == kept[1] and result.model_sha256 == alone.model_sha256


def log(folder: Path, number: int) -> str:
    return (folder / str(number) / "run.log").read_text()


def test_blocks_of_one_form_are_trained_at_once_whatever_their_task(monkeypatch):
    """Two members with six tasks of one block each, whose clients are unequal. The blocks of the members are pairs of
    the same form, so that there are at most as many calls as a member alone has blocks."""
    groups: list[list[Any]] = []
    trained = members._train_blocks
    monkeypatch.setattr(members, "_train_blocks", lambda group, *rest: (groups.append(group), trained(group, *rest)))
    experiments = []
    for lr in (0.1, 0.2):
        data = digits({"name": "fedavg", "rule": {"name": "sgd", "lr": lr}}, {"steps": 3, "batch": 32}).plain()
        data["workload"]["partition"] = {"name": "dirichlet", "beta": 0.2}
        data["federation"] |= {"clients": 60, "cohort": 24, "rounds": 1}
        data["engine"] |= {"block": 4, "kernels": "torch"}
        experiments.append(experiment(data))
    results = together(experiments)
    assert [same(result, run(each)) for result, each in zip(results, experiments, strict=True)] == [True, True]
    assert sum(map(len, groups)) == 2 * 6
    forms = {BlockForm.of(task.batches.drawn, block) for group in groups for task, block in group}
    assert len(forms) > 1
    assert len(groups) == len(forms)


@pytest.mark.parametrize("name", METHODS_OF_MEMBERS)
def test_members_have_the_bits_of_runs_alone(name, tmp_path):
    local = EPOCHS if name in ("fedavg", "schedule") else STEPS
    experiments = [digits(method, local) for method in METHODS_OF_MEMBERS[name]]
    results = together(experiments, tmp_path)
    assert "trained together" in log(tmp_path, 0)
    assert [same(result, run(each)) for result, each in zip(results, experiments, strict=True)] == [True, True]


def test_members_whose_bits_would_differ_are_trained_alone(tmp_path):
    """STEM's decay is computed from a scalar and numbers, in float32 with numbers of Python and in float64 with tensors
    in their place. The result does not depend on which runs have shared a process."""
    methods = [{"name": "stem", "lr": 0.1, "schedule": "stem", "w": w} for w in (1.0, 2.0)]
    experiments = [digits(method, STEPS) for method in methods]
    results = together(experiments, tmp_path)
    assert "trained without the other runs of this process: its sums would have other bits" in log(tmp_path, 0)
    assert [same(result, run(each)) for result, each in zip(results, experiments, strict=True)] == [True, True]


def test_a_min_max_method(tmp_path):
    experiments = [auc("sagda"), auc("sagda").model_copy(update={"method": {"name": "sagda", "lr": 0.03}})]
    faster = {"name": "sagda", "lr": {"primal": 0.03, "dual": 0.05}}
    experiments.append(auc("sagda").model_copy(update={"method": faster}))
    results = together(experiments, tmp_path)
    assert "trained together" in log(tmp_path, 0)
    assert all(same(result, run(each)) for result, each in zip(results, experiments, strict=True))


def test_members_with_other_seeds_rounds_and_data(tmp_path):
    base = digits("scaffold", EPOCHS)
    other = base.model_copy(update={"seed": 1})
    skewed: Any = {**base.workload, "partition": {"name": "dirichlet", "beta": 0.2}}  # pyright: ignore[reportGeneralTypeIssues]
    longer = base.federation.model_copy(update={"rounds": 5})
    experiments = [base, other, base.model_copy(update={"workload": skewed, "federation": longer})]
    results = together(experiments, tmp_path)
    assert all(same(result, run(each)) for result, each in zip(results, experiments, strict=True))
    assert all("trained together" in log(tmp_path, number) for number in range(2))


def test_a_sampler_that_bears_no_chain_keeps_it_from_no_other_run():
    """Oort needs the losses of single examples, which a chain does not give. Proofs are shared between runs."""

    def asked(sampler: str) -> RunSpec:
        base = digits("fedavg", STEPS, rounds=6000, block="auto").model_dump(mode="json")
        federation = {**base["federation"], "sampler": sampler}
        return prepare(experiment({**base, "federation": federation}), "test")

    def kernels(*samplers: str) -> set[str]:
        """Of the plans of the last of these runs, which share their process."""
        data, seen = SharedData(), set()
        for run_spec in map(asked, samplers):
            data.get_ready(run_spec)
            seen = {plan.kernels for plan in candidates(run_spec, data.split(run_spec))}
        return seen

    assert kernels("oort", "uniform") == kernels("uniform") >= {"torch", "chain"}
    assert kernels("uniform", "oort") == kernels("oort")
    assert "chain" not in kernels("oort")


def test_methods_of_different_forms_go_on_beside_each_other():
    experiments = [digits(name, STEPS) for name in ("fedavg", "scaffold", "fedavg", "local_muon")]
    results = together(experiments)
    assert all(same(result, run(each)) for result, each in zip(results, experiments, strict=True))


def test_clients_that_are_alone_in_their_blocks(monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(worker, "stream", lambda *given: drawn.append(given) or stream(*given))
    experiments = [digits(method, STEPS, block=1) for method in METHODS_OF_MEMBERS["fedavg"]]
    results = together(experiments)
    rounds, tasks = experiments[0].federation.rounds, experiments[0].federation.cohort
    assert rounds <= len(drawn) <= rounds * tasks  # by the first run only
    assert len({tuple(given[1].tolist() + given[2].tolist()) for given in drawn}) == len(drawn)
    monkeypatch.undo()
    assert all(same(result, run(each)) for result, each in zip(results, experiments, strict=True))


def test_a_member_that_diverges_or_is_refused_does_not_touch_the_others():
    experiments = [digits({"name": "fedavg", "rule": {"name": "sgd", "lr": lr}}, STEPS) for lr in (0.1, 1e30, 0.2)]
    first, diverged, last = together(experiments)
    assert isinstance(diverged, Diverged)
    assert same(first, run(experiments[0]))
    assert same(last, run(experiments[2]))


def test_a_stop_in_the_middle_of_a_common_phase(tmp_path):
    """Two members are asked to stop at the 20th local step after their first rounds, in a phase of 100 steps. Both end
    within it, and go on from their first checkpoints to the bits of runs that were not stopped."""
    local = {"steps": 100, "batch": 4}
    experiments = [
        digits(method, local, 2).model_copy(update={"checkpoint": Checkpoint(every=1)})
        for method in METHODS_OF_MEMBERS["fedavg"]
    ]
    logs = [tmp_path / str(i) / "run.log" for i in range(2)]
    asked = 0

    def stop() -> int:
        nonlocal asked
        asked += all(each.is_file() and "round=1 " in each.read_text() for each in logs)
        return signal.SIGTERM if asked > 2 * 3 * 20 else 0  # two members, with three blocks each

    ended = execute_together([new_run(each, tmp_path / str(i), None) for i, each in enumerate(experiments)], stop)
    assert [type(each) for each in ended] == [Interrupted, Interrupted]
    assert "trained together" in log(tmp_path, 0)
    for i, each in enumerate(experiments):
        assert 2 not in checkpointed_rounds(tmp_path / str(i))
        assert resume(tmp_path / str(i)).model_sha256 == run(each, tmp_path / f"alone-{i}").model_sha256


# --- evaluations ------------------------------------------------------------------------------------------------------
NORMALISED = """
from dataclasses import dataclass

from torch import nn

from fedfleet.workloads.workload import Model
from fedfleet.workloads.models.norms import BatchNorm


@dataclass(frozen=True)
class Small(Model):
    def build(self, shape, classes):
        convolution = nn.Conv2d(shape[0], 2, 3)
        return nn.Sequential(convolution, BatchNorm(2), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, classes))


MODELS = {"small": Small}
"""


@pytest.fixture
def passes(monkeypatch):
    """The number of members of each evaluation that was made for several."""
    made: list[int] = []

    def counted(evaluations):
        made.append(len(evaluations))
        return evaluate_together(evaluations)

    monkeypatch.setattr(backend, "evaluate_together", counted)
    return made


def test_members_are_evaluated_in_one_pass(passes, tmp_path):
    """Running statistics, a last batch of 55 rows after three of 100, the clients' own rows. The second member
    diverges, the third one ends earlier than the others, and the last one has other data."""
    (tmp_path / "small.py").write_text(NORMALISED)
    experiments = []
    for lr, rounds, seed in ((0.1, 6, 0), (1e30, 6, 0), (0.2, 2, 0), (0.05, 6, 0), (0.1, 4, 1)):
        made = digits({"name": "fedavg", "rule": {"name": "sgd", "lr": lr}}, STEPS, rounds)
        plain = made.plain()
        plain["workload"] = {"name": "digits", "model": "small", "partition": {"name": "dirichlet", "beta": 0.5}}
        plain["evaluate"] |= {"fairness": True}
        experiments.append(experiment({**plain, "seed": seed, "plugins": [str(tmp_path / "small.py")]}))
    results = together(experiments, tmp_path)
    assert isinstance(results[1], Diverged)
    for number in (0, 2, 3, 4):
        assert same(results[number], run(experiments[number]))
    assert passes == [3, 3, 2, 2, 2, 2]  # the test rows and the clients' rows, in rounds 2, 4 and 6


def test_a_report_that_fails_for_one_member_fails_for_that_one(passes, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    experiments = [
        experiment(
            {**digits("fedavg", STEPS).plain(), "workload": "picky", "plugins": [str(tmp_path / "picky.py")], **n}
        )
        for n in [{"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": lr}}} for lr in (0.01, 8.0)]
    ]
    first, second = together(experiments, tmp_path)
    assert same(first, run(experiments[0]))
    assert isinstance(second, EvaluationFailed)
    assert passes


PICKY = """
from dataclasses import dataclass

from fedfleet.workloads.data.digits import Digits


@dataclass(frozen=True)
class Picky(Digits):
    def report(self, p, batch):
        if max(float(leaf.abs().max()) for leaf in p.values()) > 0.7:
            raise RuntimeError("too large")
        return super().report(p, batch)


WORKLOADS = {"picky": Picky}
"""


# --- methods that tensors do not suit ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Choosy(Sgd):
    """Sgd that branches on the value of its step size."""

    def step(self, y, v, state):
        return super().step(y, v, state) if self.lr < 1 else (y, state)


@dataclass(frozen=True)
class Wrong(Sgd):
    """Sgd that computes something else with a tensor."""

    def step(self, y, v, state):
        return (y.add(v, -2 * self.lr) if isinstance(self.lr, torch.Tensor) else y.add(v, -self.lr)), state


@pytest.mark.parametrize(("rule", "why"), [(Choosy, "raised"), (Wrong, "have other bits")])
def test_a_method_that_tensors_do_not_suit_steps_back(rule, why, tmp_path):
    from fedfleet.algorithms.fedavg import fedavg

    experiments = [digits(fedavg(rule(lr=lr)), STEPS) for lr in (0.1, 0.2)]
    results = together(experiments, tmp_path)
    assert all(same(result, run(each)) for result, each in zip(results, experiments, strict=True))
    assert "trained without the other runs" in log(tmp_path, 1)
    assert why in log(tmp_path, 1)


def test_times_of_members_add_up():
    """A member's seconds leave out those of the others, so that together they are at most those of the process."""
    import time

    experiments = [digits(method, STEPS, 4) for method in METHODS_OF_MEMBERS["fedavg"] * 3]
    began = time.perf_counter()
    results = together(experiments)
    took = time.perf_counter() - began
    assert sum(row["time/seconds"] for result in results for row in result.rows) < took


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_numbers_and_forms():
    first, second = (prepare(digits(m, STEPS), "test").method() for m in METHODS_OF_MEMBERS["fedavg"])
    assert form(first) == form(second)
    found = differing([numbers(first), numbers(second)])
    assert {path: value.tolist() for path, value in found.items()} == {
        ("rule", "lr"): [0.1, 1.0],
        ("rule", "mu"): [0.9, 0],
    }
    assert with_numbers(first, {path: value[1].item() for path, value in found.items()}) == second
    assert form(first) != form(prepare(digits("local_muon", STEPS), "test").method())


BRANCHES = {
    ("ef21_p", "ratio"),
    ("fedbat", 0),
    ("fedbat", 1),
    ("local_only", "prox"),
    ("qffl", "q"),
    ("sparse_loco", "density"),
}
"""(method, number, or its position in a tuple) for each number on whose value a method branches, so that runs that
differ in it are trained one by one."""


@pytest.fixture(scope="module")
def problem() -> Any:
    """A workload, its model, and batches (c, B, …) for some steps. Some methods need an even number of steps."""
    run_spec = prepare(digits("fedavg", {**STEPS, "steps": 2}), "test")
    split = run_spec.split()
    rows = np.arange(2 * 2 * 4).reshape(2, 2, 4)
    batches = [
        {name: torch.from_numpy(column[rows[k]]) for name, column in split.train.items()} | {"key": torch.arange(2)}
        for k in range(2)
    ]
    return run_spec, batches


@pytest.mark.parametrize("name", sorted(METHODS))
def test_which_methods_branch_on_the_value_of_a_number(name, problem):
    """Two clients whose methods differ in one number, against each of them with its own method, for all numbers.

    Tolerance: 64 roundings of the message, and one of the weights for each of the two steps, since a displacement is a
    difference of weights.
    """
    run_spec, batches = problem
    spec = run_spec.with_experiment(run_spec.experiment.model_copy(update={"method": with_arguments(name)}))
    method = spec.method()
    x = spec.initial_model()
    steps, off = torch.tensor([2, 2]), 2 * 2**-23 * float(x.flat.abs().max())
    branches = set()
    for path, value in numbers(method).items():
        methods = [method, with_numbers(method, {path: 0.9 * value})]
        trainers = [LocalTrainer(each, spec.workload, x) for each in methods]
        with torch.no_grad():
            publics = [each.unpack(each.broadcast(each.server_init(x))) for each in methods]
            clients = [each.client_init(public) for each, public in zip(methods, publics, strict=True)]
            publics = [some_view(*each) for each in zip(methods, publics, clients, strict=True)]
            stacked = [
                torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *each) for each in (publics, clients)
            ]
            try:
                found = MembersTrainer(trainers[0], (path,)).train_block(
                    MembersPublic(stacked[0], (torch.tensor([value, 0.9 * value], dtype=torch.float64),)),
                    stacked[1],
                    steps,
                    batches.__getitem__,
                )
            except Exception:
                branches.add((name, path[-1]))
                continue
            for i, trainer in enumerate(trainers):
                client = torch.utils._pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1], stacked[1])
                own = [{k: v[i : i + 1] for k, v in batch.items()} for batch in batches]
                alone = trainer.train_block(publics[i], client, steps[:1], own.__getitem__)
                for a, b in zip(
                    *(torch.utils._pytree.tree_leaves(each.message) for each in (alone, found)), strict=True
                ):
                    b = b.to(a.dtype)  # q-FFL's h is a number made of numbers, which are float64 where they differ
                    assert torch.allclose(a[0], b[i], rtol=64 * 2**-23, atol=off + 64 * 2**-23 * float(a.abs().max()))
    assert branches == {each for each in BRANCHES if each[0] == name}


# --- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("section", [SearchSettings, Tune])
def test_together_is_auto_true_or_false(section):
    assert [section.model_validate({"together": value}).together for value in ("auto", True, False)] == [
        "auto",
        True,
        False,
    ]
    with pytest.raises(ValueError, match="together"):
        section.model_validate({"together": "sometimes"})
    with pytest.raises(ValueError, match="trials"):
        section.model_validate({"trials": True})


def test_why_runs_do_not_share_processes(capsys):
    assert check_together("search.together", "auto", "")
    assert not check_together("search.together", False, "")
    assert not check_together("search.together", "auto", why_not_together(Engine(), workers=2))
    assert "a process of its own: each of them has 2 worker processes" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^search\.together: .* got true: engine\.address=head:1 names a cluster"):
        check_together("search.together", True, why_not_together(Engine(address="head:1")))
