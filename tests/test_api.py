"""The Python API: the names of `fedfleet`, iterating over rounds, results, and what a type checker sees of it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedfleet
from fedfleet.engine.state.checkpoint import checkpointed_rounds
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp

ROOT = Path(__file__).parents[1]
API = ROOT / "src/fedfleet/__init__.py"


def small(method: Any = "fedavg", rounds: int = 4, **more: Any) -> fedfleet.Experiment:
    return fedfleet.Experiment(
        workload={"name": "digits", "model": {"name": "mlp", "hidden": [8]}},
        method=method,
        federation={"clients": 10, "cohort": 4, "rounds": rounds, "local": {"steps": 2}},
        engine={"backend": "local", "block": 2, "kernels": "torch"},
        evaluate={"every": 2},
        tracking={"uri": "none"},
        **more,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedfleet.Result:
    """The result of a run without interruption, with a folder."""
    return fedfleet.run(small("scaffold"), tmp_path_factory.mktemp("whole") / "run")


# --- names ------------------------------------------------------------------------------------------------------------
def test_every_name_exists_and_is_listed():
    assert dir(fedfleet) == sorted(fedfleet.__all__)
    assert all(getattr(fedfleet, name) is not None for name in fedfleet.__all__)
    assert fedfleet.__version__ in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = fedfleet.rum  # type: ignore[attr-defined]


def test_importing_it_loads_nothing_large():
    script = "import sys, fedfleet; dir(fedfleet); fedfleet.__version__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pydantic", "ray", "pyarrow", "yaml"} & set(done.stdout.split())


# --- configurations ---------------------------------------------------------------------------------------------------
def test_a_wrong_configuration_is_one_sentence():
    with pytest.raises(fedfleet.ConfigError, match=r"^federation.clints is not a key; did you mean clients\?"):
        fedfleet.Experiment(workload="digits", method="fedavg", federation={"clints": 3})
    with pytest.raises(fedfleet.ConfigError, match=r"^clints is not a key; did you mean clients\?"):
        fedfleet.Federation(clints=3)  # type: ignore[call-arg]
    with pytest.raises(fedfleet.ConfigError, match="cohort <= clients must hold, got 20 with clients=3") as raised:
        fedfleet.Federation(clients=3)
    assert raised.value._render_traceback_() == [f"ConfigError: {raised.value}"]


def test_type_checkers_see_all_keys_of_an_experiment():
    source = ast.parse(inspect.getsource(fedfleet.Experiment))
    for_checkers = next(node for node in ast.walk(source) if getattr(node, "name", "") == "__init__")
    assert {each.arg for each in for_checkers.args.kwonlyargs} == set(fedfleet.Experiment.model_fields)


def test_an_experiment_is_shown_by_what_differs_from_the_defaults():
    shown = repr(fedfleet.Experiment(workload="digits", method="fedavg", federation={"rounds": 3}))
    assert shown == "Experiment(workload='digits', method='fedavg', federation=Federation(rounds=3))"
    names = {name: getattr(fedfleet, name) for name in fedfleet.__all__}
    assert eval(shown, names) == fedfleet.Experiment(
        workload="digits", method="fedavg", federation=fedfleet.Federation(rounds=3)
    )


def test_load_reads_names_files_and_folders(whole: fedfleet.Result):
    assert fedfleet.load("digits", "federation.rounds=3").federation.rounds == 3
    assert fedfleet.load("digits", ["federation.rounds=3", "seed=1"]).seed == 1
    assert whole.directory is not None
    assert fedfleet.load(whole.directory).plain() | {"name": ""} == small("scaffold").plain()


# --- rounds -----------------------------------------------------------------------------------------------------------
def test_rounds_are_seen_while_they_run(whole: fedfleet.Result):
    recorded: list[float] = []
    rounds = fedfleet.rounds(small("scaffold"), observers=[lambda record: recorded.append(record["round"])])
    assert "not begun" in repr(rounds)
    for record in rounds:
        assert record["round"] == recorded[-1] == len(recorded)  # no later round has ended yet
        assert ("eval/accuracy" in record) == (record["round"] % 2 == 0)
    assert recorded == [1, 2, 3, 4]
    assert rounds.result.model_sha256 == whole.model_sha256
    assert list(rounds) == []


def test_a_loop_that_is_left_leaves_a_checkpoint(tmp_path: Path, whole: fedfleet.Result):
    for record in fedfleet.rounds(small("scaffold"), tmp_path):
        if record["round"] == 2:
            break
    assert checkpointed_rounds(tmp_path) == [2]
    rest = fedfleet.rounds(small("scaffold"), tmp_path, resume=True)
    assert [record["round"] for record in rest] == [3, 4]
    assert rest.result.model_sha256 == whole.model_sha256
    assert len(rest.result.rows) == 4


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_loop_that_is_left_when_the_process_ends_leaves_a_checkpoint(tmp_path: Path, whole, backend):
    """The object is a module's variable, which Python destroys after all exit functions."""
    program = f"""
import fedfleet
settings = ["engine.backend={backend}", "engine.workers=1", "federation.rounds=100000"]
rounds = fedfleet.rounds(fedfleet.load("small.yaml", settings), "run")
next(rounds), next(rounds)
"""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small("scaffold").plain()))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    (left,) = checkpointed_rounds(tmp_path / "run")
    if backend == "ray":  # there the run goes on while the caller uses a round
        assert left >= 2
    else:
        assert left == 2
        assert fedfleet.resume(small("scaffold"), tmp_path / "run").model_sha256 == whole.model_sha256


def test_a_copy_of_a_left_loop_in_a_forked_process_leaves_nothing(tmp_path: Path):
    """Where a program forks, as some of a user's libraries do, the child's copy of the object is destroyed too."""
    rounds = fedfleet.rounds(small("scaffold"), tmp_path)
    next(rounds)
    child = os.fork()
    if child == 0:
        rounds.close()
        os._exit((tmp_path / "checkpoints").exists())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(rounds)["round"] == 2
    rounds.close()


def test_a_loop_that_was_interrupted_goes_on(tmp_path: Path, whole: fedfleet.Result):
    """As in a notebook, where a KeyboardInterrupt comes between two rounds and the object still exists."""
    rounds = fedfleet.rounds(small("scaffold"), tmp_path)

    def use() -> None:
        for record in rounds:
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    with pytest.raises(fedfleet.FedFleetError, match="no result after round 2; ask for the other rounds"):
        _ = rounds.result
    assert rounds.finish().model_sha256 == whole.model_sha256


def test_an_interrupted_wait_is_resumed_to_the_same_bits(tmp_path: Path, whole: fedfleet.Result):
    before = signal.getsignal(signal.SIGINT)
    seen: list[float] = []

    def interrupt(record: fedfleet.Record) -> None:
        seen.append(record["round"])
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(fedfleet.Interrupted) as raised:
        fedfleet.rounds(small("scaffold"), tmp_path, [interrupt]).finish()
    assert signal.getsignal(signal.SIGINT) == before
    assert seen == [1, 2]
    how = str(raised.value)
    assert how == f"interrupted; checkpoint after round 2; to go on: fedfleet.resume({str(tmp_path)!r})"
    resumed = eval(how.rpartition(": ")[2])
    assert resumed.model_sha256 == whole.model_sha256
    with pytest.raises(fedfleet.ConfigError, match="the run is complete"):
        fedfleet.resume(tmp_path)


def test_a_run_of_objects_is_resumed_with_its_experiment(tmp_path: Path):
    made = small("scaffold").model_copy(update={"workload": Digits(model=Mlp((4,)))})
    whole = fedfleet.run(made)
    with pytest.raises(fedfleet.Interrupted) as raised:
        fedfleet.run(made, tmp_path, [lambda record: os.kill(os.getpid(), signal.SIGINT)])
    how = str(raised.value).rpartition(": ")[2]
    assert how == f"fedfleet.resume(experiment, {str(tmp_path)!r})"
    with pytest.raises(fedfleet.ConfigError, match=r"was an object of Python, Digits\(.*; give the experiment"):
        fedfleet.resume(tmp_path)
    assert eval(how, {"fedfleet": fedfleet, "experiment": made}).model_sha256 == whole.model_sha256


def test_a_run_without_a_folder_says_that_nothing_is_kept():
    with pytest.raises(fedfleet.Interrupted, match="nothing is kept: give out"):
        fedfleet.run(small(), stop=lambda: signal.SIGINT)


def test_a_context_ends_the_run(tmp_path: Path):
    with fedfleet.rounds(small(rounds=1000), tmp_path) as rounds:
        next(rounds)
    assert list(rounds) == []
    assert checkpointed_rounds(tmp_path) == [1]
    with pytest.raises(fedfleet.FedFleetError, match="resume it"):
        _ = rounds.result


def test_mistakes_are_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(fedfleet.ConfigError, match="observers must be Observers or functions"):
        fedfleet.run(small(), observers=[3])  # type: ignore[list-item]
    with pytest.raises(fedfleet.ConfigError, match="holds no run"):
        fedfleet.resume(tmp_path)
    with pytest.raises(fedfleet.ConfigError, match="directory is missing"):
        fedfleet.resume(small())  # type: ignore[call-overload]
    with pytest.raises(fedfleet.ConfigError, match="resume=True continues the run in the folder out"):
        fedfleet.rounds(small(), resume=True)
    for given, says in (
        ("digits", r"got 'digits'; write fedfleet\.load\('digits'\)"),
        (tmp_path / "x.yaml", r"write fedfleet\.load\('.*x\.yaml'\)"),
        ({"workload": "digits"}, r"got a dict; write Experiment\(\*\*data\)"),
        (None, r"got NoneType; write Experiment\(workload="),
    ):
        for start in (fedfleet.run, fedfleet.rounds):
            with pytest.raises(fedfleet.ConfigError, match=f"experiment must be an Experiment, .*{says}"):
                start(given, tmp_path / "new")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# --- results ----------------------------------------------------------------------------------------------------------
def test_a_result_is_read_from_its_folder(whole: fedfleet.Result):
    assert whole.directory is not None
    read = fedfleet.Result.load(whole.directory)
    assert read.experiment.plain() == whole.experiment.plain()
    assert read.records.equals(whole.records)
    assert (read.run_id, read.model_sha256) == (whole.run_id, whole.model_sha256)
    assert read.summary() == whole.summary()
    assert read.to_pandas()["eval/accuracy"].notna().tolist() == [False, True, False, True]


def test_what_is_no_result_is_refused(tmp_path: Path, whole: fedfleet.Result):
    with pytest.raises(fedfleet.ConfigError, match="holds no run"):
        fedfleet.Result.load(tmp_path)
    next(fedfleet.rounds(small(), tmp_path / "begun"))  # the object is deleted here, which ends the run
    with pytest.raises(fedfleet.ConfigError, match="has not finished; resume it"):
        fedfleet.Result.load(tmp_path / "begun")
    assert whole.directory is not None
    shutil.copytree(whole.directory, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(fedfleet.ConfigError, match="damaged or incomplete"):
        fedfleet.Result.load(tmp_path / "damaged")


def test_the_representation_is_short(whole: fedfleet.Result):
    assert repr(whole).startswith("Result(scaffold on digits: 4 rounds, eval/loss ")
    assert len(repr(whole)) < 120 + len(str(whole.directory))


def test_evaluation_repeats_the_numbers_of_the_last_round(whole: fedfleet.Result):
    threads = torch.get_num_threads()
    assert whole.evaluate() == {name: value for name, value in whole.metrics.items() if name.startswith("eval/")}
    assert torch.get_num_threads() == threads
    assert {"eval/clients/accuracy", "eval/clients/loss_worst"} <= set(whole.evaluate(clients=True))


def test_evaluation_on_rows_of_ones_own(whole: fedfleet.Result):
    from fedfleet.engine.run_spec import RunSpec

    test = RunSpec.of("rows", whole.experiment).split().test
    own, count, first = whole.evaluate(), len(test["label"]), 100
    assert whole.evaluate(test) == own
    head = whole.evaluate({name: torch.from_numpy(column[:first]) for name, column in test.items()})
    tail = whole.evaluate({name: column[first:] for name, column in test.items()})
    for name, value in own.items():
        assert (first * head[name] + (count - first) * tail[name]) / count == pytest.approx(value)
    with pytest.raises(fedfleet.ConfigError, match="test must have the columns input, label, got input"):
        whole.evaluate({"input": test["input"]})
    with pytest.raises(fedfleet.ConfigError, match=r"test: label must have the shape \(n\), got"):
        whole.evaluate({"input": test["input"], "label": test["input"]})
    with pytest.raises(fedfleet.ConfigError, match="same number of rows in all columns"):
        whole.evaluate({"input": test["input"][:3], "label": test["label"][:2]})


def test_curves(whole: fedfleet.Result, monkeypatch: pytest.MonkeyPatch):
    import matplotlib

    matplotlib.use("Agg")
    axes = whole.plot()
    (line,) = axes.lines
    assert list(line.get_xdata()) == [2, 4]  # the rounds that were evaluated
    assert list(line.get_ydata()) == [row["eval/accuracy"] for row in whole.rows if "eval/accuracy" in row]
    assert (axes.get_ylabel(), line.get_label()) == ("eval/accuracy", "scaffold on digits")
    assert whole.plot("train/loss", "client/norm2", x="bytes", ax=axes, linestyle="--") is axes
    assert list(axes.lines[1].get_xdata()) == list(
        np.cumsum([r["comm/bytes_up"] + r["comm/bytes_down"] for r in whole.rows])
    )
    assert [line.get_label() for line in axes.lines[1:]] == [
        "scaffold on digits: train/loss",
        "scaffold on digits: client/norm2",
    ]
    with pytest.raises(fedfleet.ConfigError, match="no column eval/acuracy; did you mean eval/accuracy"):
        whole.plot("eval/acuracy")
    matplotlib.pyplot.close("all")


def test_comparison(whole: fedfleet.Result):
    fedavg = [fedfleet.run(small(seed=seed)) for seed in (0, 1)]
    assert whole.directory is not None
    table = fedfleet.compare([*fedavg, whole.directory], targets=[0.0, 2.0])
    assert list(table.index) == ["fedavg", "scaffold"]
    assert list(table["runs"]) == [2, 1]
    finals = [result.metrics["eval/accuracy"] for result in fedavg]
    assert table.loc["fedavg", "eval/accuracy"] == pytest.approx(np.mean(finals))
    assert table.loc["fedavg", "std"] == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    assert np.isnan(table.loc["scaffold", "std"])
    assert table["rounds to 0"].tolist() == [2, 2]
    assert table["rounds to 2"].isna().all()
    assert table.loc["scaffold", "MB up"] == pytest.approx(2 * table.loc["fedavg", "MB up"])
    losses = fedfleet.compare({"mine": whole}, "train/loss", lower=True)
    assert losses.loc["mine", "best"] == min(row["train/loss"] for row in whole.rows)
    with pytest.raises(fedfleet.ConfigError, match="has no column eval/acuracy; did you mean eval/accuracy"):
        fedfleet.compare(fedavg, "eval/acuracy")
    with pytest.raises(fedfleet.ConfigError, match="runs must be a list"):
        fedfleet.compare(whole)  # type: ignore[arg-type]
    with pytest.raises(fedfleet.ConfigError, match="at least, got none"):
        fedfleet.compare([])
    for paired in (False, True):
        with pytest.raises(fedfleet.ConfigError, match="at least, got none"):
            fedfleet.compare({}, paired=paired)


# --- the model before round 1 -----------------------------------------------------------------------------------------
def test_the_workloads_own_model_changes_nothing(whole: fedfleet.Result):
    from fedfleet.engine.run_spec import RunSpec

    own = dict(RunSpec.of("start", small("scaffold")).initial_model().items())
    given = {name: tensor.numpy() for name, tensor in reversed(own.items())}
    assert fedfleet.run(small("scaffold"), initial_model=given).model_sha256 == whole.model_sha256


def test_a_given_model_is_what_the_run_starts_from(tmp_path: Path, whole: fedfleet.Result):
    still = {"name": "fedavg", "rule": {"name": "sgd", "lr": 1e-30}}
    assert fedfleet.run(small(still), initial_model=whole.model).model_sha256 == whole.model_sha256
    straight = fedfleet.run(small("scaffold"), tmp_path / "straight", initial_model=whole.model)
    assert straight.model_sha256 != whole.model_sha256
    assert straight.metrics["train/loss"] < whole.metrics["train/loss"]
    for record in fedfleet.rounds(small("scaffold"), tmp_path / "broken", initial_model=whole.model):
        if record["round"] == 2:
            break
    assert fedfleet.resume(tmp_path / "broken").model_sha256 == straight.model_sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: {}, "initial_model must have the tensors of the workload's model, but .* is missing"),
        (lambda model: {**model, "more": torch.zeros(1)}, "more is not in it"),
        (lambda model: {name: value[:1] for name, value in model.items()}, "must have the shape"),
        (lambda model: {name: value * np.nan for name, value in model.items()}, "must be finite"),
        (lambda model: {name: "text" for name in model}, "must be a tensor or an array"),
        (lambda model: list(model), "initial_model must map names to tensors, got list"),
    ],
)
def test_an_unsuitable_model_is_refused(change: Any, message: str, whole: fedfleet.Result, tmp_path: Path):
    with pytest.raises(fedfleet.ConfigError, match=message):
        fedfleet.run(small(), tmp_path / "run", initial_model=change(whole.model))
    assert not (tmp_path / "run").exists()


# --- types ------------------------------------------------------------------------------------------------------------
USER = """
from collections.abc import Mapping
from pathlib import Path

import fedfleet
from typing_extensions import assert_type

experiment = fedfleet.Experiment(workload="digits", method="fedavg", federation={"rounds": 3}, seed=1)
typed = fedfleet.Experiment(workload="digits", method="fedavg", attack="zero", engine=fedfleet.Engine(backend="local"))
assert_type(experiment.federation, fedfleet.Federation)
assert_type(fedfleet.load("digits", ["seed=1"]), fedfleet.Experiment)

class Watch(fedfleet.Observer):
    def record(self, record: fedfleet.Record) -> None:
        print(record["round"])

result = fedfleet.run(experiment, Path("runs/mine"), [Watch(), lambda record: print(record["train/loss"])])
assert_type(result, fedfleet.Result)
assert_type(result.evaluate(), dict[str, float])
assert_type(fedfleet.resume("runs/mine"), fedfleet.Result)
assert_type(fedfleet.resume(experiment, "runs/mine", [Watch()]), fedfleet.Result)
rounds = fedfleet.rounds(experiment, initial_model=result.model)
assert_type(rounds, fedfleet.Rounds)
for record in rounds:
    assert_type(record, dict[str, float])
axes = result.plot("eval/loss", x="bytes")
axes.set_title(str(result.plot(ax=axes)))
table = fedfleet.compare([result, "runs/other"], targets=[0.9])
assert_type(fedfleet.__version__, str)
try:
    fedfleet.shutdown()
except (fedfleet.ConfigError, fedfleet.InUse, fedfleet.Diverged, fedfleet.ClientFailed, fedfleet.Interrupted):
    raise
fedfleet.run(3)  # an error
fedfleet.Experiment(workload="digits")  # an error
result.plot(x="time")  # an error
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as an installation has it."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "fedfleet").mkdir()
    for path in (
        API,
        API.with_suffix(".pyi"),
        API.with_name("py.typed"),
        *(ROOT / part for part in ("engine", "algorithms", "workloads", "tune")),
    ):
        (folder / "fedfleet" / path.name).symlink_to(path)
    return folder


def pyright(folder: Path, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_users_script_in_standard_mode(installed: Path):
    (installed / "user.py").write_text(USER)
    (installed / "pyrightconfig.json").write_text(json.dumps({"include": ["user.py"], "typeCheckingMode": "standard"}))
    found = pyright(installed, "--project", installed)["generalDiagnostics"]
    lines = USER.splitlines()
    assert [lines[each["range"]["start"]["line"]].endswith("# an error") for each in found] == [True] * 3, found


@pytest.mark.long
def test_the_types_of_the_api_are_complete(installed: Path):
    """The type checker knows the types of everything that the names of the API refer to: methods, attributes, base
    classes, arguments and return types."""
    symbols = pyright(installed, "--verifytypes", "fedfleet", "--ignoreexternal")["typeCompleteness"]["symbols"]
    known = {each["name"].removeprefix("fedfleet.") for each in symbols if each["isTypeKnown"]}
    assert set(fedfleet.__all__) - {"__version__"} <= known


def test_records_become_a_table_without_pandas():
    """pyarrow's own conversions import pandas, which takes longer than many a run."""
    code = """
import sys
from fedfleet.engine.records.parquet import to_table
rows = [{"round": 1, "train/loss": 0.5}, {"round": 2, "train/loss": float("nan"), "eval/accuracy": 0.25}]
assert "pandas" not in sys.modules
table = to_table(rows)
assert "pandas" not in sys.modules
assert str(table.schema.field("round").type) == "int64"
assert table["round"].to_pylist() == [1, 2]
assert table["eval/accuracy"].to_pylist() == [None, 0.25]
assert table["train/loss"].null_count == 0
assert to_table([]).num_rows == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
