"""The quick forms of the studies of language models end, and their reports have all that they compare.

The files that a user makes are made here as the studies say; networks, texts and numbers of rounds are small.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.spec import load

from .commands import invoke

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_fork_server")]

SENTENCES = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"
SMALL = ("seeds=[0]", "experiment.workload.length=8", "experiment.engine.backend=local", "tracking.uri=none")
LANGUAGE = {"eval/loss", "eval/accuracy", "eval/perplexity"}
TRAFFIC = {"comm/bytes_down", "comm/bytes_up", "time/seconds"}


def model(**sizes: int) -> tuple[str, ...]:
    return tuple(f"experiment.workload.model.{name}={value}" for name, value in sizes.items())


def ended(name: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Method -> the cell of a study with one level and one seed, as the file cells.jsonl has it."""
    done = invoke("study", name, "--out", "out", "--jobs", "1", "--quiet", *SMALL, *arguments)
    assert done.exit_code == 0, done.output
    assert "warning" not in done.stderr
    lines = [json.loads(line) for line in Path("out/cells.jsonl").read_text().splitlines()]
    by_key = {line["key"]: line for line in lines}
    return {cell.method: by_key[cell.key] for cell in StudyFolder(Path("out")).cells()}


def table(heading: str, first: int = 0) -> dict[str, list[str]]:
    """Method -> the columns behind it of the first table below this heading of the report. first: its column."""
    text = Path("out/report.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return {row[first]: row[first + 1 :] for row in rows[2:]}


def number(text: str) -> float:
    return float(text.strip("*").split(" ± ")[0].replace(",", ""))


def test_little_communication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(SENTENCES * 40)
    study, sizes = load("language/low-communication-quick"), model(width=12, depth=3, heads=1)
    cells = ended("language/low-communication-quick", "--scale", "0.4", "experiment.workload.path=input.txt", *sizes)
    assert {*cells} == {*study.methods}
    for cell in cells.values():
        assert LANGUAGE | TRAFFIC | {"round"} <= {*cell["rows"]}
        assert all(math.isfinite(value) for name in LANGUAGE for value in cell["rows"][name])
    for heading, columns in (("Results", 1), ("Costs", 3)):
        found = table(heading)
        assert [*found] == [*study.methods]
        assert all(len(row) == columns and all(math.isfinite(number(each)) for each in row) for row in found.values())
    up = {method: cell["result"]["bytes_up"] for method, cell in cells.items()}
    assert up["SparseLoCo, 1/64"] < up["SparseLoCo, 1/16"] < up["DiLoCo, 8 bits"] < up["DiLoCo"] < up["Data parallel"]


def test_roles_and_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The base is the model of a study of its own."""
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text(SENTENCES * 40)
    sizes = model(width=16, depth=1, heads=2, kv_heads=1)
    ended("language/shakespeare-base", "--rounds", "1", "--keep-models", "experiment.workload.path=input.txt",
          *sizes)  # fmt: skip
    (weights,) = Path("out").glob("cells/*/model.safetensors")
    weights.rename("base.safetensors")
    Path("out").rename("base")
    rows = [
        {"user": f"role {i}", "split": split, "text": SENTENCES[i:] * count}
        for i in range(10)
        for split, count in (("train", 5), ("test", 2))
    ]
    pq.write_table(pa.Table.from_pylist(rows), "clients.parquet")
    study = load("language/shakespeare-quick")
    cells = ended("language/shakespeare-quick", "--rounds", "1", "--clients", "10", *sizes,
                  "experiment.federation.local.steps=9",  # longer than the rise of the step sizes
                  "experiment.workload.model.weights=base.safetensors")  # fmt: skip
    assert {*cells} == {*study.methods}
    for method, cell in cells.items():
        own = "adapted" if method.endswith(", personal") else "own"
        assert TRAFFIC | {"round"} | {f"eval/{own}/test_{kind}" for kind in ("loss", "accuracy")} <= {*cell["rows"]}
        assert all(math.isfinite(value) for value in cell["rows"][f"eval/{own}/test_loss"])
    for heading, first, columns in (("Results", 0, 1), ("Spread over clients", 1, 6), ("Costs", 0, 3)):
        found = table(heading, first)
        assert [*found] == [*study.methods], heading
        numbers = [each for row in found.values() for each in row if each != "–"]  # no client is unseen
        assert all(len(row) == columns for row in found.values())
        assert all(math.isfinite(number(each)) for each in numbers)
        assert len(numbers) == len(found) * (columns - (first > 0))
    compared = table("Clients that are better or worse off", 2)
    assert {*compared} == {*study.methods}
    assert {row[-1] for row in compared.values()} == {"10"}
    assert {*table("Settings")} == {*study.methods} - {"Base"}
