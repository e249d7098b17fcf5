"""`fedfleet bench`: short runs of the engine and of the plain loop, and the tables that it makes of given
measurements."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

from fedfleet.engine.errors import FedFleetError
from fedfleet.tune.bench import measure
from fedfleet.tune.bench.command import costs, draw, lines_of, peer_of, summary, text_of
from fedfleet.tune.bench.measure import PARTS, Candidate, Measurement, shares_of

from .commands import invoke

EVEN = dict.fromkeys(PARTS, 1 / len(PARTS))


def pairs(*ratios: float) -> list[Measurement]:
    return [Measurement(100.0, 100 * ratio, 2.0, EVEN, "") for ratio in ratios]


def found(*lines: tuple[Candidate, list[Measurement]]):
    return {line.name: (line, made) for line, made in lines}


@pytest.mark.slow  # tests/test_docs.py has the command, on another work
def test_times_the_engine_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "plain", functools.cache(measure.plain))  # the work's plain loop is timed once
    chart = tmp_path / "chart.png"
    words = (
        "w1",
        "engine.backend=local",
        "engine.kernels=torch",
        "--method",
        "scaffold",
        "--rounds",
        "1",
        "--repeats",
        "1",
    )
    done = invoke("bench", *words, "--out", str(chart), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert [line["method"] for line in told["lines"]] == ["fedavg", "fedavg", "scaffold"]
    for line in told["lines"]:
        (pair,) = line["pairs"]
        assert pair["plain"] > 0
        assert pair["ours"] > 0
        assert sum(pair["parts"].values()) == pytest.approx(1)
        assert pair["parts"]["compute"] > 0.3
        assert pair["first"] > 0
        assert bool(pair["chosen"]) == ("block" not in line["engine"])
    assert len(list((tmp_path / "cache/paths").iterdir())) == 2  # a method's each
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert len(done.stderr.splitlines()) == 3


def test_lines():
    named = [line.name for line in lines_of(["w2", "w3", "engine.block=7"], ["scaffold"])]
    assert named == [
        "w2 fedavg block 1 kernels torch",
        "w2 fedavg block 7",
        "w2 scaffold block 7",
        "w3 fedavg block 1 kernels torch",
        "w3 fedavg block 7",
    ]
    assert {line.work for line in lines_of([], [])} == {"w1", "w2", "w3"}


def test_a_line_that_is_named_twice_is_measured_once():
    """FedAvg is measured on every work; the settings may be those of the line with one client at a time."""
    for words, methods in (
        (["w1"], ["fedavg", "scaffold"]),
        (["w1", "w2", "w1"], ["scaffold", "scaffold"]),
        (["w1", "engine.block=1", "engine.kernels=torch"], ["fedavg", "scaffold"]),
    ):
        names = [line.name for line in lines_of(words, methods)]
        assert sorted(set(names)) == sorted(names)
    assert len(lines_of(["w1"], ["fedavg"], ["a=true", "a=true"])) == 3


GIVEN = Measurement(100.0, 150.0, 2.0, EVEN, "")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (None, 0, ""),
        (FedFleetError("out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("a mistake"), 1, ""),
    ],
    ids=["nothing", "failed", "interrupted", "a mistake"],
)
def test_what_was_measured_is_printed_whatever_comes_after(error, status, told, as_json, tmp_path, monkeypatch):
    """The second of two repeats ends in its second line; or after it, with FedAvg named beside another method."""

    def pair(line, rounds, workers):
        measured.append(line.name)
        if error is not None and len(measured) == 5:
            raise error
        return GIVEN

    measured = []
    monkeypatch.setattr(measure, "pair", pair)
    words = ("w1", "--method", "fedavg", "--method", "scaffold", "--repeats", "2", "--out", str(tmp_path / "a/c.png"))
    done = invoke("bench", *words, *(["--json"] if as_json else []))
    assert done.exit_code == status
    assert told in done.stderr
    names = ["w1 fedavg block 1 kernels torch", "w1 fedavg", "w1 scaffold"]
    assert measured == (names + names)[: 6 if error is None else 5]
    if as_json:
        counts = [len(line["pairs"]) for line in json.loads(done.stdout.splitlines()[-1])["lines"]]
        assert counts == ([2, 2, 2] if error is None else [2, 1, 1])
    else:
        assert done.stdout.count("1.50 (1.50 … 1.50)") == 3
        assert "w1 scaffold: 1.00 (1.00 … 1.00) times the time of fedavg" in done.stdout
    assert (tmp_path / "a/c.png").is_file() == (error is None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["w9"], "bench has no work w9; did you mean w8? valid: w1, w2, w3"),
        (["w1", "--method", "fedavgg"], "bench has no method fedavgg; did you mean fedavg? valid: "),
        (["engine.blok=3"], "engine.blok is not a key; did you mean block?"),
        (["w1", "--peer", "pfl"], "--peer must be NAME=COMMAND, got 'pfl'"),
        (["w1", "--peer", "fedavg=true"], "--peer: two lines would be called 'w1 fedavg'; give the peer another name"),
        (["w1", "--peer", "a=true", "--peer", "a=false"], "--peer: two lines would be called 'w1 a'"),
        (["w1", "--out", "chart.txt"], "--out must name a .png, .svg or .pdf file, got 'chart.txt'"),
        (["w1", "--out", "/dev/null/chart.png"], "--out /dev/null/chart.png: no folder can be made here"),
        (["w1", "--peer", "pfl=python {rounds"], "--peer must be NAME=COMMAND, got 'pfl=python {rounds'"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words, sentence):
    done = invoke("bench", *words)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_peer_is_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A peer is a command that runs the same works as the plain loop; only its speed is known."""
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\nprint('a log')\n"
        "print(json.dumps({'clients_per_s': [1.0, 7.0, 3.0] if sys.argv[1:] == ['w2', '4'] else []}))\n"
    )
    peer = peer_of(f"slow={sys.executable} {script} {{work}} {{rounds}}")
    monkeypatch.setattr(measure, "plain", lambda work, rounds: 6.0)
    (line,) = [line for line in lines_of(["w2"], [], [f"{peer.name}={peer.command}"]) if line.peer]
    timed = measure.pair(line, 4, 2)
    assert timed.ratio == 0.5
    text = text_of(found((line, [timed])))
    assert "w2 slow" in text
    assert "0.50 (0.50 … 0.50)" in text
    (told,) = json.loads(json.dumps(summary(found((line, [timed]))), allow_nan=False))["lines"]
    assert told["pairs"][0]["first"] is None
    with pytest.raises(FedFleetError, match="slow did not print its clients_per_s: a log"):
        measure.pair(line._replace(peer=peer._replace(command=f"{sys.executable} -c 'print(\"a log\")'")), 4, 2)
    with pytest.raises(FedFleetError, match="slow cannot be run: "):
        measure.pair(line._replace(peer=peer._replace(command=f"{tmp_path}/absent")), 4, 2)


def test_medians_spreads_and_the_cost_of_a_method(tmp_path: Path):
    made = found((Candidate("w1"), pairs(1.0, 2.0, 1.5)), (Candidate("w1", "scaffold"), pairs(0.8, 1.0, 1.5)))
    text = text_of(made)
    assert "1.50 (1.00 … 2.00)" in text
    assert costs(made) == ["w1 scaffold: 1.25 (1.00 … 2.00) times the time of fedavg"]
    draw(made, tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text()


def test_shares_of_a_round_sum_to_one():
    row = {"time/seconds": 2.0, "time/compute": 2.0, "time/data": 0.2, "time/state": 0.1, "time/reduce": 0.3}
    shares = shares_of({**row, "time/wait": 1.0}, workers=2)
    assert shares["compute"] == 0.5
    assert shares["driver"] == pytest.approx(0.1)
    assert sum(shares.values()) == pytest.approx(1)
