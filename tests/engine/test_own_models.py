"""Clients' own models in runs: golden values of their losses, also after an adaptation, and the columns of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fedfleet
from fedfleet.algorithms.tree import Tree
from fedfleet.engine import Result, resume, run
from fedfleet.engine.clients.own_columns import OfClients, distribution
from fedfleet.engine.clients.own_models import ClientReports, ClientRows, evaluated_clients
from fedfleet.engine.clients.own_statistics import OwnStatistics
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.kernels.fused_chain import chain_from
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.records.metrics import better, is_in_short, on_validation
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.workload.layers import momenta_of
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp
from fedfleet.workloads.partitions.standard import Contiguous, Dirichlet, Iid
from fedfleet.workloads.workload import HELD_OUT
from tests.algorithms.own import CASES, PROBLEMS
from tests.engine.setups import Built, execute_together
from tests.engine.test_personal import HEAD, NORMED, network, small
from tests.faults.runs import Watch, interrupt

DIGITS = 1e-10
"""The golden values have at most 13 digits, of numbers of about 1; absolute."""


OF_THEIR_OWN = ("ditto", "pfedme", "apfl")
"""Methods whose clients keep whole models and have a rule for them."""


# --- golden values ----------------------------------------------------------------------------------------------------
def sgd(lr: float) -> dict[str, Any]:
    return {"name": "sgd", "lr": lr}


def method_of(name: str) -> dict[str, Any]:
    """The section `method` of a golden case."""
    case = CASES[name][1]
    given = case.settings
    if case.method == "ifca":
        return {"name": "ifca_from"}
    base = {"partial": "fedavg", "fine_tuned": "fedavg"}.get(case.method, case.method)
    if case.method in OF_THEIR_OWN:
        more = {name: value for name, value in given.items() if name not in ("lr", "lr_personal")}
        return {"name": base, "rule": sgd(given["lr"]), "personal_rule": sgd(given["lr_personal"]), **more}
    names = ("server_lr", "variant", "lr_inner", "delta", "q", "eps1", "eps2", "after")
    more = {name: given[name] for name in names if name in given}
    return {"name": base, "rule": sgd(given["lr"]), **more}


def golden(name: str) -> Experiment:
    """The run of a golden case."""
    problem, case = CASES[name]
    given, sections = case.settings, {}
    if given.get("personal"):
        rule = {"rule": sgd(given["lr_personal"])} if "lr_personal" in given else {}
        split = {"split": given["split"]} if "split" in given else {}
        sections["personal"] = {"tensors": given["personal"], **rule, **split}
    if given.get("frozen"):
        sections["personal"] = {"frozen": given["frozen"]}
    clients: dict[str, Any] = {"own": True}
    if "adapt_steps" in given:
        prox = {"prox": given["prox"]} if "prox" in given else {}
        clients["adapt"] = {"steps": given["adapt_steps"], "rule": sgd(given["adapt_lr"]), "batch": "all", **prox}
    return experiment(
        {
            "plugins": ["tests.engine.own_models"],
            "workload": {"name": "tiny", "problem": problem},
            "method": method_of(name),
            "federation": {
                "clients": PROBLEMS[problem].clients,
                "cohort": 5 if case.method == "cfl" else 2,
                "rounds": 3,
                "local": {"steps": case.K, "batch": 8},
                "sampler": {"name": "given", "case": name},
                "weights": given.get("weights", "uniform"),
            },
            "engine": {"backend": "local", "dtype": "float64", "block": 2},
            "evaluate": {"every": 0, "clients": clients},
            "tracking": {"uri": "none"},
            **sections,
        }
    )


SEVERAL = ("ifca", "cfl")
"""Methods whose server has several models."""
FOUND = ("local_only", "fine_tuned", "partial", "per_fedavg", "qffl", *SEVERAL, *OF_THEIR_OWN)
RUNS = [name for name, (_, case) in CASES.items() if case.method in FOUND]


@pytest.mark.parametrize("name", RUNS)
def test_golden_values(name: str, tmp_path: Path):
    problem, case = CASES[name]
    result = run(golden(name), tmp_path / "run")
    found = torch.cat([result.model[tensor].flatten() for tensor in PROBLEMS[problem].shapes])
    expected = case.expected["x"][-1]
    np.testing.assert_allclose(found, expected[0] if case.method in SEVERAL else expected, rtol=0, atol=DIGITS)
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pydict()
    model = "adapted" if "adapted_training_loss" in table else "own"
    losses = case.expected.get("losses") or case.expected["server_losses"]
    np.testing.assert_allclose(table[f"{model}_training_loss"], losses, rtol=0, atol=DIGITS)
    if looks := case.expected["looks"]:
        sizes = [len(rows) for rows in PROBLEMS[problem].rows]
        models = looks // sum(map(len, case.cohorts))
        rows = [models * sum(sizes[i] for i in cohort) for cohort in case.cohorts]
        assert [row["client/looks"] for row in result.rows] == rows


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_golden_values_of_distributions():
    found = json.loads(Path(__file__).with_name("distributions.json").read_text())
    values, other, rows = (np.array(found[key]) for key in ("accuracy", "local_only", "rows_test"))
    columns = distribution(values, rows, found["lower_is_better"], other)
    shares = {f"_{name}": found[f"share_{name}"] for name in ("better", "equal", "worse")}
    quantiles = {f"_q{int(q):02}": value for q, value in found["quantiles"].items()}
    expected = {
        **{"": found["mean"], "_weighted": found["weighted"], "_std": found["std"]},
        **{"_worst": found["worst"], "_decile": found["bottom_decile"]},
    }
    assert columns.keys() == {**expected, **quantiles, **shares}.keys()
    for suffix, value in {**expected, **quantiles, **shares}.items():
        assert columns[suffix] == pytest.approx(value, abs=1e-12), suffix


def test_which_values_are_better():
    assert better("eval/own/test_accuracy_worst") == better("eval/own/test_loss_better") == "max"
    assert better("eval/adapted/validation_loss_q10") == better("eval/own/test_accuracy_std") == "min"
    assert better("eval/own/test_error_weighted", ("error",)) == "min"


def test_one_line_has_the_mean_and_the_worst():
    names = ["eval/accuracy", "eval/own/test_accuracy", "eval/own/test_accuracy_worst", "eval/own/test_accuracy_q05"]
    assert [is_in_short(name) for name in names] == [True, True, True, False]


def test_choices_by_validation_rows():
    assert on_validation("eval/own/test_accuracy_worst") == "eval/own/validation_accuracy_worst"
    assert on_validation("eval/adapted/validation_loss") is None


def test_a_sample_of_clients_is_the_same_in_all_rounds():
    assert evaluated_clients(10, 0, 1).tolist() == list(range(10))
    assert len(evaluated_clients(10, 0.25, 1)) == 2
    assert evaluated_clients(10, 4, 1).tolist() == sorted(evaluated_clients(10, 4, 1).tolist())
    assert set(evaluated_clients(10, 4, 1)) <= set(evaluated_clients(10, 6, 1))


# --- runs -------------------------------------------------------------------------------------------------------------
def evaluated(result: Result) -> dict[str, float]:
    return {name: value for name, value in result.rows[-1].items() if name.startswith("eval/")}


OWN = {"evaluate": {"every": 2, "held_out": 0.25, "clients": {"own": True, "adapt": {"steps": 2}}}}


def test_a_method_without_own_models_has_the_servers():
    """Its clients' models are the server's, so that no client is better or worse off; adapted models are others."""
    found = evaluated(run(small(**OWN)))
    assert found["eval/own/test_accuracy_equal"] == 1
    assert found["eval/own/test_loss"] == pytest.approx(found["eval/clients/test_loss"], rel=1e-12)
    assert found["eval/adapted/test_loss_equal"] < 1
    assert found["eval/gradients"] == 12 * 2


def test_an_adaptation_of_no_effect_is_the_model():
    clients = {"own": True, "adapt": {"steps": 1, "rule": {"name": "sgd", "lr": 1e-300}}}
    found = evaluated(run(small(HEAD, evaluate={"every": 0, "held_out": 0.25, "clients": clients})))
    assert found["eval/own/test_loss"] == found["eval/adapted/test_loss"]


def test_evaluations_move_no_bit_of_training():
    assert (
        run(small(HEAD, **OWN)).model_sha256 == run(small(HEAD, evaluate={"every": 0, "held_out": 0.25})).model_sha256
    )


def test_the_servers_model_is_not_evaluated_where_a_part_of_it_is_not_trained():
    for given in ({"personal": HEAD}, {"method": "local_only"}):
        found = evaluated(run(small(**given)))
        assert all(name.startswith("eval/own/training_") or name == "eval/own/never" for name in found)
        assert 0 < found["eval/own/never"] < 12


def test_a_resumed_run_and_its_table_have_the_same_bytes(tmp_path: Path):
    made = small(HEAD, **OWN)
    with pytest.raises(Interrupted):
        run(made, tmp_path / "run", [Watch(r2=interrupt)])
    resumed, whole = resume(made, tmp_path / "run"), run(made, tmp_path / "whole")
    assert evaluated(resumed) == evaluated(whole)
    first, second = (path / "clients.parquet" for path in (tmp_path / "run", tmp_path / "whole"))
    assert first.read_bytes() == second.read_bytes()


CHOICE = [{"steps": 1}, {"steps": 4, "tensors": "head"}]


def table_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in pq.read_table(folder / "clients.parquet").to_pydict().items()}


def test_the_table_has_the_last_round_of_each_client(tmp_path: Path):
    """As the files of the rounds have it, and after an interruption, too. A client that was never drawn has none."""
    made = small(HEAD, **OWN, tracking={"uri": "none", "clients": True}, checkpoint={"every": 1})
    run(made, tmp_path / "run")
    rounds = [pq.read_table(file).to_pydict() for file in sorted((tmp_path / "run" / "clients").iterdir())]
    last = {client: one["round"][0] for one in rounds for client in one["id"]}
    found = pq.read_table(tmp_path / "run" / "clients.parquet")["last_round"].to_pylist()
    assert found == [last.get(client) for client in range(12)]
    assert len({*found}) > 2
    assert None in found
    with pytest.raises(Interrupted):
        run(made, tmp_path / "resumed", [Watch(r2=interrupt)])
    resume(tmp_path / "resumed")
    first, second = (tmp_path / name / "clients.parquet" for name in ("run", "resumed"))
    assert first.read_bytes() == second.read_bytes()


def test_each_client_chooses_an_adaptation_by_its_validation_rows(tmp_path: Path):
    """The first one of a list has the numbers that it has alone, and what is chosen has those of the choice."""
    evaluate = {"every": 0, "held_out": 0.2, "validation": 0.2, "clients": {"own": True, "adapt": CHOICE}}
    made = run(small(evaluate=evaluate), tmp_path / "run")
    alone = run(small(evaluate={**evaluate, "clients": {"own": True, "adapt": CHOICE[0]}}))
    assert evaluated(made)["eval/adapted/test_loss_std"] == evaluated(alone)["eval/adapted/test_loss_std"]
    assert evaluated(made)["eval/gradients"] == 12 * 5
    assert not any("chosen" in name for name in evaluated(alone))
    table = table_of(tmp_path / "run")
    models = ("own", "adapted", "adapted@2")
    best = np.argmin([table[f"{model}_validation_loss"] for model in models], axis=0)
    assert np.array_equal(table["chosen"], best)
    assert len(set(best)) > 1
    for name in ("test_accuracy", "test_loss", "validation_loss"):
        expected = np.choose(best, [table[f"{model}_{name}"] for model in models])
        assert np.array_equal(table[f"chosen_{name}"], expected)
        assert evaluated(made)[f"eval/chosen/{name}"] == expected.mean()


def test_of_equal_models_the_earlier_is_chosen_and_accuracy_decides_where_there_is_no_loss():
    values = {"own": [0.5, 0.5, np.nan], "adapted": [0.5, 0.75, np.nan], "adapted@2": [0.25, 0.75, np.nan]}
    names = {f"{model}/validation_accuracy": np.array(each) for model, each in values.items()}
    found = OfClients.of({"id": np.arange(3), **names}).with_choice(())
    assert found.chosen is not None
    assert found.chosen.tolist() == [0, 1, 0]


class Ranked(Digits):
    """It has a metric of all rows of a client, which those with a single class lack."""

    whole = ("label",)  # pyright: ignore[reportAssignmentType]

    def report(self, p, batch):
        return {**super().report(p, batch), "label": batch["label"]}

    def summary(self, means, columns):
        labels = set(columns["label"].tolist())
        return {"classes": float(len(labels)) + means["loss"] * 0} if len(labels) > 1 else {}


@pytest.mark.long
def test_metrics_of_all_rows_are_of_the_clients_that_have_them(tmp_path: Path):
    workload = Ranked(Built(network), Dirichlet(0.05))
    evaluate = {"every": 0, "held_out": 0.3, "batch": 4, "clients": {"own": True}}
    made = small(HEAD, workload=workload, evaluate=evaluate)
    row = run(made, tmp_path / "run").rows[-1]
    split = RunSpec.of("rows", made).split()
    held = split.client_index.held
    assert held is not None
    counts = np.array([len(set(split.train["label"][rows])) for rows in np.split(held.rows, held.offsets[1:-1])])
    several = counts > 1
    assert 0 < several.sum() < 12
    assert row["eval/own/test_classes"] == pytest.approx(counts[several].mean())
    assert row["eval/own/test_classes_missing"] == (counts == 1).sum()
    column = pq.read_table(tmp_path / "run" / "clients.parquet")["own_test_classes"].to_pylist()
    assert [value is None for value in column] == (~several).tolist()


@pytest.mark.long
def test_a_run_that_ends_early_evaluates_all_clients(tmp_path: Path):
    stop = {"metric": "eval/own/test_loss", "target": 1e9}
    evaluate = {"every": 2, "held_out": 0.25, "clients": {"sample": 3, "table": "every"}, "stop": stop}
    result = run(small(HEAD, evaluate=evaluate), tmp_path / "run")
    table = table_of(tmp_path / "run")
    assert len(result.rows) == 2
    assert table["client"].tolist() == list(range(12))
    assert evaluated(result)["eval/own/test_loss"] == pytest.approx(table["own_test_loss"].mean())
    files = (tmp_path / "run" / name for name in ("clients.parquet", "clients-000002.parquet"))
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.long
def test_clients_that_are_left_out_count_in_no_mean(tmp_path: Path):
    federation = {"clients": 12, "cohort": 5, "rounds": 2, "local": {"steps": 2, "batch": 8}, "without": [0, 5]}
    evaluate = {"every": 0, "held_out": 0.25, "clients": {"table": "last"}}
    result = run(small(HEAD, federation=federation, evaluate=evaluate), tmp_path / "run")
    values = np.delete(table_of(tmp_path / "run")["own_test_loss"], [0, 5])
    assert evaluated(result)["eval/own/test_loss"] == pytest.approx(values.mean())


def test_numbers_of_clients_alone_without_byzantine_ones(tmp_path: Path):
    """With `server: false` the test set is not read, which moves no bit. Byzantine clients are in the table and in no
    mean; with `table: none` there is no table, and the numbers are the same."""
    given = {"attack": {"name": "label_flip", "clients": [0, 5]}}
    evaluate = {"every": 0, "held_out": 0.25, "server": False, "clients": {"own": True}}
    result = run(small(**given, evaluate=evaluate), tmp_path / "run")
    found, table = evaluated(result), table_of(tmp_path / "run")
    assert not {"eval/accuracy", "eval/loss"} & found.keys()
    assert table["client"].tolist() == list(range(12))
    for name in ("own_test_loss", "own_test_accuracy"):
        honest = np.delete(table[name], [0, 5])
        assert found[f"eval/{name.replace('_', '/', 1)}"] == pytest.approx(honest.mean(), rel=1e-12)
        assert honest.mean() != table[name].mean()
    plain = small(**given, evaluate={**evaluate, "server": "auto", "clients": {"own": True, "table": "none"}})
    other = run(plain, tmp_path / "plain")
    assert other.model_sha256 == result.model_sha256
    assert not (tmp_path / "plain" / "clients.parquet").exists()
    assert {name: evaluated(other)[name] for name in found} == found
    assert "eval/accuracy" in evaluated(other)


@pytest.mark.long
def test_what_clients_keep_is_counted():
    row = run(small(HEAD, **OWN)).rows[-1]
    assert row["personal/parameters"] == 8 * 10 + 10
    assert row["personal/stored"] == 8 * 90 * (12 - row["eval/own/never"])
    assert 0 < row["time/clients"] <= row["time/evaluate"]


def test_whole_models_that_clients_keep_are_counted_without_shared_statistics():
    spec = RunSpec.of("x", small(method="ditto", workload=NORMED))
    tensors = dict(spec.initial_model().items())
    parameters = sum(value.numel() for name, value in tensors.items() if "running" not in name)
    for method, count in (("ditto", parameters), ("local_only", sum(value.numel() for value in tensors.values()))):
        spec = RunSpec.of("x", small(method=method, workload=NORMED))
        assert spec.personal_numbers(StateSpec(spec.method(), spec.initial_model()).client) == count


@pytest.mark.parametrize(("lr", "told"), [(0.05, []), (0.1, ["a step of w is lr * lam = 1.5 times its distance from"])])
def test_pfedme_says_that_a_step_goes_beyond_the_own_model(lr: float, told: list[str]):
    log = Watch()
    run(small(method={"name": "pfedme", "lam": 15, "rule": sgd(lr)}), observers=[log])
    found = [line for line in log.told if line.startswith("a step of w")]
    assert [line[: len(one)] for line, one in zip(found, told, strict=True)] == told


class FirstHoldsOut(Digits):
    """The first client alone holds out rows, so many that they are a task of their own."""

    def split(self, seed: int, clients: int) -> Any:
        split = super().split(seed, clients)
        held_out = np.zeros(len(split.train["label"]), dtype=bool)
        held_out[split.client_index.rows[: split.client_index.offsets[1] // 2]] = True
        return split._replace(train={**split.train, HELD_OUT: held_out})


def test_tasks_of_clients_without_rows_to_be_evaluated_on(tmp_path: Path):
    federation = {"clients": 3, "cohort": 3, "rounds": 1, "local": {"steps": 1, "batch": 4}}
    evaluate = {"every": 0, "batch": 4, "clients": {"table": "last"}}
    workload = FirstHoldsOut(Mlp((4,)), Contiguous())
    result = run(small(None, "ditto", workload, federation=federation, evaluate=evaluate), tmp_path / "run")
    own = table_of(tmp_path / "run")["own_test_loss"]
    assert own[1:].tolist() == [None, None]
    assert evaluated(result)["eval/own/test_loss"] == own[0]


def test_settings_at_their_defaults_are_in_no_configuration():
    """So that configurations of earlier versions have the digests that they had."""
    clients = small(evaluate={"clients": {"adapt": [{"steps": 1}, {"epochs": 2, "tensors": "head"}]}}).plain()
    clients = clients["evaluate"]["clients"]
    assert clients.keys() == {"own", "adapt", "sample"}
    assert ["tensors" in each for each in clients["adapt"]] == [False, True]


@pytest.mark.long
def test_workers_evaluate_as_one_process(tmp_path: Path):
    made = small(HEAD, **OWN)
    engine = {**made.engine.model_dump(), "backend": "ray", "workers": 2, "cpus": 0.5}
    run(made, tmp_path / "one")
    run(small(HEAD, **{**OWN, "engine": engine}), tmp_path / "two")
    first, second = (path / "clients.parquet" for path in (tmp_path / "one", tmp_path / "two"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.long
def test_an_asynchronous_run_evaluates_rows_that_are_committed_with_the_update(tmp_path: Path):
    """In an asynchronous run whose updates are rounds, clients have the models of the rounds."""
    federation = {"clients": 12, "cohort": 5, "rounds": 4, "local": {"steps": 4, "batch": 8}}
    alike = {**federation, "pace": {"name": "buffered", "buffer": 5}}
    systems = {"devices": {"name": "lognormal", "sigma": 0.0}}
    run(small(HEAD, **OWN, federation=alike, systems=systems), tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pydict()
    assert sum(table["visits"]) == 20
    assert len(set(table["own_test_loss"])) > 8


def test_runs_of_one_process_evaluate_their_own_clients():
    made = [small(HEAD, **OWN, seed=seed) for seed in (0, 1)]
    together = execute_together([(RunSpec.of(f"run-{i}", one), None) for i, one in enumerate(made)])
    for one, found in zip(made, together, strict=True):
        assert isinstance(found, Result), found
        assert evaluated(found) == pytest.approx(evaluated(run(one)), rel=1e-9)


KEPT = {"backend": "local", "dtype": "float64", "block": 2, "keep_state": True}


@pytest.mark.long
def test_a_fork_keeps_what_is_personal(tmp_path: Path):
    """It has the parent's bits and table without a change, and cannot change which tensors are personal."""
    parent = run(small(HEAD, **OWN, checkpoint={"every": 2}, engine=KEPT), tmp_path / "parent")
    same = fedfleet.fork(tmp_path / "parent", 2, out=tmp_path / "same", progress=False)
    assert same.model_sha256 == parent.model_sha256
    assert evaluated(same) == evaluated(parent)
    first, second = (tmp_path / name / "clients.parquet" for name in ("parent", "same"))
    assert first.read_bytes() == second.read_bytes()
    sentence = "personal.tensors must stay as it is in a fork: clients keep rows of another form"
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        fedfleet.fork(tmp_path / "parent", 2, "personal.tensors=body", tmp_path / "other", progress=False)


# --- running statistics -----------------------------------------------------------------------------------------------
@pytest.mark.long
def test_statistics_of_a_clients_own_rows():
    """By hand for the first layer: the means of the batches' means and unbiased variances, of 7 rows as 3, 3 and 1."""
    x = Tree.of({name: value.double() for name, value in NORMED.init(0).items()})
    images = torch.rand(7, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    columns = {"input": images, "label": torch.arange(7)}
    momenta = momenta_of(NORMED.outline)
    assert set(momenta.values()) == {0.1}
    found = OwnStatistics(NORMED, {}, momenta, 3, 0, lambda: None).measured(x, 5, columns)
    hidden = [batch.flatten(1) @ x["1.weight"].T + x["1.bias"] for batch in images.split(3)]
    mean = torch.stack([each.mean(0) for each in hidden]).mean(0)
    var = torch.stack([each.var(0) if len(each) > 1 else torch.zeros(6).double() for each in hidden]).mean(0)
    torch.testing.assert_close(found["2.running_mean"], mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found["2.running_var"], var, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(found[name], x[name]) for name in x.layout.names if "running" not in name)


# --- reports of several clients at once -------------------------------------------------------------------------------
class Stubborn(Digits):
    """Its report cannot run under vmap."""

    def report(self, p, batch):
        if float(batch["input"].sum()) < 0:
            raise AssertionError("images are not negative")
        return super().report(p, batch)


@pytest.mark.parametrize(("kind", "block"), [(Digits, 3), (Digits, 1), (Stubborn, 3)])
def test_reports_of_blocks_are_those_of_clients(kind: type[Digits], block: int):
    """With unequal numbers of rows, and a client without any; a batch has 4 rows."""
    workload, random = kind(Built(network), Iid()), torch.Generator().manual_seed(0)
    split = workload.split(0, 20)
    index = ClientIndex.of([np.arange(4), np.arange(0), np.arange(7, 8), np.arange(9, 15), np.arange(30, 33)])
    train = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in split.train.items()}
    x = Tree.of({name: value.double() for name, value in workload.init(0).items()})
    models = [Tree(x.flat + 0.1 * torch.rand(x.flat.shape, generator=random), x.layout) for _ in range(5)]
    rows = ClientRows.of(train, index, np.arange(5), torch.device("cpu"), workload)
    found = ClientReports(workload, {}, 4, block, lambda: None).of_own_models(models, rows)
    for client, model in enumerate(models):
        some = index.rows[index.offsets[client] : index.offsets[client + 1]]
        if not len(some):
            assert np.isnan(found["loss"][client])
            continue
        report = workload.report(dict(model.items()), {name: column[some] for name, column in train.items()})
        for name, column in report.items():
            assert found[name][client] == pytest.approx(float(column.double().mean()), rel=1e-12)


def test_a_chains_outputs_for_several_clients_are_reported_together_to_the_same_bits():
    """The report of all rows of a batch against that of each client's, and within float32's rounding of plain torch."""
    workload, random = Digits(Mlp((12,)), Iid()), torch.Generator().manual_seed(0)
    split = workload.split(0, 20)
    index = ClientIndex.of([np.arange(4), np.arange(0), np.arange(7, 8), np.arange(9, 20), np.arange(30, 33)])
    train = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in split.train.items()}
    x = Tree.of(workload.init(0))
    models = [Tree(x.flat + 0.1 * torch.rand(x.flat.shape, generator=random), x.layout) for _ in range(5)]
    rows = ClientRows.of(train, index, np.arange(5), torch.device("cpu"), workload)
    chain = chain_from(workload, x.layout)
    calls = list[int]()
    reports = ClientReports(workload, {}, 8, 1, lambda: None, chain)
    of_outputs = reports.of_outputs
    assert of_outputs is not None
    reports.of_outputs = lambda outputs, batch: (calls.append(len(outputs)), of_outputs(outputs, batch))[1]
    found = reports.of_own_models(models, rows)
    assert calls == [5, 8, 6]  # 4 and 1 rows; 8 of the 11; the other 3 and the last client's 3
    for client, model in enumerate(models):
        batch = rows.between(*rows.ends[client : client + 2])
        if not len(batch["label"]):
            assert np.isnan(found["loss"][client])
            continue
        pieces = [{name: column[part] for name, column in batch.items()} for part in (slice(8), slice(8, 16))]
        alone = [of_outputs(chain.outputs(model.flat, piece), piece) for piece in pieces if len(piece["label"])]
        plain = workload.report(dict(model.items()), batch)
        for name, column in plain.items():
            own = torch.cat([report[name] for report in alone]).double().numpy()
            assert found[name][client] == own.mean()
            assert found[name][client] == pytest.approx(float(column.double().mean()), rel=1e-5)
