"""benchmarks/gpu.py runs without the packages that a bare machine with a GPU lacks; here on the processor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..bare import without

ROOT = Path(__file__).parents[2]
MISSING = "ray mlflow optuna torchvision plotly jinja2 sklearn scipy pandas matplotlib fsspec dp_accounting"
SCRIPT = f"""{without(MISSING)}
import runpy

sys.argv[0] = sys.argv[1]
del sys.argv[1]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def benchmark(out: Path, *given: str) -> dict:
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "benchmarks/gpu.py"), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, "--out", out, "--rounds", "1", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert (out / "gpu.md").read_text().rstrip() == done.stdout.rstrip()
    assert report["machine"]["device"] == "processor"
    assert all(line["clients_per_s"] > 0 for line in report["lines"])
    return report


@pytest.mark.long
def test_one_work_and_a_moonshot(tmp_path):
    report = benchmark(tmp_path, "--works", "w1", "--workers", "", "--moonshot", "cifar-cnn")
    assert [line["mode"] for line in report["lines"]] == ["one at a time", "vectorised"]
    assert report["moonshots"]["cifar-cnn"]["met"] is False
    assert "these figures mean nothing" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_all_works_and_moonshots(tmp_path):
    report = benchmark(tmp_path, "--workers", "2", "--moonshot", "all")
    assert {line["work"] for line in report["lines"]} == {"w1", "w2", "w3", "resnet18", "vit", "lstm"}
    assert len(report["lines"]) == 18
    assert set(report["moonshots"]) == {"w1-ratio", "cifar-cnn", "feddua-cifar"}
    shared = [line for line in report["lines"] if line["mode"].endswith("2 processes")]
    assert all(len(line["model_sha256"]) == 1 for line in shared)


def test_without_a_card_it_says_so(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "no CUDA device is here; --device cpu --tiny tests this script on the processor" in done.stderr.replace(
        "\n", " "
    )
