"""A base is read tensor by tensor, so that it is never twice in the memory of a process. Linux says how much
memory a process has had at most.

TOLERANCE: two of the largest tensor, as it is in the file and as the run has it, and 16 MiB for what Python allocates
besides. Two copies of the base would be more than twice that. A digest, of which no copy is kept, needs less than a
quarter of the base, which is twelve of its largest tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedfleet.workloads.models.gpt import Gpt

pytestmark = pytest.mark.long
WIDTH, LAYERS = 512, 12
SLACK = 16 << 20
PEAK = """
import json, re, sys
from pathlib import Path
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.run_spec import RunSpec

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

run_spec = RunSpec.of("id", experiment(json.loads(sys.argv[1])))
run_spec.workload.outline
run_spec.workload.stored()  # what is imported and built on the way
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
{measured}
print(json.dumps([status("VmHWM") - before, len(found)]))
"""

SHARED = """
import json, pickle, sys
from pathlib import Path
import numpy as np
import psutil
from torch.utils._pytree import tree_leaves
from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.observer import Observer
from tests.engine.setups import driver_here

folder, found = Path(sys.argv[1]), {}

def anonymous(process):
    (line,) = [l for l in Path(f"/proc/{process.pid}/status").read_text().splitlines() if l.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])

class Watch(Observer):
    steers = True  # so that the run waits

    def record(self, record):
        if record["round"] == 2:
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            maps = [place for process in processes for place in process.memory_maps() if "/plasma" in place.path]
            found["shared"] = sum(place.pss for place in maps)
            found["private"] = max(map(anonymous, processes))
            found["file"] = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())

asked = json.loads(sys.argv[2])
model = run(experiment(asked), folder, [Watch()]).model
found["trained"] = sum(value.nbytes for name, value in model.items() if "lora" in name)
here = experiment({**asked, "checkpoint": {"every": 0}, "engine": {**asked["engine"], "backend": "local"}})
given = RunSpec.of("id", here, initial_model=model)
found["run"] = len(pickle.dumps(given.without_frozen()))
with driver_here(here) as driver:
    update = driver.planner.update(1, driver.plan_state, driver.visits, lambda *_: np.zeros(0))
    found["clients"] = sum(len(task.clients) for task in update.tasks)
    model = tree_leaves(driver.method.broadcast(driver.server))
    found["task"] = max(len(pickle.dumps((task, model))) for task in update.tasks)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """(the folder of a Llama of random numbers, the bytes of its tensors, those of the largest)."""
    return made(tmp_path_factory.mktemp("base"), WIDTH, LAYERS)


def made(folder: Path, width: int, layers: int) -> tuple[Path, int, int]:
    """The same, of another size."""
    from fedfleet.workloads.models.pretrained import transformers

    config = transformers().LlamaConfig(
        vocab_size=97, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=32, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        network = transformers().AutoModelForCausalLM.from_config(config)
        network.save_pretrained(folder)
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    sizes = [value.nbytes for value in network.parameters()]
    return folder, sum(sizes), max(sizes)


def settings(folder: Path, **engine: object) -> dict[str, Any]:
    return {
        "workload": {
            "name": "characters",
            "path": str(folder / "text.txt"),
            "length": 16,
            "model": {"name": "pretrained", "folder": str(folder)},
            "adapter": {"name": "lora", "rank": 2},
        },
        "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}},
        "federation": {"clients": 50, "cohort": 2, "rounds": 1, "local": {"steps": 1, "batch": 2}},
        "engine": engine,
        "evaluate": {"every": 0},
        "tracking": {"uri": "none", "model": False},
    }


def peak(folder: Path, measured: str, **model: object) -> tuple[int, int]:
    """(the bytes by which the memory of a process grows at most, how many tensors it found). measured: what it does.
    model: another one than the Llama of the folder."""
    code, asked = PEAK.replace("{measured}", measured), settings(folder, backend="local")
    asked["workload"] = {**asked["workload"], **({"model": model} if model else {})}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    grown, count = json.loads(done.stdout.splitlines()[-1])
    return grown, count


def test_a_base_is_in_memory_once(base: tuple[Path, int, int]):
    folder, size, largest = base
    grown, count = peak(folder, "found = run_spec.frozen")
    assert count == 9 * LAYERS + 3
    assert 0.9 * size < grown < size + 2 * largest + SLACK


def test_the_digest_of_a_base_needs_no_more_than_one_tensor(base: tuple[Path, int, int]):
    folder, size, _ = base
    grown, count = peak(folder, "found = run_spec.frozen_facts['tensors']")
    assert count == 9 * LAYERS + 3
    assert grown < 0.25 * size


def test_the_digest_of_a_run_s_own_model_as_a_base_needs_no_more_than_one_tensor(tmp_path: Path):
    """Of `gpt` with the file of another run, which is no Llama's folder."""
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    sizes = {"width": WIDTH, "depth": LAYERS, "heads": 8}
    with torch.random.fork_rng():
        network = Gpt(**sizes).build((16,), 97)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    size = sum(value.nbytes for value in network.parameters())
    weights = str(tmp_path / "model.safetensors")
    grown, count = peak(tmp_path, "found = run_spec.frozen_facts['tensors']", name="gpt", weights=weights, **sizes)
    assert count == 8 * LAYERS + 3
    assert grown < 0.25 * size


def test_the_driver_reads_a_base_into_shared_memory(base: tuple[Path, int, int], ray_here: None):
    """What this process has had at most is the base in shared memory, which counts as its own, and some tensors."""
    from fedfleet.engine.backends.ray.arrow_columns import put, shared
    from fedfleet.engine.config.schema import experiment
    from fedfleet.engine.run_spec import RunSpec

    folder, size, largest = base
    run_spec = RunSpec.of("id", experiment(settings(folder, backend="ray")))
    lazy = run_spec.frozen_one_by_one
    shared(put({"warm": lazy["lm_head.weight"]}))
    Path("/proc/self/clear_refs").write_text("5")
    before, private = status("VmRSS"), status("RssAnon")
    found = shared(put(lazy))
    assert status("VmHWM") - before < size + 2 * largest + SLACK
    assert status("RssAnon") - private < 2 * largest + SLACK
    assert all(torch.equal(value, lazy[name]) for name, value in found.items())
    assert sum(value.nbytes for value in found.values()) > 0.99 * size


def test_a_run_of_fifty_clients_has_a_base_of_200_mb_once(base: tuple[Path, int, int], tmp_path: Path):
    """On two workers, each of which trains with it: it is in Ray's shared memory once, and in no file before the end,
    when the model is written with all its tensors. What a worker gets at its start, and for a task with the model that
    is broadcast, has the trained tensors alone.

    TOLERANCE: 1 MiB of shared memory for the last pages of 111 tensors, of 4 kB each, and for the texts. Private memory
    is that of a run with a base of 0.6 MB, and half of the large base for what is computed with wider layers.
    """
    folder, size, _ = base
    small, *_ = made(tmp_path / "base", 64, 2)
    large, little = (measured(path, tmp_path / f"run-{path.name}") for path in (folder, small))
    assert size > 2e8
    assert size <= large["shared"] < size + (1 << 20)
    assert large["private"] - little["private"] < size / 2
    assert large["file"] < 1e6
    assert large["clients"] == 50
    assert max(large["run"], large["task"]) < large["trained"] + 1e5


def measured(base: Path, out: Path) -> dict[str, int]:
    """What SHARED has found of a run with the base in this folder, in bytes. out: the folder of the run."""
    asked = settings(base, backend="ray", workers=2, cpus=0.5, block=1, kernels="torch")
    plan = {"clients": 50, "cohort": 50, "rounds": 2, "local": {"steps": 1, "batch": 1}}
    asked = {**asked, "federation": plan, "checkpoint": {"every": 1}}
    done = subprocess.run([sys.executable, "-c", SHARED, str(out), json.dumps(asked)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def status(name: str) -> int:
    """A size in the status of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
