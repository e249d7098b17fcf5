"""The command line as a user meets it: messages, results, progress, Ctrl-C."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from fedfleet.engine import run
from fedfleet.engine.errors import FedFleetError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.result import model_digest
from fedfleet.tune import cli, progress
from fedfleet.tune.cli import main
from fedfleet.tune.files import load
from fedfleet.tune.progress import described, observers

from .commands import COMMAND, LOCAL, error_in, invoke, shell, until

pytestmark = pytest.mark.usefixtures("here")


# --- what cannot run as it is written ---------------------------------------------------------------------------------
BAD = {
    "unknown key": ("federation.cohrt=3", ["federation.cohrt", "did you mean cohort?"]),
    "wrong type": ("federation.rounds=many", ["federation.rounds", "integer", "'many'"]),
    "cohort too large": ("federation.cohort=200", ["federation.cohort", "got 200", "clients=100", "lower it"]),
    "unknown method": ("method.name=scafold", ["method.name", "scafold", "did you mean scaffold?"]),
    "unknown rule": ("method.rule.name=adm", ["method.rule.name", "adm", "did you mean adam?"]),
    "rule without a name": ("method.rule={lr: 1}", ["method.rule", "needs a name", "valid: sgd"]),
    "unknown workload": ("workload.name=digit", ["workload.name", "digit", "did you mean digits?"]),
    "earlier workload": ("workload.name=parquet", ["workload.name", "called parquet; did you mean table? valid:"]),
    "unknown partition": ("workload.partition=dirichle", ["workload.partition", "did you mean dirichlet?"]),
    "unknown model": ("workload.model.name=lennet", ["workload.model.name", "did you mean lenet?"]),
    "malformed override": ("rounds", ["rounds is not an override", "write key=value"]),
    "unknown schedule": ("method.rule.lr={name: cosinee, start: 1}", ["method.rule.lr", "cosinee"]),
    "no such plug-in": ("plugins=no/such.py", ["plugins", "no/such.py", "give a path"]),
    "no such module": ("plugins=no.such", ["plugins", "no.such", "give a path"]),
    "unknown argument": ("workload.partition.alpha=1", ["workload.partition.alpha", "valid: beta, minimum, cap"]),
    "negative beta": ("workload.partition.beta=-1", ["workload.partition", "beta=-1.0", "0 < beta"]),
    "LeNet on 8 x 8": ("workload.model=lenet", ["lenet", "(1, 8, 8)", "choose mlp or logistic"]),
    "clients > rows": ("federation.clients=5000", ["clients=5000", "lower federation.clients"]),
    "no CUDA device": ("engine.device=cuda", ["engine.device=cuda", "no CUDA device is here", "use cpu"]),
    "unknown device": ("engine.device=gpu", ["engine.device", "'gpu'", "must be auto"]),
    "store's scheme": ("tracking.uri=ftp://x", ["tracking.uri", "ftp://x", "sqlite:///"]),
    "store as a folder": ("tracking.uri=./mlruns", ["tracking.uri", "./mlruns", "sqlite:///"]),
    "YAML object": ("seed=!!python/object/apply:os.getpid []", ["seed", "line 1", "python/object"]),
}


def check_refused(status: int, stderr: str, says: list[str], folder: Path, held: set[Path]) -> None:
    assert status == 2, stderr
    assert error_in(stderr).startswith("error: ")
    assert "Traceback" not in stderr
    for words in says:
        assert words in stderr
    assert set(folder.iterdir()) == held


@pytest.mark.parametrize("case", [case for case in BAD if case != "no CUDA device"])
def test_bad_settings(case: str, here: Path):
    text, says = BAD[case]
    done = invoke("run", "digits", *LOCAL, text)
    check_refused(done.exit_code, done.stderr, says, here, set())


def test_a_device_that_is_not_here(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text, says = BAD["no CUDA device"]
    done = invoke("run", "digits", *LOCAL, text)
    check_refused(done.exit_code, done.stderr, says, here, set())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("fashion_mnist", ["data_root", "FEDFLEET_DATA", "FashionMNIST/raw"]),
        ("missing.yaml", ["there is no experiment missing.yaml", "valid: "]),
        ("seed=[1]", ["the experiment is missing before seed=[1]; ", "as in: fedfleet run digits 'seed=[1]'; valid: "]),
        ("broken.yaml", ["broken.yaml", "line 3"]),
        ("plugin.yaml", ["plugins", "broken.py", "ZeroDivisionError"]),
        ("tables.yaml", ["plugins", "empty.py", "METHODS", "add one"]),
        ("slope.yaml", ["plugins", "lines.py", "ValueError: first"]),
    ],
)
def test_bad_files(source: str, says: list[str], here: Path):
    (here / "broken.yaml").write_text("workload: digits\nmethod: {name: fedavg\n")
    for name, plugin, text in (
        ("plugin", "broken", "1 / 0\n"),
        ("tables", "empty", "x = 1\n"),
        ("slope", "lines", "raise ValueError('first\\nsecond')\n"),
    ):
        (here / f"{plugin}.py").write_text(text)
        (here / f"{name}.yaml").write_text(f"workload: digits\nmethod: fedavg\nplugins: {plugin}.py\n")
    done = invoke("run", source, *LOCAL)
    check_refused(done.exit_code, done.stderr, says, here, set(here.iterdir()))


def test_a_tracked_run_that_cannot_start_leaves_no_database(here: Path):
    """The tracker begins before the data are partitioned; neither the folder nor the store may remain."""
    done = shell(here, "run", "digits", "engine.backend=local", "federation.clients=5000")
    check_refused(done.returncode, done.stderr, ["clients=5000"], here, set())
    assert done.stdout == ""


def test_more_workers_than_the_machine_has(here: Path):
    done = shell(here, "run", "digits", "engine.workers=4096")
    says = ["engine.workers x engine.cpus <=", "got 4096 x 1", "lower engine.workers"]
    check_refused(done.returncode, done.stderr, says, here, set())


@pytest.mark.long
def test_a_cluster_that_is_not_asked_for_is_left_alone(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Ray's default would be to join the cluster at the address in this variable, where nothing answers, or any other
    cluster on the machine."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = shell(
        here, "run", "digits", "federation.rounds=1", "tracking.uri=none", "engine.workers=1", "engine.cpus=0.5"
    )
    assert done.returncode == 0, done.stderr


def test_out_that_holds_a_run(here: Path):
    assert invoke("run", "digits", *LOCAL, "--out", "mine").exit_code == 0
    before = {path: path.read_bytes() for path in (here / "mine").rglob("*") if path.is_file()}
    done = invoke("run", "digits", *LOCAL, "--out", "mine")
    check_refused(
        done.exit_code, done.stderr, ["--out mine already holds a run", "choose another"], here, {here / "mine"}
    )
    assert {path: path.read_bytes() for path in (here / "mine").rglob("*") if path.is_file()} == before


KINDS = {"run": "config.yaml", "study": "study.yaml", "search": "search.yaml"}
SEARCHED = "method.rule.lr={search: grid, values: [0.1, 0.2]}"


@pytest.mark.parametrize("held", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_out_that_holds_something_else(here: Path, kind: str, held: str):
    """The folder is left as it is, and neither a lock nor a result is written into it."""
    (here / "mine").mkdir()
    (here / "mine" / KINDS[held]).write_text("theirs")
    (here / "mine" / "cells.txt").write_text("theirs")
    source = "demo" if kind == "study" else "digits"
    arguments = {"run": LOCAL, "study": (), "search": (*LOCAL, SEARCHED)}[kind]
    if kind == held == "study":
        return  # a study is continued
    done = invoke(kind, source, *arguments, "--out", "mine")
    says = [f"mine already holds a {held}", "choose another folder"]
    check_refused(done.exit_code, done.stderr, says, here, {here / "mine"})
    assert {path.name for path in (here / "mine").iterdir()} == {KINDS[held], "cells.txt"}


DAMAGED = {
    "config.yaml": {
        "{": "config.yaml is damaged",
        "": "config.yaml is damaged (it is empty)",
        "[1]": "config.yaml is damaged ([1])",
        "seed: abc": "got 'abc'",
    },
    "search.yaml": {"{": "search.yaml is not valid YAML", "[1]": "search.yaml is damaged ([1])"},
    "search.json": {"{": "search.json is damaged", "{}": "search.json is damaged", "[1]": "search.json is damaged"},
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts])
def test_a_damaged_file_is_told_in_a_sentence(here: Path, name: str, text: str):
    (here / "mine").mkdir()
    if name == "search.json":
        search = {"method": {"name": "fedavg", "rule": {"name": "sgd", "lr": {"search": "grid", "values": [0.1]}}}}
        (here / "mine" / "search.yaml").write_text(json.dumps({"workload": "digits", "name": "digits", **search}))
    (here / "mine" / name).write_text(text)
    before = set((here / "mine").iterdir())
    other = ("compare", "mine") if name == "config.yaml" else ("search", "mine", "--resume", "--quiet")
    for command in (("report", "mine"), other):
        done = invoke(*command)
        check_refused(done.exit_code, done.stderr, [DAMAGED[name][text]], here, {here / "mine"})
    assert set((here / "mine").iterdir()) == before


def test_out_that_cannot_be_a_folder(here: Path):
    (here / "taken").write_text("mine")
    for out in ("taken", "taken/deeper"):
        done = invoke("run", "digits", *LOCAL, "--out", out)
        check_refused(done.exit_code, done.stderr, [f"--out {out}", "choose another"], here, {here / "taken"})


def test_an_empty_folder_stays_empty_where_nothing_can_run(here: Path):
    (here / "mine").mkdir()
    done = invoke("run", "digits", *LOCAL, "federation.clients=5000", "--out", "mine")
    check_refused(done.exit_code, done.stderr, ["clients=5000"], here, {here / "mine"})
    assert not list((here / "mine").iterdir())
    nested = invoke("run", "digits", *LOCAL, "federation.clients=5000", "--out", "a/b/c")
    check_refused(nested.exit_code, nested.stderr, ["clients=5000"], here, {here / "mine"})


def test_a_run_that_diverges_fails_with_one_line_and_keeps_its_record(here: Path):
    done = invoke("run", "digits", *LOCAL, "method.rule.lr=1e30", "--out", "mine")
    assert done.exit_code == 1
    assert re.fullmatch(r"error: diverged in round \d: .*; lower the step size", error_in(done.stderr))
    assert "failed: Diverged" in (here / "mine" / "run.log").read_text()


def test_click_refuses_what_it_does_not_know():
    for args in (["list", "methodz"], ["walk"], ["run"], ["run", "digits", "--jsn"]):
        done = invoke(*args)
        assert done.exit_code == 2
        assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("command", "option", "keys"),
    [
        ("run", "--seed", "seed=VALUE"),
        ("run", "--federation.rounds", "federation.rounds=VALUE"),
        ("run", "--lr", "method.rule.lr=VALUE"),
        ("study", "--seeds", "seeds=VALUE or tune.seeds=VALUE"),
        (
            *("study", "--batch"),
            "experiment.federation.local.batch=VALUE or experiment.evaluate.batch=VALUE or "
            "experiment.evaluate.clients.adapt.batch=VALUE",
        ),
        ("search", "--trials", "search.trials=VALUE"),
    ],
)
def test_a_key_with_dashes_is_told_how_to_be_written(command: str, option: str, keys: str):
    done = invoke(command, "digits", option, "3")
    assert done.exit_code == 2
    assert done.output.endswith(f"Error: No such option '{option}'. Write keys without dashes: {keys}\n")


# --- a run's result ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, the JSON object) of a run that a real shell has started."""
    folder = tmp_path_factory.mktemp("finished")
    overrides = ["engine.backend=local", "tracking.uri=none", "federation.rounds=7", "seed=5", "method.rule.lr=5e-2"]
    done = shell(folder, "run", "digits", *overrides, "--out", "mine", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "mine", json.loads(done.stdout.splitlines()[-1])


def test_the_json_line(finished: tuple[Path, Any]):
    folder, result = finished
    assert result["rounds"] == 7
    assert set(result["metrics"]) == {"train/loss", "eval/loss", "eval/accuracy"}
    assert re.fullmatch("[0-9a-f]{64}", result["model_sha256"])
    assert result["run_id"]
    assert 0 < result["seconds"] < result["total_seconds"]
    assert result["directory"] == str(folder)
    assert json.loads((folder / "result.json").read_text()) == result


def test_the_runs_files_agree(finished: tuple[Path, Any]):
    folder, result = finished
    rounds = pq.read_table(folder / "rounds.parquet").to_pydict()
    assert rounds["round"] == [1, 2, 3, 4, 5, 6, 7]
    assert sum(rounds["comm/bytes_down"]) == result["bytes_down"]
    assert sum(rounds["comm/bytes_up"]) == result["bytes_up"]
    assert sum(rounds["time/seconds"]) == pytest.approx(result["seconds"], abs=1e-3)
    assert [value is not None for value in rounds["eval/accuracy"]] == [False] * 4 + [True, False, True]
    assert {name: rounds[name][-1] for name in result["metrics"]} == result["metrics"]
    assert model_digest(load_file(folder / "model.safetensors")) == result["model_sha256"]
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert re.fullmatch("([0-9a-f]{40}(-dirty)?)?", environment["commit"])  # empty where git is not installed
    assert (environment["threads"], environment["cards"]) == (1, [])
    assert [*environment["data"]] == ["scikit-learn/digits.csv.gz"]
    assert (folder / "run.log").read_text().splitlines()[-1].endswith("finished")


def test_the_saved_configuration_repeats_the_run(finished: tuple[Path, Any]):
    folder, result = finished
    saved = str(folder / "config.yaml")
    given = ["engine.backend=local", "tracking.uri=none", "federation.rounds=7", "seed=5", "method.rule.lr=5e-2"]
    assert load(saved) == load("digits", given)
    again = invoke("run", saved, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout.splitlines()[-1])["model_sha256"] == result["model_sha256"]


def test_without_json_people_read_it(here: Path):
    done = invoke("run", "digits", *LOCAL)
    assert done.exit_code == 0
    assert re.search(r"2 rounds in [\d.]+ s, the command took [\d.]+ s .*eval/accuracy 0\.\d{4}", done.stdout)
    (folder,) = (here / "runs").iterdir()
    assert f"run {folder.name} in {folder}" in done.stdout


# --- on a terminal ----------------------------------------------------------------------------------------------------
def on_terminal(*args: str) -> tuple[str, str]:
    """(standard output, the text on the terminal, which is standard error)."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        sent = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux's end of a pty
                break
            if not piece:
                break
            sent += piece
        assert process.stdout is not None
        return process.stdout.read(), sent.decode()


def test_progress_on_a_terminal():
    stdout, sent = on_terminal("run", "digits", *LOCAL, "federation.rounds=3", "evaluate.every=1", "--json")
    passing, text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", sent).split("\r", 1)
    assert passing == "starting scaffold on digits"
    last = text.rstrip().split("\r")[-1]
    assert re.search(r"round 3/3 .* loss \d\.\d{4}  accuracy \d+\.\d\d%  clients/s \d+ 0:00:00", last), text
    assert text.count("scaffold on digits") == 1
    assert text.startswith("scaffold on digits: 100 clients, cohorts of 20, 3 rounds, in this process, in /"), text
    assert "Traceback" not in text
    assert json.loads(stdout)["rounds"] == 3


# --- in a log ---------------------------------------------------------------------------------------------------------
def test_progress_in_a_log(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a terminal there are a line at the beginning and lines when `LiveLine` is due, here after every
    round, and none with --quiet."""
    monkeypatch.setattr(progress, "SHORTEST", 0.0)
    monkeypatch.setattr(progress, "LONGEST", 0.0)
    done = invoke("run", "digits", *LOCAL, "--json", "--out", "mine")
    first, lines = done.stderr.split("\n", 1)
    assert first == f"scaffold on digits: 100 clients, cohorts of 20, 2 rounds, in this process, in {here / 'mine'}"
    assert re.fullmatch(r"(round [12] of 2  loss \d\.\d{4}.*  clients/s \d+\n){2}", lines), done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert invoke("run", "digits", *LOCAL, "--quiet").stderr == ""


def test_a_run_says_what_it_is_before_it_starts(here: Path, monkeypatch: pytest.MonkeyPatch):
    """The line is complete before Ray is asked for workers."""
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)

    def refuses(*asked: Any, **how: Any) -> None:
        raise FedFleetError(f"printed before: {said.getvalue()}")

    monkeypatch.setattr("fedfleet.engine.runs.launch.events_of", refuses)
    with pytest.raises(
        FedFleetError, match=r"printed before: scaffold on digits: .*, 2 workers on Ray, in /.*/mine\n$"
    ):
        run(load("digits", ["tracking.uri=none", "engine.workers=2"]), "mine", observers(quiet=False))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (("engine.workers=2",), "scaffold on digits: 100 clients, cohorts of 20, 50 rounds, 2 workers on Ray"),
        (("engine.workers=1",), "scaffold on digits: 100 clients, cohorts of 20, 50 rounds, 1 worker on Ray"),
        (
            ("engine.address=head:6379", "engine.workers=2"),
            "scaffold on digits: 100 clients, cohorts of 20, 50 rounds, 2 workers on the Ray cluster head:6379",
        ),
        (
            ("engine.address=head:6379", "engine.workers=auto"),
            "scaffold on digits: 100 clients, cohorts of 20, 50 rounds, on the Ray cluster head:6379",
        ),
        (
            ("federation.sampler=binomial", "engine.backend=local"),
            "scaffold on digits: 100 clients, cohorts of about 20, 50 rounds, in this process",
        ),
        (
            ("federation.pace={name: buffered}", "systems={}", "engine.backend=local"),
            "scaffold on digits: 100 clients, 20 at a time, 50 updates, in this process",
        ),
        (
            ("federation.pace={name: buffered, starts: rate, gap: 2}", "systems={}", "engine.backend=local"),
            "scaffold on digits: 100 clients, one every 2 s, 50 updates, in this process",
        ),
    ],
)
def test_a_run_in_one_line(changes: tuple[str, ...], line: str):
    assert described(RunSpec.of("run", load("digits", changes))) == line


def test_a_resumed_run_in_one_line():
    resumed = RunSpec.of("run", load("digits", ["engine.backend=local"]), "mine", resume=True)
    assert described(resumed).endswith(" 50 rounds, in this process, from the last checkpoint in mine")


def test_when_lines_of_a_log_are_due(monkeypatch: pytest.MonkeyPatch):
    """A clock that ticks every second: lines after 10 s, at most one a minute, fewer than 1,500 a day."""
    clock = iter(range(10**6))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    line = progress.LiveLine()
    due = [second for second in range(1, 86400) if line.due()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert due[0] == 10
    assert pauses[0] == 10
    assert set(pauses[-100:]) == {60}
    assert pauses == sorted(pauses)
    assert 1400 < len(due) < 1500


# --- looking ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("methods", "scaffold"),
        ("workloads", "digits"),
        ("models", "lenet"),
        ("partitions", "dirichlet"),
        ("rules", "adam"),
        ("balls", "newton_schulz"),
        ("experiments", "fashion_mnist"),
    ],
)
def test_list(kind: str, line: str):
    done = invoke("list", kind)
    assert done.exit_code == 0
    head, *rows = done.stdout.splitlines()
    assert head.startswith("name")
    found = next(row for row in rows if row.startswith(line))
    assert len(found) > len(line) + 10


COUNTED = """
from fedfleet.algorithms.scaffold import scaffold


def mine(start: str = "zero"):
    \"\"\"My method.\"\"\"
    return scaffold()


METHODS = {"mine": mine}
"""


def test_list_a_plugins_parts(here: Path):
    (here / "mine.py").write_text('def mine(rule):\n    """My method."""\n\n\nMETHODS = {"mine": mine}\n')
    done = invoke("list", "methods", "--plugin", "mine.py")
    assert done.exit_code == 0
    assert re.search(r"^mine +My method\. +– +– +– +– +–$", done.stdout, re.M)
    assert "–: a plug-in does not say it" in done.stdout
    (here / "mine.py").write_text(COUNTED)
    done = invoke("list", "methods", "--plugin", "mine.py")
    assert re.search(r"^mine +My method\. +– +1 +2 +2 +–$", done.stdout, re.M), done.output
    missing = invoke("list", "methods", "--plugin", "other.py")
    assert (missing.exit_code, len(missing.stderr.splitlines())) == (2, 1)


def test_list_a_plugins_workloads(here: Path):
    """A workload has a method `summary`, which is no text about it."""
    (here / "mine.py").write_text(
        "from fedfleet.workloads.data.digits import Digits\n\n\n"
        'class Mine(Digits):\n    """My data."""\n\n\n'
        'WORKLOADS = {"mine": Mine}\n'
    )
    done = invoke("list", "workloads", "--plugin", "mine.py")
    assert done.exit_code == 0, done.output
    assert re.search(r"^mine +My data\.", done.stdout, re.M)


def test_list_and_show_explain_the_arguments(here: Path):
    """With type, default and meaning, also of a plug-in's method that says nothing."""
    row = r"^lr +number or number for each group +0\.1 +the step size$"
    assert re.search(row, invoke("list", "rules", "sgd").stdout, re.M)
    (here / "mine.py").write_text(
        "from fedfleet.algorithms.fedavg import fedavg\n\n\n"
        'def mine(lr, kind: type = int, of=fedavg()):\n    """My method."""\n\n\n'
        'METHODS = {"mine": mine}\n'
    )
    done = invoke("list", "methods", "mine", "--plugin", "mine.py")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("mine: My method.\n\nargument ")
    assert re.search(r"^lr +name or mapping +required$", done.stdout, re.M)
    shown = invoke("show", "digits", "--all").stdout
    assert re.search(r"^control +mean, last, server, normalised, literal +mean +c_i is the mean", shown, re.M)
    done = invoke("list", "models", "lenett")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: list models: there is no lenett; did you mean lenet? valid: ")


LIGHT = """
import sys
sys.argv = ["fedfleet", *sys.argv[1:]]
from click import Context
from fedfleet.tune.cli import main
assert main.shell_complete(Context(main), "r")
if len(sys.argv) > 1:
    main(standalone_mode=False)
heavy = {"torch", "ray", "mlflow", "optuna", "pandas", "sklearn", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
assert len(sys.modules) < 600, sorted(sys.modules)
"""


@pytest.mark.parametrize("args", [(), ("list", "methods"), ("list", "experiments"), ("--help",)])
def test_looking_loads_nothing_heavy_and_little_at_all(args: tuple[str, ...]):
    """Importing is what takes time. 250 to 400 modules are loaded; a package such as SciPy would bring a thousand."""
    subprocess.run([sys.executable, "-c", LIGHT, *args], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("words", ["", "r"])
def test_names_of_commands_are_completed(words: str):
    found = {item.value: item.help for item in main.shell_complete(click.Context(main), words)}
    assert found == {name: text for name, text in cli.COMMANDS.items() if name.startswith(words)}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str):
    command = cli.loaded(name)
    assert command.name == name
    assert command.get_short_help_str(200) == cli.COMMANDS[name]


def test_show_kinds_and_bytes():
    """An MLP 64-16-10 has 64*16 + 16 + 16*10 + 10 = 1210 numbers of 4 bytes; a client of SCAFFOLD keeps one tree, and
    two trees are sent in each direction."""
    done = invoke("show", "digits", "workload.model.hidden=[16]", "federation.cohort=7")
    assert done.exit_code == 0, done.output
    text = re.sub(" +", " ", done.stdout)
    for line in (
        "fc1.weight 16 x 64 1,024 matrix 16 x 64",
        "fc1.bias 16 16 vector",
        "out.weight 10 x 16 160 matrix 10 x 16",
        "out.bias 10 10 vector",
        "total 1,210",
        "per client keeps 4,840 B down 9,680 B up 9,680 B",
        "per round 7 clients down 67,760 B up 67,760 B",
    ):
        assert line in text


def test_show_prints_what_was_set_first():
    """The keys of the file and of the command line, and with --all every key of the configuration."""
    few, every = (invoke("show", "digits", "federation.rounds=7", *more).stdout for more in ((), ("--all",)))
    given = yaml.safe_load(few.partition("tensor")[0])
    assert given["federation"]["rounds"] == 7
    assert given["method"]["name"] == "scaffold"
    assert not {"tracking", "checkpoint", "plugins"} & set(given)
    left = int(re.findall(r"^# (\d+) further keys have their defaults; --all prints them$", few, re.M)[0])
    assert left > 40
    assert len(every.splitlines()) > len(few.splitlines()) + 40
    assert "further keys" not in every
    assert yaml.safe_load(every.partition("tensor")[0])["engine"]["backend"] == "auto"


def test_show_equals_what_a_run_counts():
    shown = invoke("show", "digits", *LOCAL).stdout
    down, up = (
        int(text.replace(",", "")) for text in re.findall(r"per round.*down ([\d,]+) B +up ([\d,]+) B", shown)[0]
    )
    result = json.loads(invoke("run", "digits", *LOCAL, "--json").stdout)
    assert (result["bytes_down"], result["bytes_up"]) == (2 * down, 2 * up)


def test_show_leaves_nothing(here: Path):
    assert invoke("show", "digits").exit_code == 0
    assert not list(here.iterdir())


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------
def interrupted(here: Path, number: signal.Signals, *overrides: str) -> tuple[int, str, str]:
    """Send a signal to the whole process group of a command, as a terminal does, when rounds have begun."""
    args = ["run", "digits", "federation.rounds=1000000", "evaluate.every=0", "--out", "mine", "--quiet", *overrides]
    process = subprocess.Popen(
        [*COMMAND, *args], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log = here / "mine" / "run.log"
    until(lambda: process.poll() is not None or (log.is_file() and "round=3" in log.read_text()), "round 3")
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=300)
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive
    assert stdout == ""
    assert (here / "mine" / "rounds.parquet").is_file()
    return process.returncode, stderr, log.read_text().splitlines()[-1]


def status_in(database: Path) -> tuple[str, int]:
    """(status, last step of the metrics) of the only run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return run.info.status, max(m.step for m in client.get_metric_history(run.info.run_id, "train/loss"))


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_interrupted(here: Path, backend: str):
    status, stderr, last = interrupted(here, signal.SIGINT, f"engine.backend={backend}", "engine.workers=1")
    assert status == 130
    assert re.fullmatch(r"interrupted; checkpoint after round \d+; to go on: fedfleet resume mine\n", stderr)
    assert "stopped: interrupted" in last
    kept = pq.read_table(here / "mine" / "rounds.parquet")["round"].to_pylist()
    assert status_in(here / "mlflow.db") == ("KILLED", kept[-1])
    assert kept == list(range(1, kept[-1] + 1))
    assert list((here / "mine" / "state").iterdir())


@pytest.mark.long
def test_terminated(here: Path):
    status, stderr, _ = interrupted(here, signal.SIGTERM, "engine.backend=local", "tracking.uri=none")
    assert status == 128 + signal.SIGTERM
    assert stderr.startswith("interrupted; checkpoint after round ")
