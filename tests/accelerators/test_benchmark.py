"""`make gpu` runs on a bare machine with a GPU, without this package and others; here on the processor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import add_line, machine

from ..bare import bare_python

ROOT = Path(__file__).parents[2]
MISSING = (
    "ray mlflow optuna torchvision plotly jinja2 sklearn scikit_learn scipy pandas matplotlib fsspec dp_accounting"
)


def benchmark(tmp_path: Path, *given: str) -> dict:
    python, env = bare_python(tmp_path / "packages", MISSING)
    out = tmp_path / "out"
    command = [python, ROOT / "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--out", out, "--rounds", "1", *given]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" clients/s (") == len(json.loads((out / "gpu.json").read_text())["lines"])
    report = json.loads((out / "gpu.json").read_text())
    assert (out / "gpu.md").read_text().rstrip() == done.stdout.rstrip()
    assert report["machine"]["device"] == "processor"
    assert all(line["clients_per_s"] > 0 for line in report["lines"]), report["lines"]
    return report


@pytest.mark.long
def test_one_work_and_a_goal(tmp_path):
    report = benchmark(tmp_path, "--works", "w1,w1-scaffold", "--goal", "cifar-cnn")
    modes = ["plain loop", "torch.func.vmap", "one at a time", "vectorised", "default"]
    assert [line["mode"] for line in report["lines"] if line["mode"] != "JAX vmap"] == modes
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert re.search(r"\| w1 \| plain loop \| [\d.,]+ \| 1\.00 \|", page)
    assert "| blocks of 2 clients, torch kernels |" in page
    assert report["goals"]["cifar-cnn"]["met"] is False
    assert report["goals"]["cifar-cnn"]["rounds"] == "2 of 2"
    assert "these figures mean nothing" in (tmp_path / "out" / "gpu.md").read_text()


@pytest.mark.long
def test_a_measurement_that_takes_too_long_is_left_after_a_round(tmp_path):
    """A work is worth a figure from its first round on."""
    modes = "plain loop;one at a time;vectorised"
    report = benchmark(tmp_path, "--works", "w1", "--modes", modes, "--seconds", "0")
    assert [line["rounds"] for line in report["lines"]] == [1, 1, 1]
    assert [line.get("stopped_after_s") for line in report["lines"]] == [None, 0.0, 0.0]


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path, capsys):
    def fail() -> dict:
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    report = {"machine": machine("cpu"), "tiny": False, "lines": [], "goals": {}}
    add_line(tmp_path, report, "vit", "vectorised", fail)
    add_line(tmp_path, report, "vit", "plain loop", lambda: {"clients_per_s": 2.0})
    add_line(tmp_path, report, "vit", "JAX vmap", lambda: {"clients_per_s": 5.0})
    add_line(tmp_path, report, "vit-scaffold", "default", lambda: {"clients_per_s": 10.0})
    assert "vit, vectorised: RuntimeError: CUDA out of memory. (" in capsys.readouterr().err
    page = (tmp_path / "gpu.md").read_text()
    assert "| vit | vectorised | none: RuntimeError: CUDA out of memory. |  |  |" in page
    assert "| vit-scaffold | default | 10.0 | 5.00 | 2.00 |" in page


@pytest.mark.slow
def test_all_works_and_goals(tmp_path):
    report = benchmark(tmp_path, "--workers", "2", "--goal", "all")
    assert {line["work"] for line in report["lines"]} == {"w1", "w2", "w3", "resnet18", "vit", "lstm"}
    assert len([line for line in report["lines"] if line["mode"] != "JAX vmap"]) == 30
    assert set(report["goals"]) == {"cifar-cnn", "cifar-cnn-scaffold", "feddua-cifar"}
    shared = [line for line in report["lines"] if line["mode"].endswith("2 processes")]
    assert all(len(line["model_sha256"]) == 1 for line in shared)


@pytest.mark.long
def test_make_gpu_where_the_package_is_not_installed(tmp_path):
    """Without a card the tests are skipped, and the benchmark says that there is none."""
    python, env = bare_python(tmp_path / "packages", f"{MISSING} pytest_timeout xdist pytest_xdist")
    command = ["make", "gpu", f"GPU_PYTHON={python}", f"GPU_OUT={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "no CUDA device is here" in done.stdout, done.stdout + done.stderr
    assert re.search(r"\d+ skipped, \d+ deselected", done.stdout), done.stdout + done.stderr
    assert "error" not in done.stdout.lower()
    assert "--device cpu --tiny tests this script on the processor" in done.stderr.replace("\n", " ")


def test_without_a_card_it_says_so(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "no CUDA device is here; --device cpu --tiny tests this script on the processor" in done.stderr.replace(
        "\n", " "
    )
