"""Models of clients of a finished run: they are those that the run has evaluated; what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedfleet.engine import Result, run
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.client_states import FOLDER
from fedfleet.engine.state.checkpoint import remove_all
from tests.engine.test_personal import HEAD, NORMED, small, spec_of
from tests.tune.commands import invoke

RUNS: dict[str, dict[str, Any]] = {
    "frozen": {"personal": {"tensors": ["fc1.bias"], "frozen": "head"}},
    "apfl": {"method": "apfl"},
    "schedule": {"method": {"name": "ditto", "lam": {"schedule": "linear", "start": 1.0, "end": 0.1}}},
}
"""Of `ditto` the initial state follows from the broadcast of the last round."""
HELD = {"every": 0, "held_out": 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose clients have heads of their own."""
    made = tmp_path_factory.mktemp("client_states") / "run"
    run(small(HEAD, evaluate=HELD), made)
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_they_are_those_that_the_run_has_evaluated(name: str, tmp_path: Path):
    run(small(**RUNS[name], evaluate=HELD), tmp_path / "run")
    compare_with_evaluation(tmp_path / "run", spec_of(**RUNS[name], evaluate=HELD))


def test_heads_are_those_that_the_run_has_evaluated(folder: Path):
    compare_with_evaluation(folder, spec_of(HEAD, evaluate=HELD))


def compare_with_evaluation(folder: Path, spec: RunSpec) -> None:
    """Also of clients that have never taken part."""
    result, split = Result.load(folder), spec.split()
    table = pq.read_table(folder / "clients.parquet").to_pydict()
    states, held = result.client_states(), split.client_index.held
    assert held is not None
    assert 0 in table["visits"]
    for client in states.clients:
        rows = held.rows[held.offsets[client] : held.offsets[client + 1]]
        batch = {column: torch.from_numpy(np.ascontiguousarray(values[rows])) for column, values in split.train.items()}
        model = states.model(client)
        assert model.keys() == result.model.keys()
        with torch.no_grad():
            found = float(spec.workload.report(model, batch)["loss"].mean())
        assert found == pytest.approx(table["own_test_loss"][client], rel=1e-12)


def test_files_of_the_command(folder: Path, tmp_path: Path):
    one = tmp_path / "one.safetensors"
    assert invoke("export", str(folder), "--client", "3", "--out", str(one)).output.strip() == str(one)
    assert "12 models in" in invoke("export", str(folder), "--clients", "all").output
    files = sorted((folder / "client-models").iterdir())
    assert [file.name for file in files] == [f"{client:07}.safetensors" for client in range(12)]
    own = Result.load(folder).client_model(3)
    assert all(torch.equal(model[name], own[name]) for model in map(load_file, (one, files[3])) for name in own)
    with safe_open(one, "pt") as file:
        facts = file.metadata()
    assert facts["personal"].split(",") == list(own)[-2:]
    assert (facts["client"], facts["round"], facts["method"]) == ("3", "4", "fedavg")


def test_a_thousand_files_are_in_a_folder(folder: Path):
    """A run of more clients has a folder for each thousand of them."""
    states = Result.load(folder).client_states()
    assert states.file_name(3) == "0000003.safetensors"
    federation = states._experiment.federation.model_copy(update={"clients": 2001})
    states._experiment = states._experiment.model_copy(update={"federation": federation})
    names = [states.file_name(client) for client in (0, 999, 1000, 2000)]
    assert names == [
        *("0000000/0000000.safetensors", "0000000/0000999.safetensors"),
        *("0001000/0001000.safetensors", "0002000/0002000.safetensors"),
    ]


def refusal(*arguments: str) -> str:
    found = invoke("export", *arguments)
    assert found.exit_code == 2
    return found.output


def test_refused(folder: Path, tmp_path: Path):
    copy = str(shutil.copytree(folder, tmp_path / "copy"))
    assert "client: 0 <= client < 12 must hold, got 12" in refusal(copy, "--client", "3,12")
    assert "--client must be numbers of clients as in 3,7, got 'x'" in refusal(copy, "--client", "x")
    for file in (tmp_path / "copy" / "state").iterdir():
        file.write_bytes(b"\1" * file.stat().st_size)
    visited = int(np.argmax(np.array(pq.read_table(folder / "clients.parquet")["visits"])))
    assert f"the state of client {visited} is damaged or gone" in refusal(copy, "--client", str(visited))
    remove_all(copy)
    assert "no clients' states any more, got checkpoint.last=auto; run it again with" in refusal(copy, "--client", "3")


def test_clients_without_models_of_their_own(tmp_path: Path):
    result = run(small(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"all have the server's, model.safetensors, got fedavg; choose"):
        result.client_model(3)
    with pytest.raises(ConfigError, match="the run has no folder"):
        replace(result, directory=None).client_model(3)


TUNED = {"every": 0, "held_out": 0.25, "clients": {"adapt": [{"steps": 2}, {"steps": 3, "tensors": "head"}]}}
SOME_UNSEEN = {"clients": 12, "cohort": 5, "rounds": 2, "local": {"steps": 4, "batch": 8}, "unseen": 3}
SERVED: dict[str, dict[str, Any]] = {
    "ifca": {"method": "ifca"},
    "qffl": {"method": "qffl", "personal": HEAD},
    "fedavg": {"method": "fedavg"},
    "frozen": {"personal": {"tensors": ["fc1.bias"], "frozen": "head"}},
    "statistics": {"workload": NORMED, "personal": {"tensors": "norm"}},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_models_for_which_clients_need_their_rows(name: str, tmp_path: Path):
    """They are those that the run has evaluated, after an adaptation too, also of unseen clients. Digits: an adaptation
    runs in blocks there and for a client alone here, in float64."""
    more = {"statistics": "training"} if name == "statistics" else {}
    evaluate = {**TUNED, "clients": {**TUNED["clients"], **more}}
    given = {**SERVED[name], "evaluate": evaluate, "federation": SOME_UNSEEN}
    result, spec = run(small(**given), tmp_path / "run"), spec_of(**given)
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pydict()
    split = spec.split()
    passes = result.rows[-1].get("eval/gradients_statistics")  # of batches of 500, of which each client has one
    assert passes == (3 * 15 if name == "statistics" else None)
    index = split.client_index.everyone.held
    assert index is not None
    for adapt, model in enumerate(("own", "adapted", "adapted@2")):
        if (model, name) == ("own", "fedavg"):  # it is the server's
            continue
        states = result.client_states(adapt)
        assert len(states.clients) == 15
        for client in (0, 7, 14):
            rows = index.rows[index.offsets[client] : index.offsets[client + 1]]
            batch = {key: torch.from_numpy(np.ascontiguousarray(values[rows])) for key, values in split.train.items()}
            with torch.no_grad():
                found = float(spec.workload.report(states.model(client), batch)["loss"].mean())
            assert found == pytest.approx(table[f"{model}_test_loss"][client], rel=1e-9)
    body, head = ("1.weight", "7.weight") if "workload" in given else ("fc1.weight", "out.weight")
    tuned = result.client_model(0, 2)
    before = result.model if name == "fedavg" else result.client_model(0)
    assert torch.equal(tuned[body], before[body])
    assert not torch.equal(tuned[head], before[head])


@pytest.mark.long
def test_a_run_writes_the_models_of_its_clients_at_its_end(tmp_path: Path):
    """Its states need not be kept for that."""
    evaluate = {**HELD, "clients": {"export": "personal"}}
    made = small(HEAD, evaluate=evaluate, checkpoint={"last": False})
    run(made, tmp_path / "run")
    files = sorted((tmp_path / "run" / FOLDER).iterdir())
    assert len(files) == 12
    assert not (tmp_path / "run" / "state").exists()
    kept = run(small(HEAD, evaluate=HELD), tmp_path / "kept")
    expected = kept.client_model(3)
    found = load_file(files[3])
    assert found.keys() == {"out.weight", "out.bias"}
    with safe_open(files[3], "pt") as file:
        model = files[3].parent / file.metadata()["model"]
    assert model.resolve() == tmp_path / "run" / "model.safetensors"
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    for sentence, given in (
        ("evaluate.clients.export: needs a folder", made),
        ("evaluate.clients.export: clients have no models of their own", small(evaluate=evaluate)),
    ):
        with pytest.raises(ConfigError, match=sentence):
            run(given, tmp_path / "other" if "own" in sentence else None)


def test_the_own_part_of_a_mixture(tmp_path: Path):
    """With the number in the file's metadata and the server's model it gives the model that the client is served."""
    result = run(small(method="apfl", checkpoint={"last": True}), tmp_path / "run")
    file = tmp_path / "one.safetensors"
    assert (
        invoke("export", str(tmp_path / "run"), "--client", "3", "--as", "personal", "--out", str(file)).exit_code == 0
    )
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    alpha, own, x = float(facts["alpha"]), load_file(file), load_file(file.parent / facts["model"])
    assert 0 < alpha < 1
    served = result.client_model(3)
    assert own.keys() == served.keys()
    assert not any(torch.equal(own[name], served[name]) for name in served)
    for name, value in served.items():
        torch.testing.assert_close(alpha * own[name] + (1 - alpha) * x[name], value)


def test_the_number_of_a_cluster_is_whole(tmp_path: Path):
    everyone = {"clients": 12, "cohort": 12, "rounds": 1, "local": {"steps": 2, "batch": 8}}
    result = run(small(method="cfl", federation=everyone, checkpoint={"last": True}), tmp_path / "run")
    assert {name: repr(number) for name, number in result.client_states().own_part(3)[1].items()} == {"cluster": "0"}


@pytest.mark.parametrize("method", ["ditto", "pfedme", {"name": "ditto", "rule": {"name": "momentum", "lr": 0.1}}])
def test_the_own_part_of_a_whole_model_is_the_model(method: Any, tmp_path: Path):
    result = run(small(method=method, checkpoint={"last": True}), tmp_path / "run")
    own, facts = result.client_states().own_part(3)
    served = result.client_model(3)
    assert own.keys() == served.keys()
    assert not facts
    assert all(torch.equal(own[name], served[name]) for name in served)
    assert not all(torch.equal(own[name], result.model[name]) for name in served)


@pytest.mark.parametrize("clip", [1.0, {"name": "quantile"}], ids=["one", "adapted"])
def test_the_own_part_where_messages_are_bounded(clip: Any):
    private, parts = {"clip": clip, "noise": 0.25, "delta": 0.01}, []
    for privacy in (None, private):
        method: Any = spec_of(method="apfl", privacy=privacy).method()
        x = spec_of(method="apfl").initial_model()
        public = method.broadcast(method.server_init(x))
        client = method.client_init(method.unpack(public))._replace(v=2 * x)
        parts.append((method.own_part(x, public, client), method.client_facts(public, client)))
    (plain, facts), (bounded, same) = parts
    assert torch.equal(plain.flat, bounded.flat)
    assert facts == same


def test_an_adaptation_that_the_run_does_not_have(folder: Path):
    assert "the run has no adaptations, got adapt 1; choose a run with evaluate.clients" in refusal(
        str(folder), "--client", "3", "--adapt"
    )
