"""An executed notebook: runs, curves, an interruption and its continuation, inside Jupyter's event loop."""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

CELLS = {
    "run": """
import os, signal
import fedfleet

experiment = fedfleet.load("digits", [
    "federation.rounds=6", "evaluate.every=2", "tracking.uri=none", "engine.workers=1", "engine.backend=BACKEND",
])
result = fedfleet.run(experiment, "whole")
result
""",
    "loop": """
for record in fedfleet.rounds(experiment):
    print(int(record["round"]), end=" ")
""",
    "interrupt": """
def interrupt(record):
    if record["round"] == 3:
        os.killpg(os.getpgid(0), signal.SIGINT)  # as the stop button does it

fedfleet.run(experiment, "broken", [interrupt])
""",
    "resume": "fedfleet.resume('broken').model_sha256 == result.model_sha256",
    "inside a loop": """
async def inside():
    return fedfleet.run(experiment)

(await inside()).model_sha256 == result.model_sha256
""",
    "plot": "result.plot();",
    "table": "fedfleet.compare(['whole', 'broken'])",
    "evaluate": "result.evaluate() == {k: v for k, v in result.metrics.items() if k.startswith('eval/')}",
    "mistake": "fedfleet.Experiment(workload='digits', method='fedavg', federation={'clints': 3})",
    "rays": """
import sys
sys.modules["ray"].is_initialized() if "ray" in sys.modules else False
""",
}
FAIL = ("interrupt", "mistake")


class Keeping(NotebookClient):
    """Notes the processes that the kernel has started, with their names, when the last cell has ended."""

    family: dict[psutil.Process, str]

    async def _async_cleanup_kernel(self) -> None:
        assert self.km is not None
        kernel = psutil.Process(self.km.provisioner.pid)  # type: ignore[attr-defined]
        self.family = {}
        for process in kernel.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                self.family[process] = process.name()
        await super()._async_cleanup_kernel()


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.long)])
def test_notebook(backend: str, tmp_path: Path):
    cells = [nbformat.v4.new_code_cell(text.strip().replace("BACKEND", backend)) for text in CELLS.values()]
    for cell, name in zip(cells, CELLS, strict=True):
        cell.metadata["tags"] = ["raises-exception"] if name in FAIL else []
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Keeping(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs: dict[str, list[Any]] = dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))

    progress, shown = outputs["run"]
    assert progress.data["text/plain"].startswith("round 6 of 6  loss ")
    assert shown.data["text/plain"].startswith("Result(scaffold on digits: 6 rounds, eval/loss ")
    assert text(outputs["loop"]) == "1 2 3 4 5 6 "
    (error,) = [each for each in outputs["interrupt"] if each.output_type == "error"]
    assert error.ename == "Interrupted"
    (line,) = error.traceback
    assert line.startswith("Interrupted: interrupted; checkpoint after round "), line
    for name in ("resume", "inside a loop", "evaluate"):
        assert outputs[name][-1].data["text/plain"] == "True", name
    assert base64.b64decode(outputs["plot"][-1].data["image/png"]).startswith(b"\x89PNG")
    assert "eval/accuracy" in outputs["table"][-1].data["text/html"]
    (line,) = outputs["mistake"][-1].traceback
    assert line.startswith("ConfigError: federation.clints is not a key; did you mean clients? valid: clients, ")
    assert outputs["rays"][-1].data["text/plain"] == str(backend == "ray")
    assert ("raylet" in client.family.values()) == (backend == "ray")
    assert not psutil.wait_procs(client.family, timeout=120)[1]


def text(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream" and each.name == "stdout")
