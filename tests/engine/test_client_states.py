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
from fedfleet.engine.state.checkpoint import remove_all
from tests.engine.test_personal import HEAD, small, spec_of
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


@pytest.mark.long
def test_clients_that_choose_among_models(tmp_path: Path):
    result = run(small(method="ifca"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"clients make their models from the losses on their rows .* got ifca"):
        result.client_model(3)
